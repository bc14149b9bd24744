"""`trl-drgrpo bias --config recipe.yaml [--flag value ...]`: what one update would do to the length of answers.

Takes what `trl-drgrpo train` takes, samples a few generation batches from the model as it is, trains nothing, and
prints for each objective of the family the expected change of the length of correct answers, of incorrect ones and of
the pass rate, with standard errors: a bias without waiting for a run. stdout: tables, or JSON; stderr: progress.

Every change is per update of unit length (Euclidean, over the trainable parameters), along the direction of one
generation batch. Example:

  trl-drgrpo bias --config recipes/cpu_quickstart.yaml --batches 8
"""

import argparse
import json
from typing import Any

from trl_drgrpo.cli import console, train
from trl_drgrpo.cli import job as jobs
from trl_drgrpo.cli.recipe import read_given
from trl_drgrpo.common.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `train`, and those of the measurement."""
    train.add_arguments(parser)
    parser.usage = f"{parser.prog} --config recipe.yaml [--batches 8] [--json] [--flag value ...]"
    group = parser.add_argument_group("measurement")
    group.add_argument("--batches", type=int, default=8, help="Generation batches to sample, at least 3 (default: 8).")
    group.add_argument("--json", action="store_true", help="Print the estimates as JSON.")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.batches < 3:
        remedy = "Raise it: the standard error is a jackknife over batches."
        raise InputError("--batches", str(args.batches), "at least 3", remedy)
    given = read_given(args)
    jobs.check_given(given)
    with jobs.run_folder(given, dry_run=True), console.stdout_to_stderr():  # it writes nothing
        job = jobs.prepare({**given, "report_to": "none"})
        text = train.dry_run(job) if args.dry_run else _measured(jobs.build_trainer(job), args.batches, args.json)
    console.print_result(text)
    return 0


def _measured(trainer: Any, batches: int, as_json: bool) -> str:
    from trl_drgrpo.check import bias

    seen = []

    def said(rollouts: Any, *batch: Any) -> None:
        seen.append(rollouts)
        correct = f"{rollouts.right.mean():.0%} correct"
        console.log(f"batch {len(seen)}/{batches}: {len(rollouts.lengths)} completions, {correct}")

    changes = bias.measure_model(trainer, batches, said)
    pushed = bias.pushes(seen)
    if as_json:
        return json.dumps(bias.plain({**vars(changes), "stop_push": pushed}), indent=1) + "\n"
    return f"{bias.changes_table(changes)}\n\n{bias.push_table(pushed)}\n"
