"""Finds the tests in a text. Standard library only: it runs inside.

Text that looks like a test and cannot be run raises `ValueError`: such a test is broken, whatever the completion, and
must not pass it.
"""

import ast
import functools
import importlib.util
import inspect

from trl_drgrpo.rewards.functions.code.checks import MARKS, called

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
        parts, rest = _split(body, _calls_of_tests(body, defined, entry_point), defined)
        if not parts:
            raise ValueError("no test found: an assert, a function test_..., or check(candidate) with an entry point")
        whole = [node for before, test in parts for node in (*before, *test)]
        split += parts if is_text else [([], whole + rest)]
    return split


def _split(body, calls, defined):
    parts, before = [], []
    for node in body:
        if _is_test(node, defined):
            parts.append((before, [node]))
            before = []
        else:
            before.append(node)
    for call in calls:  # last: a test function may use what is defined below it
        parts.append((before, [call]))
        before = []
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
        if isinstance(node, ast.ClassDef) and any(name.startswith("test") for name in _methods(node)):
            raise ValueError(f"a class of tests, {node.name}: only functions are run")
        if isinstance(node, _FUNCTIONS) and node.name not in run and MARKS & reached([node], defined):
            required = _required(node)
            if node.name == "check" and entry_point and required == _count(entry_point):
                calls.append((node, ast.parse(f"check({entry_point})").body[0]))
            elif node.name.startswith("test") and not required:
                calls.append((node, ast.parse(f"{node.name}()").body[0]))
    run |= reached([node for node, _ in calls], defined) | {node.name for node, _ in calls}
    for node in body:
        if isinstance(node, _FUNCTIONS) and (node.name.startswith("test") or node.name == "check"):
            _check_is_run(node, run)
    return [call for _, call in calls]


def _check_is_run(node, run):
    if node.name not in run:
        raise ValueError(f"{node.name} is never called, as its arguments are unknown, or it asserts nothing")
    code = compile(ast.Module(body=[node], type_ignores=[]), "<tests>", "exec")
    own = next(inner for inner in code.co_consts if inspect.iscode(inner) and inner.co_name == node.name)
    if own.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise ValueError(f"{node.name} is a generator or a coroutine: calling it does not run it")


def _methods(node):
    return [inner.name for inner in node.body if isinstance(inner, _FUNCTIONS)]


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
