"""What `trl-drgrpo train` prints of a run: its resolved recipe before, its numbers and the next commands after.

The recipe (`--dry_run`, and `recipe.yaml` in the run's folder) holds the objective, whether or not it was given, and
every given value that differs from its default. What is derived (batch geometry, rows of data, which function a reward
is) stands in comments, so the output is a recipe itself.
"""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console, flags
from trl_drgrpo.cli.job import Job, logged_values
from trl_drgrpo.cli.recipe import dump
from trl_drgrpo.cli.run_keys import keep_recipe
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.features.diagnostics.progress import spoken_time
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
    for kind, rewards in (("reward", job.reward_funcs), ("step reward", job.step_reward_funcs)):
        for reward in rewards:
            name = reward if isinstance(reward, str) else reward_name(reward)
            facts[f"{kind} {name}"] = "a model" if isinstance(reward, str) else origin(reward)
    return facts


def _default(key: str) -> Any:
    name = flags.read_flags()[key].dataclass
    entry = next(entry for entry in dataclasses.fields(flags.import_dataclass(name)) if entry.name == key)
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


_SHOWN = (
    ("eval_drgrpo/pass_rate", "pass rate on the evaluation data", "{:.0%}"),
    ("eval_reward", "reward on the evaluation data", "{:.3g}"),
    ("drgrpo/pass_rate", "pass rate in training", "{:.0%}"),
    ("reward", "reward in training", "{:.3g}"),
)


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


def say(place: str, words: Callable[[], str]) -> None:
    """Prints what describes a run, from the main process; a failure here ends no run and hides nothing."""
    if console.is_main_process():
        with DescriptionGuard()(place):
            console.log(words())


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


def interrupted(output_dir: Path) -> str:
    """Names the safe checkpoint of an interrupted run, by its folder, and how to go on."""
    checkpoint = newest_complete_checkpoint(output_dir)
    if checkpoint is None:
        return (
            f"No checkpoint in {output_dir} is complete: the run starts from scratch. `--save_strategy steps "
            "--save_steps N` writes one every N steps."
        )
    go_on = shlex.join(["--resume_from_checkpoint", str(checkpoint)])
    return f"Saved: {checkpoint}. To continue: the same command with {go_on}, without --overwrite_output_dir."
