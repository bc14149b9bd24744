"""Short training runs that several test files compare."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from tiny import tiny_model


def length_reward(completion_ids, **kwargs):
    """A reward that varies within every group."""
    return [float(sum(ids) % 3) for ids in completion_ids]


def parity_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 2) for ids in completion_ids]


def failing(call):
    """`length_reward`, which raises once, at its n-th call."""
    calls = []

    def fails(completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("judge is down")
        return length_reward(completion_ids)

    return fails


def step_reward(step_ends, completion_ids, **kwargs):
    """Of a step, by the token that ends it."""
    return [[float(ids[end] % 3) for end in ends] for ids, ends in zip(completion_ids, step_ends, strict=True)]


def short_run(output_dir):
    """Fields of a configuration for a run of a second: 8 rows per step in two micro-batches, groups of 4."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


# What makes TRL's trainer compute the objective of ours.
STOCK = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_cpu": True, "bf16": False}


def build(trainer_class, settings, prompts, tokenizer, reward, model=None, **trainer_arguments):
    """A trainer, ours or TRL's, of the tiny model where none is given."""
    from trl import GRPOConfig

    from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

    return trainer_class(
        model=model or tiny_model(tokenizer),
        reward_funcs=reward,
        args=(DrGRPOConfig if issubclass(trainer_class, DrGRPOTrainer) else GRPOConfig)(**settings),
        train_dataset=prompts,
        processing_class=tokenizer,
        **trainer_arguments,
    )


def train(*arguments, resume=None, **trainer_arguments):
    """As `build`, trained; `resume`: the checkpoint that it goes on from, or `True` for the newest."""
    trainer = build(*arguments, **trainer_arguments)
    trainer.train(**({} if resume is None else {"resume_from_checkpoint": resume if resume is True else str(resume)}))
    return trainer


ARGUMENTS = ("model", "resume", "eval_dataset", "callbacks", "optimizers", "peft_config", "quantization_config")
ARGUMENTS += ("tools", "environment_factory", "rollout_func", "step_reward_funcs", "step_segmenter", "advantage_func")
ARGUMENTS += ("features",)


def sharing(do, settings, prompts, tokenizer, reward):
    """`build` or `train` with these unless others are given: `ARGUMENTS` of theirs, or else fields of the
    configuration."""
    from trl_drgrpo import DrGRPOTrainer

    def call(reward=reward, *, trainer_class=DrGRPOTrainer, data=prompts, **given):
        arguments = {name: given.pop(name) for name in ARGUMENTS if name in given}
        return do(trainer_class, {**settings, **given}, data, tokenizer, reward, **arguments)

    return call


class Keeping:
    """In front of a trainer's class: it keeps generation batches with their advantages, before they are shuffled, and
    those that are credited."""

    credits: tuple = ()

    def on_rollouts(self, batch, rollouts):
        self.rollouts = super().on_rollouts(batch, rollouts)
        return self.rollouts

    def on_credit(self, batch):
        self.credited, self.credits = batch, (*self.credits, batch)
        super().on_credit(batch)


def logged(trainer, metric):
    """Its values, log by log."""
    return [entry[metric] for entry in trainer.state.log_history if metric in entry]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


@contextmanager
def written_elsewhere(path, is_file=False):
    """Inside the block another process, which it gives, writes to a folder or a file."""
    source = "import sys; from pathlib import Path; from trl_drgrpo.common.disk import sole_writer\n"
    source += f"with sole_writer('', Path({str(path)!r}), is_file={is_file}): print('held', flush=True), input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", source], text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def write_lines(path, rows):
    """Writes JSON Lines, and their folder if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_lines(path):
    """What JSON Lines hold."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
