"""Names in the tests that the completion has to define. Standard library only: it runs inside.

Whoever defines the helper of a test (`assert deep_equal(f(3), [9])`) decides the test, so a name is only asked of the
completion where it is sure to be what is tested: the entry point, what is imported from `solution`, or else the only
name that nobody defines in tests that belong together. Any other name that nobody defines raises `ValueError`: such
tests are broken, whatever the completion.
"""

import ast
import builtins
import collections
import dis
import inspect
import typing

from trl_drgrpo.rewards.functions.code.checks import MARKS
from trl_drgrpo.rewards.functions.code.entries import reached, used

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
_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


def names_to_ask(split, namespace, entry_point, setup):
    """
    Names that the completion is asked for, in order; unimported modules of this field are put in the namespace.

    `split`: of [`split_tests`]; `namespace`: of the tests, after their setup, whose tree is `setup`. With an
    `entry_point` no other name is asked for. `ValueError`: a name that may not be the completion's.
    """
    nodes = [node for part in split for half in part for node in half]
    helpers = {node.name: node for node in setup.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    statements = [_Statement(node, helpers, namespace) for node in nodes]
    imported = {name for node in nodes for name in used(node)[2]}
    theirs = _theirs(nodes, helpers, entry_point, imported)
    own = MARKS.union(*(statement.made for statement in statements))
    asked = []
    for name in dict.fromkeys(name for statement in statements for name in statement.read):
        if name in own or (name in namespace and not (entry_point and name in theirs)):
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
    if not entry_point:
        _check_told_apart(statements, set(asked))
    return asked


def _theirs(nodes, helpers, entry_point, imported):
    """Names that may be the completion's."""
    if entry_point:
        return _entry_names(entry_point)
    if imported - {"*"}:  # the tests say themselves what they test
        return set()
    return reached(nodes, helpers).union(*(used(node)[1] for node in nodes)) - _LIBRARY


def _check_told_apart(statements, asked):
    """
    Refuses tests that leave several names to the completion: one of them may be a helper that judges the other.

    Statements belong together where one reads what another made. What has nothing in common does not matter to each
    other: `assert add(1, 2) == 3` and `assert sub(3, 2) == 1` are sure to test `add` and `sub`.
    """
    read_later = {name for statement in statements for name in statement.read_later}
    versions = collections.Counter()
    # An imported module carries nothing from one statement to the next.
    carriers = {name for statement in statements if not statement.is_import for name in statement.made}
    groups = []  # of (variables, names asked for)
    for statement in statements:
        variables = {(name, versions[name]) for name in statement.read}
        # `result = ...` again is another variable, unless a function may read either.
        versions.update(statement.assigned - read_later)
        variables |= {(name, versions[name]) for name in statement.made}
        variables = {variable for variable in variables if variable[0] in carriers}
        names = asked.intersection(statement.read)
        for group in [group for group in groups if group[0] & variables]:
            groups.remove(group)
            variables, names = variables | group[0], names | group[1]
        groups.append((variables, names))
    for _, names in groups:
        if len(names) > 1:
            listed = ", ".join(sorted(names))
            raise ValueError(
                f"the tests use {listed} together, all undefined, so it is unclear which of them is tested: define "
                "helpers in the tests or in setup, or name what is tested in the column of entry_point "
                f"({listed!r} for all of them)"
            )


class _Statement:
    """
    Global names of one statement of the tests.

    Attributes:
        read (`dict`): Names that it reads, in order; also those that functions of the setup read for it.
        read_later (`set`): Those of them that a function reads, at a time of its own.
        made (`set`): Names that it makes.
        assigned (`set`): Those of them that it makes anew.
    """

    def __init__(self, node, helpers, namespace):
        self.read, self.read_later, self.made = {}, set(), set()
        self._add(compile(ast.Module([node], []), "<tests>", "exec"))
        for name in reached([node], helpers) & set(helpers):
            if inspect.isfunction(namespace.get(name)):
                self._add(namespace[name].__code__)
        targets = node.targets if isinstance(node, ast.Assign) else []
        self.assigned = {
            inner.id
            for target in targets
            for inner in ast.walk(target)
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        }
        self.is_import = isinstance(node, (ast.Import, ast.ImportFrom))

    def _add(self, code):
        """The compiler knows best what is local to a function or a comprehension."""
        is_module = code.co_name == "<module>"
        is_class = not is_module and not code.co_flags & inspect.CO_OPTIMIZED
        own = set()
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and is_module):
                self.made.add(step.argval)
            elif step.opname == "STORE_NAME" and is_class:
                own.add(step.argval)
            elif step.opname in _READ and step.argval not in own:
                self.read[step.argval] = None
                if not is_module:
                    self.read_later.add(step.argval)
        for inner in code.co_consts:
            if inspect.iscode(inner):
                self._add(inner)


def _entry_names(entry_point):
    """`Solution().twoSum` is one, too, and `encode, decode` are two."""
    return {node.id for node in ast.walk(ast.parse(entry_point, mode="eval")) if isinstance(node, ast.Name)}
