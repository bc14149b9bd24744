"""The causes that a run is warned of: for each a watch, with its metrics, thresholds, condition and advice.

A watch judges a window of readings at every optimizer step, and at the end of a run. A reading is what an optimizer
step brought, however seldom the run logs: the mean over ten steps has another spread than a step, and a window of
forty logs would outlast most runs. In front of the watches: whether a series has moved or left its usual range.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

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


Metrics = Mapping[str, Any]
Thresholds = Mapping[str, float]


class Watch:
    """Base of the watches.

    Args:
        thresholds (`Mapping[str, float]`): One value for every entry of `defaults`.
        num_generations (`int`): G.

    Attributes:
        cause (`str`): Name of the cause, in `run_warnings` and in `warnings.jsonl`.
        defaults (`dict[str, float]`): The thresholds. `steps` is the number of optimizer steps that are looked at,
            those without the metrics (which generated nothing, for example) not counted.
        metrics (`tuple[str, ...]`): The metrics of a reading; a step without one of them is passed over.
        also_read (`tuple[str, ...]`): Metrics that may be missing from a reading (`None` then).
        fewest (`int`): Readings that suffice at the end of a run that was too short for a window.
        explains (`tuple[str, ...]`): Causes that would only repeat this one while it holds.
        from_logs (`bool`): Whether a reading is a log instead of an optimizer step: for metrics that exist there only.
        seen (`dict`): The readings so far, `[step, *values]` each. JSON-ready: it travels with checkpoints.
    """

    cause: ClassVar[str]
    defaults: ClassVar[dict[str, float]]
    metrics: ClassVar[tuple[str, ...]]
    also_read: ClassVar[tuple[str, ...]] = ()
    fewest: ClassVar[int] = 5
    explains: ClassVar[tuple[str, ...]] = ()
    from_logs: ClassVar[bool] = False

    def __init__(self, thresholds: Thresholds, num_generations: int):
        self.thresholds = thresholds
        self.num_generations = num_generations
        self.forget()

    def forget(self) -> None:
        """Start from nothing."""
        self.seen: dict[str, Any] = {"readings": []}

    @property
    def window(self) -> int:
        """Readings that are judged together."""
        return int(self.thresholds["steps"])

    def observe(self, step: int, metrics: Metrics) -> str | None:
        """Take in an optimizer step; returns a warning with what to do about it, or `None`."""
        values = [finite(metrics.get(name)) for name in self.metrics]
        if None in values:
            return None
        readings = self.seen["readings"]
        readings.append([step, *values, *(finite(metrics.get(name)) for name in self.also_read)])
        del readings[: -self.window]
        return self.judge(self.series) if len(readings) >= self.window else None

    def conclude(self) -> str | None:
        """The run is over: the warning of one that was too short for a window."""
        return self.judge(self.series) if self.fewest <= len(self.seen["readings"]) < self.window else None

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        """The warning, from the readings as one series per metric."""
        raise NotImplementedError

    @property
    def series(self) -> list[tuple[Any, ...]]:
        """The readings as one series per metric, without the steps."""
        return list(zip(*self.seen["readings"], strict=True))[1:]

    @property
    def span(self) -> str:
        """The optimizer steps from the first reading to the last."""
        return span_of(self.seen["readings"])


def span_of(readings: Sequence[Sequence[Any]]) -> str:
    """The optimizer steps from the first reading to the last, in words."""
    steps = int(readings[-1][0] - readings[0][0]) + 1
    return "the last optimizer step" if steps == 1 else f"the last {steps} optimizer steps"


def finite(value: Any) -> float | None:
    """A number as it is, anything else as `None`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def mean_of(values: Sequence[float | None]) -> float:
    """Mean of a metric that may be missing; 0 where it always is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0


_MOSTLY_CUT_OFF = 0.5


class AllTruncated(Watch):
    """Nearly all completions are cut off, and every reward is the same: seen in the first steps."""

    cause = "all_truncated"
    defaults: ClassVar = {"share": 0.95, "steps": 5}
    metrics = ("completions/truncated_frac", "drgrpo/zero_signal_frac", "reward", "drgrpo/reward_min")
    also_read = ("drgrpo/pass_rate",)
    fewest = 2
    explains = ("truncation", "all_incorrect", "dead_groups")

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        truncated, dead, rewards, lowest, correct = series
        if statistics.fmean(truncated) < self.thresholds["share"] or min(dead) < 1 or mean_of(correct) > 0:
            return None
        if max(rewards) - min(lowest) > 1e-6 * max(abs(min(lowest)), 1.0):
            return None
        return (
            f"{statistics.fmean(truncated):.0%} of the completions were cut off at max_completion_length over "
            f"{self.span}, and every reward was {lowest[-1]:.3g}: nothing is learned. Raise max_completion_length. "
            "If the answers should fit, the model does not end them: check that the prompts go through the chat "
            "template, and that its end-of-turn token is an EOS token of the tokenizer or of generation_config."
        )


class AllIncorrect(Watch):
    """Every completion is incorrect."""

    cause = "all_incorrect"
    defaults: ClassVar = {"steps": 20}
    metrics = ("drgrpo/pass_rate",)
    also_read = ("completions/truncated_frac",)
    fewest = 10
    explains = ("dead_groups",)

    def forget(self) -> None:
        super().forget()
        self.seen["last_right"] = None  # newest step with a correct completion

    def observe(self, step: int, metrics: Any) -> str | None:
        if (metrics.get(self.metrics[0]) or 0) > 0:
            self.seen["last_right"] = step
        return super().observe(step, metrics)

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        rates, truncated = series
        if max(rates) > 0:
            return None
        said = f"All completions of {self.span} were incorrect"
        if mean_of(truncated) >= _MOSTLY_CUT_OFF:
            return f"{said}, and {mean_of(truncated):.0%} of them were cut off: raise max_completion_length."
        if (last := self.seen["last_right"]) is not None:
            return (
                f"{said}; step {last} had correct ones. Look at the newest completions: if they are broken, go back "
                "to a checkpoint before that step and lower learning_rate; if they look fine, the prompts have become "
                "too hard."
            )
        return (
            f"{said}, and no earlier one was correct. Look at completions and their rewards (`trl-drgrpo score`): "
            "check that the reward can read the answers and that correct_threshold can be reached; else use easier "
            "prompts, or a model that solves some of them."
        )


class RewardCollapse(Watch):
    """The pass rate, or the reward, has fallen far below its best.

    The mean of the last `steps` readings is compared with the best mean of as many earlier ones. Rewards count from
    the lowest one that any completion has had, so that a shift of all rewards changes nothing.
    """

    cause = "reward_collapse"
    defaults: ClassVar = {"share": 0.5, "deviations": 5.0, "steps": 30}
    metrics = ("reward", "drgrpo/reward_min")
    also_read = ("drgrpo/pass_rate", "completions/truncated_frac")
    fewest = 16

    def forget(self) -> None:
        super().forget()
        self.seen |= {"best": {}, "lowest": None}  # name -> values of the best readings so far, and their last step

    @property
    def window(self) -> int:
        return 2 * super().window

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        rewards, lowest, rates, truncated = series
        known = [*lowest] if self.seen["lowest"] is None else [*lowest, self.seen["lowest"]]
        self.seen["lowest"] = min(known)
        message = None
        for name, values, floor in (("mean reward", rewards, min(known)), ("pass rate", rates, 0.0)):
            if None not in values and (fallen := self._fallen(name, values, floor)):
                message = fallen  # of both, the pass rate
        if message is None:
            return None
        cut_off = mean_of(truncated[-(len(truncated) // 2) :])
        if cut_off >= _MOSTLY_CUT_OFF:
            message += f" {cut_off:.0%} of the completions are cut off now: raise max_completion_length first."
        return message

    def _fallen(self, name: str, values: Sequence[float], floor: float) -> str | None:
        half = len(values) // 2
        before, recent = values[:half], values[-half:]
        best = self.seen["best"].get(name)
        if best is None or len(best["values"]) != half or statistics.fmean(before) > statistics.fmean(best["values"]):
            best = {"values": list(before), "step": self.seen["readings"][half - 1][0]}
            self.seen["best"][name] = best
        former, now = statistics.fmean(best["values"]), statistics.fmean(recent)
        if now - floor >= self.thresholds["share"] * (former - floor):
            return None
        if moved([*best["values"], *recent]) > -self.thresholds["deviations"]:
            return None
        was, is_now = (f"{each:.0%}" if name == "pass rate" else f"{each:.3g}" for each in (former, now))
        return (
            f"The {name} has collapsed: {is_now} over {span_of(self.seen['readings'][-half:])}, down from {was} over "
            f"as many up to step {best['step']}. Look at the newest completions. If they are broken, go back to a "
            "checkpoint near that step and lower learning_rate or raise beta. If the prompts get harder over the run, "
            "a lower level is expected."
        )


def _further_distinct(unique_frac: float, size: int) -> float:
    """One completion per group is distinct anyway; of the others none (0) to all (1)."""
    return (unique_frac * size - 1) / (size - 1)


class DeadGroups(Watch):
    """Most groups have no signal."""

    cause = "dead_groups"
    defaults: ClassVar = {"share": 0.8, "steps": 20}
    metrics = ("drgrpo/zero_signal_frac",)
    also_read = ("drgrpo/all_correct_frac", "drgrpo/all_incorrect_frac", "completions/unique_frac")

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        dead, correct, incorrect, unique = map(mean_of, series)
        if dead < self.thresholds["share"]:
            return None
        seen = f"{dead:.0%} of the groups had no signal over {self.span}"
        if unique and _further_distinct(unique, self.num_generations) <= SamplingCollapse.defaults["distinct"]:
            return f"{seen}: nearly all completions of a group are the same text. Raise temperature, top_p and top_k."
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


class SamplingCollapse(Watch):
    """The completions of a group are the same text."""

    cause = "sampling_collapse"
    defaults: ClassVar = {"distinct": 0.1, "steps": 10}
    metrics = ("completions/unique_frac",)

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        distinct = _further_distinct(statistics.fmean(series[0]), self.num_generations)
        if distinct > self.thresholds["distinct"]:
            return None
        return (
            f"Nearly all completions of a group are the same text (over {self.span} "
            f"only {distinct:.0%} of a group's further completions differ), so there is nothing to compare. Raise "
            "temperature (1.0 is usual), top_p and top_k; if they are already high, the policy has collapsed: "
            "lower learning_rate and go back to an earlier checkpoint."
        )


class IncorrectGrow(Watch):
    """Incorrect answers get longer while correct ones do not."""

    cause = "incorrect_grow"
    defaults: ClassVar = {"deviations": 6.0, "growth": 0.15, "steps": 40}
    metrics = ("completions/length_incorrect_mean", "completions/length_correct_mean")
    fewest = 20

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        incorrect, correct = series
        before = statistics.fmean(incorrect[: len(incorrect) // 2])
        grew = change(incorrect) > self.thresholds["growth"] * before
        if not grew or moved(incorrect) < self.thresholds["deviations"] or moved(correct) > 2:
            return None
        return (
            f"Incorrect completions grew by {change(incorrect):.0f} tokens over {self.span} while correct ones did "
            "not. The objective does not favor that: check for a reward that grows with length or steps, for "
            "truncation, and for prompts that have become too hard."
        )


class Truncation(Watch):
    """Many completions are cut off, or more and more."""

    cause = "truncation"
    defaults: ClassVar = {"share": 0.5, "rise": 0.15, "deviations": 6.0, "steps": 40}
    metrics = ("completions/truncated_frac",)
    fewest = 8

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        share = statistics.fmean(series[0])
        rises = change(series[0]) >= self.thresholds["rise"] and moved(series[0]) >= self.thresholds["deviations"]
        if share < self.thresholds["share"] and not rises:
            return None
        how = f", {change(series[0]) * 100:.0f} points more than before" if rises else ""
        return (
            f"{share:.0%} of the completions were cut off at max_completion_length over {self.span}{how}. They are "
            "scored as they stand: raise max_completion_length, add overlong_penalty, or set "
            "mask_truncated_completions=True, which makes being cut off worth the mean reward."
        )


class KL(Watch):
    """The KL divergence from the reference leaves its usual range."""

    cause = "kl"
    defaults: ClassVar = {"deviations": 10.0, "consecutive": 3, "steps": 50}
    metrics = ("kl",)
    fewest = 25

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        newest = int(self.thresholds["consecutive"])
        usual, last = series[0][:-newest], series[0][-newest:]
        if not usual or min(distance_from_usual(kl, usual) for kl in last) < self.thresholds["deviations"]:
            return None
        return (
            f"The KL divergence from the reference is {last[-1]:.3g}, far from its usual "
            f"{statistics.median(usual):.3g}, in {newest} optimizer steps in a row. The policy drifts away: lower "
            "learning_rate or max_grad_norm, or raise beta; look at the newest completions, and go back to an earlier "
            "checkpoint if they are broken."
        )


class RewardFailing(Watch):
    """A reward function, or a step reward function, fails often."""

    cause = "reward_failing"
    defaults: ClassVar = {"share": 0.1, "steps": 10}
    metrics = ()
    fewest = 3

    def forget(self) -> None:
        self.seen = {"readings": {}}  # name of the metric -> its readings

    def observe(self, step: int, metrics: Metrics) -> str | None:
        for name, value in metrics.items():
            if not name.startswith(("rewards/", "process_rewards/")) or not name.endswith("/failed_frac"):
                continue
            readings = self.seen["readings"].setdefault(name, [])
            readings.append([step, finite(value) or 0.0])
            del readings[: -self.window]
        return self._failing(self.window)

    def conclude(self) -> str | None:
        return self._failing(min(self.fewest, self.window))

    def _failing(self, fewest: int) -> str | None:
        failing = []
        for name, readings in self.seen["readings"].items():
            share = mean_of([value for _, value in readings])
            if len(readings) >= fewest and share >= self.thresholds["share"]:
                failing.append(f"{name.split('/')[1]} ({share:.0%} over {span_of(readings)})")
        if not failing:
            return None
        return (
            f"Reward functions fail: {', '.join(failing)}. Such completions are skipped. The first failure's "
            "traceback is in the log; try the reward on logged completions with `trl-drgrpo score`; if it times out, "
            "raise its limits."
        )


class ProcessHacked(Watch):
    """The process reward rises while the outcome reward falls."""

    cause = "process_hacked"
    defaults: ClassVar = {"deviations": 4.0, "steps": 40}
    metrics = ("process/steps_mean", "process/reward_mean", "reward")
    fewest = 20

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        steps, process, outcome = series
        deviations = self.thresholds["deviations"]
        if not looks_hacked(process, outcome, deviations):
            return None
        grew = "steps per completion and process reward" if moved(steps) > deviations else "the process reward"
        return (
            f"Over {self.span} {grew} rose while the outcome reward fell: the process reward is probably being "
            "exploited. Look at the completions. Set process_role='baseline', which cannot be exploited, raise "
            "outcome_weight, or set step_credit='min_increments', which more steps cannot raise."
        )


def looks_hacked(process: Sequence[float], outcome: Sequence[float], deviations: float = 4.0) -> bool:
    """Whether the process reward rose while the outcome reward fell.

    Each series is cut in half; it rose (fell) when the mean of the second half is above (below) that of the first by
    more than `deviations` standard errors of their difference.

    Args:
        process, outcome (`Sequence[float]`): Process and outcome reward over time, equally long.
        deviations (`float`, *optional*, defaults to `4.0`): In standard errors.

    Returns:
        `bool`: `False` for fewer than 8 points.
    """
    return moved(process) > deviations and moved(outcome) < -deviations


class UnequalWeights(Watch):
    """The correction for vLLM's probabilities weighs long rows otherwise than short ones."""

    cause = "unequal_weights"
    defaults: ClassVar = {"share": 0.1, "deviations": 6.0, "steps": 40}
    metrics = (QUARTERS[0], QUARTERS[-1])
    fewest = 10

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        short, long = map(statistics.fmean, series)
        gaps = [a - b for a, b in zip(*series, strict=True)]
        error = statistics.pstdev(gaps) / math.sqrt(max(len(gaps) - 1, 1))
        if abs(short - long) < max(self.thresholds["share"] * max(short, long), self.thresholds["deviations"] * error):
            return None
        return (
            f"The correction for vLLM's probabilities weighs the longest quarter of the completions {long:.2f} and "
            f"the shortest {short:.2f} (means over {self.span}): a length bias. Set "
            "vllm_importance_sampling_mode='token_truncate'. If it is set, vLLM and the trainer disagree too much "
            "(sampling/sampling_logp_difference): set the same dtype, vllm serve --logprobs-mode processed_logprobs."
        )


class GradientStands(Watch):
    """There is signal, and the gradient, or the learning rate, is 0 all the same."""

    cause = "nothing_moves"
    defaults: ClassVar = {"share": 0.01, "steps": 10}
    metrics = ("grad_norm", "drgrpo/zero_signal_frac", "learning_rate")
    fewest = 2
    from_logs = True  # the gradient norm is that of the step that logs

    def observe(self, step: int, metrics: Metrics) -> str | None:
        share = finite(metrics.get("drgrpo/moved_frac"))
        if share is not None and share < self.thresholds["share"]:
            return (
                f"Only {share:.2%} of the trained weights have changed at all so far: learning_rate is too small for "
                "their precision, and updates are rounded away. Raise learning_rate (LoRA: about 1e-5 to 1e-4), "
                "or keep trained weights in float32."
            )
        values = [finite(metrics.get(name)) for name in self.metrics]
        if None in values:
            return None
        readings = self.seen["readings"]
        readings.append([step, *values])
        while len(readings) > self._fewest_logs and readings[1][0] <= step - self.window + 1:
            del readings[0]  # the rest spans the window without it
        return self.judge(self.series) if self._is_full else None

    def conclude(self) -> str | None:
        return self.judge(self.series) if len(self.seen["readings"]) >= self.fewest and not self._is_full else None

    @property
    def _fewest_logs(self) -> int:
        return min(self.window, 3)

    @property
    def _is_full(self) -> bool:
        readings = self.seen["readings"]
        return len(readings) >= self._fewest_logs and readings[-1][0] - readings[0][0] + 1 >= self.window

    def judge(self, series: list[tuple[Any, ...]]) -> str | None:
        norms, dead, rates = series
        if max(rates) <= 0:
            return (
                f"learning_rate was 0 in every log of {self.span}: nothing is trained. Raise it, or stop here if its "
                "schedule has ended."
            )
        if max(norms) > 0 or max(dead) >= 1:
            return None
        return (
            f"The gradient was 0 in every log of {self.span} although groups had a signal: nothing is trained. Look "
            "for frozen weights (an inactive adapter, requires_grad=False) and for fully masked completions."
        )


WATCHES: tuple[type[Watch], ...] = (  # those that explain others before these
    AllTruncated,
    AllIncorrect,
    RewardCollapse,
    DeadGroups,
    SamplingCollapse,
    IncorrectGrow,
    Truncation,
    KL,
    RewardFailing,
    ProcessHacked,
    UnequalWeights,
    GradientStands,
)
