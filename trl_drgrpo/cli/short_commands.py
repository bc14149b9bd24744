"""`demo`, `merge` and `report`: each calls one room of the package, and prints what it returns."""

import argparse
import dataclasses
import os
from pathlib import Path

from trl_drgrpo.cli import console
from trl_drgrpo.common.disk import is_stream, room_needed
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.demo import STOCK_OBJECTIVES


def stay_offline_and_quiet() -> None:
    """Switch off the network and most notices, and compute in one thread, before the heavy imports."""
    # Libraries read the environment once, when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from datasets.utils import disable_progress_bars
    from huggingface_hub import constants
    from transformers.utils import logging as transformers_logging

    # Somebody may have imported it before.
    constants.HF_HUB_OFFLINE = True
    # So small a model gains nothing from more threads, and they stall where cores are shared.
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


# demo ----------------------------------------------------------------------------------------------------------------


def add_arguments_demo(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add(
        "--output_dir",
        type=user_path,
        default=Path("runs/demo"),
        help=(
            "folder for model/, report.html, curves.png and results.json (default: runs/demo). Files of an earlier "
            "demo are overwritten; other files of the same names are an error"
        ),
    )
    add("--steps", type=int, help="training steps (default: 200, with --process 60)")
    console.add_default(parser, "--seed", 0, "seed of training problems and sampling")
    add(
        "--process",
        action="store_true",
        help="long lists, and a reward for every line next to the outcome: a rule checks each step of a completion",
    )
    add(
        "--compare",
        nargs="*",
        metavar="OBJECTIVE",
        choices=tuple(STOCK_OBJECTIVES),
        help=(
            "then train the same with stock TRL under its objectives, each as many steps as the demo itself, write "
            "comparison.html of all runs and draw accuracy over CPU time (pace.png); without a name: "
            f"{', '.join(STOCK_OBJECTIVES)}"
        ),
    )


def run_demo(args: argparse.Namespace) -> int:
    """`trl-drgrpo demo`: train a real, tiny model with Dr. GRPO on this machine, offline, and see whether it learns.

    Train the model that this package ships (about 145 thousand parameters) with DrGRPOTrainer on adding lists of
    digits. Runs offline on the CPU in a minute or two.

    Results go to standard output, progress to standard error. Exit codes: 0 sampled accuracy on held-out problems rose
    by at least 40 percentage points, 1 by less, 130 interrupted.
    """
    # `--compare` without a name means all of them.
    compare = args.compare or []
    if args.compare == []:
        compare = list(STOCK_OBJECTIVES)
    try:
        stay_offline_and_quiet()
        from rich.console import Console

        from trl_drgrpo.demo.result import print_report
        from trl_drgrpo.demo.run import run_demo

        progress = Console(stderr=True)
        progress.print("loading libraries and model ...")
        with room_needed(args.output_dir, lambda: "What was measured until then stands above."):
            result = run_demo(args.output_dir, args.seed, args.steps, args.process, compare, console=progress)
    except KeyboardInterrupt:
        console.log(f"\nthe model and the numbers so far are in {args.output_dir}")
        raise
    stdout = Console()
    print_report(result, stdout)
    numbers = result.numbers
    gain = numbers["gain_points"]
    if numbers["learned"]:
        # The demo's own time: the runs under other objectives are stages, too.
        seconds = 0.0
        for stage, took in numbers["seconds"].items():
            if stage.removeprefix("train_") not in compare:
                seconds += took
        verdict = f"Learned: sampled accuracy {gain:+.1f} points in {seconds:.0f} s."
    else:
        steps = numbers["settings"]["steps"]
        claim = f"the demo claims at least +{numbers['required_gain_points']:.0f}."
        verdict = f"NOT LEARNED: sampled accuracy changed by {gain:+.1f} points in {steps} steps; {claim}"
    stdout.print(f"\n{verdict}", highlight=False)
    return 0 if numbers["learned"] else 1


# merge ---------------------------------------------------------------------------------------------------------------


def add_arguments_merge(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("adapter", metavar="ADAPTER_DIR", help="folder with adapter_config.json: a run's or a checkpoint")
    add(
        "--output_dir",
        "--output",
        dest="output",
        required=True,
        metavar="DIR",
        help="folder to write; must not exist",
    )
    add("--base", help="folder or Hub id of the base model (default: the adapter's)")
    add("--dtype", help="float32, bfloat16 or float16 (default: the base model's own)")
    add("--trust_remote_code", action="store_true", help="run the base model's code")


def run_merge(args: argparse.Namespace) -> int:
    """`trl-drgrpo merge ADAPTER_DIR --output_dir DIR`: an adapter merged into its base model, checked, in one folder.

    Load the base model in float32, merge the adapter, save the model with its tokenizer, and compare the logits of
    what was written with those of base and adapter. Needs 4 bytes of memory per parameter.

    The result goes to standard output as YAML, everything else to standard error.
    """
    from trl_drgrpo.cli.recipe import dump
    from trl_drgrpo.single_gpu.merging import merge_adapter

    options = {name: getattr(args, name) for name in ("base", "dtype", "trust_remote_code")}
    with console.stdout_to_stderr():
        report = merge_adapter(args.adapter, args.output, **options)
    console.print_result(dump(dataclasses.asdict(report)))
    return 0


# report --------------------------------------------------------------------------------------------------------------


def add_arguments_report(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="output_dir of a run")
    add("--format", choices=("html", "md", "json", "png"), help="output format (default: html)")
    add(
        "--output",
        type=os.path.expanduser,
        help="file to write (default: report.<format> in the run's _drgrpo folder; of several runs in this folder)",
    )
    add("--max_groups", type=int, help="maximum groups of completions per run (default: as many as fit)")
    add(
        "--follow",
        action="store_true",
        help="serve the page on this machine (127.0.0.1) and keep it up to date until Ctrl-C, instead of writing it",
    )
    add("--port", type=int, help="with --follow: port of the page (default: 0, a free one)")


def run_report(args: argparse.Namespace) -> int:
    """`trl-drgrpo report`: what one or several runs logged, as a page, Markdown, JSON or a figure; `--follow` serves
    the page while the runs go on.

    Write one self-contained HTML page (it opens without a network) over runs of DrGRPOTrainer or TRL's GRPOTrainer:
    curves, difficulty, completions colored by advantage, warnings, and how the runs differ. Works on runs that are
    going on, that crashed, and that were resumed.

    The path of the file that was written, or the address of the page, goes to standard output. Exit codes: 0 done, 2
    bad input, 130 Ctrl-C, which ends `--follow`.
    """
    if not args.follow:
        if args.port is not None:
            remedy = "Add --follow: without it a file is written."
            raise InputError("--port", str(args.port), "--follow with it", remedy)
        from trl_drgrpo.report import write_report

        path = write_report(args.run_dirs, args.output, args.format or "html", args.max_groups)
        # With --output /dev/stdout the name would stand behind the report.
        if not is_stream(path):
            print(path)
        return 0
    for name, value in (("--output", args.output), ("--format", args.format)):
        if value not in (None, "html"):
            remedy = "Remove it: the page is served, no file is written."
            raise InputError(name, repr(value), "nothing with --follow", remedy)
    from trl_drgrpo.report.write import FollowServer

    with FollowServer(args.run_dirs, args.max_groups, args.port or 0) as server:
        console.print_result(f"{server.url}\n")
        server.serve_forever()
    return 0
