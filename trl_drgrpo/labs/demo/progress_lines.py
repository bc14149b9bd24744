"""The curves of a demo run, collected from the training logs while its progress is shown."""

from typing import Any

from rich.console import Console

from trl_drgrpo.features.diagnostics.progress import ProgressCallback

# Name in the curves -> key in the training logs.
_CURVES = {
    "pass_rate": "drgrpo/pass_rate",
    "length_mean": "completions/mean_length",
    "length_correct_mean": "completions/length_correct_mean",
    "length_incorrect_mean": "completions/length_incorrect_mean",
}
_PROCESS_CURVES = {"steps_mean": "process/steps_mean", "process_reward": "process/reward_mean"}


class CurvesCallback(ProgressCallback):
    """[`ProgressCallback`] that keeps the curves of a run.

    Args:
        console (`rich.console.Console`): Console for progress: a line every 20 steps, with a bar on a terminal.
        process (`bool`): Whether the run has step rewards, so that their curves are there too.

    Attributes:
        curves (`dict[str, list[float | None]]`): `step`, `pass_rate`, `length_mean`, `length_correct_mean` and
            `length_incorrect_mean`, with step rewards also `steps_mean` and `process_reward`, one entry per step;
            `None` where a batch had no such completion.
    """

    def __init__(self, console: Console, process: bool = False):
        super().__init__(console, every_steps=20)
        self._keys = _CURVES | _PROCESS_CURVES if process else _CURVES
        self.curves: dict[str, list[float | None]] = {name: [] for name in ("step", *self._keys)}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the numbers of one step and show them."""
        if logs and "reward" in logs:  # the closing summary of a run carries no reward
            self.curves["step"].append(state.global_step)
            for name, key in self._keys.items():
                self.curves[name].append(logs.get(key))
        super().on_log(args, state, control, logs=logs, **kwargs)
