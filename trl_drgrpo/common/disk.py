"""Files written whole, one clear error where a disk is full, and what may be written to.

Python, torch and safetensors each say it in their own way when a disk is full; here it is one error. Whether a folder
can be written to is tried, as permission bits say nothing about a full or read-only disk.

Only a regular file is ever replaced. A link is refused: where a folder came from somebody else, it decides what would
be written through it. Devices, pipes and `/dev/stdout` take the text as a stream."""

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from trl_drgrpo.common.errors import DiskFullError, InputError, Terminated, causes
from trl_drgrpo.common.reading import user_path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE = 1 << 20  # bytes


@contextmanager
def room_needed(folder: Path, what_is_safe: Callable[[], str]) -> Iterator[None]:
    """Make one `DiskFullError`, which ends with `what_is_safe()`, of a disk that is full in the block."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not _is_full(error, folder):
            raise
        existing = folder.absolute()
        while not existing.exists():  # the folder itself may not have been made
            existing = existing.parent
        free = shutil.disk_usage(existing).free / 1e6
        file = _file_of(error, folder)
        raise DiskFullError(
            f"disk full: {file} could not be written, {free:,.1f} MB are free there. {what_is_safe()}"
        ) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
    if isinstance(error, SafetensorError):  # Rust's own words
        return any(f"os error {number}" in str(error) for number in _FULL)
    return isinstance(error, RuntimeError) and _takes_no_more(folder)  # torch's writer gives no reason


def _takes_no_more(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()  # the buffer takes more than the disk
    except OSError as error:
        return error.errno in _FULL
    return False


def _file_of(error: BaseException, folder: Path) -> str:
    """Return the file that was being written, as far as it can be told."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    if isinstance(error, SafetensorError):  # it takes the unfinished file away
        return f"the weights in {folder}"
    # torch's writer leaves the unfinished file, which is the newest.
    files = [path for path in folder.rglob("*") if path.is_file()]
    return str(max(files, key=lambda path: path.stat().st_mtime_ns, default=folder))


logger = logging.getLogger(__name__)


_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/(\d+)")


class NotReplacedError(InputError, OSError):
    """A link, or anything else that is not a regular file, stands where a file would be written."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and its folder; what is no UTF-8 becomes a question mark.

    A file that is replaced leaves its permissions; a stream gets the content, see [`is_stream`].

    Raises:
        [`NotReplacedError`]: A link, or no regular file.
    """
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    if is_stream(path):
        with _opened_stream(path) as stream:
            stream.write(data)
        return
    refuse_irregular(str(path), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the file, then renamed: who reads it finds the old one or the new one, and never a half. Its name
    # is that of one thread, and begins with "_", which transformers does not upload.
    part = path.with_name(f"_{path.name[:60]}.{os.getpid()}-{threading.get_native_id()}")
    part.unlink(missing_ok=True)
    try:
        # Never through a link that somebody has put there.
        with part.open("xb") as file:
            file.write(data)
        with contextlib.suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
    except OSError as error:
        # The system names no file where writing fails.
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # half a file
            part.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Tell whether a path is that of a stream.

    These are pipes, character devices such as `/dev/null`, and descriptors of this process (`/dev/stdout`,
    `/dev/fd/3`), whatever they lead to.
    """
    if _DESCRIPTOR.fullmatch(os.path.abspath(path)):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _opened_stream(path: Path) -> IO[bytes]:
    match = _DESCRIPTOR.fullmatch(os.path.abspath(path))
    if match is None:
        return open(path, "wb", buffering=0)
    # What was printed before stands before it. Not opened by its name: where stdout is a file that would begin at its
    # start again.
    sys.stdout.flush()
    descriptor = _DESCRIPTORS.get(match[1]) or int(match[2])
    return os.fdopen(os.dup(descriptor), "wb")


def refuse_irregular(field: str, path: Path) -> None:
    """Refuse to replace a link, a folder, a device or a socket. `field` is for the message."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(mode):
        return
    kind = "a device or a socket"
    remedy = "Choose another name."
    if stat.S_ISDIR(mode):
        kind = "a folder"
    elif stat.S_ISLNK(mode):
        kind = f"a link to {os.readlink(path)}"
        remedy = "Name the file itself: links are not written through."
    raise NotReplacedError(field, f"{path}, {kind}", "a regular file, or a name that is not taken", remedy)


def check_writable(field: str, name: str) -> None:
    """Refuse a folder that could not be made or written to; makes nothing that stays. `field` is for the message."""
    path = user_path(name).absolute()
    if name.startswith("~") and not user_path(name).is_absolute():
        raise InputError(field, f"{name}, the home folder of nobody", "a folder to write to", "Choose another one.")
    try:
        existing = path
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir():
            what = "a file" if existing.exists() else "a link that leads nowhere"
            raise InputError(field, f"{name}, but {existing} is {what}", "a folder to write to", "Choose another one.")
        # Tried, not asked for: permission bits say nothing of a full or read-only disk.
        with tempfile.TemporaryDirectory(prefix=".trl-drgrpo-", dir=existing), contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # refuses a name that is too long
    except OSError as error:
        got = f"{name}, which cannot be written to ({error.strerror or type(error).__name__})"
        raise InputError(field, got, "a folder to write to", "Choose another one.") from error


# Of models, tokenizers, runs, data and programs: no command that writes a file of results has made them.
_FOREIGN = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.parquet", "*.arrow", "*.py", "*.ipynb", "*.y*ml")
_FOREIGN += ("*config.json", "*.index.json", "tokenizer*", "vocab*", "merges.txt", "*token*_map.json", "*.jinja")
_FOREIGN += ("trainer_state.json", "drgrpo_state.*", "dataset_*.json", "state.json", "README*", "LICENSE*")
_FOREIGN += tuple(f"_drgrpo/{name}" for name in ("run.json", "metrics.jsonl", "completions.jsonl", "warnings.jsonl"))
_DATA = (".json", ".jsonl", ".csv", ".parquet")


def check_file(field: str, name: str, others: Iterable[str] = (), *, streams: bool = True) -> None:
    """Refuse a file to write that cannot be one, belongs to a model, a run or a program, or is one of the `others`.

    `others` are files, and folders of data files, that a command reads or writes as well. `streams`: pipes and devices
    will do, see [`is_stream`].
    """
    path = Path(name)
    if not name.strip():
        raise InputError(field, repr(name), "the name of a file", "Remove the flag for no file.")
    if name == "-":
        remedy = "Write /dev/stdout for standard output." if streams else "Name a file."
        raise InputError(field, name, "the name of a file", remedy)
    if is_stream(path):
        if not streams:
            remedy = "Name a file: it is read again to continue."
            raise InputError(field, f"{name}, a pipe or a device", "a regular file", remedy)
        return
    if path.is_dir():
        raise InputError(field, f"{name}, a folder", "a file to write", "Name a file in it.")
    for used in map(Path, others):
        files = [used]
        if used.is_dir():
            files = [file for file in used.glob("*") if file.suffix in _DATA]
        if any(_is_same_file(file, path) for file in files):
            got = f"{name}, which is also an input or another output"
            raise InputError(field, got, "a file of its own", "Choose another name: it is overwritten.")
    refuse_irregular(field, path)
    if path.exists() and any(path.match(pattern) for pattern in _FOREIGN):
        got = f"{name}, which exists and is a file of a model, a run, data or a program"
        raise InputError(field, got, "a file that may be replaced", "Choose another name, or remove it first.")
    check_writable(field, str(path.parent))


def _is_same_file(file: Path, other: Path) -> bool:
    # Unlike `Path.resolve`, this is no error for a link in a circle.
    if os.path.realpath(file) == os.path.realpath(other):
        return True
    return file.exists() and other.exists() and file.samefile(other)


@contextmanager
def working_directory_kept(who: str) -> Iterator[None]:
    """Put the working directory back that a function of the user's, called inside the block, has changed.

    Relative paths would mean other places from then on. `who` names the function, for the log.
    """
    try:
        before = os.getcwd()
    except OSError:  # it was deleted
        before = None
    try:
        yield
    finally:
        # Both may be gone by now: an error here would hide the function's own.
        with contextlib.suppress(OSError):
            after = os.getcwd()
            if before not in (None, after):
                os.chdir(before)
                _say_moved(who, after, before)


# A reward function is called every step: the log says it once.
@cache
def _say_moved(who: str, after: str, before: str) -> None:
    logger.warning("%s changed the working directory to %s: it is set back to %s.", who, after, before)


class _Handler:
    def __init__(self, handle: Callable[[], None]):
        self.handle = handle

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        self.handle()


@contextmanager
def on_sigterm(handle: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM call `handle` inside the block, and not that of a block around it.

    A handler of the user's own stays, only the main thread sets one, and a process that is forked inside has none.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_ours = before is signal.SIG_DFL or isinstance(before, _Handler)
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    _children_have_none()
    signal.signal(signal.SIGTERM, _Handler(handle))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Once per process: a function cannot be taken off that list.
@cache
def _children_have_none() -> None:
    def forget() -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def _end(target: Path) -> None:
    logger.error("SIGTERM: nothing is saved beyond what %s already holds.", target)
    raise Terminated


@contextlib.contextmanager
def sole_writer(field: str, target: Path, *, is_file: bool = False) -> Iterator[None]:
    """Keep other processes that ask so, too, from writing to a folder or a file inside the block.

    A lock of the operating system, which ends with its process; blocks of one thread may be nested. Leaves nothing
    behind, also on SIGTERM, which it answers with [`Terminated`]. Where the file system has no locks, the log says so,
    and the block runs without.

    Args:
        field (`str`): Input that names the target, for the message.
        target (`Path`): Folder or file; need not exist.
        is_file (`bool`, *optional*, defaults to `False`): Whether it is a file.

    Raises:
        [`InputError`]: Another process is writing there; the message has its id and host.
    """
    from filelock import FileLock, Timeout

    real = Path(os.path.realpath(os.path.expanduser(target)))
    kind = "file" if is_file else "folder"
    if os.path.islink(real):  # a loop
        raise InputError(field, f"{target}, a link that leads nowhere", f"a {kind} to write to", "Choose another one.")
    path = real.with_name(f"{real.name}.lock") if is_file else real / "_drgrpo.lock"  # "_": is never uploaded
    # A singleton: the same object for the same file, so that a block inside another one finds it locked.
    lock = FileLock(path, blocking=False, is_singleton=True, fallback_to_soft=False)
    if lock.is_locked:
        yield
        return
    # Made for the lock alone: they are removed again at the end where nothing was written into them.
    new_folders = [folder for folder in path.parents if not os.path.exists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        holder = ""
        with contextlib.suppress(OSError):
            holder = path.read_text(encoding="utf-8")
        got = f"{target}, to which {holder or 'another process'} is writing"
        expected = f"a {kind} to which no other process writes"
        raise InputError(field, got, expected, "Wait until it has ended, or choose another one.") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        logger.warning("%s cannot be locked (%s): do not start a second run there.", target, reason)
    try:
        # For the message of a process that comes later.
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        with on_sigterm(lambda: _end(target)):
            yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                # Before the release: who waits for this file looks whether it is still there.
                path.unlink()
            lock.release()
        for folder in new_folders:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
