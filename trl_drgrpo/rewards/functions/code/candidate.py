"""The side of the completion: runs its code and answers the examiner's calls. Standard library only: it runs inside.

This process is the completion's. It may take over everything here, and all it gains is what it could do anyway:
say what the value of a call is. It is never told which value is due.
"""

import __future__

import builtins
import collections
import contextlib
import enum
import operator
import os
import sys
import types

from trl_drgrpo.rewards.functions.code import prelude, wire

_FUTURE = 0  # the flags of all `from __future__ import ...`, to carry them from the setup to the code
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


def serve():
    """Answer requests on standard input until it ends; the code itself finds it empty and its output unread."""
    candidate = Candidate(*wire.own_streams())
    prelude.install()
    with contextlib.suppress(EOFError):
        while True:
            wire.send(candidate.writer, candidate.answer(wire.receive(candidate.reader)))


def run_script():
    """Run one program: a line with its length, its text, and then what is its own standard input."""
    # Byte by byte, and by os.read: a buffered reader would take what is the program's own input.
    digits = iter(lambda: os.read(0, 1).strip(), b"")  # up to the line end
    size = int(b"".join(digits))
    source = b""
    while len(source) < size:
        chunk = os.read(0, size - len(source))
        if not chunk:
            break
        source += chunk
    prelude.install()
    # A module of its own by that name: `if __name__ == "__main__":` holds, and no name of ours is among its globals.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<completion>", "exec"), main.__dict__)


class Candidate(wire.Peer):
    """The completion's module and the objects that the examiner knows by number; its first two requests are known."""

    def __init__(self, reader, writer):
        super().__init__(reader, writer)
        self.module = types.ModuleType("solution")
        self.objects += [self.load, self.look_up]  # numbers 0 and 1, as `examiner` has them

    def load(self, setup, source):
        """Run the setup, then the code. Code that is none by itself continues the setup's last function."""
        sys.modules["solution"] = self.module
        preparation = compile(setup, "<setup>", "exec")
        try:
            # By itself: `from __future__` has to come first in a text.
            code = compile(source, "<completion>", "exec", preparation.co_flags & _FUTURE)
        except SyntaxError:
            # HumanEval's setup ends in a function's head and docstring, and the completion may be its body alone.
            code = compile(f"{setup}\n{source}", "<completion>", "exec")
        else:
            exec(preparation, self.module.__dict__)
        exec(code, self.module.__dict__)

    def look_up(self, name):
        # Of the module, not of the built-in ones: a name that the code does not define is none of its answers.
        if hasattr(self.module, name):
            return getattr(self.module, name)
        solution = getattr(self.module, "Solution", None)
        if isinstance(solution, type) and hasattr(solution, name):  # LeetCode's form
            return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)
        raise NameError(f"name {name!r} is not defined")

    def operate(self, request, args, kwargs):
        """One operation on an object: a call, or a built-in function or one of `operator` by its name."""
        do = request["do"]
        target = self.objects[request["target"]]
        if do != "call":
            operation = getattr(builtins, do, None) or getattr(operator, do)
            return {"value": wire.encode(operation(target, *args), self.form_of)}
        value = wire.encode(target(*args, **kwargs), self.form_of)
        # The arguments are copies of those of the tests. Containers that the call has changed go back by position, so
        # that `f(items)` may sort in place.
        changed = {}
        for at, arg in enumerate(args):
            if isinstance(arg, (list, dict, set, bytearray, collections.deque)):
                form = wire.encode(arg, self.form_of)
                if form != request["args"][at]:
                    changed[str(at)] = form  # JSON has no numbers as keys
        return {"value": value, "changed": changed}

    def form_of(self, value):
        """An object by its number, with what tells its kind on the other side: names, never a claim of equality."""
        number = self.keep(value)
        kind = type(value).__name__
        if wire.is_namedtuple(value):
            items = [wire.encode(item, self.form_of) for item in tuple.__iter__(value)]
            return {"namedtuple": [number, kind, list(type(value)._fields), items]}
        name = value._name_ if isinstance(value, enum.Enum) else None
        return {"object": [number, kind, name]}

    def meant_by(self, tag, content):
        if tag == "object":
            return self.objects[content]
        if tag == "type":
            return getattr(builtins, content)
        if tag == "enum":
            return getattr(self.module, content[0])[content[1]]
        if tag == "namedtuple":
            kind, fields, items = content
            # The completion's class of that name, if it has these fields: its code may call the class's methods.
            tuple_class = getattr(self.module, kind, None)
            if tuple_class is None or getattr(tuple_class, "_fields", None) != tuple(fields):
                tuple_class = collections.namedtuple(kind, fields)
            return tuple_class._make(wire.decode(item, self.meant_by) for item in items)
        # A function of the tests that was passed as an argument.
        return lambda *args: wire.decode(self.ask("call", content, args)["value"], self.meant_by)
