"""Values between the examiner and the completion's process, as lines of JSON. Standard library only: it runs inside.

Only plain data crosses: a value arrives as exactly the built-in or standard type it claims to be, so a `__eq__`,
`__len__` or `__class__` of the completion's own never takes part in a comparison. Anything else stays where it was
made and is known on the other side by a number.
"""

import builtins
import datetime
import json
import os
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_LINE = 1 << 24  # bytes of one message

# By tag: a type, the text of its values (by the base class, overridden methods unheard), and back.
_TEXTS: dict[str, tuple[Any, Any, Any]] = {
    "int": (int, lambda value: hex(int.__index__(value)), lambda text: int(text, 16)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "Decimal": (Decimal, str, Decimal),
    # datetime before date, which is its base class
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
# By tag: a type, and the attributes that make one again.
_PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "complex": (complex, ("real", "imag")),
    "range": (range, ("start", "stop", "step")),
    "Fraction": (Fraction, ("numerator", "denominator")),
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
_OF_TABLES = (kind for table in (_TEXTS, _PARTS) for kind, *_ in table.values())
PLAIN = (bool, float, str, *_OF_TABLES, list, dict, deque, *_COLLECTIONS.values())


def encode(value: Any, other):
    """A value in the form of JSON; `other(value)` gives the form of what is not plain data."""
    exact: Any = type(value)
    if value is None or exact is bool or (exact is int and abs(value) < 1 << 53):
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    for tag, (kind, text_of, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {tag: text_of(value)}
    for tag, (kind, parts) in _PARTS.items():
        if isinstance(value, kind):
            return {tag: [encode(getattr(value, part), other) for part in parts]}
    if isinstance(value, list):
        return [encode(item, other) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in dict.items(value)]}
    if isinstance(value, deque):
        return {"deque": [[encode(item, other) for item in deque.__iter__(value)], value.maxlen]}
    if is_namedtuple(value):
        return other(value)
    for tag, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {tag: [encode(item, other) for item in kind.__iter__(value)]}
    if exact.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), other)
    return other(value)


def is_namedtuple(value):
    """Whether the items of a value have names, which `other` has to keep."""
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def decode(form, other):
    """The value of a form; `other(tag, content)` makes what is not plain data, or raises `ValueError`."""
    if isinstance(form, list):
        return [decode(item, other) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, content),) = form.items()
    if tag in _TEXTS:
        return _TEXTS[tag][2](content)
    if tag in _PARTS:
        return _PARTS[tag][0](*(decode(part, other) for part in content))
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](decode(item, other) for item in content)
    if tag == "dict":
        return {decode(key, other): decode(item, other) for key, item in content}
    if tag == "deque":
        return deque((decode(item, other) for item in content[0]), content[1])
    return other(tag, content)


def own_streams():
    """Standard input and output, of which nobody else in this process has a use from now on."""
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return streams


def send(stream, message):
    """Write one message."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def receive(stream):
    """Read one message. `EOFError`: the other side has gone, or what it says is too long or not a message."""
    line = stream.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        raise EOFError("no message")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EOFError("not a message") from error
    if not isinstance(message, dict):
        raise EOFError("not a message")
    return message


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
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(str(message.get("text", "")))
            except TypeError:  # such as UnicodeDecodeError, which wants five arguments
                continue
    return RuntimeError(str(message.get("text", "")))
