"""What a running demo shows: a progress bar with pass rate and completion length, or plain lines without a terminal.

The callback reads the training logs only. The lengths of right and wrong completions reach the logs through the reward
function (`log_metric` is TRL's documented way for a reward function to add a metric); batches without a right or
without a wrong completion leave that metric out.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_drgrpo.demo.evaluate import mean_or_none
from trl_drgrpo.demo.task import list_sum_reward

LENGTH_RIGHT, LENGTH_WRONG = "demo/length_right_mean", "demo/length_wrong_mean"

# Name in the curves -> key in the training logs.
_CURVES = {
    "pass_rate": "reward",
    "length_mean": "completions/mean_length",
    "length_right_mean": LENGTH_RIGHT,
    "length_wrong_mean": LENGTH_WRONG,
}
_PROCESS_CURVES = {"steps_mean": "process/steps_mean", "process_reward": "process/reward_mean"}


def logged_list_sum_reward(
    completions: Sequence[Any], answer: Sequence[str], completion_ids: Sequence[Sequence[int]], **kwargs: Any
) -> list[float]:
    """`list_sum_reward`, and the mean length of right and wrong completions as metrics.

    Args:
        completions (`Sequence`): `B` completions.
        answer (`Sequence[str]`): `B` sums.
        completion_ids (`Sequence[Sequence[int]]`): Token ids of each completion, without padding.
        **kwargs: `log_metric(name, value)` is used where the trainer gives it.

    Returns:
        `list[float]` of length `B`, each 1.0 or 0.0.
    """
    rewards = list_sum_reward(completions, answer)
    log_metric = kwargs.get("log_metric")
    if log_metric is not None:
        for name, wanted in ((LENGTH_RIGHT, 1.0), (LENGTH_WRONG, 0.0)):
            lengths = [len(ids) for ids, reward in zip(completion_ids, rewards, strict=True) if reward == wanted]
            if (mean := mean_or_none(lengths)) is not None:
                log_metric(name, mean)
    return rewards


class ProgressCallback(TrainerCallback):
    """Shows and collects the curves of a run.

    Args:
        console (`rich.console.Console`): Where to show progress. A bar on a terminal, else a line every `every` steps.
        steps (`int`): Number of training steps.
        every (`int`): Steps between two plain lines.
        process (`bool`): Whether the run has step rewards, so that their curves are there too.

    Attributes:
        curves (`dict[str, list[float | None]]`): `step`, `pass_rate`, `length_mean`, `length_right_mean` and
            `length_wrong_mean`, with step rewards also `steps_mean` and `process_reward`, one entry per logged step;
            `None` where a batch had no such completion.
    """

    def __init__(self, console: Console, steps: int, every: int = 20, process: bool = False):
        self.console = console
        self.steps = steps
        self.every = every
        self._keys = _CURVES | _PROCESS_CURVES if process else _CURVES
        self.curves: dict[str, list[float | None]] = {name: [] for name in ("step", *self._keys)}
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, status="")

    def __enter__(self) -> "ProgressCallback":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the numbers of one step and show them."""
        if logs is None or "reward" not in logs:  # the closing summary of a run carries no reward
            return
        self.curves["step"].append(state.global_step)
        for name, key in self._keys.items():
            self.curves[name].append(logs.get(key))
        status = f"pass rate {self.recent('pass_rate'):4.0%}  length {self.recent('length_mean'):4.1f} tokens"
        self._bar.update(self._task, completed=state.global_step, status=status)
        if not self.console.is_terminal and (state.global_step % self.every == 0 or state.global_step == self.steps):
            self.console.print(f"step {state.global_step}/{self.steps}  {status}", highlight=False)

    def recent(self, name: str, window: int = 10) -> float:
        """Mean of the last `window` values of a curve that are there; 0.0 if there is none."""
        return mean_or_none([value for value in self.curves[name][-window:] if value is not None]) or 0.0
