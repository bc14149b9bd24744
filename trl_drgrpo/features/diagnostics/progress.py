"""The progress of a run: one line per log, with reward, length, dead groups, loss, gradient norm and each reward.

Between two logs, slow steps have lines of their own, so that a run is never silent for long. On a terminal a bar,
redrawn below the lines, says the most important of it at any time. The callback takes the place of transformers'
`ProgressCallback`, which prints every metric of every log, and nothing in between.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback as TqdmCallback
from transformers.trainer_utils import has_length

from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY
from trl_drgrpo.upstream.description import DescribingCallback

_SILENT_SECONDS = 5.0  # after so long without a line, a step or a batch of an evaluation has one of its own


class ProgressCallback(DescribingCallback):
    """Shows the progress of a training run. [`DrGRPOTrainer`] adds it by itself where transformers would show its bar.

    `disable_tqdm=True` brings transformers' printed lines back; a notebook keeps its table. To change its options pass
    one of your own, `callbacks=[ProgressCallback(every_seconds=60)]`; with `disable_tqdm=True` that shows lines and no
    bar.

    Args:
        console (`rich.console.Console`, *optional*): Console to use; standard error by default.
        every_seconds (`float`, *optional*): Least time between two lines. By default there is one for each log, and
            one for a step that ends more than 5 seconds after the last line.
        every_steps (`int`, *optional*): Lines every so many steps instead.
        clock (`Callable[[], float]`, *optional*): Seconds since some moment.
    """

    def __init__(
        self,
        console: Console | None = None,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or Console(file=sys.stderr)
        self.every_seconds, self.every_steps = every_seconds, every_steps
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._evaluation: TaskID | None = None  # the bar's second task, while an evaluation runs
        self._evaluated = 0  # batches of the evaluation that is running
        self._evaluation_began = self._last_step_end = clock()
        self._status = ""
        self._began = self._printed = self._last_line = clock()
        self._first_step = self._last_step_printed = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the bar, on a terminal."""
        self._began = self._last_line = self._last_step_end = self._clock()
        self._printed = -math.inf
        self._first_step = state.global_step
        if not state.is_world_process_zero or args.disable_tqdm or not self.console.is_terminal:
            return
        names, status = TextColumn("{task.description}"), TextColumn("{task.fields[status]}")
        self._bar = Progress(
            names, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), status, console=self.console
        )
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step, status="")
        self._bar.start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say that the training begins: the first step may take minutes."""
        if state.is_world_process_zero and state.global_step == self._first_step:
            self._print(f"training steps {state.global_step + 1} to {state.max_steps}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar on."""
        self._last_step_end = self._clock()
        self._move(state)

    def on_step_numbers(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, numbers: dict[str, float]
    ) -> None:
        """Show the numbers of a step in the bar. A slow step has a line, too, unless that of its log follows."""
        self._status = status_line(numbers)
        self._move(state)
        if control.should_log:
            return
        if self.every_steps is not None:
            is_due = state.global_step % self.every_steps == 0
        else:
            is_due = self.every_seconds is None and self._is_silent()
        if is_due:
            self._print_step(state, numbers)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Move the bar of an evaluation, or say in a line how far it is."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if not self._evaluated:
            self._evaluation_began = self._last_step_end
        self._evaluated += 1
        total = len(eval_dataloader)
        if self._bar is not None:
            if self._evaluation is None:
                self._evaluation = self._bar.add_task("evaluation", total=total, status="")
            self._bar.update(self._evaluation, completed=self._evaluated)
        elif self._is_silent():
            seconds = (self._clock() - self._evaluation_began) / self._evaluated * (total - self._evaluated)
            place = f"evaluation at step {state.global_step}  batch {self._evaluated}/{total}"
            self._print(f"{place}  {spoken_time(seconds)} left")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the bar of an evaluation away."""
        self._evaluated = 0
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
        self._evaluation = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the newest numbers and show them."""
        if not state.is_world_process_zero or not logs:
            return
        evaluation = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        line = status_line(evaluation, full=True)
        if line:
            self._print(f"evaluation at step {state.global_step}  {line}")
        is_repeated = "train_runtime" in logs and self._last_step_printed == state.global_step
        if "reward" not in logs or is_repeated:  # an evaluation, or the summary at the end
            return
        self._status = status_line(logs)
        self._move(state)
        if self._is_due(state):
            self._printed = self._clock()
            self._print_step(state, logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the bar."""
        self.close()

    def close(self) -> None:
        """Stop the bar, also of a run that ended with an error; the terminal is as before."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print_step(self, state: TrainerState, numbers: Mapping[str, float | None]) -> None:
        self._last_step_printed = state.global_step
        time_left = "" if self._bar is not None else self._left(state)
        self._print(f"step {state.global_step}/{state.max_steps}  {status_line(numbers, full=True)}{time_left}")

    def _print(self, line: str) -> None:
        self._last_line = self._clock()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _is_silent(self) -> bool:
        return self._clock() - self._last_line >= _SILENT_SECONDS

    def _is_due(self, state: TrainerState) -> bool:
        if state.global_step >= state.max_steps:
            return True
        if self.every_steps is not None:
            return state.global_step % self.every_steps == 0
        return self._clock() - self._printed >= (self.every_seconds or 0.0)

    def _move(self, state: TrainerState) -> None:
        if self._bar is not None:
            status = f"{self._status}{self._left(state)}".lstrip()
            self._bar.update(self._task, completed=state.global_step, status=status)

    def _left(self, state: TrainerState) -> str:
        steps_done = state.global_step - self._first_step
        steps_left = state.max_steps - state.global_step
        if not steps_done or steps_left <= 0:
            return ""
        return f"  {spoken_time((self._clock() - self._began) / steps_done * steps_left)} left"


@contextmanager
def show_progress(trainer: Trainer, progress: ProgressCallback | None = None) -> Iterator[None]:
    """Inside the block a trainer shows its progress in one line, and not as transformers would."""
    progress = progress or ProgressCallback()
    replaced = [trainer.pop_callback(kind) for kind in (PrinterCallback, TqdmCallback)]
    trainer.add_callback(progress)
    try:
        yield
    finally:
        with progress.describing("The progress line"):
            progress.close()
        trainer.remove_callback(progress)
        for callback in filter(None, replaced):
            trainer.add_callback(callback)


def progress_by_default(trainer: Trainer) -> AbstractContextManager[None]:
    """Show progress in the place of transformers' bar; nothing where it shows none (a notebook, `disable_tqdm`) or the
    user has added a progress callback."""
    kinds = (TqdmCallback, PrinterCallback, ProgressCallback)
    shown = [type(callback) for callback in trainer.callback_handler.callbacks if isinstance(callback, kinds)]
    return show_progress(trainer) if shown == [TqdmCallback] else nullcontext()


def status_line(logs: Mapping[str, float | None], full: bool = False) -> str:
    """
    The numbers of a logged training step in one line, without those that were not logged. `full`: also loss, gradient
    norm and the mean of each reward function.

    Example:

    ```python
    >>> status_line({"reward": 0.5, "completions/mean_length": 41.2, "drgrpo/dead_groups_frac": 0.25})
    'reward 0.5  length 41  dead groups 25%'
    >>> status_line({"reward": 0.5, "loss": 0.0123, "grad_norm": 0.25, "rewards/accuracy/mean": 0.5}, full=True)
    'reward 0.5  loss 0.0123  grad_norm 0.25  accuracy 0.5'

    ```
    """
    has_outcome = PROCESS_ONLY not in logs
    reward = logs.get("reward") if has_outcome and (full or "drgrpo/pass_rate" not in logs) else None
    parts = [
        ("pass rate {:.0%}", logs.get("drgrpo/pass_rate")),
        ("reward {:.3g}", reward),
        ("step reward {:.3g}", logs.get("process/reward_mean")),
        ("length {:.0f}", logs.get("completions/mean_length")),
        ("dead groups {:.0%}", logs.get("drgrpo/dead_groups_frac")),
        ("{:,.0f} tokens/s", logs.get("time/tokens_per_s")),
    ]
    if full:
        parts += [("loss {:.3g}", logs.get("loss")), ("grad_norm {:.3g}", logs.get("grad_norm"))]
        means = [name for name in logs if re.fullmatch(r"(process_)?rewards/.+/mean", name) and name != PROCESS_ONLY]
        parts += [(f"{name.partition('/')[2][:-5]} {{:.3g}}", logs[name]) for name in means]
    return "  ".join(text.format(value) for text, value in parts if isinstance(value, int | float))


def spoken_time(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    Example:

    ```python
    >>> spoken_time(59.6), spoken_time(61), spoken_time(7322)
    ('1:00', '1:01', '2:02:02')

    ```
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
