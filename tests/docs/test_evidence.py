"""What the documents say of the studies is what the committed results say, to the last digit."""

import json
import re
import statistics
from itertools import product
from pathlib import Path

import arithmetic
import chat_lengths
import chat_model
import chat_prm
import chat_settings
import credit
import dynamic_sampling
import forks
import gpu
import gpu_learning
import guessing
import high_rate
import length_bias
import pace
import pictures
import probe
import pytest
import search
import tabular
import variance
import verify
import vllm_dtype
from frame import interval, rows_of

from trl_drgrpo.check.bias import OBJECTIVES

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
GUIDES = RECIPES / "guides"
BENCHMARKS = ROOT / "tests" / "benchmarks" / "README.md"
BIASES = (tabular, guessing, arithmetic, verify)
CHAT = (chat_model, chat_settings, chat_lengths, chat_prm)
STUDIES = {
    module.__name__: module.STUDY
    for module in (
        *BIASES,
        credit,
        dynamic_sampling,
        search,
        forks,
        probe,
        variance,
        pace,
        high_rate,
        vllm_dtype,
        *CHAT,
    )
}
NAMES = [module.__name__ for module in BIASES]


def read(name):
    return json.loads((RECIPES / "results" / f"{name}.json").read_text())


def page(name):
    return (RECIPES / "studies" / f"{STUDIES[name].page}.md").read_text()


def tables(name):
    return STUDIES[name].report(read(STUDIES[name].name))


def unknown(text, known):
    """Intervals that a text quotes and no table has."""
    quoted = re.findall(r"[-+]?\d+\.\d+ (?:± \d+\.\d+|\[[^]]+\])", text)
    return [each for each in quoted if each not in " ".join(known)]


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_shows_the_tables_of_the_results(name):
    for text in tables(name):
        assert text in page(name)


@pytest.mark.parametrize("name", STUDIES)
def test_results_say_where_they_come_from(name):
    study, results = STUDIES[name], read(STUDIES[name].name)
    assert re.match("trl-drgrpo study |python recipes/studies/", results["command"])  # the first until 0.2.0
    assert results["date"] in page(name)
    assert {"trl", "torch", "transformers", "trl-drgrpo"} <= results["versions"].keys()
    assert json.loads(json.dumps(study.settings)) == results["settings"]
    assert (RECIPES / "results" / f"{study.name}.png").stat().st_size > 10_000
    assert f"results/{study.name}.json" in page(name)
    assert f"python recipes/studies/{name}.py" in page(name)


@pytest.mark.parametrize("name", ["dynamic_sampling", "credit", "forks", *(module.__name__ for module in CHAT)])
def test_conclusions_of_studies_are_those_of_their_tables(name):
    assert unknown(STUDIES[name].conclude(read(STUDIES[name].name)), tables(name)) == []


def runs_of(name, *keys, part="runs"):
    return sorted(tuple(run[key] for key in keys) for run in read(STUDIES[name].name)[part])


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_has_every_seed(name):
    arms = OBJECTIVES if name == "tabular" else length_bias.ARMS
    assert runs_of(name, "arm", "seed") == sorted(product(arms, range(STUDIES[name].seeds)))


def test_every_call_of_the_other_studies_is_there():
    seeds = range(5)
    assert runs_of("credit", "task", "arm", "seed") == sorted(product(credit.TASKS, credit.LABELS, seeds))
    found = runs_of("search", "arm", "budget", "seed")
    assert found == sorted(product(search.ARMS, search.SETTINGS["budgets"], seeds))
    found = runs_of("dynamic_sampling", "start", "arm", "seed")
    assert found == sorted(product(dynamic_sampling.SETTINGS["starts"], dynamic_sampling.ARMS, seeds))
    assert runs_of("forks", "forks", "rewards", "seed") == sorted((*arm, s) for arm in forks.LEARNING for s in seeds)
    found = runs_of("forks", "stage", "forks", "rewards", "seed", part="gradients")
    assert found == sorted(product(forks.SETTINGS["stages"], forks.FORKS, forks.REWARDS, seeds))
    arms = [(task, arm) for task, own in pace.SETTINGS["tasks"].items() for arm in own["arms"]]
    assert runs_of("high_rate", "arm", "seed") == sorted(product(high_rate.ARMS, range(high_rate.STUDY.seeds)))
    assert runs_of("pace", "task", "arm", "seed") == sorted(
        (*each, s) for each in arms for s in range(pace.STUDY.seeds)
    )
    runs = read("chat_model")["runs"]
    complete = {(run["task"], run["seed"]) for run in runs}
    assert {task for task, _ in complete} == set(chat_model.SETTINGS["tasks"])
    tasks = chat_model.SETTINGS["tasks"]
    expected_runs = [(task, seed, arm) for task, seed in complete for arm in tasks[task]["arms"]]
    assert runs_of("chat_model", "task", "seed", "arm") == sorted(expected_runs)
    tasks = chat_settings.SETTINGS["tasks"]
    seeds = {task: {run["seed"] for run in rows_of(read("chat_settings"), task=task)} for task in tasks}
    expected_runs = [(task, arm, seed) for task in tasks for arm in chat_settings.ARMS[task] for seed in seeds[task]]
    assert runs_of("chat_settings", "task", "arm", "seed") == sorted(expected_runs)
    for module in (chat_lengths, chat_prm):
        seeds_of_study = {run["seed"] for run in read(module.__name__)["runs"]}
        assert runs_of(module.__name__, "arm", "seed") == sorted(product(module.ARMS, seeds_of_study))
    for module in (probe, variance):
        found = runs_of(module.__name__, "model", "seed")
        assert found == sorted(product(module.SETTINGS["models"], range(3)))


def test_the_model_knew_its_verdict_and_learned_nothing():
    results = read("verify")
    for run in results["runs"]:
        assert statistics.fmean(run["verdicts"]) > length_bias.TRUE_VERDICTS
        assert statistics.fmean(run["pass_rate"]) == pytest.approx(4 / 11, abs=0.02)
    assert length_bias.conclude(verify.TASK, results).endswith("the runs count.")


@pytest.mark.parametrize(("file", "unit"), [("verify_first", " tokens"), ("verify_200_steps", "")])
def test_the_page_says_what_came_of_the_runs_that_did_not_count(file, unit):
    results = read(file)
    assert length_bias.conclude(verify.TASK, results).endswith("the runs do not count.")
    for runs in length_bias.by_arm(results).values():
        assert interval(map(length_bias.gap, runs)).text(signed=True) + unit in page("verify")


def evidence():
    """The rows of the tables of the page, by the file that they lead to."""
    lines = (GUIDES / "evidence.md").read_text().splitlines()
    found = {}
    for row in [line for line in lines if re.match(r"\| (?!claim|question)", line)]:
        (path,) = re.findall(r"\]\(([^)]+)\)", row)
        found.setdefault(path, []).append(row)
    return found


def test_every_row_of_the_evidence_has_its_file():
    assert len(evidence()) >= 12
    for path in evidence():
        assert (GUIDES / path).is_file(), path


@pytest.mark.parametrize("name", STUDIES)
def test_the_evidence_quotes_the_studies(name):
    beside = [other for other in STUDIES if STUDIES[other].page == STUDIES[name].page]
    known = [text for other in beside for text in [*tables(other), STUDIES[other].conclude(read(STUDIES[other].name))]]
    if name == "forks":
        again = read("forks_repeated")
        known += [forks.over_flat(again, "high", "2", rewards).text(2) for rewards in forks.REWARDS]
    begin = {"dynamic_sampling": "## Findings", "forks": "## Findings"}.get(name)
    rows = evidence()[f"../studies/{STUDIES[name].page}.md"]
    assert [each for text in rows for each in unknown(text, known)] == []
    if begin or name == "search":
        assert unknown(page(name).split(begin)[1] if begin else page(name), known) == []


def test_the_evidence_quotes_the_check():
    row = evidence()["../studies/check.md"][0]
    found = json.loads((ROOT / "recipes/results/check_full.json").read_text())
    assert found["passed"] is True
    float64 = [case["gradient_difference"] for case in found["cases"] if case["plain_head"] and not case["control"]]
    controls = [case for case in found["cases"] if case["control"]]
    assert f"{max(float64):.1e} in {sum(not case['name'] for case in found['cases'])} combinations" in row
    left = [f"{case['residual']:.0%}" for case in controls]
    assert f"{', '.join(left[:-1])} and {left[-1]}" in row
    for case, share in zip(controls, left, strict=True):
        assert f"{case['cosine']:.2f} and {share}" in " ".join((RECIPES / "studies/check.md").read_text().split())


def test_the_evidence_quotes_the_check_of_the_credit():
    row = evidence()["../studies/check.md"][1]
    found = json.loads((ROOT / "recipes/results/check_credit.json").read_text())
    assert found["passed"] is True
    exact = [case["difference"] for case in found["credit"] if not case["control"]]
    controls = [case["difference"] for case in found["credit"] if case["control"]]
    assert f"at most {max(exact):.1e}. Published alternatives are off by" in row
    assert f"off by {min(controls):.0%} to {max(controls):.0%}" in row


def test_the_evidence_quotes_the_demo():
    (row,) = evidence()["../results/demo.json"]
    runs = json.loads((ROOT / "recipes/results/demo.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    after = [f"{100 * run['after']['sampled']['accuracy']:.1f}%" for run in runs]
    assert f"{100 * runs[0]['before']['sampled']['accuracy']:.1f}% to {after[0]}, {after[1]} and {after[2]}" in row


def test_the_evidence_shows_what_a_gpu_has_said():
    page = (RECIPES / "studies/gpu.md").read_text()
    for table in gpu.tables(read("gpu")["calls"]):
        assert table in page
    assert gpu_learning.table(read("gpu_learning")) in page
    (ours,) = [line for call in read("rival")["calls"] for line in call["lines"] if "step_s" in line]
    generation = f"generation {ours['generation_s']:.1f} s, {ours['generated_per_s']:,.0f} tokens/s"
    assert f"{ours['step_s']:.1f} s a step ({generation})" in " ".join(page.split())


def test_the_picture_of_the_fast_path_is_drawn_from_the_guide(tmp_path):
    found = pictures.ratios(BENCHMARKS.read_text())
    assert {case for bars in pictures.BARS.values() for case in bars} <= set(found)
    assert pictures.FAST_PATH.exists()
    assert pictures.draw_fast_path(tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_speed_that_is_summed_up_is_that_of_the_benchmarks():
    benchmarks = BENCHMARKS.read_text()
    summary = re.findall(r"\d+\.\d+x", (GUIDES / "fast_path.md").read_text())
    assert len(summary) >= 12
    assert [each for each in summary if f"| {each} (" not in benchmarks] == []
    (row,) = evidence()["../../tests/benchmarks/README.md"]
    ends = [float(each.rstrip("x")) for each in re.findall(r"\d+\.\d+x", row)]
    assert ends == [min(float(each[:-1]) for each in summary), max(float(each[:-1]) for each in summary)]
