"""Adapters between TRL's reward functions and those of other stacks: arguments, results, failures, bad input."""

import asyncio
import inspect
import json
import math
import os
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards.adapters import stacks as adapters
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.contract import checked_reward


def message(text):
    return [{"role": "assistant", "content": text}]


def truths(*answers):
    return {"reward_model": [{"ground_truth": answer} for answer in answers]}


def equal(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


async def equal_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    if solution_str == "boom":
        raise ZeroDivisionError("boom")
    if solution_str == "slow":
        await asyncio.sleep(60)
    return {"score": float(solution_str == ground_truth), "acc": 7}


# verl ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        ((0.25, "why"), 0.25),
        ([0.25, 1.0], 0.25),
        ({"acc": 1.0, "score": -1.0}, -1.0),
        (torch.tensor(0.5), 0.5),
        (None, None),
        (math.nan, None),
        ({"acc": 1.0}, None),  # failures, from here on
        ("1.0", None),
        (math.inf, None),
        ({"score": "good"}, None),
        ([], None),
    ],
)
def test_return_values_of_verl_functions(result, reward):
    adapted = adapters.from_verl(lambda **kwargs: result)
    assert adapted(completions=["c"], data_source=["s"], ground_truth=["g"]) == [reward]


def test_a_verl_function_gets_what_verl_passes():
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
        seen.update(locals())
        extra_info["mine"] = 1  # verl's functions may: it must not reach the next row
        return bonus

    adapted = adapters.from_verl(compute_score, reward_kwargs={"bonus": 2.0})
    extra = {"index": 3}
    columns = {"data_source": ["sums"], "extra_info": [extra], "reward_model": [{"ground_truth": ["4", "four"]}]}
    assert adapted(prompts=["2+2="], completions=[message("4")], completion_ids=[[1]], **columns) == [2.0]
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == ("sums", "4", ["4", "four"])
    assert seen["extra_info"] == {"index": 3, "num_turns": None, "rollout_reward_scores": {}, "mine": 1}
    assert extra == {"index": 3}
    constant = adapters.from_verl(lambda data_source, **kwargs: float(data_source == "other"), data_source="other")
    assert constant(completions=["4"], **columns) == [1.0]  # over the column


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, {"reward_model": [{"ground_truth": "4"}]}),
        ({}, {"reward_model": [json.dumps({"ground_truth": "4"})]}),
        ({}, {"ground_truth": ["4"]}),
        ({"answer_column": "answer"}, {"answer": ["4"], "ground_truth": ["5"]}),
        ({"answer_column": "meta.gold.text"}, {"meta": [{"gold": {"text": "4"}}]}),
        ({"answer_column": "meta.gold"}, {"meta.gold": ["4"]}),
    ],
)
def test_the_ground_truth_is_read_from_its_column(options, columns):
    adapted = adapters.from_verl(equal, data_source="s", **options)
    check_columns(adapted, ["prompt", *columns], "equal")
    assert adapted(completions=["4"], **columns) == [1.0]


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({}, ["answer", "data_source"], "expected the ground truth in one of the columns reward_model.ground_truth"),
        ({"answer_column": "gold"}, ["answer", "data_source"], "in the column 'gold'. Point answer_column="),
        ({}, ["ground_truth"], "the data source in the column 'data_source'.* data_source="),
    ],
)
def test_a_missing_column_is_an_error_before_and_at_the_call(options, columns, message):
    adapted = adapters.from_verl(equal, **options)
    with pytest.raises(InputError, match=f"reward equal: got a dataset with the columns.*{message}"):
        check_columns(adapted, ["prompt", *columns], "equal")
    with pytest.raises(InputError, match=message):
        adapted(completions=["4"], **{column: ["4"] for column in columns})


def test_a_path_into_something_that_is_no_mapping():
    adapted = adapters.from_verl(equal, data_source="s", answer_column="answer.text")
    with pytest.raises(InputError, match=r"got a str where 'answer.text' needs a mapping with 'text'"):
        adapted(completions=["4"], answer=["4"])


def test_a_verl_function_may_name_the_text_otherwise():
    def geometry(predict_str, ground_truth, bonus=0.5):
        return bonus * (predict_str == ground_truth)

    def verify(model_output, ground_truth):
        return float(model_output == ground_truth)

    for function, reward in ((geometry, 0.5), (verify, 1.0)):
        assert adapters.from_verl(function)(completions=["4"], **truths("4")) == [reward]


def test_batch_functions_are_called_once():
    calls = []

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
        calls.append(len(solution_strs))
        return [(scale * (a == b),) for a, b in zip(solution_strs, ground_truths, strict=True)]

    async def compute_later(solution_strs, ground_truths):
        return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]

    columns = {"data_source": ["s"] * 3, **truths("1", "2", "4")}
    adapted = adapters.from_verl(compute_scores, reward_kwargs={"scale": 3.0})
    assert adapted(completions=["1", "2", "3"], **columns) == [3.0, 3.0, 0.0]
    assert calls == [3]
    later = adapters.from_verl(compute_later)
    assert inspect.iscoroutinefunction(type(later).__call__)
    assert asyncio.run(later(completions=["1", "2", "3"], **columns)) == [1.0, 1.0, 0.0]


# Failures ------------------------------------------------------------------------------------------------------------


def fragile(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / float(solution_str)


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_failure_costs_its_completion(timeout):
    metrics = {}
    adapted = adapters.from_verl(fragile, data_source="s", timeout=timeout)
    rewards = adapted(completions=["2", "0", "x", "4"], ground_truth=[""] * 4, log_metric=metrics.__setitem__)
    assert rewards == [0.5, None, None, 0.25]
    assert metrics == {"rewards/fragile/failed_frac": 0.5}


def test_a_failure_costs_what_the_function_declares():
    def declares(data_source, solution_str, ground_truth, extra_info=None):
        return 1 / float(solution_str)

    async def later(data_source, solution_str, ground_truth, extra_info=None):
        return 1 / float(solution_str)

    declares.lowest_reward = later.lowest_reward = -1.0
    call = {"completions": ["2", "x"], "ground_truth": [""] * 2}
    assert adapters.from_verl(declares, data_source="s")(**call) == [0.5, -1.0]
    assert asyncio.run(adapters.from_verl(later, data_source="s")(**call)) == [0.5, -1.0]


def test_a_failure_is_raised_on_request():
    adapted = adapters.from_verl(fragile, data_source="s", on_error="raise")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        adapted(completions=["2", "0"], ground_truth=["", ""])


def test_async_failures_and_limits_cost_their_completion(caplog):
    metrics = {}
    adapted = adapters.from_verl(equal_later, data_source="s", timeout=1.0)
    given = {"completions": ["4", "boom", "slow", "5"], "log_metric": metrics.__setitem__, **truths(*"4444")}
    assert asyncio.run(checked_reward(adapted)(prompts=["p"] * 4, **given)) == [1.0, None, None, 0.0]
    assert metrics == {"rewards/equal_later/failed_frac": 0.5}
    asyncio.run(adapted(completions=["boom"], **truths("4")))
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    strict = adapters.from_verl(equal_later, data_source="s", on_error="raise")
    with pytest.raises(RewardError, match="got ZeroDivisionError: boom at completion 0") as error:
        asyncio.run(strict(completions=["boom"], **truths("4")))
    assert "raise ZeroDivisionError" in str(error.value.__cause__)


def test_no_completions_are_no_rewards():
    for adapted in (adapters.from_verl(equal, data_source="s"), adapters.from_openrlhf(lambda q, p, labels: [])):
        assert list(adapted(completions=[], prompts=[], ground_truth=[], label=[])) == []
    batch = adapters.from_verl(lambda data_sources, solution_strs, ground_truths, extra_infos: solution_strs)
    assert batch(completions=[], prompts=[], data_source=[], ground_truth=[]) == []


@pytest.mark.parametrize(
    "adapted",
    [
        adapters.from_verl(equal, data_source="s"),
        adapters.from_verl(equal_later, data_source="s", timeout=3),
        adapters.from_verl(lambda solution_strs, ground_truths: [1.0]),
        adapters.from_openrlhf(lambda queries, prompts, labels: [1.0]),
        adapters.from_swift(lambda completions, **kwargs: [1.0]),
        adapters.from_verifiers([lambda completion: 1.0]),
        adapters.from_r1_zero(lambda response, gt: ({}, 1.0)),
        adapters.from_trl(lambda completions, **kwargs: [1.0], completions_as="text"),
    ],
    ids=lambda adapted: type(adapted).__name__,
)
def test_adapted_rewards_pickle_and_take_all_that_trl_passes(adapted):
    restored = cloudpickle.loads(cloudpickle.dumps(adapted))
    assert restored.__name__ == adapted.__name__
    columns = {"data_source": ["s"], "ground_truth": ["c"], "answer": ["c"], "label": ["c"]}
    check_columns(restored, ["prompt", *columns], restored.__name__)
    extra = {"completion_ids": [[1]], "trainer_state": None, "log_extra": print, "log_metric": lambda *_: None}
    rewards = checked_reward(restored)(prompts=["p"], completions=["c"], **extra, **columns)
    assert (asyncio.run(rewards) if inspect.isawaitable(rewards) else rewards) == [1.0]


# OpenRLHF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda r: {"rewards": torch.tensor(r), "scores": torch.zeros(len(r)), "extra_logs": {"n": torch.tensor(r)}},
        lambda r: {"rewards": None, "scores": r},
        torch.tensor,
        list,
    ],
)
def test_openrlhf_results(shape):
    def reward_func(queries, prompts, labels, **kwargs):
        assert all(
            query == prompt + "c" * int(label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
        )
        return shape([float(label) for label in labels])

    metrics = {}
    adapted = checked_reward(adapters.from_openrlhf(reward_func))
    given = {"prompts": ["p", "q"], "completions": ["c", "cccc"], "log_metric": metrics.__setitem__}
    assert adapted(answer=["1", "4"], **given) == [1.0, 4.0]
    if metrics:
        assert metrics == {"rewards/reward_func/n": 2.5}


def test_openrlhf_prompts_of_messages():
    def reward_func(queries, prompts, labels):
        return [float((queries, prompts) == (["<u>hi<a>yes"], ["<u>hi<a>"]))]

    adapted = adapters.from_openrlhf(reward_func, render_prompt=lambda messages: f"<u>{messages[0]['content']}<a>")
    conversation = {"prompts": [[{"role": "user", "content": "hi"}]], "completions": [message("yes")]}
    assert adapted(label=[None], **conversation) == [1.0]


# ms-swift ------------------------------------------------------------------------------------------------------------


class Orm:
    def __init__(self, args=None, **kwargs):
        self.limit = args.limit

    def __call__(self, texts, solution, messages, response_token_ids, **kwargs):
        assert [row[-1]["content"] for row in messages] == texts
        assert messages[0][0] == {"role": "user", "content": "q"}
        return [min(len(ids), self.limit) for ids in response_token_ids]


class AsyncOrm:
    async def __call__(self, completions, solution, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]


def test_an_orm_of_swift_is_called_with_its_columns():
    adapted = adapters.from_swift(Orm, args={"limit": 2})
    check_columns(adapted, ["prompt", "solution"], "Orm")
    with pytest.raises(InputError, match="a column 'solution', which the function requires"):
        check_columns(adapted, ["prompt", "answer"], "Orm")
    given = {"prompts": ["q", "q"], "completions": [message("a"), message("b")], "solution": ["a", "a"]}
    assert adapted(completion_ids=[[1], [1, 2, 3]], **given) == [1, 2]
    later = adapters.from_swift(AsyncOrm)
    assert inspect.iscoroutinefunction(type(later).__call__)
    assert asyncio.run(later(**given)) == [1.0, 0.0]


# verifiers -----------------------------------------------------------------------------------------------------------


def test_verifiers_functions_get_what_they_name():
    def exact(completion, answer):
        return completion == answer

    def informed(info, task, state, parser, level):
        assert (info, task, parser) == ({"k": 1}, "default", os.curdir)
        assert state["answer"] == "c"
        return level

    def watched(**everything):
        assert {"prompt", "completion", "answer", "state", "info", "task", "parser", "level"} <= set(everything)
        raise ValueError("a function of weight 0 cannot make the row unscorable")

    metrics = {}
    adapted = adapters.from_verifiers([exact, informed, watched], weights=[1.0, 0.5, 0.0], parser="os.curdir")
    with pytest.raises(InputError, match="a column 'level', which the function requires"):
        check_columns(adapted, ["prompt", "answer"], "rubric")
    columns = {"answer": ["c", "c"], "info": ['{"k": 1}', {"k": 1}], "level": [4, 2]}
    rewards = adapted(completions=["c", "d"], prompts=["p", "p"], log_metric=metrics.__setitem__, **columns)
    assert rewards == [3.0, 1.0]
    assert metrics["rewards/rubric/exact"] == 0.5
    assert metrics["rewards/rubric/informed"] == 3.0
    assert "rewards/rubric/watched" not in metrics
    assert metrics["rewards/rubric/failed_frac"] == pytest.approx(1 / 3)


def test_one_function_in_two_rubrics_gets_each_ones_parser():
    def weigh(parser):
        return parser

    rubrics = [SimpleNamespace(funcs=[weigh], weights=[weight], parser=weight) for weight in (2.0, 3.0)]
    adapted = cloudpickle.loads(cloudpickle.dumps(adapters.from_verifiers(SimpleNamespace(rubrics=rubrics))))
    assert adapted(completions=["c"]) == [2.0 * 2.0 + 3.0 * 3.0]


# understand-r1-zero and plain functions ------------------------------------------------------------------------------


def test_graders_with_and_without_fast():
    def official(model_response, gt_answer, fast=False, correct_reward=1.0, incorrect_reward=0.0):
        return {"formatted": True}, float(fast and model_response == gt_answer)

    columns = {"completions": ["4", "5"], "solution": ["4", "4"]}
    assert adapters.from_r1_zero(official)(**columns) == [1.0, 0.0]
    assert adapters.from_r1_zero(official, fast=False)(**columns) == [0.0, 0.0]
    assert adapters.from_r1_zero(lambda response, gt: ({}, 0.5))(**columns) == [0.5, 0.5]
    assert adapters.from_r1_zero(lambda response, gt: 0.5)(**columns) == [None, None]  # no pair


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_a_function_sees_the_form_it_was_written_for(texts):
    def for_messages(prompts, completions, **kwargs):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [len(completion[0]["content"]) for completion in completions]

    def for_text(prompts, completions, **kwargs):
        return [len(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]

    plain = {"prompts": ["q"] * len(texts), "completions": texts}
    chat = {"prompts": [[{"role": "user", "content": "q"}]] * len(texts), "completions": [message(t) for t in texts]}
    lengths = [len(text) for text in texts]
    for columns in (plain, chat):
        assert adapters.from_trl(for_messages, completions_as="messages")(**columns) == lengths
        assert adapters.from_trl(for_text, completions_as="text")(**columns) == [n + 1 for n in lengths]


def test_plain_functions_keep_name_signature_and_async():
    async def later(completions, answer, **kwargs):
        return [1.0]

    adapted = adapters.from_trl(later, completions_as="text")
    assert adapted.__name__ == "later"
    assert inspect.iscoroutinefunction(type(adapted).__call__)
    with pytest.raises(InputError, match="a column 'answer'"):
        check_columns(adapted, ["prompt"], "later")
    assert adapters.from_trl("list_sum_reward", name="sums").__name__ == "sums"
