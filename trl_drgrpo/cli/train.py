"""Output of `trl-drgrpo train --dry_run`: a recipe for the same run, and derived facts.

The YAML holds the objective, whether or not it was given, and every given value that differs from its default. What is
derived (batch geometry, rows of data, which function a reward is) stands in comments, so the output is a recipe
itself.
"""

import argparse
import copy
import dataclasses
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trl_drgrpo.cli import console, flags, recipe, values
from trl_drgrpo.cli.flags import Flag, read_flags
from trl_drgrpo.cli.job import Job, logged_values
from trl_drgrpo.common.errors import Terminated
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.features.diagnostics.progress import spoken_time
from trl_drgrpo.features.diagnostics.run_log import FOLDER, RUN
from trl_drgrpo.features.resume.checkpoints import newest_complete_checkpoint
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import origin
from trl_drgrpo.upstream.description import DescribingCallback, DescriptionGuard

OBJECTIVE = ("loss_type", "scale_rewards", "beta", "loss_normalizer", "advantage_baseline", "num_generations")
_SECRET = ("hub_token",)


def render(job: Job) -> str:
    """The resolved configuration of a run: YAML with comments, without tokens."""
    objective = {key: getattr(job.training, key) for key in OBJECTIVE}
    if objective["loss_normalizer"] is None:
        objective["loss_normalizer"] = job.training.max_completion_length
    shown = scrubbed({key: value for key, value in job.given.items() if key not in (*OBJECTIVE, *_SECRET)})
    changed = {key: value for key, value in shown.items() if value != _default(key)}
    facts = "".join(f"# {name}: {value}\n" for name, value in derived(job).items())
    return f"# Objective\n{dump(objective)}# Given, and not the default\n{dump(changed)}# Derived\n{facts}"


def derived(job: Job) -> dict[str, Any]:
    """Sizes of steps and data derived from a configuration. Rows are completions; prompts are different
    prompts."""
    args = job.training
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    facts: dict[str, Any] = {
        "rows per optimizer step": f"{rows} ({args.per_device_train_batch_size} per device x "
        f"{args.gradient_accumulation_steps} accumulated x {args.world_size} process{'es' * (args.world_size > 1)})",
        "prompts per optimizer step": f"{rows / args.num_generations:g}",
        "rows per generation batch": args.generation_batch_size,
        "prompts per generation batch": args.generation_batch_size // args.num_generations,
        "optimizer steps per generation batch": f"{args.generation_batch_size * args.num_iterations / rows:g}",
        "device": f"{args.device.type}, {'bf16' if args.bf16 else 'fp16' if args.fp16 else 'full precision'}",
        "model": job.model.model_name_or_path,
    }
    if job.preset:
        facts[f"preset {job.script.preset} sets, on this device"] = ", ".join(
            f"{k} {v}" for k, v in job.preset.items()
        )
    for name, dataset in (("train", job.train_dataset), ("evaluation", job.eval_dataset)):
        if dataset is not None:
            size = len(dataset) if hasattr(dataset, "__len__") else "a stream of"
            facts[f"{name} data"] = f"{size} rows, columns {', '.join(dataset.column_names or ['unknown'])}"
    if job.filtered is not None:
        facts[f"difficulty_range {job.script.difficulty_range}"] = job.filtered
    for kind, rewards in (("reward", job.reward_funcs), ("step reward", job.step_reward_funcs)):
        for reward in rewards:
            name = reward if isinstance(reward, str) else reward_name(reward)
            facts[f"{kind} {name}"] = "a model" if isinstance(reward, str) else origin(reward)
    return facts


def _default(key: str) -> Any:
    name = flags.read_flags()[key].dataclass
    entry = next(entry for entry in dataclasses.fields(flags.import_dataclass(name)) if entry.name == key)
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def dump(values: dict[str, Any]) -> str:
    """YAML in the order given, ending in a line break; nothing for an empty mapping."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000) if values else ""


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


_SHOWN = (
    ("eval_drgrpo/pass_rate", "pass rate on the evaluation data", "{:.0%}"),
    ("eval_reward", "reward on the evaluation data", "{:.3g}"),
    ("drgrpo/pass_rate", "pass rate in training", "{:.0%}"),
    ("reward", "reward in training", "{:.3g}"),
)
_NOT_AGAIN = ("--resume_from_checkpoint", "--overwrite_output_dir")


class KeepsRecipe(DescribingCallback):
    """Writes a run's recipe into its log folder when training begins: a run that starts anew has deleted
    the old log by then.

    Args:
        text (`str`): YAML.
    """

    def __init__(self, text: str):
        self.text = text

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it, from the main process."""

        if state.is_world_process_zero and args.run_log:
            keep_recipe(Path(args.output_dir), self.text)


def say_what_next(output_dir: str, logged: Sequence[Mapping[str, Any]], seconds: float, run_log: bool) -> None:
    """Prints the summary of a finished run, from the main process; a failure here ends no run."""
    if console.is_main_process():
        with DescriptionGuard()("The closing summary"):
            console.log(closing(output_dir, logged, seconds, run_log))


def say_how_to_go_on(output_dir: str, argv: Sequence[str], processes: int) -> None:
    """Prints the safe checkpoint of an interrupted run, from the main process; a failure here hides nothing."""
    if console.is_main_process():
        with DescriptionGuard()("The words on checkpoints"):
            console.log(interrupted(Path(output_dir), argv, processes))


def closing(output_dir: str, logged: Sequence[Mapping[str, Any]], seconds: float, run_log: bool) -> str:
    """The summary of a finished run.

    Args:
        output_dir (`str`): Its folder.
        logged (`Sequence[Mapping]`): The log history.
        seconds (`float`): Training time.
        run_log (`bool`): Whether the run keeps its recipe, which `eval` reads.

    Returns:
        `str`: Lines without a break at the end.
    """
    lines = [f"Trained in {spoken_time(seconds)}. Model: {output_dir}"]
    for key, name, form in _SHOWN:
        values = logged_values(key, logged)
        if len(values) > 1:
            lines.append(f"  {name}: {form.format(values[0])} -> {form.format(values[-1])} (first and last logged)")
    folder = shlex.quote(output_dir)
    following = [f"trl-drgrpo report {folder}"]
    if run_log:
        following.append(f"trl-drgrpo eval --model {folder} --num_samples 8")
    following.append(f"trl-drgrpo generate --model {folder}")
    following.append(f"hf upload YOUR_NAME/{shlex.quote(Path(output_dir).name)} {folder} {UPLOAD_EXCLUDES}")
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in following)])


def interrupted(output_dir: Path, argv: Sequence[str], processes: int) -> str:
    """Names the safe checkpoint of an interrupted run, and the command that goes on.

    Args:
        output_dir (`Path`): Its folder.
        argv (`Sequence[str]`): The arguments of this process, `train` the first where the command line started it.
        processes (`int`): Number of training processes.

    Returns:
        `str`: Lines without a break at the end.
    """
    checkpoint = newest_complete_checkpoint(output_dir)
    if checkpoint is None:
        return (
            f"No checkpoint in {output_dir} is complete: the run starts from scratch. `--save_strategy steps "
            "--save_steps N` writes one every N steps."
        )
    go_on = ["--resume_from_checkpoint", str(checkpoint)]
    if processes > 1 or argv[:1] != ["train"]:
        command = f"the same command with {shlex.join(go_on)}"
    else:
        command = shlex.join(["trl-drgrpo", *_without(argv), *go_on])
    return f"Saved: {checkpoint}. To continue:\n  {command}"


def _without(argv: Sequence[str]) -> list[str]:
    """Arguments without the flags of an earlier start."""
    kept: list[str] = []
    skips = False
    for token in argv:
        name = token.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if name in _NOT_AGAIN:
            skips = "=" not in token
        elif not (skips and not token.startswith("--")):
            kept.append(token)
            skips = False
        else:
            skips = False
    return kept


# What `--help` shows; the rest, by the class that declares it, is behind `--help_all`.
_USUAL = {
    "model": ("model_name_or_path", "preset", "lora_r", "dtype", "attn_implementation"),
    "data": ("dataset_name", "dataset_config", "rename_columns", "prompt_template", "system_prompt"),
    "rewards": ("reward_funcs", "reward_weights", "step_reward_funcs"),
    "training": (
        *("max_steps", "learning_rate", "beta", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("eval_strategy", "eval_steps", "seed"),
    ),
    "generation": ("num_generations", "max_completion_length", "temperature", "use_vllm", "vllm_mode"),
    "credit": ("advantage_baseline", "loss_normalizer", "dynamic_sampling", "forks", "process_role"),
    "memory": ("gradient_checkpointing", "bf16"),
    "output and Hub": (
        *("output_dir", "resume_from_checkpoint", "save_steps", "logging_steps", "log_completions", "report_to"),
        "push_to_hub",
    ),
}
_GROUPS = {
    "data and rewards": ("DrGRPOScriptArguments", "GRPOScriptArguments", "ScriptArguments"),
    "Dr. GRPO": ("DrGRPOConfig",),
    "model, adapter, quantization": ("ModelConfig",),
    "GRPO (TRL)": ("GRPOConfig",),
    "dataset mixture": ("DatasetMixtureConfig",),
    "training (transformers)": ("_BaseConfig", "TrainingArguments"),
}
_EPILOG = """Recipe keys are the flags without dashes; `env:` maps environment variables to set. Example:

  trl-drgrpo train --model_name_or_path trl_drgrpo:demo --dataset_name trl_drgrpo:list_sum
      --reward_funcs list_sum_reward --max_completion_length 96 --max_steps 20 --output_dir out
"""


class _UsualFlags(argparse.RawDescriptionHelpFormatter):
    """Leaves out the keys of a run that few people set, and all but the first sentence about the others."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in read_flags():
            super().add_argument(action)
        elif action.help != argparse.SUPPRESS and any(action.dest in names for names in _USUAL.values()):
            brief = copy.copy(action)
            brief.help = _help(read_flags()[action.dest], brief=True)
            super().add_argument(brief)


class _HelpAll(argparse.Action):
    """Prints the help with all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every key of the four dataclasses as a flag, spelled with underscores or dashes, without importing TRL."""
    parser.usage = f"{parser.prog} --config recipe.yaml [--flag value ...]"
    parser.epilog = _EPILOG
    parser.formatter_class = _UsualFlags
    help_all = f"Show all {len(read_flags())} flags, those of TRL and transformers too, with their full help texts."
    parser.add_argument("--help_all", "--help-all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS, help=help_all)
    parser.add_argument("--config", metavar="YAML", help="The recipe. Flags win over it.")
    parser.add_argument(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="Check everything but the model's weights, print the resolved configuration, and stop.",
    )
    flags = dict(read_flags())
    for title, names in _USUAL.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in flags:
                add_flag(group, flags.pop(name))
    owners = {owner for group in _GROUPS.values() for owner in group}
    for title, group_owners in _GROUPS.items():
        group = parser.add_argument_group(f"more: {title}")
        for flag in flags.values():
            # A class that a newer TRL puts in between shows up in the last group.
            if flag.owner in group_owners or (flag.owner not in owners and title.startswith("training")):
                add_flag(group, flag)


def add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Adds one key as a flag, spelled with underscores or dashes."""
    nargs = "+" if values.takes_list(flag) else "?" if values.is_boolean(flag) else None
    options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "nargs": nargs}
    if nargs == "?":
        options["const"] = "true"
    group.add_argument(f"--{flag.name}", metavar=_metavar(flag), help=_help(flag), **options)
    if "_" in flag.name:
        group.add_argument(f"--{flag.name.replace('_', '-')}", help=argparse.SUPPRESS, **options)
    if flag.default is True and nargs == "?":  # as TRL's parser: the way to switch a default off
        off: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "const": "false"}
        spellings = [f"--no_{flag.name}", f"--no-{flag.name.replace('_', '-')}"]
        group.add_argument(*spellings, action="store_const", help=argparse.SUPPRESS, **off)


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "STR"
    return flag.annotation.replace("None | ", "").split(" | ")[0].split("[")[0].upper()


def _help(flag: Flag, brief: bool = False) -> str:
    told = re.split(r"(?<=\.)\s+(?=[A-Z`'])", flag.help)[0] if brief else flag.help
    default = "" if flag.default in (None, dataclasses.MISSING) else f" (default: {flag.default})"
    unnamed = [choice for choice in flag.choices or () if str(choice) not in told]
    choices = f" One of {', '.join(map(str, flag.choices or ()))}." if unnamed else ""
    return f"{told}{choices}{default}".replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    """Train, or only resolve the recipe, and print the result."""
    given = read_given(args)
    from trl_drgrpo.cli import job as jobs

    jobs.check_given(given)
    with jobs.run_folder(given, args.dry_run), console.stdout_to_stderr():
        job = jobs.prepare(given)
        result = None if args.dry_run else _trained(job)

    console.print_result(render(job) if result is None else dump(result))
    return 0


def _trained(job: Any) -> dict[str, Any]:
    """Trains; says in the end what comes next, or, interrupted, how to go on."""

    from trl_drgrpo.cli import job as jobs

    began = time.monotonic()
    try:
        result, logged = jobs.train(job, [KeepsRecipe(render(job))])
    except (KeyboardInterrupt, Terminated):
        say_how_to_go_on(job.training.output_dir, sys.argv[1:], job.training.world_size)
        raise
    say_what_next(result["output_dir"], logged, time.monotonic() - began, job.training.run_log)
    return result


def read_given(args: argparse.Namespace) -> dict[str, Any]:
    """The values given by recipe and flags, typed; flags win. Sets the recipe's `env:` variables."""
    known = read_flags()
    given: dict[str, Any] = {}
    if args.config is not None:
        read = recipe.read_recipe(args.config, known)
        os.environ.update(read.env)
        given.update(read.values)
    for name, value in vars(args).items():
        if name in known:
            given[name] = values.coerce(known[name], value)
    return given
