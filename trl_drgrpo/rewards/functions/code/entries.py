"""What is a test in a text, and what it asks of the completion. Standard library only: it runs inside.

What looks like a test and cannot be run, and a name that nobody defines, raise `ValueError`: such tests are broken,
whatever the completion, and are not to pass it.
"""

import ast
import builtins
import collections
import dis
import functools
import importlib.util
import inspect
import typing

from trl_drgrpo.rewards.functions.code.checks import MARKS, called

# Test sets of this field use these without importing them.
_COMMON_MODULES = ("math", "cmath", "collections", "itertools", "re", "random", "functools", "string", "copy")
# Called by a test that forgot to import them; never to be had from the completion, who would decide with them.
_LIBRARY = {
    *dir(builtins),
    *typing.__all__,
    *collections.__all__,
    "approx",
    "raises",
    "isclose",
    "allclose",
    "array_equal",
}
_TAKE_FUNCTIONS = ("check", "map", "filter")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


def split_tests(trees, setup, entry_point, is_text):
    """Trees of [`counted`] as tests.

    Returns:
        `list`: Per test (statements that lead to it, statements that are it). A text (`is_text`) holds any number,
        an entry of a list is one.

    Raises:
        `ValueError`: There is none in a tree, or one that nobody here can run.
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
    return not isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and bool(MARKS & _reached([node], defined))


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
    run = _reached([node for node in body if not isinstance(node, (*_FUNCTIONS, ast.ClassDef))], defined)
    calls = []
    for node in body:
        if isinstance(node, ast.ClassDef) and any(name.startswith("test") for name in _methods(node)):
            raise ValueError(f"a class of tests, {node.name}: only functions are run")
        if isinstance(node, _FUNCTIONS) and node.name not in run and MARKS & _reached([node], defined):
            required = _required(node)
            if node.name == "check" and entry_point and required == 1:
                calls.append((node, ast.parse(f"check({entry_point})").body[0]))
            elif node.name.startswith("test") and not required:
                calls.append((node, ast.parse(f"{node.name}()").body[0]))
    run |= _reached([node for node, _ in calls], defined) | {node.name for node, _ in calls}
    for node in body:
        if isinstance(node, _FUNCTIONS) and (node.name.startswith("test") or node.name == "check"):
            _check_is_run(node, run)
    return [call for _, call in calls]


def _check_is_run(node, run):
    if node.name not in run:
        raise ValueError(f"{node.name} is never called, for its arguments are not known, or it asserts nothing")
    code = compile(ast.Module(body=[node], type_ignores=[]), "<tests>", "exec")
    own = next(inner for inner in code.co_consts if inspect.iscode(inner) and inner.co_name == node.name)
    if own.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise ValueError(f"{node.name} is a generator or a coroutine: to call it is not to run it")


def _methods(node):
    return [inner.name for inner in node.body if isinstance(inner, _FUNCTIONS)]


def _required(node):
    args = node.args
    return len(args.posonlyargs) + len(args.args) - len(args.defaults) + args.kw_defaults.count(None)


def _reached(nodes, defined):
    """Names called in the nodes, and in the functions that those call."""
    names, left = set(), list(nodes)
    while left:
        calls = _used(left.pop())[0]
        left += [defined[name] for name in calls - names if name in defined]
        names |= calls
    return names


@functools.cache
def _used(node):
    """Names called, names passed on as functions, and whether the completion is imported as a module."""
    called_names, passed, imports_solution = set(), set(), False
    left = [node]
    while left:
        inner = left.pop()
        if isinstance(inner, ast.Call):
            name = called(inner, ast.Name)
            called_names.add(name)
            if name in _TAKE_FUNCTIONS:
                passed |= {arg.id for arg in inner.args[:1] if isinstance(arg, ast.Name)}
        elif isinstance(inner, ast.ImportFrom):
            imports_solution |= inner.module == "solution"
        elif isinstance(inner, ast.Import):
            imports_solution |= any(alias.name == "solution" for alias in inner.names)
        left += [child for child in ast.iter_child_nodes(inner) if not isinstance(child, ast.Constant)]
    return frozenset(called_names), frozenset(passed), imports_solution


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


def names_to_ask(split, codes, namespace, entry_point):
    """Names that the completion is asked for, in order; unimported modules of this field are put in the namespace.

    Args:
        split, codes: Tests of [`split_tests`], and their code objects.
        namespace (`dict`): Of the tests, after their setup.
        entry_point (`str`, *optional*): Where given, no other function is asked for.

    Raises:
        `ValueError`: A name that is nobody's, or not one of the completion.
    """
    used = [_used(node) for part in split for half in part for node in half]
    read, made = {}, set()
    for code in codes:
        _read_and_made(code, read, made)
    functions = {name for calls, passed, _ in used for name in calls | passed}
    theirs = _entry_names(entry_point) if entry_point else functions - _LIBRARY
    asked = []
    for name in read:
        if name in made or name in MARKS or (name in namespace and not (entry_point and name in theirs)):
            continue
        if name in theirs or name == "Solution":
            asked.append(name)
        elif name in _COMMON_MODULES:
            namespace[name] = __import__(name)
        elif not hasattr(builtins, name) and not name.startswith("__"):
            raise ValueError(f"the tests use {name!r}, which they neither import nor call as the completion's")
    if not asked and not any(is_import for _, _, is_import in used):
        raise ValueError("the tests use nothing of the completion")
    return asked


def _read_and_made(code, read, made):
    """Global names in compiled code: the compiler knows best what is local to a function or a comprehension."""
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
    for inner in code.co_consts:
        if inspect.iscode(inner):
            _read_and_made(inner, read, made)


def _entry_names(entry_point):
    """`Solution().twoSum` is one, too."""
    return {node.id for node in ast.walk(ast.parse(entry_point, mode="eval")) if isinstance(node, ast.Name)}
