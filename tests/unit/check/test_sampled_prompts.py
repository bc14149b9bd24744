"""The enumeration of prompt sampling agrees with arithmetic by hand, and sees a weight that is bent."""

import dataclasses

import pytest

from trl_drgrpo.check import groups
from trl_drgrpo.check.groups import LATER, NOW, Sampling, retried_until_mixed
from trl_drgrpo.objective.group_selection import select_groups


def test_the_exact_gradient_is_that_of_the_mean_pass_rate():
    _, exact = next(Sampling().compare())
    assert exact.tolist() == pytest.approx([p * (1 - p) / 3 for p in (*NOW, *LATER)])


def test_a_prompt_that_is_retried_weighs_one_over_its_share_of_live_groups():
    gradient, exact = next(retried_until_mixed())  # of two completions
    assert (gradient / exact).tolist() == pytest.approx([1 / (2 * p * (1 - p)) for p in (*NOW, *LATER)])


@pytest.mark.parametrize("factor", [lambda s: s.drawn / (s.drawn - 1), lambda s: 1.0 + 0.2 * s.capped])
def test_bent_weights_are_seen(factor, monkeypatch):
    def bent(*args, **kwargs):
        selection = select_groups(*args, **kwargs)
        return dataclasses.replace(selection, weights=[w * factor(selection) for w in selection.weights])

    monkeypatch.setattr(groups, "select_groups", bent)
    for gradient, exact in Sampling(estimates=(0.9, 0.5, 0.02)).compare():
        assert (gradient - exact).norm() > 1e-3 * exact.norm()
