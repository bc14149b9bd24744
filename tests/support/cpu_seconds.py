"""A pytest plugin that measures the CPU seconds of each test, and writes those that `make test` leaves out.

`make costly` runs all tests in one process with it. Time of subprocesses counts for the test that waits for their end.
"""

import os
from pathlib import Path

import pytest

COSTLY = Path(__file__).parents[1] / "costly.txt"
MOST_SECONDS = 0.35
# What `make test` has whatever it costs: a run from end to end, its gradient, what it loads, and what goes on.
KEPT = (
    "tests/trainer/test_plain_run.py::",
    "tests/trainer/test_trainer.py::test_swapping_the_class_changes_no_bit",
    "tests/trainer/test_fast_path.py::test_gradients_are_those_of_stock_trl",
    "tests/trainer/test_resume.py::test_a_resumed_run_ends_like_an_uninterrupted_one[misaligned]",
    "tests/unit/host_proof/test_proof.py::test_the_proof_passes_on_the_installed_libraries",
    "tests/unit/test_check.py::test_the_command_prints_a_table_and_exits_0",
    "tests/unit/test_demo.py::TestRun::test_two_steps_from_end_to_end",
    "tests/unit/rewards/isolation/test_isolated.py::test_training_goes_on_where_a_reward_hangs",
)
_seconds: dict[str, float] = {}


def _spent():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    begun = _spent()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid] = _spent() - begun


def pytest_sessionfinish(session):
    write(_seconds)


def write(seconds):
    """Write the tests that cost too much. Doctests cost what their module imports, so they stay."""
    costly = [name for name, spent in seconds.items() if spent > MOST_SECONDS and name.startswith("tests/")]
    left_out = sorted(name for name in costly if not name.startswith(KEPT))
    COSTLY.write_text("".join(f"{name}\n" for name in left_out), encoding="utf-8")
