"""TRL's own form, and the graders of understand-r1-zero and reasoning-gym.

TRL and open-r1 share one call, but a function is written for one of the two forms that completions come in: strings
with plain data, lists of messages with conversational data. One written for `completion[0]["content"]` fails on the
first, one written for strings on the second.

understand-r1-zero and oat: `grader(response, gt, fast=...) -> (info, reward)`. `boxed_reward_fn` goes with the
Qwen-Math template, `answer_tag_reward_fn` with the R1 template; both are in `oat.utils.math_grader`. They bound their
own work with SIGALRM, on a main thread only: give a `timeout`, which runs them in killable workers. Delta: the
official oracle scores a grading that takes too long 0, here it is unscorable.

reasoning-gym: `score_answer(answer, entry)` for datasets that other programs wrote. Rows that `make_splits` of
`rewards/functions/reasoning_gym.py` wrote are scored by the reward `reasoning_gym`, which knows the task of every row.
Here the task is named once, and the entry is put together from the columns that reasoning-gym's own exports have.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import (
    Call,
    Convention,
    Place,
    Sample,
    as_messages,
    as_text,
    decoded,
    loaded,
)
from trl_drgrpo.rewards.columns import pass_on_checks
from trl_drgrpo.rewards.contract import OnError, check_flag, reward_name
from trl_drgrpo.rewards.functions.reasoning_gym import factory_of, reasoning_gym_reward, score_text
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

_FORMS: dict[str, Callable[[Any, str], Any]] = {"messages": as_messages, "text": as_text}


def from_trl(
    function: Callable | str, *, completions_as: Literal["messages", "text"] | None = None, name: str | None = None
) -> Callable:
    """
    A reward function of TRL's form that is given completions in the form it was written for.

    Args:
        function (`Callable` or `str`):
            The reward function, or its name or path; sync or async.
        completions_as (`str`, *optional*):
            `"messages"`: text becomes a message of the assistant (a prompt: of the user); `"text"`: messages become
            text, of a completion the last one of the assistant. Defaults to passing them as they come.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.

    Returns:
        `Callable`: Same call, same required columns.

    Raises:
        [`InputError`]: For another form, or a function that cannot be found.

    Example:

    ```python
    >>> def open_r1_style(completions, **kwargs):
    ...     return [float(len(completion[0]["content"])) for completion in completions]
    >>> from_trl(open_r1_style, completions_as="messages")(completions=["four"])
    [4.0]

    ```
    """
    if completions_as is not None and completions_as not in _FORMS:
        remedy = "Leave it out to pass them as they come."
        raise InputError("completions_as", repr(completions_as), '"messages" or "text"', remedy)
    if isinstance(function, str):
        function = resolve_reward(function, "function")
    found: Any = loaded(function, "function")
    adapted: Any = foreign_calls.batched(found, _TRL(completions_as), name or reward_name(found))
    adapted.__doc__ = inspect.getdoc(found)
    adapted.__signature__ = inspect.signature(found)
    pass_on_checks(adapted, found)
    return adapted


class _TRL(Convention):
    """TRL's own call, with prompts and completions in one form."""

    def __init__(self, completions_as: str | None):
        self.convert = _FORMS[completions_as] if completions_as else _as_it_is

    def batch_arguments(
        self, function: Callable, completions: Sequence[Any], kwargs: dict[str, Any], reward: str
    ) -> Call:
        if kwargs.get("prompts") is not None:
            kwargs = {**kwargs, "prompts": [self.convert(prompt, "user") for prompt in kwargs["prompts"]]}
        return (), {**kwargs, "completions": [self.convert(completion, "assistant") for completion in completions]}


def _as_it_is(value: Any, role: str) -> Any:
    return value


def from_r1_zero(
    grader: Callable | str,
    *,
    fast: bool = True,
    answer_column: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A grader of understand-r1-zero as a reward function of TRL's form.

    Args:
        grader (`Callable` or `str`):
            The grader, or its path, for example `oat.utils.math_grader.boxed_reward_fn`.
        fast (`bool`, *optional*, defaults to `True`):
            The official recipe's `verifier_version=fast`; `False` also asks math-verify.
        answer_column (`str`, *optional*):
            Column of the correct answer (text, number, or a list of which any counts). Defaults to `answer`, else
            `solution`, else `gt_answer`.
        name (`str`, *optional*):
            Name in logs. Defaults to the grader's.
        timeout (`float`, *optional*):
            Seconds per completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion: `None` and a count, or with `"raise"` an error.

    Returns:
        `Callable`: `f(completions, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: If the grader cannot be found, or takes other arguments.

    Example:

    ```python
    >>> def grader(response, gt, fast=False):
    ...     return {"formatted": True}, float(response == gt)
    >>> from_r1_zero(grader)(completions=["4", "5"], answer=["4", "4"])
    [1.0, 0.0]

    ```
    """
    found = foreign_calls.loaded(grader, "grader")
    check_flag("fast", fast)
    foreign_calls.check_takes(found, "grader", "f(response, gt, fast=...) -> (info, reward)", 2, ("fast",))
    options: dict[str, Any] = {"name": name or reward_name(found), "timeout": timeout, "on_error": on_error}
    return foreign_calls.per_completion([found], _R1Zero(answer_column, fast), **options)


class _R1Zero(Convention):
    """Arguments and result of a grader."""

    def __init__(self, answer_column: str | None, fast: bool):
        usual = ("answer", "solution", "gt_answer")
        self.answer, self.fast = Place("the correct answer", "answer_column", answer_column, usual), fast

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        self.answer.column(columns, reward)

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        gold = self.answer.value(sample.columns, reward)
        return (sample.text, gold), signatures.select(function, {}, {"fast": self.fast})

    def read(self, result: Any) -> Any:
        if not isinstance(result, tuple | list) or len(result) != 2:
            got = f"{type(result).__name__} {result!r}"[:80]
            raise RewardError("an understand-r1-zero grader", got, "a pair (info, reward)", "Use another adapter.")
        return result[1]


# The two are one name in recipes: `reasoning_gym`, and `reasoning_gym: <task>`.
__all__ = ["from_reasoning_gym", "reasoning_gym_reward"]


def from_reasoning_gym(
    task: Any,
    *,
    entry_column: str | None = None,
    name: str = "reasoning_gym",
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    The scorer of a reasoning-gym task as a reward function of TRL's form.

    Args:
        task (`str`, dataset or `Callable`):
            Name of a task (`chain_sum`), a reasoning-gym dataset, or a `score_answer(answer, entry)`.
        entry_column (`str`, *optional*):
            Column that holds the whole entry, a mapping or its JSON. Defaults to putting it together from the columns
            `question`, `answer` and `metadata`.
        name (`str`, *optional*, defaults to `"reasoning_gym"`):
            Name in logs.
        timeout (`float`, *optional*):
            Seconds per completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion. An answer that the scorer cannot read is no failure but 0.

    Returns:
        `Callable`: `f(completions, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: For an unknown task.
    """
    score_answer = _score_answer(task)
    needed = (entry_column,) if entry_column else ("answer", "metadata")
    options: dict[str, Any] = {"name": name, "columns": needed, "timeout": timeout, "on_error": on_error}
    return foreign_calls.per_completion([_Scorer(score_answer)], _ReasoningGym(entry_column), **options)


def _score_answer(task: Any) -> Callable[..., Any]:
    if isinstance(task, str):
        return factory_of(task, "task", repr(task))[1].get_score_answer_fn(task)
    if hasattr(task, "score_answer"):
        return task.score_answer
    if not callable(task):
        remedy = "Name one of `reasoning_gym.factory.DATASETS`."
        raise InputError("task", repr(task)[:100], "a task's name, a dataset, or a score_answer function", remedy)
    return task


class _Scorer:
    """`score_answer` with the answer taken from the completion's text; what it cannot read scores 0."""

    lowest_reward = 0.0

    def __init__(self, score_answer: Callable[..., Any]):
        self.score_answer = score_answer

    def __call__(self, text: str, entry: dict[str, Any]) -> float:
        return score_text(self.score_answer, text, entry) or 0.0


class _ReasoningGym(Convention):
    """Text and entry of one completion."""

    def __init__(self, entry_column: str | None):
        self.entry_column = entry_column

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        row = sample.columns
        if self.entry_column:
            return (sample.text, decoded(row[self.entry_column])), {}
        entry = {"question": row.get("question"), "answer": row["answer"], "metadata": decoded(row["metadata"])}
        return (sample.text, entry), {}
