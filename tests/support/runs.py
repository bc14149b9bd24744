"""Short training runs that several test files compare."""

import subprocess
import sys
from contextlib import contextmanager

import torch

from trl_drgrpo.check.tiny import tiny_model


def length_reward(completion_ids, **kwargs):
    """A reward that varies within every group."""
    return [float(sum(ids) % 3) for ids in completion_ids]


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


def train(trainer_class, config_class, settings, prompts, tokenizer, reward, model=None, **trainer_arguments):
    trainer = trainer_class(
        model=model or tiny_model(tokenizer),
        reward_funcs=reward,
        args=config_class(**settings),
        train_dataset=prompts,
        processing_class=tokenizer,
        **trainer_arguments,
    )
    trainer.train()
    return trainer


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
