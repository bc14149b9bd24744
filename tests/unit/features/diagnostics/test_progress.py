import contextlib
import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import PrinterCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_callback import ProgressCallback as TqdmCallback

import trl_drgrpo
from trl_drgrpo.features.diagnostics.progress import (
    ProgressCallback,
    progress_by_default,
    show_progress,
    spoken_time,
    status_line,
)

LOGS = {
    "reward": 0.6,
    "drgrpo/pass_rate": 0.5,
    "completions/mean_length": 412.4,
    "drgrpo/dead_groups_frac": 0.125,
    "time/tokens_per_s": 12345.6,
}


class Run:
    """A training loop of callbacks, one second per step."""

    def __init__(self, terminal=False, disable_tqdm=False, main=True, first_step=0, **options):
        self.file, self.now = io.StringIO(), 0.0
        self.console = Console(file=self.file, force_terminal=terminal, width=200)
        self.progress = ProgressCallback(self.console, clock=lambda: self.now, **options)
        self.args = SimpleNamespace(disable_tqdm=disable_tqdm, eval_on_start=False)
        self.state = SimpleNamespace(global_step=first_step, max_steps=40, is_world_process_zero=main)

    def __call__(self, logs=LOGS):
        self.progress.on_train_begin(self.args, self.state, None)
        while self.state.global_step < self.state.max_steps:
            self.now += 1
            self.state.global_step += 1
            self.progress.on_step_end(self.args, self.state, None)
            self.progress.on_log(self.args, self.state, None, logs=logs)
        self.progress.on_train_end(self.args, self.state, None)
        return self.file.getvalue()


def test_the_line():
    assert status_line(LOGS) == "pass rate 50%  length 412  dead groups 12%  12,346 tokens/s"
    assert status_line({"reward": 0.25, "time/tokens_per_s": None}) == "reward 0.25"
    assert [spoken_time(s) for s in (0, 59.4, 3599.6, 90061)] == ["0:00", "0:59", "1:00:00", "25:01:01"]


@pytest.mark.parametrize(
    ("options", "steps", "first_end"),
    [
        ({"every_seconds": 10}, [1, 11, 21, 31, 40], "0:39 left"),
        ({"every_seconds": 10, "first_step": 20}, [21, 31, 40], "0:19 left"),  # resumed
        ({"every_steps": 20}, [20, 40], "0:20 left"),
    ],
)
def test_lines_are_throttled_and_the_last_one_always_comes(options, steps, first_end):
    lines = Run(**options)().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/40" for step in steps]
    assert lines[0] == f"step {steps[0]}/40  {status_line(LOGS, full=True)}  {first_end}"
    assert "left" not in lines[-1]


class SlowRun(Run):
    """The same with steps of so many seconds, logged every ten steps, as a trainer calls it: each step has numbers."""

    def __call__(self, seconds, logging_steps=10):
        self.progress.on_train_begin(self.args, self.state, None)
        while self.state.global_step < self.state.max_steps:
            self.progress.on_step_begin(self.args, self.state, None)
            self.now += seconds
            self.state.global_step += 1
            control = SimpleNamespace(should_log=self.state.global_step % logging_steps == 0)
            self.progress.on_step_end(self.args, self.state, control)
            self.progress.on_step_numbers(self.args, self.state, control, LOGS)
            if control.should_log:
                self.progress.on_log(self.args, self.state, control, logs={**LOGS, "loss": 0.5})
        self.progress.on_train_end(self.args, self.state, None)
        return self.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "options", "steps"),
    [
        (48, {}, list(range(1, 41))),  # slow: a line per step
        (3, {}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40]),
        (0.1, {}, [10, 20, 30, 40]),  # fast: as logged
        (48, {"every_steps": 5}, [5, 10, 15, 20, 25, 30, 35, 40]),  # what was chosen stays
        (48, {"every_seconds": 900}, [10, 30, 40]),
    ],
)
def test_slow_steps_have_a_line_each(seconds, options, steps):
    first, *lines = SlowRun(**options)(seconds).splitlines()
    assert first == "training steps 1 to 40"
    assert [line.split()[1] for line in lines] == [f"{step}/40" for step in steps]
    assert all("left" in line for line in lines[:-1])
    assert ["loss" in line for line in lines] == [step % 10 == 0 for step in steps]


def test_an_evaluation_on_start_is_announced_and_costs_the_steps_no_time():
    run = Run(first_step=38)
    run.args.eval_on_start = True
    run.progress.on_train_begin(run.args, run.state, None)
    run.now += 600
    run.progress.on_step_begin(run.args, run.state, None)
    run.now += 5
    run.state.global_step += 1
    run.progress.on_log(run.args, run.state, None, logs=LOGS)
    announced, begun, step = run.file.getvalue().splitlines()
    assert (announced, begun) == ("evaluation at step 38 begins", "training steps 39 to 40")
    assert step.endswith("  0:05 left")


def test_the_summary_does_not_repeat_the_last_step():
    run = SlowRun()
    shown = run(48, logging_steps=100)
    run.progress.on_log(run.args, run.state, None, logs={**LOGS, "train_runtime": 1.0})
    assert run.file.getvalue() == shown


def test_a_bar_knows_the_numbers_of_a_step_before_they_are_logged():
    assert "pass rate 50%" in SlowRun(terminal=True)(0.1, logging_steps=100)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_slow_evaluation_says_how_far_it_is(terminal):
    run = Run(terminal)
    run.progress.on_train_begin(run.args, run.state, None)
    for _ in range(8):
        run.now += 3
        run.progress.on_prediction_step(run.args, run.state, None, eval_dataloader=range(8))
    tasks = {task.description: (task.completed, task.total) for task in run.progress._bar.tasks} if terminal else {}
    run.progress.on_evaluate(run.args, run.state, None)
    assert not terminal or len(run.progress._bar.tasks) == 1
    run.progress.close()
    shown = run.file.getvalue()
    if terminal:
        assert tasks["evaluation"] == (8, 8)
    else:
        batches = [(2, "0:18"), (4, "0:12"), (6, "0:06"), (8, "0:00")]
        assert shown.splitlines() == [f"evaluation at step 0  batch {n}/8  {left} left" for n, left in batches]


def test_step_rewards_are_on_the_line():
    steps = {"process/reward_mean": 0.25, "process_rewards/verifier/mean": 0.25}
    of_process_only = {"reward": 0.0, "rewards/process_only/mean": 0.0, **steps}
    assert status_line(of_process_only) == "step reward 0.25"
    assert status_line(of_process_only, full=True) == "step reward 0.25  verifier 0.25"
    assert status_line({"reward": 0.5, **steps}) == "reward 0.5  step reward 0.25"


def test_an_evaluation_has_its_own_line():
    lines = Run()({"eval_drgrpo/pass_rate": 0.25, "eval_reward": 0.3, "eval_completions/mean_length": 7}).splitlines()
    assert lines[0] == "evaluation at step 1  pass rate 25%  reward 0.3  length 7"
    assert len(lines) == 40


@pytest.mark.parametrize("terminal", [False, True])
def test_each_log_has_a_line_with_what_transformers_would_print(terminal):
    rewards = {"rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 0.1, "rewards/format/mean": 0.25}
    shown = Run(terminal)({**LOGS, "loss": 0.0123, "grad_norm": 0.4567, **rewards})
    numbers = "reward 0.6  length 412  dead groups 12%  12,346 tokens/s  loss 0.0123  grad_norm 0.457  accuracy 0.5"
    assert [f"step {i}/40  pass rate 50%  {numbers}  format 0.25" in shown for i in range(1, 41)] == [True] * 40


def test_a_bar_on_a_terminal_unless_disabled():
    shown = Run(terminal=True)()
    assert "40/40" in shown
    assert "pass rate 50%" in shown
    assert "training" in shown
    assert "training" not in Run(terminal=True, disable_tqdm=True)()


def test_the_main_process_shows_training_logs_only():
    assert Run(main=False)() == ""
    assert Run(main=False)({"eval_reward": 1.0}) == ""
    assert Run()({"train_runtime": 1.0}) == ""
    assert Run()(None) == ""


def handler_of(*callbacks):
    """A trainer's callbacks, as transformers manages them; a stand-in for the trainer."""
    handler = CallbackHandler([], None, None, None, None)
    handler.callbacks, handler.callback_handler = list(callbacks), handler
    return handler


def test_it_takes_the_place_of_transformers_callbacks():
    trainer = handler_of(PrinterCallback(), TqdmCallback())
    before, run = list(trainer.callbacks), Run(terminal=True)
    with contextlib.suppress(KeyboardInterrupt), show_progress(trainer, run.progress):
        assert trainer.callbacks == [run.progress]
        run.progress.on_train_begin(run.args, run.state, None)
        raise KeyboardInterrupt
    assert run.progress._bar is None  # the terminal is as before
    assert trainer.callbacks == before


def test_it_is_the_default_where_transformers_would_show_its_bar():
    trainer = handler_of(TqdmCallback())
    with progress_by_default(trainer):
        assert [type(each) for each in trainer.callbacks] == [trl_drgrpo.ProgressCallback]
    assert [type(each) for each in trainer.callbacks] == [TqdmCallback]


class OwnBar(TqdmCallback):
    """A user's."""


@pytest.mark.parametrize(
    "callbacks",
    [
        [],  # a notebook, whose table is another class
        [PrinterCallback()],  # disable_tqdm
        [TqdmCallback(), OwnBar()],
        [TqdmCallback(), ProgressCallback()],
        [TqdmCallback(), TqdmCallback()],
        [ProgressCallback()],
    ],
)
def test_callbacks_of_the_user_stay(callbacks):
    trainer = handler_of(*callbacks)
    with progress_by_default(trainer):
        assert trainer.callbacks == callbacks
    assert trainer.callbacks == callbacks
