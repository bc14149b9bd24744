"""Rank correlation of a few points."""

import numpy as np
import pytest

from trl_drgrpo.labs.study.ranks import rank_correlation


def test_against_a_hand_calculation_with_a_tie():
    # ranks 1 2 3 4 5 and 2 1 3.5 3.5 5: covariance 8.5, sums of squares 10 and 9.5
    found = rank_correlation([1, 2, 3, 4, 5], [7, 3, 8, 8, 9])
    assert found.rho == pytest.approx(8.5 / (10 * 9.5) ** 0.5)
    assert found.low < found.rho < found.high
    assert found.points == 5


def test_the_test_is_that_of_permutations():
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, 4]).p_value == pytest.approx(1 / 24, abs=0.006)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]).p_value == 1


def test_intervals_cover_what_they_should():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(60):
        found = rank_correlation(rng.normal(size=10), rng.normal(size=10))
        inside += found.low < 0 < found.high
    assert inside / 60 > 0.88
