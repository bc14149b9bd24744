"""Training phase of an optimizer step: stock GRPOTrainer with the two switches against DrGRPOTrainer, same rollouts.

Both trainers get the same completions and rewards from a table, so generation and rewards cost nothing and every
difference is the loss: forward, backward, optimizer, and on our side planning. A first step on very short completions
is not counted. Process CPU time (wall time on a GPU). The last column is by how much memory grows in a step, each in a
process of its own: gradients, optimizer state, activations.

Run: `make bench`, or this file with `--cases heavy prompt-512`, `--pairs 3`, `--device cuda`. On one CPU core the
whole table takes about 50 minutes. `--against alone`: ours with `share_prompts=False` takes the place of stock.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch
from bench import (
    KINDS,
    StepClock,
    command_line,
    interleaved,
    medians,
    print_head,
    print_row,
    quietly,
    random_model,
    trainer_of,
)
from peft import LoraConfig
from transformers import Qwen2Config

from trl_drgrpo.report.run_folders import read_run

GROUP = 8


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        lengths (`str`): `"mild"` (evenly spread from 1 to the longest), `"heavy"` (log-normal, median 0.3
            of the longest), `"between"` (evenly from half of it on) or `"uniform"` (all the longest).
        dead (`float`): Share of groups whose rewards are equal.
        prompt (`tuple[int, int]`), completion (`int`): Shortest and longest prompt, longest completion, in tokens.
        prompts (`int`): Groups per optimizer step.
        lora (`bool`): Adapters of rank 16 on all linear layers instead of all weights.
        forks (`int`): Rows that go on from the middle of a completion, each by about half of one.
    """

    lengths: str
    dead: float = 0.0
    prompt: tuple[int, int] = (8, 16)
    completion: int = 128
    prompts: int = 10
    lora: bool = False
    forks: int = 1


CASES = {
    **{f"mild-{dead}": Case("mild", dead / 100) for dead in (0, 30, 60)},
    **{f"heavy-{dead}": Case("heavy", dead / 100) for dead in (0, 30, 60)},
    **{f"lora-heavy-{dead}": Case("heavy", dead / 100, lora=True) for dead in (0, 30, 60)},
    "prompt-512": Case("between", prompt=(512, 512), prompts=2),
    "prompt-1024": Case("between", prompt=(1024, 1024), prompts=1),
    "uniform": Case("uniform"),
    "forks-128": Case("between", forks=2),
    "forks-512": Case("between", completion=512, prompts=2, forks=2),
}


def build_model(width, layers, vocabulary, device):
    """A Qwen2 with random weights in which matrix products dominate."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=4096,
    )
    return random_model(config, device)


def rollouts(case, seed):
    """Prompts, completions and rewards of one optimizer step."""
    rng = random.Random(seed)
    prompts, completions, rewards = [], [], []
    for group in range(case.prompts):
        prompt = [rng.randrange(40, 250) for _ in range(rng.randint(*case.prompt))]
        prefix: list[int] = []
        for row in range(GROUP):
            if case.forks > 1 and row % case.forks == 0:
                prefix = [rng.randrange(40, 250) for _ in range(_length(case, rng) // 2)]
            length = _length(case, rng) if case.forks == 1 else (_length(case, rng) + 1) // 2
            prompts.append(prompt)
            completions.append(prefix + [rng.randrange(40, 250) for _ in range(length)])
            rewards.append(float(row % 2) if group >= round(case.dead * case.prompts) else 1.0)
    return prompts, completions, rewards


def _length(case, rng):
    """Length of one completion."""
    longest = case.completion
    if case.lengths == "heavy":
        return min(longest, max(4, round(rng.lognormvariate(0, 0.7) * longest * 0.3)))
    return rng.randint({"mild": 1, "between": longest // 2, "uniform": longest}[case.lengths], longest)


def build_trainer(kind, case, model, folder, steps, batch, device, bf16=None, **changed):
    """A trainer that gets its rollouts from the table."""
    trainer_class, settings = KINDS[kind]
    warm_up = replace(case, lengths="uniform", prompt=(8, 8), completion=4)
    table = [rollouts(warm_up, 0), *(rollouts(case, seed) for seed in range(1, steps + 1))]
    calls = iter(table)

    def rollout(prompts, trainer):
        prompt_ids, completion_ids, _ = next(calls)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(completion_ids, **kwargs):
        by_completion = {tuple(c): r for _, completions, rs in table for c, r in zip(completions, rs, strict=True)}
        return [by_completion[tuple(ids)] for ids in completion_ids]

    rows = case.prompts * GROUP
    fields = {
        **settings,
        **changed,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows // batch,
        "num_generations": GROUP,
        "max_completion_length": case.completion,
        "logging_steps": 1,
        **({} if bf16 is None else {"bf16": bf16}),
    }
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    prompts = [f"{i}+{i}=" for i in range(64)]
    options = {"rollout_func": rollout, "peft_config": lora if case.lora else None}
    return trainer_of(trainer_class, folder, steps + 1, prompts, reward, model, device, options, **fields)


def step_seconds(kind, case, arguments):
    """Seconds of an optimizer step (CPU time; wall time on a GPU), and what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(arguments.width, arguments.layers, arguments.vocabulary, arguments.device)
        trainer = build_trainer(kind, case, model, folder, arguments.steps, arguments.batch, arguments.device)
        clock = StepClock(arguments.device)
        trainer.add_callback(clock)
        trainer.train()
        seconds = (clock.ends[-1] - clock.ends[0]) / arguments.steps
        logged = [entry.metrics for entry in read_run(folder).logged if "drgrpo/micro_batches" in entry.metrics]
        return seconds, logged[-1] if logged else {}


def peak_megabytes(kind, case, arguments):
    """Peak memory of an optimizer step and the short one before it: tensors on a GPU, else growth of the process."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(arguments.width, arguments.layers, arguments.vocabulary, arguments.device)
        trainer = build_trainer(kind, case, model, folder, 1, arguments.batch, arguments.device)
        if arguments.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            trainer.train()
            return torch.cuda.max_memory_allocated() / 2**20
        before = psutil.Process().memory_info().rss
        trainer.train()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def peak_of_a_process(kind, name, arguments):
    """[`peak_megabytes`] in a process of its own: the peak of this one has been reached before."""
    options = [f"--{key}={getattr(arguments, key)}" for key in ("batch", "width", "layers", "vocabulary", "device")]
    command = [sys.executable, __file__, "--cases", name, *options, "--peak_of", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main():
    parser = command_line(__doc__, pairs=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="names, or beginnings of names")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps per run")
    parser.add_argument("--batch", type=int, default=8, help="per_device_train_batch_size")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--against", choices=("stock", "alone"), default="stock", help="alone: share_prompts=False")
    parser.add_argument("--peak_of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--no_memory", action="store_true", help="leave the memory column out")
    arguments = quietly(parser)
    if arguments.peak_of:
        print(peak_megabytes(arguments.peak_of, CASES[arguments.cases[0]], arguments))
        return
    against = arguments.against
    heads = ("case", f"{against}, s", "ours, s", "ratio (min to max)", "tokens run, of stock's", "useful", "forwards")
    print_head(*heads, f"peak MB: {against}, ours")
    chosen = [name for name in CASES if any(name.startswith(start) for start in arguments.cases)]
    for name in chosen:
        case = CASES[name]
        runs = [partial(step_seconds, kind, case, arguments) for kind in (against, "ours")]
        others, measured = interleaved(arguments.pairs, *runs)
        others, ours, logged = [s for s, _ in others], [s for s, _ in measured], measured[-1][1]
        kinds = () if arguments.no_memory else (against, "ours")
        memory = ", ".join(f"{peak_of_a_process(kind, name, arguments):.0f}" for kind in kinds)
        shares = (f"{logged['drgrpo/upstream_token_frac']:.3f}", f"{logged['drgrpo/useful_token_frac']:.2f}")
        print_row(name, *medians(others, ours), *shares, f"{logged['drgrpo/micro_batches']:.0f}", memory)


if __name__ == "__main__":
    main()
