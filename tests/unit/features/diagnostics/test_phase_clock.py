import contextlib

import pytest

from trl_drgrpo.features.diagnostics.diagnostics import PhaseClock


class Time:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time):
    return PhaseClock(time)


def test_seconds_per_step_and_tokens_per_second(clock, time):
    for _ in range(2):
        clock.step_begins()
        with clock.phase("generate"):
            time.now += 6
        with clock.phase("score"):
            time.now += 1
        time.now += 3
        clock.step_ends(tokens=100)
        time.now += 50  # an evaluation, a checkpoint
    assert clock.read() == {
        "time/generate_s": 6,
        "time/score_s": 1,
        "time/train_s": 3,
        "time/tokens_per_s": pytest.approx(10),
    }
    assert clock.read() == {}


def test_a_phase_inside_another_counts_as_the_outer_one(clock, time):
    clock.step_begins()
    with clock.phase("score"), clock.phase("generate"):
        time.now += 5
    clock.step_ends(0)
    assert clock.read()["time/score_s"] == 5


def test_an_evaluation_is_not_counted(clock, time):
    with clock.phase("generate"):
        time.now += 5
    clock.step_ends(0)
    assert clock.read() == {}
    clock.step_begins()
    time.now += 2
    clock.step_ends(0)
    assert clock.read()["time/generate_s"] == 0  # nor in the step behind it


def test_a_reward_that_raises_ends_its_phase(clock, time):
    clock.step_begins()
    with contextlib.suppress(ZeroDivisionError), clock.phase("score"):
        time.now += 1
        raise ZeroDivisionError
    with clock.phase("generate"):
        time.now += 2
    clock.step_ends(0)
    assert clock.read() == {
        "time/generate_s": 2,
        "time/score_s": 1,
        "time/train_s": 0,
        "time/tokens_per_s": 0,
    }
