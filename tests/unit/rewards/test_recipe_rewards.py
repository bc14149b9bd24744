"""Rewards as recipes and flags write them: names, paths, mappings with options, and what is said of wrong ones."""

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest
import yaml

from trl_drgrpo.cli import flags, train, values
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.recipe import read_given
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import REWARDS, bare_names, check_spec, resolve_reward

MINE = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


async def compute_later(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) - len(ground_truth)}


def length(completions, **kwargs):
    return [len(completion) for completion in completions]


def for_messages(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]


def slow(completions, **kwargs):
    time.sleep(60)


class Orm:
    def __init__(self, args=None, **kwargs):
        self.bonus = args.bonus

    def __call__(self, completions, **kwargs):
        return [self.bonus for _ in completions]


def exact(completion, answer):
    return float(completion == answer)


def grader(response, gt, fast=False):
    return {}, float(response == gt) + fast


def openrlhf(queries, prompts, labels):
    return {"rewards": [len(query) for query in queries]}
"""
ROW = {"prompts": ["p"], "completions": ["four"], "answer": ["four"], "ground_truth": ["four"]}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "mine.py").is_file()])


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_row_of_the_table_leads_somewhere(name):
    entry = REWARDS[name]
    module = importlib.import_module(entry.module)
    assert entry.default or entry.factory
    if entry.default:
        assert callable(getattr(module, entry.default))
    if entry.factory:
        assert list(inspect.signature(getattr(module, entry.factory)).parameters)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("mine.py:length", 4),
        ("{verl: {function: mine.py:compute_score, data_source: sums}}", 1.0),
        ("{verl: {function: mine.compute_score, data_source: sums, answer_column: answer}}", 1.0),
        ("{trl: {function: mine.py:for_messages, completions_as: messages}}", 4),
        ("{swift: {orm: mine.py:Orm, args: {bonus: 0.25}}}", 0.25),
        ("{verifiers: {rubric: [mine.py:exact, mine.py:exact], weights: [1, 0.5]}}", 1.5),
        ("{verifiers: mine.py:exact}", 1.0),
        ("{r1_zero: mine.py:grader}", 2.0),
        ("{r1_zero: {grader: mine.py:grader, fast: false}}", 1.0),
        ("{openrlhf: mine.py:openrlhf}", 5),  # "p" + "four"
        ("{openrlhf: {function: mine.py:openrlhf, batched: false}}", 5),
        ("{clipped: {reward: mine.py:length, high: 3}}", 3),
        ("{clipped: mine.py:length}", 1.0),
        ("{cached: {reward: {clipped: {reward: mine.py:length, high: 2}}}}", 2),
        ("{gated: {reward: mine.py:length, gate: {regex_reward: {pattern: '^f'}}}}", 4),
        ("{gated: {reward: mine.py:length, gate: {regex_reward: '^x'}, else_value: -1}}", -1),
        ("{weighted_sum: {parts: [[mine.py:length, 0.5], [{clipped: mine.py:length}, 1]]}}", 3.0),
        ("{weighted_sum: {parts: {exact_match_reward: 2, mine.py:length: 0.25}}}", 3.0),
        ("{weighted_sum: {parts: {a: [mine.py:length, 1], b: [mine.py:length, 2]}}}", 12.0),
        ("{exact_match_reward: {column: ground_truth}}", 1.0),
        ("{exact_match_reward: }", 1.0),
        ("{isolate: {reward: mine.py:length, timeout: 30}}", 4),
        ("{isolate: {reward: mine.py:slow, timeout: 0.2}}", None),
        ("{isolate: {reward: {verl: {function: mine.py:compute_score, data_source: s}}, timeout: 30}}", 1.0),
        ("{math_reward: {answer_column: answer, limits: {timeout: 30}}}", 0.0),
    ],
)
def test_rewards_as_recipes_write_them(text, reward):
    spec = yaml.safe_load(text)
    check_spec(spec)
    row = {**ROW, "completions": ["5"], "answer": ["4"]} if "math" in text else ROW
    assert list(resolve_reward(spec)(**row)) == [reward]
    if isinstance(spec, dict):  # after a flag the same text, or JSON
        flag = flags.read_flags()["reward_funcs"]
        assert values.coerce(flag, [text, "accuracy_reward"]) == [spec, "accuracy_reward"]
        assert values.coerce(flag, [json.dumps(spec)]) == [spec]


def test_soft_overlong_punishment_with_other_values():
    punish = resolve_reward({"get_soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 4}})
    assert punish(completion_ids=[[0] * 6, [0] * 8, [0] * 11]) == [0.0, -0.5, -1.0]


def test_flags_know_the_floats_of_recipes():
    flag = flags.read_flags()["reward_funcs"]
    assert values.coerce(flag, ["{clipped: {low: 1e-3}}"]) == [{"clipped": {"low": 0.001}}]


def test_the_help_of_the_flag_names_every_reward():
    text = flags.read_flags()["reward_funcs"].help.partition(". ")[0]  # as `train --help` has it
    rewards = {name for name, entry in REWARDS.items() if "process_rewards" not in entry.module}
    assert {name for name in rewards if f"`{name}`" not in text} == {"list_sum_line_reward"}  # a step reward


def test_functions_of_files_and_modules_reach_the_workers():
    for function in ("mine.py:compute_score", "mine.compute_score"):
        reward = resolve_reward({"verl": {"function": function, "data_source": "s", "timeout": 30}})
        assert reward(**ROW) == [1.0]
    orm = resolve_reward({"isolate": {"reward": {"swift": {"orm": "mine.py:Orm", "args": {"bonus": 2}}}}})
    assert orm(**ROW) == [2.0]


def test_names_of_what_was_built():
    spec = {"isolate": {"reward": {"verl": {"function": "mine.py:compute_score", "name": "equal"}}}}
    assert reward_name(resolve_reward(spec)) == "equal"


# Wrong ones that need no import to be seen
WITHOUT_IMPORT = [
    ("{verll: mine.py:f}", "reward_funcs: got 'verll'; .* Did you mean verl"),
    ("{mine.py:length: {a: 1}}", "got 'mine.py:length'; .* A path takes no options: write it as a string"),
    ("{accuracy_reward: {x: 1}}", "got options for accuracy_reward; expected `accuracy_reward` alone"),
    ("{verl: mine.py:f, timeout: 3}", "got a mapping with verl, timeout; expected a mapping with one key"),
    ("{}", "got a mapping with no keys; expected a mapping with one key"),
    ("[accuracy_reward]", "got list .*; expected a name, a path, or a mapping"),
    ("3", "got int 3; expected a name, a path, or a mapping"),
    ("{isolate: {reward: {verll: f}}}", "reward_funcs: isolate.reward: got 'verll'"),
    ("{weighted_sum: {parts: [[{verll: f}, 1]]}}", "reward_funcs: weighted_sum.parts: got 'verll'"),
]


@pytest.mark.parametrize(("text", "message"), WITHOUT_IMPORT)
def test_wrong_forms(text, message):
    spec = yaml.safe_load(text)
    with pytest.raises(InputError, match=message):
        check_spec(spec)
    with pytest.raises(InputError, match=message):
        resolve_reward(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verl", "reward_funcs: got 'verl' without options; expected a mapping .*`verl: {function: ...}`"),
        ("{verl: {functio: mine.py:compute_score}}", "reward_funcs: verl.functio: .* Did you mean function"),
        ("{verl: {data_source: s}}", "reward_funcs: verl: got no function; expected the option function"),
        (
            "{verl: {function: mine.py:compute_scor}}",
            "verl.function: got .*Did you mean compute_score",
        ),
        (
            "{verl: {function: mine.py:compute_score, timeout: -1}}",
            "reward_funcs: verl.timeout: got -1; expected",
        ),
        ("{verl: {1: x}}", "reward_funcs: verl: got the option 1"),
        ("{isolate: {verl: mine.py:compute_score}}", "goes under `reward`: `reward: {verl: ...}`"),
        ("{isolate: {reward: accuracy_rewart}}", "reward_funcs: isolate.reward: got 'accuracy_rewart'.*Did you mean"),
        (
            "{isolate: {reward: {verl: {functio: x}}}}",
            "reward_funcs: isolate.reward: verl.functio: got an unk",
        ),
        ("{math_reward: {limits: {timout: 3}}}", "reward_funcs: math_reward.limits.timout: .*Did you mean timeout"),
        ("{math_reward: {limits: {timeout: -3}}}", "reward_funcs: math_reward.limits.timeout: got -3"),
        ("{math_reward: {answer_format: boxd}}", "reward_funcs: math_reward.answer_format: got 'boxd'.*'boxed'"),
        (
            "{clipped: {reward: mine.py:length, low: 3, high: 2}}",
            "reward_funcs: clipped.high: got 2; expected more",
        ),
        ("{clipped: {reward: 3}}", "reward_funcs: clipped.reward: got"),
        ("{weighted_sum: {parts: 5}}", "reward_funcs: weighted_sum.parts: got 5; expected pairs"),
        ("{weighted_sum: {parts: text}}", "reward_funcs: weighted_sum.parts: got 'text'; expected pairs"),
        ("{math_reward: [1]}", "reward_funcs: math_reward.*: got "),
        ("{math_reward: {name: 5}}", "reward_funcs: math_reward.name: got 5"),
        ("{math_reward: {limits: 5}}", "reward_funcs: math_reward.limits: got 5; expected Limits"),
        ("{math_reward: {limits: {workers: true}}}", "reward_funcs: math_reward.limits.workers: got True"),
        ("{exact_match_reward: {column: 5}}", "reward_funcs: exact_match_reward.column: got 5"),
        ("{exact_match_reward: {name: ''}}", "reward_funcs: exact_match_reward.name: got ''"),
        ("{exact_match_reward: {strip: 'no'}}", "reward_funcs: exact_match_reward.strip: got 'no'"),
        ("{numeric_reward: {abs_tol: x}}", "reward_funcs: numeric_reward.abs_tol: got 'x'"),
        ("{format_reward: {allow_empty: 'no'}}", "reward_funcs: format_reward.allow_empty: got 'no'"),
        ("{choice_reward: {letters: 5}}", "reward_funcs: choice_reward.letters: got 5"),
        ("{json_schema_reward: {schema: 5}}", "reward_funcs: json_schema_reward.schema: got 5"),
        ("{json_schema_reward: {invalid_score: x}}", "reward_funcs: json_schema_reward.invalid_score: got 'x'"),
        ("{regex_reward: ''}", "reward_funcs: regex_reward.pattern: got ''"),
        ("{regex_reward: {pattern: a, timeout: x}}", "reward_funcs: regex_reward.timeout: got 'x'"),
        ("{length_penalty: {free_tokens: 1, limit_tokens: 2, max_penalty: x}}", "length_penalty.max_penalty: got 'x'"),
        ("{code_reward: {tests: 5}}", "reward_funcs: code_reward.tests: got 5"),
        ("{code_reward: {setup: 'a b'}}", "reward_funcs: code_reward.setup: got 'a b'"),
        ("{code_reward: {timeout: x}}", "reward_funcs: code_reward.timeout: got 'x'"),
        ("{code_reward: {tolerance: x}}", "reward_funcs: code_reward.tolerance: got 'x'"),
        ("{code_reward: {workers: x}}", "reward_funcs: code_reward.workers: got 'x'"),
        ("{code_reward: {workers: true}}", "reward_funcs: code_reward.workers: got True"),
        ("{code_reward: {partial: 'no'}}", "reward_funcs: code_reward.partial: got 'no'"),
        ("{isolate: {reward: {isolate: {reward: 5}}}}", "reward_funcs: isolate.reward: isolate.reward: got 5"),
        ("{isolate: {reward: mine.py:length, batched: yes please}}", "isolate.batched: got 'yes please'"),
        ("{openrlhf: mine.py:length}", "reward_funcs: openrlhf.function: got length.*form f.queries, prompts, labels"),
        ("{openrlhf: {function: mine.py:length, batched: 'no'}}", "reward_funcs: openrlhf.batched: got 'no'"),
        ("{r1_zero: mine.py:length}", "reward_funcs: r1_zero.grader: got length.*form f.response, gt"),
        ("{get_cosine_scaled_reward: {max_len: 9, nonsense: 1}}", "get_cosine_scaled_reward.nonsense: got an unknown"),
        (
            "{get_repetition_penalty_reward: {ngram_size: 3, max_penalty: 5}}",
            "options that it does not accept .ValueError",
        ),
    ],
)
def test_wrong_options(text, message):
    with pytest.raises(InputError, match=message):
        resolve_reward(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{verl: [}", "YAML error: "),
        ("{clipped: {low: 1, low: 2}}", "low: got the same key twice"),
        *WITHOUT_IMPORT[:5],
    ],
)
def test_wrong_flags_are_refused_by_the_parser(text, message):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(InputError, match=message):
        read_given(parser.parse_args(["--reward_funcs", "accuracy_reward", text]))


def test_a_recipe_with_mappings_survives_a_dry_run(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
model_name_or_path: trl_drgrpo:demo
dataset_name: trl_drgrpo:list_sum
max_completion_length: 64
output_dir: {tmp_path}/out
use_cpu: true
bf16: false
reward_funcs:
  - list_sum_reward
  - clipped: {{reward: mine.py:length, high: 3}}
  - trl:
      function: mine.py:for_messages
      completions_as: messages
""")
    assert main(["train", "--config", str(recipe), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["reward_funcs"] == yaml.safe_load(recipe.read_text())["reward_funcs"]
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert main(["train", "--config", str(again), "--dry_run"]) == 0


def test_a_run_with_adapters_and_workers(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
model_name_or_path: trl_drgrpo:demo
dataset_name: trl_drgrpo:list_sum
output_dir: {tmp_path}/out
use_cpu: true
bf16: false
max_steps: 1
logging_steps: 1
per_device_train_batch_size: 4
num_generations: 4
max_completion_length: 8
report_to: none
reward_funcs:
  - verl: {{function: mine.py:compute_later, data_source: s, answer_column: answer}}
  - isolate: {{reward: mine.py:length, timeout: 60}}
""")
    assert main(["train", "--config", str(recipe)]) == 0
    history = json.loads(next((tmp_path / "out").glob("checkpoint-1/trainer_state.json")).read_text())["log_history"]
    assert history[0]["rewards/length/mean"] == 1.0  # of message lists, as these data are conversational
    assert history[0]["rewards/compute_later/failed_frac"] == 0.0
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 1


def test_a_column_that_one_of_several_may_hold_is_missed_before_a_model_loads(tmp_path, capsys):
    argv = ["train", "--model_name_or_path", "trl_drgrpo:demo", "--dataset_name", "trl_drgrpo:list_sum", "--dry_run"]
    argv += ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out")]
    assert main([*argv, "--reward_funcs", "{verl: {function: mine.py:compute_score, data_source: s}}"]) == 2
    assert "expected the ground truth in one of the columns reward_model.ground_truth" in capsys.readouterr().err


ON_ERROR = {  # everything that takes `on_error`, with the options that it needs besides
    "code_reward": {},
    "isolate": {"reward": "format_reward"},
    "json_schema_reward": {},
    "judge_reward": {"model": "m", "base_url": "http://localhost:1/v1"},
    "math_reward": {},
    "step_judge": {"model": "m", "base_url": "http://localhost:1/v1"},
    "numeric_reward": {},
    "choice_reward": {},
    "regex_reward": {"pattern": "a"},
    "openrlhf": {"function": "mine.py:openrlhf", "batched": False},
    "r1_zero": {"grader": "mine.py:grader"},
    "reasoning_gym": {"task": "chain_sum"},
    "verifiers": {"rubric": "operator.eq"},
    "verl": {"function": "operator.eq"},
}


def test_whatever_takes_on_error_refuses_nonsense():
    for name, entry in REWARDS.items():
        factory = entry.factory and getattr(importlib.import_module(entry.module), entry.factory)
        if factory and "on_error" in inspect.signature(factory).parameters:
            with pytest.raises(InputError, match=r"on_error: got 'never'; expected \"unscorable\" or \"raise\""):
                resolve_reward({name: {**ON_ERROR.pop(name), "on_error": "never"}})
    assert set(ON_ERROR) <= {"choice_reward", "regex_reward"}


def test_a_reward_inside_one_given_in_python_is_named_by_its_path():
    with pytest.raises(InputError, match="^reward: isolate.reward: got 5"):
        resolve_reward({"isolate": {"reward": 5}}, "reward")


def test_a_text_is_no_column_of_a_foreign_function():
    reward = resolve_reward({"r1_zero": "mine.py:grader"})
    with pytest.raises(InputError, match="reward grader: got a str of 2 as column 'answer'"):
        reward(completions=["1", "2"], answer="12")


@pytest.mark.parametrize("name", bare_names())
def test_every_registered_name_is_a_function(name):
    assert callable(resolve_reward(name))


def test_soft_overlong_punishment_has_trls_values():
    punish = resolve_reward("get_soft_overlong_punishment")
    # free up to 1280 - 256 = 1024 tokens, then linear down to -1 at 1280
    assert punish(completion_ids=[[0] * 1024, [0] * 1152, [0] * 1281]) == [0.0, -0.5, -1.0]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards_for_test.py").write_text(
        "def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n\n\nconstant = 3\n\n\n"
        "class Scorer:\n    def __call__(self, **kwargs): ...\n"
    )
    (tmp_path / "orm_for_test.py").write_text("class ORM: ...\n")
    (tmp_path / "broken_for_test.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "failing_for_test.py").write_text("x = 1 / 0\n")
    (tmp_path / "unfinished_for_test.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    "spec", ["my_rewards_for_test.score", "my_rewards_for_test.py:score", "{}/my_rewards_for_test.py:score"]
)
def test_paths(modules, spec):
    assert resolve_reward(spec.format(modules))(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy_reward", r"Did you mean accuracy_reward"),
        ("reward", "expected one of accuracy_reward, .*, with options .*judge_reward, .*regex_reward, .*, or a path"),
        ("jugde_reward", r"Did you mean judge_reward"),
        ("my_rewards_for_test.py", "A file needs the function's name too: `my_rewards_for_test.py:my_reward`"),
        ("nowhere.py:score", "a file that does not exist"),
        ("no_such_module_at_all.f", "whose module 'no_such_module_at_all' does not exist"),
        ("my_rewards_for_test.scores", "expected a function of my_rewards_for_test. Did you mean score"),
        ("my_rewards_for_test.py:zzz", "Its functions: Scorer, score"),
        ("my_rewards_for_test.constant", "which is a int; expected a function"),
        ("my_rewards_for_test.Scorer", "which is a class; .*Create an instance"),
        ("orm_for_test.ORM", "which is a class; .* pass trl_drgrpo.rewards.from_swift"),
        ("broken_for_test.f", "failed with ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("broken_for_test.py:f", "failed with ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("failing_for_test.f", "failed with ZeroDivisionError: division by zero"),
        ("unfinished_for_test.py:f", "failed with SyntaxError"),
    ],
)
def test_names_that_do_not_resolve(modules, spec, message):
    with pytest.raises(InputError, match=f"reward_funcs: got .*{message}"):
        resolve_reward(spec)
