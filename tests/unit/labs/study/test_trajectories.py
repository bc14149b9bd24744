"""What the studies of a language model record and print: curves, tables with intervals, the plot, going on."""

import dataclasses
import json
import math

import numpy as np
import pytest

from trl_drgrpo.labs.study import trajectory_report
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.labs.study.rungs import ARITHMETIC, GUESSING, VERIFY
from trl_drgrpo.labs.study.trajectories import ARMS, LAST, RunSettings, Trajectory


@pytest.fixture
def made_up():
    rng = np.random.default_rng(0)
    runs = []
    for arm in ARMS:
        for seed in range(3):
            wrong = list(9 + rng.normal(size=30) + (30 if arm == "grpo" else 0))
            rates = [0.4] * 5 + [0.5] * 25 if arm == "dr_grpo" else [0.4] * 10 + [0.5] * 20
            runs.append(
                Trajectory(arm, seed, [8.0] * 30, wrong, rates, [0.5] * 30, [1000] * 30, 30_000, 1.0).as_dict()
            )
    estimate = {"value": 1.0, "standard_error": 0.5}
    changes = {name: dict.fromkeys(("length_right", "length_wrong", "pass_rate"), estimate) for name in OBJECTIVES}
    half = {"value": 0.5, "standard_error": 0.25}
    differences = {name: dict.fromkeys(changes[name], half) for name in OBJECTIVES}
    return {"runs": runs, "one_step": {"changes": changes, "differences_from_dr_grpo": differences}}


def test_tables_and_plot(made_up, tmp_path):
    text = trajectory_report.table(GUESSING, made_up)
    assert "| grpo | 39." in text
    assert "| dr_grpo, no std | 9." in text or "| dr_grpo, no std | 8." in text
    assert "until" not in text  # the pass rate cannot change
    one_step = trajectory_report.one_step_table(made_up)
    assert one_step.count("+1.0 ± 0.5") == 2 * len(OBJECTIVES)
    assert one_step.count("+100.0 ± 50.0") == len(OBJECTIVES)
    differences = trajectory_report.one_step_table(made_up, difference=True)
    assert differences.count("+0.5 ± 0.2") == 2 * (len(OBJECTIVES) - 1)  # none from itself
    assert trajectory_report.draw(made_up, tmp_path / "plot.png").stat().st_size > 10_000


def test_differences_are_taken_seed_by_seed():
    runs = []
    for seed, level in ((0, 10.0), (1, 30.0)):  # seeds differ by far more than arms
        for arm, extra in (("grpo", 5.0), ("dapo", 1.0), ("dr_grpo", 0.0)):
            curve = [level + extra] * 3
            runs.append(Trajectory(arm, seed, curve, curve, [0.5] * 3, [0.1] * 3, [8] * 3, 24, 1.0).as_dict())
    text = trajectory_report.difference_table(ARITHMETIC, {"runs": runs})
    assert "| grpo | +5.0 ± 0.0 | +5.0 ± 0.0 | +0.00 ± 0.00 | +0.000 ± 0.000 |" in text
    assert "| dapo (TRL's default) | +1.0 ± 0.0 |" in text
    assert "| dr_grpo, no std |" not in text


def test_tokens_are_compared_at_the_pass_rate_that_every_run_reaches(made_up):
    text = trajectory_report.table(ARITHMETIC, made_up)
    assert "thousand until 0.50 passed" in text
    (ours,) = [line for line in text.splitlines() if line.startswith("| dr_grpo, no std |")]
    assert ours.endswith("| 30 ± 0 | 25 ± 0 |")  # 20 steps at 0.5 behind the first 5
    (theirs,) = [line for line in text.splitlines() if line.startswith("| grpo |")]
    assert theirs.endswith("| 30 ± 0 | 30 ± 0 |")


def test_a_pass_rate_that_is_never_reached_has_no_tokens():
    run = Trajectory("grpo", 0, pass_rate=[0.1] * LAST, tokens_by_step=[10] * LAST)
    assert run.best() == pytest.approx(0.1)
    assert run.tokens_until(0.1 - 1e-9) == 10 * LAST
    assert run.tokens_until(0.2) is None


def test_steps_without_a_right_answer_are_missing_not_zero():
    run = Trajectory("grpo", 0, length_right=[float("nan"), 4.0, 6.0])
    assert run.end("length_right") == 5.0
    plain = json.loads(json.dumps(run.as_dict(), allow_nan=False))
    assert plain["length_right"] == [None, 4.0, 6.0]
    assert math.isnan(Trajectory.from_dict(plain).length_right[0])
    assert math.isnan(Trajectory("grpo", 0, length_right=[float("nan")]).end("length_right"))


@pytest.fixture
def verified():
    """Three seeds of the arms of `verify`: under grpo the gap grows by 12, 12 and 18 tokens."""
    runs = []
    for seed, level in enumerate((5.0, 20.0, 8.0)):
        for arm, gap in (("grpo", 12.0 + 6 * (seed == 2)), ("dapo", seed - 1.0), ("dr_grpo", 0.0)):
            runs.append(
                Trajectory(
                    arm,
                    seed,
                    length_right=[level] * 30,
                    length_wrong=[level + gap] * 30,
                    pass_rate=[0.36] * 30,
                    entropy=[0.1] * 30,
                    tokens_by_step=[10] * 30,
                    tokens=300,
                    verdicts=[0.9995] * 30,
                ).as_dict()
            )
    return {"runs": runs}


def test_the_gap_is_compared_seed_by_seed(verified):
    text = trajectory_report.gap_table(verified)
    assert "| grpo | +14.0 ± 8.6 | +14.0 ± 8.6 |" in text  # 12, 12, 18: t(2) = 4.303, times 3.464 / sqrt(3)
    assert "| dapo (TRL's default) | +0.0 ± 2.5 | +0.0 ± 2.5 |" in text
    assert text.splitlines()[-1] == "| dr_grpo, no std | +0.0 ± 0.0 |  |"
    assert "| 0.9995 ± 0.0000 |" in trajectory_report.table(VERIFY, verified)
    assert "true verdicts" not in trajectory_report.table(ARITHMETIC, verified)


def test_the_conclusion_says_what_the_numbers_do(verified):
    text = trajectory_report.conclusion(VERIFY, verified)
    assert "above 0 with grpo (+14.0 ± 8.6); not told apart from 0 with dapo (TRL's default) (+0.0 ± 2.5)." in text
    assert "The length bias shows under grpo." in text
    assert text.endswith("the pass rate was 0.360 ± 0.000 at the end, chance being 0.364: the runs count.")
    assert "99.95% in the worst run" in text
    for run in verified["runs"]:
        run["length_wrong"] = run["length_right"]
    assert "The length bias does not show." in trajectory_report.conclusion(VERIFY, verified)


@pytest.mark.parametrize(("name", "value"), [("verdicts", 0.99), ("pass_rate", 0.5)])
def test_runs_in_which_the_model_does_not_know_or_learns_do_not_count(verified, name, value):
    for run in verified["runs"] if name == "pass_rate" else verified["runs"][:1]:
        run[name][10:] = [value] * 20
    assert trajectory_report.conclusion(VERIFY, verified).endswith("the runs do not count.")


@pytest.mark.parametrize("rung", [GUESSING, ARITHMETIC, VERIFY], ids=lambda rung: rung.name)
def test_an_interrupted_study_goes_on(monkeypatch, tmp_path, rung):
    calls = []
    stop_at = 2 * len(ARMS) - 1

    def fake(rung, arm, seed, model_dir, output_dir):
        calls.append((arm, seed))
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return Trajectory(arm, seed, [1.0], [1.0], [0.4], [0.1], [1], 1, 0.1)

    monkeypatch.setattr(trajectory_report, "run_arm", fake)
    monkeypatch.setattr(trajectory_report, "_one_step", lambda *given: {"changes": {}})
    rung = dataclasses.replace(rung, warm_start=lambda folder: folder)
    output = tmp_path / "numbers.json"
    with pytest.raises(KeyboardInterrupt):
        trajectory_report.run_study(rung, range(2), output, tmp_path)
    assert len(json.loads(output.read_text())["runs"]) == stop_at - 1
    results = trajectory_report.run_study(rung, range(2), output, tmp_path)
    in_order = [(arm, seed) for seed in range(2) for arm in ARMS]
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == in_order
    assert len(calls) == len(in_order) + 1  # none twice but the one that was interrupted
    other = dataclasses.replace(rung, settings=RunSettings(steps=3))
    assert len(trajectory_report.run_study(other, range(1), output, tmp_path)["runs"]) == len(ARMS)
