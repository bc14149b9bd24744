"""Is my step credit unbiased? Expected gradients through the trainer's advantages, against the exact ones.

Each case of `trl-drgrpo check --credit` enumerates small policies: all trajectories, all groups of two and of three
rows. The advantages are those of a real `DrGRPOTrainer`; weighted by the groups' probabilities they make the gradient
that training follows on average. It is the gradient of the expected reward to rounding, or the credit is biased. A
further line of the table is a [`CreditCase`]: anything that yields expected and exact gradients.

Constructions from the literature are controls. They must differ from the exact gradient even after the best rescaling:
no learning rate makes up for the difference.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch

from trl_drgrpo.check.enumerated_groups import (
    ForkedCredit,
    Judge,
    TrainerCredit,
    behind_a_bad_step,
    chosen_prompts,
    compare_forked,
    good_steps,
    only_failures,
    over_all_leaves,
    retried_until_mixed,
    seen_steps,
    trained_in_one_leaf,
)
from trl_drgrpo.check.parity import CONTROL_FLOOR
from trl_drgrpo.check.tabular_policies import (
    BAD,
    Credit,
    Gradients,
    Objective,
    SmallPolicy,
    Trajectory,
    compare,
    if_scorable,
    lowest,
    outcome,
    published_credit,
    reasoning,
    same_turn_z_score,
    shared_states,
    state_mean,
    state_z_score,
    stop_or_go,
    total,
    two_turns,
    until_a_mistake,
    worst_to_go,
)
from trl_drgrpo.host_proof.recording import relative_difference


@dataclass(frozen=True)
class CreditCase:
    """One line of the table.

    Args:
        environment (`str`): Name of the enumerated environment.
        credit (`str`): Name of the credit that its rows get.
        gradients (`Callable`): Enumerates: expected and exact gradient, once per policy and group size.
        control (`bool`): A construction that must differ.
    """

    environment: str
    credit: str
    gradients: Callable[[], Iterable[Gradients]]
    control: bool = False


def credit_cases() -> list[CreditCase]:
    """Return the lines of the table."""
    of_rows = (_stop_or_go, _outcome, _truncated, _value_baseline, _two_turns, _shared_states)
    environments = (*of_rows, _forks, _unscorable, _prompts)
    return [case for environment in environments for case in environment()]


def _stop_or_go() -> Iterator[CreditCase]:
    policies = [stop_or_go(0.2), stop_or_go(0.8)]
    merged = [policy.map(Trajectory.with_eos_in_last_step) for policy in policies]
    at_once = [stop_or_go(0.2, at_once=True), stop_or_go(0.8, at_once=True)]
    to_go = TrainerCredit()
    alone = TrainerCredit(step_baseline="none")
    increments = TrainerCredit(step_credit="min_increments")
    line = partial(_line, "stop or go")
    yield line("to_go", policies, to_go)
    yield line("to_go, rows may be EOS alone", at_once, to_go)
    yield line("to_go, an EOS alone has no score", at_once, TrainerCredit(seen_steps))
    yield line("none", policies, alone)
    yield line("min_increments: the worst step", policies, increments, lowest)
    yield line("min_increments, rows may be EOS alone", at_once, increments, lowest)
    yield line("none, EOS paid with the last step", merged, alone, control=True)
    yield line("immediate", policies, TrainerCredit(step_credit="immediate"), control=True)
    for baseline, name in (
        ("deepseekmath", "DeepSeekMath, pooled mean"),
        ("pooled_others", "pooled mean of the others"),
        ("per_completion", "mean of the rows' means"),
        ("same_index", "mean of the same step"),
    ):
        yield line(name, policies, TrainerCredit(step_baseline=baseline), control=True)
    z_score = TrainerCredit(step_baseline="deepseekmath", deepseekmath_step_std=True)
    yield line("DeepSeekMath, z-score per step", policies, z_score, control=True)
    yield line(
        "min_to_go (PURE): the worst step", merged, partial(published_credit, worst_to_go), lowest, control=True
    )


def _outcome() -> Iterator[CreditCase]:
    line = partial(_line, "reasoning, outcome")
    yield line("leave_one_out", [reasoning()], TrainerCredit(None, advantage_baseline="leave_one_out"), outcome)
    mean = TrainerCredit(None, advantage_baseline="group_mean")
    yield line("group_mean, times G/(G-1)", [reasoning()], mean, outcome, share=_with_own_row)
    both = TrainerCredit(advantage_baseline="leave_one_out", outcome_weight=0.5, process_weight=0.25)
    yield line("leave_one_out and to_go", [reasoning()], both, lambda row: 0.5 * outcome(row) + 0.25 * total(row))


def _truncated() -> Iterator[CreditCase]:
    """Mask truncated rows. Their group's mean keeps them, so being cut off is worth the mean reward."""
    policy = reasoning()
    chance = 0.25
    short = reasoning(max_steps=2)
    at_times = short.at_times_unscorable(chance)
    masked = TrainerCredit(None, advantage_baseline="leave_one_out", mask_truncated_completions=True)
    line = partial(_line, "truncated rows masked")
    yield line("outcome: E[(1-t) r + t J]", [policy], masked, if_complete(outcome, policy))
    scorable = if_scorable(if_complete(outcome, short))
    yield line(
        "outcome, unscorable by chance",
        [at_times],
        masked,
        scorable,
        share=lambda group_size: 1 - chance ** (group_size - 1),
    )
    yield line("outcome: E[r]", [policy], masked, outcome, control=True)
    # A trainer refuses the mask beside step rewards, so these rows are masked behind it. Whether a row is cut off
    # is decided behind a step, and the mask multiplies the credit of that step.
    summed = TrainerCredit(outcome_weight=0.0)
    worst = TrainerCredit(outcome_weight=0.0, step_credit="min_increments")
    fitted = TrainerCredit(random_value, fitted=0.75, process_role="baseline", advantage_baseline="leave_one_out")
    yield line("to_go", [policy], without_truncated(summed), if_complete(total, policy), control=True)
    yield line("min_increments", [policy], without_truncated(worst), if_complete(lowest, policy), control=True)
    name = "V of the text so far as baseline"
    objective = if_complete(outcome, policy)
    yield line(name, [policy], without_truncated(fitted), objective, control=True, prompts=1, group_sizes=(2,))


def if_complete(objective: Objective, policy: SmallPolicy) -> Objective:
    """Return the objective, its mean under the policy (a constant) for a truncated row."""
    chances = policy.probabilities().tolist()
    mean = sum(chance * objective(row) for chance, row in zip(chances, policy.rows, strict=True))
    return lambda row: objective(row) if row.closing else mean


def without_truncated(credit: Credit) -> Credit:
    """Return the same credit without a gradient in truncated rows."""

    def of_complete_rows(rows: Sequence[Trajectory], num_generations: int) -> torch.Tensor:
        is_complete = torch.tensor([[row.closing] for row in rows])
        return credit(rows, num_generations) * is_complete

    return of_complete_rows


def _value_baseline() -> Iterator[CreditCase]:
    """A process reward model as a baseline: its expected gradient is 0 if its scores do not read later text."""
    policy = reasoning(max_steps=2)  # 6 rows, and so 6 ** 4 batches of two groups of two
    values = {"exact": exact_value(policy), "random": random_value, "adversarial": adversarial_value}
    line = partial(_line, "PRM as baseline")
    baseline = partial(TrainerCredit, process_role="baseline", advantage_baseline="leave_one_out")
    for name, value in values.items():
        # Fitted to earlier batches, c is a constant for this one.
        yield line(f"V {name}, c of earlier batches", [policy], baseline(value, fitted=0.75), outcome, prompts=1)
    fitted_here = baseline(adversarial_value)
    yield line("V adversarial, c of the other group", [policy], fitted_here, outcome, group_sizes=(2,), prompts=2)
    mean = baseline(adversarial_value, fitted=0.75, advantage_baseline="group_mean")
    yield line("V adversarial, group_mean, times G/(G-1)", [policy], mean, outcome, share=_with_own_row, prompts=1)
    yield line("V of later text", [policy], baseline(hindsight, fitted=0.75), outcome, control=True, prompts=1)
    for name, value in (("of the text so far", random_value), ("of later text", hindsight)):
        alone = TrainerCredit(value, outcome_weight=0.0)
        yield line(f"scores {name}, paid alone", [policy], alone, paid(value), control=value is hindsight)
    for name, value in values.items():
        yield line(f"V {name}, paid as a reward", [policy], TrainerCredit(value), outcome, control=True)


def exact_value(policy: SmallPolicy) -> Judge:
    """Return a judge of the expected outcome after each step."""
    mass: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row, probability in zip(policy.rows, policy.probabilities().tolist(), strict=True):
        for text in accumulate(str(row.text).splitlines(keepends=True)):
            mass[text][0] += probability * row.outcome
            mass[text][1] += probability
    return lambda steps: [mass[text][0] / mass[text][1] for text in accumulate(steps)]


def random_value(steps: Sequence[str]) -> list[float]:
    """Noise, the same for the same prefix."""
    return [Random(text).uniform(-4, 4) for text in accumulate(steps)]


def adversarial_value(steps: Sequence[str]) -> list[float]:
    """A judge that prefers bad steps, and length above all."""
    return [8.0 * (k + 1) - 2.0 * good for k, good in enumerate(good_steps(steps))]


def hindsight(steps: Sequence[str]) -> list[float]:
    """The outcome for every step: a judge that was sent the whole solution."""
    return [good_steps(steps)[-1] for _ in steps]


def paid(judge: Judge) -> Objective:
    """Objective: the sum of a judge's scores."""
    return lambda row: sum(judge(str(row.text).splitlines(keepends=True)))  # type: ignore[arg-type]


def _with_own_row(group_size: int) -> float:
    return (group_size - 1) / group_size


def _two_turns() -> Iterator[CreditCase]:
    line = partial(_line, "two turns", policies=[two_turns()])
    yield line("to_go", estimator=TrainerCredit(step_separator="turn"))
    yield line("z-score at the same turn", estimator=partial(published_credit, same_turn_z_score), control=True)


def _shared_states() -> Iterator[CreditCase]:
    line = partial(_line, "shared states", policies=[shared_states()])
    yield line("to_go with state keys", estimator=TrainerCredit(step_separator="turn"))
    yield line("GiGPO's step mean: own row counted", estimator=partial(published_credit, state_mean), control=True)
    yield line("GiGPO's step z-score", estimator=partial(published_credit, state_z_score), control=True)


def _forks() -> Iterator[CreditCase]:
    """Two parents, cut behind a step: every tree is a parent with the branches that go on from its cuts."""
    policy = reasoning(max_steps=2)
    at_once = stop_or_go(0.2, at_once=True, max_steps=2)
    deep = until_a_mistake()
    rewarded = TrainerCredit(None)
    to_go = TrainerCredit(outcome_weight=0.0, step_credit="return_to_go")
    increments = TrainerCredit(outcome_weight=0.0, step_credit="min_increments")
    both = TrainerCredit(outcome_weight=0.5, process_weight=0.25)
    leave_one_out = TrainerCredit(None, advantage_baseline="leave_one_out")

    def line(
        name: str,
        policy: SmallPolicy,
        credit: ForkedCredit,
        objective: Objective = outcome,
        control: bool = False,
        **options: Any,
    ) -> CreditCase:
        return CreditCase("forks", name, partial(compare_forked, policy, credit, objective, **options), control)

    yield line("outcome", policy, rewarded)
    yield line("outcome, three branches", policy, rewarded, branches=3)
    yield line("outcome, cut behind the first bad step", policy, rewarded, rule=behind_a_bad_step)
    yield line("outcome, cut twice", deep, rewarded, depth=2)
    yield line("to_go", policy, to_go, total)
    yield line("to_go, rows may be EOS alone", at_once, to_go, total)
    yield line("min_increments: the worst step", policy, increments, lowest)
    yield line("min_increments, cut twice", deep, increments, lowest, depth=2)
    yield line("outcome and to_go", policy, both, lambda row: 0.5 * outcome(row) + 0.25 * total(row))
    yield line("mean over all leaves", policy, over_all_leaves(rewarded), control=True)
    yield line("mean over the other leaves", policy, over_all_leaves(leave_one_out), control=True)
    yield line("to_go over all leaves", policy, over_all_leaves(to_go), total, control=True)
    yield line("only what failed is cut", policy, rewarded, rule=only_failures, control=True)
    yield line("shared tokens weigh 1 of G", policy, trained_in_one_leaf(rewarded), control=True)


def _unscorable() -> Iterator[CreditCase]:
    """Rows without an outcome: by chance, or because of what they wrote."""
    chance = 0.25
    short = reasoning(max_steps=2).at_times_unscorable(chance)
    turns = shared_states().at_times_unscorable(chance)
    alone = TrainerCredit(None, advantage_baseline="leave_one_out")
    fitted = TrainerCredit(adversarial_value, fitted=0.75, process_role="baseline", advantage_baseline="leave_one_out")
    both = TrainerCredit(advantage_baseline="leave_one_out", outcome_weight=0.5, process_weight=0.25)
    reward = if_scorable(outcome)
    steps = if_scorable(total)
    # A row whose group has no other scorable one has no baseline, and no gradient.
    line = partial(_line, "unscorable by chance", share=lambda group_size: 1 - chance ** (group_size - 1))
    yield line("leave_one_out", [short], alone, reward)
    yield line("V adversarial as baseline", [short], fitted, reward, group_sizes=(3,), prompts=1)
    yield line("to_go and leave_one_out", [short], both, lambda row: 0.5 * reward(row) + 0.25 * steps(row))
    yield line("to_go with state keys", [turns], TrainerCredit(step_separator="turn"), steps)
    forked = partial(compare_forked, short, share=lambda group_size: (1 - chance) ** (group_size - 1))
    to_go = TrainerCredit(outcome_weight=0.0)
    yield CreditCase("unscorable by chance", "forks, outcome", partial(forked, TrainerCredit(None), reward))
    yield CreditCase("unscorable by chance", "forks, to_go", partial(forked, to_go, steps))

    def failing(worth: float) -> SmallPolicy:
        """Reasoning in which a first bad step makes the verifier hang."""
        written = reasoning(max_steps=2)
        return written.map(lambda row: replace(row, outcome=worth) if str(row.text).startswith(BAD) else row)

    line = partial(_line, "a failing verifier")
    yield line("failures paid the lowest reward", [failing(0.0)], alone, outcome)
    yield line("failures left out", [failing(math.nan)], alone, reward, control=True)


def _prompts() -> Iterator[CreditCase]:
    """The choice of the prompts that train, and their weights."""
    wrong = (0.9, 0.5, 0.02)  # nothing like the pass rates
    curriculum = partial(chosen_prompts, estimates=wrong)
    for name, gradients, control in (
        ("dynamic sampling", chosen_prompts, False),
        ("curriculum, wrong estimates", partial(curriculum, dynamic=False), False),
        ("both", curriculum, False),
        ("DAPO, mean over live groups", partial(chosen_prompts, mean_over_live=True), True),
        ("retry a prompt until it is mixed", retried_until_mixed, True),
        ("curriculum without inverse weights", partial(curriculum, weighted=False), True),
    ):
        yield CreditCase("three prompts", name, gradients, control)


def _line(
    environment: str,
    credit: str,
    policies: list[SmallPolicy],
    estimator: Credit,
    objective: Objective = total,
    *,
    control: bool = False,
    **options: Any,
) -> CreditCase:
    return CreditCase(environment, credit, partial(compare, policies, estimator, objective, **options), control)


TOLERANCE = 1e-12  # relative, float64: four orders above the differences seen


@dataclass(frozen=True)
class CreditResult:
    """Result of a case.

    Args:
        environment, credit (`str`), control (`bool`): Of the case.
        difference (`float`): `|g - exact| / |exact|`, the largest of all policies and group sizes. For a control the
            smallest, each after the best rescaling of g: 1 where no positive multiple comes closer than 0 does.
        passed (`bool`): Equal to tolerance; for a control, different.
    """

    environment: str
    credit: str
    control: bool
    difference: float
    passed: bool


def run_credit_case(case: CreditCase) -> CreditResult:
    """Enumerate one case and compare."""
    if case.control:
        difference = min(_difference_at_best(*pair) for pair in case.gradients())
        passed = CONTROL_FLOOR < difference < math.inf
    else:
        difference = max(relative_difference(*pair) for pair in case.gradients())
        passed = difference <= TOLERANCE
    return CreditResult(case.environment, case.credit, case.control, difference, passed)


def _difference_at_best(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    """The difference of the positive multiple of g that comes closest."""
    scale = 0.0
    along = (gradient @ exact).item()
    if along > 0:
        scale = along / (gradient @ gradient).item()
    return relative_difference(gradient * scale, exact)
