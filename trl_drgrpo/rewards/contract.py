"""The contract of a reward function, checked on every call, and the limits of one.

TRL hands the result of a reward function to `torch.tensor`: a string, a single float or a list that is one short ends
in a `TypeError` from deep inside, and `inf` quietly makes a whole group's advantages NaN. Here each of these is one
error that names the function, or, with `on_error="unscorable"`, unscorable rows and a counter.
"""

import asyncio
import functools
import inspect
import io
import keyword
import logging
import math
import numbers
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, Protocol, get_args

from trl_drgrpo.common.errors import InputError, RewardError, shortened, speaks_for_itself, told
from trl_drgrpo.common.ranges import positive, refuse_outside, whole
from trl_drgrpo.rewards.columns import (
    PER_CALL,
    Keywords,
    adapter_hint,
    behind_partials,
    is_async,
    parameters,
    users_own,
)
from trl_drgrpo.rewards.texts import are_messages, completion_text, in_other_form

logger = logging.getLogger(__name__)

# The objective if a completion decides that a row has no score: logged once, at the first such failure.
FAILING_IS_FREE = (
    "If completions can cause this, failing costs the policy nothing: the gradient is that of the mean reward of the "
    "completions that can be scored, times the chance P(1-(1-P)^(G-1)) that one of them and another of its group are."
)

OnError = Literal["raise", "unscorable"]
ON_ERROR: tuple[str, ...] = get_args(OnError)
Rewards = list[float | None]
_LIBRARY_FOLDERS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__))  # ours, Python's
# Keywords of TRL's call that are no column, and columns that it passes under another name.
_NO_COLUMNS = ("completions", "completion", "prompt", *PER_CALL)


class RewardFunction(Protocol):
    """A reward function as TRL calls it: by name, synchronous or asynchronous.

    `f(prompts=, completions=, completion_ids=, <dataset columns>, ...)` returns one number per completion, `None` for
    one that cannot be judged, whatever was written. A function may take only some of these, and `**kwargs`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None] | Awaitable[Sequence[float | None]]: ...


def reward_name(reward_func: Callable) -> str:
    """Return the name of a reward function in logs and metrics, as TRL builds it: of the function behind partials, or
    of an instance's class."""
    function = behind_partials(reward_func)
    return getattr(function, "__name__", type(function).__name__)


def checked_reward(reward_func: Callable, on_error: OnError = "raise", name: str | None = None) -> RewardFunction:
    """Wrap a reward function so that it keeps its contract or fails with one clear error.

    Args:
        reward_func (`Callable`):
            Called by the trainer as `f(prompts=, completions=, completion_ids=, <columns>, ...)`; synchronous or
            asynchronous; a function, a partial or an instance with `__call__`.
        on_error (`str`, *optional*, defaults to `"raise"`):
            `"raise"`: a broken contract or an exception of the function becomes a [`RewardError`]. `"unscorable"`: all
            completions of that call are scored `None` and left out of their groups, which is logged with the first
            traceback; the share of failed calls goes to the metric `rewards/<name>/failed_frac`, unless the function
            logs that itself (an isolated reward logs the share of failed completions).
        name (`str`, *optional*): Name in messages and metrics. Defaults to the function's own.

    Returns:
        `Callable`: Same call, same name; returns one finite float or `None` per completion.
    """
    guard = Guard(reward_func, on_error == "raise", name or reward_name(reward_func))

    # TRL asks `inspect.iscoroutinefunction` how to call it, so the wrapper is of the kind of the function inside.
    async def scored_later(*args, **kwargs):
        return await guard.rewards(args, kwargs)

    def scored_now(*args, **kwargs):
        return at_once(guard.rewards(args, kwargs))

    scored: Any = scored_later if is_async(reward_func) else scored_now
    scored.__name__ = scored.__qualname__ = guard.name
    scored.__doc__ = inspect.getdoc(reward_func)
    scored.lowest_reward = getattr(reward_func, "lowest_reward", None)
    scored.reward_funcs = (reward_func,)
    scored.checked = reward_func
    return scored


@dataclass
class Guard:
    """Calls one reward function, validates its rewards, and turns a failure into an error or into unscorable rows.

    Args:
        reward_func (`Callable`): The function.
        raises (`bool`): Whether a failure is a [`RewardError`]; else the first one is logged.
        name, kind, expected (`str`): For the error: the function's name, its kind, and the result it should return.
        cost (`str`): For the log: the cost of a failure.
    """

    reward_func: Callable
    raises: bool
    name: str
    kind: str = "reward function"
    expected: str = "a list of rewards"
    cost: str = "the call's completions are left out of their groups. Further failures are only counted."
    has_logged: bool = False
    has_compared: bool = False

    async def rewards(self, args: tuple[Any, ...], kwargs: Keywords) -> Rewards:
        """Return the rewards of one call, by keyword or by position."""
        kwargs = _by_name(self.reward_func, args, kwargs, self.name)
        # TRL's function for the reward of environments gets these in place of completions.
        rows = kwargs["completions"] if "completions" in kwargs else kwargs["environments"]
        failed_frac = f"rewards/{self.name}/failed_frac"
        logged: set[str] = set()
        log_metric = kwargs.get("log_metric")
        if log_metric is not None:

            def log(metric: str, value: float) -> None:
                logged.add(metric)
                log_number(log_metric, metric, value)

            # A wrapper: a value that is no number must not end the run, and the names logged are needed below.
            kwargs["log_metric"] = log
        log_extra = kwargs.get("log_extra")
        if log_extra is not None:
            kwargs["log_extra"] = functools.partial(log_column, log_extra, len(rows))
        rewards: Rewards = [None] * len(rows)
        failure = None
        try:
            output = self.reward_func(**kwargs)
            if is_async(self.reward_func):
                output = await output
            rewards = validate_rewards(output, len(rows), self.name)
        except (Exception, SystemExit) as error:  # a grader may call sys.exit(); KeyboardInterrupt is the user's
            failure = error
        if failure is not None:
            self.settle(failure, self._hint(failure, rows))
        elif rows and not self.has_compared:
            self.has_compared = True
            self._warn_of_messages_unread(kwargs, rewards)
        # A function that counts its own failures, per completion, is believed.
        if not self.raises and log_metric is not None and failed_frac not in logged:
            log_metric(failed_frac, float(failure is not None))
        return rewards

    def _hint(self, error: Exception | SystemExit, rows: Sequence[Any]) -> str:
        """Return the remedy for an exception of a function for another kind of call; empty for any other."""
        adapter = adapter_hint(self.reward_func)
        if adapter and isinstance(error, TypeError):
            return adapter
        if isinstance(error, RewardError) or not isinstance(error, (AttributeError, LookupError, TypeError)):
            return ""
        form = form_note(rows)
        return f"{to_fix(error)} {form}" if form else ""

    def _warn_of_messages_unread(self, kwargs: Keywords, rewards: Rewards) -> None:
        """Warn of a function that gives all messages one value and their texts several.

        It was written for texts, and `len` of a list with one message is 1. A copy of it is called with the texts, so
        that a counter or the like in the function does not change.
        """
        completions = kwargs.get("completions", ())
        if not are_messages(completions) or len(set(rewards)) > 1 or is_async(self.reward_func):
            return
        # Equal texts deserve equal rewards, and functions of this package read both forms.
        if len(set(map(completion_text, completions))) < 2 or not users_own(self.reward_func):
            return
        silent = {key: unheard for key in ("log_metric", "log_extra") if key in kwargs}
        try:
            import cloudpickle

            buffer = _SmallBuffer()
            cloudpickle.dump(self.reward_func, buffer)
            copy_of_function = cloudpickle.loads(buffer.getvalue())
            output = copy_of_function(**in_other_form(kwargs), **silent)
            rewards_of_texts = validate_rewards(output, len(completions), self.name)
        except (Exception, SystemExit):  # it reads messages only, cannot be pickled, or is large
            return
        if len(set(rewards_of_texts)) > 1:
            message = "%s '%s' gives all %d completions of a batch %s, and their texts different rewards. %s"
            logger.warning(message, self.kind, self.name, len(completions), rewards[0], form_note(completions))

    def settle(self, error: Exception | SystemExit, hint: str = "") -> None:
        """Raise the failure of a call, or log the first one. `hint` is the remedy, if one is known."""
        if self.raises:
            if isinstance(error, RewardError):  # it names the function already
                raise error from error.__cause__
            remedy = hint or to_fix(error)
            raise RewardError(f"{self.kind} '{self.name}'", told(error), self.expected, remedy) from error
        if not self.has_logged:
            self.has_logged = True
            message = f"{self.kind.capitalize()} '%s' failed; {self.cost} {FAILING_IS_FREE}"
            if speaks_for_itself(error):
                logger.error(f"{message} %s", self.name, error)
            else:
                logger.error(message, self.name, exc_info=error)


class _SmallBuffer(io.BytesIO):
    """A buffer of a megabyte: a function that holds a model is not worth a copy."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 2**20:
            raise BufferError("too large")
        return super().write(content)


def unheard(*args: Any) -> None:
    """Replaces a logger in a call whose rewards are not used."""


def form_note(completions: Sequence[Any]) -> str:
    """Return a note on the form of this run's completions, with the way to convert them; empty for no completions."""
    if not isinstance(completions, Sequence) or not len(completions):
        return ""
    if are_messages(completions):
        return (
            "The prompts are lists of messages, so completions are, too: read each with "
            "`trl_drgrpo.rewards.completion_text(completion)`, or pass `from_trl(f, completions_as='text')` (in a "
            "recipe `trl: {function: ..., completions_as: text}`)."
        )
    return (
        "The prompts are texts, so completions are, too: for a function that reads messages pass "
        "`from_trl(f, completions_as='messages')` (in a recipe `trl: {function: ..., completions_as: messages}`), or "
        "make the prompts lists of messages."
    )


def log_number(log_metric: Callable[[str, float], None], metric: str, value: Any) -> None:
    """Log a metric of the user's. A value that is no number is left out, with one warning: it must not end the run."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("a text")
        number = float(value)
    except Exception as error:  # `None`, a list, a whole number above 1e308
        _warn_unlogged(str(metric), "a number", shortened(value), type(error).__name__)
        return
    log_metric(str(metric), number)


def log_column(log_extra: Callable[[str, list[Any]], None], rows: int, column: str, values: Any) -> None:
    """Log a column of the user's for the table of completions. A column without one value per row is left out, with
    one warning."""
    try:
        values = None if isinstance(values, (str, bytes)) else list(values)
    except TypeError:
        values = None
    if values is None or len(values) != rows:
        got = "no list" if values is None else f"{len(values)} values"
        _warn_unlogged(str(column), f"a list of {rows} values, one per completion", got, "not logged")
        return
    log_extra(str(column), values)


@functools.cache  # so that each warning comes once
def _warn_unlogged(name: str, expected: str, got: str, reason: str) -> None:
    logger.warning("log of %r: got %s; expected %s (%s). It is left out.", name, got, expected, reason)


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing, as everything that it calls is synchronous."""
    # Without an event loop: `asyncio.run` fails where one runs already, as in a notebook.
    try:
        work.send(None)
    except StopIteration as done:  # a coroutine returns by this exception
        return done.value
    raise RuntimeError("a synchronous reward waits for something")


def awaited(output: Any) -> Any:
    """Return the result of a call where no event loop runs; of an asynchronous one, when it is done."""
    if not inspect.isawaitable(output):
        return output

    async def result() -> Any:
        return await output

    return asyncio.run(result())


# Workers are as many as cores: threads within each would only wait for each other, and each takes memory.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LIMITS = {
    # At most some eleven days; what waits for sockets takes no more than twice that.
    "timeout": positive(highest=10**6, remedy="Give the longest time that one correct answer may take, in seconds."),
    # At most an exabyte, which the system can still count in bytes.
    "memory_mb": whole(64, 2**40, optional=True, remedy="An empty worker takes about 20; None sets no limit."),
    "workers": whole(1, 10_000, optional=True, remedy="None uses one per available core."),
}


@dataclass(frozen=True)
class Limits:
    """Limits on one call of a reward. Rewards with equal limits share their workers.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`):
            Wall-clock seconds per call, at most a million. Imports while the reward is loaded, and its `warm_up()`
            where it has such a method, are not counted; a module that the first call imports is.
        memory_mb (`int`, *optional*, defaults to `4096`):
            Megabytes of private writable memory per worker (Linux' `RLIMIT_DATA`; shared libraries do not count); what
            exceeds it is a `MemoryError` in the reward. Processes that a reward starts have this limit each. `None`:
            no limit.
        workers (`int`, *optional*):
            Calls that run at once. `None`: the cores this process may use, divided by the trainer processes on this
            machine (`LOCAL_WORLD_SIZE`), at least 1.

    Raises:
        [`InputError`]: A value outside its range.
    """

    timeout: float = 5.0
    memory_mb: int | None = 4096
    workers: int | None = None

    def __post_init__(self):
        for field, allowed in _LIMITS.items():
            refuse_outside(field, getattr(self, field), allowed)


def available_workers() -> int:
    """Return the cores that this process may use, divided by the trainer processes here, at least 1."""
    # The affinity, not the count: a job of a cluster sees all cores of its machine and may use some.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun and accelerate
    processes = int(local_world_size) if local_world_size.isdigit() else 1
    return max(1, cores // max(1, processes))


def declared(func: object, attribute: str) -> Any:
    """Return an attribute of a reward function, or of the one behind its partials; `None` without it.

    `lowest_reward` (`float`): the reward of a completion that makes it fail. `is_causal` (`bool`, step rewards):
    whether the score of a step reads no further than the end of that step. `is_learned` (`bool`): a model's scores.
    """
    return getattr(behind_partials(func), attribute, None)


def check_on_error(on_error: object) -> None:
    """Refuse an `on_error` that is neither `"unscorable"` nor `"raise"`."""
    if not isinstance(on_error, str) or on_error not in ON_ERROR:
        remedy = '"unscorable" goes on and counts the failures, "raise" ends the run.'
        raise InputError("on_error", shortened(on_error), '"unscorable" or "raise"', remedy)


def check_name(name: object) -> None:
    """Refuse a name under which nothing could be logged: no text, or an empty one."""
    if not isinstance(name, str) or not name.strip():
        remedy = "Set a name: metrics are called rewards/<name>/mean."
        raise InputError("name", shortened(name), "a non-empty string", remedy)


def check_column(column: object, field: str = "column") -> None:
    """Refuse a column that TRL could not pass to a reward function as one value per completion: its name is no Python
    name, or TRL uses it for something else."""
    is_name = isinstance(column, str) and column.isidentifier() and not keyword.iskeyword(column)
    if not is_name or column in _NO_COLUMNS:
        remedy = "TRL passes columns as keywords: rename one that has spaces in its name, or that TRL uses itself."
        raise InputError(field, shortened(column), "the name of a dataset column", remedy)


def check_flag(field: str, value: object) -> None:
    """Refuse a value that is not `True` or `False`, 0 and 1 included."""
    if not isinstance(value, bool):
        raise InputError(field, shortened(value), "true or false", "Write it without quotes.")


def validate_rewards(output: object, num_completions: int, name: str) -> Rewards:
    """Return the rewards as a list of finite floats and `None`. Refuses any other result.

    Args:
        output:
            Result of the reward function: a list, tuple, tensor or array of shape `(B,)` or `(B, 1)`, or any other
            iterable of numbers that [`reward_number`] takes.
        num_completions (`int`): Number of rewards expected.
        name (`str`): Name of the reward function, for the message.

    Returns:
        `list[float | None]`: One entry per completion; `None` for `None` and NaN.

    Raises:
        `RewardError`: Not an iterable of numbers, an incorrect count, or an infinite value.
    """
    field = f"reward function '{name}'"
    expected = f"a list of {num_completions} numbers or None, one per completion"
    output = listed(output)
    if isinstance(output, (str, bytes, dict)) or not isinstance(output, Iterable):
        got = f"{type(output).__name__} {shortened(output)}"
        raise _invalid_result(field, got, expected, "Return a list from the function.")
    rewards = list(output)
    if len(rewards) != num_completions:
        remedy = "Score every completion of the call, in order."
        raise _invalid_result(field, f"{len(rewards)} rewards", expected, remedy)
    return [reward_number(reward, field, f"for completion {index}") for index, reward in enumerate(rewards)]


def _invalid_result(field: str, got: str, expected: str, remedy: str) -> RewardError:
    error = RewardError(field, got, expected, remedy)
    error.has_returned = True
    return error


def listed(values: Any, axes: int = 1) -> Any:
    """Return a tensor or an array as nested lists, anything else as it is. A last axis of size 1 beyond the expected
    `axes`, as a value head has it, is left out."""
    if not hasattr(values, "tolist"):  # torch and numpy
        return values
    shape = tuple(getattr(values, "shape", ()))
    if len(shape) == axes + 1 and shape[-1:] == (1,):
        values = values.reshape(shape[:-1])
    return values.tolist()


def reward_number(reward: Any, field: str, where: str = "") -> float | None:
    """
    Return one reward of a function's result as a float; `None` for `None` and NaN. [`RewardError`] for
    infinity and for a value that is no number.

    Python's and numpy's numbers count, decimals and fractions too, and tensors and arrays of one element; booleans are
    0 and 1. `where` is for the message: `"for completion 3"`; empty if only the caller knows the place.
    """
    if hasattr(reward, "item") and math.prod(getattr(reward, "shape", ())) == 1:  # of torch or numpy
        reward = reward.item()
    if reward is None:
        return None
    expected = "a finite number, or None for what it cannot score"
    if isinstance(reward, Decimal) and reward.is_snan():
        reward = math.nan  # a float cannot be made of it
    if not isinstance(reward, (numbers.Real, Decimal)):  # `Decimal` is not registered as a real number
        got = f"{type(reward).__name__} {shortened(reward)} {where}"
        raise _invalid_result(field, got.rstrip(), expected, "Convert it to a float.")
    try:
        number = float(reward)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if math.isinf(number):
        raise _invalid_result(field, f"{shortened(reward)} {where}".rstrip(), expected, "Clip it, or return None.")
    if math.isnan(number):  # TRL turns `None` into NaN, so a function may have learned to return it
        _warn_of_nan(field)
        return None
    return number


@functools.cache
def _warn_of_nan(field: str) -> None:
    logger.warning("%s: NaN counts as None, a reward that is unknown. Return None if that is meant.", field)


def to_fix(error: BaseException, option: str | None = "on_reward_error", what: str = "function") -> str:
    """Return advice on an exception of a user's function, with the line of the user's file that it came through. The
    traceback is with the `RewardError`'s cause: a program that catches and prints that error shows none."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    # The first file outside of libraries is the user's. Its last line is where the user can do something.
    frames_of_file = [frame for frame in frames if frame.filename == frames[0].filename]
    place = ""
    if frames_of_file:
        place = f"{frames_of_file[-1].filename}, line {frames_of_file[-1].lineno}; "
    where = f"{place}the traceback is in the error's `__cause__`"
    go_on = f', or set {option}="unscorable" to go on without it' if option else ""
    return f"Fix the {what} ({where}){go_on}."


def _by_name(reward_func: Callable, args: tuple[Any, ...], kwargs: Keywords, name: str) -> Keywords:
    """Return the keywords of a call by position: in the order of the function's parameters, or `(prompts,
    completions)`. TRL's function for an environment's own reward needs `environments` alone."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters(reward_func) or () if parameter.kind in by_position]
    if len(args) > len(names):
        names = ["prompts", "completions"]
    arguments = dict(zip(names, args, strict=False))
    has_rows = not {"completions", "environments"}.isdisjoint([*arguments, *kwargs])
    if len(args) > len(names) or arguments.keys() & kwargs or not has_rows:
        got = f"a call with {len(args)} arguments by position and {', '.join(kwargs) or 'none'} by name"
        expected = "prompts, completions and columns, each once"
        raise InputError(f"reward function '{name}'", got, expected, "Pass them by name, as the trainer does.")
    return {**arguments, **kwargs}
