"""Prompts that carry signal: what the study counts, how it goes on, what its tables say."""

import dataclasses
import json

import pytest

from trl_drgrpo.labs.study import signal_report, signal_runs
from trl_drgrpo.labs.study.signal_arms import ARMS, SignalSettings, Start
from trl_drgrpo.labs.study.signal_runs import SignalRun, run_arm

SMALL = SignalSettings(
    {"low": Start("few correct", (3, 4), 24, 700), "middle": Start("half correct", (3, 3), 24, 700)},
    prompts=2,
    num_generations=4,
    different_prompts=40,
    held_out=8,
    evaluations=2,
)


@pytest.fixture
def calls(monkeypatch):
    made = []

    def fake(settings, start, arm, seed, output_dir, factor=None):
        made.append((seed, start, arm))
        if len(made) == 10:
            raise KeyboardInterrupt
        task = settings.starts[start]
        end = {"plain": 0.4, "plain_raised": 0.2}.get(arm, 0.5) + 0.1 * seed
        rate = settings.learning_rate * (factor if ARMS[arm].raised else 1)
        run = SignalRun(start, arm, seed, rate, 10, [0, task.tokens], [0.1, end], [0.0, 4.0 + (arm == "both")])
        run.factor = 2.0 + seed if arm == "dapo" else None
        return run

    monkeypatch.setattr(signal_report, "run_arm", fake)
    return made


def test_an_interrupted_study_goes_on_and_its_tables_say_what_was_run(calls, tmp_path):
    output = tmp_path / "signal.json"
    with pytest.raises(KeyboardInterrupt):
        signal_report.run_study(range(2), output, tmp_path, SMALL)
    assert len(json.loads(output.read_text())["runs"]) == 9
    results = signal_report.run_study(range(2), output, tmp_path, SMALL)
    in_order = [(seed, start, arm) for seed in range(2) for start in SMALL.starts for arm in ARMS]
    assert [(run["seed"], run["start"], run["arm"]) for run in results["runs"]] == in_order
    assert len(calls) == len(in_order) + 1  # none twice but the one that was interrupted
    raised = [run["learning_rate"] for run in results["runs"] if run["arm"] == "plain_raised"]
    assert raised == pytest.approx([6e-4, 6e-4, 9e-4, 9e-4])  # times the factor of the same seed
    assert signal_report.factor_sentence(results, "low") == "2.50 on average (2.00 to 3.00)"

    text = signal_report.table(results, "low")
    assert "| plain | 3.0e-04 | 10 | 100 | 4 | 27.5 ± 31.8 | 45.0 ± 63.5 | 27.5 ± 31.8 | 45.0 ± 63.5 |" in text
    differences = signal_report.difference_table(results, "low")
    assert "| `dynamic_sampling: dapo` minus plain | +5.0 ± 0.0 | +10.0 ± 0.0 | +5.0 ± 0.0 | +10.0" in differences
    assert "| `dynamic_sampling: true` minus `dynamic_sampling: dapo` | +0.0 ± 0.0 |" in differences
    # 5 s where the others took 4: read at 4 s, 0.1 + 0.8 * 0.4 and 0.1 + 0.8 * 0.5
    (both,) = [line for line in text.splitlines() if "true`, `curriculum" in line]
    assert both.endswith("| 46.0 ± 50.8 |")
    assert signal_report.draw(results, tmp_path / "signal.png").stat().st_size > 10_000

    other = dataclasses.replace(SMALL, learning_rate=1e-3)
    assert len(signal_report.run_study(range(1), output, tmp_path, other)["runs"]) == 2 * len(ARMS)


def test_seeds_that_are_incomplete_are_left_out():
    runs = [dataclasses.asdict(SignalRun("low", arm, 0, 1e-4)) for arm in ARMS]
    runs += [dataclasses.asdict(SignalRun("low", arm, 1, 1e-4)) for arm in list(ARMS)[:-1]]
    assert signal_report.complete_seeds({"runs": runs}, "low") == [0]
    assert signal_report.complete_seeds({"runs": runs}, "middle") == []


def test_the_tokens_of_dropped_groups_count(tmp_path, monkeypatch):
    trainers = []
    build = signal_runs.build_trainer
    monkeypatch.setattr(signal_runs, "build_trainer", lambda *given: trainers.append(build(*given)) or trainers[-1])
    run = run_arm(SMALL, "low", "dapo", 0, tmp_path)
    log = [entry for entry in trainers[0].state.log_history if "num_tokens" in entry]
    assert run.steps == len(log)
    rows = sum(entry["sampling/groups_generated"] for entry in log) * SMALL.num_generations
    assert rows > run.steps * SMALL.prompts * SMALL.num_generations  # some were dropped
    prompt_tokens = log[-1]["num_tokens"] - run.tokens[-1]  # TRL counts both
    assert 20 * rows < prompt_tokens < 40 * rows
    assert run.tokens[0] == 0
    assert run.tokens[-1] >= 700
    assert run.seconds == sorted(run.seconds)
    assert run.factor > 1
    assert 0 < run.live_share < 1


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path):
    output = tmp_path / "signal.json"
    results = signal_report.run_study(range(2), output, tmp_path, SMALL, jobs=2)
    assert json.loads(output.read_text())["runs"] == results["runs"]
    for start in SMALL.starts:
        assert signal_report.complete_seeds(results, start) == [0, 1]
        assert signal_report.table(results, start).count("±") == 4 * len(ARMS)
