"""Output of `trl-drgrpo train --dry_run`: a recipe for the same run, and derived facts.

The YAML holds the objective, whether or not it was given, and every given value that differs from its default. What is
derived (batch geometry, rows of data, which function a reward is) stands in comments, so the output is a recipe
itself.
"""

import dataclasses
from typing import Any

import yaml

from trl_drgrpo.cli import flags
from trl_drgrpo.cli.job import Job
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.paths import origin

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
