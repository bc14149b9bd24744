"""`trl-drgrpo check`: is Dr. GRPO computed correctly in *this* environment?

Lists the seams of TRL that the package relies on, trains a tiny model over a matrix of settings and compares loss and
gradient with the written-down objective in float64, then enumerates small policies and compares the expected gradient
of the package's credit with the exact one. No download, no accelerator, about half a minute.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_drgrpo.cli.demo import stay_offline_and_quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `trl-drgrpo check`."""
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--full", action="store_true", help="all 48 combinations of the matrix, about a minute")
    parts.add_argument("--credit", action="store_true", help="the enumerated expected gradients only, seconds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the check and print what it found; 1 when a seam has moved or a number differs."""
    stay_offline_and_quiet()  # nothing here needs the network, and TRL would report the run
    from trl_drgrpo.check import credit, parity
    from trl_drgrpo.upstream.seams import check_upstream
    from trl_drgrpo.upstream.versions import provenance

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    def said(results: Iterable[Any], line: Callable[[Any], str]) -> list[Any]:
        """All results, each said as soon as it is there."""
        collected = []
        for result in results:
            say(line(result))
            collected.append(result)
        return collected

    flags = "".join(f" --{name}" for name in ("full", "credit", "json") if getattr(args, name))
    seams = check_upstream()
    report: dict[str, Any] = {
        **provenance(f"trl-drgrpo check{flags}"),
        "seams": {name: problem or "ok" for name, problem in seams.items()},
    }
    say("  ".join(f"{package} {number}" for package, number in report["versions"].items()))
    say("\nSeams in trl.GRPOTrainer")
    for name, problem in seams.items():
        say(f"  {_mark(not problem)} {name}{': ' + problem if problem else ''}")
    results: list[Any] = []
    if any(seams.values()):
        passed, verdict = False, "TRL has changed where this package relies on it: nothing further was run."
    else:
        with _without_warnings():
            if not args.credit:
                say("\nLoss and gradient against the specification (|difference|, relative for the gradient)")
                say(f"  {'':4} {'rows x accum / gen / iter':26} {'beta':>5} {'LoRA':>5} {'loss':>9} {'gradient':>9}")
                results = said(map(parity.run_case, parity.cases(args.full)), _case)
                report["cases"] = [vars(r.case) | {k: v for k, v in vars(r).items() if k != "case"} for r in results]
            say("\nExpected gradient of the credit, enumerated, against the exact one (|difference|, relative;")
            say("  for constructions that must differ: the residual at the best learning rate)")
            credited = said(map(credit.run_credit_case, credit.credit_cases()), _credit)
            report["credit"] = [vars(result) for result in credited]
        results += credited
        failed = sum(not result.passed for result in results)
        passed = failed == 0
        proven = "step credit is unbiased" if args.credit else "the trainer computes Dr. GRPO"
        verdict = f"{len(results)} of {len(results)} cases as they should be: {proven} here."
        if failed:
            verdict = f"{failed} of {len(results)} cases FAILED: do not trust runs in this environment."
    say(f"\n{verdict}")
    if args.json:
        print(json.dumps({**report, "passed": passed}, indent=2))
    return 0 if passed else 1


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Errors only from the libraries below."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _case(result: Any) -> str:
    case = result.case
    geometry = f"{case.micro_batch} x {case.accumulation} / {case.steps_per_generation} / {case.num_iterations}"
    must = f" (must differ: cosine {result.cosine:.2f})" if case.control else ""
    return (
        f"  {_mark(result.passed)} {geometry:26} {case.beta:5g} {'yes' if case.lora else 'no':>5} "
        f"{result.loss_difference:9.1e} {result.gradient_difference:9.1e}  {case.name}{must}"
    )


def _credit(result: Any) -> str:
    must = " (must differ)" if result.control else ""
    return f"  {_mark(result.passed)} {result.environment:26} {result.difference:9.1e}  {result.credit}{must}"


def _mark(passed: bool) -> str:
    return "ok  " if passed else "FAIL"
