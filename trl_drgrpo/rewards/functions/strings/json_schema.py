"""A reward for completions that must be JSON, of a given shape.

The schema is a JSON Schema, validated by the `jsonschema` library under the schema's own draft. A schema with patterns
of its own can run away on a hostile completion: give such a reward `limits`.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from trl_drgrpo.common.errors import InputError, UnscorableError, shortened
from trl_drgrpo.common.ranges import finite_number
from trl_drgrpo.rewards.contract import OnError
from trl_drgrpo.rewards.isolation.isolated import Limits
from trl_drgrpo.rewards.sample import SampleReward
from trl_drgrpo.rewards.text import after_thinking


class JsonSchemaReward(SampleReward):
    """1 for a completion that is JSON and fits a schema.

    What counts is the text after the last `</think>`: all of it, or, where that is no JSON, its last fenced block.
    `NaN` and `Infinity`, which Python would read, are no JSON. A schema may refer to its own parts and to the
    published drafts; nothing is ever fetched.

    Args:
        schema (`Mapping`, *optional*): The schema. `None` without `column`: any JSON will do.
        column (`str`, *optional*): Dataset column with the schema of each row, as JSON text or as a mapping.
        invalid_score (`float`, *optional*, defaults to 0.0): Score of JSON that does not fit.
        limits ([`Limits`], *optional*): For schemas with patterns that may run away.
        name (`str`, *optional*, defaults to `"json_schema_reward"`): Name in logs.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What a row's unusable schema costs.

    Raises:
        [`InputError`]: jsonschema is not installed, both `schema` and `column`, no valid schema.

    Example:

    ```python
    >>> shape = {"type": "object", "required": ["city"]}
    >>> JsonSchemaReward(shape)(completions=['{"city": "Rome"}', "Rome", '{"town": "Rome"}'])
    [1.0, 0.0, 0.0]

    ```
    """

    truths = ("text", "mapping", "boolean")

    def __init__(
        self,
        schema: Mapping[str, Any] | bool | None = None,
        column: str | None = None,
        invalid_score: float = 0.0,
        limits: Limits | None = None,
        name: str = "json_schema_reward",
        on_error: OnError = "unscorable",
    ):
        super().__init__(name, columns=() if column is None else (column,), limits=limits, on_error=on_error)
        if schema is not None and column is not None:
            raise InputError("schema", "a schema and a column of schemas", "one of them", "Remove one.")
        self.schema, self.column, self.invalid_score = schema, column, finite_number("invalid_score", invalid_score)
        self.lowest_reward = min(0.0, self.invalid_score)
        if column is not None:
            _import_jsonschema()  # that it is missing is known before the run
        if schema is not None and not isinstance(schema, (Mapping, bool)):
            remedy = "Fix the schema, or set `column` for one schema per row."
            raise InputError("schema", shortened(schema), "a JSON Schema: a mapping, true or false", remedy)
        if schema is not None:
            _validator(schema)

    def score(self, completion: str, **columns: Any) -> float | None:
        """1.0, `invalid_score` or 0.0."""
        schema = self.schema if self.column is None else columns[self.column]
        if self.column is not None:
            if schema is None:
                return None
            try:
                schema = json.loads(schema) if isinstance(schema, str) else schema
            except ValueError as error:
                raise UnscorableError(f"column {self.column!r} holds a schema that is no JSON ({error})") from None
            _validator(schema)  # before what was written is looked at: an error of the row, not of the completion
        found, value = _read_json(completion)
        if not found:
            return 0.0
        if schema is None:
            return 1.0
        try:
            return 1.0 if _validator(schema).is_valid(value) else self.invalid_score
        except RecursionError:  # nested as deeply as the parser lets through
            return self.invalid_score


def _read_json(text: str) -> tuple[bool, Any]:
    text = after_thinking(text).strip()
    candidates = [text]
    if (block := _last_fenced(text)) is not None:
        candidates.append(block)
    for candidate in candidates:
        try:
            return True, json.loads(candidate, parse_constant=_no_constant)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            continue
    return False, None


def _last_fenced(text: str) -> str | None:
    """Contents of the last closed ``` block."""
    last, block = None, None
    for line in text.splitlines():
        if not line.strip().startswith("```"):
            if block is not None:
                block.append(line)
        elif block is None:
            block = []
        else:
            last, block = "\n".join(block), None
    return last


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _import_jsonschema() -> Any:
    try:
        return importlib.import_module("jsonschema")
    except ModuleNotFoundError as error:
        raise InputError(
            "reward json_schema_reward",
            f"an environment without {error.name}",
            "the package jsonschema",
            'Install it with `pip install "trl-drgrpo[json]"`.',
        ) from error


def _validator(schema: Any) -> Any:
    """The validator of a schema's own draft, with a registry that fetches nothing."""
    jsonschema = _import_jsonschema()
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "its top level"
        remedy = "Fix the schema."
        raise InputError("schema", f"a schema with {error.message} at {where}", "a JSON Schema", remedy) from error
    return kind(schema, registry=importlib.import_module("jsonschema_specifications").REGISTRY)


json_schema_reward = JsonSchemaReward()  # any JSON
