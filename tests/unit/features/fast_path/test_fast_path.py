"""The feature with a trainer that is a namespace: when it stands aside, and the constants of what it has planned."""

from types import SimpleNamespace

import pytest
import torch

from trl_drgrpo.features.fast_path import fast_path
from trl_drgrpo.features.fast_path.decoding import forwards
from trl_drgrpo.features.fast_path.fast_path import FastPath
from trl_drgrpo.features.fast_path.planner import Costs
from trl_drgrpo.upstream.batches import TokenBatch


@pytest.fixture
def trainer():
    """Plans, unless a test says otherwise."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            micro_batching="exact",
            entropy_coef=0.0,
            use_adaptive_entropy=False,
            top_entropy_quantile=1.0,
            torch_compile=False,
            fast_generation=True,
        ),
        beta=0.0,
        aux_loss_enabled=False,
        own_losses=[],
        importance_sampling_level="token",
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, device=torch.device("cpu"), num_processes=1),
        model=SimpleNamespace(config=config, training=True),
        use_vllm=False,
        use_transformers_continuous_batching=False,
        in_lockstep=False,
        score_as_trl=lambda model, tokens: "as TRL",
    )
    trainer.fast_path = FastPath(trainer)
    return trainer


def rope(kind):
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(rope_parameters={"rope_type": kind}))


REASONS = [
    ("args.entropy_coef", 0.1, "the entropy bonus is a mean"),
    ("args.use_adaptive_entropy", True, "the entropy bonus is a mean"),
    ("args.top_entropy_quantile", 0.5, "top_entropy_quantile compares"),
    ("aux_loss_enabled", True, "the load-balancing loss is a mean"),
    ("model.active_peft_config", SimpleNamespace(is_prompt_learning=True), "virtual tokens"),
    ("args.torch_compile", True, "torch.compile would recompile for every shape"),
    ("model.config", rope("dynamic"), "rotary angles depend on the width"),
    ("own_losses", ["_compute_loss"], "SimpleNamespace has its own _compute_loss"),
]


@pytest.mark.parametrize(("place", "value", "reason"), REASONS)
def test_it_stands_aside_where_planning_would_not_be_exact_and_says_why(place, value, reason, trainer, caplog):
    assert trainer.fast_path.plans
    owner = trainer
    *parents, name = place.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)
    assert not trainer.fast_path.plans
    with trainer.fast_path.around_train():
        pass
    assert "micro-batches stay as TRL makes them: " in caplog.text
    assert reason in caplog.text


def test_nothing_is_said_where_it_plans_or_was_not_asked(trainer, caplog):
    with trainer.fast_path.around_train():
        pass
    trainer.args.micro_batching, trainer.args.entropy_coef = "upstream", 0.1
    with trainer.fast_path.around_train():
        pass
    assert not trainer.fast_path.plans
    assert caplog.text == ""


def test_rows_are_left_out_only_where_the_advantage_is_all_that_moves_them(trainer):
    assert trainer.fast_path.skips
    trainer.beta = 0.1
    assert trainer.fast_path.plans
    assert not trainer.fast_path.skips


def test_inputs_it_does_not_know_and_rows_without_a_prompt_stay_with_trl_and_are_said_once(trainer, caplog):
    trainer.gathered = lambda values: values
    known = {"completion_ids": torch.ones(2, 3), "prompt_mask": torch.ones(2, 2)}
    assert trainer.fast_path._can_be_planned([known])
    for _ in range(2):
        assert not trainer.fast_path._can_be_planned([{**known, "pixel_values": torch.ones(1)}])
    said = "Micro-batches with pixel_values are not re-batched: they stay as TRL makes them."
    assert [record.message for record in caplog.records] == [said]
    assert not trainer.fast_path._can_be_planned([{**known, "prompt_mask": torch.tensor([[1, 1], [0, 0]])}])


def test_evaluation_and_images_are_scored_as_trl_does(trainer):
    text, image = SimpleNamespace(is_text_only=True), SimpleNamespace(is_text_only=False)
    assert trainer.fast_path.score_tokens(trainer.model, image) == "as TRL"
    trainer.model.training = False
    assert trainer.fast_path.score_tokens(trainer.model, text) == "as TRL"


def rollouts(completions):
    """Rows with a prompt of two tokens and completions of these lengths, as many per forward as there are rows."""
    mask = torch.zeros(len(completions), 2 + max(completions), dtype=torch.long)
    for row, length in enumerate(completions):
        mask[row, : 2 + length] = 1
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    return TokenBatch(ids, mask, max(completions), batch_size=1)


@pytest.mark.parametrize("others", [[], [7]])
def test_in_lockstep_every_rank_scores_rollouts_in_as_many_forwards(others, trainer, monkeypatch):
    trainer.in_lockstep, trainer.scores_rollouts, trainer.takes_images = True, True, False
    trainer.gathered = lambda values: values + (others if type(values[0]) is int else [True] * len(others))
    trainer.fast_path._costs[id(trainer.model)] = Costs()
    forwards = []

    def score(model, tokens, packs):
        forwards.append(packs)
        return torch.ones(tokens.input_ids.size(0), tokens.completion_width), None, None

    monkeypatch.setattr(trainer.fast_path, "_score_packs", score)
    trainer.fast_path._score_rollouts(trainer.model, rollouts([9, 3, 3]))
    run = [packs for packs in forwards if packs]
    assert sorted(row for packs in run for pack in packs for row in pack) == [0, 1, 2]
    assert len(forwards) == max([len(run), *others])


def test_in_lockstep_one_rank_without_a_prompt_leaves_scoring_to_trl_everywhere(trainer):
    trainer.in_lockstep, trainer.takes_images, trainer.gathered = True, False, lambda values: [*values, False]
    assert trainer.fast_path._score_rollouts(trainer.model, rollouts([9, 3])) == "as TRL"
    trainer.takes_images, trainer.gathered = True, None  # a rank with images would not take part
    assert trainer.fast_path._score_rollouts(trainer.model, rollouts([9, 3])) == "as TRL"


@pytest.mark.parametrize("others", [[None], ["it fails with a block mask"]])
def test_in_lockstep_all_ranks_share_prompts_or_none(others, trainer, monkeypatch, caplog):
    trainer.in_lockstep, trainer.gathered = True, lambda values: values + others
    trainer.accelerator.mixed_precision = "no"
    monkeypatch.setattr(fast_path, "why_not_shared", lambda *arguments: None)
    assert trainer.fast_path._can_share_prompts(trainer.model) is (others == [None])
    assert ("it fails with a block mask" in caplog.text) is (others != [None])


@pytest.mark.parametrize("switch", [None, "args.fast_generation"])
@pytest.mark.parametrize("elsewhere", ["use_vllm", "use_transformers_continuous_batching"])
def test_generation_is_trls_where_something_else_generates(elsewhere, switch, trainer, monkeypatch):
    monkeypatch.setattr(forwards, "returns_forks", lambda model: True)
    setattr(trainer, elsewhere, True)
    trainer.args.fast_generation = switch is None
    trainer.continuous_batching_config = SimpleNamespace(num_blocks=8)
    calls = []
    trainer.model_wrapped = SimpleNamespace(
        generate_batch=lambda inputs, generation_config: calls.append((inputs, generation_config.num_return_sequences))
    )
    with trainer.fast_path.generating():
        config = SimpleNamespace(num_return_sequences=None)
        trainer.model_wrapped.generate_batch([[1, 2]] * 4 + [[3, 4]] * 2, generation_config=config)
    forks = elsewhere != "use_vllm" and switch is None
    assert calls == ([([[1, 2], [1, 2], [3, 4]], 2)] if forks else [([[1, 2]] * 4 + [[3, 4]] * 2, None)])


@pytest.mark.parametrize(("place", "value"), [("in_lockstep", True), ("args.fast_generation", False)])
def test_generation_is_transformers_where_prompts_do_not_run_once(place, value, trainer):
    *path, name = place.split(".")
    setattr(trainer.args if path else trainer, name, value)
    calls = []
    trainer.model_wrapped = SimpleNamespace(generate=lambda **kwargs: calls.append(kwargs))
    with trainer.fast_path.generating():
        trainer.model_wrapped.generate(input_ids=1)
    assert calls == [{"input_ids": 1}]
