"""Parameters of a function: which it requires, which of those offered it takes, which stack it was written for.

TRL calls `f(prompts=, completions=, <columns>)`. A function of another stack fails there with a message about a
parameter; [`adapter_hint`] recognizes it by its parameters or its class and names the adapter that takes it.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters(function: Callable) -> tuple[inspect.Parameter, ...] | None:
    """The parameters of a function; `None` where Python cannot read them (built-ins)."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def behind_partials(function: Any) -> Any:
    """The function that partials were made of, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine: that of the function behind partials, or of the `__call__` of an instance."""
    function = behind_partials(function)
    return inspect.iscoroutinefunction(function if inspect.isroutine(function) else type(function).__call__)


def is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call by name must give the parameter."""
    return parameter.kind in _BY_NAME and parameter.default is parameter.empty


def required(function: Callable) -> list[str]:
    """Names of the parameters that a call by name must give."""
    return [parameter.name for parameter in parameters(function) or () if is_required(parameter)]


def select(function: Callable, offered: Mapping[str, Any], by_request: Mapping[str, Any] | None = None) -> dict:
    """The keyword arguments for a function: all that is offered if it has `**kwargs`, else those that it names. It
    gets those `by_request` only where it names them."""
    known = parameters(function)
    takes_all = known is None or any(p.kind is p.VAR_KEYWORD for p in known)
    names = {p.name for p in known or ()}
    chosen = {name: value for name, value in (by_request or {}).items() if name in names}
    return chosen | {name: value for name, value in offered.items() if takes_all or name in names}


def signature_of(columns: Sequence[str]) -> inspect.Signature:
    """The signature that [`check_columns`] reads required columns from."""
    names = ("completions", *(name for name in dict.fromkeys(columns) if name != "completions"))
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return inspect.Signature([*keywords, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


# Stack, adapter, and sets of parameters, any of which tells that it is the stack's form.
_BY_PARAMETERS: tuple[tuple[str, str, tuple[set[str], ...]], ...] = (
    ("verl", "from_verl", ({"solution_str"}, {"solution_strs"}, {"data_source", "ground_truth"})),
    ("OpenRLHF", "from_openrlhf", ({"queries", "labels"}, {"queries", "prompts"}, {"query", "label"})),
    ("understand-r1-zero", "from_r1_zero", ({"model_response"}, {"gt_answer"})),
    ("verifiers", "from_verifiers", tuple({"completion", name} for name in ("answer", "state", "info", "parser"))),
)
_BY_CLASS = {
    "ORM": ("ms-swift", "from_swift"),
    "AsyncORM": ("ms-swift", "from_swift"),
    "Rubric": ("verifiers", "from_verifiers"),
}


def adapter_hint(reward_func: Any) -> str:
    """
    A sentence that names the adapter for a reward of another stack; empty for a reward of no stack known here.

    Example:

    ```python
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return float(solution_str == ground_truth)
    >>> adapter_hint(compute_score)
    'It has the form of verl: pass trl_drgrpo.rewards.from_verl(compute_score), in a recipe `verl: <path of it>`.'

    ```
    """
    found = _stack(reward_func)
    if found is None:
        return ""
    stack, adapter = found
    reward_func = behind_partials(reward_func)
    name = getattr(reward_func, "__name__", type(reward_func).__name__)
    key = adapter.removeprefix("from_")
    return f"It has the form of {stack}: pass trl_drgrpo.rewards.{adapter}({name}), in a recipe `{key}: <path of it>`."


def _stack(reward_func: Any) -> tuple[str, str] | None:
    kind = reward_func if inspect.isclass(reward_func) else type(reward_func)
    for base in inspect.getmro(kind):
        if base.__name__ in _BY_CLASS:
            return _BY_CLASS[base.__name__]
    if inspect.isclass(reward_func) or not callable(reward_func):
        return None
    names = {parameter.name for parameter in parameters(reward_func) or ()}
    if "completions" in names:  # TRL's own
        return None
    return next((entry[:2] for entry in _BY_PARAMETERS if any(known <= names for known in entry[2])), None)
