"""The progress of a run: one line per log, with reward, length, dead groups, loss, gradient norm and each reward.

Between two logs, slow steps have lines of their own, so that a run is never silent for long. On a terminal a bar,
redrawn below the lines, says the most important of it at any time. The callback takes the place of transformers'
`ProgressCallback`, which prints every metric of every log, and nothing in between.

Why not TRL's `RichProgressCallback`: it keeps all metrics in one live panel, so a log file gets no line before the
end, and then those of the last log alone (TRL 1.16: 79 lines for 43 metrics after 20 logs; this callback: 20 lines).
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, Trainer, TrainerState
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
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._clock = clock
        self._bar: Progress | None = None
        self._training = TaskID(0)  # the bar's first task
        self._evaluation: TaskID | None = None  # its second one, while an evaluation runs
        self._evaluated = 0  # batches of the evaluation that is running
        self._status = ""
        self._began = self._last_line = self._last_step_end = clock()
        self._last_log_line = -math.inf
        self._first_step = self._last_step_printed = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Start the bar, on a terminal."""
        self._began = self._last_line = self._last_step_end = self._clock()
        self._last_log_line = -math.inf
        self._first_step = state.global_step
        # One bar, of the main process, where somebody can see it move.
        if state.is_world_process_zero and not args.disable_tqdm and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self._training = self._bar.add_task(
                "training", total=state.max_steps, completed=state.global_step, status=""
            )
            self._bar.start()
        if state.is_world_process_zero and args.eval_on_start:  # it may take minutes before its first batch ends
            self._print(f"evaluation at step {state.global_step} begins")

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Say that the training begins: the first step may take minutes."""
        if state.global_step != self._first_step:
            return
        self._began = self._clock()  # an evaluation before it says nothing of the time that steps take
        if state.is_world_process_zero:
            self._print(f"training steps {state.global_step + 1} to {state.max_steps}")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Move the bar on."""
        self._last_step_end = self._clock()
        self._move(state)

    def on_step_numbers(self, args, state, control, numbers) -> None:
        """Show the numbers of a step in the bar. A slow step has a line, too, unless that of its log follows."""
        self._status = status_line(numbers)
        self._move(state)
        if not control.should_log and self._is_due(state, is_logged=False):
            self._print_step(state, numbers)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs) -> None:
        """Move the bar of an evaluation, or say in a line how far it is."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        self._evaluated += 1
        total = len(eval_dataloader)
        # Without a terminal, lines: one for a batch that ends long after the last line.
        if self._bar is not None:
            if self._evaluation is None:
                self._evaluation = self._bar.add_task("evaluation", total=total, status="")
            self._bar.update(self._evaluation, completed=self._evaluated)
        elif self._is_silent():
            remaining = self._time_left(self._last_step_end, self._evaluated, total)
            self._print(f"evaluation at step {state.global_step}  batch {self._evaluated}/{total}{remaining}")

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        """Take the bar of an evaluation away."""
        self._evaluated = 0
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
        self._evaluation = None

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Take the newest numbers and show them."""
        if not state.is_world_process_zero or not logs:
            return
        evaluation = {}
        for name, value in logs.items():
            if name.startswith("eval_"):
                evaluation[name.removeprefix("eval_")] = value
        line = status_line(evaluation, full=True)
        if line:
            self._print(f"evaluation at step {state.global_step}  {line}")
        # The summary at the end repeats numbers of the last step, which may have a line already.
        is_repeated = "train_runtime" in logs and self._last_step_printed == state.global_step
        if "reward" not in logs or is_repeated:
            return
        self._status = status_line(logs)
        self._move(state)
        if self._is_due(state, is_logged=True):
            self._last_log_line = self._clock()
            self._print_step(state, logs)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Stop the bar."""
        self.close()

    def close(self) -> None:
        """Stop the bar, also of a run that ended with an error; the terminal is as before."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _is_due(self, state: TrainerState, is_logged: bool) -> bool:
        if is_logged and state.global_step >= state.max_steps:  # the last line of a run is never left out
            return True
        # What the user has asked for; without a wish, every log has a line, and so has a long silence.
        if self.every_steps is not None:
            return state.global_step % self.every_steps == 0
        if self.every_seconds is not None:
            return is_logged and self._clock() - self._last_log_line >= self.every_seconds
        return is_logged or self._is_silent()

    def _is_silent(self) -> bool:
        return self._clock() - self._last_line >= _SILENT_SECONDS

    def _print_step(self, state: TrainerState, numbers: Mapping[str, float | None]) -> None:
        self._last_step_printed = state.global_step
        line = f"step {state.global_step}/{state.max_steps}  {status_line(numbers, full=True)}"
        if self._bar is None:  # which shows the time that is left
            line += self._training_left(state)
        self._print(line)

    def _print(self, line: str) -> None:
        self._last_line = self._clock()
        # Plain text: a reward's name in brackets would be markup, and a log file wants no wrapped lines.
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _move(self, state: TrainerState) -> None:
        if self._bar is not None:
            status = f"{self._status}{self._training_left(state)}".lstrip()
            self._bar.update(self._training, completed=state.global_step, status=status)

    def _training_left(self, state: TrainerState) -> str:
        if not self._first_step < state.global_step < state.max_steps:
            return ""
        # A resumed run has taken no time for the steps of the run before.
        steps_done = state.global_step - self._first_step
        return self._time_left(self._began, steps_done, state.max_steps - self._first_step)

    def _time_left(self, began: float, done: int, total: int) -> str:
        # By the mean of what is done: steps of one run take about as long.
        seconds = (self._clock() - began) / done * (total - done)
        return f"  {spoken_time(seconds)} left"


@contextmanager
def show_progress(trainer: Trainer, progress: ProgressCallback | None = None) -> Iterator[None]:
    """Show a trainer's progress inside the block in one line, and not as transformers would."""
    progress = progress or ProgressCallback()
    # transformers' own are back after the block, so that a second `train()` begins as the first did.
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
    """Return [`show_progress`] in the place of transformers' bar; nothing where transformers shows none (a notebook,
    `disable_tqdm`) or the user has added a progress callback."""
    kinds = (TqdmCallback, PrinterCallback, ProgressCallback)
    shown = [type(callback) for callback in trainer.callback_handler.callbacks if isinstance(callback, kinds)]
    # The type itself: a subclass is the user's own.
    if shown == [TqdmCallback]:
        return show_progress(trainer)
    return nullcontext()


def status_line(logs: Mapping[str, float | None], full: bool = False) -> str:
    """
    Write the numbers of a logged training step in one line, without those that were not logged. `full`: also loss,
    gradient norm and the mean of each reward function.

    Example:

    ```python
    >>> status_line({"reward": 0.5, "completions/mean_length": 41.2, "drgrpo/dead_groups_frac": 0.25})
    'reward 0.5  length 41  dead groups 25%'
    >>> status_line({"reward": 0.5, "loss": 0.0123, "grad_norm": 0.25, "rewards/accuracy/mean": 0.5}, full=True)
    'reward 0.5  loss 0.0123  grad_norm 0.25  accuracy 0.5'

    ```
    """
    # A run without outcome rewards has 0 for it. In a short line, the pass rate says the same better.
    shown = dict(_SHOWN)
    if PROCESS_ONLY in logs or ("drgrpo/pass_rate" in logs and not full):
        del shown["reward"]
    if full:
        shown |= {"loss": "loss {:.3g}", "grad_norm": "grad_norm {:.3g}"}
        for name in logs:
            mean_of_reward = re.fullmatch(r"(?:process_)?rewards/(.+)/mean", name)
            if mean_of_reward and name != PROCESS_ONLY:
                shown[name] = f"{mean_of_reward[1]} {{:.3g}}"
    phrases = []
    for name, text in shown.items():
        number = logs.get(name)
        if isinstance(number, int | float):
            phrases.append(text.format(number))
    return "  ".join(phrases)


_SHOWN = {
    "drgrpo/pass_rate": "pass rate {:.0%}",
    "reward": "reward {:.3g}",
    "process/reward_mean": "step reward {:.3g}",
    "completions/mean_length": "length {:.0f}",
    "drgrpo/dead_groups_frac": "dead groups {:.0%}",
    "time/tokens_per_s": "{:,.0f} tokens/s",
}


def spoken_time(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds.

    Example:

    ```python
    >>> spoken_time(59.6), spoken_time(61), spoken_time(7322)
    ('1:00', '1:01', '2:02:02')

    ```
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}"
