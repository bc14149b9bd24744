"""Checks that are counted when they are carried out. Standard library only: it runs inside.

Test sets contain entries in which nothing is ever asserted: a test that nobody calls, an `assert` of a tuple, a
comparison as a statement. Run as they are, they pass any code; so the examiner counts.
"""

import ast
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
        for node in nodes
        for inner in ast.walk(node)
    )


def _checks(nodes):
    return any(isinstance(inner, (ast.Assert, ast.Raise)) for node in nodes for inner in ast.walk(node))
