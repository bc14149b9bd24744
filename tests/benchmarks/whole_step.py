"""A whole optimizer step, generation by transformers: stock GRPOTrainer with the two switches against DrGRPOTrainer.

Generation, rewards, loss and optimizer, of 4 prompts with 8 completions of up to 192 tokens each; the rewards of one
group in four are equal. The model is the Qwen3 of `generation.py`, with random values and 259 tokens, one of which
ends a completion. Both trainers sample from the same seed.
Process CPU time, interleaved in one process, medians over pairs.

Run: this file with `--prompts 64 256 512`, `--pairs 3`.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from datasets import Dataset
from fast_path import KINDS
from generation import GROUP, small_model
from tiny import tiny_tokenizer
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

PROMPTS, DEAD = 4, 1


class StepClock(TrainerCallback):
    """Notes how long the only step took."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.begin = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.process_time() - self.begin


def step(ours, prompt, completion):
    """Seconds of an optimizer step, and its completions."""
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(tuple(ids) for ids in completion_ids)
        groups = {text: number for number, text in enumerate(dict.fromkeys(prompts))}
        return [
            float(groups[text] >= DEAD and sum(ids) % 2) for text, ids in zip(prompts, completion_ids, strict=True)
        ]

    with tempfile.TemporaryDirectory() as folder:
        config = (DrGRPOConfig if ours else GRPOConfig)(
            output_dir=folder,
            **({} if ours else KINDS["stock"][2]),
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=PROMPTS,
            num_generations=GROUP,
            max_completion_length=completion,
            max_steps=1,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        texts = [(f"{number}: " + "abcdefgh " * prompt)[:prompt] for number in range(PROMPTS)]
        trainer = (DrGRPOTrainer if ours else GRPOTrainer)(
            small_model("cpu", vocabulary=259),
            reward,
            config,
            Dataset.from_dict({"prompt": texts}),
            processing_class=tiny_tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        clock = StepClock()
        trainer.add_callback(clock)
        trainer.train()
    gc.collect()
    return clock.seconds, seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", type=int, default=[64, 256, 512], help="tokens of a prompt")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    for ours in (False, True):  # warms up
        step(ours, 16, 8)
    print("| case | stock, s | ours, s | ratio (min to max) | |\n|---|---|---|---|---|", flush=True)
    for prompt in arguments.prompts:
        pairs = [(step(False, prompt, 192), step(True, prompt, 192)) for _ in range(arguments.pairs)]
        stock, ours = ([pair[which][0] for pair in pairs] for which in (0, 1))
        ratios = [a / b for a, b in zip(stock, ours, strict=True)]
        same = "same completions" if all(a[1] == b[1] for a, b in pairs) else "OTHER COMPLETIONS"
        print(
            f"| prompts of {prompt} | {statistics.median(stock):.2f} | {statistics.median(ours):.2f} | "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) | {same} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
