"""verifiers: a `Rubric(funcs, weights, parser)` whose functions take what they name and return a number.

What they may name: `prompt`, `completion`, `answer`, `state`, `info`, `task`, `parser`, the rubric's own objects and
the columns of the row. The reward is the weighted sum; the mean of each function is logged, as there, under
`rewards/<name>/<function>`. Deltas: a function that raises makes its completion unscorable (there it scores 0), and
`state` holds the row but no trajectory. For verifiers up to 0.1; its 0.4 has no rubrics any more.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import Call, Convention
from trl_drgrpo.rewards.adapters.samples import Sample, decoded
from trl_drgrpo.rewards.contract import OnError, reward_name
from trl_drgrpo.rewards.paths import resolve_object

_OFFERED = ("prompt", "completion", "answer", "state", "info", "task", "parser")
# By these a rubric tells a function that scores a whole group of rollouts.
_GROUP = {"states", "prompts", "completions", "answers", "tasks", "infos"}


def from_verifiers(
    rubric: Any,
    *,
    weights: Sequence[float] | None = None,
    parser: Any = None,
    answer_column: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A verifiers rubric as a reward function of TRL's form.

    Args:
        rubric (`Rubric`, `RubricGroup`, `Callable`, `str`, or a list of the last two):
            A rubric, its functions, or paths of either. Functions may be `async`.
        weights (`Sequence[float]`, *optional*):
            One per function; 0 only logs it. Defaults to the rubric's, else 1.
        parser (`Any`, *optional*):
            What functions get as `parser`, or its path. Defaults to the rubric's.
        answer_column (`str`, *optional*):
            Column that is passed as `answer`. Defaults to `answer`; the empty string is passed where it is missing.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's where it is one, else `rubric`.
        timeout (`float`, *optional*):
            Seconds per function and completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing function makes of its completion: `None` and a count, or with `"raise"` an error.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`; `async` if a function is.

    Raises:
        [`InputError`]: For no function, weights of another number, or a function that scores a
            group of completions at once.

    Example:

    ```python
    >>> def exact(completion, answer):
    ...     return float(completion[-1]["content"] == answer)
    >>> def short(completion):
    ...     return 1 - len(completion[-1]["content"]) / 10
    >>> reward = from_verifiers([exact, short], weights=[1.0, 0.5])
    >>> reward(completions=[[{"role": "assistant", "content": "42"}]], answer=["42"])
    [1.4]

    ```
    """
    parts = _parts(rubric, parser)
    # Partials, so that one function in two rubrics is two, each with its own rubric's objects.
    functions = [functools.partial(function) for function, _, _ in parts]
    for function in functions:
        _refuse_group(function)
    chosen = [weight for _, weight, _ in parts] if weights is None else list(weights)
    if not functions or len(chosen) != len(functions):
        expected = f"{len(functions)}, one per function" if functions else "at least one function"
        raise InputError("weights", f"{len(chosen)} weights", expected, "Give one number per function.")
    objects = [dict(found) for _, _, found in parts]
    known = {key for found in objects for key in found}
    columns = {column for function in functions for column in signatures.required(function)} - {*_OFFERED, *known}
    return foreign_calls.per_completion(
        functions,
        _Verifiers(functions, objects, answer_column),
        name=name or (reward_name(functions[0]) if len(functions) == 1 else "rubric"),
        weights=chosen,
        columns=[*sorted(columns), *filter(None, [answer_column])],
        timeout=timeout,
        on_error=on_error,
    )


def _parts(rubric: Any, parser: Any) -> list[tuple[Callable, float, Mapping[str, Any]]]:
    """Functions with their weights and with the objects that their rubric hands them, groups of rubrics flattened."""
    if isinstance(rubric, str):
        rubric = resolve_object(rubric, "rubric")
    if isinstance(rubric, list | tuple):
        return [part for entry in rubric for part in _parts(entry, parser)]
    given = (
        {} if parser is None else {"parser": resolve_object(parser, "parser") if isinstance(parser, str) else parser}
    )
    inner = getattr(rubric, "rubrics", None)
    functions = getattr(rubric, "funcs", None)
    if inner is None and functions is None:
        return [(foreign_calls.loaded(rubric, "rubric", "a Rubric, or functions"), 1.0, {"parser": None, **given})]
    own = list(zip(functions or (), getattr(rubric, "weights", ()), strict=True))
    objects = {"parser": getattr(rubric, "parser", None), **getattr(rubric, "class_objects", {}), **given}
    return [(function, weight, objects) for function, weight in own] + _parts(list(inner or ()), parser)


def _refuse_group(function: Callable) -> None:
    if named := sorted(_GROUP & {parameter.name for parameter in signatures.parameters(function) or ()}):
        raise InputError(
            "rubric",
            f"the function {reward_name(function)}, which takes {', '.join(named)}",
            "functions that score one completion",
            "A batch may split groups: write it as a reward function in TRL's form.",
        )


class _Verifiers(Convention):
    """Arguments for a function of a rubric."""

    def __init__(self, functions: list[Callable], objects: list[dict[str, Any]], answer_column: str | None):
        # By identity: functions compare equal or not for reasons of their own.
        self.functions, self.objects, self.answer_column = functions, objects, answer_column or "answer"

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        row = sample.columns
        info = decoded(row.get("info"))
        fields = {
            "prompt": sample.prompt,
            "completion": sample.completion,
            "answer": row.get(self.answer_column, ""),
            "info": {} if info is None else info,
            "task": row.get("task", "default"),
        }
        state = {**row, **fields, "trajectory": []}
        position = next(i for i, known in enumerate(self.functions) if known is function)
        return (), signatures.select(function, {**row, **fields, "state": state, **self.objects[position]})
