"""Tags, patterns that run away, JSON of a given shape from which nothing is fetched, and TRL's penalties."""

import json
import pickle
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.functions.strings.formats import (
    FormatReward,
    JsonSchemaReward,
    RegexReward,
    json_schema_reward,
    overlong_penalty,
    repetition_penalty,
)

RIGHT = "<think>2+2 is 4</think> <answer>4</answer>"
INSIDE = RIGHT.removeprefix("<think>")


def form(completion, prompt=None, **settings):
    reward = FormatReward(**settings)
    return reward(completions=[completion], prompts=[prompt])[0]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_was_parsed_out_counts(key):
    message = {"role": "assistant", "content": "<answer>4</answer>", key: "2+2 is 4"}
    assert form([message], [{"role": "user", "content": "2+2="}]) == 1.0
    assert form([{**message, key: None}], [{"role": "user", "content": "2+2="}]) == 0.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=10))
def test_format_reward_takes_one_form(pieces):
    bare = [piece for piece in pieces if piece.strip()]
    whole = "".join(pieces)
    rest = "".join(bare).replace("x", "")
    # With blanks out and one x per run of them: exactly this.
    squeezed = "".join(piece for i, piece in enumerate(bare) if piece != "x" or i == 0 or bare[i - 1] != "x")
    expected = squeezed == "<think>x</think><answer>x</answer>"
    assert form(whole, "p", think_opened=False) == float(expected)
    assert not expected or rest == "<think></think><answer></answer>"


# Patterns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"column": "answer"}])
def test_a_pattern_that_runs_away_costs_its_row_and_its_time(settings):
    reward = RegexReward(r"(?:(?:a|b|ab)+)+$", timeout=0.2, **settings)
    metrics = {}
    begun = time.monotonic()
    completions = ["ab" * 200 + "!", "ab"]
    rewards = reward(completions=completions, answer=["x", "ab"], log_metric=metrics.__setitem__)
    assert rewards == [0.0, 1.0]
    assert metrics == {"rewards/regex_reward/failed_frac": 0.5}
    assert time.monotonic() - begun < 10
    with pytest.raises(RewardError, match="regex_reward"):
        RegexReward(r"(?:(?:a|b|ab)+)+$", timeout=0.2, on_error="raise")(completions=completions)


# JSON ----------------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def test_json_of_any_depth_and_length_ends():
    completions = ["[" * 900 + "]" * 900, "[" * 100_000, "1" * 10_000]
    assert JsonSchemaReward(PERSON, invalid_score=0.25)(completions=completions) == [0.25, 0.0, 0.0]


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


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(InputError, match=r"pip install \"trl-drgrpo\[json\]\""):
        JsonSchemaReward(PERSON)
    assert JsonSchemaReward()(completions=["1"]) == [1.0]  # any JSON needs no schema


# Penalties -----------------------------------------------------------------------------------------------------------

IDS = [[1, 2, 3, 1, 2, 3], [7] * 10, [], [1, 2], list(range(95)), list(range(200))]


def test_they_are_trls():
    assert repetition_penalty(2, -0.5)(completion_ids=IDS) == get_repetition_penalty_reward(2, -0.5)(IDS)
    assert overlong_penalty(100, 20)(completion_ids=IDS) == get_soft_overlong_punishment(100, 20)(IDS)
    assert overlong_penalty(100, 20)(completion_ids=[[0] * 90]) == [-0.5]  # half way from 80 to 100


@pytest.mark.parametrize("reward", [repetition_penalty(), overlong_penalty(100, 20)])
def test_they_travel_and_read_token_ids(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(completions=["x"], completion_ids=[[1] * 200]) == reward(completion_ids=[[1] * 200])
    assert reward(completion_ids=[[1] * 200])[0] < -0.9
    check_columns(reward, ["prompt"], reward.__name__)
