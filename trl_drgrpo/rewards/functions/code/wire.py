"""Limits that both processes in the sandbox share, and values as lines of JSON. Standard library only.

Only plain data crosses: a value arrives as exactly the built-in or standard type it claims to be, so a `__eq__`,
`__len__` or `__class__` of the completion's own never takes part in a comparison. Anything else stays where it was
made and is known on the other side by a number.
"""

import builtins
import contextlib
import json
import os
import resource
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import attrgetter
from typing import Any

MAX_LINE = 1 << 24  # bytes of one message
_STACK = 1 << 26  # bytes: before Python 3.11 a call of a Python function takes half a KiB of it


def confine(limits):
    """Set the limits, first of all in the sandbox, in the interpreter that will run the untrusted code; hard limits
    cannot be raised again from there. `limits`: a dict with `memory`, `file` (bytes), `cpu` (seconds), `threads` (or
    None), `uid` (or None). What is typed to standard error is the sandbox's own complaint, up to "ready"."""
    _limit(resource.RLIMIT_CORE, 0)  # a crash leaves no dump of the memory
    _limit(resource.RLIMIT_CPU, limits["cpu"])
    _limit(resource.RLIMIT_FSIZE, limits["file"])
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_AS, limits["memory"])
    _limit(resource.RLIMIT_STACK, _STACK)
    if limits["threads"] is not None:
        _limit(resource.RLIMIT_NPROC, limits["threads"])
    if limits["uid"] is not None:
        _become(limits["uid"])
    # The trainer waits for this line, and reads nothing behind it: what the code writes to standard error is dropped.
    os.write(2, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


def _limit(which, value):
    # Not above a limit that this process came with: that would be refused with an error.
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def _become(uid):
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)  # groups first: without the old user id there is no right to change them
        os.setresuid(uid, uid, uid)
    except OSError:  # a container that maps only the usual ids
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


# By tag: a type, the parts of its values, and the way back. Methods are those of the base class: those of a subclass
# are the completion's. `encode` tries the types in this order.
_KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[..., Any]]] = {
    # In hexadecimal, which has no limit of digits, unlike decimal text in Python.
    "int": (int, lambda value: [hex(int.__index__(value))], lambda text: int(text, 16)),
    "bytes": (bytes, lambda value: [bytes.hex(value)], bytes.fromhex),
    "bytearray": (bytearray, lambda value: [bytearray.hex(value)], bytearray.fromhex),
    "Decimal": (Decimal, lambda value: [Decimal.__str__(value)], Decimal),
    "complex": (complex, attrgetter("real", "imag"), complex),
    "Fraction": (Fraction, attrgetter("numerator", "denominator"), Fraction),
    "range": (range, attrgetter("start", "stop", "step"), range),
    "slice": (slice, attrgetter("start", "stop", "step"), slice),
    # datetime before date, which is its base class
    "datetime": (datetime, lambda value: [datetime.isoformat(value)], datetime.fromisoformat),
    "date": (date, lambda value: [date.isoformat(value)], date.fromisoformat),
    "time": (time, lambda value: [time.isoformat(value)], time.fromisoformat),
    "timedelta": (timedelta, attrgetter("days", "seconds", "microseconds"), timedelta),
    "dict": (  # keys and values in turn: keys of JSON are texts only
        dict,
        lambda value: [part for item in dict.items(value) for part in item],
        lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
    "deque": (deque, lambda value: [list(deque.__iter__(value)), value.maxlen], deque),
    "tuple": (tuple, tuple.__iter__, lambda *items: items),
    "set": (set, set.__iter__, lambda *items: set(items)),
    "frozenset": (frozenset, frozenset.__iter__, lambda *items: frozenset(items)),
}
PLAIN = (bool, float, str, list, *(kind for kind, _, _ in _KINDS.values()))


def encode(value: Any, other):
    """A value in the form of JSON; `other(value)` gives the form of what is not plain data."""
    exact: Any = type(value)  # not `value.__class__`, which an object may claim to be anything
    if value is None or exact is bool or (exact is int and abs(value) < 1 << 53):  # exact as a float, too
        return value
    # From here on by the methods of the base class: a subclass of the completion's may have overridden them.
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in list.__iter__(value)]
    if is_namedtuple(value):
        return other(value)
    for tag, (kind, parts_of, _) in _KINDS.items():
        if isinstance(value, kind):
            return {tag: [encode(part, other) for part in parts_of(value)]}
    # A scalar of numpy is the number that it holds; an array stays an object.
    if exact.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), other)
    return other(value)


def is_namedtuple(value):
    """Tell whether the items of a value have names, which `other` has to keep."""
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def decode(form, other):
    """The value of a form; `other(tag, content)` makes what is not plain data, or raises `ValueError`."""
    if isinstance(form, list):
        return [decode(item, other) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()
    if tag not in _KINDS:
        return other(tag, content)
    make = _KINDS[tag][2]
    return make(*(decode(part, other) for part in content))


def own_streams():
    """Return standard input and output, which nobody else in this process can use from now on."""
    # `input()` and prints of the tested code find an empty file. The duplicates cannot be hidden from it, but whatever
    # it writes there is read as a reply of the completion, which decides nothing.
    reader = os.fdopen(os.dup(0), "rb")
    writer = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return reader, writer


def send(stream, message):
    """Write one message."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream):
    """Read one message. `EOFError`: the other side has gone, or what it says is too long or not a message."""
    line = stream.readline(MAX_LINE)
    message = None
    if line.endswith(b"\n"):  # else it was cut, by the limit or by the end of the other side
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
    if not isinstance(message, dict):
        raise EOFError("no message")
    return message


class Peer:
    """One end of the conversation: it asks the other end, and answers what that one asks meanwhile."""

    operate: Callable[..., Any]  # what a request asks for, with its arguments: the reply
    form_of: Callable[[Any], Any]  # the form of what is not plain data
    meant_by: Callable[[Any, Any], Any]  # what such a form of the other end stands for, from its tag and content

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.objects: list[Any] = []  # that the other end knows by their numbers
        self.is_gone = False  # the other end

    def ask(self, do, target, args, kwargs=None):
        """Return the reply to a request; raises the built-in exception nearest to what was raised there."""
        forms = [encode(arg, self.form_of) for arg in args]
        forms_by_name = {name: encode(arg, self.form_of) for name, arg in (kwargs or {}).items()}
        try:
            send(self.writer, {"do": do, "target": target, "args": forms, "kwargs": forms_by_name})
            message = receive(self.reader)
            while "do" in message:  # the other end asks back before it replies: it calls a function that it was passed
                send(self.writer, self.answer(message))
                message = receive(self.reader)
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise EOFError("the other process has gone") from error
        if "raised" in message:
            raise exception_of(message)
        return message

    def answer(self, request):
        """Return the reply to one request of the other end: a value, or what was raised."""
        try:
            args = [decode(form, self.meant_by) for form in request["args"]]
            kwargs = {name: decode(form, self.meant_by) for name, form in request["kwargs"].items()}
            return self.operate(request, args, kwargs)
        except BaseException as error:  # SystemExit too: leaving early is no answer
            return raised(error)

    def keep(self, value):
        """Keep an object; return its number from now on."""
        self.objects.append(value)
        return len(self.objects) - 1


def raised(error):
    """An exception as a message: the names of its classes, most special first, and its text."""
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": text}


def exception_of(message):
    """The built-in exception nearest to the one raised there; `RuntimeError` for `SystemExit` and its kind."""
    for name in message["raised"]:
        # By name among the built-in ones only: the message is the completion's, and may name anything.
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(str(message.get("text", "")))
            except TypeError:  # such as UnicodeDecodeError, which wants five arguments
                continue
    return RuntimeError(str(message.get("text", "")))
