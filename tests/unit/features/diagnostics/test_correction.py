import math
import random
import statistics

import pytest

from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.statistics import QUARTERS, weight_statistics


def test_golden_weights():
    # In the order of length: 1.0 and 0.8, 0.6 and 0.4, 0.5 and 0.3, 0.2 and 0.0; one row is not trained on.
    weights = [0.5, 0.2, 1.0, 0.8, math.nan, 0.3, 0.6, 0.0, 0.4]
    lengths = [50, 70, 10, 20, 90, 60, 30, 80, 40]
    correct = [True, False, True, None, True, False, False, False, True]
    assert weight_statistics(weights, lengths, correct) == pytest.approx(
        {
            "sampling/weight_q1_mean": 0.9,
            "sampling/weight_q2_mean": 0.5,
            "sampling/weight_q3_mean": 0.4,
            "sampling/weight_q4_mean": 0.1,
            "sampling/weight_correct_mean": (0.5 + 1.0 + 0.4) / 3,
            "sampling/weight_incorrect_mean": (0.2 + 0.3 + 0.6 + 0.0) / 4,
        }
    )


def test_rows_of_one_length_are_in_one_quarter_whatever_their_order():
    weights, lengths = [1.0, 0.0, 1.0, 0.0, 0.5], [9, 9, 9, 9, 3]
    # Mean ranks: (0 + 1) / 2 and (1 + 5) / 2 of 5.
    assert weight_statistics(weights, lengths) == {QUARTERS[0]: 0.5, QUARTERS[2]: 0.5}
    assert weight_statistics(weights[::-1], lengths[::-1]) == {QUARTERS[0]: 0.5, QUARTERS[2]: 0.5}


def test_nothing_is_known_where_nothing_is_trained_on():
    assert weight_statistics([math.nan] * 4, [1, 2, 3, 4], [True] * 4) == {}
    assert weight_statistics([], []) == {}


def warned(shortest, longest, **thresholds):
    """What is warned of when the quarters weigh this much, step by step."""
    told = []
    setting = {"unequal_weights": thresholds} if thresholds else True
    watched = RunWarnings(warning_thresholds(setting), 8, lambda *what: told.append(what))
    for step, (short, long) in enumerate(zip(shortest, longest, strict=True), start=1):
        watched.observe(step, {QUARTERS[0]: short, QUARTERS[3]: long})
    watched.finish()
    return told


def noisy(mean, std, seed, length=300):
    rng = random.Random(seed)
    return [mean + rng.gauss(0, std) for _ in range(length)]


def test_a_slope_is_warned_of():
    [(step, cause, message)] = warned(noisy(0.95, 0.2, 0), noisy(0.45, 0.2, 1))
    assert (step, cause) == (40, "unequal_weights")
    assert "the longest quarter of the completions 0.4" in message
    assert "token_truncate" in message


def test_a_short_run_is_judged_at_its_end():
    assert [step for step, *_ in warned([1.0] * 12, [0.5] * 12)] == [12]
    assert warned([1.0] * 9, [0.5] * 9) == []


def test_long_rows_that_weigh_more_are_a_slope_too():
    assert warned(noisy(0.6, 0.05, 0), noisy(0.95, 0.05, 1))


def test_a_gap_below_the_share_or_within_the_noise_is_none():
    assert warned([1.0] * 100, [0.93] * 100) == []
    assert warned([1.0] * 100, [0.93] * 100, share=0.05, steps=1)
    assert warned(noisy(1.0, 0.7, 0, 41), noisy(0.8, 0.7, 1, 41)) == []


@pytest.mark.slow
def test_noise_alone_is_not_called_a_slope():
    # Two rows of each quarter per step, each masked with probability 1/2: the noisiest that is likely to occur.
    def quarter(rng):
        return [statistics.fmean(rng.choice((0.0, 1.0)) for _ in range(2)) for _ in range(300)]

    alarms = 0
    for seed in range(100):
        rng = random.Random(seed)
        alarms += bool(warned(quarter(rng), quarter(rng)))
    assert alarms == 0
