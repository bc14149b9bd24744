"""Whatever Python or a library raises while it reads or writes something of the user's, in one line.

[`reading`] stands around a library's call that reads one input, and knows the name of that input. [`problem_of`] is
the command line's last resort, for what no such block has caught: errors of the file system, texts that are no
Unicode, values that are too large or too deep, and whatever was raised below a library's function that reads models
or data. Any other error is a bug of this package, and keeps its traceback.
"""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trl_drgrpo.common.errors import DiskFullError, InputError, first_line

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_FILES = (errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EMFILE)
_DEBUG = "TRL_DRGRPO_DEBUG=1 shows where it was raised."


def user_path(name: str | Path) -> Path:
    """Return a path of the user's with `~` as the home directory; `~name` of an unknown user stays as it is."""
    return Path(os.path.expanduser(name))


@contextmanager
def reading(field: str, what: str, expected: str, remedy: str = "") -> Iterator[None]:
    """Make one `InputError` of anything that a library raises inside the block about what it reads.

    The block holds the library's call and nothing else: an error of this package's own code is no problem of what is
    read.

    Args:
        field (`str`): Setting, flag or file that is read.
        what (`str`): Its value.
        expected (`str`): Content that can be read.
        remedy (`str`, *optional*): What to do, behind the library's own words.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise _unreadable(field, what, expected, error, remedy) from error


def _unreadable(field: str, what: str, expected: str, error: BaseException, remedy: str = "") -> InputError:
    reason = f"{type(error).__name__}: {first_line(error)}."
    return InputError(field, f"{what}, which cannot be read", expected, f"{reason} {remedy}".strip())


def _is_panic(error: BaseException) -> bool:
    """Tell whether a library in Rust (tokenizers, safetensors) gave up, which Python is told as no `Exception`."""
    return type(error).__name__ == "PanicException"


def problem_of(error: BaseException) -> InputError | DiskFullError | None:
    """Return the one-line error for an error that nobody caught; `None` for a bug, whose traceback is to be seen."""
    # A library's call first: what it read has a name there, which an error of the file system may lack.
    problem = _of_library(error) or _of_files(error) or _of_content(error)
    if problem is not None:
        problem.__cause__ = error
    return problem


def _of_files(error: BaseException) -> InputError | DiskFullError | None:
    if not isinstance(error, OSError):
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    # Two where a file is copied or moved.
    name = " to ".join(name if len(name) < 200 else name[:200] + "..." for name in names)
    reason = error.strerror or type(error).__name__
    if error.errno in _FULL:
        return DiskFullError(f"disk full: {name or 'the output'} could not be written ({reason}). Make room first.")
    if names:
        return InputError("file", f"{name}: {reason}", "one that can be used", _DEBUG)
    if error.errno in _OF_FILES:
        return InputError("file or current directory", reason, "one that can be used", _DEBUG)
    return None


def _of_content(error: BaseException) -> InputError | None:
    if isinstance(error, UnicodeError):
        expected = "UTF-8 text"
    elif isinstance(error, RecursionError):
        expected = "values that are nested less deeply"
    elif isinstance(error, MemoryError):
        expected = "values that fit into memory"
    else:
        return None
    return InputError("input", f"{type(error).__name__}: {first_line(error)}", expected, _DEBUG)


# Functions below which a library reads a model or its tokenizer, by package; of the packages in `_DATA` all do.
_MODELS = {
    "transformers": ("from_pretrained", "from_dict", "get_config_dict", "apply_chat_template", "_encode_plus"),
    "peft": ("from_pretrained", "load_adapter", "load_peft_weights"),
    "tokenizers": ("from_file",),
}
_TORCH = ("torch", "load")  # of a checkpoint's optimizer, for example
_DATA = ("datasets", "pyarrow", "fsspec")
_NAMES = ("pretrained_model_name_or_path", "model_id", "path", "dataset_path", "f")


def _of_library(error: BaseException) -> InputError | None:
    """Return the one-line error for an error that was raised while a library read a model or data.

    Errors of this package's own functions below a library's (a `map` over rows) are bugs.
    """
    if not (isinstance(error, Exception) or _is_panic(error)):
        return None
    # The traceback from the outermost call to the place of the error: what stands below a library's function was
    # called by it.
    models: list[FrameType] = []
    data: list[FrameType] = []
    files: list[FrameType] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = _package(frame)
        if package == "trl_drgrpo":
            models.clear()
            if data:  # a function of ours that `map` of datasets has called
                return None
        elif package in _DATA:
            data.append(frame)
        elif (package, frame.f_code.co_name) == _TORCH:
            files.append(frame)
        elif frame.f_code.co_name in _MODELS.get(package, ()):
            models.append(frame)
    if files:
        return _unreadable("file", _name(files), "a file that torch loads", error)
    if models:
        return _unreadable("model", _name(models), "a model and a tokenizer that load", error)
    if data:
        return _unreadable("data", _name(data), "data that can be read", error)
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _name(frames: list[FrameType]) -> str:
    """Return the path or id that a library was called with, as far as it can be told."""
    for frame in frames:
        for name in _NAMES:
            value = frame.f_locals.get(name)
            if isinstance(value, str | Path):
                return str(value)
        name = getattr(frame.f_locals.get("self"), "name_or_path", "")
        if name:
            return str(name)
    return "a part of it"
