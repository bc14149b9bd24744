"""The tests in a text: where they are, what they ask for, what they check. Standard library only: it runs inside.

Test sets contain entries in which nothing is ever asserted: a test that nobody calls, an `assert` of a tuple, a
comparison as a statement. Run as they are, they pass any code; so checks are counted when they are carried out.

Text that looks like a test and cannot be run raises `ValueError`: such a test is broken, whatever the completion, and
must not pass it.

Whoever defines the helper of a test (`assert deep_equal(f(3), [9])`) decides the test, so a name is only asked of the
completion where it is sure to be what is tested: the entry point, what is imported from `solution`, or else the only
name that nobody defines. Any other name that nobody defines raises `ValueError`.
"""

import ast
import builtins
import collections
import dis
import functools
import importlib.util
import inspect
import itertools
import typing
from typing import Any

MARKS = {"__checked__", "__noted__"}
_ALWAYS_TRUE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Lambda, ast.GeneratorExp, ast.JoinedStr)
_PLACE: Any = {"lineno": 1, "col_offset": 0, "end_lineno": 1, "end_col_offset": 0}


class Tally:
    """Counts the checks of one test while it runs."""

    def __init__(self):
        self.start()

    def start(self):
        """Begin a test."""
        self.checks, self.has_failed = 0, False

    def checked(self, value, is_final):
        """An assert: one that fails fails its test, even if an `except` of the test swallows it."""
        holds = bool(value)
        self.checks += 1
        self.has_failed |= is_final and not holds
        return holds

    def noted(self, value=None):
        """A check in another form; what it says is said by raising."""
        self.checks += 1
        return value

    def names(self):
        """Functions that the trees of [`counted`] call, by name."""
        return {"__checked__": self.checked, "__noted__": self.noted}


def counted(source):
    """A source text as a tree in which checks are counted when they are carried out."""
    tree = ast.parse(source)
    tree.body = _counted(tree.body, True)
    return tree


def _counted(nodes, is_final):
    return [new for node in nodes for new in _counted_one(node, is_final)]


def _counted_one(node, is_final):
    if isinstance(node, ast.Assert):
        _count_assert(node, is_final)
    elif isinstance(node, ast.Expr) and called(node.value, ast.Attribute).startswith("assert"):
        node.value = _call("__noted__", node.value)  # numpy.testing.assert_allclose and its kind
    elif isinstance(node, ast.If) and _fails([*node.body, *node.orelse]):
        node.test = _call("__noted__", node.test)  # if f(1) != 1: raise AssertionError
    elif isinstance(node, ast.Try) and _fails([*node.body, *node.orelse]):
        for handler in node.handlers:  # try: f(-1); assert False; except ValueError: pass
            handler.body.insert(0, ast.Expr(_call("__noted__"), **_PLACE))
    is_second_try = isinstance(node, ast.Try) and any(_checks(handler.body) for handler in node.handlers)
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(inner := getattr(node, field, None), list):
            setattr(node, field, _counted(inner, is_final and not (is_second_try and field == "body")))
    if isinstance(node, (ast.With, ast.AsyncWith)) and any(_expects_error(item) for item in node.items):
        return [node, ast.Expr(_call("__noted__"), **_PLACE)]
    return [node]


def _count_assert(node, is_final):
    if isinstance(node.test, _ALWAYS_TRUE):
        raise ValueError(f"an assert that is always true: {ast.unparse(node)[:200]}")
    if isinstance(node.msg, ast.Constant) and not isinstance(node.msg.value, str):
        raise ValueError(f"an assert with a value in place of its message: {ast.unparse(node)[:200]}")
    if not isinstance(node.test, ast.Constant) or not node.test.value:
        node.test = _call("__checked__", node.test, ast.Constant(is_final, **_PLACE))


def _call(name, *args):
    return ast.Call(ast.Name(name, ast.Load(), **_PLACE), list(args), [], **_PLACE)


def called(node, kind=(ast.Name, ast.Attribute)):
    """Name of the function or method that a node calls; empty if it calls none."""
    func = node.func if isinstance(node, ast.Call) and isinstance(node.func, kind) else None
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def _expects_error(item):
    return called(item.context_expr) in ("raises", "assertRaises", "assertRaisesRegex")


def _fails(nodes):
    """Whether there is a statement that says: getting here is a failure."""
    return any(
        isinstance(inner, ast.Raise)
        or (isinstance(inner, ast.Assert) and isinstance(inner.test, ast.Constant) and not inner.test.value)
        for inner in _within(nodes)
    )


def _checks(nodes):
    return any(isinstance(inner, (ast.Assert, ast.Raise)) for inner in _within(nodes))


def _within(nodes):
    return itertools.chain.from_iterable(map(ast.walk, nodes))


_TAKE_FUNCTIONS = ("check", "map", "filter")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def split_tests(trees, setup, entry_point, is_text):
    """
    Trees of [`counted`] as tests: per test the statements that lead to it, and those that are it.

    A text (`is_text`) holds any number of tests, an entry of a list is one. `ValueError`: a tree has none, or one that
    nobody here can run.
    """
    defined = {node.name: node for tree in (setup, *trees) for node in tree.body if isinstance(node, _FUNCTIONS)}
    split = []
    for tree in trees:
        body = _without_guards(tree.body, defined)
        _check_imports(body)
        # Calls come last: a test function may use what is defined below it.
        parts, rest = _split([*body, *_calls_of_tests(body, defined, entry_point)], defined)
        if not parts:
            raise ValueError("no test found: an assert, a function test_..., or check(candidate) with an entry point")
        whole = [node for before, test in parts for node in (*before, *test)]
        split += parts if is_text else [([], whole + rest)]
    return split


def _split(statements, defined):
    parts, before = [], []
    for node in statements:
        if _is_test(node, defined):
            parts.append((before, [node]))
            before = []
        else:
            before.append(node)
    return parts, before


def _is_test(node, defined):
    return not isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and bool(MARKS & reached([node], defined))


def _without_guards(body, defined):
    """`if __name__ == "__main__":` counts as true if it tests; else it goes, for what it would start is not here."""
    plain = []
    for node in body:
        if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            plain.append(node)
        elif any(_is_test(inner, defined) for inner in node.body):
            plain += node.body
    return plain


def _calls_of_tests(body, defined, entry_point):
    """Calls of the functions that a runner of tests would call."""
    run = reached([node for node in body if not isinstance(node, (*_FUNCTIONS, ast.ClassDef))], defined)
    calls = []
    for node in body:
        if isinstance(node, ast.ClassDef) and any(_is_named_test(inner) for inner in node.body):
            raise ValueError(f"a class of tests, {node.name}: only functions are run")
        if isinstance(node, _FUNCTIONS) and node.name not in run and MARKS & reached([node], defined):
            required = _required(node)
            if node.name == "check" and entry_point and required == _count(entry_point):
                calls.append((node, ast.parse(f"check({entry_point})").body[0]))
            elif node.name.startswith("test") and not required:
                calls.append((node, ast.parse(f"{node.name}()").body[0]))
    run |= reached([node for node, _ in calls], defined) | {node.name for node, _ in calls}
    for node in body:
        if _is_named_test(node) or (isinstance(node, _FUNCTIONS) and node.name == "check"):
            _check_is_run(node, run)
    return [call for _, call in calls]


def _check_is_run(node, run):
    if node.name not in run:
        raise ValueError(f"{node.name} is never called, as its arguments are unknown, or it asserts nothing")
    code = compile(ast.Module(body=[node], type_ignores=[]), "<tests>", "exec")
    own = next(inner for inner in code.co_consts if inspect.iscode(inner) and inner.co_name == node.name)
    if own.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise ValueError(f"{node.name} is a generator or a coroutine: calling it does not run it")


def _is_named_test(node):
    return isinstance(node, _FUNCTIONS) and node.name.startswith("test")


def _required(node):
    args = node.args
    return len(args.posonlyargs) + len(args.args) - len(args.defaults) + args.kw_defaults.count(None)


def _count(entry_point):
    """`encode, decode` are two."""
    whole = ast.parse(entry_point, mode="eval").body
    return len(whole.elts) if isinstance(whole, ast.Tuple) else 1


def reached(nodes, defined):
    """Names called in the nodes, and in the functions that those call."""
    names, left = set(), list(nodes)
    while left:
        calls = used(left.pop())[0]
        left += [defined[name] for name in calls - names if name in defined]
        names |= calls
    return names


@functools.cache
def used(node):
    """Names called, names passed on as functions, and names imported from the completion (`*`: all of them)."""
    called_names, passed, imported = set(), set(), set()
    left = [node]
    while left:
        inner = left.pop()
        if isinstance(inner, ast.Call):
            name = called(inner, ast.Name)
            called_names.add(name)
            if name in _TAKE_FUNCTIONS:
                passed |= {arg.id for arg in inner.args[:1] if isinstance(arg, ast.Name)}
        elif isinstance(inner, ast.ImportFrom):
            imported |= {alias.name for alias in inner.names} if inner.module == "solution" else set()
        elif isinstance(inner, ast.Import):
            imported |= {alias.name for alias in inner.names} & {"solution"}
        left += [child for child in ast.iter_child_nodes(inner) if not isinstance(child, ast.Constant)]
    return frozenset(called_names), frozenset(passed), frozenset(imported)


def _check_imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Try):  # may have another way
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for root in (module.partition(".")[0] for module in modules):
                if root != "solution" and (not root or importlib.util.find_spec(root) is None):
                    raise ValueError(f"the tests import {root!r}, which the sandbox's python does not have")
        _check_imports([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])


# Test sets of this field use these without importing them.
_COMMON_MODULES = ("math", "cmath", "collections", "itertools", "re", "random", "functools", "string", "copy")
# Called by a test that forgot to import them; never to be had from the completion, who would decide with them.
_LIBRARY = {*dir(builtins), *typing.__all__, *collections.__all__}
_LIBRARY |= {"approx", "raises", "isclose", "allclose", "array_equal"}
_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


def names_to_ask(split, namespace, entry_point, setup):
    """
    Names that the completion is asked for, in order; unimported modules of this field are put in the namespace.

    `split`: of [`split_tests`]; `namespace`: of the tests, after their setup, whose tree is `setup`. With an
    `entry_point` no other name is asked for. `ValueError`: a name that may not be the completion's.
    """
    nodes = [node for part in split for half in part for node in half]
    helpers = {node.name: node for node in setup.body if isinstance(node, _FUNCTIONS)}
    read, made = _globals_of(nodes, helpers, namespace)
    imported = {name for node in nodes for name in used(node)[2]}
    theirs = _theirs(nodes, helpers, entry_point, imported)
    asked = []
    for name in read:
        if name in MARKS | made or (name in namespace and not (entry_point and name in theirs)):
            continue
        if name in theirs or name == "Solution":
            asked.append(name)
        elif name in _COMMON_MODULES:
            namespace[name] = __import__(name)
        elif not hasattr(builtins, name) and not name.startswith("__"):
            raise ValueError(
                f"the tests use {name!r}, which is neither defined nor what they test: define it in the "
                "tests or in setup"
            )
    if not asked and not imported:
        raise ValueError("the tests use nothing from the completion")
    if len(asked) > 1 and not entry_point:  # one of them may be a helper that judges the other
        listed = ", ".join(sorted(asked))
        raise ValueError(
            f"the tests use {listed}, all undefined, so it is unclear which of them is tested: define helpers in the "
            f"tests or in setup, or name what is tested in the column of entry_point ({listed!r} for all of them)"
        )
    return asked


def _theirs(nodes, helpers, entry_point, imported):
    """Names that may be the completion's."""
    if entry_point:
        return _entry_names(entry_point)
    if imported - {"*"}:  # the tests say themselves what they test
        return set()
    return reached(nodes, helpers).union(*(used(node)[1] for node in nodes)) - _LIBRARY


def _globals_of(nodes, helpers, namespace):
    """Global names that statements read, in order, also those that functions of the setup read for them, and names
    that they make. The compiler knows best what is local to a function or a comprehension."""
    codes = [compile(ast.Module([node], []), "<tests>", "exec") for node in nodes]
    called_helpers = [namespace.get(name) for name in sorted(reached(nodes, helpers) & set(helpers))]
    codes += [helper.__code__ for helper in called_helpers if inspect.isfunction(helper)]
    read, made = {}, set()
    for code in codes:
        is_module = code.co_name == "<module>"
        is_class = not is_module and not code.co_flags & inspect.CO_OPTIMIZED
        own = set()
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and is_module):
                made.add(step.argval)
            elif step.opname == "STORE_NAME" and is_class:
                own.add(step.argval)
            elif step.opname in _READ and step.argval not in own:
                read[step.argval] = None
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]  # read in their turn
    return read, made


def _entry_names(entry_point):
    """`Solution().twoSum` is one, too, and `encode, decode` are two."""
    return {node.id for node in ast.walk(ast.parse(entry_point, mode="eval")) if isinstance(node, ast.Name)}
