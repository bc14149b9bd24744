"""Settings, state and silence of run warnings."""

import json
import math

import pytest
from told import Told

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_warnings import DEFAULTS, warning_thresholds


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
    resumed.watched.load_state_dict(json.loads(json.dumps(half.watched.state_dict())))
    resumed.feed(after=30, completions__truncated_frac=[0.9] * 10)
    assert "over the last 40 optimizer steps" in resumed.text
    assert resumed.causes == ["truncation"]  # 30 + 10 steps
    again = Told()
    again.watched.load_state_dict(first.watched.state_dict())
    again.feed(after=45, completions__truncated_frac=[0.9] * 200, drgrpo__zero_signal_frac=[0.9] * 200)
    assert again.causes == []


def test_a_run_that_starts_over_is_judged_by_its_own_steps():
    told = Told().feed(completions__truncated_frac=[0.9] * 30)
    assert told.feed(completions__truncated_frac=[0.9] * 39).causes == []
    assert told.feed(after=39, completions__truncated_frac=[0.9]).causes == ["truncation"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"dead_group": {}}, "got 'dead_group'; expected one of all_truncated, .* Did you mean 'dead_groups'"),
        ({"kl": {"step": 3}}, "got 'step' under kl; .* Did you mean 'steps'"),
        ({"kl": {"steps": 0}}, "got 0 for kl: steps; expected a whole number, at least 1"),
        ({"kl": {"steps": 2.5}}, "got 2.5 for kl: steps"),
        ({"kl": {"deviations": True}}, "got True for kl: deviations; expected a finite number, above 0"),
        (
            {"truncation": {"share": 1.5}},
            "got 1.5 for truncation: share; .* at least 0 and at most 1",
        ),
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
