"""`trl-drgrpo study <name>`: the two biases of GRPO, measured on this machine.

`tabular`: a policy of two numbers, all objectives, in seconds. `guessing`: a small language model and the real
trainers, a few minutes per seed on two cores. Tables go to standard output, files to `--output_dir`.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.errors import InputError

STUDIES = ("tabular", "guessing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the studies.

    Args:
        parser (`argparse.ArgumentParser`): The parser of this subcommand.
    """
    parser.add_argument(
        "study",
        choices=STUDIES,
        help="tabular: the length bias in a policy of two numbers, in seconds. guessing: in a small language model, "
        "through TRL's trainers and this one, minutes per seed; an interrupted one goes on",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on (default: 5)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/study"), help="for <study>.json and <study>.png (runs/study)"
    )


def run(args: argparse.Namespace) -> int:
    """Run a study, print its tables, write its numbers and its plot.

    Args:
        args (`argparse.Namespace`): `study`, `seeds` and `output_dir`.

    Returns:
        `int`: 0.

    Raises:
        [`InputError`]: Fewer than two seeds, or a folder that cannot be written.
    """
    if args.seeds < 2:
        raise InputError("seeds", str(args.seeds), "at least 2", "An interval needs more than one run.")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "Choose another folder."
        raise InputError("output_dir", f"{args.output_dir} ({error.strerror})", "a folder", remedy) from error
    numbers = args.output_dir / f"{args.study}.json"
    draw, results = (_tabular if args.study == "tabular" else _guessing)(range(args.seeds), numbers)
    console.log(f"numbers: {numbers}")
    try:
        console.log(f"plot:    {draw(results, numbers.with_suffix('.png'))}")
    except ImportError:
        console.log('plot:    not drawn, matplotlib is missing: pip install "trl-drgrpo[report]"')
    return 0


def _tabular(seeds: range, numbers: Path) -> tuple[Any, dict[str, Any]]:
    from trl_drgrpo.study import tabular_report
    from trl_drgrpo.versions import installed_versions

    results = {"versions": installed_versions(), **tabular_report.tabular_study(seeds)}
    print(f"Length of answers, {len(seeds)} seeds, mean and 95% interval:\n\n{tabular_report.table(results)}")
    print(f"\nPull on a prompt (sum of |A|, the even prompt being 1):\n\n{tabular_report.mass_table(results)}")
    numbers.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return tabular_report.draw, results


def _guessing(seeds: range, numbers: Path) -> tuple[Any, dict[str, Any]]:
    from trl_drgrpo.cli.demo import stay_offline_and_quiet

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func
    stay_offline_and_quiet()
    import torch

    from trl_drgrpo.study import guessing_report

    torch.set_num_threads(1)  # so small a model gains nothing from more
    results = guessing_report.guessing_study(seeds, numbers, numbers.parent / "guessing", on_run=console.log)
    print(f"One update of unit length at the start, ± standard error:\n\n{guessing_report.one_step_table(results)}")
    print(f"\nAfter training, {len(seeds)} seeds, mean and 95% interval:\n\n{guessing_report.table(results)}")
    return guessing_report.draw, results
