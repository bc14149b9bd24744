"""The causes that a run is warned of, as a table: metrics, thresholds, condition and advice of each.

A cause is judged by a window of readings at every optimizer step, and at the end of a run. A reading is what an
optimizer step brought, however seldom the run logs: the mean over ten steps has another spread than a step, and a
window of forty logs would outlast most runs. In front of the causes: whether a series has moved or left its usual
range.
"""

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from trl_drgrpo.features.diagnostics.statistics import QUARTERS

MAD_TO_STD = 1.4826  # of a normal distribution


def moved(series: Sequence[float]) -> float:
    """By how many standard errors the second half of a series lies above the first.

    The noise is what is left of each half without its mean and without the slope that both have in common, so that a
    steady trend does not hide itself. Where that noise is correlated from step to step (lag one, estimated and
    corrected for its bias in short series), fewer values count as independent: the error grows by
    `sqrt((1 + rho) / (1 - rho))`.

    Args:
        series (`Sequence[float]`): Values over time.

    Returns:
        `float`: Difference of the halves' means over its standard error; infinite for a change without any noise; 0
        for fewer than 8 values, too short to tell.

    Example:

    ```python
    >>> round(moved([1, 2, 1, 2, 3, 4, 3, 4]), 6)
    5.0

    ```
    """
    half = len(series) // 2
    if half < 4:
        return 0.0
    halves = (series[:half], series[-half:])
    means = [statistics.fmean(values) for values in halves]
    difference = means[1] - means[0]
    times = [t - (half - 1) / 2 for t in range(half)]
    residues = [[value - mean for value in values] for values, mean in zip(halves, means, strict=True)]
    products = [t * e for values in residues for t, e in zip(times, values, strict=True)]
    slope = math.fsum(products) / (2 * math.fsum(t * t for t in times))
    residues = [[e - slope * t for t, e in zip(times, values, strict=True)] for values in residues]
    total = math.fsum(e * e for values in residues for e in values)
    if total <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    lagged = math.fsum(a * b for values in residues for a, b in pairwise(values)) / total
    rho = min(max(lagged + (1 + 4 * lagged) / half, 0.0), 0.9)
    error = math.sqrt(total / (2 * half - 3) * 2 / half * (1 + rho) / (1 - rho))
    return difference / error


def change(series: Sequence[float]) -> float:
    """Mean of the second half minus mean of the first, in the series' units."""
    half = len(series) // 2
    return statistics.fmean(series[-half:]) - statistics.fmean(series[:half]) if half else 0.0


def distance_from_usual(value: float, usual: Sequence[float]) -> float:
    """Robust z-score: how far a value lies above the median, in standard deviations estimated from the MAD.

    Args:
        value (`float`): The value in question.
        usual (`Sequence[float]`): Earlier values, at least one.

    Returns:
        `float`: Deviations above (negative: below) the median. The spread counts as at least a tenth of the median's
        size, so that a series that hardly varies does not turn every wobble into an event.

    Example:

    ```python
    >>> round(distance_from_usual(11.0, [1.0, 2.0, 3.0, 4.0, 5.0]), 2)
    5.4

    ```
    """
    median = statistics.median(usual)
    spread = MAD_TO_STD * statistics.median(abs(each - median) for each in usual)
    floor = max(abs(median) / 10, 1e-12)
    return (value - median) / max(spread, floor)


def finite(value: Any) -> float | None:
    """A number as it is, anything else as `None`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def mean_of(values: Sequence[float | None]) -> float:
    """Mean of a metric that may be missing; 0 where it always is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0


def span_of(readings: Sequence[Sequence[Any]]) -> str:
    """The optimizer steps from the first reading to the last, in words."""
    steps = int(readings[-1][0] - readings[0][0]) + 1
    return "the last optimizer step" if steps == 1 else f"the last {steps} optimizer steps"


@dataclass(frozen=True)
class Cause:
    """One row of the table. The function that it is made from judges a full window: it returns the warning, with what
    to do about it, or `None`.

    Args:
        name (`str`): In `run_warnings` and in `warnings.jsonl`.
        judge (`Callable`): The function; its arguments behind the window are the thresholds, with their
            defaults.
        metrics (`tuple[str, ...]`): Of a reading; a step without one of them is passed over. A name with `*` stands
            for all that fit: each has readings of its own, and the function finds them in `window.judged`.
        also (`tuple[str, ...]`): Metrics that may be missing from a reading (`None` then).
        steps (`int`, *optional*): Default of the threshold `steps`: optimizer steps that are judged together, those
            without the metrics (which generated nothing, for example) not counted; `None`: each reading by itself.
        times (`int`): Windows of `steps` that are looked at.
        fewest (`int`): Readings that suffice at the end of a run that was too short for a window.
        explains (`tuple[str, ...]`): Causes that would only repeat this one while it holds.
        from_logs (`bool`): Whether a reading is a log instead of an optimizer step: for metrics that exist there
            only. A window spans `steps` optimizer steps then, and holds at least three logs.
    """

    name: str
    judge: Callable[..., str | None]
    metrics: tuple[str, ...]
    also: tuple[str, ...] = ()
    steps: int | None = None
    times: int = 1
    fewest: int = 5
    explains: tuple[str, ...] = ()
    from_logs: bool = False

    @property
    def thresholds(self) -> dict[str, float]:
        """The defaults."""
        _, *others = inspect.signature(self.judge).parameters.values()
        steps = {} if self.steps is None else {"steps": self.steps}
        return {**{each.name: each.default for each in others}, **steps}


CAUSES: list[Cause] = []  # those that explain others before these


def _cause(*metrics: str, name: str = "", **row: Any) -> Callable[[Any], Any]:
    """Puts a function into the table, under its own name unless another one is given."""

    def add(judge: Any) -> Any:
        CAUSES.append(Cause(name or judge.__name__, judge, metrics, **row))
        return judge

    return add


class Window:
    """The newest readings for a cause.

    Args:
        cause ([`Cause`]): The row of the table.
        thresholds (`Mapping[str, float]`): All of the cause's name.
        num_generations (`int`): G.

    Attributes:
        seen (`dict`): The readings so far, `[step, *values]` each, and what the function keeps beyond them. It is
            JSON-ready and travels with checkpoints.
        judged (`dict[str, list]`): While the function judges: readings by the metric that a `*` stands for, else
            under `""`.
    """

    def __init__(self, cause: Cause, thresholds: Mapping[str, float], num_generations: int):
        self.cause, self.num_generations = cause, num_generations
        self.size = 1 if cause.steps is None else int(thresholds["steps"]) * cause.times
        self._thresholds = {name: thresholds[name] for name in cause.thresholds if name != "steps"}
        self.judged: dict[str, list[Any]] = {}
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.seen: dict[str, dict[str, Any]] = {"readings": {}, "kept": {}}

    @property
    def kept(self) -> dict[str, Any]:
        """What the function keeps from one judgement to the next."""
        return self.seen["kept"]

    @property
    def steps(self) -> list[int]:
        """The step of each reading that is judged."""
        return [reading[0] for reading in self.judged[""]]

    @property
    def series(self) -> list[tuple[Any, ...]]:
        """The readings that are judged as one series per metric."""
        return list(zip(*self.judged[""], strict=True))[1:]

    @property
    def span(self) -> str:
        """The optimizer steps from the first reading to the last."""
        return span_of(self.judged[""])

    def take(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Take in the metrics of a step; returns the warning of a full window, if there is one."""
        taken = self._reading(metrics)
        for name, values in taken.items():
            readings = self.seen["readings"].setdefault(name, [])
            readings.append([step, *values])
            while self._is_full(readings[1:]):
                del readings[0]
        return self._judge(self._is_full) if taken else None

    def conclude(self) -> str | None:
        """The run is over: the warning of one that was too short for a window."""
        return self._judge(lambda readings: len(readings) >= self.cause.fewest and not self._is_full(readings))

    def _reading(self, metrics: Mapping[str, Any]) -> dict[str, list[float | None]]:
        wanted = self.cause.metrics
        if "*" in wanted[0]:
            names = [name for name in metrics if any(fnmatchcase(name, each) for each in wanted)]
            return {name: [finite(metrics[name]) or 0.0] for name in names}
        values = [finite(metrics.get(name)) for name in wanted]
        return {} if None in values else {"": [*values, *(finite(metrics.get(name)) for name in self.cause.also)]}

    def _is_full(self, readings: list[Any]) -> bool:
        if not self.cause.from_logs:
            return len(readings) >= self.size
        return len(readings) >= min(self.size, 3) and readings[-1][0] - readings[0][0] + 1 >= self.size

    def _judge(self, are_enough: Callable[[list[Any]], bool]) -> str | None:
        self.judged = {name: each for name, each in self.seen["readings"].items() if are_enough(each)}
        if not self.judged:
            return None
        return self.cause.judge(self, **self._thresholds)


_MOSTLY_CUT_OFF = 0.5


@_cause(
    *("completions/truncated_frac", "drgrpo/zero_signal_frac", "reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate",),
    steps=5,
    fewest=2,
    explains=("truncation", "all_incorrect", "dead_groups"),
)
def all_truncated(window: Window, share: float = 0.95) -> str | None:
    """Nearly all completions are cut off, and every reward is the same: seen in the first steps."""
    truncated, dead, rewards, lowest, correct = window.series
    if statistics.fmean(truncated) < share or min(dead) < 1 or mean_of(correct) > 0:
        return None
    if max(rewards) - min(lowest) > 1e-6 * max(abs(min(lowest)), 1.0):
        return None
    return (
        f"{statistics.fmean(truncated):.0%} of the completions were cut off at max_completion_length over "
        f"{window.span}, and every reward was {lowest[-1]:.3g}: nothing is learned. Raise max_completion_length. "
        "If the answers should fit, the model does not end them: check that the prompts go through the chat "
        "template, and that its end-of-turn token is an EOS token of the tokenizer or of generation_config."
    )


@_cause("drgrpo/pass_rate", also=("completions/truncated_frac",), steps=20, fewest=10, explains=("dead_groups",))
def all_incorrect(window: Window) -> str | None:
    """Every completion is incorrect."""
    rates, truncated = window.series
    if correct := [step for step, rate in zip(window.steps, rates, strict=True) if rate > 0]:
        window.kept["last_correct"] = correct[-1]
        return None
    said = f"All completions of {window.span} were incorrect"
    if mean_of(truncated) >= _MOSTLY_CUT_OFF:
        return f"{said}, and {mean_of(truncated):.0%} of them were cut off: raise max_completion_length."
    if "last_correct" in window.kept:
        return (
            f"{said}; step {window.kept['last_correct']} had correct ones. Look at the newest completions: if they "
            "are broken, go back to a checkpoint before that step and lower learning_rate; if they look fine, the "
            "prompts have become too hard."
        )
    return (
        f"{said}, and no earlier one was correct. Look at completions and their rewards (`trl-drgrpo score`): "
        "check that the reward can read the answers and that correct_threshold can be reached; else use easier "
        "prompts, or a model that solves some of them."
    )


@_cause(
    *("reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate", "completions/truncated_frac"),
    steps=30,
    times=2,
    fewest=16,
)
def reward_collapse(window: Window, share: float = 0.5, deviations: float = 5.0) -> str | None:
    """The pass rate, or the reward, has fallen far below its best.

    The mean of the last `steps` readings is compared with the best mean of as many earlier ones. Rewards count from
    the lowest one that any completion has had, so that a shift of all rewards changes nothing.
    """
    rewards, lowest, rates, truncated = window.series
    floor = window.kept["lowest"] = min(*lowest, window.kept.get("lowest", math.inf))
    half = len(rewards) // 2
    message = None
    for name, values, origin in (("mean reward", rewards, floor), ("pass rate", rates, 0.0)):
        if None in values:
            continue
        before, recent = values[:half], values[-half:]
        best = window.kept.get(name)
        if best is None or len(best["values"]) != half or statistics.fmean(before) > statistics.fmean(best["values"]):
            best = window.kept[name] = {"values": list(before), "step": window.steps[half - 1]}
        former, now = statistics.fmean(best["values"]), statistics.fmean(recent)
        if now - origin >= share * (former - origin) or moved([*best["values"], *recent]) > -deviations:
            continue
        was, is_now = (f"{each:.0%}" if name == "pass rate" else f"{each:.3g}" for each in (former, now))
        message = (  # of both, the pass rate
            f"The {name} has collapsed: {is_now} over {span_of(window.judged[''][-half:])}, down from {was} over as "
            f"many up to step {best['step']}. Look at the newest completions. If they are broken, go back to a "
            "checkpoint near that step and lower learning_rate or raise beta. If the prompts get harder over the run, "
            "a lower level is expected."
        )
    cut_off = mean_of(truncated[-half:])
    if message and cut_off >= _MOSTLY_CUT_OFF:
        message += f" {cut_off:.0%} of the completions are cut off now: raise max_completion_length first."
    return message


def _further_distinct(unique_frac: float, size: int) -> float:
    """One completion per group is distinct anyway; of the others none (0) to all (1)."""
    return (unique_frac * size - 1) / (size - 1)


@_cause("completions/unique_frac", steps=10, explains=("dead_groups",))
def sampling_collapse(window: Window, distinct: float = 0.1) -> str | None:
    """The completions of a group are the same text."""
    (unique,) = window.series
    further = _further_distinct(statistics.fmean(unique), window.num_generations)
    if further > distinct:
        return None
    return (
        f"Nearly all completions of a group are the same text (over {window.span} only {further:.0%} of a group's "
        "further completions differ), so there is nothing to compare. Raise temperature (1.0 is usual), top_p and "
        "top_k; if they are already high, the policy has collapsed: lower learning_rate and go back to an earlier "
        "checkpoint."
    )


@_cause(
    "drgrpo/zero_signal_frac",
    also=("drgrpo/all_correct_frac", "drgrpo/all_incorrect_frac"),
    steps=20,
)
def dead_groups(window: Window, share: float = 0.8) -> str | None:
    """Most groups have no signal."""
    dead, correct, incorrect = map(mean_of, window.series)
    if dead < share:
        return None
    seen = f"{dead:.0%} of the groups had no signal over {window.span}"
    if correct > dead / 2:
        return f"{seen}, most of them all correct: the prompts are too easy. Take harder ones, or stop here."
    if incorrect > dead / 2:
        return (
            f"{seen}, most of them all incorrect: the prompts are too hard. Take easier ones, raise "
            "num_generations or max_completion_length, or add a reward with partial credit; look at the "
            "completions to see whether the reward can be earned at all."
        )
    return (
        f"{seen}: the rewards within a group are equal. Look at the completions and their rewards; raise "
        "num_generations, or use a reward that tells them apart."
    )


@_cause("completions/length_incorrect_mean", "completions/length_correct_mean", steps=40, fewest=20)
def incorrect_grow(window: Window, deviations: float = 6.0, growth: float = 0.15) -> str | None:
    """Incorrect answers get longer while correct ones do not."""
    incorrect, correct = window.series
    grew = change(incorrect) > growth * statistics.fmean(incorrect[: len(incorrect) // 2])
    if not grew or moved(incorrect) < deviations or moved(correct) > 2:
        return None
    return (
        f"Incorrect completions grew by {change(incorrect):.0f} tokens over {window.span} while correct ones did not. "
        "The objective does not favor that: check for a reward that grows with length or steps, for truncation, and "
        "for prompts that have become too hard."
    )


@_cause("completions/truncated_frac", steps=40, fewest=8)
def truncation(window: Window, share: float = 0.5, rise: float = 0.15, deviations: float = 6.0) -> str | None:
    """Many completions are cut off, or more and more."""
    (truncated,) = window.series
    mean = statistics.fmean(truncated)
    rises = change(truncated) >= rise and moved(truncated) >= deviations
    if mean < share and not rises:
        return None
    how = f", {change(truncated) * 100:.0f} points more than before" if rises else ""
    return (
        f"{mean:.0%} of the completions were cut off at max_completion_length over {window.span}{how}. They are "
        "scored as they stand: raise max_completion_length, add overlong_penalty, or set "
        "mask_truncated_completions=True, which makes being cut off worth the mean reward."
    )


@_cause("kl", steps=50, fewest=25)
def kl(window: Window, deviations: float = 10.0, consecutive: float = 3) -> str | None:
    """The KL divergence from the reference leaves its usual range."""
    (divergences,) = window.series
    newest = int(consecutive)
    usual, last = divergences[:-newest], divergences[-newest:]
    if not usual or min(distance_from_usual(value, usual) for value in last) < deviations:
        return None
    return (
        f"The KL divergence from the reference is {last[-1]:.3g}, far from its usual {statistics.median(usual):.3g}, "
        f"in {newest} optimizer steps in a row. The policy drifts away: lower learning_rate or max_grad_norm, or "
        "raise beta; look at the newest completions, and go back to an earlier checkpoint if they are broken."
    )


@_cause("rewards/*/failed_frac", "process_rewards/*/failed_frac", steps=10, fewest=3)
def reward_failing(window: Window, share: float = 0.1) -> str | None:
    """A reward function, or a step reward function, fails often."""
    failing = []
    for name, readings in window.judged.items():
        mean = mean_of([value for _, value in readings])
        if mean >= share:
            failing.append(f"{name.split('/')[1]} ({mean:.0%} over {span_of(readings)})")
    if not failing:
        return None
    return (
        f"Reward functions fail: {', '.join(failing)}. Such completions are skipped. The first failure's traceback is "
        "in the log; try the reward on logged completions with `trl-drgrpo score`; if it times out, raise its limits."
    )


@_cause("process/steps_mean", "process/reward_mean", "reward", steps=40, fewest=20)
def process_hacked(window: Window, deviations: float = 4.0) -> str | None:
    """The process reward rises while the outcome reward falls."""
    steps, process, outcome = window.series
    if moved(process) <= deviations or moved(outcome) >= -deviations:
        return None
    grew = "steps per completion and process reward" if moved(steps) > deviations else "the process reward"
    return (
        f"Over {window.span} {grew} rose while the outcome reward fell: the process reward is probably being "
        "exploited. Look at the completions. Set process_role='baseline', which cannot be exploited, raise "
        "outcome_weight, or set step_credit='min_increments', which more steps cannot raise."
    )


@_cause("sampling/sampling_logp_difference/mean", steps=2, fewest=2, explains=("unequal_weights",))
def lost_sync(window: Window, nats: float = 0.1) -> str | None:
    """vLLM samples from other weights than those that are trained."""
    (gaps,) = window.series
    if min(gaps) < nats:
        return None
    return (
        f"vLLM's log-probabilities differ from the trainer's by {statistics.fmean(gaps):.2g} nats per token over "
        f"{window.span}: it does not generate with the trained weights. A server must serve the trained model in the "
        "same precision (--dtype, --quantization), and no one else may load weights into it. If it does, set "
        "vllm_lora='merged', which sends all weights, and report the difference."
    )


@_cause(QUARTERS[0], QUARTERS[-1], steps=40, fewest=10)
def unequal_weights(window: Window, share: float = 0.1, deviations: float = 6.0) -> str | None:
    """The correction for vLLM's probabilities weighs long rows otherwise than short ones."""
    shortest, longest = window.series
    short, long = statistics.fmean(shortest), statistics.fmean(longest)
    gaps = [a - b for a, b in zip(shortest, longest, strict=True)]
    error = statistics.pstdev(gaps) / math.sqrt(max(len(gaps) - 1, 1))
    if abs(short - long) < max(share * max(short, long), deviations * error):
        return None
    return (
        f"The correction for vLLM's probabilities weighs the longest quarter of the completions {long:.2f} and the "
        f"shortest {short:.2f} (means over {window.span}): a length bias. Set "
        "vllm_importance_sampling_mode='token_truncate'. If it is set, vLLM and the trainer disagree too much "
        "(sampling/sampling_logp_difference): set the same dtype, vllm serve --logprobs-mode processed_logprobs."
    )


@_cause("drgrpo/moved_frac", name="nothing_moves", from_logs=True)
def rounded_away(window: Window, share: float = 0.5) -> str | None:
    """Many trained weights have not changed in the first optimizer steps.

    The threshold lies in a gap that was measured (share of LoRA-A that changed in 20 steps, base of width 256, see
    `tests/benchmarks/adapter_dtype.py`): in bfloat16 0.4% at learning rate 1e-6, 4.4% at 1e-5, 50% at 1e-4; in float32
    more than 99.9% at each. Wider layers start smaller, so in bfloat16 somewhat more of them moves.
    """
    (shares,) = window.series
    if shares[-1] >= share:
        return None
    return (
        f"Only {shares[-1]:.2%} of the trained weights that had a gradient have changed in the first optimizer steps: "
        "learning_rate is too small for their precision, updates are rounded away, and most of the training is lost. "
        "Raise it (LoRA: about 1e-5 to 1e-4), or keep trained weights in float32 (adapter_dtype='float32'; of a whole "
        "model model_init_kwargs={'dtype': 'float32'}, which with bf16=True still computes in bfloat16). In float32, "
        "check that the optimizer holds them."
    )


@_cause("grad_norm", "drgrpo/zero_signal_frac", "learning_rate", steps=10, fewest=2, from_logs=True)
def nothing_moves(window: Window) -> str | None:
    """There is signal, and the gradient, or the learning rate, is 0 all the same. The gradient norm is that of the
    step that logs."""
    norms, dead, rates = window.series
    if max(rates) <= 0:
        return (
            f"learning_rate was 0 in every log of {window.span}: nothing is trained. Raise it, or stop here if its "
            "schedule has ended."
        )
    if max(norms) > 0 or max(dead) >= 1:
        return None
    return (
        f"The gradient was 0 in every log of {window.span} although groups had a signal: nothing is trained. Look "
        "for frozen weights (an inactive adapter, requires_grad=False) and for fully masked completions."
    )
