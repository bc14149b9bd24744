"""What our side of a training step costs: process CPU time of DrGRPOTrainer over stock GRPOTrainer, on the same work.

Both trainers run the same geometry on the same tiny model and on fixed completions, so that generation and the model
do the same in each, and ours keeps TRL's micro-batches (`fast_path.py` is about planned ones). The objective is the
same bit for bit, so the ratio is the price of checks, advantages and hooks.

Run: `make bench-overhead` (about two minutes). Prints a table; the figures in the docs name their date and machine.
"""

import statistics
import tempfile
from functools import partial

from bench import KINDS, command_line, cpu_seconds, interleaved, quietly, ratio, settings_of
from datasets import Dataset
from runs import build, length_reward
from tiny import tiny_tokenizer


def fixed_rollouts(prompts, trainer):
    """Completions of 16 to 64 tokens, the same for every trainer."""
    completions = [[40 + (7 * row + t) % 200 for t in range(16 + (row * 13) % 49)] for row in range(len(prompts))]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def step_seconds(kind, steps, **fields):
    """Process CPU seconds of an optimizer step."""
    trainer_class, settings = KINDS[kind]
    tokenizer = tiny_tokenizer()
    geometry = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 8}
    with tempfile.TemporaryDirectory() as folder:
        fields = {**settings, **geometry, "max_completion_length": 64, "logging_steps": steps, **fields}
        prompts = Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(64)]})
        run = settings_of(folder, steps, **fields)
        trainer = build(trainer_class, run, prompts, tokenizer, length_reward, rollout_func=fixed_rollouts)
        return cpu_seconds(trainer) / steps


def main():
    parser = command_line(__doc__, pairs=9)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per run")
    arguments = quietly(parser)
    stock, ours = interleaved(
        arguments.pairs,
        partial(step_seconds, "stock", arguments.steps),
        partial(step_seconds, "ours", arguments.steps, micro_batching="upstream"),
    )
    print(f"{arguments.pairs} pairs of {arguments.steps} steps, process CPU time per step, one thread")
    print(f"  stock GRPOTrainer, two switches  median {statistics.median(stock) * 1e3:7.1f} ms")
    print(f"  DrGRPOTrainer                    median {statistics.median(ours) * 1e3:7.1f} ms")
    print(f"  ours / stock                     {ratio(ours, stock, digits=3)}")


if __name__ == "__main__":
    main()
