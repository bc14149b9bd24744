"""`trl-drgrpo report`: what one or several runs logged, as a page, Markdown, JSON or a figure.

The path of the file that was written goes to standard output. Exit codes: 0 done, 2 bad input.
"""

import argparse

FORMATS = ("html", "md", "json", "png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.description = (
        "Write one self-contained HTML page (it opens without a network) over runs of DrGRPOTrainer or TRL's "
        "GRPOTrainer: curves, difficulty, completions colored by advantage, warnings, and how the runs differ. "
        "Works on runs that are going on, that crashed, and that were resumed."
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument("--format", choices=FORMATS, default="html", help="what to write (default: html)")
    parser.add_argument(
        "--output",
        help="file to write (default: report.<format> in the run's _drgrpo folder; of several runs in this folder)",
    )
    parser.add_argument(
        "--max_groups", type=int, help="show at most so many groups of completions per run (default: what fits)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    from trl_drgrpo.report import write_report

    print(write_report(args.run_dirs, args.output, args.format, args.max_groups))
    return 0
