"""What our side of a training step costs: process CPU time of DrGRPOTrainer over stock GRPOTrainer, on the same work.

Both trainers run the same geometry on the same tiny model and on fixed completions, so that generation and the model
do the same in each, and ours keeps TRL's micro-batches (`fast_path.py` is about planned ones). Runs are interleaved in
one process and the ratio is taken pair by pair, since machines are noisy. The objective is the same bit for bit, so
the ratio is the price of checks, advantages and hooks.

Run: `make bench-overhead` (about two minutes). Prints a table; the figures in the docs name their date and machine.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.simplefilter("ignore")

import torch
import transformers
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

STOCK = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_cpu": True, "bf16": False}


def fixed_rollouts(prompts, trainer):
    """Completions of 16 to 64 tokens, the same for every trainer."""
    completions = [[40 + (7 * row + t) % 200 for t in range(16 + (row * 13) % 49)] for row in range(len(prompts))]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def reward(completion_ids, **kwargs):
    """Varies within every group."""
    return [float(sum(ids) % 3) for ids in completion_ids]


def cpu_seconds(trainer_class, config_class, steps, **fields):
    """Process CPU seconds of `steps` optimizer steps, without the construction."""
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=64,
            max_steps=steps,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            **fields,
        )
        dataset = Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(64)]})
        trainer = trainer_class(
            tiny_model(tokenizer), reward, args, dataset, processing_class=tokenizer, rollout_func=fixed_rollouts
        )
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of runs")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per run")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    stock, ours = [], []
    for pair in range(arguments.pairs + 1):
        timings = (
            cpu_seconds(GRPOTrainer, GRPOConfig, arguments.steps, **STOCK),
            cpu_seconds(DrGRPOTrainer, DrGRPOConfig, arguments.steps, micro_batching="upstream"),
        )
        if pair > 0:  # the first pair warms up
            stock.append(timings[0] / arguments.steps)
            ours.append(timings[1] / arguments.steps)
    ratios = [b / a for a, b in zip(stock, ours, strict=True)]
    print(f"{arguments.pairs} pairs of {arguments.steps} steps, process CPU time per step, one thread")
    print(f"  stock GRPOTrainer, two switches  median {statistics.median(stock) * 1e3:7.1f} ms")
    print(f"  DrGRPOTrainer                    median {statistics.median(ours) * 1e3:7.1f} ms")
    print(f"  ratio ours / stock               median {statistics.median(ratios):.3f}", end="")
    print(f"  (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
