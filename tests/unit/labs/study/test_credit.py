"""The study of step credit: arms, value estimates, runs that stop at their tokens, variance, table and plot."""

import dataclasses
import json
import random

import pytest
import torch

from trl_drgrpo.labs.study import credit_report, credit_study
from trl_drgrpo.labs.study.credit_arms import ARMS, OUTCOME, SIGNALS, USES, expected_outcome, reversed_scores, shuffled
from trl_drgrpo.labs.study.credit_runs import CreditRun, run_arm
from trl_drgrpo.labs.study.credit_tasks import LONG_SUMS, TASKS, TWO_TURNS
from trl_drgrpo.labs.study.credit_variance import Moments, measure_variance


def outcome(completions, **columns):
    """What a model that plays badly gets now and then."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def rule(prompts, steps, **columns):
    return [outcome(turns) for turns in steps]


SMALL = dataclasses.replace(
    TWO_TURNS, outcome=outcome, rule=rule, tokens=250, prompts=2, num_generations=4, learning_rate=3e-3
)


def scores(**call):
    return [[1.0, 0.25, None], [0.5]]


class TestArms:
    def test_every_signal_in_every_use_beside_the_outcome(self):
        assert len(ARMS) == 1 + len(SIGNALS) * len(USES) == 13
        assert ARMS[OUTCOME].step_rewards(scores, scores, len, 0) is None

    def test_signals(self):
        call = {"prompts": ["", ""]}
        assert ARMS["rule/to_go"].step_rewards(scores, None, len, 0)(**call) == scores()
        assert ARMS["prm/to_go"].step_rewards(None, scores, len, 0)(**call) == scores()
        assert ARMS["adversarial/to_go"].step_rewards(scores, None, len, 0)(**call) == [[0.0, 0.75, None], [0.5]]
        mixed = ARMS["shuffled/to_go"].step_rewards(None, scores, len, 3)(**call)
        assert [[score is None for score in row] for row in mixed] == [[False, False, True], [False]]
        assert sorted(score for row in mixed for score in row if score is not None) == [0.25, 0.5, 1.0]

    def test_the_shuffle_is_another_one_each_time(self):
        many = shuffled(lambda **call: [[float(i) for i in range(50)]], random.Random(0))
        assert many()[0] != many()[0]

    def test_as_a_baseline_they_estimate_the_outcome(self):
        estimate = expected_outcome(reversed_scores(scores), due=len)(prompts=["abc", "abc"])
        assert estimate == [[0.0, 0.0, 0.0], [pytest.approx(0.5 * 0.8**2)]]
        longer = expected_outcome(lambda **call: [[1.0, 1.0, 1.0]], due=len)(prompts=["ab"])
        assert longer == [[0.8, 1.0, 1.0]]  # more steps than are due


def test_pass_rates_are_weighted_by_tokens():
    run = CreditRun("two_turns", OUTCOME, 0, pass_rate=[0.0, 1.0, 0.5], tokens_by_step=[100, 100, 200])
    assert run.mean_pass_rate() == 0.5
    assert run.mean_pass_rate(0.5) == 0.5
    assert run.mean_pass_rate(0.25) == pytest.approx((100 + 100) / 300)


def test_variance_and_its_ratio():
    ours, reference = Moments(), Moments()
    for value in (1.0, 3.0):
        ours.add(torch.tensor([value, 0.0]))
        reference.add(torch.tensor([2 * value, 0.0]))
    assert ours.variance == pytest.approx(2.0)
    assert ours.over(reference) == {"ratio": pytest.approx(0.25), "standard_error": pytest.approx(0.0)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return TWO_TURNS.warm_start(tmp_path_factory.mktemp("two_turns"), steps=6, batch_size=16)  # type: ignore[call-arg]


class TestRuns:
    @pytest.mark.slow
    def test_arms_see_the_same_start_and_stop_at_the_same_tokens(self, model_dir, tmp_path):
        runs = [
            run_arm(SMALL, arm, 0, model_dir, tmp_path / arm.replace("/", "-"), None)  # type: ignore[arg-type]
            for arm in (OUTCOME, "rule/to_go", "adversarial/baseline")
        ]
        assert len({run.pass_rate[0] for run in runs}) == len({run.tokens_by_step[0] for run in runs}) == 1
        for run in runs:
            assert len(run.pass_rate) == len(run.tokens_by_step)
            assert SMALL.tokens <= sum(run.tokens_by_step) < SMALL.tokens + 8 * 8
        assert len({tuple(run.tokens_by_step) for run in runs} | {tuple(run.pass_rate) for run in runs}) > 2

    @pytest.mark.slow
    def test_variance_of_baselines_is_measured_on_the_outcomes_completions(self, model_dir, tmp_path):
        found = measure_variance(SMALL, 2, model_dir, tmp_path, scores_of_turns)
        assert found["groups"] == 2 * SMALL.prompts
        assert found[OUTCOME]["ratio"] == found[OUTCOME]["half"]["ratio"] == 1.0
        assert {arm for arm in found if "/" in arm} == {arm for arm in ARMS if arm.endswith("/baseline")}
        assert all(found[arm]["variance"] > 0 for arm in found if "/" in arm)


def scores_of_turns(prompts, steps, **call):
    return [[0.5 + 0.1 * i for i in range(len(row))] for row in steps]


class TestStudy:
    def test_what_is_done_is_not_done_again(self, tmp_path, monkeypatch):
        calls = []

        def made_up(task, arm, seed, *rest):
            calls.append((task.name, arm, seed))
            if len(calls) == 20:
                raise KeyboardInterrupt
            level = 0.5 if arm.startswith("rule") else 0.3
            return CreditRun(task.name, arm, seed, [0.1, level + seed / 100], [10, 10])

        start = {"groups": 4, "tokens": 40} | {
            arm: {
                "variance": 1.0,
                "ratio": 1.0,
                "standard_error": 0.125,
                "half": {"ratio": 0.75, "standard_error": 0.0},
            }
            for arm in ARMS
            if ARMS[arm].use in (None, "baseline")
        }
        monkeypatch.setattr(credit_study, "run_arm", made_up)
        monkeypatch.setattr(credit_study, "measure_variance", lambda *arguments: start)
        for task in TASKS:
            changed = dataclasses.replace(
                TASKS[task],
                warm_start=lambda folder: folder,
                prm_rows=0,
            )
            monkeypatch.setitem(TASKS, task, changed)
        monkeypatch.setattr(type(LONG_SUMS), "train_prm", lambda self, *folders: {"eval_accuracy": 0.5})
        monkeypatch.setattr(type(LONG_SUMS), "load_prm", lambda self, folder: None)
        output = tmp_path / "credit.json"
        with pytest.raises(KeyboardInterrupt):
            credit_study.run_credit_study(range(2), output, tmp_path / "work")
        results = credit_study.run_credit_study(range(2), output, tmp_path / "work")
        assert len(calls) == 1 + len(set(calls)) == 1 + 2 * 2 * len(ARMS)
        assert results == json.loads(output.read_text())
        text = credit_report.table("long_sums", results)
        assert text.count("\n") == 2 + len(ARMS)
        rates = "30.2 ± 3.2 | +10.0 ± 0.0 | 50.5 ± 6.4 | +20.0 ± 0.0"
        assert f"| faithful rule as reward, `to_go` | {rates} |  |  |" in text
        assert f"| faithful rule as baseline | {rates} | 1.000 ± 0.125 | 0.750 ± 0.000 |" in text
        assert "2 seeds" in credit_report.title("two_turns", results)
        assert credit_report.draw(results, tmp_path / "plot.png").stat().st_size > 10_000
