"""What environments give to their turns, and what they may not."""

import asyncio
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.step_scorer import StepScorer
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.process_rewards.turns import Failures, TurnRecord, TurnRewards, check_turn_methods, matched_frac


class Counts:
    """Earns 1, 2, 3, ... by turn."""

    def __init__(self):
        self.paid = []

    def on_turn_begin(self):
        self.paid.append(float(len(self.paid) + 1))

    def state_key(self):
        return ("turn", len(self.paid))

    def get_turn_rewards(self):
        return self.paid


class Mute:
    """Defines nothing."""


def changed(**methods):
    return type("Broken", (Counts,), methods)


def rewarded(environments, turns, tokenizer, begun=None, failures=None):
    """Rewards of environments that go through so many turns, or begin so many."""
    failures = failures or Failures()
    record = TurnRecord(environments, reads_states=True, failures=failures)
    for row, count in enumerate(begun or turns):
        for _ in range(count):
            record.begin([row])
    func = TurnRewards(
        next(type(e) for e in environments if not isinstance(e, Mute)),
        lambda: [len(keys) for keys in record.state_keys],
        asyncio.run,
        failures,
    )
    masks = [([1, 0] * count)[:-1] for count in turns]
    scorer = StepScorer([func], step_segmenter("turn"))
    ids = [[65] * len(mask) for mask in masks]
    scores = scorer.score(ids, masks, tokenizer, lambda name, value: None, environments=environments)
    return scores.rewards_per_func[0], record


def test_each_turn_gets_what_its_environment_says(tokenizer):
    environments = [Counts(), Mute(), Counts(), changed()()]  # a subclass has a function of its own, as in TRL
    rewards, record = rewarded(environments, [2, 3, 1, 1], tokenizer)
    assert rewards == [[1.0, 2.0], [None, None, None], [1.0], [None]]
    assert record.state_keys == [[("turn", 1), ("turn", 2)], [None] * 3, [("turn", 1)], [("turn", 1)]]


@pytest.mark.parametrize(
    ("paid", "expected"),
    [([1.0, 2.0, 4.0], [1.0, 6.0]), ([1.0, None, None], [1.0, None]), ([1.0, 2.0, float("nan")], [1.0, 2.0])],
)
def test_a_turn_without_room_pays_to_the_one_before(paid, expected, tokenizer, caplog):
    environment = type("Once", (changed(get_turn_rewards=lambda self: paid),), {})()
    rewards, record = rewarded([environment], [2], tokenizer, begun=[3])
    assert rewards == [expected]
    assert ("Once.get_turn_rewards: NaN counts as None" in caplog.text) == any(each != each for each in paid)
    assert record.states([2]) == [[("turn", 1), ("turn", 2)]]
    assert record.states([4]) == [[("turn", 1), ("turn", 2), ("turn", 3), None]]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("get_turn_rewards", lambda self: [1.0], "1 rewards for row 1; expected 2, one per turn of the model. Append"),
        ("get_turn_rewards", lambda self: 1.0, "float for row 1; expected a list of 2"),
        ("get_turn_rewards", lambda self: [0.0, math.inf], "inf for turn 1 of row 1; expected a finite number"),
        (
            "state_key",
            lambda self: torch.zeros(2),
            "Tensor .* row 1, turn 0; expected a hashable that equals its copy",
        ),
        ("state_key", lambda self: (1, math.nan), "tuple .* for row 1, turn 0"),
        ("state_key", lambda self: lambda: 0, "function .* for row 1, turn 0"),
        ("on_turn_begin", lambda self: 1 / 0, "ZeroDivisionError: .* for row 1, turn 0"),
    ],
)
def test_a_method_that_breaks_its_contract_is_one_line(name, method, message, tokenizer):
    with pytest.raises(RewardError, match=f"^Broken.{name}: got {message}"):
        rewarded([Mute(), changed(**{name: method})()], [1, 2], tokenizer)


def test_a_result_that_breaks_the_contract_may_cost_one_row(tokenizer, caplog):
    broken, failures = changed(get_turn_rewards=lambda self: [1.0]), Failures(raises=False)
    rewards, record = rewarded([broken(), broken(), broken()], [1, 2, 1], tokenizer, failures=failures)
    assert rewards == [[1.0], [None, None], [1.0]]
    assert failures.rows == {1}
    assert record.states([1, 2, 1])[1] == [None, None]
    assert caplog.text.count("its row is left out of its group") == 1


def test_states_match_over_the_rows_of_a_group():
    keys = [["a", "b", "b"], ["a", "a", None], ["b"], ["b", "c"]]
    assert matched_frac(keys, 2) == 1 / 5  # the "a" that row 1 comes back to; a row's own second visit is none
    assert matched_frac([["a"], ["a"]], 2) is None


def test_the_environment_says_whether_a_turns_reward_knows_later_ones():
    for said in (True, False):
        environment_class = type("Says", (Counts,), {"is_causal": said})
        assert TurnRewards(environment_class, list, asyncio.run).is_causal is said
    assert TurnRewards(Counts, list, asyncio.run).is_causal is None


def test_the_example_of_the_recipe_plays():
    page = (Path(__file__).parents[3] / "recipes" / "guides" / "environments.md").read_text()
    (block,) = re.findall(r"^## An environment\n.*?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "environments.md", "exec"), names := {})
    game = names["GuessNumber"]()
    check_turn_methods(type(game))
    game.reset(number=76, prompt="unused")
    record = TurnRecord([game], reads_states=True)
    for guesses in ([50], [], [60, 90], [76]):
        record.begin([0])
        said = [game.guess(guess) for guess in guesses]
    assert said == ["found"]
    assert record.state_keys == [[(1, 100), (51, 100), (51, 100), (61, 89)]]
    earned = [0.5, 0.0, 1 - 40 / 50 + 1 - 29 / 40, 1 - 1 / 29]
    rewards = TurnRewards(type(game), lambda: [4], asyncio.run)
    assert rewards(environments=[game], steps=[["turn"] * 4]) == [pytest.approx(earned)]
    assert game.get_reward() == 1.0


async def later(self):
    return 0


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("state_key", later, "an asynchronous method; expected a plain one"),
        ("get_turn_rewards", [1.0], "list; expected a method"),
        (
            "state_key",
            lambda self, row: row,
            r"state_key\(self, row\); expected a method without arguments: .* another name",
        ),
        ("state_key", lambda self, row=0: row, r"state_key\(self, row=0\)"),
        ("on_turn_begin", classmethod(lambda cls, row: row), r"on_turn_begin\(row\)"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused(name, method, message):
    with pytest.raises(InputError, match=f"^Broken.{name}: got {message}"):
        check_turn_methods(changed(**{name: method}))
    check_turn_methods(changed(get_turn_rewards=later, state_key=staticmethod(lambda: 0)))
    check_turn_methods(changed(state_key=lambda *args, **kwargs: 0))  # as a decorator leaves it


def test_states_of_a_class_within_a_function_have_values(tokenizer):
    @dataclass(frozen=True)
    class Place:
        x: int

    assert rewarded([changed(state_key=lambda self: Place(1))()], [1], tokenizer)[1].states([1]) == [[Place(1)]]
