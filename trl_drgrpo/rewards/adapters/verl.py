"""verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, single or batch, sync or async.

verl passes all four by keyword, the ground truth from the nested column `reward_model["ground_truth"]`, and adds
`num_turns` and `rollout_reward_scores` to `extra_info`. Result: a number, a tuple whose first entry counts, or a dict
whose `score` counts. Delta: a function may take fewer than four arguments, as verl's own scorers do.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import Call, Convention
from trl_drgrpo.rewards.adapters.samples import Place, Sample, decoded, read_samples
from trl_drgrpo.rewards.contract import OnError, innermost, reward_name

# What verl's own scorers call the completion's text, where it is not solution_str.
_TEXT_NAMES = ("model_output", "predict_str")
_SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def from_verl(
    function: Callable | str,
    *,
    data_source: str | None = None,
    answer_column: str | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A verl `compute_score` as a reward function of TRL's form.

    Args:
        function (`Callable` or `str`):
            The function, or its path. With parameters in the plural (`solution_strs`) it is called once per batch,
            otherwise once per completion; it may be `async`.
        data_source (`str`, *optional*):
            Constant to pass as `data_source`. Defaults to the column of that name.
        answer_column (`str`, *optional*):
            Column of the ground truth, or a path into one. Defaults to `reward_model.ground_truth`, else
            `ground_truth`.
        reward_kwargs (`Mapping[str, Any]`, *optional*):
            Further constant arguments, as in verl's `custom_reward_function.reward_kwargs`.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.
        timeout (`float`, *optional*):
            Seconds per completion, after which its worker is killed. Defaults to no limit, in this process. Not for
            batch functions: put `isolate` around those.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion: `None` and a count, or with `"raise"` an error. A failing
            batch is the trainer's `on_reward_error`.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`; `async` if the function is.

    Raises:
        [`InputError`]: For options that do not fit, or a function that needs other arguments.

    Example:

    ```python
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "acc": True}
    >>> reward = from_verl(compute_score, data_source="sums")
    >>> reward(completions=["2", "3"], reward_model=[{"ground_truth": "2"}] * 2)
    [1.0, 0.0]

    ```
    """
    found = foreign_calls.loaded(function, "function")
    foreign_calls.check_options(timeout, on_error)
    is_batch = "solution_strs" in {parameter.name for parameter in signatures.parameters(found) or ()}
    convention = _Verl(found, is_batch, answer_column, data_source, reward_kwargs or {})
    title = name or reward_name(found)
    if not is_batch:
        return foreign_calls.per_completion([found], convention, name=title, timeout=timeout, on_error=on_error)
    if timeout is not None:
        remedy = "Leave timeout out and put `isolate(..., batched=True)` around the reward."
        raise InputError("timeout", f"{timeout} for a batch function", "none", remedy)
    is_async = inspect.iscoroutinefunction(innermost(found))
    return (_AsyncBatch if is_async else _Batch)(found, convention, title)


class _Verl(Convention):
    """Arguments and result of one call, in the singular or the plural."""

    def __init__(
        self,
        function: Callable,
        is_batch: bool,
        answer_column: str | None,
        data_source: str | None,
        constants: Mapping[str, Any],
    ):
        self.names = _BATCH if is_batch else _SINGLE
        offered = (*self.names, *(() if is_batch else _TEXT_NAMES), *constants)
        if unknown := [name for name in signatures.required(function) if name not in offered]:
            raise InputError(
                "function",
                f"{reward_name(function)}, which needs {', '.join(unknown)}",
                f"a function of {', '.join(self.names)}",
                "Give the other arguments as constants with reward_kwargs.",
            )
        usual = ("reward_model.ground_truth", "ground_truth")
        self.answer = Place("the ground truth", "answer_column", answer_column, usual)
        self.data_source, self.constants = data_source, dict(constants)
        self.needs_source = self.names[0] in signatures.required(function)

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        self.answer.column(columns, reward)
        if self.needs_source and self.data_source is None and "data_source" not in columns:
            raise InputError(
                f"reward {reward}",
                f"a dataset with the columns {', '.join(columns) or '(none)'}",
                "a column 'data_source', which the function requires",
                "Add it, or give a constant with data_source=....",
            )

    def values(self, sample: Sample, reward: str) -> tuple[Any, str, Any, dict[str, Any]]:
        """Arguments of verl for one sample, in the order of its signature."""
        row = sample.columns
        source = row.get("data_source") if self.data_source is None else self.data_source
        # A copy: verl's functions may write into it, and rows of a group share the dict.
        extra = {"num_turns": None, "rollout_reward_scores": {}, **(decoded(row.get("extra_info")) or {})}
        return source, sample.text, self.answer.value(row, reward), extra

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        self.check_columns(list(sample.columns), reward)
        values = self.values(sample, reward)
        by_request: dict[str, Any] = dict.fromkeys(_TEXT_NAMES, values[1])
        offered = {**dict(zip(self.names, values, strict=True)), **self.constants}
        return (), signatures.select(function, offered, by_request)

    def read(self, result: Any) -> Any:
        if isinstance(result, Mapping):
            if "score" not in result:
                keys = ", ".join(map(str, result)) or "no keys"
                raise RewardError("a verl function", f"a dict with {keys}", "a dict with 'score'", "Return a score.")
            return result["score"]
        return result[0] if isinstance(result, tuple | list) and result else result


class _Batch(foreign_calls.BatchCall[_Verl]):
    """A batch function."""

    def keywords(self, completions: Sequence[Any], prompts: Sequence[Any] | None, kwargs: dict) -> dict[str, Any]:
        samples = read_samples(completions, prompts, kwargs, self.__name__)
        for sample in samples[:1]:
            self.convention.check_columns(list(sample.columns), self.__name__)
        rows = [self.convention.values(sample, self.__name__) for sample in samples]
        columns = [[row[part] for row in rows] for part in range(len(_BATCH))]
        offered = {**dict(zip(_BATCH, columns, strict=True)), **self.convention.constants}
        return signatures.select(self.function, offered)

    def results(self, output: Any) -> list[Any]:
        return [self.convention.read(result) for result in output]

    def __call__(self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any) -> list[Any]:
        return self.results(self.function(**self.keywords(completions, prompts, kwargs)))


class _AsyncBatch(_Batch):
    """A batch function that is `async`."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        return self.results(await self.function(**self.keywords(completions, prompts, kwargs)))
