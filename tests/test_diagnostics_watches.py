import math
import os
import random

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_warnings import DEFAULTS, RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.series import distance_from_usual, moved
from trl_drgrpo.features.diagnostics.watches import looks_hacked

G = 8


class Told:
    """Runs series of logged steps through the warnings and keeps what was told."""

    def __init__(self, setting=True):
        self.warnings = []
        self.watched = RunWarnings(warning_thresholds(setting), G, lambda *what: self.warnings.append(what))

    def feed(self, **series):
        names = {name.replace("__", "/"): values for name, values in series.items()}
        length = max(len(values) for values in names.values())
        for step in range(length):
            self.watched.observe(step + 1, {name: values[step] for name, values in names.items()})
        return self

    @property
    def causes(self):
        return [cause for _, cause, _ in self.warnings]

    @property
    def text(self):
        return " ".join(message for _, _, message in self.warnings)


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
        drgrpo__zero_signal_frac=[0.9] * 30, drgrpo__all_right_frac=[right] * 30, drgrpo__all_wrong_frac=[wrong] * 30
    )
    assert told.causes == ["dead_groups"]
    assert told.warnings[0][0] == 20  # once, after as many logged steps as the default says
    assert words in told.text


def test_dead_groups_of_equal_texts_are_not_called_too_hard():
    told = Told().feed(
        drgrpo__zero_signal_frac=[0.9] * 20,
        drgrpo__all_wrong_frac=[0.9] * 20,
        completions__unique_frac=[1.1 / G] * 20,
    )
    assert told.causes == ["sampling_collapse", "dead_groups"]
    assert "Raise temperature" in told.warnings[1][2]
    assert "too hard" not in told.text


def test_dead_groups_without_knowing_what_is_right():
    assert "equal" in Told().feed(drgrpo__zero_signal_frac=[0.9] * 20).text
    assert Told().feed(drgrpo__zero_signal_frac=[0.7] * 100).causes == []  # usual
    assert Told().feed(drgrpo__zero_signal_frac=[0.9] * 19).causes == []


def test_sampling_collapse():
    assert Told().feed(completions__unique_frac=[1 / G] * 10).causes == ["sampling_collapse"]
    assert Told().feed(completions__unique_frac=[0.5] * 50).causes == []


def test_wrong_answers_grow():
    wrong, flat = ramp(100, 1, 5), ramp(100, 0, 5, seed=1)
    assert Told().feed(completions__length_wrong_mean=wrong, completions__length_right_mean=flat).causes == [
        "wrong_grow"
    ]
    both = Told().feed(completions__length_wrong_mean=wrong, completions__length_right_mean=ramp(90, 1, 5, seed=2))
    assert both.causes == []
    down = Told().feed(completions__length_wrong_mean=ramp(200, -1, 5), completions__length_right_mean=flat)
    assert down.causes == []
    # significant, but a few tokens in a thousand
    small = Told().feed(completions__length_wrong_mean=ramp(1000, 0.2, 0.1), completions__length_right_mean=[900] * 60)
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
    for step in range(12):
        told.watched.observe(step, {"rewards/judge/failed_frac": 0.3, "rewards/format/failed_frac": 0.0})
    assert told.causes == ["reward_failing"]
    assert "judge (30%)" in told.text
    assert "format" not in told.text
    assert Told().feed(**{"process_rewards/prm/failed_frac": [0.2] * 10}).causes == ["reward_failing"]
    assert Told().feed(**{"rewards/a/mean": [1.0] * 50}).causes == []


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
    told = Told()
    told.watched.observe(1, {"drgrpo/moved_frac": 0.002})
    assert told.causes == ["nothing_moves"]
    assert "0.20%" in told.text
    told = Told()
    told.watched.observe(1, {"drgrpo/moved_frac": 0.5})
    assert told.causes == []


def test_a_run_without_any_signal_says_so_at_its_end():
    setting = {"dead_groups": False}
    told = Told(setting).feed(drgrpo__zero_signal_frac=[1.0] * 6)
    assert told.causes == []
    told.watched.finish(6)
    told.watched.finish(6)
    assert told.causes == ["all_dead"]
    alive = Told(setting).feed(drgrpo__zero_signal_frac=[1.0] * 6 + [0.99])
    alive.watched.finish(7)
    assert alive.causes == []
    nothing_logged = Told()
    nothing_logged.watched.finish(0)
    assert nothing_logged.causes == []


RUNS = int(os.environ.get("FALSE_ALARM_RUNS", "40"))


# The false-alarm rate on stationary noise: runs of 300 logged steps with all causes watched at once, the noise of a
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
                completions__length_wrong_mean=of(600, 60, 2),
                completions__length_right_mean=of(400, 60, 3),
                completions__truncated_frac=of(0.25, 0.08, 4),
                kl=of(0.05, 0.01, 5),
                process__steps_mean=of(8, 1, 6),
                process__reward_mean=of(0.5, 0.1, 7),
                reward=of(0.5, 0.1, 8),
                grad_norm=of(0.3, 0.1, 9),
            )
            .causes
        )
    # Seen with FALSE_ALARM_RUNS=200: 0 alarms in 200 independent runs, 6 (all wrong_grow) in 200 correlated ones.
    assert len(alarms) <= RUNS * (0.01 if correlation == 0 else 0.05), alarms


def test_each_cause_once_and_silenceable(caplog):
    told = Told().feed(completions__truncated_frac=[0.9] * 200)
    assert told.causes == ["truncation"]
    assert caplog.text.count("cut off at max_completion_length") == 1
    assert "run_warnings={'truncation': False}" in caplog.text
    assert Told({"truncation": False}).feed(completions__truncated_frac=[0.9] * 200).causes == []
    assert Told(False).feed(completions__truncated_frac=[0.9] * 200).causes == []
    assert Told({"truncation": {"share": 0.95}}).feed(completions__truncated_frac=[0.9] * 200).causes == []


def test_evaluations_are_not_watched():
    assert Told().feed(eval_completions__truncated_frac=[0.9] * 200).causes == []


def test_a_restored_run_does_not_repeat_itself_and_goes_on_counting():
    first = Told().feed(completions__truncated_frac=[0.9] * 45, drgrpo__zero_signal_frac=[0.9] * 45)
    assert first.causes == ["dead_groups", "truncation"]
    half = Told().feed(completions__truncated_frac=[0.9] * 30)
    assert half.causes == []
    resumed = Told()
    resumed.watched.load_state_dict(half.watched.state_dict())
    resumed.feed(completions__truncated_frac=[0.9] * 10)
    assert resumed.causes == ["truncation"]  # 30 + 10 logged steps
    again = Told()
    again.watched.load_state_dict(first.watched.state_dict())
    again.feed(completions__truncated_frac=[0.9] * 200, drgrpo__zero_signal_frac=[0.9] * 200)
    assert again.causes == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"dead_group": {}}, "got 'dead_group'; expected one of dead_groups, .* Did you mean 'dead_groups'"),
        ({"kl": {"step": 3}}, "got 'step' under kl; .* Did you mean 'steps'"),
        ({"kl": {"steps": 0}}, "got 0 for kl: steps; expected a whole number, at least 1"),
        ({"kl": {"steps": 2.5}}, "got 2.5 for kl: steps"),
        ({"kl": {"deviations": True}}, "got True for kl: deviations; expected a positive number"),
        ({"truncation": {"share": 1.5}}, "got 1.5 for truncation: share; expected a number from 0 to 1"),
        ({"truncation": {"share": math.nan}}, "got nan for truncation: share"),
        ({"truncation": 0.5}, "got 0.5 for truncation; expected a mapping of thresholds, or false"),
        ("yes", "got 'yes'; expected true, false or a JSON mapping"),
        ("[1]", "expected True, False or a mapping"),
        (None, "got None; expected True, False"),
        (1, "got 1; expected True, False"),
    ],
)
def test_bad_settings_are_named(setting, words):
    with pytest.raises(InputError, match=f"^run_warnings: .*{words}"):
        warning_thresholds(setting)


def test_settings():
    assert warning_thresholds(True) == DEFAULTS
    assert warning_thresholds(False) == {}
    assert warning_thresholds("false") == {}
    assert "kl" not in warning_thresholds('{"kl": false}')
    assert warning_thresholds({"kl": True})["kl"] == DEFAULTS["kl"]
    assert warning_thresholds({"kl": {"steps": 9}})["kl"] == {**DEFAULTS["kl"], "steps": 9}


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
