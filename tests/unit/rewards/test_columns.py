"""Functions are held against the columns, and rewards asked what else they need, through whatever is around them."""

import functools

import pytest
import torch
from datasets import Dataset

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.preflight import prepare
from trl_drgrpo.rewards import CodeReward, Sandbox, choice_reward, from_trl, numeric_reward
from trl_drgrpo.rewards.columns import ask, check_columns
from trl_drgrpo.rewards.combine import clipped, gated, weighted_sum
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.rewards.isolation import isolate
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

COLUMNS = ["prompt", "answer"]


def takes_all(completions, answer, **kwargs): ...
def wants_solution(completions, solution, **kwargs): ...
def wants_prompt(prompt, **kwargs): ...
def no_kwargs(prompts, completions, answer): ...
def names_everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer): ...
def positional(completions, answer, /, **kwargs): ...
def wants_environments(completions, environments, **kwargs): ...
async def asynchronous(completions, answer, **kwargs): ...


class ORM: ...


class Accuracy(ORM):
    def __call__(self, completions, solution, **kwargs): ...


class Rubric: ...


def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
def reward_func(queries, prompts, labels): ...
def boxed_reward_fn(model_response, gt_answer, fast=False): ...
def correct(completion, answer, **kwargs): ...


class Instance:
    def __call__(self, completions, solution, **kwargs): ...


BOUND = functools.partial(wants_solution, solution=["x"])


@pytest.mark.parametrize(
    "reward", [takes_all, names_everything, asynchronous, BOUND, "some/model", torch.nn.Linear(1, 1), max]
)
def test_rewards_that_fit(reward):  # models, and a built-in without a signature, are not checked
    check_columns(reward, COLUMNS, "r")
    check_columns(wants_environments, [*COLUMNS, "environments"], "r")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (wants_solution, r"reward r: got a dataset with the columns prompt, answer; expected a column 'solution'"),
        (functools.partial(wants_solution, weight=1), "expected a column 'solution'"),
        (Instance(), "expected a column 'solution'"),
        (wants_prompt, "TRL passes it as 'prompts': rename the parameter"),
        (no_kwargs, "does not name completion_ids, trainer_state, log_extra, log_metric; .*Add \\*\\*kwargs"),
        (positional, "the positional-only parameter 'completions'; .*remove the `/`"),
        (wants_environments, "expected a column 'environments'"),
        # Of another stack: its adapter is named.
        (compute_score, "It has the form of verl: pass trl_drgrpo.rewards.from_verl\\(compute_score\\)"),
        (functools.partial(compute_score, data_source="x"), "from_verl\\(compute_score\\)"),
        (reward_func, "from_openrlhf\\(reward_func\\)"),
        (boxed_reward_fn, "from_r1_zero"),
        (correct, "from_verifiers"),
        (Accuracy, "got the class Accuracy; expected .* pass trl_drgrpo.rewards.from_swift\\(Accuracy\\)"),
        (Rubric(), "got Rubric; expected .*from_verifiers"),
        (Instance, "got the class Instance; .*Pass an instance: Instance"),
    ],
)
def test_rewards_that_do_not_fit(reward, message):
    with pytest.raises(InputError, match=message):
        check_columns(reward, COLUMNS, "r")


def test_a_column_with_the_name_of_a_keyword():
    with pytest.raises(InputError, match="a dataset column called 'completions'"):
        check_columns(takes_all, [*COLUMNS, "completions"], "r")


@pytest.mark.parametrize(
    ("name", "supply", "message"),
    [
        ("math_reward", (), r"\[<column>=solution\]` in a recipe\), or set answer_column to its name\.$"),
        (
            "numeric_reward",
            ("Pass `--columns {}=<value>`",),
            "Did you mean .* Pass `--columns answer=<value>`, or set",
        ),
        ("accuracy_reward", (), r"\[<column>=solution\]` in a recipe\), or give the parameter a default"),
    ],
)
def test_the_remedies_name_the_option_and_the_command_s_own_way(name, supply, message):
    with pytest.raises(InputError, match=message):
        check_columns(resolve_reward(name), ["prompt", "answr"], name, *supply)


def test_score_says_how_it_names_a_column(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "1", "answr": "1"}\n')
    assert main(["score", "--rewards", "numeric_reward", "--data", "rows.jsonl"]) == 2
    assert "`--columns <column>=answer`" in capsys.readouterr().err


class Particular:
    """A reward that knows more than its signature says."""

    __name__ = "particular"

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)

    def check_columns(self, columns):
        if not {"gold", "label"} & set(columns):
            raise InputError("reward particular", str(list(columns)), "gold or label", "Add one.")

    def check(self):
        raise InputError("reward particular", "no abacus", "an abacus", "Buy one.")


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


def summed_by_name(reward):
    return weighted_sum({"part": (reward, 1.0), "other": (nothing, 1.0)})


AROUND = {
    "nothing": lambda reward: reward,
    "isolate": isolate,
    "weighted_sum": summed_by_name,
    "gated": lambda reward: gated(nothing, gate=reward),
    "clipped": clipped,
    "from_trl": lambda reward: from_trl(reward, completions_as="messages"),
    "checked_reward": checked_reward,
    "partial": functools.partial,
    "several": lambda reward: isolate(clipped(from_trl(functools.partial(clipped(reward)), completions_as="text"))),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_wrapped_reward_complains_before_training(around):
    reward = AROUND[around](Particular())
    check_columns(reward, ["prompt", "label"], "r")
    with pytest.raises(InputError, match="expected gold or label"):
        check_columns(reward, COLUMNS, "r")
    with pytest.raises(InputError, match="expected an abacus"):
        ask(reward, "check")


def test_a_reward_inside_another_is_asked_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.py").write_text(
        "class Named:\n    def __call__(self, completions, **kwargs): return [0.0] * len(completions)\n"
        "    def check(self): raise RuntimeError('asked')\n\n\nreward = Named()\n"
    )
    for reward in (isolate("named.py:reward"), resolve_reward({"clipped": {"reward": "named.py:reward"}})):
        with pytest.raises(RuntimeError, match="asked"):
            ask(reward, "check")


class Unrelated:
    """Has methods of these names that mean something else."""

    def __call__(self, completions, **kwargs): ...
    def check(self, completion, strictly): ...
    def check_columns(self): ...


@pytest.mark.parametrize("reward", [Unrelated(), "some/model", torch.nn.Linear(1, 1), max, len])
def test_objects_of_other_libraries_are_not_asked(reward):
    ask(reward, "check")
    ask(reward, "check_columns", COLUMNS)


@pytest.mark.parametrize("around", ["nothing", "several", "gated"])
def test_a_missing_bubblewrap_is_known_before_a_model_loads(around, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    # Limits that no other test has, so that no earlier look at the machine counts.
    reward = AROUND[around](CodeReward(sandbox=Sandbox(memory_mb=701)))
    data = Dataset.from_dict({"prompt": ["p"] * 8, "tests": [["assert f(1)"]] * 8})
    with pytest.raises(InputError, match="sandbox: got no bubblewrap"):
        prepare(DrGRPOConfig(**settings), None, [reward], data)
    with pytest.raises(InputError, match="sandbox: got no bubblewrap"):
        prepare(DrGRPOConfig(**settings), None, [], data, step_reward_funcs=[reward])


def test_the_score_command_looks_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "from trl_drgrpo.rewards import CodeReward, Sandbox\nreward = CodeReward(sandbox=Sandbox(memory_mb=702))\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "no code", "tests": ["assert f(1)"]}\n')
    argv = ["--data", "rows.jsonl", "--output", "scored.jsonl"]
    assert main(["score", "--rewards", "{clipped: {reward: mine.py:reward}}", *argv]) == 2
    assert "sandbox: got no bubblewrap" in capsys.readouterr().err
    assert not (tmp_path / "scored.jsonl").exists()


# The values of columns


def data_of(answers, column="answer"):
    return Dataset.from_dict({"prompt": ["p"] * len(answers), column: answers})


@pytest.mark.parametrize(
    ("name", "column", "answers", "message"),
    [
        (
            "list_sum_reward",
            "answer",
            ["1", None] * 4,
            "got null in 4 of 8 rows of the column 'answer', first in row 1",
        ),
        ("accuracy_reward", "solution", [3] * 8, "got a column 'solution' that holds number; expected text in every"),
        ("accuracy_reward", "solution", [None] * 8, "a column 'solution' that holds null"),
        ("math_reward", "solution", [{"a": 1}] * 8, "holds mapping; expected text or number or list in every row"),
        ("numeric_reward", "answer", [[1]] * 8, "holds list; expected text or number"),
        ("exact_match_reward", "answer", [None] * 8, "holds null"),
    ],
)
@pytest.mark.parametrize("around", [name for name in AROUND if name != "checked_reward"])  # the trainer's own, later
def test_a_gold_column_that_no_row_could_be_scored_by(name, column, answers, message, around, settings):
    reward = AROUND[around](resolve_reward(name))
    good = data_of(["1"] * 8, column)
    for train, held_out in ((data_of(answers, column), None), (good, {"held_out": data_of(answers, column)})):
        with pytest.raises(InputError, match=f"^reward {name}: .*{message}"):
            prepare(DrGRPOConfig(**settings), None, [reward], train, eval_dataset=held_out)
    prepare(DrGRPOConfig(**settings), None, [reward], good)


def test_nulls_that_a_reward_may_handle_are_said_once(settings, caplog):
    def own(completions, answer, **kwargs):
        return [0.0] * len(completions)

    rewards, data = [own, resolve_reward("exact_match_reward")], data_of(["1", "2", None, None] * 2)
    with caplog.at_level("WARNING", logger="trl_drgrpo"):
        for _ in range(2):
            prepare(DrGRPOConfig(**settings), None, rewards, data)
    (line,) = [record.getMessage() for record in caplog.records if "null" in record.getMessage()]
    assert "the column answer is null in 4 of 8 rows, first in row 2 (from 0). own, exact_match_reward" in line


@pytest.mark.parametrize("answers", [[1, 2], ["a", None], [[1], [2]], [0.5, 1.0]])
def test_math_reads_texts_numbers_and_lists(answers, settings):
    prepare(DrGRPOConfig(**settings), None, [resolve_reward("math_reward")], data_of(answers * 4, "solution"))


# What a tracker and a folder need


def test_trackers_and_folders_that_are_not_there(settings, monkeypatch, reward, prompts):
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", list)
    cases = [
        ({"report_to": "tensorboard"}, "report_to: got tensorboard, but tensorboard is not installed"),
        ({"report_to": ["wandbb"]}, r"report_to: got wandbb; .*Did you mean wandb\?"),
        ({"output_dir": __file__}, "output_dir: got .* is a file"),
    ]
    for fields, message in cases:
        with pytest.raises(InputError, match=message):
            prepare(DrGRPOConfig(**{**settings, **fields}), None, [reward], prompts)
    prepare(DrGRPOConfig(**{**settings, "report_to": "none"}), None, [reward], prompts)


def test_the_adapters_that_are_named_are_there():
    from trl_drgrpo import rewards
    from trl_drgrpo.rewards.columns import _BY_CLASS, _BY_PARAMETERS
    from trl_drgrpo.rewards.recipe_rewards import REWARDS

    for _, adapter, *_ in (*_BY_PARAMETERS, *_BY_CLASS.values()):
        assert callable(getattr(rewards, adapter))
        assert REWARDS[adapter.removeprefix("from_")].factory is getattr(rewards, adapter)


def test_complaints_of_a_reward_about_a_row_are_passed_on():
    said = "column 'answer' holds 'x', which is not one number"
    for reward in (numeric_reward, isolate(numeric_reward), checked_reward(numeric_reward)):
        assert ask(reward, "check_row", answer="x") == said
        assert ask(reward, "check_row", answer="1") is None
    assert ask(choice_reward, "check_row", answer="both") == (
        "column 'answer' holds 'both', which is not one of ABCDE or a position from 0"
    )
    assert ask(takes_all, "check_row", answer="x") is None
