"""Rewards of rewards: the arithmetic, which rows are asked for, what the log shows, and that `None` stays `None`."""

import asyncio
import functools
import inspect
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import train

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import exact_match_reward, format_reward
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.combine import clipped, gated, weighted_sum
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.rewards.isolation import isolate


class Given:
    """A reward that gives what the column `<name>` says, and remembers what it was asked."""

    def __init__(self, name):
        self.__name__ = name
        self.asked = []
        keyword = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(column, keyword) for column in ("completions", name)]
            + [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        )

    def __call__(self, completions, **kwargs):
        self.asked.append((list(completions), kwargs))
        return list(kwargs[self.__name__])


class GivenLater(Given):
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return super().__call__(completions, **kwargs)


KINDS = pytest.mark.parametrize("kind", [Given, GivenLater])


def call(reward, completions=None, **columns):
    """Rewards and logged metrics, of a synchronous or an asynchronous reward."""
    metrics = {}
    count = len(next(iter(columns.values()))) if columns else len(completions)
    completions = [f"c{row}" for row in range(count)] if completions is None else completions
    output = reward(prompts=["p"] * count, completions=completions, log_metric=metrics.__setitem__, **columns)
    return (asyncio.run(output) if inspect.iscoroutine(output) else output), metrics


rewards = st.one_of(st.none(), st.floats(-1e6, 1e6))


# Sums ----------------------------------------------------------------------------------------------------------------


@KINDS
def test_a_sum_with_weights_shows_its_parts(kind):
    reward = weighted_sum([(Given("a"), 1.0), (kind("b"), -0.5)])
    values, metrics = call(reward, a=[1, 0, None, 1], b=[2, 4, 0, None])
    assert values == [0.0, -2.0, None, None]  # 1 - 0.5 * 2, 0 - 0.5 * 4
    # (1 + 0 + 1) / 3 and (2 + 4 + 0) / 3, each over the rows it scored
    assert metrics == {"rewards/weighted_sum/a": pytest.approx(2 / 3), "rewards/weighted_sum/b": 2.0}


def test_skipped_parts_count_nothing():
    reward = weighted_sum([(Given("a"), 2.0), (Given("b"), 1.0)], none="skip")
    assert call(reward, a=[1, None, None], b=[None, 3, None])[0] == [2.0, 3.0, None]


@given(st.lists(st.tuples(rewards, rewards), min_size=1, max_size=8), st.floats(-10, 10), st.floats(-10, 10))
def test_a_sum_is_none_exactly_where_a_part_is(rows, weight, other):
    a, b = zip(*rows, strict=True)
    total, _ = call(weighted_sum({"a": (Given("a"), weight), "b": (Given("b"), other)}), a=a, b=b)
    for value, one, two in zip(total, a, b, strict=True):
        if one is None or two is None:
            assert value is None
        else:
            assert value == pytest.approx(weight * one + other * two)


def test_parts_may_have_names_of_their_own():
    part = Given("a")
    _, metrics = call(weighted_sum({"strict": (part, 1.0), "lenient": (part, 0.5)}, name="total"), a=[1.0])
    assert metrics == {"rewards/total/strict": 1.0, "rewards/total/lenient": 1.0}


def test_all_parts_run_at_the_same_time():
    meeting, answered = asyncio.Event(), threading.Event()

    async def first(completions, **kwargs):
        await asyncio.wait_for(meeting.wait(), 20)  # would time out if `second` waited for it
        return [1.0]

    async def second(completions, **kwargs):
        meeting.set()
        await asyncio.sleep(0)
        answered.set()
        return [2.0]

    def waits(completions, **kwargs):
        return [float(answered.wait(20))]  # blocks its thread until the others have answered

    assert call(weighted_sum([(waits, 1), (first, 1), (second, 1)]), ["c"])[0] == [4.0]


def test_an_error_of_an_asynchronous_part_is_raised_as_it_is_and_ends_the_others():
    ended = []

    async def broken(completions, **kwargs):
        raise ZeroDivisionError("of the part")

    async def waiting(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    with pytest.raises(ZeroDivisionError, match="of the part"):
        call(weighted_sum([(waiting, 1), (broken, 1)]), ["c"])
    assert ended == [True]


def test_the_line_of_a_part_that_failed_in_a_thread_is_named():
    def broken(completions, **kwargs):
        return 1 / 0

    async def later(completions, **kwargs):
        return [1.0]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"Fix the function \({__file__}, line {line}; "):
        call(checked_reward(weighted_sum([(broken, 1), (later, 1)])), ["c"])


@KINDS
def test_a_part_that_breaks_its_contract_is_named(kind):
    part = kind("short")
    with pytest.raises(RewardError, match="reward function 'short': got 1 rewards; expected a list of 2"):
        call(weighted_sum([(part, 1.0)]), ["c", "c"], short=[1.0])


def test_a_part_without_kwargs_gets_what_it_names():
    def plain(completions, answer):
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    values, _ = call(weighted_sum([(plain, 1.0), (Given("a"), 1.0)]), ["x", "y"], answer=["x", "x"], a=[0, 0])
    assert values == [1.0, 0.0]


# Gates ---------------------------------------------------------------------------------------------------------------


@KINDS
def test_a_reward_is_called_only_for_rows_that_pass(kind):
    reward, gate = kind("a"), Given("gate")
    values, metrics = call(gated(reward, gate, else_value=-1.0), gate=[1, 0, None, 1, 0.5], a=[5, 6, 7, None, 9])
    assert values == [5.0, -1.0, None, None, -1.0]
    [(asked, kwargs)] = reward.asked
    assert asked == ["c0", "c3"]
    assert (kwargs["a"], kwargs["prompts"]) == ([5, None], ["p", "p"])
    assert metrics == {"rewards/gated_a/passed_frac": 0.4}
    assert call(gated(reward, gate), gate=[0, 0], a=[1, 1])[0] == [0.0, 0.0]
    assert len(reward.asked) == 1  # where none passes it is not called


def test_the_default_gate_is_the_format():
    right = "<think>2+2</think> <answer>4</answer>"
    values, _ = call(gated(exact_match_reward), [right, "4", right], answer=["4", "4", "5"])
    assert values == [1.0, 0.0, 0.0]


def test_the_table_has_a_value_for_every_row_and_nothing_old():
    """TRL keeps the last values of a column that a call does not log, beside completions of another."""

    def noting(completions, log_extra, **kwargs):
        log_extra("length", [len(completion) for completion in completions])
        return [1.0] * len(completions)

    reward, table = gated(noting, gate=Given("gate")), {}
    for passed, due in (([1, 0, 1], [1, None, 3]), ([0, 0, 0], [None] * 3)):
        table["length"] = ["old"] * 3
        reward(completions=["a", "bb", "ccc"], log_extra=table.__setitem__, gate=passed)
        assert table["length"] == due


# Bounds --------------------------------------------------------------------------------------------------------------


@given(st.lists(rewards, min_size=1, max_size=8), st.floats(-5, 0), st.floats(1, 5))
def test_clipped_rewards_are_within_their_bounds_and_otherwise_the_same(values, low, high):
    kept, metrics = call(clipped(Given("a"), low, high), a=values)
    beyond = [not low <= value <= high for value in values if value is not None]
    for before, after in zip(values, kept, strict=True):
        assert (after is None) == (before is None)
        assert after is None or low <= after <= high
        assert after == before or before is None or not low <= before <= high
    assert metrics == ({"rewards/clipped_a/clipped_frac": pytest.approx(sum(beyond) / len(beyond))} if beyond else {})


# As a reward function of the trainer's -------------------------------------------------------------------------------


def nested(part):
    inner = gated(part, gate=format_reward)
    return clipped(weighted_sum([(inner, 1.0), (format_reward, 0.1)]), -1, 1, name="nested")


def test_compositions_nest_and_pickle():
    cloudpickle = pytest.importorskip("cloudpickle")
    reward = cloudpickle.loads(cloudpickle.dumps(nested(exact_match_reward)))
    right = "<think>2+2</think> <answer>4</answer>"
    values, metrics = call(reward, [right, "4"], answer=["4", "4"])
    assert values == [1.0, 0.0]
    assert metrics["rewards/weighted_sum/gated_exact_match_reward"] == 0.5
    assert metrics["rewards/weighted_sum/format_reward"] == 0.5


def test_isolation_goes_around_and_inside():
    def crashes(completions, **kwargs):
        return [os._exit(1) if completion == "5" else 1.0 for completion in completions]

    def scored(reward):
        return reward(completions=["4", "5"], prompts=["p", "p"], answer=["4", "5"])

    inside = weighted_sum([(isolate(crashes, workers=1), 1.0), (exact_match_reward, 1.0)])
    around = isolate(weighted_sum([(crashes, 1.0), (exact_match_reward, 1.0)]), workers=1)
    assert scored(inside) == scored(around) == [2.0, None]
    check_columns(around, ["prompt", "answer"], "around")
    with pytest.raises(InputError, match="a column 'answer'"):
        check_columns(around, ["prompt"], "around")


def test_columns_of_all_parts_are_asked_for_before_a_model_loads():
    def with_default(completions, hint=None, **kwargs):
        return [0.0] * len(completions)

    reward = weighted_sum([(nested(exact_match_reward), 1), (Given("solution"), 1), (with_default, 1)])
    check_columns(reward, ["prompt", "answer", "solution"], "sum")
    with pytest.raises(InputError, match="a column 'answer', which the function requires"):
        check_columns(reward, ["prompt", "solution"], "sum")
    with pytest.raises(InputError, match="a column 'solution'"):
        check_columns(reward, ["prompt", "answer"], "sum")


@KINDS
def test_the_guard_and_trl_see_what_kind_it_is(kind):
    from trl.trainer.utils import get_callable_name, is_async_callable

    reward = nested(functools.partial(kind("a")))
    assert get_callable_name(reward) == "nested"
    assert is_async_callable(reward) is (kind is GivenLater)
    checked = checked_reward(reward)
    assert is_async_callable(checked) is (kind is GivenLater)
    right = "<think>2+2</think> <answer>4</answer>"
    assert call(checked, [right], a=[0.5])[0] == [pytest.approx(0.6)]


def test_a_run_trains_with_it(tokenizer, prompts, settings):
    from trl_drgrpo import DrGRPOTrainer

    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    async def starts_low(completions, **kwargs):
        return [float(text[:1] < "m") for text in completions]

    reward = weighted_sum([(length, 0.1), (gated(starts_low, gate=length), 1.0)], name="total")
    trainer = train(DrGRPOTrainer, {**settings, "max_steps": 1}, prompts, tokenizer, reward)
    logged = trainer.state.log_history[0]
    assert logged["rewards/total/mean"] == pytest.approx(
        0.1 * logged["rewards/total/length"] + logged["rewards/total/gated_starts_low"], rel=1e-5
    )


def test_a_sum_beyond_floats_is_an_error_that_names_its_row():
    reward = weighted_sum([(Given("a"), 10.0), (Given("b"), 1.0)])
    for a, b in ((1e308, 0.0), (1.5e307, 1.5e308)):
        with pytest.raises(RewardError, match="'weighted_sum': got inf for completion 1; expected a finite number"):
            reward(completions=["x", "y"], prompts=["p", "p"], a=[1.0, a], b=[0.0, b])


def test_weights_and_bounds_may_be_numpy_s():
    reward = weighted_sum([(Given("a"), np.int64(2)), (Given("b"), np.float32(0.5))])
    assert reward(completions=["x"], prompts=["p"], a=[1.0], b=[1.0]) == [2.5]
    bounded = clipped(Given("a"), np.int64(0), np.int64(2))
    assert bounded(completions=["x"], prompts=["p"], a=[3.0]) == [2.0]
    gate = gated(Given("a"), Given("b"), else_value=np.float64(-1), at_least=np.int64(1))
    assert gate(completions=["x"], prompts=["p"], a=[3.0], b=[0.0]) == [-1.0]


async def exits_later(completions, **kwargs):
    raise SystemExit(0)


def test_sys_exit_of_an_asynchronous_part_is_its_failure():
    reward = weighted_sum([(exits_later, 1.0), (Given("a"), 1.0)])
    with pytest.raises(RewardError, match="reward function 'exits_later': got SystemExit: 0"):
        asyncio.run(reward(completions=["x"], prompts=["p"], a=[1.0]))
