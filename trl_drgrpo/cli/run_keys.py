"""Keys of `train` in other commands: as flags of the same names and types, and from a recipe, by hand or by a run.

A run keeps its recipe (`kept_recipe.py`), so a run's folder as the model brings data, rewards and prompts along.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import recipe, train, values
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.train import kept_recipe
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.evaluation.models import Loading, holds_model
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
        try:
            found = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise InputError(TEMPLATE_KEY, repr(given), "a JSON mapping", f"It is not valid JSON: {error}.") from None
        if not isinstance(found, dict):
            raise InputError(TEMPLATE_KEY, repr(given), "a mapping", "For example '{\"enable_thinking\": false}'.")
        return found

    def decoding(self) -> Decoding:
        """Sampling settings; defaults as in training."""
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
        train.add_flag(parser, known[key])


def read_given(args: argparse.Namespace) -> Given:
    """The values of the recipe, if there is one, and of the flags. Sets the recipe's `env:` variables."""
    known, named = read_flags(), args.model_name_or_path
    kept = kept_recipe(model_path(named)) if named else None
    path = args.config or (str(kept) if kept else None)
    given: dict[str, Any] = {}
    if path is not None:
        read = recipe.read_recipe(path, known)
        os.environ.update(read.env)
        given = dict(read.values)
    trained_from = given.get("model_name_or_path")
    for name, value in vars(args).items():
        if name in known and value is not None:
            given[name] = values.coerce(known[name], value)
    output = given.get("output_dir") if args.config else None
    if named is None:
        named = output if output and holds_model(Path(output).expanduser()) else trained_from
    if not named:
        remedy = "Name it: --model_name_or_path runs/first, or --config recipe.yaml."
        raise InputError("model_name_or_path", "none", "a run's folder, a model or a recipe", remedy)
    given["model_name_or_path"] = named
    return Given(given, model_path(named), trained_from if trained_from != named else None, path)
