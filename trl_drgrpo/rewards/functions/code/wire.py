"""Values between the examiner and the completion's process, as lines of JSON. Standard library only: it runs inside.

Only plain data crosses: a value arrives as exactly the built-in or standard type it claims to be, so a `__eq__`,
`__len__` or `__class__` of the completion's own never takes part in a comparison. Anything else stays where it was
made and is known on the other side by a number.
"""

import builtins
import datetime
import json
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_LINE = 1 << 24  # bytes of one message

# In this order: bool before int. Each takes what the value holds by its base class, overridden methods unheard.
_CONVERT = (
    (bool, bool),
    (int, lambda value: value if type(value) is int and abs(value) < 1 << 53 else {"int": hex(int.__index__(value))}),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda value: {"bytes": bytes.hex(value)}),
    (bytearray, lambda value: {"bytearray": bytearray.hex(value)}),
    (complex, lambda value: {"complex": [value.real, value.imag]}),
    (range, lambda value: {"range": [hex(part) for part in (value.start, value.stop, value.step)]}),
    (Fraction, lambda value: {"Fraction": [hex(value.numerator), hex(value.denominator)]}),
    (Decimal, lambda value: {"Decimal": str(value)}),
    # datetime before date, which is its base class
    (datetime.datetime, lambda value: {"datetime": datetime.datetime.isoformat(value)}),
    (datetime.date, lambda value: {"date": datetime.date.isoformat(value)}),
    (datetime.time, lambda value: {"time": datetime.time.isoformat(value)}),
    (datetime.timedelta, lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]}),
)
PLAIN = (*(kind for kind, _ in _CONVERT), list, dict, tuple, set, frozenset, deque)


def encode(value: Any, other):
    """A value in the form of JSON; `other(value)` gives the form of what is not plain data."""
    if value is None:
        return None
    for kind, convert in _CONVERT:
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, list):
        return [encode(item, other) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in dict.items(value)]}
    if isinstance(value, deque):
        return {"deque": [[encode(item, other) for item in deque.__iter__(value)], value.maxlen]}
    if is_namedtuple(value):
        return other(value)
    kind: Any
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, other) for item in kind.__iter__(value)]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
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
    if len(form) != 1:
        raise ValueError("not a value")
    ((tag, content),) = form.items()
    if tag == "int":
        return int(content, 16)
    if tag == "dict":
        return {decode(key, other): decode(item, other) for key, item in content}
    if tag in ("tuple", "set", "frozenset"):
        return getattr(builtins, tag)(decode(item, other) for item in content)
    if tag == "deque":
        return deque((decode(item, other) for item in content[0]), content[1])
    if tag in ("bytes", "bytearray"):
        return getattr(builtins, tag).fromhex(content)
    if tag == "complex":
        return complex(*content)
    if tag == "range":
        return range(*(int(part, 16) for part in content))
    if tag == "Fraction":
        return Fraction(*(int(part, 16) for part in content))
    if tag == "Decimal":
        return Decimal(content)
    if tag in ("datetime", "date", "time"):
        return getattr(datetime, tag).fromisoformat(content)
    if tag == "timedelta":
        return datetime.timedelta(*content)
    return other(tag, content)


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
