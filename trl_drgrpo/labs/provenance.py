"""Provenance of measured numbers, kept in their files: command, day, commit, machine and versions."""

import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from trl_drgrpo.upstream.versions import installed_versions


def provenance(command: str) -> dict[str, Any]:
    """Provenance of numbers.

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


def study_command(study: str, seeds: int, jobs: int = 1) -> str:
    """The command of a study as it is typed. `jobs`: runs at a time."""
    return f"trl-drgrpo study {study} --seeds {seeds}" + (f" --jobs {jobs}" if jobs > 1 else "")


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
