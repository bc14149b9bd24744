"""The weights are unbiased: shown by enumerating all draws of small populations."""

from itertools import product

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.advantages import keep_probability, select_groups

# Kinds of prompts: share of the population, probability that its group carries a signal, its gradient if it does
KINDS = [(0.5, 0.05, 2.0), (0.3, 0.6, -0.5), (0.2, 0.95, 1.0)]
EXACT = sum(share * live * gradient for share, live, gradient in KINDS)


def expected(wanted, cap, keep=None, **options):
    """Expectation of the batch's gradient over all kinds, choices and signals of `cap` draws."""
    total = 0.0
    outcomes = []  # of one draw: probability, selected, gradient, probability of being kept
    for (share, live, gradient), q in zip(KINDS, keep or [1.0] * 3, strict=True):
        outcomes.append((share * (1 - q), False, 0.0, q))
        outcomes.append((share * q * live, True, gradient, q))
        outcomes.append((share * q * (1 - live), options.get("count_dead", False), 0.0, q))
    options.pop("count_dead", None)
    for draws in product(outcomes, repeat=cap):
        probability = 1.0
        for draw in draws:
            probability *= draw[0]
        selection = select_groups([d[1] for d in draws], wanted, cap, [d[3] for d in draws], **options)
        gradient = sum(draws[i][2] * weight for i, weight in zip(selection.draws, selection.weights, strict=True))
        total += probability * gradient / wanted
    return total


@pytest.mark.parametrize(("wanted", "cap"), [(2, 2), (2, 4), (2, 5), (3, 5)])
def test_dynamic_sampling_keeps_the_objective(wanted, cap):
    assert expected(wanted, cap) == pytest.approx(EXACT, abs=1e-13)


@pytest.mark.parametrize("keep", [[0.9, 0.3, 0.5], [0.2, 0.2, 1.0]])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_curriculum_keeps_it_whatever_it_believes(keep, dynamic):
    # without dynamic sampling a group counts as soon as it was kept
    assert expected(2, 4, keep, count_dead=not dynamic) == pytest.approx(EXACT, abs=1e-13)


def test_the_mean_over_live_groups_does_not():
    assert expected(2, 5, mean_over_live=True) / EXACT > 1.5  # nearly 1 / P(live) = 2.5, were it not for the cap


def test_the_surplus_is_dropped_in_order():
    selection = select_groups([True, False, True, True, True], 3, 10)
    assert (selection.draws, selection.drawn, selection.capped) == ([0, 2, 3], 4, False)
    assert selection.weights == [2 / 3] * 3
    assert select_groups([True] * 3, 3, 3).weights == [1.0] * 3


def test_at_the_cap_what_is_missing_counts_as_zero():
    selection = select_groups([False] * 6, 2, 6)
    assert (selection.draws, selection.weights, selection.drawn, selection.capped) == ([], [], 6, True)
    assert select_groups([False, True, False, False], 2, 4, [1, 0.5, 1, 1]).weights == [1.0]


def test_the_middle_is_kept_and_the_ends_rarely():
    assert keep_probability(0.5, 0.1) == 1.0
    assert keep_probability(0.0, 0.1) == keep_probability(1.0, 0.1) == pytest.approx((0.01 / 0.26) ** 0.5)
    assert keep_probability(0.0, 0.3) == 0.3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_groups([True], 1, 4), "wanted: got 1; expected at least 2 groups"),
        (lambda: select_groups([True], 3, 2), "cap: got 2; expected at least the 3 groups"),
        (lambda: select_groups([True], 2, 4), "selected: got 1 of 2 groups after 1 draws; expected draws up to"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=f"^{message}"):
        call()
