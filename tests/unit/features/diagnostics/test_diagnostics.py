"""What goes wrong while a run is described, its clock, and which rows are correct; `tests/trainer/test_diagnostics.py`
runs the rest."""

import contextlib
import errno
import json
import logging
import math

import pytest

from trl_drgrpo.common.errors import DiskFullError
from trl_drgrpo.features.diagnostics.diagnostics import PhaseClock
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule


@pytest.fixture
def trainer(build):
    return build()


def test_a_full_disk_is_said_once_and_without_lines_of_code(trainer, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    begin = trainer.diagnostics.on_train_begin, (trainer.args, trainer.state, None)
    begin[0](*begin[1])
    monkeypatch.setattr("trl_drgrpo.features.diagnostics.run_log.write_whole", full)
    with pytest.raises(DiskFullError), trainer.diagnostics.around_train():
        raise DiskFullError("disk full: a checkpoint could not be written.")
    assert caplog.text == ""
    begin[0](*begin[1])
    assert "The start of the run log failed (" in caplog.text
    assert "No space left on device): the run log ends here" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_damaged_state_costs_no_run(trainer, caplog):
    state = json.loads(json.dumps(trainer.diagnostics.state_dict()))
    for known in (None, state):
        trainer.diagnostics.load_state_dict(known)
    assert trainer.describing.failures == {}
    for damaged in ({}, [], {**state, "warnings": []}):
        trainer.diagnostics.load_state_dict(damaged)
    assert trainer.describing.failures.total() == 3
    assert "(warnings may be repeated)" in caplog.text


class Clock(PhaseClock):
    """Phases of an optimizer step on a clock that `passes`."""

    def __init__(self):
        self.now = 0.0
        super().__init__(lambda: self.now)

    def passes(self, seconds, *phases):
        with contextlib.ExitStack() as stack:
            for name in phases:
                stack.enter_context(self.phase(name))
            self.now += seconds


def test_seconds_per_step_and_tokens_per_second():
    clock = Clock()
    for _ in range(2):
        clock.step_begins()
        clock.passes(6, "generate")
        clock.passes(1, "score")
        clock.passes(3)
        clock.step_ends(tokens=100)
        clock.passes(50, "generate")  # an evaluation, a checkpoint: not counted
        clock.step_ends(0)
    assert clock.read() == {
        "time/generate_s": 6,
        "time/score_s": 1,
        "time/train_s": 3,
        "time/tokens_per_s": pytest.approx(10),
    }
    assert clock.read() == {}


def test_a_phase_ends_with_its_block_and_counts_as_the_outer_one():
    clock = Clock()
    clock.step_begins()
    clock.passes(5, "score", "generate")
    with contextlib.suppress(ZeroDivisionError), clock.phase("score"):
        clock.now += 1
        raise ZeroDivisionError
    clock.passes(2, "generate")
    clock.step_ends(0)
    read = clock.read()
    assert [read[f"time/{name}_s"] for name in ("generate", "score", "train")] == [2, 6, 0]
    assert read["time/tokens_per_s"] == 0


# Which rows are correct


def test_a_threshold_is_inclusive_and_an_unscorable_row_is_neither():
    assert CorrectnessRule(["a"], threshold=0.5).judge([0.5, 0.49, math.nan, -1.0]) == [True, False, None, False]


def test_the_named_reward_is_asked():
    rule = CorrectnessRule(["format", "answer"], reward="answer")
    assert (rule.name, rule.index) == ("answer", 1)
    assert CorrectnessRule(["format", "answer"]).index == 0


def test_a_reward_that_is_not_binary_is_never_guessed(caplog):
    rule = CorrectnessRule(["score"])
    with caplog.at_level(logging.INFO):
        assert rule.judge([0.0, 1.0, math.nan]) == [False, True, None]
        assert rule.judge([0.0, 0.5]) is None
        assert rule.judge([0.0, 1.0]) is None  # for good: a curve must not change its meaning
    [record] = caplog.records
    assert record.levelno == logging.INFO  # nothing is wrong with such a reward
    assert "0.5" in record.getMessage()
    assert "correct_threshold" in record.getMessage()
