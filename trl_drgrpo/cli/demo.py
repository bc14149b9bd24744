"""`trl-drgrpo demo`: train a real, tiny model with Dr. GRPO on this machine, offline, and see whether it learns.

Train the model that this package ships (about 145 thousand parameters) with DrGRPOTrainer on adding lists of digits.
Runs offline on the CPU in about two minutes.

Results go to standard output, progress to standard error. Exit codes: 0 sampled accuracy on held-out problems rose by
at least 40 percentage points, 1 by less, 130 interrupted.
"""

import argparse
import os
from pathlib import Path

from trl_drgrpo.cli import console
from trl_drgrpo.demo import STOCK_OBJECTIVES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    add = parser.add_argument
    add(
        "--output_dir",
        type=Path,
        default=Path("runs/demo"),
        help="folder for model/, report.html, curves.png and results.json (default: runs/demo). Files of an earlier "
        "demo are overwritten; other files of the same names are an error",
    )
    add("--steps", type=int, help="training steps (default: 200, with --process 60)")
    add("--seed", type=int, default=0, help="seed of training problems and sampling (default: 0)")
    process = "long lists, and a reward for every line next to the outcome: a rule checks each step of a completion"
    add("--process", action="store_true", help=process)
    add(
        "--compare",
        nargs="*",
        metavar="OBJECTIVE",
        choices=tuple(STOCK_OBJECTIVES),
        help="then train the same with stock TRL under its objectives, each as long as the demo itself, and write "
        f"comparison.html of all runs; without a name: {', '.join(STOCK_OBJECTIVES)}",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its report; 1 if the model did not learn."""
    compare = list(STOCK_OBJECTIVES) if args.compare == [] else args.compare or []
    try:
        stay_offline_and_quiet()
        from rich.console import Console

        from trl_drgrpo.demo.result import print_report
        from trl_drgrpo.demo.run import run_demo

        results, progress = Console(), Console(stderr=True)
        progress.print("loading libraries and model ...")
        result = run_demo(args.output_dir, args.seed, args.steps, args.process, compare, console=progress)
    except KeyboardInterrupt:
        console.log(f"\nthe model and the numbers so far are in {args.output_dir}")
        raise
    print_report(result, results)
    numbers, gain = result.numbers, result.numbers["gain_points"]
    steps, claim = numbers["settings"]["steps"], numbers["required_gain_points"]
    verdict = (
        f"NOT LEARNED: sampled accuracy changed by {gain:+.1f} points in {steps} steps; the demo claims at least "
        f"+{claim:.0f}."
    )
    if numbers["learned"]:
        seconds = sum(
            value for stage, value in numbers["seconds"].items() if stage.removeprefix("train_") not in compare
        )
        verdict = f"Learned: sampled accuracy {gain:+.1f} points in {seconds:.0f} s."
    results.print(f"\n{verdict}", highlight=False)
    return 0 if numbers["learned"] else 1


def stay_offline_and_quiet() -> None:
    """No network, no wall of notices, set before the heavy imports, which read the environment once; and one thread:
    so small a model gains nothing from more, and they stall where cores are shared."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from datasets.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
