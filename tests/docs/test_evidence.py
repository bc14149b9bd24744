"""What the documents say of the studies is what the committed results say, to the last digit."""

import json
import re
import statistics
from itertools import product
from pathlib import Path

import gpu
import pictures
import pytest

from trl_drgrpo.cli.study import STUDIES
from trl_drgrpo.labs.study import (
    credit_report,
    forks_report,
    probe_report,
    search_report,
    signal_report,
    tabular_report,
    trajectories,
    trajectory_report,
    variance_report,
)
from trl_drgrpo.labs.study.credit_arms import ARMS
from trl_drgrpo.labs.study.forks_runs import FORKS, LEARNING
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.rungs import RUNGS

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
GUIDES = RECIPES / "guides"
BIASES = ("tabular", *RUNGS)
FILES = {study: f"length_bias_{study}" for study in BIASES}
FILES |= {study: study for study in ("verify", "credit", "signal", "search", "forks", "probe", "variance")}
RESULTS = {study: RECIPES / "results" / f"{file}.json" for study, file in FILES.items()}
PAGES = dict.fromkeys(BIASES, (GUIDES / "evidence.md").read_text()) | {
    "credit": (GUIDES / "process_rewards.md").read_text(),
    "search": (GUIDES / "search.md").read_text(),
    "signal": (GUIDES / "signal.md").read_text(),
    "forks": (GUIDES / "forks.md").read_text(),
    "probe": (GUIDES / "evidence.md").read_text(),
    "variance": (GUIDES / "evidence.md").read_text(),
}


def read(study):
    return json.loads(RESULTS[study].read_text())


def tables(study):
    results = read(study)
    if study == "tabular":
        return [tabular_report.table(results), tabular_report.gradient_weight_table(results)]
    if study == "signal":
        starts = results["settings"]["starts"]
        parts = (signal_report.table, signal_report.difference_table, signal_report.factor_sentence)
        return [part(results, start) for start in starts for part in parts]
    if study == "search":
        return [search_report.table(results)]
    if study == "probe":
        return [probe_report.table(results), probe_report.correlation_table(results), probe_report.sentence(results)]
    if study == "variance":
        noise = [variance_report.noise_table(results, with_std) for with_std in (False, True)]
        return [*noise, variance_report.shape_table(results), variance_report.sentence(results)]
    if study == "credit":
        return [credit_report.table(task, results) for task in results["settings"]]
    if study == "forks":
        found = [f"{forks_report.learning_title(results)}:", forks_report.learning_table(results)]
        for stage in results["stages"]:
            found.append(f"{forks_report.stage_title(stage, results)}:")
            found.append(forks_report.variance_table(results, stage["stage"]))
        repeated = json.loads((RECIPES / "results" / "forks_repeated.json").read_text())
        again = [forks_report.over_flat(repeated, "high", "2", rewards) for rewards in forks_report.REWARDS]
        return [*found, *(f"{each.mean:.2f} ± {each.half_width:.2f}" for each in again)]
    one_step = [trajectory_report.one_step_table(results, difference) for difference in (False, True)]
    rung = RUNGS[study]
    found = [*one_step, trajectory_report.table(rung, results), trajectory_report.difference_table(rung, results)]
    if rung.verdict is not None:
        found += [trajectory_report.pushes_table(results), trajectory_report.gap_table(results)]
        found.append(trajectory_report.conclusion(rung, results))
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_shows_the_tables_of_the_results(study):
    for table in tables(study):
        assert table in PAGES[study]


@pytest.mark.parametrize("study", STUDIES)
def test_results_say_where_they_come_from(study):
    results = read(study)
    assert results["command"].startswith(f"trl-drgrpo study {study} --seeds {STUDIES[study]}")
    assert results["date"] in PAGES[study]
    assert {"trl", "torch", "transformers", "trl-drgrpo"} <= results["versions"].keys()
    assert RESULTS[study].with_suffix(".png").stat().st_size > 10_000
    assert f"results/{RESULTS[study].name}" in PAGES[study]


@pytest.mark.parametrize(
    "report", [signal_report, credit_report, forks_report], ids=lambda report: report.__name__.rsplit(".", 1)[1]
)
def test_what_a_study_concludes_is_what_its_tables_say(report):
    study = report.__name__.rsplit(".", 1)[1].removesuffix("_report")
    quoted = re.findall(r"[-+]?\d+\.\d+ ± \d+\.\d+", report.conclusion(read(study)))
    assert len(quoted) >= 12
    assert [each for each in quoted if each not in " ".join(tables(study))] == []


@pytest.mark.parametrize("study", RUNGS)
def test_every_arm_has_every_seed(study):
    runs = {(run["arm"], run["seed"]) for run in read(study)["runs"]}
    assert runs == {(arm, seed) for arm in trajectories.ARMS for seed in range(STUDIES[study])}


def test_the_model_knew_its_verdict_and_learned_nothing():
    results = read("verify")
    for run in trajectory_report.trajectories(results):
        assert statistics.fmean(run.verdicts) > trajectory_report.TRUE_VERDICTS
        assert statistics.fmean(run.pass_rate) == pytest.approx(4 / 11, abs=0.02)
    assert trajectory_report.conclusion(RUNGS["verify"], results).endswith("the runs count.")


@pytest.mark.parametrize(("file", "unit"), [("verify_first", " tokens"), ("verify_200_steps", "")])
def test_the_page_says_what_came_of_the_runs_that_did_not_count(file, unit):
    results = json.loads((RECIPES / "results" / f"{file}.json").read_text())
    assert trajectory_report.conclusion(RUNGS["verify"], results).endswith("the runs do not count.")
    for arm in trajectory_report.arms(results):
        gaps = interval([run.gap() for run in trajectory_report.trajectories(results) if run.arm == arm])
        assert gaps.text(signed=True) + unit in PAGES["verify"]


def test_the_study_of_credit_is_complete():
    results = read("credit")
    runs = {(run["task"], run["arm"], run["seed"]) for run in results["runs"]}
    assert runs == {(task, arm, seed) for task in results["settings"] for arm in ARMS for seed in range(5)}
    for task, sizes in results["settings"].items():
        written = [sum(run["tokens_by_step"]) for run in results["runs"] if run["task"] == task]
        assert sizes["tokens"] <= min(written) <= max(written) < 1.2 * sizes["tokens"]
        assert f"{credit_report.title(task, results)}:" in PAGES["credit"]


def test_the_study_of_search_is_complete_and_within_its_budgets():
    results = read("search")
    runs = [(run["arm"], run["budget"], run["seed"]) for run in results["runs"]]
    budgets = results["settings"]["budgets"]
    assert sorted(runs) == sorted((a, b, s) for a in search_report.ARMS for b in budgets for s in range(5))
    assert all(run["tokens"] <= run["budget"] for run in results["runs"])
    text = PAGES["search"].split("## Measured: search against sampling")[1]
    quoted = re.findall(r"\d+\.\d+ ± \d+\.\d+", text)
    assert [each for each in quoted if each not in search_report.table(results)] == []


@pytest.mark.parametrize("study", ["probe", "variance"])
def test_the_summary_quotes_the_measured_models(study):
    (row,) = evidence()[f"../results/{study}.json"]
    known = " ".join(tables(study))
    quoted = re.findall(r"[-+]?\d+\.\d+ (?:± \d+\.\d+|\[[^]]+\])", row)
    assert quoted
    assert [each for each in quoted if each not in known] == []


@pytest.mark.parametrize("study", ["probe", "variance"])
def test_every_model_has_every_seed(study):
    results = read(study)
    runs = [(run["model"], run["seed"]) for run in results["runs"]]
    assert runs == [(model, seed) for seed in range(STUDIES[study]) for model in results["settings"]["models"]]


def evidence():
    """The rows of the table that begins the page, by their file."""
    rows = [line for line in PAGES["tabular"].split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    found = {}
    for row in rows:
        (path,) = re.findall(r"\]\(([^)]+)\)", row)
        found.setdefault(path, []).append(row)
    return found


def test_every_row_of_the_evidence_has_its_file():
    assert len(evidence()) >= 8
    for path in evidence():
        assert (GUIDES / path).is_file(), path


@pytest.mark.parametrize("study", BIASES)
def test_the_evidence_quotes_the_studies_of_the_biases(study):
    known = " ".join(tables(study))
    for row in evidence()[f"../results/{FILES[study]}.json"]:
        quoted = re.findall(r"\d+\.\d+ ± \d+\.\d+", row)
        assert [each for each in quoted if each not in known] == []


def test_the_evidence_quotes_the_check():
    (row,) = evidence()["../results/check_full.json"]
    found = json.loads((ROOT / "recipes/results/check_full.json").read_text())
    assert found["passed"] is True
    float64 = [case["gradient_difference"] for case in found["cases"] if case["plain_head"] and not case["control"]]
    controls = [case for case in found["cases"] if case["control"]]
    assert f"{max(float64):.1e} in {sum(not case['name'] for case in found['cases'])} combinations" in row
    left = [f"{case['residual']:.0%}" for case in controls]
    assert f"{', '.join(left[:-1])} and {left[-1]}" in row
    for case, share in zip(controls, left, strict=True):
        assert f"{case['cosine']:.2f} and {share}" in " ".join(PAGES["tabular"].split())


def test_the_evidence_quotes_the_check_of_the_credit():
    (row,) = evidence()["../results/check_credit.json"]
    found = json.loads((ROOT / "recipes/results/check_credit.json").read_text())
    assert found["passed"] is True
    exact = [case["difference"] for case in found["credit"] if not case["control"]]
    controls = [case["difference"] for case in found["credit"] if case["control"]]
    assert f"at most {max(exact):.1e}; published constructions by {min(controls):.0%} to {max(controls):.0%}" in row


@pytest.mark.parametrize("study", ["signal", "forks"])
def test_evidence_and_page_quote_the_study(study):
    (row,) = evidence()[f"{study}.md"]
    known = " ".join(tables(study))
    for text in (row, PAGES[study].split("## Findings")[1]):
        quoted = re.findall(r"[-+]?\d+\.\d+ ± \d+\.\d+", text)
        assert len(quoted) >= 4
        assert [each for each in quoted if each not in known] == []


def test_the_study_of_forks_is_complete_and_its_arms_estimate_one_gradient():
    results, seeds = read("forks"), range(STUDIES["forks"])
    runs = {(run["forks"], run["rewards"], run["seed"]) for run in results["runs"]}
    assert runs == {(*arm, seed) for arm in LEARNING for seed in seeds}
    measured = {(row["stage"], row["forks"], row["rewards"], row["seed"]) for row in results["gradients"]}
    assert measured == set(product(results["settings"]["stages"], FORKS, forks_report.REWARDS, seeds))
    tokens = results["settings"]["tokens"]
    assert all(tokens <= run["tokens"][-1] < 1.1 * tokens for run in results["runs"])
    for each in results["agreement"]:  # a flat mean over the leaves would have 0.5 to 0.75
        assert abs(interval(each["scale"]).mean - 1) < 0.15
        assert each["cosine"] > 0.85


def test_every_arm_of_the_study_of_signal_has_every_seed():
    results = read("signal")
    for start in results["settings"]["starts"]:
        assert signal_report.complete_seeds(results, start) == list(range(STUDIES["signal"]))


def test_the_evidence_quotes_the_demo():
    (row,) = evidence()["../results/demo.json"]
    runs = json.loads((ROOT / "recipes/results/demo.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    after = [f"{100 * run['after']['sampled']['accuracy']:.1f}%" for run in runs]
    assert f"{100 * runs[0]['before']['sampled']['accuracy']:.1f}% to {after[0]}, {after[1]} and {after[2]}" in row


def test_the_evidence_shows_what_a_gpu_has_said():
    results = RECIPES / "results" / "gpu.json"
    if not results.exists():
        pytest.skip("make gpu was never run: there is nothing to show")
    assert gpu.table(json.loads(results.read_text())) in PAGES["tabular"]


def test_the_picture_of_the_fast_path_is_drawn_from_the_guide(tmp_path):
    found = pictures.ratios((GUIDES / "benchmarks.md").read_text())
    assert {case for bars in pictures.BARS.values() for case in bars} <= set(found)
    assert pictures.FAST_PATH.exists()
    assert pictures.draw_fast_path(tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_speed_that_is_summed_up_is_that_of_the_benchmarks():
    benchmarks = (GUIDES / "benchmarks.md").read_text()
    summary = re.findall(r"\d+\.\d+x", (GUIDES / "fast_path.md").read_text())
    assert len(summary) >= 12
    assert [each for each in summary if f"| {each} (" not in benchmarks] == []
    (row,) = evidence()["benchmarks.md"]
    ends = [float(each.rstrip("x")) for each in re.findall(r"\d+\.\d+x", row)]
    assert ends == [min(float(each[:-1]) for each in summary), max(float(each[:-1]) for each in summary)]
