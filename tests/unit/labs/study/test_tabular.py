"""Rung a: the length bias appears under a divisor per row, and under no constant one."""

import json

import numpy as np
import pytest

from trl_drgrpo.cli.main import main
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.tabular import TabularTask, expected_length, length_drift, length_scores, run_tabular
from trl_drgrpo.labs.study.tabular_report import drift_table, tabular_study


@pytest.mark.parametrize("stop", [0.01, 0.2, 0.9])
def test_the_expected_length_is_that_of_drawn_completions(stop):
    drawn = np.minimum(np.random.default_rng(0).geometric(stop, 200_000), 64)
    assert expected_length(np.log(stop / (1 - stop)), 64) == pytest.approx(drawn.mean(), rel=0.01)


def test_the_score_is_the_derivative_of_the_log_probability():
    lengths, stopped = np.array([1, 5, 64]), np.array([True, True, False])

    def log_probability(logit):
        stop = 1 / (1 + np.exp(-logit))
        return (lengths - stopped) * np.log(1 - stop) + stopped * np.log(stop)

    step, logit = 1e-6, -1.3
    numeric = (log_probability(logit + step) - log_probability(logit - step)) / (2 * step)
    stop = np.full(3, 1 / (1 + np.exp(-logit)))
    assert length_scores(lengths, stopped, stop) == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("objective", ["grpo", "grpo_without_std"])
def test_a_divisor_per_row_makes_wrong_answers_grow_and_right_ones_shrink(objective):
    for seed in range(3):
        run = run_tabular(objective, seed)
        assert run.length_wrong[-1] > 40
        assert run.length_right[-1] < 1.5


@pytest.mark.parametrize("objective", ["dr_grpo", "dr_grpo_with_std", "dapo"])
def test_a_common_divisor_moves_neither_beyond_noise(objective):
    runs = [run_tabular(objective, seed) for seed in range(5)]
    for run in runs:
        assert 3 < run.length_wrong[-1] < 20
        assert 3 < run.length_right[-1] < 20


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    task = TabularTask(steps=20)
    assert run_tabular("grpo", 0, task) == run_tabular("grpo", 0, task)
    assert run_tabular("grpo", 0, task).length_wrong != run_tabular("grpo", 1, task).length_wrong


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = interval(list(rng.normal(3.0, 2.0, 5)))
        covered += abs(found.mean - 3.0) <= found.half_width
    assert 0.93 < covered / 2000 < 0.97


def test_the_command_prints_tables_and_writes_numbers_and_a_plot(tmp_path, capsys):
    assert main(["study", "tabular", "--seeds", "2", "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| grpo | 47" in printed
    assert "| 1 | 0.44 | 0.66 | 1.51 |" in printed
    numbers = json.loads((tmp_path / "tabular.json").read_text())
    assert numbers["objectives"] == json.loads(json.dumps(tabular_study(range(2))["objectives"]))
    assert (tmp_path / "tabular.png").stat().st_size > 10_000


def test_one_seed_is_refused(capsys):
    assert main(["study", "tabular", "--seeds", "1"]) == 2
    assert "seeds: got 1; expected at least 2." in capsys.readouterr().err


def test_the_expected_update_moves_two_rates_apart_under_a_divisor_per_row_alone():
    found = length_drift(prompts=16, batches=200)
    noise = 1 / np.sqrt(200)
    for name in ("grpo", "grpo_without_std"):
        correct, incorrect, shared = found[name]
        assert correct > 1
        assert incorrect < -1
        assert abs(shared) < 4 * noise
    assert np.abs([found["dr_grpo"], found["dr_grpo_with_std"]]).max() < 4 * noise
    assert f"| grpo | {found['grpo'][0]:+.2f} | {found['grpo'][1]:+.2f} |" in drift_table(found, found)
