"""The side of the tests: runs them, with a stand-in for the completion. Standard library only: it runs inside.

Plain data arrives as itself. Any other object of the completion stays in its process: a [`Remote`] stands for it. Its
own `__eq__` is never asked, for it could say yes to everything:

- the class has the name of one in the tests or their setup: that class compares, from the attributes' values;
- plain data is due: the object is not equal to it;
- the tests compare two of the completion's objects, or one that they made by its class (a name in capitals) with
  anything: nobody here can tell ([`Undecided`]), so the completion fails.
"""

import ast
import builtins
import collections
import enum
import inspect
import os
import sys
import types
from typing import Any

from trl_drgrpo.rewards.functions.code import prelude, test_forms, wire

_PLAIN_TYPES = (int, float, str, list, dict, set, tuple, bool, bytes, frozenset, complex, bytearray, object)
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")

LOAD = 0
LOOK_UP = 1  # numbers of the first two objects of `candidate.Candidate`


# No `Exception`: `except Exception` in a test must not swallow it.
class Unsupported(BaseException):
    """A test that nobody here can decide, whatever the completion. No test catches it."""


class Undecided(Unsupported):
    """A test that nobody here can decide for what the completion returned."""


class Channel(wire.Peer):
    """The connection to the completion's process."""

    def __init__(self, reader, writer, namespace, shared=()):
        super().__init__(reader, writer)
        self.namespace = namespace  # of the tests
        self.shared = shared  # names in the setup, which the completion has too
        self.uses = 0  # of the completion by the tests, a name that it lacks included

    def use(self, do, target, args, kwargs=None):
        """One operation on an object of the completion."""
        self.uses += 1
        reply = self.ask(do, target, args, kwargs)
        for at, form in reply.get("changed", {}).items():
            old: Any = args[int(at)]
            new = wire.decode(form, self.meant_by)
            if type(old) is not type(new):  # the reply is the completion's, and may claim anything
                raise ValueError("not what was passed")
            # In place: the tests still hold the container that they passed.
            old.clear()
            refill = getattr(old, "update", None) or old.extend
            refill(new)
        return wire.decode(reply["value"], self.meant_by)

    def look_up(self, name):
        """The completion's object of that name; raises `NameError`."""
        value = self.use("call", LOOK_UP, [name])
        if type(value) is Remote:
            self.uses -= 1  # a function is used when it is called; plain data is used at once
            vars(value).update(_name=name, _is_asked=True)
        return value

    def operate(self, request, args, kwargs):
        """Call a function that was passed to the completion: the only request that is granted."""
        return {"value": wire.encode(self.objects[request["target"]](*args), self.form_of)}

    def form_of(self, value):
        if type(value) is Remote:  # not `isinstance`: its `__class__` may be one of the tests
            return {"object": value._target}
        if any(value is kind for kind in _PLAIN_TYPES):
            return {"type": value.__name__}
        kind = type(value)
        if wire.is_namedtuple(value):
            items = [wire.encode(item, self.form_of) for item in tuple.__iter__(value)]
            return {"namedtuple": [kind.__name__, list(kind._fields), items]}
        if isinstance(value, enum.Enum) and kind.__name__ in self.shared:
            return {"enum": [kind.__name__, value.name]}
        if not callable(value):
            raise Unsupported(f"a test passes on a {kind.__name__}, which is not plain data")
        return {"callback": self.keep(value)}

    def meant_by(self, tag, content):
        if tag not in ("namedtuple", "object"):  # types, enumerations and functions travel the other way only
            raise ValueError("not a value")
        number, kind, *content = content
        test_class = self.namespace.get(kind)
        if not isinstance(test_class, type) or test_class.__module__ != "tests":
            test_class = None  # the name means a class only if the tests or their setup have made it
        if tag == "object":
            if isinstance(test_class, enum.EnumMeta):
                return test_class[content[0]]
            if test_class is not None and issubclass(test_class, wire.PLAIN):
                test_class = None  # an object of that class would have come as plain data
            return Remote(self, number, test_class)
        fields = tuple(content[0])
        is_of_tests = getattr(test_class, "_fields", None) == fields
        tuple_class: Any = test_class
        if not is_of_tests:
            tuple_class = type(kind, (_Named, collections.namedtuple(kind, fields)), {})
        value = tuple_class._make(wire.decode(item, self.meant_by) for item in content[1])
        if not is_of_tests:  # its methods stay with the completion
            value._remote = Remote(self, number)
        return value


class Solution(types.ModuleType):
    """The completion as a module, for tests that import from it."""

    def __init__(self, channel):
        super().__init__("solution")
        self._channel = channel

    def __getattr__(self, name):
        if name.startswith("__"):  # an import asks for these: `__all__`, `__path__`
            raise AttributeError(name)
        try:
            return self._channel.look_up(name)
        except NameError as error:
            raise AttributeError(name) from error


class Remote:
    """An object of the completion: it can be used, but has no say in a comparison (see the module)."""

    def __init__(self, channel, target, own=None):
        if type(target) is not int:
            raise ValueError("not a value")
        # own: the class of the tests that has its class's name; name: under which the tests know it; is_asked: what
        # the tests call whatever the completion is; is_made: by the tests, by calling a class
        vars(self).update(_channel=channel, _target=target, _own=own, _name="", _is_asked=False, _is_made=False)

    # `isinstance(f(1), Point)` holds for a class of the tests, and `__eq__` of theirs often asks that first.
    @property
    def __class__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._own or Remote

    def __call__(self, *args, **kwargs):
        value = self._use("call", args, kwargs)
        # With a capital initial it is a class, and what it returns is an object that the tests have made.
        if type(value) is Remote and self._name[:1].isupper():
            vars(value)["_is_made"] = True
        return value

    def __instancecheck__(self, instance):
        return type(instance) is Remote and bool(instance._use("isinstance", (self,)))

    def __hash__(self):
        test_class = self._own
        if test_class is None or test_class.__hash__ is object.__hash__:
            return 0  # one bucket of a set for all, so that `__eq__` is asked, which knows what cannot be decided
        return test_class.__hash__(self)

    def __getattr__(self, name) -> Any:
        if name.startswith("__"):  # Python's own protocols ask for these; no test does
            raise AttributeError(name)
        test_class = self._own
        asking = sys._getframe(1).f_code  # the code from which the attribute is read
        if test_class is not None and hasattr(test_class, name) and _is_method_of(asking, test_class):
            # `other.key()` in a `__eq__` of the tests must not call the completion's method.
            attribute = inspect.getattr_static(test_class, name)
            return attribute.__get__(self, test_class) if hasattr(attribute, "__get__") else attribute
        value = self._use("getattr", (name,))
        if type(value) is Remote and self._is_made:  # a method of an object that the tests have made
            vars(value)["_is_asked"] = True
        return value

    def _use(self, do, args, kwargs=None) -> Any:
        try:
            return self._channel.use(do, self._target, args, kwargs)
        except Unsupported as error:
            if do == "call" and self._is_asked:  # any completion would be called like this: the test is to blame
                raise
            # The completion returned the object, and might have returned plain data, of which this can be asked.
            raise Undecided(str(error)) from error


def _forwarded(do):
    def method(self, *args):
        return self._use(do, args)

    return method


# `iter`: `in` goes through it, too, so that the value looked for stays on this side.
for _do in ("setattr", "getitem", "setitem", "delitem", "len", "bool", "iter", "next", "str", "repr"):
    setattr(Remote, f"__{_do}__", _forwarded(_do))


def _binary(operation):
    def method(self, other):
        test_class = self._own
        kind = type(other)
        if test_class is not None and getattr(test_class, operation, None) is not getattr(object, operation, None):
            return getattr(test_class, operation)(self, other)  # of the tests
        if self is other and operation == "__eq__":
            return True
        # `NotImplemented`, here and below: Python asks the other operand next, and then `==` means identity.
        if other is None:
            return NotImplemented
        is_comparison = operation.strip("_") in _COMPARISONS
        is_remote = kind is Remote
        if self._is_made or (is_remote and (is_comparison or other._is_made)):
            # The completion's own class would say whether its answer is right.
            raise Undecided(
                f"a test has an object of the completion's own class judged by that class ({operation}): compare its "
                "attributes, or define the class in setup"
            )
        # No object of the completion is equal to plain data, nor to what a class of the tests compares.
        is_of_tests = kind.__module__ == "tests" and kind.__eq__ is not object.__eq__
        if is_comparison and not (isinstance(other, wire.PLAIN) or is_of_tests):
            raise Undecided(f"a test compares an object of the completion with a {kind.__name__}, unknown here")
        return NotImplemented

    method.__name__ = operation
    return method


for _operation in (*_COMPARISONS, *_ARITHMETIC):
    setattr(Remote, f"__{_operation}__", _binary(f"__{_operation}__"))


def _is_method_of(code, test_class):
    name = getattr(code, "co_qualname", "")
    return any(name.startswith(f"{base.__qualname__}.") for base in test_class.__mro__)


class _Named:
    """A named tuple of the completion's own class: its items are plain data, its methods stay where they are."""

    _remote: "Remote"

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._remote, name)


def examine():
    """Read one job from standard input, write what became of it, a line each, to standard output."""
    reader, writer = wire.own_streams()
    job = wire.receive(reader)
    prelude.allow_long_integers()
    tally = test_forms.Tally()
    # First all that needs no completion: what fails here is the row's fault.
    try:
        prepared = prepare(job["tests"], job["setup"], job["entry_point"], tally)
    except BaseException as error:
        wire.send(writer, {"broken": f"{type(error).__name__}: {error}"})
        return
    namespace, tests, _ = prepared
    wire.send(writer, {"tests": len(tests)})
    shared = compile(job["setup"], "<setup>", "exec").co_names
    replies = os.fdopen(job["read_fd"], "rb")
    requests = os.fdopen(job["write_fd"], "wb")
    channel = Channel(replies, requests, namespace, shared)
    try:
        for passed in verdicts(channel, job, prepared, tally):
            wire.send(writer, {"passed": passed})
    except Undecided as error:
        wire.send(writer, {"undecided": str(error)})
    except Unsupported as error:
        wire.send(writer, {"broken": str(error)})
    except EOFError:
        wire.send(writer, {"gone": True})


def verdicts(channel, job, prepared, tally):
    """Yield whether the code loads, and then whether it passes each test, from the job's `first` on."""
    namespace, tests, names = prepared
    sys.modules["solution"] = Solution(channel)
    try:
        channel.ask("call", LOAD, [job["setup"], job["code"]])
        for name in names:
            try:
                namespace[name] = channel.look_up(name)
            except NameError:  # missed when a test uses it
                # Nor may a stub of the setup, or `gcd` of the prelude, answer for a completion that lacks the name.
                namespace.pop(name, None)
                namespace["__builtins__"].pop(name, None)
    except Exception:
        if channel.is_gone:
            raise
        yield False
        return
    yield True
    for index, (preparation, test) in enumerate(tests):
        # After a hang or a crash the job begins again behind the test at which it happened. What leads to the earlier
        # tests is run again, as later ones may use it.
        is_due = index >= job["first"]
        tally.start()
        passed = run(preparation, namespace)
        if is_due:
            passed = run(test, namespace) and passed
        if channel.is_gone:
            raise EOFError
        if is_due:
            # Where earlier tests ended the process, the completion decided that this one finds nothing to use.
            if passed and not (tally.checks or channel.uses or job["first"]):
                raise Unsupported("a test that checks nothing and never uses the completion")
            # One that checks nothing of what it asked for has failed.
            passed = passed and tally.checks > 0 and not tally.has_failed
            yield passed
            if job["stop_at_first"] and not passed:
                return


def run(code, namespace):
    """Tell whether it ran without an exception; whatever it raises is put down to the completion."""
    try:
        exec(code, namespace)
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
        return False
    return True


def prepare(tests, setup, entry_point, tally=None):
    """Everything that needs no completion: the namespace of the tests; per test the code that leads to it and the code
    that is it; the names to ask the completion for."""
    module = sys.modules["tests"] = types.ModuleType("tests")
    namespace = module.__dict__
    namespace.update((tally or test_forms.Tally()).names)
    namespace["__builtins__"] = {**vars(builtins), **prelude.names()}  # the completion's side gives them to setup, too
    setup = test_forms.counted(setup)
    exec(compile(setup, "<setup>", "exec"), namespace)
    is_text = isinstance(tests, str)
    if is_text:
        tests = [tests]
    split = test_forms.split_tests([*map(test_forms.counted, tests)], setup, entry_point, is_text=is_text)
    codes = [(_compiled(before), _compiled(test)) for before, test in split]
    return namespace, codes, test_forms.names_to_ask(split, namespace, entry_point, setup)


def _compiled(nodes):
    return compile(ast.Module(body=list(nodes), type_ignores=[]), "<tests>", "exec")
