"""Prompts that carry signal: the same model, trained on batches that are filled in different ways.

The demo's model is trained on sums of which it solves few, and on sums of which it solves about half. Model, prompts,
seeds and settings are the same in every arm of a start, and each arm ends at the same number of generated tokens.
Tokens of dropped groups count, so an arm that drops many groups takes fewer optimizer steps.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.evaluate import evaluate
from trl_drgrpo.labs.demo.task import list_sum_reward, make_dataset, make_problems
from trl_drgrpo.labs.study.signal_arms import ARMS, FACTOR_OF, SignalSettings, Start
from trl_drgrpo.labs.study.trajectories import SMALL_RUN
from trl_drgrpo.trainer import DrGRPOTrainer

_MOST_STEPS = 10_000  # the tokens end a run


@dataclass
class SignalRun:
    """One arm with one seed: lists have an entry per evaluation, the first one before training.

    Args:
        start, arm (`str`): Keys of the settings' starts and of [`ARMS`].
        seed (`int`): Of prompts and sampling.
        learning_rate (`float`): As it was used.
        steps (`int`): Optimizer steps.
        tokens (`list[int]`): Completion tokens generated so far.
        pass_rate (`list[float]`): Of held-out problems, sampled at temperature 1.
        seconds (`list[float]`): CPU time of the process so far, evaluations left out.
        live_share (`float`): Share of the generated groups that have different rewards.
        factor (`float`, *optional*): Mean over steps of the factor by which DAPO's mean scales the unbiased gradient.
        capped_share (`float`, *optional*): Share of the steps that reached the cap on draws.
        clipped_share (`float`): Share of the steps whose gradient was longer than `max_grad_norm`.
    """

    start: str
    arm: str
    seed: int
    learning_rate: float
    steps: int = 0
    tokens: list[int] = field(default_factory=list)
    pass_rate: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    live_share: float = 1.0
    factor: float | None = None
    capped_share: float | None = None
    clipped_share: float = 0.0

    def pass_rate_at(self, tokens: float) -> float:
        """Pass rate when so many tokens were generated, on the straight line between two evaluations."""
        return interpolate(self.tokens, self.pass_rate, tokens)

    def pass_rate_after(self, seconds: float) -> float:
        """Pass rate after so much CPU time, likewise."""
        return interpolate(self.seconds, self.pass_rate, seconds)

    def mean_pass_rate(self, tokens: float) -> float:
        """Mean of the pass rate over the first tokens: the area below the curve, as a height."""
        return mean_height(self.tokens, self.pass_rate, tokens)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The polyline through the points at `x`, beyond its ends their height.

    Args:
        xs, ys (`Sequence[float]`): Points, `xs` ascending.
        x (`float`): Position.

    Example:

    ```python
    >>> interpolate([0, 10, 30], [0.0, 1.0, 0.0], 20), interpolate([0, 10], [0.0, 1.0], 99)
    (0.5, 1.0)

    ```
    """
    if x <= xs[0]:
        return ys[0]
    for (left, low), (right, high) in pairwise(zip(xs, ys, strict=True)):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ys[-1]


def mean_height(xs: Sequence[float], ys: Sequence[float], end: float) -> float:
    """Mean height of the polyline through the points between the first of them and `end`.

    Args:
        xs, ys (`Sequence[float]`): Points, `xs` ascending.
        end (`float`): End of the interval, behind the first point.

    Example:

    ```python
    >>> mean_height([0, 10, 30], [0.0, 1.0, 0.0], 20)
    0.625

    ```
    """
    inside = [(x, y) for x, y in zip(xs, ys, strict=True) if x < end]
    points = [*inside, (end, interpolate(xs, ys, end))]
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points))
    return area / (end - xs[0])


def run_arm(
    settings: SignalSettings, start: str, arm: str, seed: int, output_dir: Path, factor: float | None = None
) -> SignalRun:
    """Train one arm with one seed until the start's tokens are generated.

    Args:
        settings ([`SignalSettings`]): Sizes.
        start, arm, seed (`str`, `str`, `int`): The run.
        output_dir (`Path`): The trainer's folder; nothing is saved there.
        factor (`float`, *optional*): Factor of the learning rate, for arms that raise it.

    Returns:
        [`SignalRun`].
    """
    task, rate = settings.starts[start], settings.learning_rate
    if ARMS[arm].raised:
        if factor is None:
            raise ValueError(f"{arm} needs the factor of {FACTOR_OF}.")
        rate *= factor
    run = SignalRun(start, arm, seed, rate)
    measure = partial(_pass_rate, task, settings.held_out)
    marks = [task.tokens * (i + 1) / settings.evaluations for i in range(settings.evaluations)]
    recorder = _Recorder(run, _pass_rate_before(task, settings.held_out), marks, measure)
    trainer = build_trainer(settings, task, arm, seed, rate, output_dir, recorder.reward)
    trainer.add_callback(recorder)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    _summarize(run, trainer.state.log_history, trainer.args.max_grad_norm)
    return run


def build_trainer(
    settings: SignalSettings,
    task: Start,
    arm: str,
    seed: int,
    learning_rate: float,
    output_dir: Path,
    reward: Callable[..., list[float]],
) -> DrGRPOTrainer:
    """The trainer of an arm, on the demo's model."""
    args = DrGRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=_MOST_STEPS,
        per_device_train_batch_size=settings.prompts * settings.num_generations,
        num_generations=settings.num_generations,
        max_completion_length=task.max_completion,
        learning_rate=learning_rate,
        **SMALL_RUN,
        disable_tqdm=True,
        run_log=False,
        run_warnings=False,
        **ARMS[arm].fields,
    )
    return DrGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=make_dataset(settings.different_prompts, "train", seed, task.terms),
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
    )


@cache
def _pass_rate_before(task: Start, held_out: int) -> float:
    return _pass_rate(task, held_out, AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32))


def _pass_rate(task: Start, held_out: int, model: Any) -> float:
    problems, tokenizer = make_problems(held_out, "held_out", 0, task.terms), AutoTokenizer.from_pretrained(MODEL_DIR)
    found = evaluate(model, tokenizer, problems, sample=True, batch_size=held_out, max_new_tokens=task.max_completion)
    return round(found.accuracy, 4)


class _Recorder(TrainerCallback):
    """Counts generated tokens, evaluates at the marks, and ends the run at the last one."""

    def __init__(self, run: SignalRun, before: float, marks: Sequence[float], measure: Callable[[Any], float]):
        self.run, self.before, self.marks, self.measure = run, before, list(marks), measure
        self.written, self.measured, self.begun = 0, 0.0, 0.0  # tokens, and CPU seconds

    def reward(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        """The task's reward; it sees every completion, also of groups that are dropped."""
        self.written += sum(map(len, completion_ids))
        return list_sum_reward(completions, **columns)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.process_time()
        self._note(0.0, self.before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.written >= self.marks[0]:
            self._evaluate(kwargs["model"])
            self.marks = [mark for mark in self.marks if mark > self.written]
            control.should_training_stop = not self.marks

    def _evaluate(self, model: Any) -> None:
        now = time.process_time()
        self._note(now - self.begun - self.measured, self.measure(model))
        self.measured += time.process_time() - now

    def _note(self, seconds: float, pass_rate: float) -> None:
        self.run.tokens.append(self.written)
        self.run.seconds.append(round(seconds, 2))
        self.run.pass_rate.append(pass_rate)


def _summarize(run: SignalRun, log: Sequence[dict[str, Any]], max_grad_norm: float) -> None:
    steps = [entry for entry in log if "grad_norm" in entry]
    run.steps = len(steps)
    run.clipped_share = round(statistics.fmean(entry["grad_norm"] > max_grad_norm for entry in steps), 3)
    sampled = [entry for entry in steps if "sampling/draws" in entry]
    if not sampled:
        run.live_share = round(1 - statistics.fmean(entry["frac_reward_zero_std"] for entry in steps), 3)
    else:
        generated = sum(entry["sampling/groups_generated"] for entry in sampled)
        run.live_share = round(sum(entry["sampling/groups_live"] for entry in sampled) / generated, 3)
        run.capped_share = round(statistics.fmean(entry["sampling/capped_frac"] for entry in sampled), 3)
    if run.arm == FACTOR_OF:
        factors = [entry["sampling/dapo_factor"] for entry in steps if "sampling/dapo_factor" in entry]
        run.factor = round(statistics.fmean(factors), 3) if factors else 1.0  # no group was live
