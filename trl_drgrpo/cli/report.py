"""`trl-drgrpo report`: what one or several runs logged, as a page, Markdown, JSON or a figure; `--follow` serves the
page while the runs go on.

Write one self-contained HTML page (it opens without a network) over runs of DrGRPOTrainer or TRL's GRPOTrainer:
curves, difficulty, completions colored by advantage, warnings, and how the runs differ. Works on runs that are going
on, that crashed, and that were resumed.

The path of the file that was written, or the address of the page, goes to standard output. Exit codes: 0 done, 2 bad
input, 130 Ctrl-C, which ends `--follow`.
"""

import argparse

from trl_drgrpo.cli.console import print_result
from trl_drgrpo.common.errors import InputError

FORMATS = ("html", "md", "json", "png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="output_dir of a run")
    add("--format", choices=FORMATS, help="output format (default: html)")
    add(
        "--output",
        help="file to write (default: report.<format> in the run's _drgrpo folder; of several runs in this folder)",
    )
    add("--max_groups", type=int, help="maximum groups of completions per run (default: as many as fit)")
    add(
        "--follow",
        action="store_true",
        help="serve the page on this machine (127.0.0.1) and keep it up to date until Ctrl-C, instead of writing it",
    )
    add("--port", type=int, help="with --follow: port of the page (default: 0, a free one)")


def run(args: argparse.Namespace) -> int:
    """Write the report, or serve it."""
    if args.follow:
        return _follow(args)
    if args.port is not None:
        raise InputError("--port", str(args.port), "--follow with it", "Add --follow: without it a file is written.")
    from trl_drgrpo.report import write_report

    print(write_report(args.run_dirs, args.output, args.format or "html", args.max_groups))
    return 0


def _follow(args: argparse.Namespace) -> int:
    for name, value in (("--output", args.output), ("--format", args.format)):
        if value not in (None, "html"):
            raise InputError(
                name, repr(value), "nothing with --follow", "Remove it: the page is served, no file is written."
            )
    from trl_drgrpo.report.write import FollowedReport, FollowServer

    with FollowServer(FollowedReport(args.run_dirs, args.max_groups), args.port or 0) as server:
        print_result(f"{server.url}\n")
        server.serve_forever()
    return 0
