"""The recipe that a run keeps of itself: `recipe.yaml` in its `_drgrpo` folder, resolved, without secrets.

`eval` and `generate` read it, so that the name of a run's folder is enough for its template, data and rewards.
"""

import json
from pathlib import Path

from trl_drgrpo.features.diagnostics.run_log import FOLDER, RUN

RECIPE = "recipe.yaml"


def keep_recipe(output_dir: Path, text: str) -> None:
    """Writes the recipe of a run, YAML, into its log folder."""
    folder = output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(text, encoding="utf-8")


def run_folder(model: str) -> Path | None:
    """The run's folder of a model in it, or in one of its checkpoints; `None` for any other model."""
    folder = Path(model).expanduser()
    return next((each for each in (folder, folder.absolute().parent) if (each / FOLDER).is_dir()), None)


def kept_recipe(model: str) -> Path | None:
    """The recipe of the run that a model's folder belongs to; `None` where there is none."""
    run = run_folder(model)
    recipe = None if run is None else run / FOLDER / RECIPE
    return recipe if recipe is not None and recipe.is_file() else None


def was_trained_on_messages(model: str) -> bool | None:
    """Whether the prompts of a model's run were messages; `None` where nothing says it."""
    run = run_folder(model)
    try:
        return None if run is None else json.loads((run / FOLDER / RUN).read_text("utf-8"))["prompts"] == "messages"
    except (OSError, ValueError, KeyError, TypeError):
        return None
