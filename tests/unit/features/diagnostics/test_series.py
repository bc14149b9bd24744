"""Numbers over time: a robust distance, and a step."""

import math

import pytest

from trl_drgrpo.features.diagnostics.watches import distance_from_usual, moved


def test_series():
    assert moved([1.0] * 8) == 0.0
    assert moved([1.0] * 4 + [2.0] * 4) == math.inf
    assert moved([2.0] * 4 + [1.0] * 4) == -math.inf
    assert moved([1.0] * 7) == 0.0
    # Halves 1, 2, 1, 2 and 3, 4, 3, 4: residues -+.5, common slope .2, left -.2, .6, -.6, .2, squares 1.6 in all; no
    # positive correlation: error sqrt(1.6 / 5 * 2 / 4) = .4, difference 2.
    assert moved([1, 2, 1, 2, 3, 4, 3, 4]) == pytest.approx(5.0)
    # median 3, MAD 1: (11 - 3) / 1.4826
    assert distance_from_usual(11, [1, 2, 3, 4, 5]) == pytest.approx(8 / 1.4826)
    assert distance_from_usual(1.1, [1.0] * 5) == pytest.approx(1.0)  # a tenth of the median
