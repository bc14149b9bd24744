"""Whether a folder can be written to: tried, as permission bits say nothing about `/proc` or a full disk."""

import tempfile
from pathlib import Path

from trl_drgrpo.common.errors import InputError


def check_writable(field: str, name: str) -> None:
    """Refuses a folder that could not be made or written to; makes nothing that stays. `field` is for the message."""
    path = Path(name).expanduser().absolute()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            remedy = "Choose another one."
            raise InputError(field, f"{name}, but {existing} is a file", "a folder to write to", remedy)
        with tempfile.TemporaryDirectory(prefix=".trl-drgrpo-", dir=existing):
            pass
    except OSError as error:
        got = f"{name}, which cannot be written to ({error.strerror or type(error).__name__})"
        raise InputError(field, got, "a folder to write to", "Choose another one.") from error
