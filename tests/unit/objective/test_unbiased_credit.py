"""Expected gradients of step credit, by an enumeration that shares nothing with the package: loops, hand-made scores.

The policy decides after each step whether to write another one (probability p = 1/2, at most three); each step is good
with probability q and pays 1. The true gradient in the logit of "go" is `d/dtheta q (1 + p + p^2) = q (1 + 2p) p (1 -
p)`, which is q / 2; in the logit of "good", `(1 + p + p^2) q (1 - q)`.
"""

import math
from dataclasses import dataclass
from itertools import permutations, product
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.objective.advantages import group_advantages, select_groups
from trl_drgrpo.objective.step_advantages import step_advantages
from trl_drgrpo.objective.value_baseline import value_differences

GO = 0.5
MOST_STEPS = 3


@dataclass
class Row:
    """A row's steps: rewards, and `d log pi / d logit` of what was decided with each of them."""

    probability: float
    marks: tuple
    rewards: list  # None for a closing EOS: nobody is asked about it, and it is paid nothing
    go: list
    good: list


def rows_of(q, closing):
    """All rows; an EOS that stops is a step paid 0 (`closing`), or decided with the last step."""
    rows = []
    for steps in range(1, MOST_STEPS + 1):
        for marks in product((1.0, 0.0), repeat=steps):
            stopped = steps < MOST_STEPS
            probability = GO ** (steps - 1) * (1 - GO if stopped else 1.0)
            probability *= math.prod(q if mark else 1 - q for mark in marks)
            go = [0.0] + [1 - GO] * (steps - 1)
            good = [1 - q if mark else -q for mark in marks]
            rewards = list(marks)
            if stopped and closing:
                rewards, go, good = [*rewards, None], [*go, -GO], [*good, 0.0]
            elif stopped:
                go[-1] += -GO
            rows.append(Row(probability, marks, rewards, go, good))
    return rows


def expected_gradient(rows, group_size, advantages_of):
    """`sum over groups of p * 1/G * sum of A * score`, in the logits of "go" and "good"."""
    groups = list(product(rows, repeat=group_size))
    advantages = iter(advantages_of([row for group in groups for row in group], group_size))
    go = good = 0.0
    for group in groups:
        weight = math.prod(row.probability for row in group) / group_size
        for row in group:
            credit = next(advantages)
            go += weight * math.fsum(a * score for a, score in zip(credit, row.go, strict=True))
            good += weight * math.fsum(a * score for a, score in zip(credit, row.good, strict=True))
    return go, good


# The definitions once more, as loops over the rows of one group


def to_go(group):
    returns = [[sum(reward or 0.0 for reward in row[k:]) for k in range(len(row))] for row in group]
    credited = []
    for i, row in enumerate(returns):
        others = [other for j, other in enumerate(returns) if j != i]
        credited.append(
            [q - sum(other[k] if k < len(other) else 0.0 for other in others) / len(others) for k, q in enumerate(row)]
        )
    return credited


def by_state(group, keys):
    """The other rows' return to go at the same state, `to_go`'s where none passed it."""
    credited = to_go(group)
    for i, row in enumerate(group):
        for k in range(len(row)):
            means = []
            for j, other in enumerate(group):
                visits = [sum(other[n:]) for n in range(len(other)) if j != i and keys[j][n] == keys[i][k]]
                means += [sum(visits) / len(visits)] if visits else []
            if means:
                credited[i][k] = sum(row[k:]) - sum(means) / len(means)
    return credited


def value_differences_of(group):
    """`V_i,k-1 - mean_j V_j,k-1`; rows keep their last value, 0 before the first."""
    before = [[0.0, *row] for row in group]
    width = max(len(row) for row in group)
    held = [[row[min(k, len(row) - 1)] for k in range(width)] for row in before]
    return [[row[k] - sum(other[k] for other in held) / len(held) for k in range(width)] for row in held]


def in_groups(of_group):
    """A definition for one group, for all of them."""

    def of_batch(rows, group_size):
        groups = [rows[start : start + group_size] for start in range(0, len(rows), group_size)]
        return [credited for group in groups for credited in of_group([row.rewards for row in group])]

    return of_batch


def the_packages(credit, baseline, **options):
    return lambda rows, group_size: step_advantages(
        [row.rewards for row in rows], group_size, credit, baseline, **options
    )


# Credit of the decision to go on, as in the table of the design: gradient in its logit, for q = 0.2 and q = 0.8.
TABLE = [
    ("return_to_go", "to_go", True, (0.1, 0.4)),
    ("return_to_go", "none", True, (0.1, 0.4)),
    ("return_to_go", "none", False, (0.025, 0.1)),
    ("return_to_go", "deepseekmath", False, (0.0, 0.0)),
    ("return_to_go", "pooled_others", False, (0.0, 0.0)),
    ("return_to_go", "same_index", False, (0.0, 0.0)),
]


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(("credit", "baseline", "closing", "expected"), TABLE)
def test_the_credit_of_going_on(credit, baseline, closing, expected, group_size):
    seen = [expected_gradient(rows_of(q, closing), group_size, the_packages(credit, baseline))[0] for q in (0.2, 0.8)]
    assert seen == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("q", [0.2, 0.8])
def test_to_go_is_exact_in_both_decisions_and_so_is_its_definition(q, group_size):
    exact = (q * (1 + 2 * GO) * GO * (1 - GO), (1 + GO + GO**2) * q * (1 - q))
    for credit in (in_groups(to_go), the_packages("return_to_go", "to_go")):
        assert expected_gradient(rows_of(q, True), group_size, credit) == pytest.approx(exact, abs=1e-12)


groups_of_rewards = st.lists(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=0, max_size=4), min_size=2, max_size=4
)


@given(groups_of_rewards, st.randoms(use_true_random=False))
def test_state_keys_are_their_definition(group, random):
    keys = [[random.choice("abc") for _ in row] for row in group]
    credited = step_advantages(group, len(group), state_keys=keys)
    for row, reference in zip(credited, by_state(group, keys), strict=True):
        assert row == pytest.approx(reference, abs=1e-12)


# A process reward model as a baseline


def unlike_any_value(marks):
    """Noise, bad steps and length: what a model should not reward, per step."""
    return [Random(str(marks[: k + 1])).uniform(-4, 4) - 2 * marks[k] + 3 * k for k in range(len(marks))]


def last_is_good(row):
    return row.marks[-1]


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("c", [0.5, 1.0, -3.0])
def test_a_model_of_values_is_worth_nothing_whatever_it_says(c, group_size):
    def of_batch(rows, group_size):
        values = [[*unlike_any_value(row.marks), *[None] * (row.rewards[-1] is None)] for row in rows]
        differences = value_differences(values, group_size).flatten(0, 1).tolist()
        outcomes = [last_is_good(row) for row in rows]
        advantages = group_advantages(torch.tensor(outcomes, dtype=torch.float64), group_size, "leave_one_out")
        return [
            [a - c * difference for difference, _ in zip(row, of.rewards, strict=False)]
            for a, row, of in zip(advantages.tolist(), differences, rows, strict=True)
        ]

    q = 0.8  # the last step is good with probability q, however many there are
    assert expected_gradient(rows_of(q, True), group_size, of_batch) == pytest.approx((0.0, q * (1 - q)), abs=1e-12)


@given(groups_of_rewards.filter(all))  # a row without any step is left out of the mean
def test_value_differences_are_their_definition(group):
    seen = value_differences(group, len(group))[0]
    for row, reference in zip(seen.tolist(), value_differences_of(group), strict=True):
        assert row == pytest.approx(reference, abs=1e-12)


# Truncated rows masked, with prompts that are drawn until their groups are live


def cut_off_rows(rates):
    """A prompt's rows, `(probability, reward, is cut off, d log pi / d logits)`: wrong or right, each whole or cut."""
    right, cut = rates
    for is_right, is_cut in product((0, 1), repeat=2):
        probability = (right if is_right else 1 - right) * (cut if is_cut else 1 - cut)
        yield probability, float(is_right or is_cut), is_cut, (is_right - right, is_cut - cut)


def groups_of_two(rates):
    """`(probability, is live, gradient)` of each group, its cut rows masked."""
    for pair in product(cut_off_rows(rates), repeat=2):
        rewards = torch.tensor([reward for _, reward, *_ in pair], dtype=torch.float64)
        advantages = group_advantages(rewards, 2, "leave_one_out").tolist()
        trained = [0.0 if is_cut else a for a, (_, _, is_cut, _) in zip(advantages, pair, strict=True)]
        scores = [score for *_, score in pair]
        gradient = [sum(a * score[n] for a, score in zip(trained, scores, strict=True)) / 2 for n in (0, 1)]
        yield pair[0][0] * pair[1][0], any(trained), gradient


@pytest.mark.parametrize("kept", [(1.0, 1.0, 1.0), (0.9, 0.3, 0.5)])
@pytest.mark.parametrize("over_live", [False, True])
def test_masked_rows_stay_exact_where_prompts_are_drawn_until_they_are_live(kept, over_live):
    """The objective is `E[(1 - t) r + t J]`: being cut off is worth the mean. A mean over live groups misses it."""
    prompts = [(0.05, 0.4), (0.3, 0.1), (0.8, 0.6)]
    expected = [[0.0, 0.0] for _ in prompts]
    for order in permutations(range(3)):
        # A prompt that the curriculum leaves out is no candidate, and has no gradient.
        drawn = [
            [(kept[i] * p, live, g) for p, live, g in groups_of_two(prompts[i])] + [(1 - kept[i], False, (0.0, 0.0))]
            for i in order
        ]
        for draws in product(*drawn):
            probability = math.prod(p for p, *_ in draws) / 6
            candidates = [live for _, live, _ in draws]
            inverse = [kept[i] for i in order]
            chosen = select_groups(candidates, 2, 3, inverse, mean_over_live=over_live)
            for position, weight in zip(chosen.draws, chosen.weights, strict=True):
                for n in (0, 1):
                    expected[order[position]][n] += probability * weight * draws[position][2][n] / 2
    exact = []
    for rates in prompts:
        rows = list(cut_off_rows(rates))
        mean = sum(p * reward for p, reward, *_ in rows)
        worth = [(p, mean if is_cut else reward, score) for p, reward, is_cut, score in rows]
        exact.append([sum(p * value * score[n] for p, value, score in worth) / 3 for n in (0, 1)])
    is_exact = [row == pytest.approx(other, abs=1e-12) for row, other in zip(expected, exact, strict=True)]
    assert all(is_exact) != over_live
