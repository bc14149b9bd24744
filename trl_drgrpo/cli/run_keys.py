"""Keys of `train` in other commands: as flags of the same names and types, and from a recipe, by hand or by a run.

A run keeps its recipe in its log folder, resolved and without secrets, so a run's folder as the model brings data,
rewards and prompts along.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.data import check_prompting
from trl_drgrpo.cli.flags import add_flag, read_flags
from trl_drgrpo.cli.recipe import flag_values, recipe_values
from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, is_adapter
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.evaluation.models import Decoding, Loading, check_model, holds_model
from trl_drgrpo.features.diagnostics.run_log import FOLDER as LOG_FOLDER
from trl_drgrpo.features.diagnostics.run_log import RUN

DEMO_MODEL = "trl_drgrpo:demo"
PROMPT_KEYS = ("prompt_template", "system_prompt")
DECODING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_MODEL_KEYS = ("dtype", "trust_remote_code", "load_in_4bit", "load_in_8bit")
ANSWER_KEYS = (*PROMPT_KEYS, "chat_template_kwargs", *DECODING_KEYS)


def model_path(name: str) -> str:
    """The path or Hub id behind a model's name: `trl_drgrpo:demo` is the model that comes with the package."""
    if name == DEMO_MODEL:
        return str(MODEL_DIR)
    return str(Path(name).expanduser()) if name.startswith("~") else name


def check_model_name(name: str | None, field: str = "model_name_or_path") -> None:
    """Refuses a name that is missing or, where it is one of this machine or package, of nothing."""
    if not name:
        remedy = f"Add model_name_or_path to the recipe; {DEMO_MODEL} is the tiny model that comes with the package."
        raise InputError(field, "none", "a Hub id or a local folder", remedy)
    if name.startswith("trl_drgrpo:") and name != DEMO_MODEL:
        raise InputError(field, name, DEMO_MODEL, f"Did you mean {DEMO_MODEL}?")
    if not is_adapter(model_path(name)):  # whose base is looked for with the other checks of the model
        check_local(field, model_path(name))


@dataclass(frozen=True)
class Given:
    """
    Model, recipe and values of a call.

    Args:
        values (`dict[str, Any]`): Typed values by key of `train`: of the recipe, and of flags, which win.
        model (`str`): Path or Hub id of the model that is meant.
        trained_from (`str`, *optional*): The recipe's model, where `model` is another one.
        base (`str`, *optional*): Base model of an adapter, as it was named.
    """

    values: dict[str, Any]
    model: str
    trained_from: str | None
    base: str | None

    @property
    def loading(self) -> Loading:
        """Model loading."""
        quantized = self.values.get("load_in_4bit") or self.values.get("preset") == "qlora"
        return Loading(
            base=None if self.base is None else model_path(self.base),
            dtype=self.values.get("dtype"),
            trust_remote_code=bool(self.values.get("trust_remote_code")),
            bits=4 if quantized else 8 if self.values.get("load_in_8bit") else None,
        )

    @property
    def prompting(self) -> dict[str, Any]:
        """How a row becomes a prompt."""
        return {key: self.values.get(key) for key in PROMPT_KEYS}

    @property
    def template(self) -> dict[str, Any]:
        """More that the chat template is given: of the recipe, or JSON after the flag."""
        given = self.values.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            remedy = "For example '{\"enable_thinking\": false}'."
            raise InputError("chat_template_kwargs", repr(given), "a mapping", remedy)
        return given

    @property
    def decoding(self) -> Decoding:
        """Sampling settings; defaults as in training."""
        return Decoding(**{key: self.values[key] for key in DECODING_KEYS if self.values.get(key) is not None})

    def sampler(self, name: str, tokenizer: Any, batch_size: int, url: str | None) -> Any:
        """Samples whole completions of a model, as it was named: in memory, or with the vLLM server at an address."""
        from trl_drgrpo.evaluation.models import load_model
        from trl_drgrpo.evaluation.running import model_sampler, server_sampler

        if url is not None:
            return server_sampler(url, model_path(name), tokenizer, self.decoding, batch_size)
        console.log(f"Loading {name}")
        return model_sampler(load_model(model_path(name), self.loading), tokenizer, self.decoding, batch_size)


def add_keys(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Adds `--config`, `--model_name_or_path` (or `--model`), `--base` and keys of `train` as flags."""
    add = parser.add_argument
    add("--config", metavar="YAML", help="a recipe of `train`; flags win over it")
    model = (
        "folder of a run, a checkpoint, a model or an adapter, or a Hub id; a run brings its recipe along "
        "(default: the model that the recipe trained, else the one it starts from)"
    )
    add("--model_name_or_path", "--model", metavar="MODEL", help=model)
    add("--base", metavar="MODEL", help="base model of an adapter, if not the one that the adapter names")
    for key in (*_MODEL_KEYS, *keys):
        add_flag(parser, read_flags()[key])


def read_given(args: argparse.Namespace) -> Given:
    """The values of the recipe, if there is one, and of the flags, checked before anything loads. Sets the recipe's
    `env:` variables."""
    named = args.model_name_or_path
    kept = kept_recipe(model_path(named)) if named else None
    recipe = recipe_values(args.config or (kept and str(kept)), args)
    trained_from, output = recipe.get("model_name_or_path"), recipe.get("output_dir") if args.config else None
    if named is None:
        named = output if output and holds_model(Path(output).expanduser()) else trained_from
    if not named:
        remedy = "Name it: --model_name_or_path runs/first, or --config recipe.yaml."
        raise InputError("model_name_or_path", "none", "a run's folder, a model or a recipe", remedy)
    values = {**recipe, **flag_values(args), "model_name_or_path": named}
    given = Given(values, model_path(named), trained_from if trained_from != named else None, args.base)
    if given.decoding.temperature == 0 and args.num_samples > 1:
        remedy = "Greedy decoding gives a single answer: remove num_samples, or raise the temperature."
        raise InputError("num_samples", f"{args.num_samples} at temperature 0", "1", remedy)
    check_prompting(**given.prompting)
    _ = given.template
    check_model("model_name_or_path", given.model, given.loading.base)
    return given


RECIPE = "recipe.yaml"
EVALUATIONS = Path(LOG_FOLDER, "evaluations")  # in a run's folder


def keep_recipe(output_dir: Path, text: str) -> None:
    """Writes the recipe of a run, YAML, into its log folder."""
    write_whole(output_dir / LOG_FOLDER / RECIPE, text)


def run_folder(model: str) -> Path | None:
    """The run's folder of a model in it, or in one of its checkpoints; `None` for any other model."""
    folder = Path(model).expanduser()
    return next((each for each in (folder, folder.absolute().parent) if (each / LOG_FOLDER).is_dir()), None)


def kept_recipe(model: str) -> Path | None:
    """The recipe of the run that a model's folder belongs to; `None` where there is none."""
    run = run_folder(model)
    recipe = run and run / LOG_FOLDER / RECIPE
    return recipe if recipe and recipe.is_file() else None


def was_trained_on_messages(model: str) -> bool | None:
    """Whether the prompts of a model's run were messages; `None` where nothing says it."""
    run = run_folder(model)
    try:
        return run and json.loads((run / LOG_FOLDER / RUN).read_text("utf-8"))["prompts"] == "messages"
    except (OSError, ValueError, KeyError, TypeError):
        return None
