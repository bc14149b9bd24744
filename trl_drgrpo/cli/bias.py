"""`trl-drgrpo bias --config recipe.yaml [--flag value ...]`: what one update would do to the length of answers.

Takes what `trl-drgrpo train` takes, samples a few generation batches from the model as it is, trains nothing, and
prints for each objective of the family the expected change of the length of correct answers, of incorrect ones and of
the pass rate, with standard errors: a bias without waiting for a run. stdout: a table, or JSON; stderr: progress.
"""

import argparse
import json
from typing import Any

from trl_drgrpo.cli import console, train
from trl_drgrpo.common.errors import InputError

_EPILOG = """Every change is per update of unit length (Euclidean, over the trainable parameters), along the direction
of one generation batch. Example:

  trl-drgrpo bias --config recipes/cpu_quickstart.yaml --batches 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `train`, and those of the measurement."""
    train.add_arguments(parser)
    parser.usage = f"{parser.prog} --config recipe.yaml [--batches 8] [--json] [--flag value ...]"
    parser.epilog = _EPILOG
    group = parser.add_argument_group("measurement")
    group.add_argument("--batches", type=int, default=8, help="Generation batches to sample, at least 3 (default: 8).")
    group.add_argument("--json", action="store_true", help="Print the estimates as JSON.")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.batches < 3:
        remedy = "The standard error is that of a jackknife over them."
        raise InputError("--batches", str(args.batches), "at least 3", remedy)
    given = train.read_given(args)
    from trl_drgrpo.cli import job as jobs

    jobs.check_given(given)
    with console.stdout_to_stderr():
        job = jobs.prepare({**given, "report_to": "none"})
        if args.dry_run:
            from trl_drgrpo.cli import resolved

            text = resolved.render(job)
        else:
            text = _measured(jobs.build_trainer(job), args.batches, args.json)
    console.print_result(text)
    return 0


def _measured(trainer: Any, batches: int, as_json: bool) -> str:
    from trl_drgrpo.labs.study.probe import measure_model
    from trl_drgrpo.labs.study.tables import changes_as_dict, changes_table, push_table, pushes, pushes_as_dict

    seen = []

    def said(number: int, rollouts: Any) -> None:
        seen.append(rollouts)
        console.log(
            f"batch {number + 1}/{batches}: {len(rollouts.lengths)} completions, {rollouts.right.mean():.0%} correct"
        )

    changes = measure_model(trainer, batches, said)
    pushed = pushes(seen)
    if as_json:
        return json.dumps({**changes_as_dict(changes), "stop_push": pushes_as_dict(pushed)}, indent=1) + "\n"
    return f"{changes_table(changes)}\n\n{push_table(pushed)}\n"
