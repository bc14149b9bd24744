"""The end of `trl-drgrpo train`: first and last numbers, the next commands, or the way on from an interruption."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.job import logged_values
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES
from trl_drgrpo.features.diagnostics.progress import spoken_time
from trl_drgrpo.features.resume.checkpoints import newest_complete_checkpoint
from trl_drgrpo.upstream.description import DescribingCallback, DescriptionGuard

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
        from trl_drgrpo.cli.kept_recipe import keep_recipe

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
