"""Arguments of a foreign function, and the signature that a reward of ours shows."""

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
