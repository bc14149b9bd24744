"""What the benchmarks share: the environment, their command line, trainers, models, pairs of runs, and tables.

Machines are noisy: runs that are compared take turns in one process, the ratio is taken pair by pair, and its median
counts. The first pair warms up.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import transformers
from datasets import Dataset
from datasets.utils import disable_progress_bars
from runs import build
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOTrainer

KINDS = {
    "ours": (DrGRPOTrainer, {}),
    "alone": (DrGRPOTrainer, {"share_prompts": False}),
    "stock": (GRPOTrainer, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
}


def command_line(doc, pairs):
    """A parser with what every benchmark has, for more to be added."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs, help="interleaved pairs of runs, after one that warms up")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def quietly(parser):
    """The parsed command line; from here on the libraries print nothing."""
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    torch.set_num_threads(arguments.threads)
    return arguments


def settings_of(folder, steps, device="cpu", **fields):
    """Fields of a configuration that trains and does nothing else."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    place = {"use_cpu": device == "cpu", "bf16": device != "cpu"}
    return {"output_dir": folder, "max_steps": steps, **quiet, **place, **fields}


def trainer_of(trainer_class, folder, steps, prompts, reward, model=None, device="cpu", options=None, **fields):
    """A trainer that prints no logs; `options`: further arguments of its class, `fields`: of the configuration."""
    data = Dataset.from_dict({"prompt": prompts})
    run = settings_of(folder, steps, device, **fields)
    return without_prints(build(trainer_class, run, data, tiny_tokenizer(), reward, model, **(options or {})))


def random_model(config, device="cpu"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device)


def without_prints(trainer):
    """The trainer, which prints no logs."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


class StepClock(TrainerCallback):
    """Notes when each optimizer step began and ended."""

    def __init__(self, device="cpu"):
        self.device, self.begins, self.ends = device, [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begins.append(now(self.device))

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(now(self.device))


def now(device):
    """Process CPU seconds; seconds of wall-clock on a GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(pairs, *runs):
    """Per run its results, one for each pair; which run begins alternates."""
    results = [[] for _ in runs]
    for pair in range(pairs + 1):
        order = list(zip(runs, results, strict=True))
        for run, own in reversed(order) if pair % 2 else order:
            own.append(run())
            gc.collect()
    return [own[1:] for own in results]


def ratio(numerators, denominators, digits=2):
    """The ratio, pair by pair: median, and least to most."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return f"{statistics.median(ratios):.{digits}f}x ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})"


def print_row(*cells):
    """A line of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_head(*cells):
    print_row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def medians(stock, ours, digits=2):
    """Cells: the median of each, and their ratio."""
    return (*(f"{statistics.median(each):.{digits}f}" for each in (stock, ours)), ratio(stock, ours, digits))
