"""The errors of this package, in one wording: `field: got X; expected Y. what to do.`

Only the wording lives here. `InputError` is a `ValueError`, so code that catches `ValueError` keeps working; the
command line catches `InputError` alone and prints its single line without a traceback.
"""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence

from trl_drgrpo.common.secrets import without_credentials


def shortened(value: object, most: int = 60) -> str:
    """Return a value as an error shows it: its `repr`, cut at so many characters.

    Example:

    ```python
    >>> shortened("a" * 100, most=10)
    "'aaaaaa..."

    ```
    """
    try:
        text = repr(value)
    except Exception:  # a whole number of thousands of digits, an object with a `__repr__` that fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def did_you_mean(
    name: object, names: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.5, form: str = "{}"
) -> str:
    """
    Return the remedy for a name that does not exist: the nearest ones, each in this form, else another sentence.

    Example:

    ```python
    >>> did_you_mean("scale_reward", ["beta", "scale_rewards"], "Remove it.")
    'Did you mean scale_rewards?'

    ```
    """
    from difflib import get_close_matches  # only on the way to an error

    nearest = get_close_matches(str(name), list(names), n=most, cutoff=cutoff)
    if not nearest:
        return otherwise
    return f"Did you mean {' or '.join(map(form.format, nearest))}?"


_LONGEST = 500


class InputError(ValueError):
    """Error of something that the user passed and that does not fit.

    Args:
        field (`str`): Name of the invalid input: a config field, a flag, a file, a dataset column.
        got (`str`): Value found.
        expected (`str`): Valid values.
        remedy (`str`): Remedy: one or two full sentences.

    Example:

    ```python
    >>> print(InputError("num_generations", "1", "at least 2", "A group of one has no baseline: raise it."))
    num_generations: got 1; expected at least 2. A group of one has no baseline: raise it.

    ```
    """

    def __init__(self, field: str, got: str, expected: str, remedy: str):
        if len(got) > _LONGEST:  # a model's name of 5,000 characters
            got = got[:_LONGEST] + "..."
        # Here, because many places print an error, or write it into a log.
        super().__init__(without_credentials(f"{field}: got {got}; expected {expected}. {remedy}"))
        self.field = field
        self.got = got
        self.expected = expected
        self.remedy = remedy

    def under(self, field: str) -> "InputError":
        """Return the same error about another field."""
        return type(self)(field, self.got, self.expected, self.remedy)

    def __reduce__(self):
        # Errors travel between processes, and are built anew there from what the constructor takes.
        return type(self), (self.field, self.got, self.expected, self.remedy)


def in_one(errors: Sequence[InputError]) -> InputError:
    """Return several errors in one: the first, with the others behind its remedy."""
    first = errors[0]
    remedy = " ".join([first.remedy, *(f"Also {error}" for error in errors[1:])])
    return type(first)(first.field, first.got, first.expected, remedy)


class UnknownNameError(InputError, TypeError):
    """An argument that does not exist; Python's own error for it is a `TypeError`."""


class RewardError(InputError):
    """A reward function broke its contract: incorrect number of rewards, incorrect type, or an exception.

    An exception of the function itself is the error's `__cause__`.

    Args:
        field, got, expected, remedy (`str`): As in [`InputError`].

    Attributes:
        has_returned (`bool`): Whether the function raised nothing, and what it returned is no list of rewards.
    """

    has_returned = False


class UnscorableError(ValueError):
    """A row that cannot be judged, whatever was written: its reward is `None`. The message says all: no traceback."""


def speaks_for_itself(error: BaseException) -> bool:
    """Tell whether the message of an error says all, so that a traceback through this package would be noise."""
    return isinstance(error, (InputError, UnscorableError)) and error.__cause__ is None


def told(error: BaseException) -> str:
    """Return an exception as `ValueError: its text`, also where making that text raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (whose text cannot be made)"


def is_unicode(text: str) -> bool:
    """Tell whether UTF-8 can hold a text: half a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of an exception's text, without the full stop at its end; with the next after a colon."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    if not lines:
        return "no message"
    line = lines[0]
    # As in transformers' checks of a configuration: the problem stands behind the colon.
    if line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1].strip()}"
    return line.rstrip(".")[:most]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what it was raised from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class UpstreamError(RuntimeError):
    """The installed TRL is outside the supported range, or a seam this package relies on has moved."""


class PushError(RuntimeError):
    """A finished model could not be uploaded. The message says where it is saved and how to push it later."""


class DiskFullError(RuntimeError):
    """No room for a checkpoint or a model. The message says which file, what is safe, and how to go on."""


class DivergedError(RuntimeError):
    """The weights, or a gradient, are not finite. The message names the step, the likely cause and what is saved."""


class Terminated(SystemExit):
    """The process was asked to end (SIGTERM), and a checkpoint is saved. Uncaught, it exits with 143, as in shells."""

    def __init__(self) -> None:
        super().__init__(143)


def require_package(module: str, field: str, got: str, extra: str) -> None:
    """Refuse a setting (`field`, with the value `got`) whose package is not installed; `extra` brings it."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        remedy = f'Install it with `pip install "trl-drgrpo[{extra}]"`.'
        raise InputError(field, f"{got}, but {package} is not installed", f"the package {package}", remedy)


def require_for_quantization(config: object) -> None:
    """Refuse a quantization configuration (object or mapping) that asks for 4 or 8 bits without bitsandbytes."""
    settings = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    for bits in (4, 8):
        # transformers' object keeps them under names of its own.
        if settings.get(f"load_in_{bits}bit") or settings.get(f"_load_in_{bits}bit"):
            require_package("bitsandbytes", "quantization_config", f"a base in {bits} bits", "qlora")
