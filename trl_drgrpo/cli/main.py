"""`trl-drgrpo <subcommand>`: imports the chosen one only, and turns input errors into one line.

Every subcommand is a module `trl_drgrpo/cli/<name>.py` (`_` for `-`). Its docstring, less the first paragraph,
describes it in its `--help`; its `add_arguments(parser)` fills the subcommand's parser; its `run(args) -> int` gives
the exit code and raises [`InputError`] on bad input. Top-level `--help` and `--version` import none of them.

Exit codes: what the subcommand returns (0: done, 1: ran and found a problem), 2: bad input or no subcommand (its
help goes to stderr), 130: Ctrl-C, 143: SIGTERM.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from trl_drgrpo.cli import console
from trl_drgrpo.common import __version__
from trl_drgrpo.common.errors import DiskFullError, InputError, PushError, UpstreamError, did_you_mean

SUBCOMMANDS = {
    "train": "train a model with Dr. GRPO from a YAML recipe and flags",
    "eval": "measure pass@1 and pass@k of a model, next to the model it was trained from",
    "generate": "answer prompts with a trained model, and score the answers",
    "demo": "train the tiny model that comes with the package, offline and on CPU",
    "check": "compare the installed TRL's loss and gradients with the specification",
    "train-prm": "train a process reward model from labeled steps",
    "label-steps": "label the steps of a model's completions by rollouts and a verifier",
    "search": "search trajectories with a verifier or a process reward model, as data for supervised training",
    "bias": "measure what one update of each objective would do to the length of answers",
    "merge": "merge a LoRA adapter into its base model, in full precision",
    "report": "write one page about runs: curves, completions with their advantages, warnings, differences",
    "plan": "predict the peak memory of a run, and propose settings that fit a device",
    "score": "score saved completions with reward functions, to debug a reward before a run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code (see the module docstring). `--help` exits by
    `SystemExit(0)`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        return args.run(args)
    except (InputError, UpstreamError) as error:
        console.report_error(error)
        return console.EXIT_INPUT_ERROR
    except (PushError, DiskFullError) as error:  # the input is valid
        console.report_error(error)
        return 1
    except KeyboardInterrupt:
        console.log("interrupted")
        return console.EXIT_INTERRUPTED
    except BrokenPipeError:  # `trl-drgrpo train --help | head`: nobody reads on; keep the interpreter's exit quiet too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = console.Parser(
        prog="trl-drgrpo",
        description="Dr. GRPO for Hugging Face TRL. `trl-drgrpo <command> --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"trl-drgrpo {__version__}")
    parser.set_defaults(run=lambda args: _help(parser))
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(SUBCOMMANDS) + "}")
    chosen = next((token for token in arguments if not token.startswith("-")), None)
    if chosen is not None and chosen not in SUBCOMMANDS:
        remedy = did_you_mean(
            chosen, SUBCOMMANDS, "`trl-drgrpo --help` describes them.", cutoff=0.6, form="`trl-drgrpo {}`"
        )
        raise InputError("command", repr(chosen), f"one of {', '.join(SUBCOMMANDS)}", remedy)
    subparsers = {
        name: commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, text in SUBCOMMANDS.items()
    }
    if chosen in SUBCOMMANDS:
        module = importlib.import_module(f"trl_drgrpo.cli.{chosen.replace('-', '_')}")
        what, more = SUBCOMMANDS[chosen], (module.__doc__ or "").partition("\n\n")[2]
        subparsers[chosen].description = f"{what[0].upper()}{what[1:]}.\n\n{more}"
        module.add_arguments(subparsers[chosen])
        subparsers[chosen].set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(arguments)
    console.refuse_unknown(unknown, subparsers.get(args.command, parser))
    return args


def _help(parser: argparse.ArgumentParser) -> int:
    """A call without a command does nothing, which is no success: help on stderr, as stdout is for results."""
    parser.print_help(sys.stderr)
    return console.EXIT_INPUT_ERROR


if __name__ == "__main__":
    sys.exit(main())
