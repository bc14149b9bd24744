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
from trl_drgrpo.rewards.functions.strings import (
    FormatReward,
    JsonSchemaReward,
    RegexReward,
    format_reward,
    json_schema_reward,
    length_penalty,
    overlong_penalty,
    repetition_penalty,
)

RIGHT = "<think>2+2 is 4</think> <answer>4</answer>"
INSIDE = RIGHT.removeprefix("<think>")


def form(completion, prompt=None, **settings):
    reward = FormatReward(**settings)
    return reward(completions=[completion], prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (RIGHT, 1.0),
        (f"\n{RIGHT}\n", 1.0),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a < b > c, <b>bold</b></think><answer>b</answer>", 1.0),
        ("<answer>4</answer> <think>2+2</think>", 0.0),
        ("<think>2+2</think> 4", 0.0),
        ("<think>2+2 <answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        (f"Well, {RIGHT}", 0.0),
        (f"{RIGHT} I hope.", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        (f"{RIGHT}{RIGHT}", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer></answer>", 0.0),
        ("<think>a<answer>b</answer></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</think></answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>\n</answer>", 0.0),
        ("<Think>a</Think><answer>b</answer>", 0.0),
        ("</think><think><answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_tags_in_order_and_once(completion, expected):
    assert form(completion, think_opened=False) == expected
    assert form([{"role": "assistant", "content": completion}], think_opened=False) == expected


@pytest.mark.parametrize(
    ("completion", "prompt", "think_opened", "expected"),
    [
        (INSIDE, "2+2=<think>\n", "auto", 1.0),
        (RIGHT, "2+2=<think>\n", "auto", 0.0),  # opened twice
        (INSIDE, "2+2=", "auto", 0.0),
        (RIGHT, "2+2=", "auto", 1.0),
        (INSIDE, [{"role": "user", "content": "2+2="}], "auto", 1.0),
        (RIGHT, [{"role": "user", "content": "2+2="}], "auto", 1.0),
        (INSIDE, [{"role": "user", "content": "2+2="}], False, 0.0),
        (INSIDE, "2+2=", True, 1.0),
        (RIGHT, "2+2=", True, 0.0),
        ("<answer>4</answer>", "2+2=<think>", "auto", 0.0),
    ],
)
def test_a_template_that_opens_the_tag(completion, prompt, think_opened, expected):
    assert form(completion, prompt, think_opened=think_opened) == expected


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_was_parsed_out_counts(key):
    message = {"role": "assistant", "content": "<answer>4</answer>", key: "2+2 is 4"}
    assert form([message], [{"role": "user", "content": "2+2="}]) == 1.0
    assert form([{**message, key: None}], [{"role": "user", "content": "2+2="}]) == 0.0


def test_other_tags_and_no_answer_tag():
    assert (
        form("<reasoning>a</reasoning><solution>b</solution>", "p", think_tag="reasoning", answer_tag="solution")
        == 1.0
    )
    assert form("<think>a</think> b", "p", answer_tag=None) == 1.0
    assert form("<think>a</think> ", "p", answer_tag=None) == 0.0
    assert form("<think></think> b", "p", answer_tag=None) == 0.0
    assert form("<think>\n\n</think> b", "p", answer_tag=None, allow_empty=True) == 1.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=10))
def test_only_the_one_form_counts(pieces):
    bare = [piece for piece in pieces if piece.strip()]
    whole = "".join(pieces)
    rest = "".join(bare).replace("x", "")
    # With blanks out and one x per run of them: exactly this.
    squeezed = "".join(piece for i, piece in enumerate(bare) if piece != "x" or i == 0 or bare[i - 1] != "x")
    expected = squeezed == "<think>x</think><answer>x</answer>"
    assert form(whole, "p", think_opened=False) == float(expected)
    assert not expected or rest == "<think></think><answer></answer>"


def test_it_travels_and_needs_no_column():
    reward = pickle.loads(pickle.dumps(format_reward))
    assert reward(completions=[RIGHT, "4"]) == [1.0, 0.0]
    check_columns(reward, ["prompt"], "format_reward")


# Patterns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "settings", "completion", "expected"),
    [
        (r"\d", {}, "it is 4", 1.0),
        (r"\d", {"whole": True}, "it is 4", 0.0),
        (r"a.b", {}, "a\nb", 1.0),
        (r"a.b", {"dotall": False}, "a\nb", 0.0),
        (r"ROME", {}, "rome", 0.0),
        (r"ROME", {"ignore_case": True}, "rome", 1.0),
    ],
)
def test_patterns(pattern, settings, completion, expected):
    assert RegexReward(pattern, **settings)(completions=[completion]) == [expected]


@pytest.mark.parametrize(
    ("pattern", "settings", "completion", "truth", "expected"),
    [
        (r"#### *(\S+)", {}, "#### 71\n#### 72", "72", 1.0),
        (r"#### *(\S+)", {}, "#### 72\n#### 71", "72", 0.0),
        (r"\d+", {}, "71 72", 72, 1.0),
        (r"(\w+) is (?P<answer>\w+)", {}, "it is Rome", " Rome ", 1.0),
        (r"(\w+) is (?P<answer>\w+)", {}, "it is rome", "Rome", 0.0),
        (r"(\w+) is (?P<answer>\w+)", {"ignore_case": True}, "it is rome", "Rome", 1.0),
        (r"(\w+)", {"whole": True}, "Rome!", "Rome", 0.0),
        (r"(\d+)", {}, "none", "72", 0.0),
        (r"(\d+)", {}, "72", None, None),
    ],
)
def test_what_was_found_is_held_against_the_column(pattern, settings, completion, truth, expected):
    reward = RegexReward(pattern, column="answer", **settings)
    assert reward(completions=[completion], answer=[truth]) == [expected]


@pytest.mark.parametrize("settings", [{}, {"whole": True}, {"column": "answer"}])
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


def test_a_pattern_travels():
    reward = pickle.loads(pickle.dumps(RegexReward(r"\d", name="digit")))
    assert (reward.__name__, reward(completions=["4", "x"])) == ("digit", [1.0, 0.0])


# JSON ----------------------------------------------------------------------------------------------------------------

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


def test_a_schema_travels():
    reward = pickle.loads(pickle.dumps(JsonSchemaReward(PERSON, name="person")))
    assert (reward.__name__, reward(completions=['{"name": "Ada"}'])) == ("person", [1.0])


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


@given(st.integers(0, 50), st.integers(1, 50), st.floats(-10, 0), st.integers(0, 150))
def test_a_length_costs_nothing_then_more_then_no_more(free, ramp, max_penalty, length):
    [penalty] = length_penalty(free, free + ramp, max_penalty)(completion_ids=[[0] * length])
    share = min(max((length - free) / ramp, 0.0), 1.0)
    assert penalty == pytest.approx(max_penalty * share)


@pytest.mark.parametrize("reward", [repetition_penalty(), overlong_penalty(100, 20), length_penalty(10, 20)])
def test_they_travel_and_read_token_ids(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(completions=["x"], completion_ids=[[1] * 200]) == reward(completion_ids=[[1] * 200])
    assert reward(completion_ids=[[1] * 200])[0] < -0.9
    check_columns(reward, ["prompt"], reward.__name__)
