"""Where a study's numbers come from: the command, the day and the versions, kept in its file."""

from datetime import date
from typing import Any

from trl_drgrpo.versions import installed_versions


def provenance(study: str, seeds: int) -> dict[str, Any]:
    """`command`, `date` (ISO, local) and `versions`.

    Args:
        study (`str`): As the command line calls it.
        seeds (`int`): Number of seeds.
    """
    return {
        "command": f"trl-drgrpo study {study} --seeds {seeds}",
        "date": date.today().isoformat(),
        "versions": installed_versions(),
    }
