"""`trl-drgrpo check`: is Dr. GRPO computed correctly in *this* environment?

Lists the seams of TRL that the package relies on, trains a tiny model over a matrix of settings and compares loss and
gradient with the written-down objective in float64, then enumerates small policies and compares the expected gradient
of the package's credit with the exact one. No download, no accelerator, about half a minute.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `trl-drgrpo check`."""
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--full", action="store_true", help="all 48 combinations of the matrix, about a minute")
    parts.add_argument("--credit", action="store_true", help="the enumerated expected gradients only, seconds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the check and print what it found; 1 when a seam has moved or a number differs."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs the network, and TRL would report the run
    from trl_drgrpo.upstream.seams import check_upstream
    from trl_drgrpo.upstream.versions import provenance

    flags = "".join(f" --{name}" for name in ("full", "credit", "json") if getattr(args, name))
    seams = check_upstream()
    report: dict[str, Any] = {
        **provenance(f"trl-drgrpo check{flags}"),
        "seams": {seam.name: seam.problem or "ok" for seam in seams},
    }
    if not args.json:
        print("  ".join(f"{package} {number}" for package, number in report["versions"].items()))
        print("\nSeams in trl.GRPOTrainer")
        for seam in seams:
            print(f"  {_mark(not seam.problem)} {seam.name}{': ' + seam.problem if seam.problem else ''}")
    if any(seam.problem for seam in seams):
        report["passed"] = False
        return _finish(report, args.json, "TRL has changed where this package relies on it: nothing further was run.")

    with _quiet_on_one_thread():
        for part, prepared in (("cases", _matrix), ("credit", _credit)):
            if part == "cases" and args.credit:
                continue
            title, results, line = prepared(args)
            if not args.json:
                print(title)
            report[part] = []
            for result in results:
                report[part].append(result.as_dict())
                if not args.json:
                    print(f"  {_mark(result.passed)} {line(result)}", flush=True)
    results = [result for part in ("cases", "credit") for result in report.get(part, [])]
    failed = sum(not result["passed"] for result in results)
    report["passed"] = failed == 0
    proven = "step credit is unbiased" if args.credit else "the trainer computes Dr. GRPO"
    verdict = (
        f"{len(results)} of {len(results)} cases as they should be: {proven} here."
        if report["passed"]
        else f"{failed} of {len(results)} cases FAILED: do not trust runs in this environment."
    )
    return _finish(report, args.json, verdict)


@contextmanager
def _quiet_on_one_thread() -> Iterator[None]:
    """Errors only from the libraries below, and one thread: the matrices are tiny, more threads only wait."""
    import torch
    import transformers

    loggers = [logging.getLogger(name) for name in ("accelerate", "trl", "trl_drgrpo")]
    levels = [logger.level for logger in loggers]
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Title, results, and what a result's line says.
Part = tuple[str, Iterator[Any], Callable[[Any], str]]


def _matrix(args: argparse.Namespace) -> Part:
    from trl_drgrpo.check.parity import CaseResult, run_check

    def line(result: CaseResult) -> str:
        case = result.case
        geometry = f"{case.micro_batch} x {case.accumulation} / {case.steps_per_generation} / {case.num_iterations}"
        control = f" (must differ: cosine {result.cosine:.2f})" if case.control else ""
        return (
            f"{geometry:26} {case.beta:5g} {'yes' if case.lora else 'no':>5} "
            f"{result.loss_difference:9.1e} {result.gradient_difference:9.1e}  {case.name}{control}"
        )

    title = (
        "\nLoss and gradient against the specification (|difference|, relative for the gradient)\n"
        f"  {'':4} {'rows x accum / gen / iter':26} {'beta':>5} {'LoRA':>5} {'loss':>9} {'gradient':>9}  "
    )
    return title, run_check(args.full), line


def _credit(args: argparse.Namespace) -> Part:
    from trl_drgrpo.check.credit import CreditResult, run_credit_check

    def line(result: CreditResult) -> str:
        control = " (must differ)" if result.control else ""
        return f"{result.environment:26} {result.difference:9.1e}  {result.credit}{control}"

    title = (
        "\nExpected gradient of the credit, enumerated, against the exact one (|difference|, relative;\n"
        "  for constructions that must differ: the residual at the best learning rate)"
    )
    return title, run_credit_check(), line


def _mark(passed: bool) -> str:
    return "ok  " if passed else "FAIL"


def _finish(report: dict[str, Any], as_json: bool, verdict: str) -> int:
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print(f"\n{verdict}")
    return 0 if report["passed"] else 1
