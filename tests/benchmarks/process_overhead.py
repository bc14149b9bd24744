"""What step rewards cost in a step on short list sums: 64 rows, a rule on every line.

Two measurements, both in process CPU time of one thread:

- *inside*: clocks around the parts of one run (cutting into steps, the rule, everything about steps) over its whole
  CPU time. Parts and whole slow down together on a busy machine, so the shares are steady.
- *pairs*: interleaved runs without step rewards and with step rewards of weight 0, on the same seed. Weight 0 makes
  the advantages `(B, T)` with the values that `(B,)` has, so both generate the same completions; the ratio is the
  price of step rewards together with that of the `(B, T)` path in the loss. It carries the machine's noise.

Without step rewards advantages stay `(B,)` and no step code is called; the script checks that, and `step_overhead.py`
compares such a run with stock TRL.

Run: `python tests/benchmarks/process_overhead.py --output recipes/results/process_overhead.json` (two minutes).
"""

import json
import random
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from bench import command_line, interleaved, quietly, without_prints
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo import DrGRPOTrainer, step_advantages
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.demo.task import PROCESS_SETTINGS, line_reward, list_sum_reward, make_dataset
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.upstream.versions import installed_versions

PROMPTS_PER_STEP = 8


class Clock:
    """Process CPU seconds per name."""

    def __init__(self):
        self.seconds = Counter()

    def around(self, name, function):
        """The function, timed."""

        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - start

        timed.__name__ = getattr(function, "__name__", name)
        return timed


def run(steps, process_weight):
    """CPU seconds of `steps` training steps, with its parts; a `process_weight` of `None` means no step rewards."""
    clock, process = Clock(), process_weight is not None

    class Timed(DrGRPOTrainer):
        def on_rollouts(self, rollouts):
            rollouts = clock.around("advantages", super().on_rollouts)(rollouts)
            if rollouts["advantages"].dim() != (2 if process else 1):
                raise RuntimeError(f"advantages of {rollouts['advantages'].dim()} dimensions, process={process}")
            return rollouts

        def _scored_steps(self, *arguments):
            return clock.around("steps", super()._scored_steps)(*arguments)

        def compute_advantages(self, batch):
            return clock.around("credit", super().compute_advantages)(batch)

    class TimedSegmenter(StepSegmenter):
        def __call__(self, *arguments):
            return clock.around("cutting", super().__call__)(*arguments)

    fields = {**PROCESS_SETTINGS, "process_weight": process_weight} if process else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32),
            reward_funcs=list_sum_reward,
            args=training_arguments(Path(folder), 0, steps, **fields),
            train_dataset=make_dataset(PROMPTS_PER_STEP * steps, "train", 0),
            processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
            step_reward_funcs=clock.around("rule", line_reward) if process else None,
        )
        if process:
            segmenter = trainer.step_scorer.segmenter
            trainer.step_scorer.segmenter = TimedSegmenter(segmenter.rule, segmenter.name)
        clock.around("train", without_prints(trainer).train)()
    return clock.seconds


def credit_ms(rows=1024, steps=50):
    """Median time of the default credit alone, in milliseconds."""
    rng = random.Random(0)
    rewards = [[rng.random() for _ in range(steps)] for _ in range(rows)]
    times = []
    for _ in range(25):
        start = time.process_time()
        step_advantages(rewards, 8)
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def main():
    parser = command_line(__doc__, pairs=5)
    parser.add_argument("--steps", type=int, default=20, help="training steps per run")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = quietly(parser)
    plain, with_steps = interleaved(options.pairs, partial(run, options.steps, None), partial(run, options.steps, 0.0))
    inside = run(options.steps, 1.0)
    ratios = [with_them["train"] / without["train"] for with_them, without in zip(with_steps, plain, strict=True)]
    numbers = {
        "settings": {"pairs": options.pairs, "steps": options.steps},
        "versions": installed_versions(),
        "inside": {
            "train_ms_per_step": 1e3 * inside["train"] / options.steps,
            "step_rewards_ms_per_step": 1e3 * (inside["steps"] + inside["credit"]) / options.steps,
            "step_rewards_frac": (inside["steps"] + inside["credit"]) / inside["train"],
            "cutting_frac": inside["cutting"] / inside["train"],
            "rule_frac": inside["rule"] / inside["train"],
        },
        "to_go": {"rows": 1024, "steps": 50, "ms": credit_ms()},
        "without_step_rewards": {
            "advantages_frac": statistics.median(without["credit"] / without["train"] for without in plain),
        },
        "pairs": {"ratio_median": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)},
    }
    numbers = {
        part: {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
        for part, values in numbers.items()
    }
    text = json.dumps(numbers, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
