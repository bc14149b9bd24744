"""Provenance of a study's numbers: the command, the day and the versions, kept in its file."""

from datetime import date
from typing import Any

from trl_drgrpo.upstream.versions import installed_versions


def provenance(study: str, seeds: int, jobs: int = 1) -> dict[str, Any]:
    """`command`, `date` (ISO, local) and `versions`.

    Args:
        study (`str`): As the command line calls it.
        seeds (`int`): Number of seeds.
        jobs (`int`, *optional*, defaults to `1`): Runs at a time.
    """
    return {
        "command": f"trl-drgrpo study {study} --seeds {seeds}" + (f" --jobs {jobs}" if jobs > 1 else ""),
        "date": date.today().isoformat(),
        "versions": installed_versions(),
    }
