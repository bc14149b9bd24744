"""Tools and environments of TRL: conversations in which the first turn calls a tool, trained, saved and recorded."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from runs import short_run, train
from transformers import AutoModelForCausalLM
from walk import with_tools

from trl_drgrpo import DrGRPOTrainer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


class Sums:
    """An environment with a tool and a reward of its own."""

    def reset(self, **kwargs) -> str:
        self.sum = 0
        return " Start at 0."

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their sum.
        """
        self.sum += a + b
        return self.sum

    def get_reward(self) -> float:
        return float(self.sum)


class Scripted(DrGRPOTrainer):
    """Every other completion begins with a call; a random model never makes one."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        sampled = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completions = sampled[0]
        if "</tool_response>" not in self.processing_class.decode(prompt_ids[0]):  # the first turn
            completions[::2] = [self.processing_class.encode(CALL) for _ in completions[::2]]
        return sampled


def called(completions, **kwargs):
    """Whether a tool answered."""
    return [float(any(message["role"] == "tool" for message in turns)) for turns in completions]


@pytest.mark.parametrize(
    ("arguments", "reward", "rewards"),
    [
        ({"tools": [add]}, called, [0.0, 1.0]),
        ({"environment_factory": Sums}, None, [0.0, 7.0]),
        pytest.param({"environment_factory": {"sums": Sums}, "tools": []}, called, [0.0, 8.0], marks=pytest.mark.slow),
    ],
    ids=["tools", "environment", "environments"],
)
def test_a_run_with_tools_trains_saves_and_records(arguments, reward, rewards, tmp_path):
    model, tokenizer = with_tools()
    prompt = [{"role": "user", "content": "3 + 4?"}]
    data = Dataset.from_list([{"prompt": prompt, "environment": "sums"}] * 16)
    settings = {
        **short_run(tmp_path),
        "max_steps": 2,
        "max_completion_length": 256,
        "save_strategy": "steps",
        "save_steps": 1,
        "record_groups": -1,
    }
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = train(Scripted, settings, data, tokenizer, reward, model, **arguments)
    trainer.save_model()
    assert trainer.describing.failures == {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert any(not torch.equal(start[name], value) for name, value in loaded.named_parameters())
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0.5
    lines = (Path(tmp_path) / "_drgrpo" / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    assert sorted({row["reward"] for row in rows}) == rewards
    for row in rows:
        answers = [span for span in row["spans"] if "<tool_response>" in span["text"]]
        assert len(answers) == (row["reward"] > 0)
        assert all(span["masked"] and span["advantage"] == 0 for span in answers)


def test_rows_of_an_environment_fill_a_batch(tmp_path):
    """One prompt and sixteen tasks: an environment reads the other columns, so these are different ones."""
    model, tokenizer = with_tools()
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "3 + 4?"}], "task": i} for i in range(16)])
    sampling = {"dynamic_sampling": True, "curriculum": True, "max_sampling_rounds": 4, "correct_threshold": 1.0}
    settings = {**short_run(tmp_path), "max_steps": 1, "max_completion_length": 256, **sampling}
    trainer = train(Scripted, settings, data, tokenizer, None, model, environment_factory=Sums)
    step = trainer.state.log_history[0]
    assert step["sampling/groups_trained"] == 2
    assert step["sampling/tokens_per_live_group"] > 0
    assert list(trainer.sampling.pass_rates.counts.values()) == [(2.0, 4.0)] * int(step["sampling/groups_generated"])
