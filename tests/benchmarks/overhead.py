"""What diagnostics and step rewards cost in a step of the demo: 64 rows of short list sums, a rule on every line.

Clocks around the parts of one run over its whole process CPU time, one thread. Parts and whole slow down together on a
busy machine, so the shares are steady. Without step rewards no step code is called; `step_overhead.py` compares such a
run with stock TRL.

Run: `python tests/benchmarks/overhead.py --output recipes/results/process_overhead.json` (a minute).
"""

import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from bench import command_line, quietly, without_prints
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo import DrGRPOTrainer, step_advantages
from trl_drgrpo.demo.build import MODEL_DIR
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.demo.task import PROCESS_SETTINGS, line_reward, list_sum_reward, make_dataset
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.upstream.versions import installed_versions

PROMPTS_PER_STEP = 8
HOOKS = ("on_credit", "on_log", "on_train_begin", "on_train_end", "on_step_end")  # of the diagnostics


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


def run(steps):
    """Seconds of a training run, and of its parts."""
    clock = Clock()

    class Timed(DrGRPOTrainer):
        def compute_advantages(self, batch):
            return clock.around("credit", super().compute_advantages)(batch)

    class TimedSegmenter(StepSegmenter):
        def __call__(self, *arguments):
            return clock.around("cutting", super().__call__)(*arguments)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32),
            reward_funcs=list_sum_reward,
            args=training_arguments(Path(folder), 0, steps, **PROCESS_SETTINGS),
            train_dataset=make_dataset(PROMPTS_PER_STEP * steps, "train", 0),
            processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
            step_reward_funcs=clock.around("rule", line_reward),
        )
        segmenter = trainer.step_scorer.segmenter
        trainer.step_scorer.fields = clock.around("steps", trainer.step_scorer.fields)
        trainer.step_scorer.segmenter = TimedSegmenter(segmenter.rule, segmenter.name)
        for name in HOOKS:
            setattr(trainer.diagnostics, name, clock.around("diagnostics", getattr(trainer.diagnostics, name)))
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
    parser = command_line(__doc__, pairs=0)
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = quietly(parser)
    inside = run(options.steps)
    of_steps = inside["steps"] + inside["credit"]
    shares = {f"{name}_frac": inside[name] / inside["train"] for name in ("cutting", "rule", "diagnostics")}
    numbers = {
        "settings": {"steps": options.steps},
        "versions": installed_versions(),
        "inside": {
            "train_ms_per_step": 1e3 * inside["train"] / options.steps,
            "step_rewards_ms_per_step": 1e3 * of_steps / options.steps,
            "step_rewards_frac": of_steps / inside["train"],
            **shares,
        },
        "to_go": {"rows": 1024, "steps": 50, "ms": credit_ms()},
    }
    text = json.dumps(numbers, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
