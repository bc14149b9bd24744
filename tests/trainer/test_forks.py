"""Groups that fork, in real runs."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import oracles
import pytest
import runs
import torch
from gradient_runs import GEOMETRY, difference
from peft import LoraConfig
from runs import Keeping, assert_same_weights, short_run, step_reward, weights
from tiny import tiny_model

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.features.resume.checkpoints import FEATURES_FILE
from trl_drgrpo.host_proof.recording import build_policy, record
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.upstream.private_state import PrivateState

FORKED = {"forks": 2, "step_separator": ["tokens:1"], "max_steps": 2}  # bytes of characters are put together


class Spy(Keeping, DrGRPOTrainer):
    """Keeps the batches."""


@pytest.fixture
def settings(tmp_path):
    return {**short_run(tmp_path / "run"), **FORKED, "run_log": False}  # all metrics are logged then


@pytest.fixture
def run(train):
    return partial(train, trainer_class=Spy)


def assert_forked(batch, trainer):
    """Leaves of a node are the same up to its cut, which lies behind a step; what they earn is compared among them."""
    ids, forks, depth = batch.scored.completion_ids, batch.forks, trainer.args.fork_depth
    ends = [trainer.forks.segmenter(row, trainer.processing_class).ends for row in ids]
    assert forks.depth == depth
    assert len(forks.cuts) == len(ids)
    for i, cuts in enumerate(forks.cuts):
        for level, cut in enumerate(cuts):
            size = 2 ** (depth - level)
            first = i - i % size
            assert len({tuple(row[:cut]) for row in ids[first : first + size]}) == 1
            assert cut == len(ids[i]) or (cut < len(ids[i]) and cut - 1 in ends[i])
    assert any(cuts[-1] < len(row) for cuts, row in zip(forks.cuts, ids, strict=True))


def expected_advantages(batch, args):
    mask, rewards, size = batch.trained_mask.tolist(), batch.rewards.tolist(), batch.num_generations
    cuts = batch.forks.cuts
    outcome = oracles.forked_token_advantages(rewards, size, 2, cuts, mask)
    if batch.step_rewards is None:
        return torch.tensor(outcome)
    steps = oracles.forked_step_advantages(batch.step_rewards, batch.step_ends, size, 2, cuts, args.step_credit)
    process = [[0.0] * len(row) for row in mask]
    for i, (ends, values) in enumerate(zip(batch.step_ends, steps, strict=True)):
        for k in reversed(range(len(ends))):
            process[i][: ends[k] + 1] = [values[k]] * (ends[k] + 1)
        if any(math.isnan(reward) for reward in rewards[i - i % size : i - i % size + size]):
            process[i] = [0.0] * len(process[i])  # a leaf that nobody could judge silences its group
    return args.outcome_weight * torch.tensor(outcome) + args.process_weight * torch.tensor(process)


VARIANTS = {
    "outcome": {},
    "steps": {"outcome_weight": 0.5, "process_weight": 0.25, "step_reward_funcs": step_reward},
    "the worst step": {"step_credit": "min_increments", "step_reward_funcs": step_reward},
    "cut twice": {"fork_depth": 2, "num_generations": 8},
    "entropy": {"fork_at": "entropy", "fork_threshold": 4.0},
    "doubt": {"fork_at": "doubt", "fork_threshold": 0.5, "step_reward_funcs": step_reward},
    "adapters": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")},
    "two iterations": {"num_iterations": 2},
    "running scale": {"scale_by_running_std": True},
}


RARE = ("the worst step", "adapters", "running scale")


@pytest.mark.parametrize("variant", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in VARIANTS])
def test_every_variant_of_forks_trains(variant, run, tokenizer):
    trainer = run(**VARIANTS[variant])
    before = weights(type("Untrained", (), {"model": tiny_model(tokenizer)}))
    after = weights(trainer)
    if variant != "adapters":
        assert max((after[name] - before[name]).abs().max() for name in before) > 1e-3
    assert len(trainer.credits) == (1 if variant == "two iterations" else 2)
    for batch in trainer.credits:
        assert_forked(batch, trainer)
    newest = 1 if variant == "running scale" else 0  # the first batch divides by 1
    expected = expected_advantages(trainer.credits[newest], trainer.args)
    if variant == "running scale":
        expected = expected / trainer.credits[0].rewards.double().std()
    torch.testing.assert_close(trainer.credits[newest].advantages, expected.float(), atol=1e-5, rtol=0)
    logged = trainer.state.log_history[0]
    assert logged["grad_norm"] > 0
    assert 0 < logged["forks/cut_frac"] <= 1
    assert 0 < logged["forks/cut_position"] < 1
    assert 0.5 < logged["forks/sampled_token_frac"] <= 1
    assert 0 <= logged["forks/live_frac"] <= 1
    assert trainer.describing.failures == {}


def test_batches_are_filled_with_groups_that_fork(run):
    trainer = run(dynamic_sampling=True, curriculum=True, correct_threshold=1.0, max_sampling_rounds=4)
    assert len(trainer.credits) >= 2  # rounds
    assert trainer.forks.batches == len(trainer.credits)
    for batch in trainer.credits:
        assert_forked(batch, trainer)
    assert trainer.state.log_history[0]["sampling/groups_trained"] == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_branches_end_at_their_limits_in_either_loop(dynamic, run):
    """So both loops draw as many random numbers, and go on to sample the same tokens, generation after generation."""
    fields = {"max_steps": 6, "learning_rate": 0.0, "step_separator": ["tokens:2"], "gradient_accumulation_steps": 4}
    fields |= {"dynamic_sampling": True, "max_sampling_rounds": 2} if dynamic else {}
    fast, slow = (run(runs.parity_reward, fast_generation=is_fast, **fields) for is_fast in (True, False))
    ids = [[batch.scored.completion_ids for batch in trainer.credits] for trainer in (fast, slow)]
    assert len(ids[0]) >= 6
    assert ids[0] == ids[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prompts, tokenizer, reward):
    """A run that saves every step and evaluates at its end."""
    folder = tmp_path_factory.mktemp("forks")
    saved = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "max_steps": 5, "fork_depth": 1}
    settings = {**short_run(folder), **FORKED, **saved, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = runs.train(Spy, settings, prompts, tokenizer, reward, eval_dataset=prompts.select(range(4)))
    trainer.weights_at_the_end, trainer.settings = weights(trainer), settings
    return trainer


# the latter in the middle of a batch's second use
@pytest.mark.parametrize("saved", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_resumed_run_ends_like_an_uninterrupted_one(saved, whole, run):
    folder = Path(whole.settings["output_dir"]) / f"checkpoint-{saved}"
    state = json.loads((folder / FEATURES_FILE).read_text())["ForkedRollouts"]
    assert state["batches"] == (saved + 1) // 2
    assert 0 < state["mean_length"] <= 12
    resumed = run(**{**whole.settings, "save_strategy": "no"}, resume=folder)
    assert_same_weights(weights(resumed), whole.weights_at_the_end)
    assert resumed.credits[-1].forks.cuts == next(b for b in reversed(whole.credits) if b.training).forks.cuts
    assert resumed.forks.batches == 3


def test_an_evaluation_does_not_fork(whole):
    before, rounds = len(whole.credits), whole.forks.batches
    metrics = whole.evaluate()
    assert len(whole.credits) > before
    assert all(batch.forks is None for batch in whole.credits[before:])
    assert whole.forks.batches == rounds
    assert not any("forks/" in name for name in metrics)


@pytest.mark.parametrize("use_vllm", [False, True])
def test_the_limit_of_branches_is_that_of_all_processes_where_one_request_serves_them(use_vllm):
    trainer = SimpleNamespace(
        use_vllm=use_vllm,
        vllm_generation=SimpleNamespace(max_completion_length=12),
        generation_config=SimpleNamespace(max_new_tokens=12),
        generation_kwargs={"max_new_tokens": 12, "do_sample": True},
        gathered=lambda own: [*own, 9],
    )

    def limits():
        ours = trainer.generation_config.max_new_tokens, trainer.generation_kwargs["max_new_tokens"]
        return trainer.vllm_generation.max_completion_length, *ours

    with PrivateState.completions_up_to(trainer, 5):
        assert limits() == ((9, 12, 12) if use_vllm else (12, 5, 5))
    assert limits() == (12, 12, 12)
    with PrivateState.completions_up_to(trainer, None):
        assert limits() == (12, 12, 12)


# The gradient, node by node


def gradient_of_nodes(batch, args, at, prompt_ids):
    """`-1/(B L) * sum over nodes of leaves * A * log pi` of each node's tokens, once, in float64."""
    model = build_policy(lora=False)[0]
    model.load_state_dict(at)
    advantages = expected_advantages(batch, args).double()
    ids, cuts, size = batch.scored.completion_ids, batch.forks.cuts, batch.num_generations
    total = torch.zeros((), dtype=torch.float64)
    for level in range(batch.forks.depth + 1):
        leaves = 2 ** (batch.forks.depth - level)
        for first in range(0, len(ids), leaves):
            row = [*prompt_ids[first], *ids[first]]
            log_probs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
            written = log_probs[range(len(row) - 1), row[1:]][len(prompt_ids[first]) - 1 :]
            begin = cuts[first][level - 1] if level else 0
            end = cuts[first][level] if level < batch.forks.depth else len(ids[first])
            total = total - leaves * (advantages[first, begin:end] * written[begin:end]).sum()
    (total / (len(ids) * args.max_completion_length)).backward()
    assert size % leaves == 0
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("depth", "micro_batching"),
    [
        (1, "exact"),
        pytest.param(1, "upstream", marks=pytest.mark.slow),
        pytest.param(2, "exact", marks=pytest.mark.slow),
        (2, "upstream"),
    ],
)
def test_a_shared_token_is_trained_with_the_weight_of_its_leaves(depth, micro_batching):
    spies = []

    class Built(Spy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            spies.append(self)

    settings = {
        **GEOMETRY,
        **FORKED,
        "micro_batching": micro_batching,
        "fork_depth": depth,
        "num_generations": 4 * depth,
        "outcome_weight": 0.5,
    }
    steps = {} if depth == 2 else {"trainer_arguments": {"step_reward_funcs": step_reward}}
    steps_of_run = record(Built, DrGRPOConfig, lora=False, plain_head=True, **settings, **steps).steps
    (trainer,) = spies
    assert len(steps_of_run) == len(trainer.credits) == 2
    for step, batch in zip(steps_of_run, trainer.credits, strict=True):
        prompt_ids = [trainer.processing_class.encode(prompt) for prompt in batch.scored.prompts]
        ours = gradient_of_nodes(batch, trainer.args, step.weights, prompt_ids)
        assert difference([step.gradients] * 2, [ours] * 2) < 1e-6  # advantages are float32


def test_a_segmenter_that_looks_ahead_is_warned_of_once(run, caplog):
    ahead = step_segmenter(r"re:(?s).(?=.[\x20-\x7f])")
    run(step_segmenter=ahead)
    assert caplog.text.count("ends a step depends on the text after it, which slightly biases forks") == 1
