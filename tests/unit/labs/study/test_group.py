"""One group under every objective, relative to an even group: worked numbers, and what must hold for any group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.labs.study.group import ExampleGroup
from trl_drgrpo.labs.study.objectives import OBJECTIVES

lengths = st.integers(1, 400)


def test_a_worked_group():
    """4 of 8 right, 50 and 200 tokens, 125 on average: GRPO weighs a token 125/50 and 125/200, ours 1."""
    group = ExampleGroup(right=4, length_right=50, length_wrong=200)
    assert group.token_weights("grpo_without_std") == pytest.approx([2.5] * 4 + [-0.625] * 4)
    assert group.token_weights("grpo") == pytest.approx([2.5] * 4 + [-0.625] * 4)
    for name in ("dr_grpo", "dr_grpo_with_std", "dapo"):
        assert group.token_weights(name) == pytest.approx([1.0] * 4 + [-1.0] * 4)
        assert group.pulls(name) == pytest.approx([0.4] * 4 + [-1.6] * 4)
    assert group.pulls("grpo") == pytest.approx([1.0] * 4 + [-1.0] * 4)


def test_the_std_enlarges_an_uneven_group():
    """1 of 8: advantage 7/8 against 1/2 of the even group, with std 2.4749 against 0.9354 (both up to the floor)."""
    group = ExampleGroup(right=1, length_right=100, length_wrong=100)
    assert group.token_weights("dr_grpo")[0] == pytest.approx(0.875 / 0.5)
    assert group.token_weights("grpo")[0] == pytest.approx(2.4749 / 0.9354, rel=1e-3)


def test_answers_are_cut():
    group = ExampleGroup(right=2, length_right=10, length_wrong=300, num_generations=4, max_length=64)
    assert group.lengths.tolist() == [10, 10, 64, 64]


@given(st.integers(2, 12), st.integers(0, 12), lengths, lengths, lengths)
def test_what_holds_for_any_group(size, right, length_right, length_wrong, cut):
    group = ExampleGroup(min(right, size), length_right, length_wrong, size, cut)
    for name, objective in OBJECTIVES.items():
        weights = group.token_weights(name)
        assert np.isfinite(weights).all()
        if group.right in (0, size):
            assert (weights == 0).all()
        elif objective.divisor == "row":  # the length divisor makes the pulls of a group sum to 0
            assert group.pulls(name).sum() == pytest.approx(0, abs=1e-6)
        else:  # a divisor that all rows share makes the token weights sum to 0
            assert weights.sum() == pytest.approx(0, abs=1e-6)
    if length_right == length_wrong:
        assert group.token_weights("grpo_without_std") == pytest.approx(group.token_weights("dr_grpo"))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("right", {"right": 9}),
        ("right", {"right": -1}),
        ("length_wrong", {"length_wrong": 0}),
        ("max_length", {"max_length": 0}),
        ("num_generations", {"num_generations": 1}),
    ],
)
def test_numbers_out_of_range_are_refused(field, values):
    with pytest.raises(InputError, match=f"{field}: got"):
        ExampleGroup(**{"right": 1, "length_right": 5, "length_wrong": 5, **values})
