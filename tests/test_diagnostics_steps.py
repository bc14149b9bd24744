import logging
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.diagnostics.steps import ProcessRewardWatch, looks_hacked, step_statistics


def test_golden_statistics():
    # rows: (1, 0), (1, None), () with outcomes 0, 1, 1
    stats = step_statistics([[1.0, 0.0], [1.0, None], []], [0.0, 1.0, 1.0])
    assert stats["process/steps_mean"] == 2.0  # 4 steps in 2 completions that have any
    assert stats["process/unscorable_frac"] == 0.25
    assert stats["process/reward_mean"] == pytest.approx(2 / 3)
    # two steps: middles at 1/4 and 3/4 of the completion, so quarters 2 and 4
    assert stats["process/reward_quarter_2"] == 1.0
    assert stats["process/reward_quarter_4"] == 0.0
    assert "process/reward_quarter_1" not in stats
    # row means .5 and 1 with outcomes 0 and 1: perfectly correlated
    assert stats["process/outcome_correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize("outcomes", [[1.0, 1.0], [None, 1.0], [math.nan, 0.0]])
def test_a_correlation_that_is_not_defined_is_left_out(outcomes):
    assert "process/outcome_correlation" not in step_statistics([[0.0], [1.0]], outcomes)


def test_nothing_from_nothing():
    assert step_statistics([[], []], [0.0, 1.0]) == {}
    assert step_statistics([[None]], [0.0]) == {"process/steps_mean": 1.0, "process/unscorable_frac": 1.0}


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=9), min_size=1, max_size=6))
def test_every_scored_step_is_in_one_quarter(rewards):
    stats = step_statistics(rewards, [0.0] * len(rewards))
    quarters = [stats[key] for key in stats if "quarter" in key]
    scored = [s for row in rewards for s in row if s is not None]
    assert bool(quarters) == bool(scored)
    assert all(min(scored) - 1e-9 <= q <= max(scored) + 1e-9 for q in quarters)


def series(start, slope, noise=0.05, length=20, seed=0):
    rng = random.Random(seed)
    return [start + slope * t + rng.gauss(0, noise) for t in range(length)]


UP, DOWN, FLAT = series(1, 0.05), series(1, -0.05, seed=1), series(1, 0, seed=2)


@pytest.mark.parametrize(
    ("process", "outcome", "expected"),
    [
        (UP, DOWN, True),
        (UP, UP, False),  # everything improves
        (UP, FLAT, False),
        (FLAT, DOWN, False),
        (DOWN, DOWN, False),
        (UP[:6], DOWN[:6], False),  # too short to tell
    ],
)
def test_hacking_is_process_up_and_outcome_down(process, outcome, expected):
    assert looks_hacked(process, outcome) is expected


def test_noise_alone_is_rarely_called_hacking():
    alarms = sum(looks_hacked(*(series(1, 0, seed=3 * i + j) for j in range(2))) for i in range(300))
    assert alarms == 0


@pytest.mark.parametrize(
    ("steps", "words"), [(UP, "steps per completion and process reward rose"), (FLAT, "s the process reward rose")]
)
def test_the_watch_says_whether_steps_grew(steps, words, caplog):
    watch = ProcessRewardWatch(window=20)
    with caplog.at_level(logging.WARNING):
        for s, process, outcome in zip(steps, UP, DOWN, strict=True):
            watch.on_log(
                None, None, None, logs={"process/steps_mean": s, "process/reward_mean": process, "reward": outcome}
            )
    assert words in caplog.text


def test_the_watch_warns_once_and_only_with_all_three_numbers(caplog):
    watch = ProcessRewardWatch(window=20)
    with caplog.at_level(logging.WARNING):
        for logs in ({"reward": 1.0}, {}, None):
            watch.on_log(None, None, None, logs=logs)
        for _ in range(2):
            for steps, process, outcome in zip(UP, UP, DOWN, strict=True):
                logs = {"process/steps_mean": steps, "process/reward_mean": process, "reward": outcome}
                watch.on_log(None, None, None, logs=logs)
    assert caplog.text.count("probably being exploited") == 1
