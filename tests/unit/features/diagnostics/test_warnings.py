"""Run warnings: what each cause is told of and what not, how a series has moved, settings, state and silence."""

import json
import math
import os
import random
import re
import statistics

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.trends import distance_from_usual, moved

DEFAULTS = warning_thresholds(True)

G = 8
ONLY_LOGGED = ("grad_norm", "learning_rate", "drgrpo/moved_frac")


class Told:
    """Runs series of optimizer steps through the warnings, as the trainer does, and keeps what was told."""

    def __init__(self, setting=True, logging_steps=1):
        self.warnings = []
        self.logging_steps = logging_steps
        self.watched = RunWarnings(warning_thresholds(setting), G, lambda *what: self.warnings.append(what))

    def feed(self, after=0, **series):
        names = {name.replace("__", "/"): values for name, values in series.items()}
        logged = {}  # name -> values since the last log
        for step in range(max(len(values) for values in names.values())):
            metrics = {name: values[step] for name, values in names.items()}
            only_logged = {name: metrics.pop(name) for name in ONLY_LOGGED if name in metrics}
            self.watched.observe(after + step + 1, metrics)
            for name, value in metrics.items():
                logged.setdefault(name, []).append(value or 0.0)
            if (after + step + 1) % self.logging_steps == 0:
                means = {name: statistics.fmean(values) for name, values in logged.items()}
                self.watched.observe_log(after + step + 1, means | only_logged)
                logged = {}
        return self

    def finish(self):
        self.watched.finish()
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


UP, DOWN, FLAT = ramp(1, 0.05, 0.05), ramp(1, -0.05, 0.05, seed=1), ramp(1, 0, 0.05, seed=2)
USUAL_KL = noise(0.05, 0.005, 60, 0)
LONGER, EVEN = ramp(100, 1, 5), ramp(100, 0, 5, seed=1)


def dead(share, steps=20, **others):
    return {"drgrpo__dead_groups_frac": [share] * steps} | {name: [value] * steps for name, value in others.items()}


def lengths(incorrect, correct):
    return {"completions__length_incorrect_mean": incorrect, "completions__length_correct_mean": correct}


def gradient(norms, rates=(1e-5,) * 10, signals=(0.5,) * 10):
    return {"grad_norm": norms, "learning_rate": rates, "drgrpo__dead_groups_frac": signals}


def process(rewards, outcomes, steps=FLAT):
    steps = steps[: len(outcomes)]
    return {"process__steps_mean": steps, "process__reward_mean": rewards, "reward": outcomes}


def weights(shortest, longest):
    return {"sampling__weight_q1_mean": shortest, "sampling__weight_q4_mean": longest}


# Cause, series of steps, and what is said; each is followed to the end of its run.
TOLD = [
    ("dead_groups", dead(0.9, drgrpo__all_correct_frac=0.85, drgrpo__all_incorrect_frac=0.05), "too easy"),
    ("dead_groups", dead(0.9, drgrpo__all_correct_frac=0.05, drgrpo__all_incorrect_frac=0.85), "too hard"),
    ("dead_groups", dead(0.9), "rewards within a group are equal"),
    ("dead_groups", dead(1.0, reward=1.0, drgrpo__reward_min=1.0), "the same reward, 1: the reward may not see"),
    ("all_incorrect", dead(1.0, reward=0.0, drgrpo__reward_min=0.0, drgrpo__pass_rate=0.0), "the same reward, 0:"),
    ("sampling_collapse", {"completions__unique_frac": [1 / G] * 10}, "Nearly all completions of a group"),
    ("incorrect_grow", lengths(LONGER, EVEN), "while correct ones did not"),
    ("truncation", {"completions__clipped_ratio": [0.6] * 40}, "60% of the completions were cut off"),
    ("truncation", {"completions__clipped_ratio": ramp(0.05, 0.01, 0.02)}, "points more than before"),
    ("kl", {"kl": [*USUAL_KL, 0.5, 0.6, 0.7]}, "The KL divergence from the reference is 0.7, far from its usual 0.05"),
    (
        "reward_failing",
        {"process_rewards/prm/failed_frac": [0.2] * 10, "rewards/format/failed_frac": [0.0] * 10},
        "Reward functions fail: prm (20% over the last 10 optimizer steps). Such",
    ),
    ("reward_failing", {"rewards/a/failed_frac": [1.0] * 3}, "a (100% over the last 3 optimizer steps)"),
    ("process_hacked", process(UP, DOWN, UP), "steps per completion and process reward rose"),
    ("process_hacked", process(UP, DOWN), "s the process reward rose"),
    ("unequal_weights", weights(noise(0.95, 0.2, 300, 0), noise(0.45, 0.2, 300, 1)), "token_truncate"),
    ("unequal_weights", weights(noise(0.6, 0.05, 300, 0), noise(0.95, 0.05, 300, 1)), "a length bias"),
    ("unequal_weights", weights([1.0] * 12, [0.5] * 12), "the longest quarter of the completions 0.50"),
    (
        "lost_sync",
        {"sampling__sampling_logp_difference__mean": [0.0, 0.2, 0.3]},
        "0.25 nats per token over",
    ),
    ("nothing_moves", gradient([0.0] * 10), "The gradient was 0 in every log"),
    ("nothing_moves", gradient([0.1] * 10, [0.0] * 10), "learning_rate was 0"),
    ("nothing_moves", {"drgrpo__moved_frac": [0.002]}, "0.20%"),
    # Too short for a window: judged at the end.
    ("truncation", {"completions__clipped_ratio": [0.8] * 8}, ""),
    ("dead_groups", dead(0.9, steps=5), ""),
    ("sampling_collapse", {"completions__unique_frac": [1 / G] * 5}, ""),
    ("incorrect_grow", lengths(ramp(100, 3, 5, 30), [90] * 30), ""),
    ("kl", {"kl": [0.05, 0.06] * 15 + [0.9] * 3}, ""),
    ("process_hacked", process(UP[:30], DOWN[:30]), ""),
]
SILENT = [
    dead(0.7, steps=100),  # usual
    {"completions__unique_frac": [0.5] * 50},
    lengths(LONGER, ramp(90, 1, 5, seed=2)),  # both
    lengths(ramp(200, -1, 5), EVEN),
    lengths(ramp(1000, 0.2, 0.1), [900] * 60),  # significant, but a few tokens in a thousand
    {"completions__clipped_ratio": noise(0.3, 0.03, 200, 0)},
    {"kl": [*USUAL_KL, 5.0, 0.05, 5.0, 0.05]},  # spikes: k3 has a heavy tail
    {"kl": [1e-4 * t for t in range(300)]},  # it starts at 0 and grows
    {"kl": [0.1] * 55 + [0.11] * 5},  # no spread at all so far
    {"kl": [math.nan, None] * 60},
    {"rewards/a/mean": [1.0] * 50},
    process(UP, UP),  # everything improves
    process(UP, FLAT),
    process(FLAT, DOWN),
    process(DOWN, DOWN),
    process(UP[:19], DOWN[:19]),  # too short to tell
    weights([1.0] * 9, [0.5] * 9),
    weights([1.0] * 100, [0.93] * 100),
    weights(noise(1.0, 0.7, 41, 0), noise(0.8, 0.7, 41, 1)),
    gradient([0.0] * 10, signals=[0.5] * 9 + [1.0]),  # no gradient is due without a signal
    gradient([0.0] * 9 + [0.1]),
    gradient([0.1] * 10, [0.0] * 9 + [1e-6]),  # a warm-up
    {"grad_norm": [0.1] * 10, "drgrpo__dead_groups_frac": [0.5] * 10},  # no learning rate is logged
    {"drgrpo__moved_frac": [0.5]},
    {"sampling__sampling_logp_difference__mean": [0.0, 0.2, 0.09, 0.2]},  # noise
    {"eval_completions__clipped_ratio": [0.9] * 200},
]


@pytest.mark.parametrize(("cause", "series", "words"), TOLD)
def test_a_warning_names_its_cause(cause, series, words):
    told = Told().feed(**series).finish()
    assert told.causes == [cause]
    assert words in told.text
    assert ("more than before" in told.text) == ("more than before" in words)


def test_four_readings_are_too_few():
    for _, series, _ in (row for row in TOLD if row[0] not in ("reward_failing", "nothing_moves", "lost_sync")):
        assert Told().feed(**{name: values[-4:] for name, values in series.items()}).finish().causes == []


@pytest.mark.parametrize("series", SILENT)
def test_a_harmless_series_warns_of_nothing(series):
    assert Told().feed(**series).finish().causes == []


def test_a_window_is_judged_as_soon_as_it_is_full():
    assert Told().feed(**dead(0.9, steps=19)).causes == []
    assert Told().feed(**dead(0.9, steps=30)).warnings[0][0] == 20
    gap = weights([1.0] * 100, [0.93] * 100)
    assert Told({"unequal_weights": {"share": 0.05, "steps": 1}}).feed(**gap).warnings[0][0] == 1


def test_dead_groups_of_equal_texts_are_not_called_too_hard():
    told = Told().feed(**dead(0.9, drgrpo__all_incorrect_frac=0.9, completions__unique_frac=1.1 / G))
    assert told.causes == ["sampling_collapse"]


def test_rewards_that_differ_between_groups_are_not_called_unread():
    for others in ({"reward": 0.5, "drgrpo__reward_min": 0.0}, {"reward": 1.0}, {"drgrpo__reward_min": 1.0}):
        assert "the same reward" not in Told().feed(**dead(1.0, **others)).text


def test_a_run_without_any_signal_says_so_at_its_end():
    assert Told().feed(drgrpo__dead_groups_frac=[1.0] * 6).finish().causes == ["dead_groups"]
    assert Told().finish().causes == []
    wrong = {
        "drgrpo__dead_groups_frac": [1.0] * 12,
        "drgrpo__all_incorrect_frac": [1.0] * 12,
        "drgrpo__pass_rate": [0.0] * 12,
    }
    assert Told().feed(**wrong).finish().causes == ["all_incorrect"]  # not dead_groups as well


def test_steps_that_generate_nothing_are_not_counted_and_the_message_says_so():
    generates = Told()
    for step in range(1, 161):
        generates.watched.observe(step, {"completions/clipped_ratio": 0.9} if step % 4 == 1 else {"kl": 0.01})
    assert generates.warnings[0][:2] == (157, "truncation")
    assert "over the last 157 optimizer steps" in generates.text


def test_warnings_from_logs_need_three_logs():
    series = {"grad_norm": [0.0] * 40, "learning_rate": [1e-5] * 40, "drgrpo__dead_groups_frac": [0.5] * 40}
    sparse = Told(logging_steps=10).feed(**series)
    assert sparse.warnings[0][:2] == (30, "nothing_moves")
    assert "in every log of the last 21 optimizer steps" in sparse.text
    assert Told().feed(**series).warnings[0][:2] == (10, "nothing_moves")
    assert Told(logging_steps=20).feed(**series).finish().causes == ["nothing_moves"]  # 2 logs, at the end
    # What counts is the step that logs: a mean since the last log would hide that it had no signal.
    series["drgrpo__dead_groups_frac"] = ([0.5] * 9 + [1.0]) * 4
    assert Told(logging_steps=10).feed(**series).finish().causes == []


def masked(seed):
    """Weights of two rows per step, each masked with probability 1/2: the noisiest that is likely to occur."""
    rng = random.Random(seed)
    return [statistics.fmean(rng.choice((0.0, 1.0)) for _ in range(2)) for _ in range(300)]


RUNS = int(os.environ.get("FALSE_ALARM_RUNS", "20"))


USUAL = {  # metric -> mean and spread over the steps
    "drgrpo__dead_groups_frac": (0.55, 0.1),
    "completions__unique_frac": (0.9, 0.05),
    "completions__length_incorrect_mean": (600, 60),
    "completions__length_correct_mean": (400, 60),
    "completions__clipped_ratio": (0.25, 0.08),
    "kl": (0.05, 0.01),
    "process__steps_mean": (8, 1),
    "process__reward_mean": (0.5, 0.1),
    "reward": (0.5, 0.1),
    "grad_norm": (0.3, 0.1),
}


# The false-alarm rate on stationary noise: runs of 300 steps with all causes watched at once, the noise of a
# step independent or correlated with the last one's (0.5).
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_noise_alone_is_rarely_warned_of(correlation):
    alarms = []
    for seed in range(RUNS):
        series = {"drgrpo__reward_min": [0.0] * 300, "learning_rate": [1e-5] * 300}
        for which, (name, (mean, std)) in enumerate(USUAL.items()):
            values = noise(mean, std, 300, 100 * seed + which, correlation)
            series[name] = [max(value, 0.0) for value in values]
        series["drgrpo__pass_rate"] = [min(value, 1.0) for value in series["reward"]]
        alarms += Told().feed(**series, **weights(masked(seed), masked(seed + RUNS))).finish().causes
    # Seen with FALSE_ALARM_RUNS=200: 0 alarms in 200 independent runs, 6 (all incorrect_grow) in 200 correlated ones.
    assert len(alarms) <= RUNS * (0.01 if correlation == 0 else 0.05), alarms


def rollouts(pass_rates, seed=0, truncated=0.2, groups=8):
    """The metrics of steps with `groups` prompts, whose difficulty varies, of G completions each."""
    rng = random.Random(seed)
    steps = []
    for pass_rate in pass_rates:
        difficulty = [rng.betavariate(2 * pass_rate, 2 * (1 - pass_rate)) if pass_rate else 0 for _ in range(groups)]
        right = [[rng.random() < p for _ in range(G)] for p in difficulty]
        steps.append(
            {
                "drgrpo__pass_rate": statistics.fmean(row for group in right for row in group),
                "drgrpo__dead_groups_frac": statistics.fmean(len(set(group)) == 1 for group in right),
                "drgrpo__all_incorrect_frac": statistics.fmean(not any(group) for group in right),
                "completions__clipped_ratio": truncated,
            }
        )
    series = {name: [step[name] for step in steps] for name in steps[0]}
    return series | {"reward": series["drgrpo__pass_rate"], "drgrpo__reward_min": [0.0] * len(steps)}


FALLING = [0.46 - 0.45 * t / 199 for t in range(200)]  # 46% to 1%


@pytest.mark.parametrize("logging_steps", [1, 10, 500])
def test_a_pass_rate_that_collapses(logging_steps):
    told = Told(logging_steps=logging_steps).feed(**rollouts(FALLING))
    assert told.causes == ["reward_collapse", "dead_groups"]
    assert told.warnings[0][0] < 150
    assert re.search(r"pass rate has collapsed: 2\d% over the last 30 optimizer steps, down from 4\d%", told.text)
    assert "cut off" not in told.warnings[0][2]
    cut_off = Told({"truncation": False}).feed(**rollouts(FALLING, truncated=0.82))
    assert "82% of the completions are cut off now: raise max_completion_length" in cut_off.warnings[0][2]


@pytest.mark.parametrize("shift", [-1.0, 0.0, 5.0])
def test_a_reward_that_collapses_whatever_its_zero_is(shift):
    series = rollouts(FALLING)
    series = {"reward": [2 * r + shift for r in series["reward"]], "drgrpo__reward_min": [shift] * 200}
    told = Told().feed(**series)
    assert told.causes == ["reward_collapse"]
    assert told.warnings[0][0] < 150
    assert "The mean reward has collapsed" in told.text


def test_rising_flat_or_short_rewards_are_no_collapse():
    for rates in (FALLING[::-1], [0.4] * 200, [0.46 - 0.2 * t / 199 for t in range(200)], [0.05] * 200):
        assert "reward_collapse" not in Told().feed(**rollouts(rates)).causes
    assert Told().feed(**rollouts(FALLING[:40])).finish().causes == []  # 46% to 37%
    short = Told().feed(**rollouts(FALLING[::5])).finish()  # 40 steps: too few for two windows
    assert short.causes == ["reward_collapse"]


def test_a_collapse_is_noticed_over_a_resume():
    series = rollouts(FALLING)
    first = Told().feed(**{name: values[:100] for name, values in series.items()})
    resumed = Told()
    resumed.watched.load_state_dict(json.loads(json.dumps(first.watched.state_dict())))
    resumed.feed(after=100, **{name: values[100:] for name, values in series.items()})
    assert first.warnings + resumed.warnings == Told().feed(**series).warnings


def test_all_incorrect():
    never = Told().feed(**rollouts([0.0] * 40))
    assert never.causes == ["all_incorrect"]  # dead_groups would repeat it
    assert never.warnings[0][0] == 20
    assert "no earlier one was correct" in never.text
    broken = Told({"reward_collapse": False}).feed(**rollouts([0.4] * 40 + [0.0] * 20))
    assert "step 40 had correct ones" in broken.text
    assert Told().feed(**rollouts([0.0] * 20, truncated=0.82)).text.count("82% of them were cut off") == 1
    assert Told().feed(**rollouts([0.0] * 40 + [0.05] * 40)).causes == ["all_incorrect", "dead_groups"]  # it is over
    assert Told().feed(drgrpo__pass_rate=[0.0] * 19 + [0.01] + [0.0] * 19).causes == []
    assert Told().feed(drgrpo__pass_rate=[0.0] * 10).finish().causes == ["all_incorrect"]


def test_all_cut_off_and_no_reward_is_seen_in_the_first_steps():
    series = rollouts([0.0] * 60, truncated=1.0)
    told = Told(logging_steps=10).feed(**series)
    assert told.causes == ["all_truncated"]  # and neither truncation nor all_incorrect nor dead_groups repeats it
    assert told.warnings[0][0] == 5
    assert "Raise max_completion_length" in told.text
    assert "chat template" in told.text
    some_earn = Told().feed(**{**series, "reward": [0.1] * 60})
    assert some_earn.causes == ["all_incorrect", "truncation"]
    for other in ({"drgrpo__dead_groups_frac": [0.5] * 60}, {"drgrpo__pass_rate": [1.0] * 60}):  # from step rewards
        assert "all_truncated" not in Told().feed(**{**series, **other}).causes
    short = {name: values[:3] for name, values in series.items()}
    assert Told().feed(**short).finish().causes == ["all_truncated"]


def test_a_move_of_a_series_is_measured_in_its_noise():
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


def test_each_cause_warns_once_and_can_be_silenced(caplog):
    told = Told().feed(completions__clipped_ratio=[0.9] * 200)
    assert told.causes == ["truncation"]
    assert caplog.text.count("cut off at max_completion_length") == 1
    assert "run_warnings={'truncation': False}" in caplog.text
    assert Told({"truncation": False}).feed(completions__clipped_ratio=[0.9] * 200).causes == []
    assert Told(False).feed(completions__clipped_ratio=[0.9] * 200).causes == []
    assert Told({"truncation": {"share": 0.95}}).feed(completions__clipped_ratio=[0.9] * 200).causes == []


def test_a_restored_run_does_not_repeat_itself_and_goes_on_counting():
    first = Told().feed(completions__clipped_ratio=[0.9] * 45, drgrpo__dead_groups_frac=[0.9] * 45)
    assert first.causes == ["dead_groups", "truncation"]
    half = Told().feed(completions__clipped_ratio=[0.9] * 30)
    assert half.causes == []
    resumed = Told()
    resumed.watched.load_state_dict(json.loads(json.dumps(half.watched.state_dict())))
    resumed.feed(after=30, completions__clipped_ratio=[0.9] * 10)
    assert "over the last 40 optimizer steps" in resumed.text
    assert resumed.causes == ["truncation"]  # 30 + 10 steps
    again = Told()
    again.watched.load_state_dict(first.watched.state_dict())
    again.feed(after=45, completions__clipped_ratio=[0.9] * 200, drgrpo__dead_groups_frac=[0.9] * 200)
    assert again.causes == []


def test_a_run_that_starts_over_is_judged_by_its_own_steps():
    told = Told().feed(completions__clipped_ratio=[0.9] * 30)
    assert told.feed(completions__clipped_ratio=[0.9] * 39).causes == []
    assert told.feed(after=39, completions__clipped_ratio=[0.9]).causes == ["truncation"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"dead_group": {}}, "got 'dead_group'; expected one of all_truncated, .* Did you mean 'dead_groups'"),
        ({"kl": {"step": 3}}, "got 'step' under kl; .* Did you mean 'steps'"),
        ({"kl": {"steps": 0}}, "got 0 for kl: steps; expected a whole number, at least 1"),
        ({"kl": {"steps": 2.5}}, "got 2.5 for kl: steps"),
        ({"kl": {"deviations": True}}, "got True for kl: deviations; expected a finite number, above 0"),
        ({"truncation": {"share": 1.5}}, "got 1.5 for truncation: share; .* at least 0 and at most 1"),
        ({"truncation": {"share": math.nan}}, "got nan for truncation: share"),
        ({"truncation": 0.5}, "got 0.5 for truncation; expected a mapping of thresholds, or false"),
        ("yes", "got 'yes'; expected True, False or a mapping"),
        (None, "got None; expected True, False"),
        (1, "got 1; expected True, False"),
    ],
)
def test_bad_settings_are_named(setting, words):
    with pytest.raises(InputError, match=f"^run_warnings: .*{words}"):
        warning_thresholds(setting)


def test_thresholds_are_read_from_the_settings():
    assert warning_thresholds(False) == {}
    assert warning_thresholds({"kl": True})["kl"] == DEFAULTS["kl"]
    assert warning_thresholds({"kl": {"steps": 9}})["kl"] == {**DEFAULTS["kl"], "steps": 9}
