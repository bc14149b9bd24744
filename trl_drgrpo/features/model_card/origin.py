"""Origin of a base model in a local folder, for the card of a model that is trained from it.

A converted or merged model has no Hub id of its own. The file `origin.json` in its folder names the model it was made
from, with its license.
"""

import json
from pathlib import Path
from typing import TypedDict

ORIGIN_FILE = "origin.json"


class Origin(TypedDict, total=False):
    """Content of the file: Hub id and license of the original, and the way from it to the folder."""

    base_model: str
    license: str
    source: str


def origin_of(folder: str | None) -> Origin:
    """Read the origin of a model's folder; empty where the file is missing or cannot be read."""
    try:
        values = json.loads((Path(folder or "") / ORIGIN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return Origin(**{key: values[key] for key in Origin.__annotations__ if isinstance(values.get(key), str)})
