"""`trl-drgrpo <subcommand>`: imports the chosen one only, and turns input errors into one line.

Every subcommand is a module `trl_drgrpo/cli/<name>.py` (`_` for `-`). Its docstring, less the first paragraph,
describes it in its `--help`; its `add_arguments(parser)` fills the subcommand's parser; its `run(args) -> int` gives
the exit code and raises [`InputError`] on bad input. Where a module has further ones, the names of both functions end
in the subcommand's, and the docstring is that of the second. Top-level `--help` and `--version` import none of them.

Errors of the file system, and what libraries raise while they read models and data, are one line as well
([`~trl_drgrpo.common.reading`]); any other exception is a bug, and keeps its traceback.

Exit codes: what the subcommand returns (0: done, 1: ran and found a problem), 2: bad input or no subcommand (its
help goes to stderr), 130: Ctrl-C, 143: SIGTERM.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.common import __version__
from trl_drgrpo.common.errors import (
    DiskFullError,
    DivergedError,
    InputError,
    PushError,
    UpstreamError,
    did_you_mean,
    is_unicode,
    shortened,
)
from trl_drgrpo.common.reading import problem_of

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


# Subcommands that share a module with others.
_HOMES: dict[str, str] = dict.fromkeys(("demo", "merge", "report"), "short_commands")
_HOMES |= {"bias": "train", "label-steps": "search"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (see the module docstring). `--help` exits by `SystemExit(0)`."""
    # Errors have a namespace also where parsing fails.
    args = argparse.Namespace(places={})
    # A terminal may know less than Unicode.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        code = args.run(args)
        # Written out here, where a full disk is one line.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (InputError, UpstreamError) as error:
        console.report_error(error, args)
        return 2
    # The input is valid, so the code is 1 and not 2.
    except (PushError, DiskFullError, DivergedError) as error:
        console.report_error(error)
        return 1
    # 128 + SIGINT, as shells report it.
    except KeyboardInterrupt:
        console.log("interrupted")
        return 130
    # `trl-drgrpo train --help | head`: nobody reads on, and the interpreter's exit is to be quiet, too.
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except BaseException as error:
        problem = problem_of(error)
        # A bug: its traceback is what helps.
        if problem is None:
            raise
        console.report_error(problem, args)
        if not isinstance(problem, DiskFullError):
            return 2
        # Standard output may be what is full: the interpreter's exit would write to it again.
        _drop_stdout()
        return 1


def _drop_stdout() -> None:
    """Make the interpreter's exit quiet where standard output takes no more; what it does take is written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the command line as values by name; `run` among them is the function to call with them."""
    parser = console.Parser(
        prog="trl-drgrpo",
        description="Dr. GRPO for Hugging Face TRL. `trl-drgrpo <command> --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"trl-drgrpo {__version__}")
    parser.set_defaults(run=lambda args: _help(parser))
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(SUBCOMMANDS) + "}")
    for argument in arguments:
        # Bytes of a file's name, say, that no output could name.
        if not is_unicode(argument):
            remedy = "Rename the file, or correct the text."
            raise InputError("command line", shortened(argument), "UTF-8 text", remedy)
    # Only the chosen subcommand's module is imported; the others are names with a line of help.
    chosen = next((token for token in arguments if not token.startswith("-")), None)
    if chosen is not None and chosen not in SUBCOMMANDS:
        otherwise = "`trl-drgrpo --help` describes them."
        remedy = did_you_mean(chosen, SUBCOMMANDS, otherwise, cutoff=0.6, form="`trl-drgrpo {}`")
        raise InputError("command", repr(chosen), f"one of {', '.join(SUBCOMMANDS)}", remedy)
    asked_parser = parser
    for name, text in SUBCOMMANDS.items():
        subparser = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            asked_parser = subparser
            add_arguments, run, description = command(name)
            subparser.description = f"{text[0].upper()}{text[1:]}.\n\n{description}"
            add_arguments(subparser)
            subparser.set_defaults(run=run)
    args, unknown = parser.parse_known_args(arguments)
    console.refuse_unknown(unknown, asked_parser)
    return args


def command(name: str) -> tuple[Callable[[Any], None], Callable[[Any], int], str]:
    """Return a subcommand's `add_arguments` and `run`, and the text that describes it."""
    in_snake_case = name.replace("-", "_")
    module = importlib.import_module(f"trl_drgrpo.cli.{_HOMES.get(name, in_snake_case)}")
    ending = f"_{in_snake_case}" if name in _HOMES else ""
    run = getattr(module, f"run{ending}")
    described = run if ending else module
    # Less the first paragraph, which names the command and says what its line of help says.
    description = (inspect.getdoc(described) or "").partition("\n\n")[2]
    return getattr(module, f"add_arguments{ending}"), run, description


def _help(parser: argparse.ArgumentParser) -> int:
    """Print the help on stderr, as stdout is for results: a call without a command does nothing, which is no
    success."""
    parser.print_help(sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
