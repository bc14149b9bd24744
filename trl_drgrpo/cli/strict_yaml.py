"""YAML as recipes use it: JSON's types, decimal numbers, every key once, and no more content than a person writes.

Deltas from `yaml.safe_load`, which lets the last of two equal keys win in silence and reads `1e-6` as text:

- Numbers are those of YAML 1.2. `0100` (64 in YAML 1.1, 100 in 1.2) and `1:30` (90, or text) are an [`OldNumber`]:
  text where a text is due, refused where a number is.
- There are no dates, bytes or sets, as no field takes one: `2024-02-30` is text, `!!binary` an error.
- An alias (`*name`) may stand for a part of the file again, but not make a small file large, or contain itself.
- Whatever fails while a value is made is a `YAMLError` with its line.
"""

import re
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from trl_drgrpo.common.errors import InputError, shortened

_TAG = "tag:yaml.org,2002:"
# Values of a document with every alias written out.
_MOST_NODES = 100_000
# Levels of a value: libraries copy and print values by recursion.
_DEEPEST = 50
# Numbers that YAML 1.1 and 1.2 read differently: `0100` and `1:30`.
_OCTAL = re.compile(r"[-+]?0o?[0-9_]+")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


class OldNumber(str):
    """A number that versions of YAML disagree on, as it was written."""


def is_old_number(text: str) -> bool:
    """Tell whether versions of YAML disagree on the number that a text is."""
    return bool(_OCTAL.fullmatch(text) or _SEXAGESIMAL.fullmatch(text))


def remedy_for_old_number(text: str) -> str:
    """
    A sentence with the decimal forms of an [`OldNumber`].

    Example:

    ```python
    >>> remedy_for_old_number("0100")
    'YAML 1.1 reads 0100 as 64: write 64 or 100, or put a text in quotes.'

    ```
    """
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-").replace("_", "")
    # 1:30 is 1 * 60 + 30.
    if ":" in digits:
        value = 0.0
        for part in digits.split(":"):
            value = 60 * value + float(part)
        return f"YAML 1.1 reads {text} as {sign}{value:g}: write {sign}{value:g}, or put a text in quotes."
    decimal = f"{sign}{digits.lstrip('0o') or '0'}"
    # 08 is no octal number, and so no number in YAML 1.1.
    if re.search("[89]", digits):
        return f"Write {decimal}, or put a text in quotes."
    octal = f"{sign}{int(digits.removeprefix('0o'), 8)}"
    if "o" in digits:
        return f"YAML 1.2 reads {text} as {octal}: write {octal}, or put a text in quotes."
    forms = octal if octal == decimal else f"{octal} or {decimal}"
    return f"YAML 1.1 reads {text} as {octal}: write {forms}, or put a text in quotes."


class StrictLoader(yaml.SafeLoader):
    """The loader that the module describes."""

    # Tables of its own: `add_implicit_resolver` would otherwise copy those of the parent, YAML 1.1's.
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"]
        for kind in ("null", "bool", "int", "float", "str", "seq", "map")
    }
    # Any other tag is an error.
    yaml_constructors[None] = yaml.SafeLoader.construct_undefined

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, InputError):
            raise
        # Whatever Python says of `0x_`, or of `!!int x`.
        except Exception as error:
            kind = node.tag.removeprefix(_TAG)
            problem = f"{shortened(node.value)} is not a valid value of the type {kind} ({shortened(str(error), 100)})"
            raise ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping with every key once."""
        refuse_duplicates(node)
        return super().construct_mapping(node, deep)


def _old_number(loader: StrictLoader, node: Any) -> OldNumber:
    return OldNumber(loader.construct_scalar(node))


# Plain texts that are values of a kind, with their possible first letters. `1e-6` is a number, unlike in YAML 1.1.
_SIGN = r"^[-+]?"
for _kind, _pattern, _first in (
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$", list("yYnNtTfFoO")),
    ("int", rf"{_SIGN}(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$", list("-+0123456789")),
    ("float", rf"{_SIGN}([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", rf"({_SIGN}\.(inf|Inf|INF)|^\.(nan|NaN|NAN))$", list("-+.")),
    ("merge", r"^<<$", ["<"]),
):
    StrictLoader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(_pattern), _first)
# The first resolver that matches wins, so what is left here is no number above.
for _pattern in (_OCTAL, _SEXAGESIMAL):
    StrictLoader.add_implicit_resolver("!old_number", re.compile(f"^({_pattern.pattern})$"), list("-+0123456789"))
StrictLoader.add_constructor("!old_number", _old_number)


def compose(text: str) -> tuple[StrictLoader, yaml.Node | None]:
    """Return the nodes of a document, of bounded size, and the loader that makes values of them."""
    try:
        loader = StrictLoader(text)
        node = loader.get_single_node()
    except yaml.YAMLError:
        raise
    # The composer itself calls itself once a level, before `_measure` can count them.
    except RecursionError as error:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from error
    # An escape in a text that is no character, for example.
    except Exception as error:
        raise yaml.YAMLError(shortened(str(error), 100)) from error
    if node is not None:
        _measure(node, {})
    return loader, node


def load(text: str) -> Any:
    """Return the value of a document."""
    loader, node = compose(text)
    return None if node is None else loader.construct_document(node)


def _measure(node: yaml.Node, measured: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Count nodes and levels of a node with every alias written out. An anchor stands in front of its aliases, so each
    node is looked at once."""
    # An alias is the same node again. None stands for a node whose parts are being counted.
    if id(node) in measured:
        measure = measured[id(node)]
        if measure is None:
            raise ComposerError(None, None, "a value that contains itself", node.start_mark)
        return measure
    measured[id(node)] = None
    parts = []
    if isinstance(node, yaml.MappingNode):
        for key_and_value in node.value:
            parts.extend(key_and_value)
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    nodes = 1
    levels = 0
    for part in parts:
        nodes_of_part, levels_of_part = _measure(part, measured)
        nodes += nodes_of_part
        levels = max(levels, levels_of_part)
    if nodes > _MOST_NODES or levels >= _DEEPEST:
        limits = f"at most {_MOST_NODES:,} values in at most {_DEEPEST} levels"
        raise ComposerError(None, None, f"too much in one value, {limits}", node.start_mark)
    measured[id(node)] = (nodes, levels + 1)
    return nodes, levels + 1


def is_deep(value: object) -> bool:
    """Tell whether a value has more levels than a document may have."""
    level = [value]
    for _ in range(_DEEPEST):
        parts = []
        for container in level:
            if isinstance(container, dict):
                parts.extend(container.values())
            elif isinstance(container, list):
                parts.extend(container)
        level = parts
    return bool(level)


def refuse_duplicates(node: yaml.MappingNode) -> None:
    """Refuse a mapping with a key twice; name the key and both lines."""
    lines = {}
    for key, _ in node.value:
        # `<<` may stand several times: each merges another mapping.
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        line = line_of(key)
        if key.value in lines:
            got = f"the same key twice, in lines {lines[key.value]} and {line} of the recipe"
            remedy = "Remove one of them: YAML would silently take the last."
            raise InputError(key.value, got, "every key once", remedy)
        lines[key.value] = line


def line_of(node: yaml.Node) -> int:
    """Return the line that a node begins in; the first is 1."""
    return node.start_mark.line + 1
