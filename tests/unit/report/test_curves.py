"""Curves: gaps, thinning, and the end of a run."""

from trl_drgrpo.report.curves import curves_of
from trl_drgrpo.report.records import Logged


def test_gaps_stay_gaps():
    logged = [Logged(step, "train", {"a": value}) for step, value in ((1, 1.0), (2, None), (3, 3.0), (50, 4.0))]
    curve = curves_of(logged, "train")["a"]
    assert (curve.steps, curve.values) == ([1, 2, 3, 4, 50], [1.0, None, 3.0, None, 4.0])


def test_thinning_takes_means_of_equally_many():
    logged = [Logged(step, "train", {"a": float(step), "b": None}) for step in range(1, 11)]
    curves = curves_of(logged, "train", points=5)
    assert list(curves) == ["a"]
    assert (curves["a"].steps, curves["a"].values) == ([2, 4, 6, 8, 10], [1.5, 3.5, 5.5, 7.5, 9.5])
    assert curves["a"].mean_of == 2


def test_the_later_entry_of_a_step_and_the_runs_end():
    logged = [Logged(1, "train", {"a": 1.0}), Logged(1, "train", {"a": 2.0, "train_runtime": 3.0})]
    assert {name: curve.values for name, curve in curves_of(logged, "train").items()} == {"a": [2.0]}
