"""The table of `trl-drgrpo check --credit`: enumerated environments and the credit of their rows.

A further line is a [`CreditCase`]: anything that yields expected and exact gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

from trl_drgrpo.labs.check.enumeration import (
    Credit,
    Gradients,
    Objective,
    SmallPolicy,
    Trajectory,
    compare,
    lowest,
    outcome,
    total,
)
from trl_drgrpo.labs.check.forked_groups import (
    ForkedCredit,
    behind_a_bad_step,
    compare_forked,
    only_failures,
    over_all_leaves,
    trained_in_one_leaf,
)
from trl_drgrpo.labs.check.published import PublishedCredit, same_turn_z_score, state_mean, state_z_score
from trl_drgrpo.labs.check.sampled_prompts import Sampling, retried_until_mixed
from trl_drgrpo.labs.check.small_policies import reasoning, shared_states, stop_or_go, two_turns, until_a_mistake
from trl_drgrpo.labs.check.trainer_credit import Judge, TrainerCredit, good_steps, seen_steps


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
    """The lines of the table."""
    return [*_stop_or_go(), *_outcome(), *_value_baseline(), *_two_turns(), *_shared_states(), *_forks(), *_prompts()]


def _stop_or_go() -> Iterator[CreditCase]:
    policies = [stop_or_go(0.2), stop_or_go(0.8)]
    merged = [policy.map(Trajectory.with_eos_in_last_step) for policy in policies]
    at_once = [stop_or_go(0.2, at_once=True), stop_or_go(0.8, at_once=True)]
    to_go, alone = TrainerCredit(), TrainerCredit(step_baseline="none")
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
    pure = TrainerCredit(step_credit="min_to_go", step_baseline="deepseekmath")
    yield line("min_to_go (PURE): the worst step", policies, pure, lowest, control=True)


def _outcome() -> Iterator[CreditCase]:
    line = partial(_line, "reasoning, outcome")
    yield line("leave_one_out", [reasoning()], TrainerCredit(None, advantage_baseline="leave_one_out"), outcome)
    mean = TrainerCredit(None, advantage_baseline="group_mean")
    yield line("group_mean, times G/(G-1)", [reasoning()], mean, outcome, shrinks=True)
    both = TrainerCredit(advantage_baseline="leave_one_out", outcome_weight=0.5, process_weight=0.25)
    yield line("leave_one_out and to_go", [reasoning()], both, lambda row: 0.5 * outcome(row) + 0.25 * total(row))


def _value_baseline() -> Iterator[CreditCase]:
    """A process reward model as a baseline: its expected gradient is 0, whatever its scores."""
    policy = reasoning(max_steps=2)  # 6 rows, and so 6 ** 4 batches of two groups of two
    values = {"exact": exact_value(policy), "random": random_value, "adversarial": adversarial_value}
    line = partial(_line, "PRM as baseline")
    fit = partial(TrainerCredit, process_role="baseline", advantage_baseline="leave_one_out")
    for name, value in values.items():
        known = fit(value, fitted=0.75)
        yield line(f"V {name}, c of earlier batches", [policy], known, outcome, prompts=1)
    fitted = fit(adversarial_value)
    yield line("V adversarial, c of the other group", [policy], fitted, outcome, group_sizes=(2,), prompts=2)
    mean = TrainerCredit(adversarial_value, fitted=0.75, process_role="baseline", advantage_baseline="group_mean")
    yield line("V adversarial, group_mean, times G/(G-1)", [policy], mean, outcome, shrinks=True, prompts=1)
    for name, value in values.items():
        yield line(f"V {name}, paid as a reward", [policy], TrainerCredit(value), outcome, control=True)


def exact_value(policy: SmallPolicy) -> Judge:
    """The expected outcome after each step."""
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


def _two_turns() -> Iterator[CreditCase]:
    line = partial(_line, "two turns", policies=[two_turns()])
    yield line("to_go", estimator=TrainerCredit(step_separator="turn"))
    yield line("z-score at the same turn", estimator=PublishedCredit(same_turn_z_score), control=True)


def _shared_states() -> Iterator[CreditCase]:
    line = partial(_line, "shared states", policies=[shared_states()])
    yield line("to_go with state keys", estimator=TrainerCredit(step_separator="turn"))
    yield line("GiGPO's step mean: own row counted", estimator=PublishedCredit(state_mean), control=True)
    yield line("GiGPO's step z-score", estimator=PublishedCredit(state_z_score), control=True)


def _forks() -> Iterator[CreditCase]:
    """Two parents, cut behind a step: every tree is a parent with the branches that go on from its cuts."""
    policy, at_once, deep = reasoning(max_steps=2), stop_or_go(0.2, at_once=True, max_steps=2), until_a_mistake()
    rewarded = TrainerCredit(None)
    to_go, increments = (TrainerCredit(outcome_weight=0.0, step_credit=c) for c in ("return_to_go", "min_increments"))
    both = TrainerCredit(outcome_weight=0.5, process_weight=0.25)
    others = over_all_leaves(TrainerCredit(None, advantage_baseline="leave_one_out"))

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
    yield line("mean over the other leaves", policy, others, control=True)
    yield line("to_go over all leaves", policy, over_all_leaves(to_go), total, control=True)
    yield line("only what failed is cut", policy, rewarded, rule=only_failures, control=True)
    yield line("shared tokens weigh 1 of G", policy, trained_in_one_leaf(rewarded), control=True)


def _prompts() -> Iterator[CreditCase]:
    """The choice of the prompts that train, and their weights."""
    wrong = (0.9, 0.5, 0.02)  # nothing like the pass rates
    curriculum, unweighted = Sampling(dynamic=False, estimates=wrong), Sampling(estimates=wrong, weighted=False)
    for name, gradients, control in (
        ("dynamic sampling", Sampling().compare, False),
        ("curriculum, wrong estimates", curriculum.compare, False),
        ("both", Sampling(estimates=wrong).compare, False),
        ("DAPO, mean over live groups", Sampling(mean_over_live=True).compare, True),
        ("retry a prompt until it is mixed", retried_until_mixed, True),
        ("curriculum without inverse weights", unweighted.compare, True),
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
