"""The inside of a worker process: load reward functions, call them one call at a time, send every result at once.

A worker reads pickles from one socket and writes frames to it; whatever a reward prints goes to stderr and cannot
disturb them. Every call is unpickled, run and answered on its own and on the main thread (so rewards that rely on
SIGALRM work), and only plain text about an exception travels back: an exception, a result or an argument that does not
pickle costs that one call. The process that reads the answers is `trl_drgrpo.rewards.isolation.pool`.

To the worker: `(key, sys_path, function, calls)`, with an empty `function` where it has been loaded. Back, for the
loading and for each call, a frame: 8 bytes of length, then a pickle of `(result, failure, seconds, retire)`.
`function`, `result` and each call are pickles within the pickle; `failure` is a [`Failure`] or None.

[`SampleScorer`] and [`RewardCaller`] are what is loaded: they check and convert rewards here, so that neither tensors
nor nonsense have to pickle, and collect what a reward function logs, to be logged again in the trainer's process.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from trl_drgrpo.common.errors import InputError, RewardError, UnscorableError, speaks_for_itself
from trl_drgrpo.rewards.contract import log_column, log_number, reward_number, validate_rewards

LENGTH = struct.Struct("<Q")
_TEXT_LIMIT = 8000  # characters of a traceback that are worth sending; messages can quote a whole completion


def serve(channel: socket.socket) -> NoReturn:
    """Answers messages on a blocking stream socket until it closes, then ends this process."""
    functions: dict[bytes, Callable[..., Any]] = {}
    own_pid = os.getpid()
    reader = channel.makefile("rb")

    def load(key: bytes, blob: bytes) -> None:
        functions[key] = function = pickle.loads(blob)  # with the imports of its modules
        warm_up = getattr(function, "warm_up", None)
        if callable(warm_up):
            warm_up()

    def call(key: bytes, blob: bytes) -> Any:
        args, kwargs = pickle.loads(blob)
        return functions[key](*args, **kwargs)

    with contextlib.suppress(EOFError):
        while True:
            key, path, function, calls = pickle.load(reader)
            if function:
                sys.path[:] = path
            for action, blob in [*([(load, function)] if function else []), *((call, blob) for blob in calls)]:
                answer = _answer(action, key, blob)
                if os.getpid() != own_pid:
                    os._exit(0)  # a copy that the reward forked and let return: only the worker itself answers
                body = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
                channel.sendall(LENGTH.pack(len(body)) + body)
                if answer[-1]:
                    break
            _flush()
    os._exit(0)  # without waiting for threads that a reward left behind


def _answer(action: Callable[[bytes, bytes], Any], key: bytes, blob: bytes) -> tuple[Any, ...]:
    started = time.perf_counter()
    result, failure, retire = b"", None, False
    try:
        result = pickle.dumps(action(key, blob), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # sys.exit() in a reward or its module is a failure, as any other exception
        failure = failure_of(error)
        retire = isinstance(error, MemoryError)  # what filled the memory may still be referenced somewhere
    finally:
        # An alarm that the reward left armed would interrupt a later, innocent call.
        signal.setitimer(signal.ITIMER_REAL, 0)
    return result, failure, time.perf_counter() - started, retire


def unpickled(files: Sequence[str], function: bytes) -> Any:
    """A function that refers to files which were named as rewards, and which no worker could import by a name."""
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
    """What an exception makes of its call; no traceback where the message says all."""
    of_row = isinstance(error, (InputError, UnscorableError)) and not isinstance(error, RewardError)
    try:
        if speaks_for_itself(error):
            reason, text = error.got if isinstance(error, RewardError) else f"{type(error).__name__}: {error}", ""
        else:
            reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            text = "".join(traceback.format_exception(error))
    except BaseException:  # an exception whose own text cannot be made
        reason, text = type(error).__name__, ""
    return Failure(reason[:_TEXT_LIMIT], text[-_TEXT_LIMIT:], of_row)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a reward may have closed or replaced them
            stream.flush()


class SampleScorer:
    """Calls a score of one completion.

    Args:
        function: Synchronous or asynchronous; in the trainer's process the form in which it is sent.
        name (`str`): Name of the reward, for messages.
    """

    def __init__(self, function: Any, name: str):
        self.function = function
        self.name = name

    def warm_up(self) -> None:
        """The reward's own `warm_up`, where it has one."""
        own = getattr(getattr(self.function, "__self__", self.function), "warm_up", None)
        if callable(own):
            own()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return reward_number(self._called(*args, **kwargs), f"reward function '{self.name}'")

    def _called(self, /, *args: Any, **kwargs: Any) -> Any:
        value = self.function(*args, **kwargs)
        return asyncio.run(value) if inspect.iscoroutine(value) else value


@dataclass
class Scored:
    """Result of one call of a reward function for one completion: its reward and the logged values."""

    reward: float | None
    metrics: list[tuple[str, float]]
    extras: list[tuple[str, list[Any]]]


class RewardCaller(SampleScorer):
    """Calls a reward function of TRL's form for one completion. `loggers`: which of `log_metric` and `log_extra` it is
    given, as collectors."""

    def __init__(self, function: Any, name: str, loggers: tuple[str, ...]):
        super().__init__(function, name)
        self.loggers = loggers

    def __call__(self, kwargs: dict[str, Any]) -> Scored:  # pyright: ignore[reportIncompatibleMethodOverride]
        scored = Scored(None, [], [])
        collectors = {
            "log_metric": partial(log_number, lambda name, value: scored.metrics.append((name, value))),
            "log_extra": partial(log_column, lambda column, values: scored.extras.append((column, values)), 1),
        }
        rewards = self._called(**kwargs, **{key: collectors[key] for key in self.loggers})
        if isinstance(rewards, (list, tuple)) and len(rewards) == 1:
            scored.reward = reward_number(rewards[0], f"reward function '{self.name}'")
        else:
            scored.reward = validate_rewards(rewards, 1, self.name)[0]
        return scored
