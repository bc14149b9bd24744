"""`trl-drgrpo study <name>`: claims of this package, measured on this machine.

`tabular`: a policy of two numbers, all objectives, in seconds. `guessing`: a small language model and the real
trainers, a few minutes per seed on two cores. `arithmetic`: a larger one on a task that was not made to show anything.
`verify`: a model that finds out by its own check that it is incorrect, a minute per seed.
`signal`: dynamic sampling and curriculum at equal generated tokens. `forks`: completions that fork, likewise.
`search`: search strategies at equal budgets. `credit`: step rewards, paid and subtracted.
`probe`: the length bias of models that know more or less of being incorrect. `variance`: gradient noise by length.
Tables go to standard output, files to `--output_dir`.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.common.errors import InputError

STUDIES = {
    "tabular": 5,
    "guessing": 5,
    "arithmetic": 3,
    "verify": 8,
    "credit": 5,
    "signal": 5,
    "search": 5,
    "forks": 5,
    "probe": 3,
    "variance": 3,
}  # and the number of seeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the studies."""
    parser.add_argument(
        "study",
        choices=STUDIES,
        help="tabular: the length bias in a policy of two numbers, in seconds. guessing: in a small language model, "
        "through TRL's trainers and this one, minutes per seed. arithmetic: the same trainers on sums from "
        "reasoning-gym, about half an hour. verify: the same trainers and a model that guesses and then checks its "
        "guess, a minute per seed. credit: step rewards and baselines on long list sums and in two turns, "
        "about half an hour. signal: batches filled by dynamic sampling and curriculum, a few minutes per seed. "
        "search: best-of-N, beam and PUCT with good and bad values, minutes per seed. forks: completions that go on "
        "from a common prefix, gradients and runs, about half an hour. probe: one update of models that know more or "
        "less that they are incorrect, minutes per seed. variance: gradient variance by divisor and length, likewise. "
        "Run an interrupted one again to continue",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        help="seeds, from 0 on (default: 5; verify: 8; arithmetic, probe and variance: 3)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="parallel runs, one core each; ignored by tabular and search (default: 1)"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/study"), help="for <study>.json and <study>.png (runs/study)"
    )


def run(args: argparse.Namespace) -> int:
    """Run a study, print its tables, write its numbers and its plot."""
    seeds = range(STUDIES[args.study] if args.seeds is None else args.seeds)
    if len(seeds) < 2:
        raise InputError("seeds", str(args.seeds), "at least 2", "An interval needs more than one run.")
    if args.jobs < 1:
        raise InputError("jobs", str(args.jobs), "at least 1", "It is the number of runs at a time.")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "Choose another folder."
        raise InputError("output_dir", f"{args.output_dir} ({error.strerror})", "a folder", remedy) from error
    numbers = args.output_dir / f"{args.study}.json"
    run_study = _RUNS.get(args.study) or partial(_rung, args.study)
    draw, results = run_study(seeds, numbers, args.jobs)
    console.log(f"numbers: {numbers}")
    try:
        console.log(f"plot:    {draw(results, numbers.with_suffix('.png'))}")
    except ImportError:
        console.log('plot:    not drawn, matplotlib is missing: pip install "trl-drgrpo[report]"')
    return 0


def _tabular(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    from trl_drgrpo.labs.provenance import provenance, study_command
    from trl_drgrpo.labs.study import tabular_report

    results = {**provenance(study_command("tabular", len(seeds))), **tabular_report.tabular_study(seeds)}
    print(f"Length of answers, {len(seeds)} seeds, mean and 95% interval:\n\n{tabular_report.table(results)}")
    weights = tabular_report.gradient_weight_table(results)
    print(f"\nPull on a prompt (sum of |A|, the even prompt being 1):\n\n{weights}")
    print(f"\n{tabular_report.conclusion(results)}")
    numbers.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return tabular_report.draw, results


def _signal(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import signal_report as report

    results = report.run_study(seeds, numbers, numbers.parent / "signal", jobs=jobs, on_run=console.log)
    for name, start in results["settings"]["starts"].items():
        print(f"{start['title'].capitalize()}, {len(seeds)} seeds, mean and 95% interval, pass rates in %:\n")
        print(f"{report.table(results, name)}\n\n{report.difference_table(results, name)}\n")
        print(f"DAPO's mean multiplied the gradient by {report.factor_sentence(results, name)}.\n")
    print(report.conclusion(results))
    return report.draw, results


def _search(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import search_report as report

    results = report.run_study(seeds, numbers, numbers.parent / "search", on_run=console.log)
    print(f"Correct completions, {len(seeds)} seeds, mean and 95% interval in %:\n\n{report.table(results)}\n")
    print(report.conclusion(results))
    return report.draw, results


def _credit(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import credit_report as report
    from trl_drgrpo.labs.study.credit_study import run_credit_study

    results = run_credit_study(seeds, numbers, numbers.parent / "credit", jobs, on_part=console.log)
    for task in results["settings"]:
        print(f"{report.title(task, results)}:\n\n{report.table(task, results)}\n")
    print(report.conclusion(results))
    return report.draw, results


def _forks(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import forks_report as report

    results = report.run_study(seeds, numbers, numbers.parent / "forks", jobs=jobs, on_part=console.log)
    for stage in results["stages"]:
        print(f"{report.stage_title(stage, results)}:\n\n{report.variance_table(results, stage['stage'])}\n")
    print(f"{report.learning_title(results)}:\n\n{report.learning_table(results)}\n")
    print(report.conclusion(results))
    return report.draw, results


def _probe(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import probe_report as report
    from trl_drgrpo.labs.study.probe_study import run_study

    results = run_study(seeds, numbers, numbers.parent / "probe", jobs, on_part=console.log)
    print(f"Knowledge of being incorrect, and the bias, {len(seeds)} seeds, ± 95%:\n\n{report.table(results)}\n")
    print(f"{report.correlation_table(results)}\n\n{report.sentence(results)}")
    return report.draw, results


def _variance(seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import variance_report as report
    from trl_drgrpo.labs.study.variance_study import run_study

    results = run_study(seeds, numbers, numbers.parent / "variance", jobs, on_part=console.log)
    print(f"Groups until the mean gradient is as large as its noise, {len(seeds)} seeds, ± 95%:\n")
    print(f"{report.noise_table(results)}\n\n{report.noise_table(results, with_std=True)}\n")
    print(f"{report.shape_table(results)}\n\n{report.sentence(results)}")
    return report.draw, results


def _prepare_trainers() -> None:
    """Quiet, offline, on one thread: models so small gain little from more."""
    from trl_drgrpo.cli.demo import stay_offline_and_quiet

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func
    stay_offline_and_quiet()
    import torch

    torch.set_num_threads(1)


def _rung(name: str, seeds: range, numbers: Path, jobs: int) -> tuple[Any, dict[str, Any]]:
    _prepare_trainers()
    from trl_drgrpo.labs.study import trajectory_report as report
    from trl_drgrpo.labs.study.rungs import RUNGS

    rung = RUNGS[name]
    results = report.run_study(rung, seeds, numbers, numbers.parent / name, jobs, on_run=console.log)
    print(f"One update of unit length at the start, ± standard error:\n\n{report.one_step_table(results)}\n")
    print(report.one_step_table(results, difference=True))
    print(f"\nAfter training, {len(seeds)} seeds, mean and 95% interval:\n\n{report.table(rung, results)}\n")
    print(report.difference_table(rung, results))
    if rung.verdict is not None:
        print(f"\nThe push to check again:\n\n{report.pushes_table(results)}\n")
        print(report.gap_table(results))
    print(f"\n{report.conclusion(rung, results)}")
    return report.draw, results


_RUNS = {  # the studies with a report of their own; the others are rungs
    "tabular": _tabular,
    "credit": _credit,
    "signal": _signal,
    "search": _search,
    "forks": _forks,
    "probe": _probe,
    "variance": _variance,
}
