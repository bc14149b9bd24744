"""The JSON file of a study that can be interrupted: written after every run, taken up again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def earlier_results(output: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an earlier call, or nothing if there is no such file, or other settings or versions made it.

    Args:
        output (`Path`): The file.
        results (`Mapping[str, Any]`): Has the `settings` and `versions` of this call.
    """
    try:
        earlier = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = json.loads(json.dumps([results["settings"], results["versions"]]))
    return earlier if [earlier.get("settings"), earlier.get("versions")] == same else {}


def write_results(results: Mapping[str, Any], output: Path) -> None:
    """Write the results to the file."""
    output.write_text(json.dumps(results) + "\n", encoding="utf-8")
