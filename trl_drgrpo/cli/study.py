"""`trl-drgrpo study <name>`: the two biases of GRPO, measured on this machine.

`tabular`: a policy of two numbers, all objectives, in seconds. Tables go to standard output, files to `--output_dir`.
"""

import argparse
import json
from pathlib import Path

from trl_drgrpo.cli import console
from trl_drgrpo.errors import InputError

STUDIES = ("tabular",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the studies.

    Args:
        parser (`argparse.ArgumentParser`): The parser of this subcommand.
    """
    parser.add_argument("study", choices=STUDIES, help="tabular: the length bias in a policy of two numbers, exactly")
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
    from trl_drgrpo.demo.report import library_versions
    from trl_drgrpo.study import tabular_report

    results = tabular_report.tabular_study(range(args.seeds))
    print(f"Length of answers, {args.seeds} seeds, mean and 95% interval:\n\n{tabular_report.table(results)}")
    print(f"\nPull on a prompt (sum of |A|, the even prompt being 1):\n\n{tabular_report.mass_table(results)}")
    numbers = args.output_dir / f"{args.study}.json"
    numbers.write_text(json.dumps({"versions": library_versions(), **results}) + "\n", encoding="utf-8")
    console.log(f"numbers: {numbers}")
    try:
        console.log(f"plot:    {tabular_report.draw(results, numbers.with_suffix('.png'))}")
    except ImportError:
        console.log('plot:    not drawn, matplotlib is missing: pip install "trl-drgrpo[report]"')
    return 0
