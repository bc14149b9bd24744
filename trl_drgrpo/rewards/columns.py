"""Checks before a model loads that a dataset has the columns that a reward function takes.

Without them a reward whose column is missing fails after the model has loaded and the first batch has been generated.
`check_columns` compares its signature with the columns. A reward that knows more than its signature tells has methods
for that, see [`ask`].

TRL calls `f(prompts=, completions=, <columns>)`. A function of another stack fails there with a message about a
parameter. [`adapter_hint`] recognizes it by its parameters or its class and names the adapter that takes it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

from trl_drgrpo.common.errors import InputError, require_package
from trl_drgrpo.common.rows import ColumnValues

Keywords = dict[str, Any]  # values by column or keyword, of a call of a reward function or of one row

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters(function: Callable) -> tuple[inspect.Parameter, ...] | None:
    """Return the parameters of a function; `None` if Python cannot read them (built-ins)."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def behind_partials(function: object) -> Any:
    """Return the function that partials were made of, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: object) -> bool:
    """Tell whether a call of the function behind partials, or of an instance, gives a coroutine."""
    function = behind_partials(function)
    if not inspect.isroutine(function):  # an instance is not asynchronous itself, its `__call__` may be
        function = type(function).__call__
    return inspect.iscoroutinefunction(function)


def is_required(parameter: inspect.Parameter) -> bool:
    """Tell whether a call by name must give the parameter."""
    return parameter.kind in _BY_NAME and parameter.default is parameter.empty


def required(function: Callable) -> list[str]:
    """Return the names of the parameters that a call by name must give."""
    return [parameter.name for parameter in parameters(function) or () if is_required(parameter)]


def select(function: Callable, offered: Mapping[str, Any], by_request: Mapping[str, Any] | None = None) -> dict:
    """Return the keyword arguments for a function: all `offered` ones if it has `**kwargs`, else those that it names.
    It gets arguments of `by_request` only if it names them."""
    function_parameters = parameters(function)
    arguments = {**(by_request or {}), **offered}
    if function_parameters is None:  # a built-in function: nobody knows what it takes
        return dict(offered)
    names = {parameter.name for parameter in function_parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in function_parameters):
        names |= offered.keys()
    return {name: value for name, value in arguments.items() if name in names}


def only_rows(kwargs: Keywords, rows: Sequence[int]) -> Keywords:
    """Return the keywords of a call for some of its rows: columns cut down to these, anything else as it is."""
    # A column is told by its length: TRL does not say which of its keywords have one value per completion.
    count = len(kwargs["completions"])
    selected = dict(kwargs)
    for key, value in kwargs.items():
        if isinstance(value, list | tuple) and len(value) == count:
            selected[key] = [value[row] for row in rows]
    return selected


def signature_of(columns: Sequence[str]) -> inspect.Signature:
    """Return a signature from which [`check_columns`] reads these columns as required."""
    names = dict.fromkeys(("completions", *columns))  # each once, in order
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


def adapter_hint(reward_func: object) -> str:
    """Return a sentence that names the adapter for a reward of another stack; empty for a reward of no known stack.

    Example:

    ```python
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return float(solution_str == ground_truth)
    >>> adapter_hint(compute_score)
    'It has the form of verl: pass trl_drgrpo.rewards.from_verl(compute_score), in a recipe `verl: <path of it>`.'

    ```
    """
    stack_and_adapter = _stack(reward_func)
    if stack_and_adapter is None:
        return ""
    stack, adapter = stack_and_adapter
    reward_func = behind_partials(reward_func)
    name = getattr(reward_func, "__name__", type(reward_func).__name__)
    key = adapter.removeprefix("from_")
    return f"It has the form of {stack}: pass trl_drgrpo.rewards.{adapter}({name}), in a recipe `{key}: <path of it>`."


def _stack(reward_func: object) -> tuple[str, str] | None:
    kind = reward_func if inspect.isclass(reward_func) else type(reward_func)
    for base in inspect.getmro(kind):  # by name: the other stack need not be installed
        if base.__name__ in _BY_CLASS:
            return _BY_CLASS[base.__name__]
    if inspect.isclass(reward_func) or not callable(reward_func):
        return None
    names = {parameter.name for parameter in parameters(reward_func) or ()}
    if "completions" in names:  # TRL's own
        return None
    for stack, adapter, signs in _BY_PARAMETERS:
        for sign in signs:
            if sign <= names:
                return stack, adapter
    return None


# Keywords that TRL passes to every reward function, next to the dataset's columns; the first three once per call, the
# others as one value per completion.
PER_CALL = ("trainer_state", "log_extra", "log_metric")
ALWAYS_PASSED = ("prompts", "completions", "completion_ids", *PER_CALL)
# Two of them, as reward functions declare them.
LogMetric = Callable[[str, float], None] | None
LogExtra = Callable[[str, list[Any]], None] | None
# Dataset columns that TRL leaves out of the keywords: their batched form is passed instead.
NEVER_PASSED = {"prompt": "prompts", "completion": "completions", "completion_ids": "completion_ids"}

# Remedy for a missing column, if the data are those of a run.
RENAME = "Rename the column that holds it to {0!r} (`rename_columns: [<column>={0}]` in a recipe)"

_ACCURACY_REWARDS = "trl.rewards.accuracy_rewards"


def check_columns(reward_func: Callable | Any, columns: Iterable[str], name: str, supply: str = RENAME) -> None:
    """
    Check, before a model loads, that TRL can call a reward function with the columns of the dataset.

    TRL calls `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, <other columns>=)`.
    So every required parameter must be one of these, and a function without `**kwargs` must name all of them. With
    environments TRL passes `environments` too: then name it among the columns.

    Args:
        reward_func (`Callable` or model):
            The reward. A model id (`str`), a model, or a callable whose signature Python cannot read is not checked.
            One that has a method `check_columns(columns)` is asked, too: it raises the error.
        columns (`Iterable[str]`):
            Column names of the dataset, `prompt` included.
        name (`str`):
            Name of the reward in the message.
        supply (`str`, *optional*):
            How the user gives a missing column its name, `{0}`. Defaults to the way in recipes.

    Raises:
        [`InputError`]: If a required parameter is neither passed by TRL nor a column, if a keyword
            that TRL passes would be refused, or if a column has the name of one of TRL's own keywords.

    Example:

    ```python
    >>> def same_length(completions, answer, **kwargs):
    ...     return [float(len(c) == len(a)) for c, a in zip(completions, answer)]
    >>> check_columns(same_length, ["prompt", "answer"], "same_length")

    ```
    """
    check_form(reward_func, name)
    signature = None if _is_model(reward_func) else parameters(reward_func)
    if signature is None:
        return
    names = list(columns)
    ask(reward_func, "check_columns", names)
    problem = _misfit(reward_func, signature, names, supply)
    if problem is not None:
        raise InputError(f"reward {name}", *problem)


def _misfit(
    reward_func: object, signature: Sequence[inspect.Parameter], columns: list[str], supply: str
) -> tuple[str, str, str] | None:
    """Return the last three parts of the error for a call that TRL cannot make; `None` if it can."""
    # First what no signature can mend: TRL's call itself would fail.
    for clash in {"prompts", "completions"} & {*columns}:
        expected = "no column with the name of a keyword that TRL passes itself"
        remedy = f"Rename or remove the column {clash!r}: the call would give this argument twice."
        return f"a dataset column called {clash!r}", expected, remedy
    passed_columns = [column for column in columns if column not in NEVER_PASSED]
    passed = [*ALWAYS_PASSED, *passed_columns]
    hint = adapter_hint(reward_func)
    for parameter in signature:
        name = parameter.name
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            remedy = "TRL passes everything by keyword: remove the `/` from the signature."
            return f"the positional-only parameter {name!r}", "parameters that can be passed by keyword", remedy
        if is_required(parameter) and name not in passed:
            got = f"a dataset with the columns {', '.join(columns) or '(none)'}"
            remedy = hint or _supply_column(reward_func, name, passed_columns, supply)
            return got, f"a column {name!r}, which the function requires", remedy
    # Then what is passed and not taken: TRL passes all columns, whether a function wants them or not.
    names = set()
    for parameter in signature:
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            names.add(parameter.name)
    refused = [keyword for keyword in passed if keyword not in names]
    if not refused:
        return None
    got = f"a function without **kwargs that does not name {', '.join(refused)}"
    return got, "a function that accepts every keyword TRL passes", hint or "Add **kwargs to its parameters."


def _supply_column(reward_func: object, missing: str, passed_columns: list[str], supply: str) -> str:
    """Return the remedy for a column that a reward requires and the dataset lacks."""
    remedy = supply.format(missing)
    near = get_close_matches(missing, passed_columns, n=1, cutoff=0.5)
    if missing in NEVER_PASSED:
        remedy = f"TRL passes it as {NEVER_PASSED[missing]!r}: rename the parameter"
    elif near:
        remedy = f"Did you mean the column {near[0]!r}? {remedy}"
    for option in parameters(type(reward_func)) or ():
        if str(getattr(reward_func, option.name, None)) == missing:  # an option that names the column
            return f"{remedy}, or set {option.name} to its name."
    return f"{remedy}, or give the parameter a default."


def check_form(reward_func: object, name: str) -> None:
    """Refuse a class, which TRL would call and take the instance for the rewards, and an object that cannot be called.
    The remedy names the adapter of its stack."""
    if inspect.isclass(reward_func):
        got = f"the class {reward_func.__name__}"
        default = f"Pass an instance: {reward_func.__name__}(...)."
    elif not isinstance(reward_func, str) and not callable(reward_func):
        got = type(reward_func).__name__
        default = "Pass the function itself."
    else:
        return
    expected = "a function, a reward model or the id of one"
    raise InputError(f"reward {name}", got, expected, adapter_hint(reward_func) or default)


def ask(reward_func: object, question: str, /, *args: Any, **kwargs: Any) -> Any:
    """
    Ask a reward, and the rewards inside it (a wrapper names them in a tuple, `reward_funcs`), by a method, and return
    the first answer that is not `None`. A reward without a method of that name is not asked, nor one whose method
    takes other arguments. For TRL's accuracy rewards this package answers.

    Args:
        reward_func (`Callable`): A reward; models and their ids are not asked.
        question (`str`): Three raise [`InputError`]: `"check"` (a program or a server has to be there),
            `"check_columns"` (one of several columns is needed; gets the list of columns), `"check_values"` (gets the
            [`ColumnValues`] by name). `"check_row"` gets the columns of one row by name; the answer is why no
            completion of it can be scored: a gold answer that cannot be read, tests that cannot be run.
        *args, **kwargs: Arguments of the method.
    """
    func = behind_partials(reward_func)
    if _is_model(func):
        return None
    answers = []
    # All are asked, also behind an answer: any of them may refuse.
    for reward in _inner_rewards(func):
        answers.append(ask(reward, question, *args, **kwargs))
    method = getattr(func, question, None)
    if getattr(func, "__module__", None) == _ACCURACY_REWARDS and question in _TRLS_ANSWERS:
        method = functools.partial(_TRLS_ANSWERS[question], func.__name__)
    if callable(method) and _takes(method, args, kwargs):
        answers.append(method(*args, **kwargs))
    for answer in answers:
        if answer is not None:
            return answer
    return None


def _inner_rewards(func: object) -> tuple[Any, ...]:
    """Return the rewards inside a wrapper of this package. What is no tuple is an attribute of the user's."""
    inner_rewards = getattr(func, "reward_funcs", ())
    return inner_rewards if isinstance(inner_rewards, tuple) else ()


def _takes(method: Callable, args: tuple[Any, ...], kwargs: Keywords) -> bool:
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def require_kind(
    reward: str, column: str, values: Mapping[str, ColumnValues], kinds: tuple[str, ...], nulls: bool = True
) -> None:
    """
    Refuse a column that holds something else than a reward reads.

    `kinds` are the kinds of [`ColumnValues`] that it reads. A column of several kinds passes, and so does one that was
    not read. `nulls`: some rows may be null.
    """
    column_values = values.get(column)
    if column_values is None:
        return
    expected = f"{' or '.join(kinds)} in every row"
    if column_values.nulls and not nulls:
        got = (
            f"null in {column_values.nulls} of {column_values.rows} rows of the column {column!r}, first in row "
            f"{column_values.first_null} (from 0)"
        )
        raise InputError(f"reward {reward}", got, expected, "Drop such rows, or fill them in.")
    if column_values.kind not in (*kinds, "other"):
        got = f"a column {column!r} that holds {column_values.kind}"
        remedy = "Convert the column with dataset.map, or name another one."
        raise InputError(f"reward {reward}", got, expected, remedy)


def gold_columns(reward_func: Any, columns: Iterable[str]) -> list[str]:
    """Return the dataset's columns that a reward's signature requires; a model requires none."""
    if _is_model(reward_func):
        return []
    passed = {column for column in columns if column not in NEVER_PASSED}
    return [name for name in required(reward_func) if name in passed]


def users_own(reward_func: object) -> list[Any]:
    """Return the functions in a reward that are not of this package, those inside wrappers included."""
    func = behind_partials(reward_func)
    if _is_model(func):
        return []
    inner_rewards = _inner_rewards(func)
    if inner_rewards:
        return list(chain.from_iterable(map(users_own, inner_rewards)))
    module = getattr(func, "__module__", None) or type(func).__module__
    is_of_package = module.partition(".")[0] == __name__.partition(".")[0]
    return [] if is_of_package else [func]


def _has_math_verify(name: str) -> None:
    """Refuse a machine without math-verify: TRL's accuracy rewards would fail at their first call."""
    require_package("math_verify", "reward_funcs", f"TRL's {name}", "math")


def _has_texts(name: str, values: Mapping[str, ColumnValues]) -> None:
    """Refuse solutions that are no texts: TRL's accuracy rewards would give `None` in every row."""
    require_kind(name, "solution", values, ("text",))


# Methods for TRL's accuracy rewards, which have none.
_TRLS_ANSWERS: dict[str, Callable] = {"check": _has_math_verify, "check_values": _has_texts}


def _is_model(reward_func: object) -> bool:
    """Tell whether an object is a model or the id of one, or anything else that is not called with columns."""
    torch = sys.modules.get("torch")  # without an import: before one, no object is one of its modules
    is_module = torch is not None and isinstance(reward_func, torch.nn.Module)
    return isinstance(reward_func, str) or not callable(reward_func) or is_module
