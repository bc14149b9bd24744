"""The heart: rewards -> advantages -> loss inside `DrGRPOTrainer`.

One run of one step is shared. Batches given by hand then go through the hooks of its trainer, as `host.py` calls them.
"""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import oracles
import pytest
import torch
from runs import Keeping, short_run, train
from sampling_correction import BOUND, SAMPLING_CORRECTIONS, Mismatched, modeled

from trl_drgrpo import DrGRPOTrainer, dr_grpo_loss
from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.features.diagnostics.statistics import QUARTERS
from trl_drgrpo.objective.advantages import RunningRewardScale
from trl_drgrpo.objective.step_choices import STEP_BASELINES
from trl_drgrpo.objective.value_baseline import ValueBaseline, value_differences
from trl_drgrpo.process_rewards.step_scorer import StepScorer
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.upstream.batches import ScoredBatch
from trl_drgrpo.upstream.private_state import swapped

NAN = float("nan")
WIDTH = 12


class Spy(Keeping, DrGRPOTrainer):
    """Keeps what goes to TRL's loss, too."""

    handed = ()

    def loss_constants(self, inputs):
        constants = super().loss_constants(inputs)
        self.handed = [*self.handed, (inputs, constants)]
        return constants


def first(completions, **kwargs):
    return [1.0, 0.0, None, float("nan"), 1.0, 0.0, 0.0, 0.0]


def second(completions, **kwargs):
    return [None, 0.25, None, None, 0.0, 1.0, None, 0.0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prompts, tokenizer, saved_model):
    """Two rewards, KL that warms up, and the table of completions; one step in two micro-batches of four rows."""
    folder = tmp_path_factory.mktemp("credit")
    settings = {
        **short_run(folder),
        "max_steps": 1,
        "beta": 0.1,
        "beta_warmup_steps": 4,
        "loss_normalizer": 64,
        "advantage_baseline": "leave_one_out",  # so that the table of TRL would be another one
        "reward_weights": [1.0, 4.0],
        "log_completions": True,
        "num_completions_to_print": 0,
        "run_log": False,
    }
    trainer = train(Spy, settings, prompts, tokenizer, [first, second], saved_model)
    trainer.run = SimpleNamespace(seen=trainer.rollouts, credited=trainer.credited, handed=trainer.handed)
    return trainer


@pytest.fixture
def credit(trained):
    """Advantages `(b,)` or `(b, T)` of rewards given by hand, under fields of the configuration."""

    def credit(rewards, tool_mask=None, steps=None, ratio=None, **fields):
        rows = len(rewards)
        rewards = torch.tensor([[NAN if r is None else r for r in row] for row in rewards])  # (B, F)
        ids = [[65 + (i + t) % 20 for t in range(WIDTH)] for i in range(rows)]
        texts = [""] * rows
        rollouts = {"completion_ids": torch.tensor(ids), "completion_mask": torch.ones(rows, WIDTH, dtype=torch.long)}
        rollouts["completion_mask"][-1, 8:] = 0  # one row is shorter
        if tool_mask is not None:
            rollouts["tool_mask"] = tool_mask
        if ratio is not None:
            rollouts["importance_sampling_ratio"] = ratio
        lengths = rollouts["completion_mask"].sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        with contextlib.ExitStack() as changed:
            changed.enter_context(swapped(trained.args, **{"advantage_baseline": "group_mean", **fields}))
            if steps is not None:
                scorer = StepScorer([lambda **call: steps], step_segmenter("tokens:4"), None, "raise")
                changed.enter_context(swapped(trained, step_scorer=scorer))
            batch = ScoredBatch(rewards, [{"prompt": ""}] * rows, texts, texts, ids)
            trained.on_rewards(batch)
            return trained.on_rollouts(batch, rollouts)["advantages"]

    return credit


def column(values):
    """Rewards of the first function alone."""
    return [[value, None] for value in values]


# Rewards become advantages


def test_rewards_of_a_run_reach_its_advantages_with_their_weights(trained):
    # Weighted sums over the functions that applied: 1, 1 and two that nobody scored, mean 1; 1, 4, 0, 0,
    # less the mean of the others.
    assert trained.run.credited.rewards.nan_to_num(nan=-1.0).tolist() == [1.0, 1.0, -1.0, -1.0, 1.0, 4.0, 0.0, 0.0]
    expected = [0.0, 0.0, 0.0, 0.0, -1 / 3, 11 / 3, -5 / 3, -5 / 3]
    assert trained.run.seen["advantages"].tolist() == pytest.approx(expected)
    assert trained.state.log_history[0]["reward"] == pytest.approx(7 / 6)


def test_the_table_of_completions_shows_these_advantages(trained):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet(next(Path(trained.args.output_dir).glob("completions/*.parquet")))
    assert table["advantage"].tolist() == trained.run.credited.advantages.tolist()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_advantages_are_those_of_the_oracle(baseline, credit):
    rewards = [0.5, 2.0, None, -1.0, 0.7, 0.7, 0.7, 0.7]
    expected = oracles.group_advantages(rewards, 4, baseline)
    assert credit(column(rewards), advantage_baseline=baseline).tolist() == pytest.approx(expected)


def test_the_running_scale_is_of_whole_earlier_batches_of_training(trained, credit):
    rewards = [3.0, 0.0, 1.0, 5.0, 2.0, 2.0, 0.0, 9.0]
    rounds = [rewards, [10.0 * reward for reward in rewards]]
    plain = torch.stack([credit(column(each)) for each in rounds])
    std = torch.tensor(rounds).std().item()  # of a batch's two rounds

    def batch():
        with trained.making_batch():
            return torch.stack([credit(column(each)) for each in rounds])

    logs, scale = {}, RunningRewardScale()
    with swapped(trained.earlier, reward_scale=scale), swapped(trained.args, scale_by_running_std=True):
        torch.testing.assert_close(batch(), plain)  # the first: by 1
        trained.add_to_log(logs)
        assert logs["drgrpo/reward_scale"] == pytest.approx(std)
        trained.model.eval()
        try:
            torch.testing.assert_close(batch() * std, plain)
        finally:
            trained.model.train()
        assert scale.count == 16
        torch.testing.assert_close(batch() * std, plain)  # both rounds alike
        assert scale.count == 32


@pytest.mark.parametrize("value", [1e39, -1e39])
def test_an_infinite_reward_is_named(value, credit):
    with pytest.raises(RewardError, match="reward function 'second': got -?inf in float32 for row 1 of the batch"):
        credit([[0.0, 0.0], [0.0, value], [1.0, 0.0], [0.0, 1.0]])


def test_an_infinite_reward_is_unscorable_for_those_who_opted_in(credit, caplog):
    advantages = credit(column([1e39, 1.0, 0.0, 2.0]), on_reward_error="unscorable")
    assert advantages.tolist() == [0.0, 0.0, -1.0, 1.0]
    assert "values beyond float32 count as None" in caplog.text


def test_an_infinite_weighted_sum_is_named(credit):
    with pytest.raises(RewardError, match="weighted sum of the rewards: got inf"):
        credit([[0.0, 3e38]] * 4)


# With step rewards

STEPS = [[1.0, 0.0, 2.0], [0.0, None, 1.0], [2.0, 2.0, 0.0], [1.0, 3.0]]  # the last row has two steps of four tokens
ENDS = [[3, 7, 11]] * 3 + [[3, 7]]
MASK = [[1] * WIDTH] * 3 + [[1] * 8 + [0] * 4]


@pytest.mark.parametrize(
    ("rule", "baseline"),
    [
        *[(c, b) for c in ("return_to_go", "immediate") for b in STEP_BASELINES],
        ("min_increments", "to_go"),
    ],
)
def test_step_rewards_become_the_advantages_of_the_definition(rule, baseline, credit):
    expected = oracles.step_token_advantages(STEPS, ENDS, MASK, 4, rule, baseline)
    assert any(value for row in expected for value in row)
    fields = {"step_credit": rule, "step_baseline": baseline}
    advantages = credit(column([0.0] * 4), steps=STEPS, **fields)
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=0)


def test_outcome_and_process_are_added_with_their_weights(credit):
    rewards = [3.0, 0.0, 1.0, 0.0]
    process = credit(column([0.0] * 4), steps=STEPS)
    both = credit(column(rewards), steps=STEPS, outcome_weight=0.5, process_weight=2.0)
    expected = (0.5 * credit(column(rewards)).unsqueeze(1) + 2.0 * process) * torch.tensor(MASK)
    torch.testing.assert_close(both, expected)
    assert both[:3, -1].abs().min() > 0


def test_a_row_that_cannot_be_judged_is_in_nobodys_step_baseline(trained, credit):
    """Without an outcome, or, where there are step rewards alone, without any of these."""
    rest, ends, mask = ([rows[0], *rows[2:]] for rows in (STEPS, ENDS, MASK))
    expected = oracles.step_token_advantages(rest, ends, mask, 3, "return_to_go", "to_go")
    expected.insert(1, [0.0] * WIDTH)
    seen = [credit(column([0.0, None, 0.0, 0.0]), steps=STEPS)]
    with swapped(trained, reward_func_names=["process_only"]):
        seen.append(credit(column([0.0] * 4), steps=[STEPS[0], [None] * 3, *STEPS[2:]]))
    for advantages in seen:
        torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=0)
    counted = credit(column([0.0] * 4), steps=[STEPS[0], [None] * 3, *STEPS[2:]])  # with an outcome: 0 for each
    assert counted[1].abs().max() > 0


def test_a_row_shows_the_mean_over_its_trained_tokens(trained, credit):
    tool_mask = torch.ones(4, WIDTH, dtype=torch.long)
    tool_mask[:, 4:8] = 0
    steps = [[row[0], row[-1]] for row in STEPS[:3]] + [[1.0]]
    advantages = credit(column([1.0, 0.0, 0.0, 2.0]), tool_mask=tool_mask, steps=steps)
    assert advantages[:, 4:8].abs().sum() == 0
    counts = torch.tensor([8, 8, 8, 4])
    torch.testing.assert_close(trained.credited.row_advantages, advantages.sum(dim=1) / counts)


# Another role of step rewards, and advantages of one's own

VALUES = [[0.9, 0.5, 0.1], [0.2, None, 0.1], [0.4, 0.4, 0.8], [0.3, 0.6, 0.2]]


def test_as_a_baseline_step_scores_are_subtracted_and_never_paid(trained, credit):
    two_groups = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    with swapped(trained.earlier, value_baseline=ValueBaseline()):
        outcome = credit(column(two_groups))
        advantages = credit(column(two_groups), steps=[*VALUES, *VALUES[:3], VALUES[3][:2]], process_role="baseline")
        differences = value_differences(VALUES * 2, 4).flatten(0, 1)
        torch.testing.assert_close(advantages[:, 0], outcome)  # before the first step nothing is known
        slopes = (outcome.unsqueeze(1) - advantages[:, [0, 4, 8]]) / differences[:, :3].float()
        assert slopes[:4, 1].tolist() == pytest.approx([slopes[0, 1].item()] * 4, rel=1e-4)  # one c per group
        assert trained.earlier.value_baseline.squares > 0


def test_an_own_credit_takes_the_place_of_ours(trained, credit):
    seen = []

    def only_the_best(batch):
        seen.append(batch)
        best = batch.rewards.view(-1, batch.num_generations).amax(dim=1, keepdim=True)
        return (batch.rewards.view(-1, batch.num_generations) == best).double().flatten()

    with swapped(trained, advantage_func=only_the_best):
        assert credit(column([1.0, 3.0, 3.0, 0.0])).tolist() == [0.0, 1.0, 1.0, 0.0]
        assert credit(column([1.0, 3.0, 3.0, 0.0]), steps=STEPS).dtype == torch.float32
    assert seen[1].step_rewards == STEPS
    assert seen[1].step_ends == ENDS
    assert seen[1].training
    assert seen[0].own_rows == slice(0, 4)


def test_own_advantages_per_token_are_masked_and_seen_by_the_features(trained, credit):
    with swapped(trained, advantage_func=lambda batch: torch.full(batch.trained_mask.shape, 0.5)):
        advantages = credit(column([1.0, 0.0, 0.0, 0.0]))
    assert advantages.sum(dim=1).tolist() == [6.0, 6.0, 6.0, 4.0]  # the last row is shorter
    assert trained.credited.row_advantages.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda b: None, "advantage_func: got NoneType; expected a tensor of shape"),
        (lambda b: torch.zeros(3), r"advantage_func: got shape \(3,\); expected shape \(4,\) for the rows"),
        (lambda b: torch.zeros(4, 5), r"advantage_func: got shape \(4, 5\)"),
        (lambda b: torch.tensor([0.0, NAN, 0, 0]), "advantage_func: got nan for row 1; expected finite numbers"),
        (lambda b: torch.full((4, WIDTH), NAN), r"advantage_func: got nan for row 0, token 0 \(step 0\)"),
        (lambda b: b.rewards / b.nothing, "advantage_func: got AttributeError: .*nothing"),
    ],
)
def test_advantages_that_cannot_be_are_named(given, message, trained, credit):
    with swapped(trained, advantage_func=given), pytest.raises(RewardError, match=f"^{message}"):
        credit(column([1.0, 0.0, 0.0, 0.0]), steps=STEPS)


# Advantages become a loss


def test_the_loss_gets_the_constant_l_and_the_beta_that_is_due(trained):
    # L = 64 over the rows that a stock micro-batch would have, beta 0.1 * (0 + 1) / 4 in the first step
    assert len(trained.run.handed) == 2
    for inputs, constants in trained.run.handed:
        rows = len(inputs["completion_ids"])
        assert constants == {"max_completion_length": pytest.approx(64 * 4 / rows), "beta": pytest.approx(0.025)}


def test_beta_warms_up_linearly_and_is_logged(trained):
    logged = []
    for step in range(1, 7):  # finished steps; TRL logs after each
        with swapped(trained.state, global_step=step):
            logs = {}
            trained.add_to_log(logs)
            logged.append(logs["drgrpo/beta"])
            assert trained.loss_constants({})["beta"] == pytest.approx(min(0.1, 0.025 * (step + 1)))
    assert logged == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])  # never 0 while beta > 0
    assert trained.state.log_history[0]["drgrpo/beta"] == pytest.approx(0.025)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_of_a_micro_batch_is_that_of_the_specification_and_the_oracle(per_token, trained):
    inputs = dict(trained.run.seen)
    logps, mask, ref = trained.completion_log_probs(inputs), inputs["completion_mask"], inputs["ref_per_token_logps"]
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(0))
    old = logps + 0.4 * noise  # ratios on both sides of the clip range
    ref = ref + 0.4 * noise.flip(0)
    advantages = inputs["advantages"]
    if per_token:
        advantages = advantages.unsqueeze(1) * torch.linspace(-1.0, 1.0, logps.size(1))
    inputs |= {"old_per_token_logps": old, "advantages": advantages, "ref_per_token_logps": ref}
    with swapped(trained.state, global_step=0):
        loss = trained.compute_loss(trained.model, inputs).item()
    # The trainer averages two accumulated micro-batches.
    specified = dr_grpo_loss(logps, old, advantages, mask, 64, beta=0.025, ref_per_token_logps=ref).item() / 2
    nested = [tensor.tolist() for tensor in (logps, old, advantages, mask)]
    expected = oracles.dr_grpo(*nested, 64, 0.2, 0.2, 0.025, ref.tolist())[0] / 2
    assert abs(expected) > 1e-4
    assert loss == pytest.approx(expected, rel=1e-4)
    assert specified == pytest.approx(expected, rel=1e-5)


def test_the_micro_batches_of_a_step_add_up_to_the_loss_of_its_batch(trained):
    inputs = trained.run.seen
    micro_batches = [each for each, _ in trained.run.handed]
    assert sum(len(each["completion_ids"]) for each in micro_batches) == 8
    with swapped(trained.state, global_step=0):
        total = sum(trained.compute_loss(trained.model, each).item() for each in micro_batches)
    logps, ref = trained.completion_log_probs(inputs), inputs["ref_per_token_logps"]
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    expected = dr_grpo_loss(logps, None, advantages, mask, 64, beta=0.025, ref_per_token_logps=ref)
    assert total == pytest.approx(expected.item(), rel=1e-4)


def test_importance_ratios_of_a_generation_engine_multiply_token_losses(trained):
    """What TRL does with vLLM's log-probabilities, here with a ratio given by hand, on (B, T) advantages."""
    advantages = trained.run.seen["advantages"].unsqueeze(1) * trained.run.seen["completion_mask"]
    inputs = {**trained.run.seen, "advantages": advantages}
    ratio = torch.full(advantages.shape, 2.0)
    with swapped(trained, beta=0.0):
        plain = trained.compute_loss(trained.model, inputs).item()
        with swapped(trained, use_vllm=True):
            corrected = trained.compute_loss(trained.model, {**inputs, "importance_sampling_ratio": ratio}).item()
    assert plain != 0.0
    assert corrected == pytest.approx(2 * plain, rel=1e-5)


@pytest.mark.parametrize("per_token", [True, False], ids=["tokens", "rows"])
def test_the_ratios_of_a_generation_engine_are_logged_by_length_and_correctness(per_token, trained, credit):
    """Seven rows of 12 tokens, and one of 8 that is correct; a tool wrote the first two of each."""
    tools = torch.ones(8, WIDTH, dtype=torch.long)
    tools[:, :2] = 0
    ratio = torch.tensor([[1.0], [0.5], [0.5], [0.5], [1.0], [0.0], [0.5], [0.75]])
    long, short = 1.0, 1.0
    if per_token:
        ratio = ratio.repeat(1, WIDTH)
        ratio[:, 2:4] *= 2  # two of the 10 tokens, or of the 6, that are trained on
        ratio[:, :2] = ratio[-1, 8:] = 9.0  # not trained on
        long, short = 12 / 10, 8 / 6
    with swapped(trained.model, training=True), swapped(trained.diagnostics.correctness_rule, threshold=1.0):
        trained.logged_metrics.begin_step()
        credit(column([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]), tool_mask=tools, ratio=ratio)
        logged = {
            name: value for name, value in trained.logged_metrics.of_step().items() if name.startswith("sampling/")
        }
    assert logged == pytest.approx(
        {
            "sampling/weight_q1_mean": 0.75 * short,
            "sampling/weight_q3_mean": 4 / 7 * long,
            "sampling/weight_correct_mean": (2 * long + 0.75 * short) / 3,
            "sampling/weight_incorrect_mean": 2 / 5 * long,
        }
    )


def test_without_a_generation_engine_no_weights_are_logged(trained):
    assert not any(name.startswith("sampling/") for entry in trained.state.log_history for name in entry)


def test_describing_all_this_failed_nowhere(trained):
    assert trained.describing.failures == {}


# TRL's correction for an engine whose probabilities are another's: what it weighs a row, by mode


LENGTHS, SIGMA = (4, 16, 64, 256), 0.14  # T sigma^2 as with 512 to 2048 tokens at sigma = .05 for the last two


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    """Mean weight of a row by its length, for each mode under the same noise: 512 rows of each length."""
    trainer = Mismatched(tmp_path_factory.mktemp("mismatched"), rows=2048, lengths=LENGTHS, sigma=SIGMA)
    weights = {mode: trainer.weights(mode, seed=1) for mode in SAMPLING_CORRECTIONS}
    assert trainer.describing.failures == {}
    return {mode: [logged[name] for name in QUARTERS] for mode, logged in weights.items()}


@pytest.mark.parametrize("mode", SAMPLING_CORRECTIONS)
def test_each_mode_weighs_rows_as_a_lognormal_model_says(mode, weighed):
    expected = [modeled(mode, length, SIGMA) for length in LENGTHS]
    spread = BOUND / 2 / 512**0.5  # of a mean of 512 values between 0 and the bound, at most
    assert weighed[mode] == pytest.approx(expected, abs=0.01 if mode.startswith("token") else 3 * spread)
