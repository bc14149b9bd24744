"""The end of a training run: first and last numbers, the next commands, and the way on from an interruption."""

import json
import math

from trl_drgrpo.cli import job
from trl_drgrpo.cli.main import parse


def test_a_finished_run_says_what_came_of_it_and_what_comes_next():
    logged = [
        {"reward": 0.5, "drgrpo/pass_rate": 0.25, "step": 1},
        {"eval_reward": 0.2, "step": 1},
        {"reward": 0.75, "drgrpo/pass_rate": 0.5, "step": 2},
    ]
    said = job.closing("runs/my run", logged, 61.0, run_log=True, recipe={}).splitlines()
    assert said == [
        "Trained in 1:01. Model: runs/my run",
        "  pass rate in training: 25% -> 50% (first and last logged)",
        "  reward in training: 0.5 -> 0.75 (first and last logged)",
        "Next:",
        "  trl-drgrpo report 'runs/my run'",
        "  trl-drgrpo eval --model 'runs/my run' --num_samples 8",
        "  trl-drgrpo generate --model 'runs/my run'",
        "  hf upload YOUR_NAME/'my run' 'runs/my run' --exclude 'checkpoint-*' --exclude '_*'",
    ]
    for command in said[4:-1]:  # commands that there are
        parse(command.replace("'runs/my run'", "run").split()[1:])
    assert "trl-drgrpo eval" not in job.closing("runs/x", [], 1.0, run_log=False, recipe={})


def test_steps_without_any_reward_have_no_first_and_last():
    logged = [{"reward": None}, {"reward": 0.5}, {"eval_reward": None}, {"reward": math.nan}, {"reward": 0.25}]
    assert job.logged_values("reward", logged) == [0.5, 0.25]
    assert "  reward in training: 0.5 -> 0.25 (first and last logged)" in job.closing("runs/x", logged, 1.0, True, {})
    assert "reward" not in job.closing("runs/x", [{"reward": None}] * 2, 1.0, True, {})


def test_a_single_evaluation_is_told_with_its_step():
    """As first and last it would read as no change, and a step without a number is no evaluation."""
    history = [{"step": 0, "eval_reward": math.nan}, {"step": 1, "reward": 0.5}, {"step": 4, "eval_reward": 0.7}]
    assert job.first_and_last(history) == {"reward_first": 0.5, "reward_last": 0.5, "eval_reward_at_step_4": 0.7}
    history.append({"step": 8, "eval_reward": 0.9})
    assert job.first_and_last(history)["eval_reward_first"] == 0.7
    assert job.first_and_last(history)["eval_reward_last"] == 0.9


def test_a_run_with_step_rewards_only_says_what_became_of_them():
    logged = [{"reward": 0.0, "rewards/process_only/mean": 0.0, "process/reward_mean": mean} for mean in (0.25, 0.5)]
    lines = job.closing("runs/x", logged, 1.0, True, {}).splitlines()
    assert lines[1] == "  step reward in training: 0.25 -> 0.5 (first and last logged)"
    assert lines[2] == "Next:"


def test_an_interrupted_run_names_the_checkpoint(tmp_path):
    assert "No checkpoint in" in job.interrupted(tmp_path)
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    (tmp_path / "checkpoint-6").mkdir()  # the run died while it was written
    go_on = f"the same command with --resume_from_checkpoint {checkpoint}, without --overwrite_output_dir."
    assert job.interrupted(tmp_path) == f"Saved: {checkpoint}. To continue: {go_on}"


def test_a_summary_that_fails_ends_no_run(monkeypatch, capsys, caplog):
    job.say("The closing summary", lambda: str(1 / 0))
    assert "The closing summary failed" in caplog.text
    monkeypatch.setenv("RANK", "1")
    job.say("The closing summary", lambda: "done")
    assert capsys.readouterr().err == ""
