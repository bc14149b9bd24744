"""The inside of a worker process: load reward functions, call them one call at a time, send every result at once.

A worker reads frames from one socket and writes frames to it; whatever a reward prints goes to stderr and cannot
disturb them. Every call is unpickled, run and answered on its own and on the main thread (so rewards that rely on
SIGALRM work), and only plain text about an exception travels back: an exception, a result or an argument that does not
pickle costs that one call. The process that reads the answers is `trl_drgrpo.rewards.isolation.pool`.

Frames: 8 bytes of length, then a pickle. To the worker: `("load", key, sys_path, function)`, answered by
`("loaded", key, failure)`, and `("calls", key, calls)`, answered by one `("done", result, failure, seconds, retire)`
per call. `function`, `result` and each call are pickles within the pickle; a failure is `(reason, traceback)` or None.

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
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, NoReturn

from trl_drgrpo.common.errors import InputError, RewardError, UnscorableError, speaks_for_itself
from trl_drgrpo.rewards.contract import reward_number, validate_rewards

LENGTH = struct.Struct("<Q")
# To and from the nursery, which does not unpickle anything.
# kind (`F`ork, with the worker's end of its channel attached; `K`ill), number of the worker, memory in MB or 0.
COMMAND = struct.Struct("<cQQ")
# number of a worker that ended, and its status as `os.waitstatus_to_exitcode` gives it.
ENDED = struct.Struct("<Qq")
_TEXT_LIMIT = 8000  # characters of a traceback that are worth sending; messages can quote a whole completion


def send_frame(channel: socket.socket, message: tuple[Any, ...]) -> None:
    """Sends one message; blocks until the other side has taken all of it, at most the socket's own timeout."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    channel.sendall(LENGTH.pack(len(body)) + body)


def serve(channel: socket.socket) -> NoReturn:
    """Answers frames on a blocking stream socket until it closes, then ends this process."""
    functions: dict[bytes, Callable[..., Any]] = {}
    own_pid = os.getpid()
    reader = channel.makefile("rb")
    while message := _next_frame(reader):
        kind, key, *rest = message
        if kind == "load":
            send_frame(channel, ("loaded", key, _load(functions, key, *rest)))
            continue
        for call in rest[0]:
            answer = _answer(functions[key], call)
            if os.getpid() != own_pid:
                os._exit(0)  # a copy that the reward forked and let return: only the worker itself answers
            send_frame(channel, answer)
            if answer[-1]:
                break
        _flush()
    os._exit(0)  # without waiting for threads that a reward left behind


def _next_frame(reader: BufferedReader) -> tuple[Any, ...] | None:
    header = reader.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = reader.read(length)
    return pickle.loads(body) if len(body) == length else None


def _load(functions: dict[bytes, Callable[..., Any]], key: bytes, path: list[str], blob: bytes) -> tuple | None:
    """Unpickles a function, with the imports of its modules, and runs its `warm_up` where it has one."""
    sys.path[:] = path
    try:
        functions[key] = function = pickle.loads(blob)
        warm_up = getattr(function, "warm_up", None)
        if callable(warm_up):
            warm_up()
    except BaseException as error:  # SystemExit of a module included: it is the function that failed, not the worker
        return failure_of(error)
    return None


def _answer(function: Callable[..., Any], call: bytes) -> tuple[Any, ...]:
    started = time.perf_counter()
    result, failure, retire = b"", None, False
    try:
        args, kwargs = pickle.loads(call)
        result = pickle.dumps(function(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # sys.exit() in a reward is a failed call, as any other exception
        failure = failure_of(error)
        retire = isinstance(error, MemoryError)  # what filled the memory may still be referenced somewhere
    finally:
        # An alarm that the reward left armed would interrupt a later, innocent call.
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "done", result, failure, time.perf_counter() - started, retire


def failure_of(error: BaseException) -> tuple[str, str, bool]:
    """Reason and traceback of a failed call (none where the message says all), and whether its row is to blame."""
    of_row = isinstance(error, (InputError, UnscorableError)) and not isinstance(error, RewardError)
    try:
        if speaks_for_itself(error):
            reason = error.got if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            return reason[:_TEXT_LIMIT], "", of_row
        reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        text = "".join(traceback.format_exception(error))
    except BaseException:  # an exception whose own text cannot be made
        reason, text = type(error).__name__, ""
    return reason[:_TEXT_LIMIT], text[-_TEXT_LIMIT:], of_row


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
            "log_metric": lambda name, value: scored.metrics.append((name, float(value))),
            "log_extra": lambda column, values: scored.extras.append((column, list(values))),
        }
        rewards = self._called(**kwargs, **{key: collectors[key] for key in self.loggers})
        if isinstance(rewards, (list, tuple)) and len(rewards) == 1:
            scored.reward = reward_number(rewards[0], f"reward function '{self.name}'")
        else:
            scored.reward = validate_rewards(rewards, 1, self.name)[0]
        return scored
