"""Imports that the graders of LiveCodeBench, APPS and TACO put before a solution. Standard library only: it runs in
the sandbox.

Models are trained on solutions that those graders accept, such as `def f(x: List[int])` without an import. The names
stand beside the built-in ones: nothing is put in front of the code, whose own definitions win, and a name that it does
not define is none of its module. A built-in function stays what it is: `pow` is not `math.pow`.
"""

import builtins
import importlib
import sys

# Later ones win, as in a row of `from ... import *`: `Counter` is that of `collections`.
_MODULES = """
typing string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
"""
_BY_NAME_ONLY = ("time", "fractions", "decimal")
_RECURSION_LIMIT = 50_000  # as in LiveCodeBench, both
_INTEGER_DIGITS = 50_000


def names():
    """Names and what they stand for, without those of built-in functions."""
    provided = {}
    names_of_modules = _MODULES.split()
    for module_name in names_of_modules:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", vars(module)):
            if not name.startswith("_") and hasattr(module, name):
                provided[name] = getattr(module, name)
    for module_name in (*names_of_modules, *_BY_NAME_ONLY):  # last, for `datetime.date` and `copy.copy`
        provided[module_name] = importlib.import_module(module_name)
    # `pow` of `math` refuses the third argument that a solution may give to the built-in one.
    return {name: value for name, value in provided.items() if not hasattr(builtins, name)}


def install():
    """Give the names and the limits of those graders to all code of this process."""
    # As built-in names: the code's own definitions hide them, and they do not show as attributes of its module.
    for name, value in names().items():
        setattr(builtins, name, value)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    allow_long_integers()


def allow_long_integers():
    """Let integers of many digits be read and printed, where Python refuses that."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(_INTEGER_DIGITS)
