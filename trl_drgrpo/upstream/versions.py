"""Supported TRL versions, installed packages, and the provenance of measured numbers.

Light to import: the check comes before TRL is loaded.
"""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from trl_drgrpo.common.errors import UpstreamError

TRL_SUPPORTED = ("1.16", "2")  # from, up to but not including: the range that pyproject.toml declares
TRL_TESTED = ("1.16.0",)
LIBRARIES = ("trl-drgrpo", "trl", "transformers", "torch")  # what any number of a run depends on


def installed_versions(packages: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Versions of those packages that are installed; this one's also from a checkout without metadata."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            if package == "trl-drgrpo":
                from trl_drgrpo.common.version import __version__

                versions[package] = __version__
    return versions


def require_supported_trl(installed: str | None = None) -> None:
    """Refuse a TRL (the installed one) outside the supported range."""
    installed = version("trl") if installed is None else installed
    lowest, too_high = TRL_SUPPORTED
    if not Version(lowest) <= Version(installed) < Version(too_high):
        raise UpstreamError(
            f"trl: got {installed}; expected >={lowest},<{too_high}. Install a supported one: "
            f"pip install 'trl>={lowest},<{too_high}'."
        )


def provenance(command: str) -> dict[str, Any]:
    """Provenance of measured numbers, to be kept in their files.

    Args:
        command (`str`): The command that makes them.

    Returns:
        `dict`: `command`, `date` (ISO, local), `commit` (`None` outside a checkout), `host` and `versions`.
    """
    return {
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": installed_versions(),
    }


def commit() -> str | None:
    """Commit of this package's checkout, with a `+` where files differ from it; `None` for an installed package, also
    one whose environment lies in a checkout of something else."""
    if not (Path(__file__).parents[2] / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or one that hangs: the numbers are worth more
        return None
    return done.stdout.strip() or None
