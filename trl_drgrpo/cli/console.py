"""Output of the command line: results on stdout, everything else on stderr, one line per input error.

In a distributed run the processes share one terminal, so only the main process prints results, and only the first
process of each machine prints errors in the input.
"""

import argparse
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from trl_drgrpo.common.errors import InputError, RewardError, did_you_mean
from trl_drgrpo.common.secrets import without_credentials
from trl_drgrpo.upstream.former_names import remedy_for_name


class Parser(argparse.ArgumentParser):
    """An `argparse` parser that takes no abbreviations and raises [`InputError`] instead of printing its usage."""

    def __init__(self, **kwargs):
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        # argparse gives nothing but its finished message: what is wrong is read from it.
        remedy = f"See `{self.prog} --help`."
        missing = re.fullmatch(r"the following arguments are required: (.+)", message)
        if missing:
            # `--model_name_or_path/--model`: without the aliases.
            names = re.sub(r"(--\w+)/--\w+", r"\1", missing[1])
            raise InputError(names, "nothing", "a value", remedy)
        # For example `argument --seed/-s: invalid int value: 'x'`.
        field, colon, problem = message.removeprefix("argument ").partition(": ")
        if not colon:
            got = f"an invalid command line ({message})"
            raise InputError("command line", got, "flags with their values", remedy)
        got = problem
        expected = "flags with their values"
        choice = re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", problem)
        value = re.fullmatch(r"invalid (int|float) value: (.+)", problem)
        if choice:
            got = choice[1]
            # Newer releases of Python write choices without quotes.
            choices = [name.strip("' ") for name in choice[2].split(",")]
            expected = f"one of {', '.join(choices)}"
            remedy = did_you_mean(got.strip("'"), choices, remedy)
        elif value:
            got = value[2]
            expected = {"int": "a whole number", "float": "a number"}[value[1]]
        elif problem.startswith("expected"):
            got = "no value"
            expected = problem.removeprefix("expected ")
        raise InputError(field.partition("/")[0], got, expected, remedy)


def refuse_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> None:
    """Refuse the first argument that `parse_known_args` left over; the nearest flag is one of `parser`."""
    if not unknown:
        return
    flags = [option for option in parser._option_string_actions if option.startswith("--")]
    # A value is left over behind an unknown flag: the flag is what is wrong.
    unknown_flags = [token for token in unknown if token.startswith("-")]
    name = [*unknown_flags, *unknown][0].split("=", 1)[0]
    listing = "--help_all" if "--help_all" in flags else "--help"
    remedy = remedy_for_name(name, flags, f"`{parser.prog} {listing}` lists the flags.")
    # Names of the same thing in other tools, too far from ours for a nearest one.
    limits = r"--(max|num)[_-](prompts|problems|rows|samples|examples)"
    if "--limit" in flags and re.fullmatch(limits, name):
        remedy = "--limit takes the first ones only."
    got = "an unknown flag" if name.startswith("-") else "a value without a flag"
    raise InputError(name, got, f"a flag of {parser.prog}", remedy)


def is_main_process() -> bool:
    """Tell whether this is the process that prints results: rank 0 of all."""
    return os.environ.get("RANK", "0") == "0"


def print_result(text: str) -> None:
    """Print a text, which ends in its own line break, on stdout: from the main process only."""
    if is_main_process():
        print(text, end="", flush=True)


def print_numbers(numbers: Mapping[str, Any], **files: Any) -> None:
    """Print the results of a command on stdout, one per line, and where they are."""
    for name, value in {**numbers, **files}.items():
        if isinstance(value, float):
            value = f"{value:g}"
        print(f"{name} {value}")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first column is aligned to the left, numbers behind it to the right."""
    columns = zip(*rows, strict=True)
    first_width, *widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *cells in rows:
        line = [first.ljust(first_width), *map(str.rjust, cells, widths)]
        lines.append("  ".join(line).rstrip())
    return lines


def add_model(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    """Add the model that a command starts from, in both spellings, as `args.model`."""
    parser.add_argument("--model_name_or_path", "--model", dest="model", help=text, **options)


def add_default(parser: argparse._ActionsContainer, flag: str, default: Any, text: str = "", **options: Any) -> None:
    """Add a flag with a default: its values have the default's type, and its help ends with it."""
    shown = str(default).removesuffix(".0")
    text = f"{text} (default: {shown})".lstrip()
    parser.add_argument(flag, type=type(default), default=default, help=text, **options)


def stdout_to_stderr() -> AbstractContextManager[Any]:
    """Send stdout to stderr while a library prints progress, tables and logs: TRL, transformers, the user's
    rewards."""
    return contextlib.redirect_stdout(sys.stderr)


def report_error(error: BaseException, args: argparse.Namespace | None = None) -> None:
    """Print an input error as one line on stderr, and the traceback above it when debugging. `args`: of the command;
    the line ends with the place in a recipe of the key that the error is about, unless a flag has won over it."""
    # Every process finds the same invalid input, but a reward function may fail on one process only.
    if not _first_of_machine() and not isinstance(error, RewardError):
        return
    if os.environ.get("TRL_DRGRPO_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    # The user's own function: where it failed is what helps.
    elif isinstance(error, RewardError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    values = vars(args) if args else {}
    message = " ".join(str(error).split())
    line = f"error: {message}"
    # `generation_kwargs: top_k` is about the key generation_kwargs.
    key = getattr(error, "field", "").partition(":")[0]
    if values.get(key) is None and key in values.get("places", {}):
        line += f" ({values['places'][key]})"
    print(without_credentials(line), file=sys.stderr, flush=True)


def log(message: str) -> None:
    """Print one line for a human on stderr, from the main process of each machine."""
    if _first_of_machine():
        print(without_credentials(message), file=sys.stderr, flush=True)


def _first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def progress_over(total: int, done: int, noun: str) -> Iterator[Any]:
    """Show progress: in the block a call `show(status)` says that one more is done, `show(status, done)` how many.
    Where there is no terminal, a line every 10 seconds has the time left.

    Args:
        total (`int`): Problems.
        done (`int`): Those that were done before.
        noun (`str`): What is counted: `"problems"`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stderr = Console(file=sys.stderr)
    bar = Progress(
        TextColumn(noun),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
    )
    task = bar.add_task(noun, total=total, completed=done, status="")
    began = time.monotonic()
    printed = began
    now = done

    def show(status: str, now_done: int | None = None) -> None:
        nonlocal now, printed
        now += 1
        if now_done is not None:
            now = now_done
        bar.update(task, completed=now, status=status)
        if not stderr.is_terminal and time.monotonic() - printed > 10:
            printed = time.monotonic()
            # Only what this call has done tells its pace: `done` was there before.
            seconds_each = (printed - began) / max(now - done, 1)
            seconds_left = round(seconds_each * (total - now))
            log(f"{now} of {total} {noun}, {status}, {timedelta(seconds=seconds_left)} left")

    with bar:
        yield show
