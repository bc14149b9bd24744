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
import time
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli import job as jobs
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.recipe import dump, read_given
from trl_drgrpo.cli.values import add_flag, help_text
from trl_drgrpo.common.errors import Terminated

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


class _UsualFlags(argparse.RawDescriptionHelpFormatter):
    """Leaves out the keys of a run that few people set, and all but the first sentence about the others."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in read_flags():
            super().add_argument(action)
        elif action.help != argparse.SUPPRESS and any(action.dest in names for names in _USUAL.values()):
            brief = copy.copy(action)
            brief.help = help_text(read_flags()[action.dest], brief=True)
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


def run(args: argparse.Namespace) -> int:
    """Train, or only resolve the recipe, and print the result."""
    given = read_given(args)
    jobs.check_given(given)
    with jobs.run_folder(given, args.dry_run), console.stdout_to_stderr():
        job = jobs.prepare(given)
        text = dry_run(job) if args.dry_run else dump(_trained(job))
    console.print_result(text)
    return 0


def dry_run(job: Any) -> str:
    """The resolved configuration of a job, checked."""
    from trl_drgrpo.cli.resolved import render

    jobs.check(job)
    return render(job)


def _trained(job: Any) -> dict[str, Any]:
    """Trains; says in the end what comes next, or, interrupted, how to go on."""
    from trl_drgrpo.cli import resolved

    began = time.monotonic()
    try:
        result, logged = jobs.train(job, [resolved.KeepsRecipe(resolved.render(job))])
    except (KeyboardInterrupt, Terminated):
        folder = Path(job.training.output_dir)
        resolved.say("The words on checkpoints", lambda: resolved.interrupted(folder))
        raise
    seconds, run_log = time.monotonic() - began, job.training.run_log
    resolved.say("The closing summary", lambda: resolved.closing(result["output_dir"], logged, seconds, run_log))
    return result
