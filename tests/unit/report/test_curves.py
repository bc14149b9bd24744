"""Curves: gaps, thinning, and the end of a run."""

from trl_drgrpo.report.curves import axes_of, curves_of
from trl_drgrpo.report.records import Logged


def test_gaps_stay_gaps():
    logged = [Logged(step, "train", {"a": value}) for step, value in ((1, 1.0), (2, None), (3, 3.0), (50, 4.0))]
    curve = curves_of(logged, "train")["a"]
    assert (curve.steps, curve.values) == ([1, 2, 3, 4, 50], [1.0, None, 3.0, None, 4.0])


def test_thinning_takes_means_of_equally_many_and_keeps_the_end():
    logged = [Logged(step, "train", {"a": float(step), "b": None}) for step in range(1, 12)]
    curves = curves_of(logged, "train", points=6)
    assert list(curves) == ["a"]
    assert (curves["a"].steps, curves["a"].values) == ([2, 4, 6, 8, 10, 11], [1.5, 3.5, 5.5, 7.5, 9.5, 11.0])
    assert curves["a"].mean_of == 2
    assert len(curves_of(logged, "train", points=4)["a"].steps) <= 4


def test_tokens_and_time_never_fall_and_a_pause_is_left_out():
    times = [100.0, 110.0, 120.0, 5000.0, 5010.0]  # resumed at step 3
    tokens = [10.0, 20.0, 30.0, None, 25.0]
    logged = [Logged(i + 1, "train", {"num_tokens": tokens[i]}, times[i]) for i in range(5)]
    axes = axes_of(logged, [3])
    assert axes["time"] == [[1, 2, 3, 4, 5], [0.0, 10.0, 20.0, 30.0, 40.0]]
    assert axes["tokens"] == [[1, 2, 3, 5], [10.0, 20.0, 30.0, 30.0]]
    assert axes_of([Logged(1, "train", {"reward": 1.0})], []) == {}
    assert axes_of(logged[:1], []) == {}  # one step has no extent


def test_the_later_entry_of_a_step_and_the_runs_end():
    logged = [Logged(1, "train", {"a": 1.0}), Logged(1, "train", {"a": 2.0, "train_runtime": 3.0})]
    assert {name: curve.values for name, curve in curves_of(logged, "train").items()} == {"a": [2.0]}
