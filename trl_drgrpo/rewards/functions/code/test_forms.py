"""The tests in a text: where they are, what they ask for, what they check. Standard library only: it runs inside.

Test sets contain entries in which nothing is ever asserted: a test that nobody calls, an `assert` of a tuple, a
comparison as a statement. Run as they are, they pass any code; so checks are counted when they are carried out.

Text that looks like a test and cannot be run raises `ValueError`: such a test is broken, whatever the completion, and
must not pass it.

Whoever defines the helper of a test (`assert deep_equal(f(3), [9])`) decides the test, so a name is only asked of the
completion where it is sure to be what is tested: the entry point, what is imported from `solution`, or else the only
name that nobody defines in tests that belong together. Any other name that nobody defines raises `ValueError`.
"""

import ast
import builtins
import collections
import dis
import functools
import importlib.util
import inspect
import math
import typing
from decimal import Decimal
from fractions import Fraction

_NUMBERS = (int, float, Decimal, Fraction)
MARKS = {"__checked__", "__noted__"}  # the names that a counted tree calls: it tests something if it reaches one
# `assert (f(1) == 1, "message")` and the like hold whatever is in them.
_ALWAYS_TRUE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Lambda, ast.GeneratorExp, ast.JoinedStr)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


class Tally:
    """Counts the checks of one test while it runs."""

    def __init__(self):
        # Functions that the trees of `counted` and the tests of `problems` call.
        self.names = {"__checked__": self.checked, "__noted__": self.noted, "__same__": same_value}
        self.start()

    def start(self):
        """Begin a test."""
        self.checks = 0
        self.has_failed = False

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


def same_value(value, due, tolerance=None):
    """Compare plain data with the expected value from JSON text, where tuples are lists: numbers within a tolerance,
    if there is one (see `is_near`), NaN equal to NaN, and the rest equal."""
    if value == due:
        return True
    if isinstance(due, list):
        if not isinstance(value, (list, tuple)) or len(value) != len(due):
            return False
        return all(same_value(part, due_part, tolerance) for part, due_part in zip(value, due, strict=True))
    if isinstance(due, dict):
        if not isinstance(value, dict) or value.keys() != due.keys():
            return False
        return all(same_value(value[key], due[key], tolerance) for key in due)
    for number in (value, due):
        if isinstance(number, bool) or not isinstance(number, _NUMBERS):  # True is no 0.9999999
            return False
    if value != value and due != due:  # both are NaN
        return True
    return is_near(value, due, tolerance)


def is_near(number, due, tolerance):
    """
    Compare two numbers within a tolerance, absolute and relative; `None`: exactly.

    Where one of two whole numbers is an integer, they must be equal: 987654322 is not nearly 987654321.
    """
    if not isinstance(number, int):
        number = float(number)
    if tolerance is None:
        return number == due
    are_whole = number % 1 == due % 1 == 0
    if are_whole and (isinstance(number, int) or isinstance(due, int)):
        return number == due
    try:
        return math.isclose(number, due, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond all floats
        return False


def counted(source):
    """Parse a source text into a tree in which checks are counted when they are carried out."""
    tree = ast.parse(source)
    tree.body = _counted(tree.body, True)
    return ast.fix_missing_locations(tree)


def _counted(nodes, is_final):
    # `is_final`: whether a failed assert fails its test even if the text goes on.
    counted_nodes = []
    for node in nodes:
        if isinstance(node, ast.Assert):
            _count_assert(node, is_final)
        elif isinstance(node, ast.Expr) and called(node.value, ast.Attribute).startswith("assert"):
            node.value = _call("__noted__", node.value)  # numpy.testing.assert_allclose and its kind
        elif isinstance(node, ast.If) and _fails([*node.body, *node.orelse]):
            node.test = _call("__noted__", node.test)  # if f(1) != 1: raise AssertionError
        elif isinstance(node, ast.Try) and _fails([*node.body, *node.orelse]):
            for handler in node.handlers:  # try: f(-1); assert False; except ValueError: pass
                handler.body.insert(0, ast.Expr(_call("__noted__")))
        # A handler that checks again gives the body a second try, so an assert of the body may fail.
        has_second_try = isinstance(node, ast.Try) and any(_checks(handler.body) for handler in node.handlers)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                setattr(node, field, _counted(inner, is_final and not (has_second_try and field == "body")))
        counted_nodes.append(node)
        for item in getattr(node, "items", []):
            # with pytest.raises(ValueError): the statement behind it is reached only if the error came
            if called(item.context_expr) in ("raises", "assertRaises", "assertRaisesRegex"):
                counted_nodes.append(ast.Expr(_call("__noted__")))
                break
    return counted_nodes


def _count_assert(node, is_final):
    if isinstance(node.test, _ALWAYS_TRUE):
        raise ValueError(f"an assert that is always true: {ast.unparse(node)[:200]}")
    if isinstance(node.msg, ast.Constant) and not isinstance(node.msg.value, str):  # assert f(1), 1
        raise ValueError(f"an assert with a value in place of its message: {ast.unparse(node)[:200]}")
    # HumanEval's `assert True, "This prints if ..."` checks nothing and is not counted.
    if not isinstance(node.test, ast.Constant) or not node.test.value:
        node.test = _call("__checked__", node.test, ast.Constant(is_final))


def _call(name, *args):
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def called(node, kind=(ast.Name, ast.Attribute)):
    """Name of the function or method that a node calls; empty if it calls none."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, kind):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _fails(nodes):
    """Tell whether there is a statement that says: getting here is a failure."""
    for check in _checks(nodes):
        if isinstance(check, ast.Raise):
            return True
        if isinstance(check.test, ast.Constant) and not check.test.value:  # assert False
            return True
    return False


def _checks(nodes):
    checks = []
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Assert, ast.Raise)):
                checks.append(inner)
    return checks


_TAKE_FUNCTIONS = ("check", "map", "filter")
_NOT_RUN_BY_A_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def split_tests(trees, setup, entry_point, is_text):
    """
    Trees of [`counted`] as tests: per test the statements that lead to it, and those that are it.

    A text (`is_text`) holds any number of tests, an entry of a list is one. `ValueError`: a tree has none, or one that
    nobody here can run.
    """
    defined = {}
    for tree in (setup, *trees):
        defined |= functions_of(tree)
    split = []
    for tree in trees:
        body = _without_guards(tree.body, defined)
        _check_imports(body)
        # Calls come last: a test function may use what is defined below it.
        body += _calls_of_tests(body, defined, entry_point)
        parts = []
        before = []
        for node in body:
            if _is_test(node, defined):
                parts.append((before, [node]))
                before = []
            else:  # a definition or an assignment, which leads to the next test
                before.append(node)
        if not parts:
            raise ValueError("no test found: an assert, a function test_..., or check(candidate) with an entry point")
        split += parts if is_text else [([], body)]
    return split


def functions_of(tree):
    """Functions that a module defines, by name."""
    return {node.name: node for node in tree.body if isinstance(node, _FUNCTIONS)}


def _is_test(node, defined):
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return False
    return bool(MARKS & reached([node], defined))


def _without_guards(body, defined):
    """Take `if __name__ == "__main__":` as true if it tests, else away, for what it would start is not here."""
    plain = []
    for node in body:
        if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            plain.append(node)
        elif any(_is_test(inner, defined) for inner in node.body):
            plain += node.body
    return plain


def _calls_of_tests(body, defined, entry_point):
    """Calls of the functions that a runner of tests would call."""
    functions = []
    statements = []
    for node in body:
        if isinstance(node, _FUNCTIONS):
            functions.append(node)
        elif not isinstance(node, ast.ClassDef):
            statements.append(node)
        elif any(name.startswith("test") for name in functions_of(node)):
            raise ValueError(f"a class of tests, {node.name}: only functions are run")
    run = reached(statements, defined)  # what the text calls by itself is not called a second time
    expression = ast.parse(entry_point or "None", mode="eval").body
    count = len(expression.elts) if isinstance(expression, ast.Tuple) else 1  # `encode, decode` are two
    # HumanEval's `check(candidate)` gets a call, and what pytest would run, if it has no arguments left to fill in.
    called_here = []
    calls = []
    for node in functions:
        args = node.args
        required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
        required += args.kw_defaults.count(None)  # `None` stands for no default here
        is_check = node.name == "check" and entry_point and required == count
        is_test = node.name.startswith("test") and not required
        if (is_check or is_test) and node.name not in run and MARKS & reached([node], defined):
            called_here.append(node)
            argument = entry_point if is_check else ""
            calls += ast.parse(f"{node.name}({argument})").body
    run |= reached(called_here, defined) | {node.name for node in called_here}
    # A function that looks like a test and is left over would pass any code.
    for node in functions:
        if not node.name.startswith("test") and node.name != "check":
            continue
        if node.name not in run:
            raise ValueError(f"{node.name} is never called, as its arguments are unknown, or it asserts nothing")
        code = compile(ast.Module(body=[node], type_ignores=[]), "<tests>", "exec")
        # The compiler knows a generator by its `yield`, wherever that stands.
        codes = filter(inspect.iscode, code.co_consts)
        code_of_check = next(inner for inner in codes if inner.co_name == node.name)
        if code_of_check.co_flags & _NOT_RUN_BY_A_CALL:
            raise ValueError(f"{node.name} is a generator or a coroutine: calling it does not run it")
    return calls


def reached(nodes, defined):
    """Names called in the nodes, and in the functions that those call."""
    names = set()
    unvisited = list(nodes)
    while unvisited:  # not recursive: a chain of functions may be as long as the text
        calls = used(unvisited.pop())[0]
        for name in calls - names:  # each name once: functions may call each other in a circle
            if name in defined:
                unvisited.append(defined[name])
        names |= calls
    return names


@functools.cache
def used(node):
    """Names called, names passed on as functions, and names imported from the completion (`*`: all of them)."""
    # `map(f, [1])` calls `f` without a call of it in the text, so arguments of such functions count as passed.
    called_names = set()
    passed = set()
    imported = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = called(inner, ast.Name)
            called_names.add(name)
            if name in _TAKE_FUNCTIONS and inner.args and isinstance(inner.args[0], ast.Name):
                passed.add(inner.args[0].id)
        elif isinstance(inner, _IMPORTS):
            names = {alias.name for alias in inner.names}
            if isinstance(inner, ast.Import):
                imported |= names & {"solution"}
            elif inner.module == "solution":
                imported |= names
    return frozenset(called_names), frozenset(passed), frozenset(imported)


def _check_imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Try):  # may have another way
            continue
        modules = []
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        # Told now: when it is run, an import that fails would look like a failure of the completion.
        for module in modules:
            root = module.partition(".")[0]
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
    nodes = []
    for before, test in split:
        nodes += [*before, *test]
    helpers = functions_of(setup)
    statements = []
    names_used = {}  # in order
    names_of_tests = set(MARKS)
    passed = set()
    imported = set()
    for node in nodes:
        read, later, assigned = _globals_of(node, helpers, namespace)
        statements.append((node, read, later, assigned))
        names_used |= read
        names_of_tests |= assigned
        passed |= used(node)[1]
        imported |= used(node)[2]
    # `candidates`: what the completion may define. Each further name would let it help to judge itself.
    if entry_point:  # `Solution().twoSum` is one, too, and `encode, decode` are two
        names = ast.walk(ast.parse(entry_point, mode="eval"))
        candidates = {node.id for node in names if isinstance(node, ast.Name)}
    elif imported - {"*"}:  # the tests say themselves what they test
        candidates = set()
    else:
        candidates = (reached(nodes, helpers) | passed) - _LIBRARY
    names_asked = []
    for name in names_used:
        if name in names_of_tests:
            continue
        if name in namespace and not (entry_point and name in candidates):  # an entry point may be a stub of the setup
            continue
        if name in candidates or name == "Solution":
            names_asked.append(name)
        elif name in _COMMON_MODULES:
            namespace[name] = __import__(name)
        elif not hasattr(builtins, name) and not name.startswith("__"):
            # It is nobody's: a missing import, or a helper that the set forgot.
            raise ValueError(
                f"the tests use {name!r}, which is neither defined nor what they test: define it in the "
                "tests or in setup"
            )
    if not names_asked and not imported:
        raise ValueError("the tests use nothing from the completion")
    if not entry_point:
        _check_told_apart(statements, set(names_asked))
    return names_asked


def _check_told_apart(statements, asked):
    """
    Refuse tests that leave several names to the completion: one of them may be a helper that judges the other.

    Statements belong together where one reads what another made. What has nothing in common does not matter to each
    other: `assert add(1, 2) == 3` and `assert sub(3, 2) == 1` are sure to test `add` and `sub`.
    """
    # Names that functions read have one version, as nobody knows when they are called.
    read_later = set()
    carriers = set()
    for node, _, later, assigned in statements:
        read_later |= later
        if not isinstance(node, _IMPORTS):  # an imported module carries nothing from one statement to the next
            carriers |= assigned
    versions = collections.Counter()
    groups = []  # of (variables, names asked for)
    # A variable is a name and its version: `r = f(1); assert r; r = g(1); assert r` are two groups.
    for node, read, _, assigned in statements:
        variables = {(name, versions[name]) for name in read}
        if isinstance(node, ast.Assign):  # `result = ...` again is another variable, unless a function may read either
            versions.update(assigned - read_later)
        variables |= {(name, versions[name]) for name in assigned}
        variables = {variable for variable in variables if variable[0] in carriers}
        names = asked.intersection(read)
        separate = []
        shared = variables
        for group in groups:
            if group[0] & shared:  # by what this statement uses, not by what the groups before it do
                variables = variables | group[0]
                names = names | group[1]
            else:
                separate.append(group)
        groups = [*separate, (variables, names)]
    for _, names in groups:
        if len(names) > 1:
            listed = ", ".join(sorted(names))
            raise ValueError(
                f"the tests use {listed} together, all undefined, so it is unclear which of them is tested: define "
                "helpers in the tests or in setup, or name what is tested in the column of entry_point "
                f"({listed!r} for all of them)"
            )


def _globals_of(node, helpers, namespace):
    """Global names that a statement reads, in order, also those that functions of the setup read for it; those of them
    that a function reads, at a time of its own; and names that the statement makes."""
    codes = [compile(ast.Module([node], []), "<tests>", "exec")]
    for name in reached([node], helpers) & set(helpers):
        helper = namespace.get(name)
        if inspect.isfunction(helper):
            codes.append(helper.__code__)
    read = {}  # in order
    later = set()
    assigned = set()
    for code in codes:  # the compiler knows best what is local to a function or a comprehension
        is_module = code.co_name == "<module>"
        is_class = not is_module and not code.co_flags & inspect.CO_OPTIMIZED  # only functions have it
        class_names = set()
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and is_module):
                assigned.add(step.argval)
            elif step.opname == "STORE_NAME" and is_class:
                class_names.add(step.argval)
            elif step.opname in _READ and step.argval not in class_names:
                read[step.argval] = None
                if not is_module:
                    later.add(step.argval)
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]  # read in their turn
    return read, later, assigned
