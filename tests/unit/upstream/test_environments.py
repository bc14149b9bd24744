"""Environments are made as often as TRL makes them, and followed through TRL's loop."""

from types import SimpleNamespace

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream.environments import EnvironmentTurns, ToolLoop


class Game:
    def reset(self, **columns):
        pass

    def get_reward(self):
        return 0.0


class Rewarding:
    def reset(self, **columns):
        pass

    def get_turn_rewards(self):
        return []


def test_a_factory_is_called_as_often_as_environments_are_needed():
    made = []

    def factory():
        made.append(Rewarding())
        return made[-1]

    turns = EnvironmentTurns({"a": factory, "b": Game})
    assert len(made) == 2
    assert [turns.factory["a"](), turns.factory["a"]()] == made
    assert turns.factory["a"]() is made[2]
    assert [func.__name__ for func in turns.step_reward_funcs] == ["Rewarding"]
    assert [func.__name__ for func in turns.outcome_rewards] == ["rewards_now"]
    assert EnvironmentTurns(Rewarding).outcome_rewards == []
    assert isinstance(EnvironmentTurns(Rewarding).factory(), Rewarding)


def test_without_environments_there_is_nothing():
    turns = EnvironmentTurns(None)
    assert (turns.factory, turns.step_reward_funcs, turns.outcome_rewards) == (None, [], [])
    turns.on_turns_begin([0])
    assert turns.state_keys(SimpleNamespace(rewards=[])) is None


one = Game()
mixed = iter([Game, Rewarding])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: one, "environment_factory: got the same Game twice; expected a new environment per call"),
        (lambda: next(mixed)(), "environment_factory: got Game, then Rewarding; expected environments of one class"),
        (Game(), "environment_factory: got Game; expected a class or a function"),
        ({"a": Game, "b": None}, "environment_factory: got NoneType for 'b'; expected a class or a function"),
    ],
)
def test_a_factory_that_makes_no_environment_is_refused(factory, message):
    with pytest.raises(InputError, match=f"^{message}"):
        EnvironmentTurns(factory)


def test_rows_go_on_that_got_a_result_which_was_kept():
    said, result = {"role": "assistant"}, {"role": "tool"}
    conversations = [[said] for _ in range(4)]
    loop = ToolLoop(conversations)
    conversations[0].append(result)
    conversations[1].append(result)
    conversations[2] += [result, result]
    del conversations[2][1:]  # too long: TRL takes it back
    assert loop.rows_that_go_on() == [0, 1]
    conversations[0].append(said)  # row 1 is left no room to speak: it ends with the result
    conversations[0] += [result, result]
    assert loop.rows_that_go_on() == [0]
