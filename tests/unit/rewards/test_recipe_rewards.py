"""Rewards as recipes and flags write them: names, paths, mappings with options, and what is said of wrong ones."""

import argparse
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from case_tables import DATA, cases

from trl_drgrpo.cli import flags, train
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.recipe import coerce, read_given
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards import SampleReward, Sandbox, clipped, gated, weighted_sum
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.isolation import Limits, isolate
from trl_drgrpo.rewards.recipe_rewards import REWARDS, check_spec, resolve_reward

ROW = {"prompts": ["p"], "completions": ["four"], "answer": ["four"], "ground_truth": ["four"]}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text((DATA / "mine.txt").read_text())
    (tmp_path / "broken_for_test.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "failing_for_test.py").write_text("x = 1 / 0\n")
    (tmp_path / "unfinished_for_test.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "mine.py").is_file()])


WITHOUT_IMPORT = list(cases("recipe_rewards.tsv", "forms, seen without an import"))
REFUSED = [case for case in cases("recipe_rewards.tsv") if case[0] != "accepted"]


@pytest.mark.parametrize(("_", "text", "due"), cases("recipe_rewards.tsv", "accepted"))
def test_rewards_as_recipes_write_them(_, text, due):
    spec = yaml.safe_load(text)
    check_spec(spec)
    row = {**ROW, "completions": ["5"], "answer": ["4"]} if "math" in text else ROW
    assert list(resolve_reward(spec)(**row)) == [due and float(due)]
    if isinstance(spec, dict):  # after a flag the same text, or JSON
        flag = flags.read_flags()["reward_funcs"]
        assert coerce(flag, [text, "accuracy_reward"]) == [spec, "accuracy_reward"]
        assert coerce(flag, [json.dumps(spec)]) == [spec]


def test_flags_know_the_floats_of_recipes():
    flag = flags.read_flags()["reward_funcs"]
    assert coerce(flag, ["{clipped: {low: 1e-3}}"]) == [{"clipped": {"low": 0.001}}]


def test_functions_of_files_and_modules_reach_the_workers():
    for function in ("mine.py:compute_score", "mine.compute_score"):
        reward = resolve_reward({"verl": {"function": function, "data_source": "s", "timeout": 30}})
        assert reward(**ROW) == [1.0]
    orm = resolve_reward({"isolate": {"reward": {"swift": {"orm": "mine.py:Orm", "args": {"bonus": 2}}}}})
    assert orm(**ROW) == [2.0]


def test_names_of_what_was_built():
    spec = {"isolate": {"reward": {"verl": {"function": "mine.py:compute_score", "name": "equal"}}}}
    assert reward_name(resolve_reward(spec)) == "equal"


@pytest.mark.parametrize(("section", "text", "message"), REFUSED)
def test_a_bad_reward_of_a_recipe_is_refused(section, text, message):
    spec = yaml.safe_load(text)
    with pytest.raises(InputError, match=message):
        resolve_reward(spec)
    if section == WITHOUT_IMPORT[0][0]:
        with pytest.raises(InputError, match=message):
            check_spec(spec)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Limits(timeout=10**400), "timeout: got "),
        (lambda: Limits(timeout=10**5000), "timeout: got "),
        (lambda: Limits(memory_mb=10**5000), "memory_mb: got "),
        (lambda: SampleReward("equal", [5]), "column: got 5"),
        (lambda: weighted_sum([(Limits, 1)]), "the class or model Limits"),
        (lambda: gated(torch.nn.Linear(1, 1)), "List a reward model in reward_funcs"),
        (lambda: clipped(len, low=10**400), "low: got"),
        (lambda: isolate(SampleReward), "reward: got the class SampleReward; expected a function"),
        (lambda: Sandbox(kind="docker"), 'sandbox: got \'docker\'; expected "bwrap" or "none"'),
        (lambda: Sandbox(memory_mb=1), "memory_mb: got 1; expected at least 64"),
        (lambda: Sandbox(disk_mb=0), "disk_mb: got 0; expected at least 1"),
        (lambda: Sandbox(threads=0), "threads: got 0; expected at least 1"),
        (lambda: Sandbox(python="/nowhere/python"), "python: got '/nowhere/python'"),
        (lambda: resolve_reward({"isolate": {"reward": 5}}, "reward"), "^reward: isolate.reward: got 5"),
    ],
)
def test_a_bad_argument_of_a_reward_is_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{verl: [}", "YAML error: "),
        ("{clipped: {low: 1, low: 2}}", "low: got the same key twice"),
        *(case[1:] for case in WITHOUT_IMPORT[:5]),
    ],
)
def test_wrong_flags_are_refused_by_the_parser(text, message):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(InputError, match=message):
        read_given(parser.parse_args(["--reward_funcs", "accuracy_reward", text]))


def test_a_recipe_with_mappings_survives_a_dry_run_and_trains(tmp_path, capsys):
    recipe, again = tmp_path / "recipe.yaml", tmp_path / "again.yaml"
    recipe.write_text((DATA / "recipe_rewards.yaml").read_text())
    assert main(["train", "--config", str(recipe), "--dry_run"]) == 0
    again.write_text(capsys.readouterr().out)
    assert yaml.safe_load(again.read_text())["reward_funcs"] == yaml.safe_load(recipe.read_text())["reward_funcs"]
    assert main(["train", "--config", str(again)]) == 0
    history = json.loads(Path("out/checkpoint-1/trainer_state.json").read_text())["log_history"]
    assert history[0]["rewards/length/mean"] == 1.0  # of message lists, as these data are conversational
    assert history[0]["rewards/clipped_length/mean"] == 1.0
    assert history[0]["rewards/compute_later/failed_frac"] == 0.0
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 1


def test_a_column_that_one_of_several_may_hold_is_missed_before_a_model_loads(tmp_path, capsys):
    argv = ["train", "--model_name_or_path", "trl_drgrpo:demo", "--dataset_name", "trl_drgrpo:list_sum", "--dry_run"]
    argv += ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out")]
    assert main([*argv, "--reward_funcs", "{verl: {function: mine.py:compute_score, data_source: s}}"]) == 2
    assert "expected the ground truth in one of the columns reward_model.ground_truth" in capsys.readouterr().err


def test_every_reward_with_on_error_refuses_an_unknown_value():
    tried = {name for section, text, _ in REFUSED if section == "on_error" for name in yaml.safe_load(text)}
    for name, entry in REWARDS.items():
        factory = entry.factory and REWARDS.load(name, entry.factory)
        if factory and "on_error" in inspect.signature(factory).parameters:
            assert name in tried


def test_a_text_is_no_column_of_a_foreign_function():
    reward = resolve_reward({"r1_zero": "mine.py:grader"})
    with pytest.raises(InputError, match="reward grader: got a str of 2 as column 'answer'"):
        reward(completions=["1", "2"], answer="12")


def test_soft_overlong_punishment_has_trls_values():
    punish = resolve_reward("get_soft_overlong_punishment")
    # free up to 1280 - 256 = 1024 tokens, then linear down to -1 at 1280
    assert punish(completion_ids=[[0] * 1024, [0] * 1152, [0] * 1281]) == [0.0, -0.5, -1.0]
    other = resolve_reward({"get_soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 4}})
    assert other(completion_ids=[[0] * 6, [0] * 8, [0] * 11]) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("spec", ["mine.length", "mine.py:length", "{}/mine.py:length"])
def test_a_path_names_a_reward(tmp_path, spec):
    assert resolve_reward(spec.format(tmp_path))(completions=["a"]) == [1]
