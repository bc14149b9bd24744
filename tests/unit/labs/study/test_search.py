"""Search: what the study runs, how it goes on, what its table says."""

import json
from itertools import pairwise

import pytest

from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.long_sums import make_long_problems
from trl_drgrpo.labs.demo.process import line_reward
from trl_drgrpo.labs.demo.task import prompt_of
from trl_drgrpo.labs.study import search_report
from trl_drgrpo.labs.study.search_arms import ARMS, SearchSizes, process_rewards
from trl_drgrpo.labs.study.search_report import SearchRun, run_arm

SMALL = SearchSizes(budgets=(30, 60), problems=2, max_completion_length=24)


@pytest.fixture
def calls(monkeypatch):
    made = []

    def fake(model, sizes, arm, seed, budget):
        made.append((seed, budget, arm))
        if len(made) == 10:
            raise KeyboardInterrupt
        rate = {"puct/good": 0.8, "puct/shuffled": 0.2}.get(arm, 0.5) + 0.1 * seed
        return SearchRun(arm, seed, budget, 0.9 * budget, 0.5, rate, 0.9, 3.0, 1.0)

    monkeypatch.setattr(search_report, "run_arm", fake)
    monkeypatch.setattr(search_report, "warm_start", lambda folder: made.append("warm start"))
    return made


def test_an_interrupted_study_goes_on_and_its_table_says_what_was_run(calls, tmp_path):
    output = tmp_path / "search.json"
    with pytest.raises(KeyboardInterrupt):
        search_report.run_study(range(2), output, tmp_path, SMALL)
    results = search_report.run_study(range(2), output, tmp_path, SMALL)
    assert results == json.loads(output.read_text()) | {"settings": results["settings"]}
    in_order = [(seed, budget, arm) for seed in range(2) for budget in SMALL.budgets for arm in ARMS]
    assert [(run["seed"], run["budget"], run["arm"]) for run in results["runs"]] == in_order
    assert len([call for call in calls if call != "warm start"]) == len(in_order) + 1
    text = search_report.table(results)
    head = "| search | selected, 30 tokens | selected, 60 tokens | any, 60 | completions, 60 | tokens kept, 60 |"
    assert text.startswith(head)
    assert "| `puct`, faithful PRM | 85.0 ± 63.5 | 85.0 ± 63.5 | 90.0 ± 0.0 | 3.0 | 50% |" in text
    assert "| `puct`, shuffled PRM | 25.0 ± 63.5 | 25.0 ± 63.5 |" in text
    pytest.importorskip("matplotlib")
    assert search_report.draw(results, tmp_path / "search.png").stat().st_size > 10_000


def test_a_run_searches_within_its_budget():
    run = run_arm(MODEL_DIR, SMALL, "puct/shuffled", 1, 60)
    assert 0 < run.tokens <= 60
    assert 0 < run.kept_share <= 1
    assert 0 <= run.selected <= run.any <= 1
    assert run.completions >= 1


def test_the_sources_of_values_are_what_they_are_called():
    problems = make_long_problems(40)
    steps = [[f"{a}+{b}={a + b}\n" for a, b in pairwise(p)][:1] for p in problems]  # all right
    call = {"prompts": [prompt_of(p) for p in problems], "completions": [""] * 40, "steps": steps}
    assert process_rewards("verifier", 0, 0.2) is None
    assert process_rewards("good", 0, 0.2) is line_reward
    mediocre = process_rewards("mediocre", 0, 0.2)
    verdicts = [verdict for row in mediocre(**call) for verdict in row]
    assert verdicts == [verdict for row in mediocre(**call) for verdict in row]
    assert 0.6 < sum(verdicts) / len(verdicts) < 0.95
    half_wrong = call | {"steps": [row if i % 2 else ["1+1=3\n"] for i, row in enumerate(steps)]}
    shuffled = [verdict for row in process_rewards("shuffled", 0, 0.2)(**half_wrong) for verdict in row]
    truth = [verdict for row in line_reward(**half_wrong) for verdict in row]
    assert sorted(shuffled) == sorted(truth)
    assert shuffled != truth
