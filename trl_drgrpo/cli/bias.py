"""`trl-drgrpo bias --config recipe.yaml [--flag value ...]`: what one update would do to the length of answers.

Takes what `trl-drgrpo train` takes, samples a few generation batches from the model as it is, trains nothing, and
prints for each objective of the family the expected change of the length of correct answers, of incorrect ones and of
the pass rate, with standard errors: a bias without waiting for a run. `--probe` adds whether the policy, where it may
stop, knows that it is incorrect. stdout: tables, or JSON; stderr: progress.
"""

import argparse
import json
from typing import Any

from trl_drgrpo.cli import console, train
from trl_drgrpo.cli import job as jobs
from trl_drgrpo.cli.recipe import read_given
from trl_drgrpo.common.errors import InputError

_EPILOG = """Every change is per update of unit length (Euclidean, over the trainable parameters), along the direction
of one generation batch. Example:

  trl-drgrpo bias --config recipes/cpu_quickstart.yaml --batches 8

The probe needs no gradient: with --probe, a model whose gradients do not fit into memory is measured without them.

  trl-drgrpo bias --config recipes/r1_zero.yaml --probe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `train`, and those of the measurement."""
    train.add_arguments(parser)
    parser.usage = f"{parser.prog} --config recipe.yaml [--batches 8] [--probe] [--json] [--flag value ...]"
    parser.epilog = _EPILOG
    group = parser.add_argument_group("measurement")
    group.add_argument("--batches", type=int, default=8, help="Generation batches to sample, at least 3 (default: 8).")
    group.add_argument(
        "--probe",
        action="store_true",
        help="Also fit a linear probe for correctness on the hidden states where an answer may stop.",
    )
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
        if args.dry_run:
            text, unfitted = train.dry_run(job), None
        else:
            text, unfitted = _measured(jobs.build_trainer(job), args.batches, args.probe, args.json)
    console.print_result(text)
    if unfitted:  # what was measured is printed first
        raise unfitted
    return 0


def _measured(trainer: Any, batches: int, probe: bool, as_json: bool) -> tuple[str, InputError | None]:
    """Printed text, with the reason if a requested probe is missing."""
    from trl_drgrpo.check import bias
    from trl_drgrpo.check.probe import StateCollector, probe_table

    seen = []

    def said(number: int, rollouts: Any, tokens: Any, mask: Any) -> None:
        seen.append(rollouts)
        if states:
            states.add(tokens, mask, rollouts.right)
        console.log(
            f"batch {number + 1}/{batches}: {len(rollouts.lengths)} completions, {rollouts.right.mean():.0%} correct"
        )

    states, changes = StateCollector(trainer) if probe else None, None
    excess = bias.too_large(trainer, batches) if states else None
    if states and excess:
        console.log(f"no gradients are taken: {excess}")
        bias.look_at_model(trainer, batches, said)
    else:
        changes = bias.measure_model(trainer, batches, said)
    scores, unfitted = _probed(states) if states else (None, None)
    pushed = bias.pushes(seen)
    if as_json:
        found = {**(vars(changes) if changes else {}), "stop_push": pushed, **({"probe": scores} if scores else {})}
        return json.dumps(bias.plain(found), indent=1) + "\n", unfitted
    parts = [bias.changes_table(changes)] if changes else []
    parts += [bias.push_table(pushed), *([probe_table(scores)] if scores else [])]
    return "\n\n".join(parts) + "\n", unfitted


def _probed(states: Any) -> tuple[Any, InputError | None]:
    try:
        return states.probe(), None
    except InputError as error:
        return None, error
