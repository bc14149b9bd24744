import asyncio
import functools
import pickle
import traceback
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards.contract import checked_reward, reward_name, validate_rewards


def call(reward_func, count=2, on_error="raise", **kwargs):
    return checked_reward(reward_func, on_error)(prompts=["p"] * count, completions=["c"] * count, **kwargs)


@pytest.mark.parametrize(
    "output",
    [
        [1.0, None],
        (1, float("nan")),
        torch.tensor([1.0, float("nan")]),
        np.array([1.0, np.nan]),
        [np.float32(1.0), None],
        [torch.tensor(1.0), None],
        (r for r in [True, None]),
        # A column, as a reward model's head has it.
        torch.tensor([[1.0], [float("nan")]]),
        torch.tensor([[1.0], [float("nan")]], dtype=torch.bfloat16, requires_grad=True),
        np.array([[1.0], [np.nan]]),
        [torch.tensor([1.0]), np.array([np.nan])],
        [torch.tensor([[1.0]]), np.array([[np.nan]], dtype=object)],
        # Numbers of all kinds.
        [Decimal("1.0"), Decimal("NaN")],
        [Fraction(1), Decimal("sNaN")],
        np.array([Decimal(1), None]),
        [np.float16(1), np.longdouble("nan")],
        [np.bool_(True), None],
        [np.int8(1), np.array(np.nan)],
        [torch.tensor(True), torch.tensor(float("nan"), dtype=torch.float16)],
    ],
)
def test_every_container_of_numbers_is_accepted(output):
    assert validate_rewards(output, 2, "f") == [1.0, None]


def test_nan_is_told_once_by_function(caplog):
    for _ in range(2):
        validate_rewards([float("nan"), None], 2, "gives NaN")
    validate_rewards([None], 1, "gives None")
    assert caplog.text.count("reward function 'gives NaN': NaN counts as None") == 1
    assert "gives None" not in caplog.text


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (1.0, "got float 1.0; expected a list of 2 numbers or None, one per completion"),
        ("ab", "got str 'ab'"),
        ({"score": 1}, "got dict"),
        (None, "got NoneType None"),
        ([1.0], "got 1 rewards; expected a list of 2"),
        ([1.0, "x"], "got str 'x' for completion 1"),
        ([1.0, [1.0]], r"got list \[1.0\] for completion 1"),
        ([1.0, 10**400], r"got 10+\.\.\. for completion 1; expected a finite number"),
        ([1.0, 10**5000], "got a value of type int for completion 1"),
        ([1.0, float("inf")], "got inf for completion 1; expected a finite number"),
        (torch.zeros(2, 2), r"got list \[0.0, 0.0\] for completion 0"),
        (torch.zeros(1, 2), "got 1 rewards"),
        (torch.zeros(3, 1), "got 3 rewards"),
        (torch.zeros(2, 1, 1), r"got list \[\[0.0\]\] for completion 0"),
        (np.zeros((2, 2)), r"got list \[0.0, 0.0\] for completion 0"),
        (np.zeros((2, 0)), r"got list \[\] for completion 0"),
        (torch.tensor(1.0), "got float 1.0"),
        ([torch.zeros(2), 1.0], r"got Tensor .* for completion 0"),
        ([np.zeros(2), 1.0], r"got ndarray .* for completion 0"),
        ([np.datetime64("2020-01-01"), 1.0], "got date"),
        ([np.str_("1"), 1.0], "got str '1' for completion 0"),
        ([1.0, 1j], "got complex 1j for completion 1"),
        ([1.0, Decimal("Infinity")], "got .*Infinity.* for completion 1; expected a finite number"),
        ([1.0, Decimal("1e400")], "got .*E.400.* for completion 1; expected a finite number"),
    ],
)
def test_nonsense_is_one_error_that_names_the_function(output, message):
    with pytest.raises(RewardError, match=f"^reward function 'f': {message}"):
        validate_rewards(output, 2, "f")


def too_few(completions, **kwargs):
    return [1.0]


async def too_few_later(completions, **kwargs):
    return [1.0]


def test_nonsense_is_raised_without_a_chain_and_logged_without_a_traceback(caplog):
    assert call(too_few, on_error="unscorable") == [None, None]
    [record] = caplog.records
    assert record.exc_info is None
    assert "got 1 rewards; expected a list of 2" in record.getMessage()
    with pytest.raises(RewardError, match="reward function 'too_few_later': got 1 rewards"):
        asyncio.run(call(too_few_later))
    with pytest.raises(RewardError) as error:
        call(too_few)
    assert (error.value.__cause__, error.value.__context__) == (None, None)
    text = "".join(traceback.format_exception(error.value))
    assert text.count("Traceback") == 1


def test_a_function_of_another_stack_is_pointed_to_its_adapter():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    with pytest.raises(RewardError, match="has the form of verl: pass trl_drgrpo.rewards.from_verl"):
        call(compute_score)


def prompts_first(prompts, completions, **kwargs):
    return [float(prompt == completion) for prompt, completion in zip(prompts, completions, strict=True)]


def columns_first(answer, completions, **kwargs):
    return [float(one == completion) for one, completion in zip(answer, completions, strict=True)]


def completions_only(completions, **kwargs):
    return [float("prompts" in kwargs)] * len(completions)


def test_a_call_by_hand_may_be_by_position():
    assert checked_reward(prompts_first)(["a", "b"], ["a", "c"]) == [1.0, 0.0]
    assert checked_reward(columns_first)(["a", "b"], ["a", "c"]) == [1.0, 0.0]  # in the function's own order
    assert checked_reward(columns_first)(["a", "b"], completions=["a", "c"]) == [1.0, 0.0]
    assert checked_reward(completions_only)(["a", "b"]) == [0.0, 0.0]
    assert checked_reward(completions_only)(["p", "p"], ["a", "b"]) == [1.0, 1.0]
    assert asyncio.run(checked_reward(judge)(["a", "b"])) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((), {"prompts": ["a"]}), ((["a"],), {"completions": ["a"]}), ((["a"], ["b"], ["c"]), {})],
)
def test_a_call_by_hand_that_cannot_be_read_is_one_error(args, kwargs):
    with pytest.raises(InputError, match="^reward function 'completions_only': got a call with"):
        checked_reward(completions_only)(*args, **kwargs)


def test_an_exception_names_the_function_and_keeps_its_cause():
    def broken(completions, **kwargs):
        return 1 / 0

    with pytest.raises(
        RewardError, match="reward function 'broken': got ZeroDivisionError: division by zero"
    ) as error:
        call(broken)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    line = broken.__code__.co_firstlineno + 1  # where the function failed, as its traceback may be shown nowhere
    assert f"Fix the function ({__file__}, line {line}; the traceback is in the error's `__cause__`)" in str(
        error.value
    )


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    "raised",
    [
        *(KeyError("gold"), FileNotFoundError(2, "no file", "x.txt"), Mute(), SystemExit(1)),
        *(ExceptionGroup("two", [ValueError()]), StopIteration(), SyntaxError("x")),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ],
    ids=repr,
)
def test_every_exception_is_the_cause_of_a_reward_error(raised):
    def broken(completions, **kwargs):
        raise raised

    with pytest.raises(RewardError, match=f"^reward function 'broken': got {type(raised).__name__}") as caught:
        call(broken)
    error = caught.value
    assert type(error) is RewardError
    assert error.__cause__ is raised
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert call(broken, on_error="unscorable") == [None, None]


def test_the_reward_of_an_environment_is_called_by_hand_as_trls():
    checked = checked_reward(lambda environments, **kwargs: [float(each) for each in environments], name="Game")
    assert checked(environments=[1, 2]) == [1.0, 2.0]


def test_an_error_costs_the_call_and_not_the_run_where_the_user_opted_in(caplog):
    outcomes = iter([[1.0, 0.0], RuntimeError("server gone"), [1.0], [0.5, None]])
    metrics = []

    def flaky(completions, **kwargs):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    checked = checked_reward(flaky, "unscorable")
    arguments = {"completions": ["a", "b"], "log_metric": lambda name, value: metrics.append((name, value))}
    assert [checked(**arguments) for _ in range(4)] == [[1.0, 0.0], [None, None], [None, None], [0.5, None]]
    assert metrics == [("rewards/flaky/failed_frac", value) for value in (0.0, 1.0, 1.0, 0.0)]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    assert "server gone" in caplog.text
    assert caplog.text.count("failing costs the policy nothing") == 1


def test_an_interrupt_is_nobodys_reward():
    def interrupted(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted, on_error="unscorable")


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0] * len(completions)


async def judge(completions, factor=1.0, **kwargs):
    return [factor] * len(completions)


@pytest.mark.parametrize("reward_func", [judge, Judge(), functools.partial(judge, factor=1.0)])
def test_asynchronous_rewards_stay_asynchronous(reward_func):
    from trl.trainer.utils import is_async_callable

    checked = checked_reward(reward_func)
    assert is_async_callable(checked)
    assert asyncio.run(checked(completions=["a", "b"])) == [1.0, 1.0]


@pytest.mark.parametrize("reward_func", [len, judge, Judge(), functools.partial(judge), functools.partial(Judge())])
def test_names_are_those_of_trl(reward_func):
    from trl.trainer.utils import get_callable_name

    assert reward_name(reward_func) == get_callable_name(reward_func)
    assert get_callable_name(checked_reward(reward_func)) == get_callable_name(reward_func)
