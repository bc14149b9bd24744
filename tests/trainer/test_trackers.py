"""Logs and tables of completions in the real packages of trackers, offline, in a process of their own.

`pip install "trl-drgrpo[trackers]"` installs them; without them these tests are skipped.
"""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from trl_drgrpo.upstream.completion_tables import plain_column

SUPPORT = Path(__file__).parents[1] / "support"

# Values that Parquet or a tracker has no type for, beside those that it has.
RUN = """
import sys
from datasets import Dataset
import numpy as np
import runs
from walk import Scripted, Walk, with_tools
from trl_drgrpo import DrGRPOTrainer

EXTRAS = {
    "mixed": [1, "a", None, 2.5],
    "numpy": [np.float32(1.5), np.int64(2), None, np.nan],
    "arrays": [np.arange(2), np.arange(3), None, np.zeros(1)],
    "dicts": [{"a": 1}, {"b": "x"}, {}, None],
    "bytes": [b"\\xff", b"", None, b"a"],
    "surrogate": ["\\ud83d", "\\u00e9\\U0001d11e", None, ""],
    "big": [2**70, 1, None, 0],
    "objects": [object(), None, None, ValueError("x")],
}


def reward(completions, log_extra, log_metric, **kwargs):
    for name, values in EXTRAS.items():
        log_extra(name, values * (len(completions) // 4))
    log_extra("short", [1])
    log_metric("of_numpy", np.float32(0.5))
    return [None if row % 4 == 0 else float(row) for row in range(len(completions))]


def train(output_dir, report_to, resume, *, kind):
    settings = {**runs.short_run(output_dir), "report_to": report_to, "run_name": "run", "project": "project"}
    settings |= {"log_completions": True, "num_completions_to_print": 0, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_steps": 3 if resume else 2}
    model, tokenizer = with_tools()
    prompts = [{"prompt": [{"role": "user", "content": f"{i} \\u00e9\\U0001d11e?"}]} for i in range(16)]
    if kind == "turns":
        settings["max_completion_length"] = 512
        arguments = {"model": model, "environment_factory": Walk}
        trainer = runs.build(Scripted, settings, Dataset.from_list(prompts), tokenizer, None, **arguments)
    else:
        trainer = runs.build(DrGRPOTrainer, settings, Dataset.from_list(prompts), tokenizer, reward, model)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.end()
    assert not trainer.describing.failures, trainer.describing.failures


output_dir, report_to, *kinds = sys.argv[1:]
for kind in kinds:
    name, _, resumed = kind.partition("+")
    train(f"{output_dir}/{name}", report_to.split(","), bool(resumed), kind=name)
"""


PACKAGES = [name for name in ("wandb", "trackio") if find_spec(name)]
needs = {
    name: pytest.mark.skipif(name not in PACKAGES, reason=f'needs {name}: pip install "trl-drgrpo[trackers]"')
    for name in ("wandb", "trackio")
}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of runs with all trackers, which keep everything in it: one that is resumed, and one with tools."""
    folder = tmp_path_factory.mktemp("tracked")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "WANDB_RUN_ID": "one",
        "WANDB_RESUME": "allow",
        "TRACKIO_DIR": str(folder / "trackio"),
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    report_to = ",".join([*PACKAGES, "tensorboard"])
    command = [sys.executable, "-c", RUN, str(folder / "out"), report_to, "rewards", "rewards+resumed", "turns"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def check_tables(tables):
    of_rewards = [rows for rows in tables if "mixed" in rows[0]]
    assert {row["step"] for rows in of_rewards for row in rows} == {1, 2, 3}
    for rows in of_rewards:
        assert [row["mixed"] for row in rows[:2]] == ["1", "a"]
        assert [row["numpy"] for row in rows[:2]] == [1.5, 2]
        assert rows[0]["arrays"] == [0, 1]
        assert rows[0]["bytes"] == r"b'\xff'"
        assert rows[1]["surrogate"] == "é𝄞"
        assert rows[0]["big"] == str(2**70)
        assert rows[0]["prompt"][0]["content"].endswith("é𝄞?")
        assert rows[1]["reward"] == 1.0
        assert "short" not in rows[0]
    turns = [message for rows in tables if "mixed" not in rows[0] for row in rows for message in row["completion"]]
    assert {message["role"] for message in turns} == {"assistant", "tool"}


@pytest.mark.slow
@needs["wandb"]
def test_tables_in_wandb(tracked):
    tables = []
    for path in sorted(tracked.glob("wandb/offline-run-*/files/media/table/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        tables.append([dict(zip(content["columns"], row, strict=True)) for row in content["data"]])
    check_tables(tables)


@pytest.mark.slow
@needs["trackio"]
def test_logs_and_tables_in_trackio(tracked):
    database = sqlite3.connect(tracked / "trackio" / "project.db")
    logged = [json.loads(metrics) for (metrics,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    check_tables([line["completions"]["_value"] for line in logged if "completions" in line])
    steps = [line["train/global_step"] for line in logged if "train/rewards/reward/mean" in line]
    assert steps == [1, 2, 3]  # the resumed run goes on in the same one


def test_columns_that_parquet_has_no_type_for_become_text():
    rows = [{"role": "tool", "arguments": {"to": to}} for to in (1, "a")]
    assert plain_column(rows) == [json.dumps(row) for row in rows]
    messages = [[{"role": "user", "content": "é"}], [{"role": "user", "content": "?"}, {"role": "assistant"}]]
    assert plain_column(messages) == messages
    assert plain_column([torch.tensor(1.5), None]) == [1.5, None]
    assert plain_column([]) == []


def test_one_odd_value_costs_no_table(train, output, caplog):
    def odd(completions, log_extra, **kwargs):
        log_extra("odd", [1, "a"] * (len(completions) // 2))
        log_extra("one of eight", [1])
        return [float(row % 3) for row in range(len(completions))]

    trainer = train(odd, max_steps=2, log_completions=True, num_completions_to_print=0)
    assert not trainer.describing.failures
    assert caplog.text.count("log of 'one of eight': got 1 values") == 1
    table = pq.read_table(output / "completions" / "completions_00002.parquet").to_pylist()
    assert [row["odd"] for row in table[:2]] == ["1", "a"]
    assert "one of eight" not in table[0]
