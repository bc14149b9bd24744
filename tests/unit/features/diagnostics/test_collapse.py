"""Runs that collapse, or never start."""

import json
import random
import re
import statistics

import pytest
from told import G, Told


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
                "drgrpo__zero_signal_frac": statistics.fmean(len(set(group)) == 1 for group in right),
                "drgrpo__all_incorrect_frac": statistics.fmean(not any(group) for group in right),
                "completions__truncated_frac": truncated,
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


def test_what_is_no_collapse():
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
    assert Told().feed(**{**series, "reward": [0.1] * 60}).causes == [
        "all_incorrect",
        "truncation",
    ]  # some earn something
    signal = {**series, "drgrpo__zero_signal_frac": [0.5] * 60}  # from step rewards
    assert "all_truncated" not in Told().feed(**signal).causes
    assert "all_truncated" not in Told().feed(**{**series, "drgrpo__pass_rate": [1.0] * 60}).causes
    short = {name: values[:3] for name, values in series.items()}
    assert Told().feed(**short).finish().causes == ["all_truncated"]
