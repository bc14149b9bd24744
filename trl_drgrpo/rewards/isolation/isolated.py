"""Any reward function in worker processes that can be killed: a completion that hangs or crashes costs itself only.

Why: graders meet what a policy writes. `9^{9^{9}}` keeps a symbolic grader busy for ever, a pattern runs away, a
parser overflows the stack; and time-outs by signal, which graders use, work on the main thread only. Here each
completion is scored in a worker with limits on time and memory. What exceeds them, raises, or returns no number gets
the function's lowest reward, where that is known, and its share is the metric `rewards/<name>/failed_frac`.

Workers protect a run from accidents. They are no sandbox: they may do whatever the trainer's user may do.
"""

import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import RemoteTraceback  # pyright: ignore[reportAttributeAccessIssue]  # not in typeshed
from types import SimpleNamespace
from typing import Any

import cloudpickle

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import finite_number
from trl_drgrpo.rewards.columns import LogExtra, LogMetric, behind_partials, only_rows, parameters, signature_of
from trl_drgrpo.rewards.contract import (
    FAILING_IS_FREE,
    Limits,
    OnError,
    Rewards,
    check_on_error,
    declared,
    reward_name,
)
from trl_drgrpo.rewards.isolation.pool import Call, pool_for
from trl_drgrpo.rewards.isolation.worker import Failure, RewardCaller, SampleScorer, Scored, failure_of, unpickled
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.recipe_rewards import FILE_PREFIX, resolve_reward

logger = logging.getLogger(__name__)

_LOGGED: set[str] = set()  # names of the rewards whose first failure has been logged, in this process


class IsolatedReward:
    """Has a reward function run in worker processes, one completion at a time, under limits; also called `isolate`.

    It is called like the function, with its `__name__` and signature. Per row the function gets lists of one element;
    other arguments go along as they are. `log_metric` and `log_extra` are collected in the worker and repeated here in
    the order of the rows, with `None` for rows that logged nothing; `trainer_state` is a copy of the state's numbers
    and strings (`global_step`, `epoch`, ...), without its history. Each worker has its own copy of the function: what
    that changes in itself (a counter, a cache) does not come back.

    Args:
        reward (`Callable`, `str` or `Mapping[str, Any]`):
            A reward function of TRL's form, synchronous or asynchronous, or its name, as [`resolve_reward`] takes it.
            What is defined in the script that runs, a lambda or a closure is sent by value, and must pickle so.
            Otherwise its module is imported in each worker, and again in each that replaces one: keep slow imports
            out of it.
        timeout (`float`, *optional*, defaults to `5.0`): Wall-clock seconds per completion.
        memory_mb (`int`, *optional*, defaults to `4096`): Megabytes per worker; `None` sets no limit.
        workers (`int`, *optional*): Completions scored at once. `None`: cores / trainer processes on this machine.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            `"unscorable"`: a failure is counted in `rewards/<name>/failed_frac`, and the first one is logged with its
            traceback. `"raise"`: the first failure is a `RewardError`.
        failed (`float`, *optional*):
            Reward of a completion that hangs, crashes, raises or gets no number: the lowest that the function gives.
            Defaults to the function's `lowest_reward`; without one it is `None`, the completion is left out of its
            group, failing costs nothing, and the first failure says so.

    Raises:
        [`InputError`]: No such function, one that cannot be sent to another process, or an option
            out of range.

    Example:

    ```python
    >>> def count_a(completions, **kwargs):
    ...     return [c.count("a") for c in completions]
    >>> isolate(count_a, timeout=10, workers=1)(completions=["banana", "kiwi"])
    [3.0, 0.0]

    ```
    """

    def __init__(
        self,
        reward: Callable | str | Mapping[str, Any],
        *,
        timeout: float = Limits.timeout,
        memory_mb: int | None = 4096,
        workers: int | None = None,
        on_error: OnError = "unscorable",
        failed: float | None = None,
    ):
        self.limits = Limits(timeout, memory_mb, workers)
        check_on_error(on_error)
        if isinstance(reward, (str, Mapping)):
            reward = resolve_reward(reward, field="reward")
        if not callable(reward) or inspect.isclass(reward):
            got = f"the class {reward.__name__}" if inspect.isclass(reward) else repr(reward)
            expected = "a function, an instance with `__call__`, or its name"
            raise InputError("reward", got, expected, "Pass one of these.")
        # TRL logs under `__name__`, and `check_columns` reads the needed columns off the signature.
        self.__name__ = self.__qualname__ = reward_name(reward)
        self.__doc__ = inspect.getdoc(reward)
        self.__signature__ = signature_of(())
        signature = parameters(reward)
        if signature is not None:  # some built-in functions have none
            self.__signature__ = inspect.Signature(signature)
        self.reward = reward
        self.lowest_reward: float | None = declared(reward, "lowest_reward")
        if failed is not None:
            self.lowest_reward = finite_number("failed", failed)
        self.on_error: OnError = on_error
        self.reward_funcs = (reward,)  # the functions that `columns.ask` asks what they need
        self._pickled(("log_metric", "log_extra"))  # an error now, and not after the model has loaded

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> Rewards:
        """Return the rewards of the completions, called as the function itself would be."""
        if len(completions) == 0:
            return []
        # TRL's loggers write into the trainer, so they stay here. The worker only learns which of them to imitate.
        loggers = {name: kwargs.pop(name) for name in ("log_metric", "log_extra") if name in kwargs}
        kwargs["completions"] = list(completions)
        if "trainer_state" in kwargs:
            # Only numbers and texts: the history grows with the run, and callbacks may not pickle.
            state = SimpleNamespace()
            for name, value in getattr(kwargs["trainer_state"], "__dict__", {}).items():
                if isinstance(value, bool | int | float | str | None):
                    setattr(state, name, value)
            kwargs["trainer_state"] = state
        # One call per row, whose columns are lists of one value: a row that hangs takes no other one along.
        calls = [((only_rows(kwargs, [row]),), {}) for row in range(len(completions))]
        # Pickled anew for every call, so that the workers see what has changed in the function since.
        outcomes = pool_for(self.limits).run(self._pickled(tuple(loggers)), calls)
        rewards = [outcome.reward if isinstance(outcome, Scored) else outcome for outcome in outcomes]
        log_metric = loggers.get("log_metric")
        rewards = settled(rewards, self.__name__, self.on_error, log_metric, self.lowest_reward)
        _repeat_logs(outcomes, log_metric, loggers.get("log_extra"))
        return rewards

    def _pickled(self, loggers: tuple[str, ...]) -> bytes:
        return pickled(RewardCaller(self.reward, self.__name__, loggers))


isolate = IsolatedReward


def pickled(caller: SampleScorer) -> bytes:
    """Pickle a reward in the form in which it is sent to workers.

    Plain pickle names a function by its module, which a worker cannot import where that is the running script or a
    file that was loaded by its path. Files that were named as rewards are loaded again by the worker; whatever else
    cannot be imported by name goes by value, with `cloudpickle`. Refuses what no other process can have: a lock, an
    open file, a client.
    """
    reward = behind_partials(caller.function)
    owner = getattr(reward, "__self__", reward)  # of a method: its instance, whose class must be found, too
    for part in (reward, type(owner)):
        module = sys.modules.get(getattr(part, "__module__", None) or "")
        if module is not None and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
    try:
        function = cloudpickle.dumps(caller)
    except Exception as error:  # any type: `__reduce__` of whatever the function refers to
        raise InputError(
            f"reward function '{caller.name}'",
            f"one that cannot be sent to a worker process ({type(error).__name__}: {error})",
            "a function that pickles with cloudpickle",
            "Create clients, locks and files inside the function, or move it to a file of its own and name it as "
            "`path/to/file.py:function`, or run it without limits.",
        ) from error
    # A pickle names the modules that it imports, also those of functions inside other functions. The search in its
    # bytes may find a name that is only text, which costs the worker one file too many and nothing else.
    files = []
    for name, module in list(sys.modules.items()):  # a copy: another thread may import meanwhile
        if name.startswith(FILE_PREFIX) and name.encode() in function:
            files.append(str(module.__file__))
    return pickle.dumps(_WithFiles(files, function)) if files else function


class _WithFiles:
    """Pickles as a call of [`unpickled`], which loads the files before it unpickles the function inside."""

    def __init__(self, *arguments: Any):
        self._arguments = arguments

    def __reduce__(self):
        return unpickled, self._arguments


def _is_importable(module: str) -> bool:
    """Tell whether a new interpreter finds a module by its name. `find_spec` of importlib finds all loaded ones."""
    package = module.partition(".")[0]
    if package == "__main__" or module.startswith(FILE_PREFIX):
        # cloudpickle sends `__main__` by value without being told, and the worker loads files again.
        return True
    for finder in sys.meta_path:
        if hasattr(finder, "find_spec") and finder.find_spec(package, None) is not None:
            return True
    return False


def scored_in_workers(
    score: Callable,
    calls: Sequence[Call],
    *,
    name: str,
    limits: Limits | None,
    on_error: OnError,
    log_metric: LogMetric,
    failed: float | None = None,
    threads: int = 1,
) -> Rewards:
    """Return scores of single completions, each computed in a worker under limits.

    Args:
        score (`Callable`):
            `score(*args, **kwargs) -> float | None`, or asynchronous. Where it, or the instance whose method it is,
            has a method `warm_up()`, each worker calls that once before its first call; it is the place for slow
            imports, which then do not count against the limit of a completion.
        calls (`Sequence[tuple[tuple, dict]]`): Arguments and keywords, per completion.
        name (`str`): Name of the reward, in messages and metrics.
        limits ([`Limits`] or `None`): `None`: in this process, without limits.
        on_error (`str`): As [`isolate`] has it.
        log_metric (`Callable` or `None`): TRL's; gets `rewards/<name>/failed_frac` unless `on_error="raise"`.
        failed (`float`, *optional*): Score of a completion that failed, the lowest there is.
        threads (`int`, *optional*, defaults to `1`): Without limits, calls at once: for scores that wait for others.

    Returns:
        `list[float | None]`: Per call a finite float; `None` where `score` gave `None` or NaN, or failed whatever was
        written ([`UnscorableError`]).

    Raises:
        [`RewardError`]: A call failed, and `on_error` is `"raise"`.
        [`InputError`]: `score` cannot be sent to another process.
    """
    check_on_error(on_error)
    scorer = SampleScorer(score, name)
    outcomes = []
    if limits is None:
        outcomes = _run_here(scorer, calls, threads)
    elif calls:
        outcomes = pool_for(limits).run(pickled(scorer), calls)
    return settled(outcomes, name, on_error, log_metric, failed)


def _run_here(score: Callable, calls: Sequence[Call], threads: int) -> list[Any]:
    def outcome(call: Call) -> Any:
        try:
            return score(*call[0], **call[1])
        except (Exception, SystemExit) as error:  # sys.exit() in a reward is its failure, as it is in a worker
            return failure_of(error)

    if threads == 1:  # on this thread: signals, by which some graders bound their time, reach the main thread only
        return list(map(outcome, calls))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(outcome, calls))


def settled(
    outcomes: Sequence[float | Failure | None],
    name: str,
    on_error: OnError,
    log_metric: LogMetric,
    failed: float | None,
) -> Rewards:
    """Return the scores, with `failed` in the place of failures, or `None` for those of the row.

    Failures are counted and the first is logged, or raised if `on_error` says so.
    """
    scores: Rewards = []
    failures: dict[int, Failure] = {}
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            failures[index] = outcome
            # A row whose truth cannot be read is no fault of the completion, which must not pay for it.
            outcome = None if outcome.of_row else failed
        scores.append(outcome)
    if failures:
        first = min(failures)
        failure = failures[first]
        if on_error == "raise":
            # The exception itself stayed in the worker. `RemoteTraceback` prints the text of its traceback as a cause.
            cause = RemoteTraceback(failure.traceback) if failure.traceback else None
            raise RewardError(
                f"reward function '{name}'",
                f"{failure.reason} at completion {first}",
                "a number, or None for a completion it cannot score",
                'Fix the function, or set on_error="unscorable" to go on and count them.',
            ) from cause
        if name not in _LOGGED:
            _LOGGED.add(name)
            _log_failure(name, f"{len(failures)} of {len(outcomes)}", first, failure, failed is None)
    if outcomes and on_error != "raise" and log_metric is not None:
        log_metric(f"rewards/{name}/failed_frac", len(failures) / len(outcomes))
    return scores


def _log_failure(name: str, share: str, index: int, failure: Failure, is_free: bool) -> None:
    price = "They get its lowest reward, or None where the row is to blame. Further failures are only counted."
    if is_free:
        price = f"They are left out of their groups. {FAILING_IS_FREE} Set `failed`, or `lowest_reward`."
    reason = f"{failure.reason}\n{failure.traceback}".rstrip("\n")
    message = "Reward function '%s' failed for %s completions. %s The first, at completion %d: %s"
    logger.error(message, name, share, price, index, reason)


def _repeat_logs(outcomes: Sequence[Scored | Failure], log_metric: LogMetric, log_extra: LogExtra) -> None:
    """Log here what was logged in the workers: extra columns in one piece, one value per completion."""
    columns: dict[str, list[Any]] = {}
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):  # what it logged before it failed stays in the worker
            continue
        for column, values in outcome.extras:
            columns.setdefault(column, [None] * len(outcomes))[index] = values[0]
        if log_metric is not None:
            for metric in outcome.metrics:
                log_metric(*metric)
    if log_extra is not None:
        for column, values in columns.items():
            log_extra(column, values)


register_reward(
    "isolate",
    help="A reward with limits on time and memory, in worker processes.",
    factory=isolate,
    role="wrapper",
    is_harmless=True,
)
