"""What the diagnostics cost: process CPU time of the demo's training steps with and without them.

`on` is the default: statistics, phase times, run log with four groups per batch, warnings. `off` has no diagnostics at
all: the hooks do nothing. Both train on the same prompts and seeds (the completions are the same, since nothing here
touches a random generator). The time inside the hooks is measured too, which noise moves less.

Run: `python tests/benchmarks/diagnostics_overhead.py` (about five minutes).
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from bench import command_line, cpu_seconds, interleaved, quietly, ratio

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.demo.task import list_sum_reward, make_dataset

HOOKS = ("on_credit", "on_log", "on_train_begin", "on_train_end", "on_step_end")


def seconds(steps, sees):
    """Process CPU seconds of `steps` training steps, and those inside the hooks of the diagnostics."""
    inside = []

    def timed(hook):
        def run(*args, **kwargs):
            start = time.process_time()
            hook(*args, **kwargs)
            inside.append(time.process_time() - start)

        return run

    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(Path(folder), 0, steps)
        trainer = DrGRPOTrainer(str(MODEL_DIR), list_sum_reward, args, make_dataset(8 * steps, "train", 0))
        for name in HOOKS:
            setattr(trainer.diagnostics, name, timed(getattr(trainer.diagnostics, name)))
        if not sees:
            trainer.features.remove(trainer.diagnostics)
            trainer.remove_callback(trainer.diagnostics)
        return cpu_seconds(trainer), sum(inside)


def main():
    parser = command_line(__doc__, pairs=9)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per run")
    arguments = quietly(parser)
    on, off = interleaved(
        arguments.pairs, partial(seconds, arguments.steps, True), partial(seconds, arguments.steps, False)
    )
    shares = [inside / whole for whole, inside in on]
    print(f"{arguments.pairs} pairs of {arguments.steps} steps of the demo, process CPU time, one thread")
    print(f"  on / off          {ratio([whole for whole, _ in on], [whole for whole, _ in off], digits=3)}")
    print(f"  inside the hooks  median {statistics.median(shares):.2%} of a step  (max {max(shares):.2%})")


if __name__ == "__main__":
    main()
