"""The study of forks: tokens that are counted once, runs, gradients, how it goes on, its tables."""

import dataclasses
import json

import pytest
import torch

from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.study import forks_report, forks_runs
from trl_drgrpo.labs.study.credit_arms import OUTCOME
from trl_drgrpo.labs.study.forks_report import REWARDS, label, learning_table, variance_table
from trl_drgrpo.labs.study.forks_runs import FLAT, FORKS, LEARNING, STEPS, ForksRun, ForksSettings, measure, run_arm
from trl_drgrpo.objective.fork_advantages import Forks

SMALL = ForksSettings({"low": 0.5}, prompts=2, batches=1, tokens=1_000, held_out=8, evaluations=2)


class TestSampledTokens:
    def test_flat_rows_share_nothing(self):
        assert forks_runs.sampled_tokens(None, [3, 4]) == 7

    def test_two_levels_two_parents(self):
        cuts = [[2, 5], [2, 5], [2, 6], [2, 6]]
        once = 8 + (9 - 5) + (7 - 2) + (9 - 6)  # the parent, and what each of the others added
        assert forks_runs.sampled_tokens(Forks(2, cuts), [8, 9, 7, 9]) == once
        assert forks_runs.sampled_tokens(Forks(2, cuts * 2), [8, 9, 7, 9] * 2) == 2 * once

    def test_a_row_that_could_not_be_cut_counts_once(self):
        assert forks_runs.sampled_tokens(Forks(2, [[4, 6], [4, 6], [4, 4], [4, 4]]), [6, 6, 4, 4]) == 6
        assert forks_runs.sampled_tokens(Forks(4, [[5]] * 4), [5] * 4) == 5


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A stage whose model is the demo's."""
    work_dir = tmp_path_factory.mktemp("forks")
    (work_dir / "low").symlink_to(MODEL_DIR, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks_runs, "warm_start", lambda folder, gap_probability: folder)
        yield forks_runs.make_stage(SMALL, "low", work_dir), work_dir


class TestMeasured:
    def test_a_stage_knows_its_lengths_and_entropies(self, stage):
        found, _ = stage
        assert 0 < found["mean_length"] <= 112
        assert found["threshold"] > 0
        assert 0 <= found["pass_rate"] <= 1

    @pytest.mark.slow
    def test_a_run_counts_what_was_sampled_and_stops(self, stage):
        flat, forked = (run_arm(SMALL, stage[0], forks, OUTCOME, 0, stage[1]) for forks in (FLAT, "4"))
        assert flat.pass_rate[0] == forked.pass_rate[0] == stage[0]["pass_rate"]
        assert flat.tokens[-1] >= SMALL.tokens
        assert forked.tokens[-1] >= SMALL.tokens
        assert forked.tokens[1] / forked.steps < 0.9 * flat.tokens[1] / flat.steps
        assert len(flat.cut) == flat.steps
        assert not any(flat.cut)
        assert min(forked.cut) > 0

    def test_gradients_of_both_rewards_on_the_same_completions(self, stage):
        outcome, steps = measure(SMALL, stage[0], "2", 0, stage[1])
        assert (outcome["rewards"], steps["rewards"]) == (OUTCOME, STEPS)
        assert outcome["tokens"] == steps["tokens"] < steps["all_tokens"]
        assert steps["variance"] > 0
        assert steps["variance"] != outcome["variance"]
        means = forks_runs.mean_gradients(stage[1], "low", "2", STEPS, [0])
        assert means.shape[0] == 1
        assert means.isfinite().all()
        assert means.any()


class TestStudy:
    @pytest.fixture
    def calls(self, monkeypatch):
        made = []

        def fake_stage(settings, name, work_dir):
            return {"stage": name, "pass_rate": 0.1, "mean_length": 70.0, "threshold": 0.125}

        def fake_run(settings, stage, forks, rewards, seed, work_dir):
            made.append((forks, rewards, seed))
            if len(made) == 4:
                raise KeyboardInterrupt
            end = {FLAT: 0.3, "2": 0.5}.get(forks, 0.25) + 0.1 * seed
            return ForksRun(forks, rewards, seed, 2, [0, 400, 1_100], [0.1, 0.2, end], [0.0, 0.5])

        def fake_measure(settings, stage, forks, seed, work_dir):
            made.append((stage["stage"], forks, seed))
            mean = torch.tensor([10.0, 1.0 if forks == "2" else 0.0])
            torch.save(dict.fromkeys(REWARDS, mean), work_dir / f"{stage['stage']}-{forks}-{seed}.pt")
            tokens = {FLAT: 600}.get(forks, 400)
            numbers = {"variance": 20.0 + 10 * seed, "tokens": tokens, "all_tokens": 600}
            arm = {"stage": stage["stage"], "forks": forks, "seed": seed, **numbers}
            return [{**arm, "rewards": rewards} for rewards in REWARDS]

        for name, fake in {"make_stage": fake_stage, "run_arm": fake_run, "measure": fake_measure}.items():
            monkeypatch.setattr(forks_report, name, fake)
        return made

    def test_an_interrupted_study_goes_on_and_its_tables_say_what_was_measured(self, calls, tmp_path):
        output, settings = tmp_path / "forks.json", dataclasses.replace(SMALL, stages={"low": 0.5, "high": 0.1})
        with pytest.raises(KeyboardInterrupt):
            forks_report.run_study(range(2), output, tmp_path / "work", settings)
        results = forks_report.run_study(range(2), output, tmp_path / "work", settings)
        assert len(calls) == 1 + len(set(calls)) == 1 + 2 * (len(LEARNING) + 2 * len(FORKS))
        assert results == json.loads(output.read_text())

        text = variance_table(results, "high")
        assert text.count("\n") == 1 + len(REWARDS) * len(FORKS)
        # |g|^2 of the mean (10, 0) without the noise of 4 groups, 100 - 25 / 4; 20 and 30 x 600 over it
        assert "| outcome | flat | 600 | 0.2 ± 0.4 | 1 | 1 | 1 | 1 |" in text
        assert "| outcome | `forks: 2` | 400 | 0.1 ± 0.3 | 0.67 ± 0.00 | 1.00 ± 0.00 | 1.07 ± 0.00 | 1.00 |" in text
        assert forks_report.stage_title(results["stages"][0], results).startswith("10.0% correct, threshold")

        text = learning_table(results)
        assert text.count("\n") == 1 + len(LEARNING)
        assert "| outcome | flat | 2 | 25 |" in text
        assert f"| outcome and steps | {label('2')} | 2 | 25 |" in text
        assert "+17.1 ± 0.0 |" in text
        assert "2 seeds" in forks_report.learning_title(results)
        assert forks_report.draw(results, tmp_path / "plot.png").stat().st_size > 10_000

    def test_other_settings_begin_anew(self, calls, tmp_path):
        calls += [()] * 4  # nothing interrupts
        for tokens in (1_000, 1_600):
            settings = dataclasses.replace(SMALL, tokens=tokens)
            forks_report.run_study(range(2), tmp_path / "forks.json", tmp_path / "work", settings)
        assert len(calls) == 4 + 2 * len(set(calls[4:]))


def test_every_arm_has_a_label():
    assert len({label(forks) for forks in FORKS}) == len(FORKS)
    assert label("2_twice") == "`forks: 2`, `fork_depth: 2`"
