"""The benchmark of memory runs from end to end on a CPU, with every method and both trainers."""

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
