"""The side of the tests: runs them, asks the completion's process for values, and decides. It runs inside, alone.

The tests run in this process, where no line of the completion ever does. Names of the completion (see `entries.py`)
stand for objects of its process; calling one sends the arguments there and gets plain data back. So what
is compared with what, and the expected values, are out of the completion's sight and reach.
"""

import ast
import os
import sys
import types

from trl_drgrpo.rewards.functions.code import checks, entries, wire

_PLAIN_TYPES = (int, float, str, list, dict, set, tuple, bool, bytes, frozenset, complex, bytearray, object)


class Unsupported(BaseException):
    """A test that passes on what cannot cross: nothing that a test catches."""


def judge():
    """Read one job from standard input, write what became of it, a line each, to standard output."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    job = wire.receive(reader)
    try:
        tally = checks.Tally()
        namespace, tests, names = prepare(job["tests"], job["setup"], job["entry_point"], tally)
    except BaseException as error:
        wire.send(writer, {"broken": f"{type(error).__name__}: {error}"})
        return
    wire.send(writer, {"tests": len(tests)})
    channel = Channel(os.fdopen(job["read_fd"], "rb"), os.fdopen(job["write_fd"], "wb"))
    try:
        for verdict in verdicts(channel, job, (namespace, tests, names), tally):
            wire.send(writer, verdict)
    except Unsupported as error:
        wire.send(writer, {"broken": str(error)})
    except EOFError:
        wire.send(writer, {"gone": True})


def verdicts(channel, job, prepared, tally):
    """Yield `{"loaded": bool}` and then `{"passed": bool}` per test, from the job's `first` on."""
    namespace, tests, names = prepared
    sys.modules["solution"] = Solution(channel)
    try:
        channel.ask({"do": "load", "source": job["setup"] + "\n" + job["code"]})
        for name in names:
            try:
                namespace[name] = channel.look_up(name)
            except NameError:  # missed when a test uses it
                namespace.pop(name, None)
    except Exception as error:
        if isinstance(error, EOFError) and channel.is_gone:
            raise
        yield {"loaded": False}
        return
    yield {"loaded": True}
    for index, (preparation, test) in enumerate(tests):
        tally.start()
        passed = run(preparation, namespace)
        if index >= job["first"]:
            passed = run(test, namespace) and passed
        if channel.is_gone:
            raise EOFError
        if index >= job["first"]:
            passed = passed and has_checked(tally, channel)
            yield {"passed": passed}
            if job["stop_at_first"] and not passed:
                return


def has_checked(tally, channel):
    """Whether a test that ran to its end says anything; one that checks nothing of what it asked for has failed."""
    if not tally.checks and not channel.uses:
        raise Unsupported("a test that checks nothing and never uses the completion")
    return tally.checks > 0 and not tally.has_failed


def run(code, namespace):
    """Whether it ran without an exception; whatever it raises is put down to the completion."""
    try:
        exec(code, namespace)
    except Exception:
        return False
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        return False
    return True


def prepare(tests, setup, entry_point, tally=None):
    """Everything that needs no completion.

    Returns:
        `(dict, list, list)`: the namespace of the tests; per test the code that leads to it and the code that is it;
        the names to ask the completion for.
    """
    module = sys.modules["tests"] = types.ModuleType("tests")
    namespace = module.__dict__
    namespace.update((tally or checks.Tally()).names())
    setup = checks.counted(setup)
    exec(compile(setup, "<setup>", "exec"), namespace)
    trees = [checks.counted(text) for text in ([tests] if isinstance(tests, str) else tests)]
    split = entries.split_tests(trees, setup, entry_point, is_text=isinstance(tests, str))
    codes = [(_compiled(before), _compiled(test)) for before, test in split]
    names = entries.names_to_ask(split, [code for pair in codes for code in pair], namespace, entry_point)
    return namespace, codes, names


def _compiled(nodes):
    return compile(ast.Module(body=list(nodes), type_ignores=[]), "<tests>", "exec")


class Channel:
    """Requests to the completion's process."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.callbacks = []
        self.uses = 0  # of the completion by the tests, a name that it lacks included
        self.is_gone = False

    def ask(self, request, args=()):
        """The value of a request; raises the built-in exception nearest to what was raised there."""
        try:
            wire.send(self.writer, request)
            reply = wire.receive(self.reader)
            while "callback" in reply:
                wire.send(self.writer, self.call_back(reply))
                reply = wire.receive(self.reader)
        except (EOFError, OSError) as error:
            self.is_gone = True
            raise EOFError("the completion's process has gone") from error
        if "raised" in reply:
            raise wire.exception_of(reply)
        for at, form in reply.get("changed", {}).items():
            self._update(args[int(at)], wire.decode(form, self.theirs))
        return wire.decode(reply["value"], self.theirs)

    def look_up(self, name):
        """What the completion calls so; raises `NameError`."""
        self.uses += 1
        value = self.ask({"do": "look_up", "name": name})
        self.uses -= type(value) is Remote  # not before it is called
        return value

    def operate(self, do, target, args, kwargs=None):
        """One operation on an object of the completion."""
        self.uses += 1
        request = {"do": do, "target": target, "args": [wire.encode(arg, self.keep) for arg in args]}
        request["kwargs"] = {name: wire.encode(arg, self.keep) for name, arg in (kwargs or {}).items()}
        return self.ask(request, args)

    def call_back(self, request):
        try:
            args = [wire.decode(form, self.theirs) for form in request["args"]]
            return {"value": wire.encode(self.callbacks[int(request["callback"])](*args), self.keep)}
        except (Exception, Unsupported) as error:  # of what the completion passed: its own affair
            return wire.raised(error)

    def keep(self, value):
        """The form of an argument that is not plain data."""
        if type(value) is Remote:
            return {"object": object.__getattribute__(value, "_target")}
        if any(value is kind for kind in _PLAIN_TYPES):
            return {"type": value.__name__}
        if not callable(value):
            raise Unsupported(f"a test passes on a {type(value).__name__}, which is not plain data")
        self.callbacks.append(value)
        return {"callback": len(self.callbacks) - 1}

    def theirs(self, tag, content):
        """What stands for an object of the completion."""
        if tag != "object" or type(content) is not int:
            raise ValueError("not a value")
        return Remote(self, content)

    def _update(self, old, new):
        if type(old) is not type(new):
            raise ValueError("not what was passed")
        if isinstance(old, (list, bytearray)):
            old[:] = new
        elif isinstance(old, (dict, set)):
            old.clear()
            old.update(new)


class Solution(types.ModuleType):
    """The completion as a module, for tests that import from it."""

    def __init__(self, channel):
        super().__init__("solution")
        self._channel = channel

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._channel.look_up(name)
        except NameError as error:
            raise AttributeError(name) from error


class Remote:
    """An object of the completion: it can be used, but never takes part in a comparison."""

    def __init__(self, channel, target):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_target", target)

    def __call__(self, *args, **kwargs):
        return _operate(self, "call", args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _operate(self, "getattr", (name,))

    def __setattr__(self, name, value):
        _operate(self, "setattr", (name, value))

    def __getitem__(self, key):
        return _operate(self, "getitem", (key,))

    def __setitem__(self, key, value):
        _operate(self, "setitem", (key, value))

    def __delitem__(self, key):
        _operate(self, "delitem", (key,))

    def __len__(self):
        return _operate(self, "len", ())

    def __bool__(self):
        return _operate(self, "bool", ())

    def __iter__(self):
        # `in` goes through here too: the value looked for stays on this side.
        return _items(_operate(self, "iter", ()))

    def __next__(self):
        return _operate(self, "next", ())

    def __str__(self):
        return _operate(self, "str", ())


def _operate(remote, do, args, kwargs=None):
    channel = object.__getattribute__(remote, "_channel")
    return channel.operate(do, object.__getattribute__(remote, "_target"), args, kwargs)


def _items(iterator):
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
