"""Reward functions that are written for another stack, recognized by their parameters or their class.

TRL calls `f(prompts=, completions=, <columns>)`. A function of another stack fails there with a message about a
parameter; here is which adapter takes it.
"""

import functools
import inspect
from typing import Any

from trl_drgrpo.rewards.signatures import parameters

# Stack, adapter, and sets of parameters, any of which tells that it is the stack's form.
_BY_PARAMETERS: tuple[tuple[str, str, tuple[set[str], ...]], ...] = (
    ("verl", "from_verl", ({"solution_str"}, {"solution_strs"}, {"data_source", "ground_truth"})),
    ("OpenRLHF", "from_openrlhf", ({"queries", "labels"}, {"queries", "prompts"}, {"query", "label"})),
    ("understand-r1-zero", "from_r1_zero", ({"model_response"}, {"gt_answer"})),
    ("reasoning-gym", "from_reasoning_gym", ({"answer", "entry"},)),
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
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
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
