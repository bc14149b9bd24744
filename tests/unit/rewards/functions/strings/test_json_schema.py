"""JSON of a given shape, bare or fenced; nothing is fetched and nothing deep or strange breaks the run."""

import json
import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.strings import JsonSchemaReward, json_schema_reward

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' \n{"name": "Ada"}\n', 1.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        ('Here you are:\n```\n{"name": "Ada"}\n```\nAnything else?', 1.0),
        ('```json\n{"name": 1}\n```\nno:\n```json\n{"name": "Ada"}\n```', 1.0),
        ('<think>{"name": 1}</think>{"name": "Ada"}', 1.0),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada", "age": 1.5}', 0.25),
        ('{"age": 36}', 0.25),
        ('{"name": "Ada", "extra": 1}', 0.25),
        ("[]", 0.25),
        ("null", 0.25),
        ("[" * 900 + "]" * 900, 0.25),
        ('{"name": "Ada"', 0.0),
        ('{"name": "Ada"} and more', 0.0),
        ('So: {"name": "Ada"}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": NaN}', 0.0),
        ('```json\n{"name": "Ada"}', 0.0),  # the fence is not closed
        ("[" * 100_000, 0.0),
        ("1" * 10_000, 0.0),
        ("", 0.0),
    ],
)
def test_shapes(completion, expected):
    assert JsonSchemaReward(PERSON, invalid_score=0.25)(completions=[completion]) == [expected]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_json(value):
    bare, fenced = json.dumps(value), f"So:\n```json\n{json.dumps(value, indent=2)}\n```"
    assert json_schema_reward(completions=[bare, fenced, bare + "}"]) == [1.0, 1.0, 0.0]


def test_schemas_of_the_rows():
    reward = JsonSchemaReward(column="schema")
    schemas = [{"type": "string"}, '{"type": "string"}', None, '{"type": "integer"}', '{"type": "text"}', "{"]
    metrics = {}
    rewards = reward(completions=['"a"'] * 6, schema=schemas, log_metric=metrics.__setitem__)
    assert rewards == [1.0, 1.0, None, 0.0, None, None]
    assert metrics == {"rewards/json_schema_reward/failed_frac": pytest.approx(2 / 6)}


def test_a_reference_is_not_fetched(monkeypatch):
    def connect(*args, **kwargs):
        raise AssertionError("somebody wanted the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    metrics = {}
    reward = JsonSchemaReward({"$ref": "http://example.invalid/schema.json"})
    assert reward(completions=["1"], log_metric=metrics.__setitem__) == [0.0]
    assert metrics == {"rewards/json_schema_reward/failed_frac": 1.0}
    draft = {"$ref": "https://json-schema.org/draft/2020-12/schema"}  # the published drafts are on board
    assert JsonSchemaReward(draft)(completions=['{"type": "string"}', '{"type": "text"}']) == [1.0, 0.0]


def test_it_travels():
    reward = pickle.loads(pickle.dumps(JsonSchemaReward(PERSON, name="person")))
    assert (reward.__name__, reward(completions=['{"name": "Ada"}'])) == ("person", [1.0])


def test_a_schema_that_is_none():
    with pytest.raises(
        InputError, match="schema: got a schema with 'text' is not valid .* at type; expected a JSON Schema"
    ):
        JsonSchemaReward({"type": "text"})
    with pytest.raises(InputError, match="schema: got a schema and a column of schemas"):
        JsonSchemaReward({}, column="schema")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(InputError, match=r"pip install \"trl-drgrpo\[json\]\""):
        JsonSchemaReward(PERSON)
    assert JsonSchemaReward()(completions=["1"]) == [1.0]  # any JSON needs no schema
