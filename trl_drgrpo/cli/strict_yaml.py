"""YAML that is read strictly: no key twice, and the floats of YAML 1.2.

`yaml.safe_load` lets the last of two equal keys win in silence and reads `1e-6` as text.
"""

import re

import yaml

from trl_drgrpo.common.errors import InputError


class Loader(yaml.SafeLoader):
    """`SafeLoader` that refuses a key given twice and knows the floats of YAML 1.2 (`1e-6`)."""

    def construct_mapping(self, node, deep=False):
        refuse_duplicates(node)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def refuse_duplicates(node: yaml.MappingNode) -> None:
    """Refuses a mapping with a key twice; names the key and both lines."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise InputError(
                    key.value,
                    f"the same key twice, in lines {seen[key.value]} and {line_of(key)} of the recipe",
                    "every key once",
                    "Remove one of them: YAML would silently take the last.",
                )
            seen[key.value] = line_of(key)


def line_of(node: yaml.Node) -> int:
    """Line of a node, counted from 1."""
    return node.start_mark.line + 1
