"""What the documents say of the studies is what the committed results say, to the last digit."""

import json
import re
from pathlib import Path

import gpu
import pytest

from trl_drgrpo.cli.study import STUDIES
from trl_drgrpo.labs.study import credit_report, signal_report, tabular_report, trajectory_report
from trl_drgrpo.labs.study.credit_arms import ARMS
from trl_drgrpo.labs.study.rungs import RUNGS

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
BIASES = ("tabular", *RUNGS)
FILES = {study: f"length_bias_{study}" for study in BIASES} | {"credit": "credit", "signal": "signal"}
RESULTS = {study: RECIPES / "results" / f"{file}.json" for study, file in FILES.items()}
PAGES = dict.fromkeys(BIASES, (RECIPES / "length_bias.md").read_text()) | {
    "credit": (RECIPES / "process_rewards.md").read_text(),
    "signal": (RECIPES / "signal.md").read_text(),
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
    if study == "credit":
        return [credit_report.table(task, results) for task in results["settings"]]
    one_step = [trajectory_report.one_step_table(results, difference) for difference in (False, True)]
    rung = RUNGS[study]
    return [*one_step, trajectory_report.table(rung, results), trajectory_report.difference_table(rung, results)]


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


@pytest.mark.parametrize("study", RUNGS)
def test_every_arm_has_every_seed(study):
    runs = {(run["arm"], run["seed"]) for run in read(study)["runs"]}
    assert runs == {(arm, seed) for arm in RUNGS[study].arms for seed in range(STUDIES[study])}


def test_the_study_of_credit_is_complete():
    results = read("credit")
    runs = {(run["task"], run["arm"], run["seed"]) for run in results["runs"]}
    assert runs == {(task, arm, seed) for task in results["settings"] for arm in ARMS for seed in range(5)}
    for task, sizes in results["settings"].items():
        written = [sum(run["tokens_by_step"]) for run in results["runs"] if run["task"] == task]
        assert sizes["tokens"] <= min(written) <= max(written) < 1.2 * sizes["tokens"]
        assert f"{credit_report.title(task, results)}:" in PAGES["credit"]


def test_intervals_in_the_readme_are_those_of_the_results():
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"^## The two biases, measured\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    assert section
    quoted = re.findall(r"\d+\.\d+\s±\s\d+\.\d+", section.group(1))
    assert len(quoted) >= 6
    known = " ".join(table for study in BIASES for table in tables(study))
    assert [each for each in quoted if re.sub(r"\s", " ", each) not in known] == []


def evidence():
    """The rows of the README's table, by their file."""
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"^## Evidence\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    assert section
    rows = [line for line in section.group(1).splitlines() if line.startswith("| ")][1:]
    found = {}
    for row in rows:
        (path,) = re.findall(r"\]\((recipes/[^)]+)\)", row)
        found.setdefault(path, []).append(row)
    return found


def test_every_row_of_the_evidence_has_its_file():
    assert len(evidence()) >= 8
    for path in evidence():
        assert (ROOT / path).is_file(), path


def test_the_readme_quotes_the_check():
    (row,) = evidence()["recipes/results/check_full.json"]
    found = json.loads((ROOT / "recipes/results/check_full.json").read_text())
    assert found["passed"] is True
    float64 = [case["gradient_difference"] for case in found["cases"] if case["plain_head"] and not case["control"]]
    controls = [case["gradient_difference"] for case in found["cases"] if case["control"]]
    assert f"{max(float64):.1e} in {sum(not case['name'] for case in found['cases'])} combinations" in row
    assert " and ".join(f"{value:.1f}" for value in controls) in row


def test_the_readme_quotes_the_check_of_the_credit():
    (row,) = evidence()["recipes/results/check_credit.json"]
    found = json.loads((ROOT / "recipes/results/check_credit.json").read_text())
    assert found["passed"] is True
    exact = [case["difference"] for case in found["credit"] if not case["control"]]
    controls = [case["difference"] for case in found["credit"] if case["control"]]
    assert f"at most {max(exact):.1e}; published constructions by {min(controls):.0%} to {max(controls):.0%}" in row


def test_readme_and_page_quote_the_study_of_signal():
    (row,) = evidence()["recipes/signal.md"]
    known = " ".join(tables("signal"))
    for text in (row, PAGES["signal"].split("## What it says")[1]):
        quoted = re.findall(r"[-+]\d+\.\d+ ± \d+\.\d+", text)
        assert len(quoted) >= 4
        assert [each for each in quoted if each not in known] == []


def test_every_arm_of_the_study_of_signal_has_every_seed():
    results = read("signal")
    for start in results["settings"]["starts"]:
        assert signal_report.complete_seeds(results, start) == list(range(STUDIES["signal"]))


def test_the_readme_quotes_the_demo():
    (row,) = evidence()["recipes/results/demo.json"]
    runs = json.loads((ROOT / "recipes/results/demo.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    after = [f"{100 * run['after']['sampled']['accuracy']:.1f}%" for run in runs]
    assert f"{100 * runs[0]['before']['sampled']['accuracy']:.1f}% to {after[0]}, {after[1]} and {after[2]}" in row


def test_the_readme_shows_what_a_gpu_has_said():
    results = RECIPES / "results" / "gpu.json"
    if not results.exists():
        pytest.skip("make gpu was never run: there is nothing to show")
    assert gpu.table(json.loads(results.read_text())) in (ROOT / "README.md").read_text(encoding="utf-8")
