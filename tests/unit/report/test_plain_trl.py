"""Runs of stock `GRPOTrainer`: what TRL leaves behind is enough for curves, groups and difficulty."""

import json
import shutil

import pytest
from runs import short_run, train
from trl import GRPOTrainer

from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.run_folders import read_run


def even_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory, tokenizer, prompts):
    """A run of stock TRL that saved a checkpoint at step 2 and at its end, and its completions."""
    folder = tmp_path_factory.mktemp("stock") / "run"
    settings = {
        **short_run(folder),
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "log_completions": True,
        "use_cpu": True,
        "bf16": False,
    }
    train(GRPOTrainer, settings, prompts, tokenizer, even_reward)
    return folder


@pytest.fixture
def run_copy(stock_run, tmp_path):
    return shutil.copytree(stock_run, tmp_path / "copy")


def test_a_stock_run(stock_run):
    run = read_run(stock_run)
    assert (run.kind, run.status) == ("trl", "finished at step 4")
    assert [entry.step for entry in run.logged][:4] == [1, 2, 3, 4]
    assert {"reward", "grad_norm", "completions/mean_length"} <= set(run.logged[0].metrics)
    assert run.completions.groups == 8
    groups = list(dict(run.completions.looked_at()).values())
    assert {len(group.rows) for group in groups} == {4}
    scored = [row for group in groups for row in group.rows if row.zscore]
    assert scored  # else nothing below is compared
    for row in scored:  # TRL's own advantages are the z-scores that the report computes
        assert row.zscore == pytest.approx(row.advantage, abs=1e-4)
        assert row.right == (row.reward == 1)


def test_derived_metrics_agree_with_what_trl_logged(stock_run):
    for entry in read_run(stock_run).logged[:4]:
        metrics = entry.metrics
        assert metrics["drgrpo/pass_rate"] == pytest.approx(metrics["reward"], abs=1e-6)
        dead = metrics["drgrpo/all_correct_frac"] + metrics["drgrpo/all_incorrect_frac"]
        assert dead == pytest.approx(metrics["frac_reward_zero_std"], abs=1e-6)


def test_a_continuous_reward_is_not_judged(stock_run, run_copy):
    import pyarrow.compute as pc
    from pyarrow import parquet

    path = min((run_copy / "completions").iterdir())
    table = parquet.read_table(path)
    where = table.column_names.index("even_reward")
    parquet.write_table(table.set_column(where, "even_reward", pc.multiply(table["even_reward"], 0.5)), path)
    run = read_run(run_copy)
    assert "drgrpo/pass_rate" not in run.logged[0].metrics
    assert any("not told apart" in note for note in run.notes)
    assert {row.right for _, group in run.completions.looked_at() for row in group.rows} == {None}


def test_the_newest_state_that_can_be_read_counts(run_copy):
    state = run_copy / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:300])
    run = read_run(run_copy)
    assert run.status == "saved at step 2 of 4"
    assert any("checkpoint-4/trainer_state.json cannot be read" in note for note in run.notes)


def test_a_damaged_file_of_completions_is_left_out(run_copy):
    path = min((run_copy / "completions").iterdir())
    path.write_bytes(path.read_bytes()[:50])
    run = read_run(run_copy)
    assert run.completions.groups == 6
    assert any("1 files of completions cannot be read" in note for note in run.notes)


def test_completions_alone_and_states_alone(run_copy):
    for folder in run_copy.glob("checkpoint-*"):
        shutil.rmtree(folder)
    run = read_run(run_copy)
    assert run.status == "no trainer state saved yet"
    assert [entry.step for entry in run.logged] == [1, 2, 3, 4]
    assert all(row.length is None for _, group in run.completions.looked_at() for row in group.rows)  # no tokenizer
    shutil.rmtree(run_copy / "completions")
    (run_copy / "trainer_state.json").write_text(
        '{"global_step": 3, "max_steps": 9, "log_history": [{"step": 1}, 5, {}]}'
    )
    run = read_run(run_copy)
    assert (run.status, run.completions, len(run.logged)) == ("saved at step 3 of 9", None, 1)


def test_the_contents_are_json_and_have_the_panels(stock_run):
    contents = json.loads(json.dumps(report_contents([read_run(stock_run)]), allow_nan=False))
    titles = [panel["title"] for panel in contents["panels"]]
    assert {"Reward", "Pass rate", "Dead groups", "Completion length", "Entropy"} <= set(titles)
    assert contents["runs"][0]["difficulty"]["gradient_weight"]
