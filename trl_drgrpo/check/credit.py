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
    Rows,
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
    return [
        *_stop_or_go(),
        *_outcome(),
        *_truncated(),
        *_value_baseline(),
        *_two_turns(),
        *_shared_states(),
        *_forks(),
        *_unscorable(),
        *_prompts(),
    ]


def _line(
    environment: str,
    policies: list[SmallPolicy],
    name: str,
    credit: Credit,
    objective: Objective = total,
    *,
    control: bool = False,
    **options: Any,
) -> CreditCase:
    # Enumerated when the case runs: the list of cases alone costs nothing.
    gradients = partial(compare, policies, credit, objective, **options)
    return CreditCase(environment, name, gradients, control)


def _stop_or_go() -> Iterator[CreditCase]:
    """Rows that decide after each step whether to write another one: the credit of that decision."""
    policies = [stop_or_go(0.2), stop_or_go(0.8)]
    policies_at_once = [stop_or_go(0.2, at_once=True), stop_or_go(0.8, at_once=True)]
    merged_policies = [policy.map(Trajectory.with_eos_in_last_step) for policy in policies]
    line = partial(_line, "stop or go", policies)
    at_once = partial(_line, "stop or go", policies_at_once)
    merged = partial(_line, "stop or go", merged_policies)
    to_go = TrainerCredit()
    without_baseline = TrainerCredit(step_baseline="none")
    increments = TrainerCredit(step_credit="min_increments")
    yield line("to_go", to_go)
    yield at_once("to_go, rows may be EOS alone", to_go)
    yield at_once("to_go, an EOS alone has no score", TrainerCredit(seen_steps))
    yield line("none", without_baseline)
    yield line("min_increments: the worst step", increments, lowest)
    yield at_once("min_increments, rows may be EOS alone", increments, lowest)
    # The decision to stop earns nothing; in one step with the text before it, it is paid for that text.
    yield merged("none, EOS paid with the last step", without_baseline, control=True)
    # The decision to go on earns the later rewards, which a step's own reward leaves out.
    yield line("immediate", TrainerCredit(step_credit="immediate"), control=True)
    # Published baselines are subtracted once per later step: a row that writes more steps pays more often.
    published_baselines = {
        "deepseekmath": "DeepSeekMath, pooled mean",
        "pooled_others": "pooled mean of the others",
        "per_completion": "mean of the rows' means",
        "same_index": "mean of the same step",
    }
    for baseline, name in published_baselines.items():
        credit = TrainerCredit(step_baseline=baseline)
        yield line(name, credit, control=True)
    z_score = TrainerCredit(step_baseline="deepseekmath", deepseekmath_step_std=True)
    yield line("DeepSeekMath, z-score per step", z_score, control=True)
    pure = partial(published_credit, worst_to_go)
    yield merged("min_to_go (PURE): the worst step", pure, lowest, control=True)


def _outcome() -> Iterator[CreditCase]:
    """Outcome rewards, alone and beside step rewards."""
    line = partial(_line, "reasoning, outcome", [reasoning()])
    yield line("leave_one_out", TrainerCredit(None, advantage_baseline="leave_one_out"), outcome)
    # The group's mean counts the row itself, so the gradient is (G - 1) / G of the exact one.
    mean = TrainerCredit(None, advantage_baseline="group_mean")
    yield line("group_mean, times G/(G-1)", mean, outcome, share=_with_own_row)
    credit = TrainerCredit(advantage_baseline="leave_one_out", outcome_weight=0.5, process_weight=0.25)
    yield line("leave_one_out and to_go", credit, half_outcome_and_quarter_steps)


def _truncated() -> Iterator[CreditCase]:
    """Mask truncated rows. Their group's mean keeps them, so being cut off is worth the mean reward."""
    policy = reasoning()
    line = partial(_line, "truncated rows masked", [policy])
    masked = TrainerCredit(None, advantage_baseline="leave_one_out", mask_truncated_completions=True)
    yield line("outcome: E[(1-t) r + t J]", masked, if_complete(outcome, policy))
    short = reasoning(max_steps=2)
    yield _line(
        "truncated rows masked",
        [short.at_times_unscorable(UNSCORABLE)],
        "outcome, unscorable by chance",
        masked,
        if_scorable(if_complete(outcome, short)),
        share=_with_another_scorable_row,
    )
    yield line("outcome: E[r]", masked, outcome, control=True)
    # A trainer refuses the mask beside step rewards, so these rows are masked behind it. Whether a row is cut off
    # is decided behind a step, and the mask multiplies the credit of that step.
    summed = TrainerCredit(outcome_weight=0.0)
    yield line("to_go", without_truncated(summed), if_complete(total, policy), control=True)
    worst = TrainerCredit(outcome_weight=0.0, step_credit="min_increments")
    yield line("min_increments", without_truncated(worst), if_complete(lowest, policy), control=True)
    fitted = TrainerCredit(random_value, fitted=0.75, process_role="baseline", advantage_baseline="leave_one_out")
    yield line(
        "V of the text so far as baseline",
        without_truncated(fitted),
        if_complete(outcome, policy),
        control=True,
        prompts=1,
        group_sizes=(2,),
    )


def if_complete(objective: Objective, policy: SmallPolicy) -> Objective:
    """Return the objective, its mean under the policy (a constant) for a truncated row."""
    mean = 0.0
    for chance, row in zip(policy.probabilities().tolist(), policy.rows, strict=True):
        mean += chance * objective(row)

    def of_complete_row(row: Trajectory) -> float:
        if row.closing:
            return objective(row)
        return mean

    return of_complete_row


def without_truncated(credit: Credit) -> Credit:
    """Return the same credit without a gradient in truncated rows."""

    def of_complete_rows(rows: Rows, num_generations: int) -> torch.Tensor:
        is_complete = torch.tensor([[row.closing] for row in rows])
        return credit(rows, num_generations) * is_complete

    return of_complete_rows


def _value_baseline() -> Iterator[CreditCase]:
    """A process reward model as a baseline: its expected gradient is 0 if its scores do not read later text."""
    policy = reasoning(max_steps=2)  # 6 rows, and so 6 ** 4 batches of two groups of two
    line = partial(_line, "PRM as baseline", [policy])
    baseline = partial(TrainerCredit, process_role="baseline", advantage_baseline="leave_one_out")
    values = {"exact": exact_value(policy), "random": random_value, "adversarial": adversarial_value}
    for name, value in values.items():
        # Fitted to earlier batches, c is a constant for this one.
        fitted = baseline(value, fitted=0.75)
        yield line(f"V {name}, c of earlier batches", fitted, outcome, prompts=1)
    fitted_here = baseline(adversarial_value)
    yield line("V adversarial, c of the other group", fitted_here, outcome, group_sizes=(2,), prompts=2)
    mean = baseline(adversarial_value, fitted=0.75, advantage_baseline="group_mean")
    yield line("V adversarial, group_mean, times G/(G-1)", mean, outcome, share=_with_own_row, prompts=1)
    # A baseline may depend on what a step follows, never on what it leads to.
    yield line("V of later text", baseline(hindsight, fitted=0.75), outcome, control=True, prompts=1)
    of_text_so_far = TrainerCredit(random_value, outcome_weight=0.0)
    yield line("scores of the text so far, paid alone", of_text_so_far, paid(random_value))
    of_later_text = TrainerCredit(hindsight, outcome_weight=0.0)
    yield line("scores of later text, paid alone", of_later_text, paid(hindsight), control=True)
    # Paid as rewards, the values of a row add up: it is no longer the outcome that is trained on.
    for name, value in values.items():
        yield line(f"V {name}, paid as a reward", TrainerCredit(value), outcome, control=True)


def exact_value(policy: SmallPolicy) -> Judge:
    """Return a judge of the expected outcome after each step."""
    worth = defaultdict(float)
    mass = defaultdict(float)
    for row, probability in zip(policy.rows, policy.probabilities().tolist(), strict=True):
        # `accumulate` adds texts: of the steps "+\n" and "-\n" it makes the prefixes "+\n" and "+\n-\n".
        for text in accumulate(str(row.text).splitlines(keepends=True)):
            worth[text] += probability * row.outcome
            mass[text] += probability
    return lambda steps: [worth[text] / mass[text] for text in accumulate(steps)]


def random_value(steps: Sequence[str]) -> list[float]:
    """Noise, the same for the same prefix."""
    values = []
    for text in accumulate(steps):
        generator = Random(text)  # seeded by the prefix
        values.append(generator.uniform(-4, 4))
    return values


def adversarial_value(steps: Sequence[str]) -> list[float]:
    """A judge that prefers bad steps, and length above all."""
    return [8.0 * count - 2.0 * good for count, good in enumerate(good_steps(steps), start=1)]


def hindsight(steps: Sequence[str]) -> list[float]:
    """The outcome for every step: a judge that was sent the whole solution."""
    return [good_steps(steps)[-1]] * len(steps)


def paid(judge: Judge) -> Objective:
    """Objective: the sum of a judge's scores."""

    def sum_of_scores(row: Trajectory) -> float:
        steps = str(row.text).splitlines(keepends=True)
        return sum(judge(steps))  # type: ignore[arg-type]  # these judges score every step

    return sum_of_scores


def half_outcome_and_quarter_steps(row: Trajectory) -> float:
    """Objective of `outcome_weight=0.5` and `process_weight=0.25`."""
    return 0.5 * outcome(row) + 0.25 * total(row)


def _with_own_row(group_size: int) -> float:
    """Return the learning rate of a baseline that counts the row itself, `(G - 1) / G`."""
    return (group_size - 1) / group_size


UNSCORABLE = 0.25  # probability that a row is unscorable by chance


def _with_another_scorable_row(group_size: int) -> float:
    """Return the probability that a row's group has a second scorable row: one without has no baseline."""
    return 1 - UNSCORABLE ** (group_size - 1)


def _two_turns() -> Iterator[CreditCase]:
    """Turns of an environment that answers by chance."""
    line = partial(_line, "two turns", [two_turns()])
    yield line("to_go", TrainerCredit(step_separator="turn"))
    yield line("z-score at the same turn", partial(published_credit, same_turn_z_score), control=True)


def _shared_states() -> Iterator[CreditCase]:
    """States that a row enters more than once: a mean over all visits of a state counts the row itself."""
    line = partial(_line, "shared states", [shared_states()])
    yield line("to_go with state keys", TrainerCredit(step_separator="turn"))
    yield line("GiGPO's step mean: own row counted", partial(published_credit, state_mean), control=True)
    yield line("GiGPO's step z-score", partial(published_credit, state_z_score), control=True)


def _forks() -> Iterator[CreditCase]:
    """Two parents, cut behind a step: every tree is a parent with the branches that go on from its cuts."""
    policy = reasoning(max_steps=2)
    at_once = stop_or_go(0.2, at_once=True, max_steps=2)
    deep = until_a_mistake()
    rewarded = TrainerCredit(None)
    to_go = TrainerCredit(outcome_weight=0.0, step_credit="return_to_go")
    increments = TrainerCredit(outcome_weight=0.0, step_credit="min_increments")
    with_steps = TrainerCredit(outcome_weight=0.5, process_weight=0.25)
    leave_one_out = TrainerCredit(None, advantage_baseline="leave_one_out")

    def line(
        name: str,
        policy: SmallPolicy,
        credit: ForkedCredit,
        objective: Objective = outcome,
        control: bool = False,
        **options: Any,
    ) -> CreditCase:
        gradients = partial(compare_forked, policy, credit, objective, **options)
        return CreditCase("forks", name, gradients, control)

    yield line("outcome", policy, rewarded)
    yield line("outcome, three branches", policy, rewarded, branches=3)
    yield line("outcome, cut behind the first bad step", policy, rewarded, rule=behind_a_bad_step)
    yield line("outcome, cut twice", deep, rewarded, depth=2)
    yield line("to_go", policy, to_go, total)
    yield line("to_go, rows may be EOS alone", at_once, to_go, total)
    yield line("min_increments: the worst step", policy, increments, lowest)
    yield line("min_increments, cut twice", deep, increments, lowest, depth=2)
    yield line("outcome and to_go", policy, with_steps, half_outcome_and_quarter_steps)
    # Leaves share tokens with the row that they are compared with; siblings do not.
    yield line("mean over all leaves", policy, over_all_leaves(rewarded), control=True)
    yield line("mean over the other leaves", policy, over_all_leaves(leave_one_out), control=True)
    yield line("to_go over all leaves", policy, over_all_leaves(to_go), total, control=True)
    # A rule may read the text before the cut, never the outcome.
    yield line("only what failed is cut", policy, rewarded, rule=only_failures, control=True)
    # A token that several leaves share is sampled once and trained in each of them.
    yield line("shared tokens weigh 1 of G", policy, trained_in_one_leaf(rewarded), control=True)


def _unscorable() -> Iterator[CreditCase]:
    """Rows without an outcome: by chance, or because of what they wrote."""
    environment = "unscorable by chance"
    short = reasoning(max_steps=2).at_times_unscorable(UNSCORABLE)
    states = shared_states().at_times_unscorable(UNSCORABLE)
    alone = TrainerCredit(None, advantage_baseline="leave_one_out")
    fitted = TrainerCredit(adversarial_value, fitted=0.75, process_role="baseline", advantage_baseline="leave_one_out")
    with_steps = TrainerCredit(advantage_baseline="leave_one_out", outcome_weight=0.5, process_weight=0.25)
    reward = if_scorable(outcome)
    steps = if_scorable(total)
    line = partial(_line, environment, [short], share=_with_another_scorable_row)
    yield line("leave_one_out", alone, reward)
    yield line("V adversarial as baseline", fitted, reward, group_sizes=(3,), prompts=1)
    yield line("to_go and leave_one_out", with_steps, if_scorable(half_outcome_and_quarter_steps))
    turns = partial(_line, environment, [states], share=_with_another_scorable_row)
    yield turns("to_go with state keys", TrainerCredit(step_separator="turn"), steps)
    # One unscorable leaf silences its whole group, see `node_advantages`.
    forked = partial(compare_forked, short, share=lambda group_size: (1 - UNSCORABLE) ** (group_size - 1))
    yield CreditCase(environment, "forks, outcome", partial(forked, TrainerCredit(None), reward))
    to_go = TrainerCredit(outcome_weight=0.0)
    yield CreditCase(environment, "forks, to_go", partial(forked, to_go, steps))

    def failing(worth: float) -> list[SmallPolicy]:
        """Reasoning in which a first bad step makes the verifier hang."""

        def judged(row: Trajectory) -> Trajectory:
            if str(row.text).startswith(BAD):
                return replace(row, outcome=worth)
            return row

        return [reasoning(max_steps=2).map(judged)]

    # Leaving out what failed because of its text is a reward for failing: the mean of the others, not the lowest.
    yield _line("a failing verifier", failing(0.0), "failures paid the lowest reward", alone, outcome)
    yield _line("a failing verifier", failing(math.nan), "failures left out", alone, reward, control=True)


def _prompts() -> Iterator[CreditCase]:
    """The choice of the prompts that train, and their weights."""
    curriculum = partial(chosen_prompts, estimates=(0.9, 0.5, 0.02))  # nothing like the pass rates
    for name, gradients, control in (
        ("dynamic sampling", chosen_prompts, False),
        ("curriculum, wrong estimates", partial(curriculum, dynamic=False), False),
        ("both", curriculum, False),
        ("DAPO, mean over live groups", partial(chosen_prompts, mean_over_live=True), True),
        ("retry a prompt until it is mixed", retried_until_mixed, True),
        ("curriculum without inverse weights", partial(curriculum, weighted=False), True),
    ):
        yield CreditCase("three prompts", name, gradients, control)


# Relative. Four orders above the differences that were seen, in float64.
TOLERANCE = 1e-12


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
    differences = []
    for gradient, exact in case.gradients():
        if case.control:
            # Compare the positive multiple that comes closest: any multiple is a learning rate. The closest one is the
            # projection, |s g - e| at s = (g e) / (g g); where it points away no multiple comes closer than s = 0.
            along = (gradient @ exact).item()
            scale = 0.0
            if along > 0:
                scale = along / (gradient @ gradient).item()
            gradient = scale * gradient
        differences.append(relative_difference(gradient, exact))
    if case.control:
        difference = min(differences)
        passed = CONTROL_FLOOR < difference < math.inf
    else:
        difference = max(differences)
        passed = difference <= TOLERANCE
    return CreditResult(case.environment, case.credit, case.control, difference, passed)
