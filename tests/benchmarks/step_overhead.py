"""The price of checks, advantages and hooks: stock GRPOTrainer with the two switches against DrGRPOTrainer, CPU time.

Both trainers run the same geometry on the same completions and the same tiny model, and ours keeps TRL's
micro-batches: the objective is the same bit for bit. `fast_path.py` and `whole_step.py` are about what planning saves.

Run: `make bench-overhead` (about two minutes). Prints a table; the figures in the docs name their date and machine.
"""

import tempfile
from functools import partial

from bench import KINDS, command_line, interleaved, medians, now, print_head, print_row, quietly, trainer_of
from runs import length_reward


def fixed_rollouts(prompts, trainer):
    """Completions of 16 to 64 tokens, the same for every trainer."""
    completions = [[40 + (7 * row + t) % 200 for t in range(16 + (row * 13) % 49)] for row in range(len(prompts))]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def fixed(kind, steps):
    """Seconds of an optimizer step on fixed completions."""
    trainer_class, settings = KINDS[kind]
    geometry = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_generations": 8}
    settings = {**settings, **({"micro_batching": "upstream"} if kind == "ours" else {})}
    fields = {**settings, **geometry, "max_completion_length": 64, "logging_steps": steps}
    prompts, options = [f"{i}+{i * i}=" for i in range(64)], {"rollout_func": fixed_rollouts}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(trainer_class, folder, steps, prompts, length_reward, options=options, **fields)
        start = now("cpu")
        trainer.train()
        return (now("cpu") - start) / steps


def main():
    parser = command_line(__doc__, pairs=9)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per run on fixed completions")
    arguments = quietly(parser)
    print_head("case", "stock, s", "ours, s", "stock / ours (min to max)")
    runs = [partial(fixed, kind, arguments.steps) for kind in ("stock", "ours")]
    print_row("fixed completions", *medians(*interleaved(arguments.pairs, *runs), digits=3))


if __name__ == "__main__":
    main()
