"""Rung c: problems of reasoning-gym, right solutions, a model that can be trained on them by every arm."""

import dataclasses
import random
import shutil
import statistics

import pytest

pytest.importorskip("reasoning_gym")

from trl_drgrpo.labs.study.arithmetic import (
    CHECK,
    CHECK_PROBABILITY,
    _batches,
    _build_tokenizer,
    _demonstrations,
    answer_reward,
    demonstrate,
    make_prompts,
    warm_start,
)
from trl_drgrpo.labs.study.rungs import ARITHMETIC
from trl_drgrpo.labs.study.trajectories import ARMS, RunSettings, run_arm
from trl_drgrpo.labs.study.trajectory_report import run_study

SMALL = RunSettings(steps=2, prompts=2, num_generations=4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_start(tmp_path_factory.mktemp("arithmetic"), steps=4, batch_size=4)


def test_demonstrations_are_right_by_the_tasks_own_score():
    problems, rng = make_prompts(200, seed=3), random.Random(0)
    solutions = [demonstrate(prompt[-1]["content"], rng) for prompt in problems["prompt"]]
    assert answer_reward(solutions, problems["entry"]) == [1.0] * 200
    broken = [solution.replace("boxed{", "boxed{1") for solution in solutions]
    assert sum(answer_reward(broken, problems["entry"])) == 0.0  # no points for a part of the answer
    checks = [solution.count(CHECK) for solution in solutions]
    assert statistics.fmean(checks) == pytest.approx(CHECK_PROBABILITY / (1 - CHECK_PROBABILITY), abs=0.35)


def test_seeds_and_demonstrations_do_not_share_problems():
    asked = [{prompt[-1]["content"] for prompt in make_prompts(64, seed)["prompt"]} for seed in (0, 1)]
    shown = {messages[0]["content"] for messages in _demonstrations(64)}
    assert not asked[0] & asked[1]
    assert len(shown & (asked[0] | asked[1])) <= 1  # drawn from a million problems


def test_every_demonstration_is_learnt_once_and_whole():
    demonstrations = _demonstrations(40)
    tokenizer = _build_tokenizer(demonstrations)
    batches = list(_batches(demonstrations, tokenizer, batch_size=4))
    assert [len(batch["input_ids"]) for batch in batches] == [4] * 10
    learned = [
        tokenizer.decode(row[row >= 0], skip_special_tokens=True) for batch in batches for row in batch["labels"]
    ]
    assert sorted(learned) == sorted(messages[-1]["content"] for messages in demonstrations)
    ends = [row[row >= 0][-1].item() for batch in batches for row in batch["labels"]]
    assert set(ends) == {tokenizer.eos_token_id}
    assert len(tokenizer("12345")["input_ids"]) == 5  # a token per digit


def alternately_right(completions, **kwargs):
    return [float(number % 2) for number in range(len(completions))]


@pytest.mark.parametrize("arm", ["grpo", "dr_grpo"])
def test_an_arm_trains_and_is_recorded(model_dir, tmp_path, arm):
    rung = dataclasses.replace(ARITHMETIC, settings=SMALL, max_completion=12, reward=alternately_right)
    run = run_arm(rung, arm, 0, model_dir, tmp_path)
    assert run.pass_rate == [0.5, 0.5]
    assert len(run.entropy) == len(run.tokens_by_step) == 2
    assert 8 <= run.tokens_by_step[0] <= 8 * 12
    assert run.length_wrong[0] + run.length_right[0] == pytest.approx(run.tokens_by_step[0] / 4)


@pytest.mark.slow
def test_runs_at_a_time_are_the_same_runs(model_dir, tmp_path):
    settings = dataclasses.replace(SMALL, steps=1)
    small = {"measured_rows": 8, "measured_batches": 3, "max_completion": 12}
    rung = dataclasses.replace(ARITHMETIC, settings=settings, reward=alternately_right, **small)
    found = []
    for jobs in (1, 2):
        work_dir = tmp_path / str(jobs)
        shutil.copytree(model_dir, work_dir / "model")
        results = run_study(rung, range(2), work_dir / "numbers.json", work_dir, jobs)
        found.append([{**run, "seconds": None} for run in results["runs"]])
    assert found[0] == found[1]
    assert [(run["seed"], run["arm"]) for run in found[0]] == [(s, arm) for s in range(2) for arm in ARMS]
