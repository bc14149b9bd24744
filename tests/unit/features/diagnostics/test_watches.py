import math
import os
import random

import pytest
from told import G, Told

from trl_drgrpo.features.diagnostics.watches import looks_hacked


def noise(mean, std, length, seed, correlation=0.0):
    """A stationary series; with a correlation from step to step an AR(1) process of the same spread."""
    rng = random.Random(seed)
    values, state = [], 0.0
    for _ in range(length):
        state = correlation * state + math.sqrt(1 - correlation**2) * rng.gauss(0, std)
        values.append(mean + state)
    return values


def ramp(start, slope, std=0.0, length=60, seed=0):
    rng = random.Random(seed)
    return [start + slope * t + rng.gauss(0, std) for t in range(length)]


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [(0.85, 0.05, "too easy"), (0.05, 0.85, "too hard"), (0.0, 0.0, "rewards within a group are equal")],
)
def test_dead_groups_say_which(right, wrong, words):
    told = Told().feed(
        drgrpo__zero_signal_frac=[0.9] * 30,
        drgrpo__all_correct_frac=[right] * 30,
        drgrpo__all_incorrect_frac=[wrong] * 30,
    )
    assert told.causes == ["dead_groups"]
    assert told.warnings[0][0] == 20  # once, after as many steps as the default says
    assert words in told.text


def test_dead_groups_of_equal_texts_are_not_called_too_hard():
    told = Told().feed(
        drgrpo__zero_signal_frac=[0.9] * 20,
        drgrpo__all_incorrect_frac=[0.9] * 20,
        completions__unique_frac=[1.1 / G] * 20,
    )
    assert told.causes == ["sampling_collapse", "dead_groups"]
    assert "Raise temperature" in told.warnings[1][2]
    assert "too hard" not in told.text


def test_dead_groups_without_knowing_what_is_correct():
    assert "equal" in Told().feed(drgrpo__zero_signal_frac=[0.9] * 20).text
    assert Told().feed(drgrpo__zero_signal_frac=[0.7] * 100).causes == []  # usual
    assert Told().feed(drgrpo__zero_signal_frac=[0.9] * 19).causes == []


def test_sampling_collapse():
    assert Told().feed(completions__unique_frac=[1 / G] * 10).causes == ["sampling_collapse"]
    assert Told().feed(completions__unique_frac=[0.5] * 50).causes == []


def test_incorrect_answers_grow():
    wrong, flat = ramp(100, 1, 5), ramp(100, 0, 5, seed=1)
    assert Told().feed(completions__length_incorrect_mean=wrong, completions__length_correct_mean=flat).causes == [
        "incorrect_grow"
    ]
    both = Told().feed(
        completions__length_incorrect_mean=wrong, completions__length_correct_mean=ramp(90, 1, 5, seed=2)
    )
    assert both.causes == []
    down = Told().feed(completions__length_incorrect_mean=ramp(200, -1, 5), completions__length_correct_mean=flat)
    assert down.causes == []
    # significant, but a few tokens in a thousand
    small = Told().feed(
        completions__length_incorrect_mean=ramp(1000, 0.2, 0.1), completions__length_correct_mean=[900] * 60
    )
    assert small.causes == []


def test_truncation_high_or_rising():
    high = Told().feed(completions__truncated_frac=[0.6] * 40)
    assert high.causes == ["truncation"]
    assert "more than before" not in high.text
    rising = Told().feed(completions__truncated_frac=ramp(0.05, 0.01, 0.02))
    assert rising.causes == ["truncation"]
    assert "points more than before" in rising.text
    assert Told().feed(completions__truncated_frac=noise(0.3, 0.03, 200, 0)).causes == []


def test_kl_leaves_its_range():
    usual = noise(0.05, 0.005, 60, 0)
    assert Told().feed(kl=[*usual, 0.5, 0.6, 0.7]).causes == ["kl"]
    assert Told().feed(kl=[*usual, 5.0, 0.05, 5.0, 0.05]).causes == []  # spikes: k3 has a heavy tail
    assert Told().feed(kl=[1e-4 * t for t in range(300)]).causes == []  # it starts at 0 and grows
    assert Told().feed(kl=[0.1] * 55 + [0.11] * 5).causes == []  # no spread at all so far
    assert Told().feed(kl=[math.nan, None] * 60).causes == []


def test_rewards_failing_are_named():
    told = Told()
    for step in range(1, 13):
        told.watched.observe(step, {"rewards/judge/failed_frac": 0.3, "rewards/format/failed_frac": 0.0})
    assert told.causes == ["reward_failing"]
    assert "judge (30% over the last 10 optimizer steps)" in told.text
    assert "format" not in told.text
    assert Told().feed(**{"process_rewards/prm/failed_frac": [0.2] * 10}).causes == ["reward_failing"]
    assert Told().feed(**{"rewards/a/mean": [1.0] * 50}).causes == []
    assert Told().feed(**{"rewards/a/failed_frac": [1.0] * 3}).finish().causes == ["reward_failing"]


UP, DOWN, FLAT = ramp(1, 0.05, 0.05), ramp(1, -0.05, 0.05, seed=1), ramp(1, 0, 0.05, seed=2)


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
    assert looks_hacked(process[:40], outcome[:40]) is expected


@pytest.mark.parametrize(
    ("steps", "words"), [(UP, "steps per completion and process reward rose"), (FLAT, "s the process reward rose")]
)
def test_hacking_says_whether_steps_grew(steps, words):
    told = Told().feed(process__steps_mean=steps, process__reward_mean=UP, reward=DOWN)
    assert told.causes == ["process_hacked"]
    assert words in told.text


def test_nothing_moves():
    rate, signal = {"learning_rate": [1e-5] * 10}, {"drgrpo__zero_signal_frac": [0.5] * 10}
    assert Told().feed(grad_norm=[0.0] * 10, **signal, **rate).causes == ["nothing_moves"]
    dead = Told().feed(grad_norm=[0.0] * 10, drgrpo__zero_signal_frac=[0.5] * 9 + [1.0], **rate)
    assert dead.causes == []  # no gradient is due without a signal
    assert Told().feed(grad_norm=[0.0] * 9 + [0.1], **signal, **rate).causes == []


def test_a_learning_rate_of_zero():
    series = {"grad_norm": [0.1] * 10, "drgrpo__zero_signal_frac": [0.5] * 10}
    assert "learning_rate was 0" in Told().feed(learning_rate=[0.0] * 10, **series).text
    assert Told().feed(learning_rate=[0.0] * 9 + [1e-6], **series).causes == []  # a warm-up
    assert Told().feed(**series).causes == []  # not logged


def test_a_learning_rate_that_is_rounded_away():
    told = Told().feed(drgrpo__moved_frac=[0.002])
    assert told.causes == ["nothing_moves"]
    assert "0.20%" in told.text
    assert Told().feed(drgrpo__moved_frac=[0.5]).causes == []


def test_a_run_without_any_signal_says_so_at_its_end():
    setting = {"dead_groups": False}
    told = Told(setting).feed(drgrpo__zero_signal_frac=[1.0] * 6)
    assert told.causes == []
    told.finish().finish()
    assert told.causes == ["all_dead"]
    assert Told(setting).feed(drgrpo__zero_signal_frac=[1.0] * 6 + [0.99]).finish().causes == []
    assert Told().finish().causes == []
    wrong = {
        "drgrpo__zero_signal_frac": [1.0] * 12,
        "drgrpo__all_incorrect_frac": [1.0] * 12,
        "drgrpo__pass_rate": [0.0] * 12,
    }
    assert Told().feed(**wrong).finish().causes == ["all_dead"]  # not all_incorrect and dead_groups as well


def test_a_run_too_short_for_a_window_is_judged_at_its_end():
    for series, cause in (
        ({"completions__truncated_frac": [0.8] * 8}, "truncation"),
        ({"drgrpo__zero_signal_frac": [0.9] * 5}, "dead_groups"),
        ({"completions__unique_frac": [1 / G] * 5}, "sampling_collapse"),
        (
            {"completions__length_incorrect_mean": ramp(100, 3, 5, 30), "completions__length_correct_mean": [90] * 30},
            "incorrect_grow",
        ),
        ({"kl": [0.05, 0.06] * 15 + [0.9] * 3}, "kl"),
        ({"process__steps_mean": FLAT[:30], "process__reward_mean": UP[:30], "reward": DOWN[:30]}, "process_hacked"),
    ):
        told = Told().feed(**series)
        assert told.causes == []
        assert told.finish().causes == [cause]
        fewer = {name: values[-4:] for name, values in series.items()}
        assert Told().feed(**fewer).finish().causes == []


def test_steps_that_generate_nothing_are_not_counted_and_the_message_says_so():
    generates = Told()
    for step in range(1, 161):
        generates.watched.observe(step, {"completions/truncated_frac": 0.9} if step % 4 == 1 else {"kl": 0.01})
    assert generates.warnings[0][:2] == (157, "truncation")
    assert "over the last 157 optimizer steps" in generates.text


def test_what_is_in_logs_only_is_judged_by_at_least_three_logs():
    series = {"grad_norm": [0.0] * 40, "learning_rate": [1e-5] * 40, "drgrpo__zero_signal_frac": [0.5] * 40}
    sparse = Told(logging_steps=10).feed(**series)
    assert sparse.warnings[0][:2] == (30, "nothing_moves")
    assert "in every log of the last 21 optimizer steps" in sparse.text
    assert Told().feed(**series).warnings[0][:2] == (10, "nothing_moves")
    assert Told(logging_steps=20).feed(**series).finish().causes == ["nothing_moves"]  # 2 logs, at the end
    # What counts is the step that logs: a mean since the last log would hide that it had no signal.
    series["drgrpo__zero_signal_frac"] = ([0.5] * 9 + [1.0]) * 4
    assert Told(logging_steps=10).feed(**series).finish().causes == []


RUNS = int(os.environ.get("FALSE_ALARM_RUNS", "20"))


# The false-alarm rate on stationary noise: runs of 300 steps with all causes watched at once, the noise of a
# step independent or correlated with the last one's (0.5).
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_noise_alone_is_rarely_warned_of(correlation):
    alarms = []
    for seed in range(RUNS):

        def of(mean, std, which, seed=seed):
            values = noise(mean, std, 300, 100 * seed + which, correlation)
            return [max(value, 0.0) for value in values]

        alarms += (
            Told()
            .feed(
                drgrpo__zero_signal_frac=of(0.55, 0.1, 0),
                completions__unique_frac=of(0.9, 0.05, 1),
                completions__length_incorrect_mean=of(600, 60, 2),
                completions__length_correct_mean=of(400, 60, 3),
                completions__truncated_frac=of(0.25, 0.08, 4),
                kl=of(0.05, 0.01, 5),
                process__steps_mean=of(8, 1, 6),
                process__reward_mean=of(0.5, 0.1, 7),
                reward=of(0.5, 0.1, 8),
                drgrpo__pass_rate=[min(value, 1.0) for value in of(0.5, 0.1, 8)],
                drgrpo__reward_min=[0.0] * 300,
                grad_norm=of(0.3, 0.1, 9),
                learning_rate=[1e-5] * 300,
            )
            .finish()
            .causes
        )
    # Seen with FALSE_ALARM_RUNS=200: 0 alarms in 200 independent runs, 6 (all incorrect_grow) in 200 correlated ones.
    assert len(alarms) <= RUNS * (0.01 if correlation == 0 else 0.05), alarms
