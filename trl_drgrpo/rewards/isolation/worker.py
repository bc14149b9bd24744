"""The inside of a worker process: load reward functions, call them, send every result at once.

A worker reads and writes pickles on one socket; prints of a reward go to stderr and cannot disturb them. Calls run on
the main thread, so rewards that rely on SIGALRM work. Of an exception only plain text travels back, so an exception, a
result or an argument that does not pickle costs its call only. `pool.py` reads the answers.

A request is a tuple `(key, sys_path, function, call)`: with a `function` it is to be loaded under this key, without
one it is to be called. The answer to each is `(result, failure, retire)`. `function`, `call` and `result` are pickles
within the pickle; `failure` is a [`Failure`] or None.

[`SampleScorer`] and [`RewardCaller`] are the functions that are loaded. They check and convert rewards in the worker,
so that neither tensors nor nonsense have to pickle, and collect what a reward function logs.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from trl_drgrpo.common.errors import InputError, RewardError, UnscorableError, speaks_for_itself
from trl_drgrpo.rewards.columns import Keywords
from trl_drgrpo.rewards.contract import log_column, log_number, reward_number, validate_rewards

_TEXT_LIMIT = 8000  # characters of a traceback that are worth sending; messages can quote a whole completion


def serve(channel: socket.socket) -> NoReturn:
    """Answer requests on a blocking stream socket until it closes, then end this process."""
    functions: dict[bytes, Callable] = {}
    worker_pid = os.getpid()
    requests = channel.makefile("rb")
    with contextlib.suppress(EOFError):
        while True:
            answer = _answer(functions, *pickle.load(requests))
            if os.getpid() != worker_pid:
                os._exit(0)  # a copy that the reward forked and let return: only the worker itself answers
            # Before the answer: a worker may be killed any time after it, and its prints would be lost.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a reward may have closed or replaced them
                    stream.flush()
            channel.sendall(pickle.dumps(answer))
    os._exit(0)  # without waiting for threads that a reward left behind


def _answer(
    functions: dict[bytes, Callable], key: bytes, path: list[str], function: bytes, call: bytes
) -> tuple[bytes, "Failure | None", bool]:
    try:
        result = b""
        if function:
            sys.path[:] = path
            functions[key] = pickle.loads(function)  # with the imports of its modules
            # Part of loading, whose limit is two minutes: slow imports are not the first completion's.
            warm_up = getattr(functions[key], "warm_up", None)
            if callable(warm_up):
                warm_up()
        else:
            args, kwargs = pickle.loads(call)
            result = pickle.dumps(functions[key](*args, **kwargs))
        return result, None, False
    except BaseException as error:  # sys.exit() in a reward or its module is a failure, as any other exception
        is_full = isinstance(error, MemoryError)  # what filled the memory may still be referenced: a new worker is due
        return b"", failure_of(error), is_full
    finally:
        # An alarm that the reward left armed would interrupt a later, innocent call.
        signal.setitimer(signal.ITIMER_REAL, 0)


def unpickled(files: Sequence[str], function: bytes) -> Callable:
    """Load a function that refers to files named as rewards, which a worker cannot import by a name."""
    from trl_drgrpo.rewards.recipe_rewards import module_from_file

    for file in files:
        module_from_file(file, file)
    return pickle.loads(function)


@dataclass(frozen=True)
class Failure:
    """A call without a result.

    Args:
        reason (`str`): In a few words: `ValueError: ...`, `no result within 5 s`, `the worker died (signal 11)`.
        traceback (`str`): As text, where the call raised and its message does not say all.
        of_row (`bool`): Whether the call would have failed whatever was written: no completion is to blame.
    """

    reason: str
    traceback: str = ""
    of_row: bool = False


def failure_of(error: BaseException) -> Failure:
    """Describe the failure of a call that raised; without a traceback if the message says all."""
    # A `RewardError` is an `InputError`, too, but it tells of a result, for which a completion may be to blame.
    of_row = isinstance(error, (InputError, UnscorableError)) and not isinstance(error, RewardError)
    text = ""
    try:
        if isinstance(error, RewardError) and speaks_for_itself(error):
            reason = error.got
        elif speaks_for_itself(error):
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            text = "".join(traceback.format_exception(error))
    except BaseException:  # an exception whose own text cannot be made
        reason = type(error).__name__
    return Failure(reason[:_TEXT_LIMIT], text[-_TEXT_LIMIT:], of_row)


class SampleScorer:
    """Calls a score of one completion.

    Args:
        function: Synchronous or asynchronous; in the trainer's process the form in which it is sent.
        name (`str`): Name of the reward, for messages.
    """

    def __init__(self, function: Callable, name: str):
        self.function = function
        self.name = name

    def warm_up(self) -> None:
        """Call the reward's own `warm_up`, where it has one."""
        owner = getattr(self.function, "__self__", self.function)
        warm_up = getattr(owner, "warm_up", None)
        if callable(warm_up):
            warm_up()

    # `/`: a column of the dataset may be called `self`.
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Checked on this side, so that a result which is no number need not pickle.
        return reward_number(self._result(*args, **kwargs), f"reward function '{self.name}'")

    def _result(self, /, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


@dataclass
class Scored:
    """Result of one call of a reward function for one completion: its reward and the logged values."""

    reward: float | None
    metrics: list[tuple[str, float]]
    extras: list[tuple[str, list[Any]]]


class RewardCaller(SampleScorer):
    """Calls a reward function of TRL's form for one completion.

    `loggers` names those of `log_metric` and `log_extra` that the function is given, as collectors.
    """

    def __init__(self, function: Callable, name: str, loggers: Sequence[str]):
        super().__init__(function, name)
        self.loggers = loggers

    def __call__(self, kwargs: Keywords) -> Scored:  # pyright: ignore[reportIncompatibleMethodOverride]
        scored = Scored(None, [], [])
        collectors = {
            "log_metric": partial(log_number, lambda *entry: scored.metrics.append(entry)),
            "log_extra": partial(log_column, lambda *entry: scored.extras.append(entry), 1),
        }
        # Only loggers that the trainer gave: a function may behave differently without them.
        rewards = self._result(**kwargs, **{logger: collectors[logger] for logger in self.loggers})
        if isinstance(rewards, (list, tuple)) and len(rewards) == 1:
            # `validate_rewards` would say "for completion 0", the place in this call. `settled` says the true one.
            scored.reward = reward_number(rewards[0], f"reward function '{self.name}'")
        else:
            scored.reward = validate_rewards(rewards, 1, self.name)[0]
        return scored
