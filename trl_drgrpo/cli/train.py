"""`trl-drgrpo train --config recipe.yaml [--flag value ...]`: TRL's `trl grpo`, strict, with Dr. GRPO's trainer.

As `trl grpo`, but an unknown key is an error that names the nearest one; so is a value of an invalid type;
`--help` shows the flags that people use and `--help_all` all of them; help and these errors come before TRL is
imported; `--dry_run` puts everything together but the model; training output goes to stderr and a short YAML result to
stdout. Flags win over the recipe. Launch it on several devices with `accelerate launch -m trl_drgrpo.cli.main train
...` or `torchrun -m trl_drgrpo.cli.main train ...`.

Recipe keys are the flags without dashes; `env:` maps environment variables to set. Example:

  trl-drgrpo train --model_name_or_path trl_drgrpo:demo --dataset_name trl_drgrpo:list_sum
      --reward_funcs list_sum_reward --max_completion_length 96 --max_steps 20 --output_dir out
"""

import argparse
import copy
import json
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli import job as jobs
from trl_drgrpo.cli.flags import add_flag, help_text, read_flags
from trl_drgrpo.cli.recipe import dump, read_given
from trl_drgrpo.common.errors import InputError, Terminated
from trl_drgrpo.rewards.recipe_names import REWARDS

# What `--help` shows; the rest, by the class that declares it, is behind `--help_all`.
_USUAL = {
    "model": ("model_name_or_path", "preset", "lora_r", "dtype", "attn_implementation"),
    "data": ("dataset_name", "dataset_config", "rename_columns", "prompt_template", "system_prompt"),
    "rewards": ("reward_funcs", "reward_weights", "step_reward_funcs"),
    "training": (
        "max_steps",
        "learning_rate",
        "beta",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "eval_strategy",
        "eval_steps",
        "seed",
    ),
    "tools": ("tools", "environment_factory"),
    "generation": ("num_generations", "max_completion_length", "temperature", "use_vllm", "vllm_mode"),
    "credit": ("advantage_baseline", "loss_normalizer", "dynamic_sampling", "forks", "process_role"),
    "memory": ("gradient_checkpointing", "bf16"),
    "output and Hub": (
        "output_dir",
        "resume_from_checkpoint",
        "save_steps",
        "logging_steps",
        "log_completions",
        "report_to",
        "push_to_hub",
    ),
}
# Titles of the other groups, and the classes whose fields they hold.
_GROUPS = {
    "data and rewards": ("DrGRPOScriptArguments", "GRPOScriptArguments", "ScriptArguments"),
    "Dr. GRPO": ("DrGRPOConfig",),
    "model, adapter, quantization": ("ModelConfig",),
    "GRPO (TRL)": ("GRPOConfig",),
    "dataset mixture": ("DatasetMixtureConfig",),
    "training (transformers)": ("_BaseConfig", "TrainingArguments"),
}


class _UsualFlags(argparse.RawDescriptionHelpFormatter):
    """Leave out the keys of a run that few people set, and all but the first sentence about the others."""

    def add_argument(self, action: argparse.Action) -> None:
        flag = read_flags().get(action.dest)
        if flag is None:
            super().add_argument(action)
        elif action.help != argparse.SUPPRESS and any(flag.name in names for names in _USUAL.values()):
            # A copy, as `--help_all` formats the same actions in full.
            brief = copy.copy(action)
            brief.help = help_text(flag, brief=True)
            super().add_argument(brief)


class _HelpAll(argparse.Action):
    """Print the help with all flags, and the names of rewards."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        # In place of `_UsualFlags`, which leaves most flags out.
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _list_of_rewards()
        parser.print_help()
        parser.exit()


_TITLES = {
    "outcome": "names in reward_funcs",
    "wrapper": "around other rewards",
    "adapter": "for functions of other stacks",
    "step": "names in step_reward_funcs",
}


def _list_of_rewards() -> str:
    """Return the registered rewards by role, each with its help."""
    lines = []
    for role, title in _TITLES.items():
        lines += [f"{title}:"]
        for name, entry in REWARDS.items():
            if entry.role != role:
                continue
            # Wrappers and adapters always have options.
            if role == "outcome" and not entry.stands_alone:
                name += " (with options)"
            lines.append(f"  {name}: {entry.help}")
    return "\n".join(lines)


def _names_of_rewards() -> str:
    """Return the names of outcome rewards, as a paragraph."""
    names = [name for name, entry in REWARDS.items() if entry.role == "outcome"]
    return textwrap.fill(f"Names in reward_funcs: {', '.join(names)}.", width=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every key of the four dataclasses as a flag, spelled with underscores or dashes, without importing TRL."""
    parser.usage = f"{parser.prog} --config recipe.yaml [--flag value ...]"
    parser.formatter_class = _UsualFlags
    help_all = f"Show all {len(read_flags())} flags, those of TRL and transformers too, with their full help texts."
    add = parser.add_argument
    add("--help_all", "--help-all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS, help=help_all)
    add("--config", metavar="YAML", help="The recipe. Flags win over it.")
    add(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="Check everything but the model's weights, print the resolved configuration, and stop.",
    )
    # The usual flags by theme. A newer TRL may have dropped one.
    flags = dict(read_flags())
    for title, names in _USUAL.items():
        description = _names_of_rewards() if title == "rewards" else None
        group = parser.add_argument_group(title, description)
        for name in names:
            if name in flags:
                add_flag(group, flags.pop(name))
    groups = {}
    for title, owners in _GROUPS.items():
        group = parser.add_argument_group(f"more: {title}")
        groups |= dict.fromkeys(owners, group)
    # A class that a newer TRL puts in between shows up in the last group.
    for flag in flags.values():
        add_flag(groups.get(flag.owner, groups["TrainingArguments"]), flag)


def run(args: argparse.Namespace) -> int:
    """Train, or only resolve the recipe, and print the result."""
    return _run(args, read_given(args), _trained, writes=not args.dry_run)


def _run(args: argparse.Namespace, values: dict[str, Any], result: Callable[[jobs.Job], str], writes: bool) -> int:
    """Put the job of these values together, and print its result, or with `--dry_run` what it consists of."""
    jobs.check_names(values)
    with jobs.run_folder(values, dry_run=not writes), console.stdout_to_stderr():
        job = jobs.prepare(values)
        text = jobs.dry_run(job) if args.dry_run else result(job)
    console.print_result(text)
    return 0


def _trained(job: jobs.Job) -> str:
    """Train; say in the end what comes next, or, interrupted, how to go on."""
    start = time.monotonic()
    try:
        result, logged = jobs.train(job)
    except (KeyboardInterrupt, Terminated):
        jobs.say("The words on checkpoints", lambda: jobs.interrupted(Path(job.training.output_dir)))
        raise
    seconds = time.monotonic() - start
    run_log = job.training.run_log
    jobs.say("The closing summary", lambda: jobs.closing(result["output_dir"], logged, seconds, run_log, job.values))
    return dump(result)


def add_arguments_bias(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `train` and of the measurement."""
    add_arguments(parser)
    parser.usage = f"{parser.prog} --config recipe.yaml [--batches 8] [--json] [--flag value ...]"
    group = parser.add_argument_group("measurement")
    group.add_argument("--batches", type=int, default=8, help="Generation batches to sample, at least 3 (default: 8).")
    group.add_argument("--json", action="store_true", help="Print the estimates as JSON.")


def run_bias(args: argparse.Namespace) -> int:
    """`trl-drgrpo bias --config recipe.yaml [--flag value ...]`: what one update would do to the length of answers.

    Takes what `trl-drgrpo train` takes, samples a few generation batches from the model as it is, trains nothing, and
    prints for each objective of the family the expected change of the length of correct answers, of incorrect ones
    and of the pass rate, with standard errors: a bias without waiting for a run. stdout: tables, or JSON; stderr:
    progress.

    Every change is per update of unit length (Euclidean, over the trainable parameters), along the direction of one
    generation batch. Example:

      trl-drgrpo bias --config recipes/cpu_quickstart.yaml --batches 8
    """
    if args.batches < 3:
        remedy = "Raise it: the standard error is a jackknife over batches."
        raise InputError("--batches", str(args.batches), "at least 3", remedy)
    # Nothing is trained, so trackers would get an empty run.
    values = {**read_given(args), "report_to": "none"}
    return _run(args, values, lambda job: _measured(job, args.batches, args.json), writes=False)


def _measured(job: jobs.Job, batches: int, as_json: bool) -> str:
    from trl_drgrpo.check import bias

    # Batches are kept for the second table, and say how far the measurement is.
    all_rollouts = []

    def keep(rollouts: bias.Rollouts, *batch: Any) -> None:
        all_rollouts.append(rollouts)
        correct = f"{rollouts.right.mean():.0%} correct"
        console.log(f"batch {len(all_rollouts)}/{batches}: {len(rollouts.lengths)} completions, {correct}")

    changes = bias.measure_model(jobs.build_trainer(job), batches, keep)
    pushes = bias.pushes(all_rollouts)
    if as_json:
        return json.dumps(bias.plain({**vars(changes), "stop_push": pushes}), indent=1) + "\n"
    return f"{bias.changes_table(changes)}\n\n{bias.push_table(pushes)}\n"
