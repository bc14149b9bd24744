"""One clear error where a disk is full: Python, torch and safetensors each say it in another way, or not at all."""

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trl_drgrpo.common.errors import DiskFullError, causes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = 1 << 20  # bytes


@contextmanager
def room_needed(folder: Path, what_is_safe: Callable[[], str]) -> Iterator[None]:
    """Inside the block a folder is written to; a full disk is one `DiskFullError`, which ends with
    `what_is_safe()`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not _is_full(error, folder):
            raise
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / 1e6
        file = _file_of(error, folder)
        raise DiskFullError(
            f"disk full: {file} could not be written, {free:,.1f} MB are free there. {what_is_safe()}"
        ) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    if any(isinstance(each, OSError) and each.errno in _FULL for each in causes(error)):
        return True
    if isinstance(error, SafetensorError):  # Rust's own words
        return any(f"os error {number}" in str(error) for number in _FULL)
    return isinstance(error, RuntimeError) and _takes_no_more(folder)  # torch's writer gives no reason


def _takes_no_more(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
    except OSError as error:
        return error.errno in _FULL
    return False


def _file_of(error: BaseException, folder: Path) -> str:
    """The file that was being written, as far as it can be told."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    if isinstance(error, SafetensorError):  # it takes the unfinished file away
        return f"the weights in {folder}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return str(max(files, key=lambda path: path.stat().st_mtime_ns, default=folder))
