"""Environments that reward their turns: who is credited with what, and what the model may not see."""

import itertools
import json
import pickle
import re
from dataclasses import replace
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import runs
from datasets import Dataset
from loopback import Handler, Loopback
from runs import Keeping, assert_same_weights, short_run, weights
from walk import SAYS, Scripted, Walk, with_tools

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.features.model_card.objective import objective_of

# What the rows of `SAYS` earn, turn by turn.
EARNED = [[1.0, 2.0, 0.0], [2.0, 0.0, 0.0], [2.0, 0.0], [4.0]]
# From turn k on they earn 3 2 0, 2 0 0, 2 0, 4. Less the mean of the three others, 0 for those that have ended:
TO_GO = [[3 - 8 / 3, 2.0, 0.0], [2 - 9 / 3, -2 / 3, 0.0], [2 - 9 / 3, -2 / 3], [4 - 7 / 3]]
# In place 1, row 0 earned 2 from there on and row 2 nothing; in place 2 nobody earned anything.
BY_STATE = [[3 - 8 / 3, 2.0, 0.0], [2 - 9 / 3, 0.0, 0.0], [2 - 9 / 3, -2.0], [4 - 7 / 3]]


class Kept(Keeping, Scripted):
    """Keeps the batches."""


def build(folder, data=({},), **changes):
    model, tokenizer = with_tools()
    rows = [{"prompt": [{"role": "user", "content": "Walk."}], **row} for row in data]
    settings = {**short_run(folder), "max_steps": 1, "max_completion_length": 512, "run_log": False}
    data = Dataset.from_list(rows * (16 // len(rows)))
    changes = {"trainer_class": Kept, **changes}
    return runs.sharing(runs.build, settings, data, tokenizer, None)(model=model, **changes)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A run of two steps with checkpoints, a run log and an evaluation; no reward but that of the turns."""
    folder = tmp_path_factory.mktemp("turns")
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "run_log": True, "record_groups": -1}
    trainer = build(folder, environment_factory=Walk, **fields)
    trainer.train()
    trainer.run = SimpleNamespace(credited=trainer.credited, rollouts=trainer.rollouts, folder=folder, fields=fields)
    return trainer


def test_every_turn_carries_what_it_earned_beyond_the_others(walked):
    batch = walked.run.credited
    assert batch.step_rewards == EARNED * 2
    assert batch.state_keys == [[0, 1, 2], [0, 2, 2], [0, 1], [0]] * 2
    for state_keys, expected in ((batch.state_keys, BY_STATE), (None, TO_GO)):
        advantages = walked.compute_advantages(replace(batch, state_keys=state_keys))
        found = [[advantages[i, end].item() for end in ends] for i, ends in enumerate(_last_words(batch))]
        assert found == [pytest.approx(row, abs=1e-6) for row in expected * 2]


def _last_words(batch):
    """For each row the last token of each turn that the model wrote."""
    found = []
    for mask, ends in zip(batch.trained_mask.tolist(), batch.step_ends, strict=True):
        found.append([max(t for t in range(end + 1) if mask[t]) for end in ends])
    return found


def test_tokens_of_the_environment_carry_no_advantage(walked):
    advantages, tool_mask = walked.run.rollouts["advantages"], walked.run.rollouts["tool_mask"]
    written_by_it = walked.run.credited.completion_mask.bool() & (tool_mask == 0)
    assert written_by_it.sum() > 100
    assert advantages[written_by_it].abs().max() == 0
    assert advantages[0, : walked.run.credited.step_ends[0][0]].abs().max() > 0


def test_the_model_sees_tools_and_nothing_else_of_an_environment(walked):
    assert [tool.__name__ for tool in walked.tools] == ["go"]
    prompt = walked.processing_class.decode(walked.run.rollouts["prompt_ids"][0])
    assert '"go"' in prompt
    assert not re.search("state_key|get_turn_rewards|on_turn_begin", prompt)
    answers = [m["content"] for m in walked.run.credited.scored.completions[1] if m["role"] == "tool"]
    assert answers == ["at 2", "{'error': 'Tool get_turn_rewards not found.'}"]


def test_log_and_recorded_completions_have_turns_as_steps(walked):
    logs = walked.state.log_history[0]
    assert logs["process_rewards/Walk/mean"] == pytest.approx(11 / 9)
    assert logs["process/steps_mean"] == pytest.approx(9 / 4)
    facts = json.loads((walked.run.folder / "_drgrpo" / "run.json").read_text())
    assert facts["step_rewards"] == {"names": ["Walk"], "weights": [1.0]}
    assert facts["objective"]["step_separator"] == ["turn"]
    assert facts["objective"]["state_keys"] == ["Walk"]
    assert any("(state_key of Walk)" in note for note in objective_of(walked)[1])
    group = json.loads((walked.run.folder / "_drgrpo" / "completions.jsonl").read_text().splitlines()[0])
    for row, earned, expected in zip(group["rows"], EARNED, BY_STATE, strict=True):
        own = [span for span in row["spans"] if not span["masked"]]
        assert [span["step"] for span in own] == list(range(len(earned)))
        assert [span["step_reward"] for span in own] == earned
        assert [span["advantage"] for span in own] == pytest.approx(expected, abs=1e-3)
    assert walked.describing.failures == {}


def test_a_turn_has_a_limit_of_its_own(tmp_path):
    """In every turn, while L and the room for all turns stay those of `max_completion_length`."""
    asked = []

    class Unscripted(runs.Keeping, DrGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            sampled = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            asked.append([len(ids) for ids in sampled[0]])
            sampled[0][:] = [self.processing_class.encode(SAYS[0][0] + "<|im_end|>") for _ in prompt_ids]
            return sampled

    trainer = build(tmp_path, environment_factory=Walk, max_turn_length=5, trainer_class=Unscripted)
    trainer.train()
    assert len(asked) > 1
    assert max(map(max, asked)) == 5
    assert trainer.loss_normalizer == 512
    assert max(trainer.credited.completion_mask.sum(dim=1)) > 5


def test_an_evaluation_credits_turns_too(walked):
    metrics = walked.evaluate(Dataset.from_list([{"prompt": [{"role": "user", "content": "Walk."}]}] * 2))
    assert metrics["eval_process_rewards/Walk/mean"] == pytest.approx(11 / 9)
    assert not walked.credited.training
    assert walked.credited.step_rewards[:4] == EARNED


def test_a_resumed_run_is_the_same_run(walked, caplog):
    resumed = build(walked.run.folder, environment_factory=Walk, **walked.run.fields)
    resumed.train(resume_from_checkpoint=str(walked.run.folder / "checkpoint-1"))
    assert_same_weights(weights(walked), weights(resumed))
    assert "objective differs" not in caplog.text


# Beside other rewards, other environments, and no environment at all


class Later(Walk):
    """The same, asynchronous, with an outcome, and a long answer that leaves the model no room for another turn."""

    room = 0

    def go(self, row: int, to: int) -> str:
        answer = super().go(row, to)
        return "x" * self.room if to == 4 else answer

    go.__doc__ = Walk.go.__doc__

    async def get_turn_rewards(self):
        return self.paid

    def get_reward(self):
        return float(self.place)


class Idle:
    """Rewards no turns."""

    def reset(self, **kwargs):
        return None

    def go(self, row: int, to: int) -> str:
        """Go nowhere.

        Args:
            row: Who goes.
            to: The place.

        Returns:
            Nothing.
        """
        return ""


def number_of_environments(environments, steps, **kwargs):
    return [[len(environments) / 10] * len(turns) for turns in steps]


def test_several_environments_stand_beside_outcomes_and_step_rewards(walked, tmp_path, monkeypatch):
    around = (walked.run.rollouts["tool_mask"][0] == 0).sum().item() // 2 - len("at 1")  # a tool's answer in tokens
    call_length = len(walked.processing_class.encode(SAYS[3][0] + "<|im_end|>"))
    monkeypatch.setattr(Later, "room", 512 - call_length - around)
    trainer = build(
        tmp_path,
        data=[{"environment": "later"}, {"environment": "idle"}],
        environment_factory={"later": Later, "idle": Idle},
        step_reward_funcs=number_of_environments,
        step_reward_weights=[10.0],
        step_baseline="none",
        shuffle_dataset=False,
    )
    trainer.train()
    batch = trainer.credited
    assert trainer.step_scorer.names == ["number_of_environments", "Later"]
    assert batch.steps.rewards_per_func[1][:4] == EARNED
    assert {reward for row in batch.steps.rewards_per_func[1][4:] for reward in row} == {None}
    assert batch.trained_mask[3].sum() == call_length < batch.completion_mask[3].sum() == 512  # the turn that is none
    assert batch.step_rewards[0] == [9.0, 10.0, 8.0]  # 10 * 0.8 and what the turn earned
    assert batch.step_rewards[4] == [8.0, 8.0, 8.0]
    assert trainer.reward_func_names == ["Later"]
    assert batch.rewards[:4].tolist() == [2.0, 2.0, 1.0, 4.0]
    assert batch.state_keys is None


def test_rows_of_an_environment_fill_a_batch(tmp_path):
    """One prompt and sixteen tasks: an environment reads the other columns, so these are different ones."""
    sampling = {"dynamic_sampling": True, "curriculum": True, "max_sampling_rounds": 4, "correct_threshold": 2.0}
    trainer = build(tmp_path, data=[{"task": i} for i in range(16)], environment_factory=Later, **sampling)
    trainer.train()
    step = trainer.state.log_history[0]
    assert step["sampling/groups_trained"] == 2
    assert step["sampling/tokens_per_live_group"] > 0
    assert list(trainer.sampling.pass_rates.counts.values()) == [(3.0, 4.0)] * int(step["sampling/groups_generated"])


class Still:
    """Has no tools, so there is one turn."""

    def reset(self, **kwargs):
        self.paid = 0.5

    def get_turn_rewards(self):
        return [self.paid]


def test_an_environment_without_tools_rewards_its_only_turn(tmp_path):
    trainer = build(tmp_path, environment_factory=Still, per_device_eval_batch_size=16)
    trainer.train()
    assert trainer.tools == []
    assert trainer.credited.step_rewards == [[0.5]] * 8
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.credited.step_rewards == [[0.5]] * 16


def go(row: int, to: int) -> str:
    """Go to a place.

    Args:
        row: Who goes.
        to: The place.

    Returns:
        Where it is.
    """
    return f"at {to}"


def test_with_tools_alone_a_turn_is_a_step(tmp_path):
    def calls(steps, **kwargs):
        return [[float(turn.count("<tool_call>")) for turn in turns] for turns in steps]

    trainer = build(tmp_path, tools=[go], step_reward_funcs=calls)
    trainer.train()
    assert trainer.credited.step_rewards[:3] == [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [2.0, 0.0]]
    assert trainer.credited.state_keys is None
    assert trainer.step_separator == ["turn"]
    assert trainer.describing.failures == {}


def test_states_that_nothing_is_compared_by_are_told_once(tmp_path, caplog):
    trainer = build(tmp_path, environment_factory=Walk, step_baseline="none")
    assert caplog.text.count("Walk.state_key() is not used") == 1
    assert trainer.turns.state_keys_of is None


# What fails


class Fragile(Walk):
    """Of each batch, row 1 fails in `breaks`, from the batch number `at` on."""

    breaks, at, made = "", 0, 0

    def __init__(self):
        self.row, self.batches = type(self).made, -1
        type(self).made += 1

    def get_reward(self):
        return float(self.place)


def breaking(name, works):
    def method(self, **columns):
        self.batches += name == "reset"
        if (self.row, name) == (1, self.breaks) and self.batches >= self.at:
            raise KeyError(name)
        return works(self, **columns)

    return method


METHODS = ("reset", "on_turn_begin", "state_key", "get_turn_rewards", "get_reward")
for each in METHODS:
    setattr(Fragile, each, breaking(each, getattr(Fragile, each)))


class FragileLater(Fragile):
    async def get_turn_rewards(self):
        return super().get_turn_rewards()

    async def get_reward(self):
        return super().get_reward()


FAILURES = [(Fragile, name) for name in METHODS] + [(FragileLater, name) for name in METHODS[-2:]]


@pytest.mark.parametrize(("environment", "method"), FAILURES)
def test_an_environment_that_fails_may_cost_its_row(environment, method, tmp_path, caplog):
    broken = type("Broken", (environment,), {"breaks": method})
    trainer = build(
        tmp_path,
        environment_factory=broken,
        reward=number_of_answers,
        step_reward_funcs=number_of_environments,
        on_reward_error="unscorable",
    )
    trainer.train()
    batch = trainer.credited
    assert batch.rewards.isnan().tolist() == [False, True] + [False] * 6
    assert batch.step_rewards[1] == batch.state_keys[1] == [None] * len(batch.step_rewards[1])
    assert batch.step_rewards[4:] == [[r + 0.8 for r in row] for row in EARNED]
    assert trainer.state.log_history[0]["rewards/Broken/failed_frac"] == 1 / 8
    assert caplog.text.count("its row is left out of its group") == 1
    assert f"Broken.{method}: got KeyError: '{method}' for row 1" in caplog.text
    assert "on_reward_error" not in caplog.text  # that is what happened


def number_of_answers(completions, **kwargs):
    return [float(len(messages)) for messages in completions]


@pytest.mark.parametrize(("environment", "method"), FAILURES)
def test_an_environment_that_fails_ends_the_run_with_a_checkpoint(environment, method, tmp_path):
    broken = type("Broken", (environment,), {"breaks": method, "at": 1})
    trainer = build(tmp_path, environment_factory=broken, max_steps=3)
    with pytest.raises(RewardError, match=f"^Broken.{method}: got KeyError: '{method}' for row 1") as failure:
        trainer.train()
    assert isinstance(failure.value.__cause__, KeyError)
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


class Numbered:
    """Takes no attribute beside its slot, and copies itself. Row 1 fails in `reset`, row 2 in `get_reward`."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number

    def reset(self, **columns):
        assert pickle.loads(pickle.dumps(self)).number == self.number
        if self.number == 1:
            raise KeyError("reset")

    async def get_reward(self):
        assert (type(self).reset, type(self).get_reward) == METHODS_OF_NUMBERED
        if self.number == 2:
            raise KeyError("reward")
        return float(self.number)


METHODS_OF_NUMBERED = (Numbered.reset, Numbered.get_reward)


class Inheriting(Numbered):
    __slots__ = ()


def test_two_trainers_share_a_class_and_change_neither_it_nor_its_instances(tmp_path):
    trainers = [
        build(
            tmp_path / on_error,
            environment_factory=lambda numbers=itertools.count(): Inheriting(next(numbers)),  # noqa: B008
            on_reward_error=on_error,
            max_completion_length=8,
        )
        for on_error in ("raise", "unscorable")
    ]
    with pytest.raises(RewardError, match=r"^Inheriting.reset: got KeyError: 'reset' for row 1; "):
        trainers[0].train()
    trainers[1].train()
    assert trainers[1].credited.rewards[:3].isnan().tolist() == [False, True, True]
    assert trainers[1].credited.rewards[3:].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert [type(trainers[1].environments), *map(type, trainers[1].environments)] == [list] + [Inheriting] * 8
    assert not {"reset", "get_reward"} & vars(Inheriting).keys()
    assert Inheriting.__subclasses__() == []


class Judges(Walk):
    """Row 2 cannot be judged, row 3 has no number."""

    def get_reward(self):
        return {1: None, 4: float("nan")}.get(self.place, 1.0)


def test_a_none_leaves_a_row_out_and_so_does_a_nan_with_a_warning(tmp_path, caplog):
    trainer = build(tmp_path, environment_factory=Judges)
    trainer.train()
    assert trainer.credited.rewards.isnan().tolist() == [False, False, True, True] * 2
    assert caplog.text.count("Judges.get_reward: NaN counts as None") == 1
    assert trainer.state.log_history[0]["process/state_matched_frac"] == 1.0


class Verbose(Walk):
    """No answer fits."""

    def go(self, row: int, to: int) -> str:
        return super().go(row, to) + "far away " * 100

    go.__doc__ = Walk.go.__doc__


def test_results_that_do_not_fit_are_not_taken_for_no_calls(tmp_path, caplog):
    trainer = build(tmp_path, environment_factory=Verbose)
    trainer.train()
    assert {len(row) for row in trainer.credited.step_rewards} == {1}
    assert "Tools were called, but no result fit: raise max_completion_length" in caplog.text
    assert "No tool was called" not in caplog.text


# Recipes, and an environment behind a server


GAME = '''
class Game:
    def reset(self, **columns): self.earned = []
    def on_turn_begin(self): self.earned.append(0.0)
    def get_turn_rewards(self): return self.earned
    def go(self, to: int) -> str:
        """Go.

        Args:
            to: The place.
        """
        return str(to)
class NoReset:
    pass
class Mute(Game):
    def say(self, word): return word
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b
def bare(a): return a
five = 5
'''


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Exit code, and standard output and error, of a dry run with such keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"Walk {i}."}]}) + "\n" for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(rows))

    def run(**keys):
        given = {"model_name_or_path": "trl_drgrpo:demo", "dataset_name": "data.jsonl", "output_dir": "out", **keys}
        given["max_completion_length"] = 32
        (tmp_path / "recipe.yaml").write_text(json.dumps(given))
        return main(["train", "--config", "recipe.yaml", "--dry_run"]), *capsys.readouterr()

    return run


def test_a_recipe_names_environments_and_tools(planned, capsys):
    code, out, err = planned(environment_factory="game.py:Game")
    assert code == 0, err
    assert "environment_factory: game.py:Game" in out
    code, out, err = planned(tools=["game.py:add"], reward_funcs=["accuracy_reward"])
    assert "accuracy_reward" in err  # its column is missing; the tool is fine
    code, out, err = planned(rollout_func="game.py:add", reward_funcs=["format_reward"])
    assert code == 0, err
    fields = ["--reward_funcs", "nonsense"]  # is found out behind it
    assert main(["eval", "--config", "recipe.yaml", *fields]) == 2
    assert "rollout_func: not used here. Answers are sampled in one turn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment_factory": "game.py:Gane"}, "Did you mean Game"),
        (
            {"environment_factory": "nowhere.py:Game"},
            "got 'nowhere.py:Game', a file that does not",
        ),
        ({"environment_factory": "Game"}, "environment_factory: got 'Game'; expected a path."),
        ({"environment_factory": "game.py:five"}, "environment_factory: got int; expected a class or a function."),
        ({"environment_factory": "game.py:NoReset"}, "environment_factory: got NoReset without `reset`"),
        ({"environment_factory": "game.py:Mute"}, "environment_factory: got Mute.say: "),
        ({"tools": ["game.py:bare"], "reward_funcs": ["format_reward"]}, "tools: got bare: "),
        ({"tools": ["game.py:five"], "reward_funcs": ["format_reward"]}, "tools: got int; expected functions."),
    ],
)
def test_a_name_that_is_no_tool_or_environment_is_one_error(planned, keys, message):
    code, out, err = planned(**keys)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


class Remote(Walk):
    """The walk, played on a server; the third call of a game is one that the server refuses."""

    def go(self, row: int, to: int) -> str:
        with urlopen(f"{self.address}/{to}", timeout=5) as answer:
            said = answer.read().decode()
        self.paid[-1] += to
        return said

    go.__doc__ = Walk.go.__doc__


def test_an_environment_may_live_on_a_server(tmp_path):
    class Game(Handler):
        def do_GET(self):
            self.say(500 if self.path == "/4" else 200, {}, f"at {self.path[1:]}".encode())

    class Games(Loopback):
        handler = Game

    with Games() as server:
        Remote.address = server.url
        trainer = build(tmp_path, environment_factory=Remote)
        trainer.train()
    assert trainer.credited.step_rewards[:3] == EARNED[:3]
    assert trainer.credited.step_rewards[3][0] == 0.0  # the server refused: the model was told
    answers = [m["content"] for m in trainer.credited.scored.completions[3] if m["role"] == "tool"]
    assert "HTTP Error 500" in answers[0]
