"""The side of the tests: runs them, asks the completion's process for values, and decides. It runs inside, alone.

The tests run in this process, where no line of the completion ever does. Names that the tests use and do not define
stand for objects of the completion's process; calling one sends the arguments there and gets plain data back. So what
is compared with what, and the expected values, are out of the completion's sight and reach.
"""

import ast
import builtins
import os
import sys
import types

from trl_drgrpo.rewards.code import wire

# Test sets of this field use these without importing them.
_COMMON_MODULES = ("math", "cmath", "collections", "itertools", "re", "random", "functools", "string", "copy")
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
        namespace, tests, names = prepare(job["tests"], job["setup"], job["entry_point"])
    except BaseException as error:
        wire.send(writer, {"broken": f"{type(error).__name__}: {error}"})
        return
    wire.send(writer, {"tests": len(tests)})
    channel = Channel(os.fdopen(job["read_fd"], "rb"), os.fdopen(job["write_fd"], "wb"))
    try:
        for verdict in verdicts(channel, job, namespace, tests, names):
            wire.send(writer, verdict)
    except Unsupported as error:
        wire.send(writer, {"broken": str(error)})
    except EOFError:
        wire.send(writer, {"gone": True})


def verdicts(channel, job, namespace, tests, names):
    """Yield `{"loaded": bool}` and then `{"passed": bool}` per test, from the job's `first` on."""
    try:
        channel.ask({"do": "load", "source": job["setup"] + "\n" + job["code"]})
        for name in names:
            try:
                namespace[name] = channel.ask({"do": "look_up", "name": name})
            except NameError:  # missed when a test uses it
                namespace.pop(name, None)
    except Exception as error:
        if isinstance(error, EOFError) and channel.is_gone:
            raise
        yield {"loaded": False}
        return
    yield {"loaded": True}
    for index, (preparation, test) in enumerate(tests):
        passed = run(preparation, namespace)
        if index >= job["first"]:
            passed = run(test, namespace) and passed
        if channel.is_gone:
            raise EOFError
        if index >= job["first"]:
            yield {"passed": passed}
            if job["stop_at_first"] and not passed:
                return


def run(code, namespace):
    """Whether it ran without an exception; whatever it raises is put down to the completion."""
    try:
        exec(code, namespace)
    except Exception:
        return False
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        return False
    return True


def prepare(tests, setup, entry_point):
    """Everything that needs no completion.

    Returns:
        `(dict, list, list)`: the namespace of the tests; per test the code that leads to it and the code that is it;
        the names to ask the completion for.
    """
    module = sys.modules["tests"] = types.ModuleType("tests")
    namespace = module.__dict__
    exec(compile(setup, "<setup>", "exec"), namespace)
    if isinstance(tests, str):
        split = split_tests(ast.parse(tests), entry_point)
    else:
        split = [([], ast.parse(test).body) for test in tests]
    if not split:
        raise ValueError("no test found: an assert, a function test_..., or check(candidate) with an entry point")
    names = free_names([node for part in split for half in part for node in half], namespace)
    for name in [name for name in names if name in _COMMON_MODULES]:
        namespace[name] = __import__(name)
        names.remove(name)
    if entry_point:
        names = list(dict.fromkeys([*names, entry_point]))
    return namespace, [(_compiled(before), _compiled(test)) for before, test in split], names


def split_tests(tree, entry_point):
    """A source text as tests: a list of (statements that lead to it, statements that are it)."""
    split = []
    before = []
    check = None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            continue  # its names are the completion's anyway
        if _is_test(node):
            split.append((before, [node]))
            before = []
            continue
        before.append(node)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not node.args.args:
            split.append((before, ast.parse(node.name + "()").body))
            before = []
        elif isinstance(node, ast.FunctionDef) and node.name == "check":
            check = node
    if not split and check is not None and entry_point:
        split.append((before, ast.parse(f"check({entry_point})").body))
    return split


def _is_test(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check":
        return True
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node))


def free_names(nodes, namespace):
    """Names that are read and nowhere made, in order of appearance: those of the completion."""
    used, made = [], set(namespace) | set(dir(builtins))
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used.append(node.id)
            else:
                made.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return [name for name in dict.fromkeys(used) if name not in made]


def _compiled(nodes):
    return compile(ast.Module(body=list(nodes), type_ignores=[]), "<tests>", "exec")


class Channel:
    """Requests to the completion's process."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.callbacks = []
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

    def operate(self, do, target, args, kwargs=None):
        """One operation on an object of the completion."""
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
