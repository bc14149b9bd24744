"""What a reward function takes, and whether the dataset has it, found out before a model loads.

Why: a reward whose column is missing fails after the model has loaded and the first batch has been generated.
`check_columns` compares its signature with the columns beforehand. A reward that knows more than its signature says
has methods that do, see [`ask`].

TRL calls `f(prompts=, completions=, <columns>)`. A function of another stack fails there with a message about a
parameter; [`adapter_hint`] recognizes it by its parameters or its class and names the adapter that takes it.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from trl_drgrpo.common.errors import InputError, require_package
from trl_drgrpo.common.rows import ColumnValues

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
    """Tell whether a call by name must give the parameter."""
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


def only_rows(kwargs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The keywords of a call for some of its rows: columns cut down to these, anything else as it is."""
    count = len(kwargs["completions"])
    return {
        key: [value[row] for row in rows] if isinstance(value, list | tuple) and len(value) == count else value
        for key, value in kwargs.items()
    }


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


# What TRL passes to every reward function (`GRPOTrainer._calculate_rewards`), next to the dataset's columns; the first
# three once per call, the others as one value per completion.
PER_CALL = ("trainer_state", "log_extra", "log_metric")
ALWAYS_PASSED = ("prompts", "completions", "completion_ids", *PER_CALL)
# Two of them, as reward functions declare them.
LogMetric = Callable[[str, float], None] | None
LogExtra = Callable[[str, list[Any]], None] | None
# Dataset columns that TRL leaves out of the keywords: their batched form is passed instead.
NEVER_PASSED = {"prompt": "prompts", "completion": "completions", "completion_ids": "completion_ids"}

# What to do about a column that is missing, where the data are those of a run.
RENAME = "Rename the column that holds it to {0!r} (`rename_columns: [<column>={0}]` in a recipe)"

_ACCURACY_REWARDS = "trl.rewards.accuracy_rewards"


def check_columns(reward_func: Callable | Any, columns: Iterable[str], name: str, supply: str = RENAME) -> None:
    """
    Checks, before a model loads, that TRL can call a reward function with the columns of the dataset.

    TRL calls `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, <other columns>=)`.
    So every required parameter must be one of these, and a function without `**kwargs` must name all of them. Where
    there are environments TRL passes `environments` too: name it among the columns then.

    Args:
        reward_func (`Callable` or model):
            The reward. A model id (`str`), a model, or a callable whose signature Python cannot read is not checked.
            One that has a method `check_columns(columns)` is asked, too: it raises the error.
        columns (`Iterable[str]`):
            Column names of the dataset, `prompt` included.
        name (`str`):
            What to call the reward in the message.
        supply (`str`, *optional*):
            How the user gives a missing column its name, `{0}`. Defaults to what recipes have for it.

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
    named = None if _is_model(reward_func) else parameters(reward_func)
    if named is None:
        return
    names = list(columns)
    ask(reward_func, "check_columns", names)
    if problem := _misfit(reward_func, named, names, supply):
        raise InputError(f"reward {name}", *problem)


def _misfit(
    reward_func: Any, named: Sequence[inspect.Parameter], columns: list[str], supply: str
) -> tuple[str, str, str] | None:
    """What does not fit, what would, and what to do; `None` where TRL can make the call."""
    for clash in (column for column in columns if column in ("prompts", "completions")):
        expected = "no column with the name of a keyword that TRL passes itself"
        remedy = f"Rename or remove the column {clash!r}: the call would give this argument twice."
        return f"a dataset column called {clash!r}", expected, remedy
    passed_columns = [column for column in columns if column not in NEVER_PASSED]
    passed, hint = [*ALWAYS_PASSED, *passed_columns], adapter_hint(reward_func)
    for parameter in named:
        missing = parameter.name
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            remedy = "TRL passes everything by keyword: remove the `/` from the signature."
            return f"the positional-only parameter {missing!r}", "parameters that can be passed by keyword", remedy
        if not is_required(parameter) or missing in passed:
            continue
        remedy = supply.format(missing)
        if missing in NEVER_PASSED:
            remedy = f"TRL passes it as {NEVER_PASSED[missing]!r}: rename the parameter"
        elif near := get_close_matches(missing, passed_columns, n=1, cutoff=0.5):
            remedy = f"Did you mean the column {near[0]!r}? {remedy}"
        options = parameters(type(reward_func)) or ()
        naming = [option.name for option in options if str(getattr(reward_func, option.name, None)) == missing]
        other = f"set {naming[0]} to its name" if naming else "give the parameter a default"
        got = f"a dataset with the columns {', '.join(columns) or '(none)'}"
        return got, f"a column {missing!r}, which the function requires", hint or f"{remedy}, or {other}."
    taken = {parameter.name for parameter in named if parameter.kind is not parameter.POSITIONAL_ONLY}
    refused = [keyword for keyword in passed if keyword not in taken]
    if not refused or any(parameter.kind is parameter.VAR_KEYWORD for parameter in named):
        return None
    got = f"a function without **kwargs that does not name {', '.join(refused)}"
    return got, "a function that accepts every keyword TRL passes", hint or "Add **kwargs to its parameters."


def check_form(reward_func: Any, name: str) -> None:
    """Refuses a class, which TRL would call and take the instance for the rewards, and what cannot be called. The
    remedy names the adapter of its stack."""
    if inspect.isclass(reward_func):
        got, default = f"the class {reward_func.__name__}", f"Pass an instance: {reward_func.__name__}(...)."
    elif not isinstance(reward_func, str) and not callable(reward_func):
        got, default = type(reward_func).__name__, "Pass the function itself."
    else:
        return
    expected = "a function, a reward model or the id of one"
    raise InputError(f"reward {name}", got, expected, adapter_hint(reward_func) or default)


def ask(reward_func: Any, question: str, /, *args: Any, **kwargs: Any) -> Any:
    """
    What a reward says of itself, and those inside it (a wrapper names them in a tuple, `reward_funcs`): the first
    answer that is not `None`. Nobody is asked who has no method of that name, or one of the user's that happens to
    have it and takes other arguments. TRL's accuracy rewards are answered for.

    Args:
        reward_func (`Callable`): A reward; models and their ids have nothing to say.
        question (`str`): Three raise [`InputError`]: `"check"` (a program or a server has to be there),
            `"check_columns"` (one of several columns is needed; gets the list of columns), `"check_values"` (gets the
            [`ColumnValues`] by name). `"check_row"` gets the columns of one row by name; the answer is why no
            completion of it can be scored: a gold answer that cannot be read, tests that cannot be run.
        *args, **kwargs: Arguments of the method.
    """
    func = behind_partials(reward_func)
    if _is_model(func):
        return None
    inside = getattr(func, "reward_funcs", ())
    said = [ask(each, question, *args, **kwargs) for each in inside] if isinstance(inside, tuple) else []
    answer = getattr(func, question, None)
    if getattr(func, "__module__", None) == _ACCURACY_REWARDS and question in _TRLS_ANSWERS:
        answer = functools.partial(_TRLS_ANSWERS[question], func.__name__)
    if callable(answer) and _takes(answer, args, kwargs):
        said.append(answer(*args, **kwargs))
    return next((each for each in said if each is not None), None)


def _takes(method: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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

    `kinds`: what it reads, of the kinds of [`ColumnValues`]; a column of several kinds passes, and one that was not
    looked at. `nulls`: some rows may be null.
    """
    found = values.get(column)
    if found is None:
        return
    expected = f"{' or '.join(kinds)} in every row"
    if found.nulls and not nulls:
        got = f"null in {found.nulls} of {found.rows} rows of the column {column!r}, first in row {found.first_null}"
        raise InputError(f"reward {reward}", f"{got} (from 0)", expected, "Drop such rows, or fill them in.")
    if found.kind not in (*kinds, "other"):
        remedy = "Convert the column with dataset.map, or name another one."
        raise InputError(f"reward {reward}", f"a column {column!r} that holds {found.kind}", expected, remedy)


def gold_columns(reward_func: Any, columns: Iterable[str]) -> list[str]:
    """The dataset's columns that a reward's signature requires; a model requires none."""
    passed = {column for column in columns if column not in NEVER_PASSED}
    return [] if _is_model(reward_func) else [name for name in required(reward_func) if name in passed]


def users_own(reward_func: Any) -> list[Any]:
    """The functions in a reward that are not of this package, those inside wrappers included."""
    func = behind_partials(reward_func)
    if _is_model(func):
        return []
    inside = getattr(func, "reward_funcs", ())
    if isinstance(inside, tuple) and inside:
        return [own for part in inside for own in users_own(part)]
    module = getattr(func, "__module__", None) or type(func).__module__
    return [] if module.partition(".")[0] == __name__.partition(".")[0] else [func]


def _has_math_verify(name: str) -> None:
    """Without it TRL's accuracy rewards fail at their first call."""
    require_package("math_verify", "reward_funcs", f"TRL's {name}", "math")


def _has_texts(name: str, values: Mapping[str, ColumnValues]) -> None:
    """A solution that is no text gets `None` from TRL's accuracy rewards, in every row."""
    require_kind(name, "solution", values, ("text",))


# What TRL's accuracy rewards would say if they could.
_TRLS_ANSWERS: dict[str, Callable] = {"check": _has_math_verify, "check_values": _has_texts}


def _is_model(reward_func: Any) -> bool:
    """Tell whether it is a model or the id of one, or anything else that nobody calls with columns."""
    # Without importing torch: if it has not been imported, the object cannot be one of its modules.
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(reward_func, torch.nn.Module)
    return isinstance(reward_func, str) or not callable(reward_func) or is_module
