"""Benchmarks run from end to end, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_tiny_benchmark_prints_a_line_per_run():
    script = Path(__file__).parents[2] / "tests" / "benchmarks" / "memory.py"
    methods = ["full", "lora", "qlora"]
    command = [sys.executable, str(script), "--tiny", "--methods", *methods]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("tiny")]
    assert [line[1:3] for line in lines] == [[m, kind] for m in methods for kind in ("drgrpo", "stock")]
    for _, method, kind, planned, measured, *_ in lines:
        assert float(measured) > 0
        if kind == "drgrpo" and method != "qlora":
            assert float(measured) <= float(planned) <= 1.15 * float(measured)


@pytest.mark.slow
def test_the_price_of_step_rewards_is_measured():
    script = Path(__file__).parents[2] / "tests" / "benchmarks" / "process_overhead.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--pairs", "1", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads(done.stdout[done.stdout.index("{\n") :])
    inside = numbers["inside"]
    assert 0 < inside["cutting_frac"] + inside["rule_frac"] < inside["step_rewards_frac"] < 0.5
    assert 0 < numbers["without_step_rewards"]["advantages_frac"] < 0.1
    assert numbers["to_go"]["ms"] > 0
