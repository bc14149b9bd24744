"""Keys of `train` in other commands: as flags of the same names and types, and from a recipe, by hand or by a run.

A run keeps its recipe in its log folder, resolved and without secrets, so a run's folder as the model brings data,
rewards and prompts along.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.cli.data import check_prompting
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.recipe import flag_values, recipe_values
from trl_drgrpo.cli.values import add_flag
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.evaluation.models import Loading, check_model, holds_model
from trl_drgrpo.features.diagnostics.run_log import FOLDER as LOG_FOLDER
from trl_drgrpo.features.diagnostics.run_log import RUN

if TYPE_CHECKING:
    from trl_drgrpo.evaluation.running import Decoding

MODEL_KEYS = ("dtype", "trust_remote_code", "load_in_4bit", "load_in_8bit")
PROMPT_KEYS = ("prompt_template", "system_prompt")
TEMPLATE_KEY = "chat_template_kwargs"
DECODING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")


@dataclass(frozen=True)
class Given:
    """
    Model, recipe and values of a call.

    Args:
        values (`dict[str, Any]`): Typed values by key of `train`: of the recipe, and of flags, which win.
        model (`str`): Path or Hub id of the model that is meant.
        trained_from (`str`, *optional*): The recipe's model, where `model` is another one.
        recipe (`str`, *optional*): The recipe that was read.
    """

    values: dict[str, Any]
    model: str
    trained_from: str | None
    recipe: str | None

    def check(self, args: argparse.Namespace) -> None:
        """Checks what the calls of several commands have in common, before anything loads."""
        if self.decoding().temperature == 0 and args.num_samples > 1:
            remedy = "Greedy decoding gives a single answer: remove num_samples, or raise the temperature."
            raise InputError("num_samples", f"{args.num_samples} at temperature 0", "1", remedy)
        check_prompting(*(self.values.get(key) for key in PROMPT_KEYS))
        self.template()
        check_model("model_name_or_path", self.model, self.loading(args.base).base)

    def loading(self, base: str | None) -> Loading:
        """Model loading. `base`: base model of an adapter."""
        quantized = self.values.get("load_in_4bit") or self.values.get("preset") == "qlora"
        return Loading(
            base=None if base is None else model_path(base),
            dtype=self.values.get("dtype"),
            trust_remote_code=bool(self.values.get("trust_remote_code")),
            bits=4 if quantized else 8 if self.values.get("load_in_8bit") else None,
        )

    def template(self) -> dict[str, Any]:
        """More that the chat template is given: of the recipe, or JSON after the flag."""
        given = self.values.get(TEMPLATE_KEY) or {}
        if not isinstance(given, dict):
            raise InputError(TEMPLATE_KEY, repr(given), "a mapping", "For example '{\"enable_thinking\": false}'.")
        return given

    def decoding(self) -> "Decoding":
        """Sampling settings; defaults as in training."""
        from trl_drgrpo.evaluation.running import Decoding

        return Decoding(**{key: self.values[key] for key in DECODING_KEYS if self.values.get(key) is not None})


def add_keys(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Adds `--config`, `--model_name_or_path` (or `--model`), `--base` and keys of `train` as flags."""
    known = read_flags()
    add = parser.add_argument
    add("--config", metavar="YAML", help="a recipe of `train`; flags win over it")
    add(
        "--model_name_or_path",
        "--model",
        dest="model_name_or_path",
        metavar="MODEL",
        help="folder of a run, a checkpoint, a model or an adapter, or a Hub id; a run brings its recipe along "
        "(default: the model that the recipe trained, else the one it starts from)",
    )
    add("--base", metavar="MODEL", help="base model of an adapter, if not the one that the adapter names")
    for key in keys:
        add_flag(parser, known[key])


def read_given(args: argparse.Namespace) -> Given:
    """The values of the recipe, if there is one, and of the flags. Sets the recipe's `env:` variables."""
    named = args.model_name_or_path
    kept = kept_recipe(model_path(named)) if named else None
    path = args.config or (str(kept) if kept else None)
    given = recipe_values(path)
    trained_from = given.get("model_name_or_path")
    given |= flag_values(args)
    output = given.get("output_dir") if args.config else None
    if named is None:
        named = output if output and holds_model(Path(output).expanduser()) else trained_from
    if not named:
        remedy = "Name it: --model_name_or_path runs/first, or --config recipe.yaml."
        raise InputError("model_name_or_path", "none", "a run's folder, a model or a recipe", remedy)
    given["model_name_or_path"] = named
    return Given(given, model_path(named), trained_from if trained_from != named else None, path)


RECIPE = "recipe.yaml"
EVALUATIONS = Path(LOG_FOLDER, "evaluations")  # in a run's folder


def keep_recipe(output_dir: Path, text: str) -> None:
    """Writes the recipe of a run, YAML, into its log folder."""
    folder = output_dir / LOG_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(text, encoding="utf-8")


def run_folder(model: str) -> Path | None:
    """The run's folder of a model in it, or in one of its checkpoints; `None` for any other model."""
    folder = Path(model).expanduser()
    return next((each for each in (folder, folder.absolute().parent) if (each / LOG_FOLDER).is_dir()), None)


def kept_recipe(model: str) -> Path | None:
    """The recipe of the run that a model's folder belongs to; `None` where there is none."""
    run = run_folder(model)
    recipe = None if run is None else run / LOG_FOLDER / RECIPE
    return recipe if recipe is not None and recipe.is_file() else None


def was_trained_on_messages(model: str) -> bool | None:
    """Whether the prompts of a model's run were messages; `None` where nothing says it."""
    run = run_folder(model)
    try:
        return (
            None if run is None else json.loads((run / LOG_FOLDER / RUN).read_text("utf-8"))["prompts"] == "messages"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
