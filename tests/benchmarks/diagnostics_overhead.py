"""What the diagnostics cost: process CPU time of the demo's training steps with and without them.

`on` is the default: statistics, phase times, run log with four groups per batch, warnings. `off` has no diagnostics at
all: the hooks do nothing. Runs are interleaved in one process on the same prompts and seeds (the completions are the
same, since nothing here touches a random generator), and the ratio is taken pair by pair, since machines are noisy.
The time inside the hooks is measured too, which noise moves less.

Run: `python tests/benchmarks/diagnostics_overhead.py` (about five minutes).
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
warnings.simplefilter("ignore")

import torch
import transformers
from transformers import PrinterCallback
from transformers.trainer_callback import ProgressCallback

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.demo.build import MODEL_DIR
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.demo.task import list_sum_reward, make_dataset

HOOKS = ("on_credit", "on_log", "on_train_begin", "on_train_end", "on_step_end")


class Timed(DrGRPOTrainer):
    """Adds up the process CPU time inside the hooks of the diagnostics."""

    in_hooks = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in HOOKS:
            setattr(self.diagnostics, name, _timed(getattr(self.diagnostics, name)))


def _timed(hook):
    def timed(*args, **kwargs):
        start = time.process_time()
        hook(*args, **kwargs)
        Timed.in_hooks += time.process_time() - start

    return timed


class Blind(DrGRPOTrainer):
    """Sees nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.features.remove(self.diagnostics)
        self.remove_callback(self.diagnostics)


def cpu_seconds(trainer_class, steps):
    """Process CPU seconds of `steps` training steps, without the construction."""
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(Path(folder), 0, steps)
        data = make_dataset(8 * steps, "train", 0)
        trainer = trainer_class(str(MODEL_DIR), list_sum_reward, args, data)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        start = time.process_time()
        trainer.train()
        return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of runs")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per run")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ratios, shares = [], []
    for pair in range(arguments.pairs + 1):
        order = (Timed, Blind) if pair % 2 else (Blind, Timed)
        Timed.in_hooks = 0.0
        seconds = {trainer_class: cpu_seconds(trainer_class, arguments.steps) for trainer_class in order}
        if pair > 0:  # the first pair warms up
            ratios.append(seconds[Timed] / seconds[Blind])
            shares.append(Timed.in_hooks / seconds[Timed])
    print(f"{arguments.pairs} pairs of {arguments.steps} steps of the demo, process CPU time, one thread")
    print(f"  ratio on / off            median {statistics.median(ratios):.3f}", end="")
    print(f"  (min {min(ratios):.3f}, max {max(ratios):.3f})")
    print(f"  inside the hooks          median {statistics.median(shares):.2%} of a step", end="")
    print(f"  (max {max(shares):.2%})")


if __name__ == "__main__":
    main()
