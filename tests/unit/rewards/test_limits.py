"""Limits: ranges, and shares of the cores."""

import os

import numpy as np
import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.limits import Limits, available_workers


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("timeout", 0, "a finite number, above 0 and at most 1000000"),
        ("timeout", float("inf"), "a finite number, above 0 and at most 1000000"),
        ("timeout", float("nan"), "a finite number, above 0 and at most 1000000"),
        ("timeout", "5", "a finite number, above 0 and at most 1000000"),
        ("timeout", True, "a finite number, above 0 and at most 1000000"),
        ("memory_mb", 1, "a whole number, at least 64"),
        ("memory_mb", "4G", "a whole number, at least 64"),
        ("workers", 0, "a whole number, at least 1"),
        ("workers", 1.5, "a whole number, at least 1"),
        ("calls_per_worker", 0, "a whole number, at least 1"),
        ("calls_per_worker", None, "a whole number, at least 1"),
    ],
)
def test_limits_out_of_range_are_named(field, value, expected):
    with pytest.raises(InputError, match=f"^{field}: got {value!r}; expected {expected}"):
        Limits(**{field: value})


@pytest.mark.parametrize(("processes", "workers"), [("1", 8), ("2", 4), ("3", 2), ("64", 1), ("0", 8), ("x", 8)])
def test_trainer_processes_share_the_cores(monkeypatch, processes, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert available_workers() == workers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 1e300),
        ("timeout", 10**400),
        ("timeout", 10**5000),
        ("memory_mb", 2**45),
        ("memory_mb", 10**20),
        ("workers", 10**9),
        ("workers", True),
        ("workers", 2.0),
        ("memory_mb", 10**5000),
    ],
    ids=["1e300", "10**400", "10**5000", "2**45", "10**20", "10**9", "True", "2.0", "10**5000 MB"],
)
def test_limits_that_no_system_could_keep(field, value):
    with pytest.raises(InputError, match=f"{field}: got "):
        Limits(**{field: value})


def test_limits_take_numbers_of_numpy():
    assert Limits(np.float32(2.0), np.int64(128), np.int32(2)) == Limits(2.0, 128, 2)
