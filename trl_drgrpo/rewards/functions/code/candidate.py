"""The side of the completion: runs its code and answers the examiner's calls. Standard library only: it runs inside.

This process is the completion's. It may take over everything here, and all it gains is what it could do anyway:
say what the value of a call is. It is never told which value is due.
"""

import builtins
import collections
import enum
import operator
import os
import sys
import types

from trl_drgrpo.rewards.functions.code import wire


def serve():
    """Answer requests on standard input until it ends; the code itself finds it empty and its output unread."""
    reader, writer = wire.own_streams()
    candidate = Candidate(reader, writer)
    while True:
        try:
            request = wire.receive(reader)
        except EOFError:
            return
        wire.send(writer, candidate.answer(request))


def run_script():
    """Run one program: a line with its length, its text, and then what is its own standard input."""
    size = int(b"".join(iter(lambda: os.read(0, 1).strip(), b"")))
    source = b""
    while len(source) < size and (chunk := os.read(0, size - len(source))):
        source += chunk
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<completion>", "exec"), main.__dict__)


class Candidate:
    """The completion's module and the objects that the examiner knows by number."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.module = types.ModuleType("solution")
        self.objects = []

    def answer(self, request):
        """The reply to one request: a value, or what was raised."""
        try:
            if request["do"] == "load":
                return self.load(request["source"])
            if request["do"] == "look_up":
                return {"value": wire.encode(self.look_up(request["name"]), self.keep)}
            return self.operate(request)
        except BaseException as error:  # SystemExit too: leaving early is no answer
            return wire.raised(error)

    def load(self, source):
        sys.modules["solution"] = self.module
        exec(compile(source, "<completion>", "exec"), self.module.__dict__)
        return {"value": None}

    def look_up(self, name):
        if hasattr(self.module, name):
            return getattr(self.module, name)
        solution = getattr(self.module, "Solution", None)
        if isinstance(solution, type) and hasattr(solution, name):  # LeetCode's form
            return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)
        raise NameError(f"name {name!r} is not defined")

    def operate(self, request):
        """One operation on an object: a call, or a built-in function or one of `operator` by its name."""
        do, target = request["do"], self.objects[request["target"]]
        args = [wire.decode(form, self.theirs) for form in request["args"]]
        kwargs = {name: wire.decode(form, self.theirs) for name, form in request["kwargs"].items()}
        if do != "call":
            operation = getattr(builtins, do, None) or getattr(operator, do)
            return {"value": wire.encode(operation(target, *args), self.keep)}
        value = wire.encode(target(*args, **kwargs), self.keep)
        return {"value": value, "changed": self.changed(args, request["args"])}

    def changed(self, args, before):
        """Containers that the call changed, by position, so that `f(items)` may sort in place."""
        containers = (list, dict, set, bytearray, collections.deque)
        after = [wire.encode(arg, self.keep) if isinstance(arg, containers) else None for arg in args]
        return {str(at): form for at, form in enumerate(after) if form is not None and form != before[at]}

    def keep(self, value):
        """An object by its number, with what tells its kind on the other side: names, never a claim of equality."""
        self.objects.append(value)
        number, kind = len(self.objects) - 1, type(value).__name__
        if wire.is_namedtuple(value):
            items = [wire.encode(item, self.keep) for item in tuple.__iter__(value)]
            return {"namedtuple": [number, kind, list(type(value)._fields), items]}
        member = value._name_ if isinstance(value, enum.Enum) else None
        return {"object": [number, kind, member]}

    def theirs(self, tag, content):
        if tag == "object":
            return self.objects[content]
        if tag == "type":
            return getattr(builtins, content)
        if tag == "enum":
            return getattr(self.module, content[0])[content[1]]
        if tag == "namedtuple":
            kind, fields, items = content
            own = getattr(self.module, kind, None)
            if own is None or getattr(own, "_fields", None) != tuple(fields):
                own = collections.namedtuple(kind, fields)
            return own._make(wire.decode(item, self.theirs) for item in items)
        return lambda *args: self.call_back(content, args)

    def call_back(self, number, args):
        """Call a function of the tests that was passed as an argument."""
        wire.send(self.writer, {"callback": number, "args": [wire.encode(arg, self.keep) for arg in args]})
        reply = wire.receive(self.reader)
        if "raised" in reply:
            raise wire.exception_of(reply)
        return wire.decode(reply["value"], self.theirs)
