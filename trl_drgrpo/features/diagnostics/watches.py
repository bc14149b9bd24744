"""Problems visible in the metrics of optimizer steps: one small class per cause.

A watch keeps the readings of the last optimizer steps (`watch.py`); `observe` gives the warning once there is
something to warn of. Trends are compared in standard errors (`series.py`), so that noise alone is rarely called a
trend; what the defaults cost in false alarms stands in `tests/unit/features/diagnostics/test_watches.py`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from trl_drgrpo.features.diagnostics.collapse import AllIncorrect, AllTruncated, RewardCollapse
from trl_drgrpo.features.diagnostics.correction import QUARTERS
from trl_drgrpo.features.diagnostics.series import change, distance_from_usual, moved
from trl_drgrpo.features.diagnostics.watch import Metrics, Watch, finite, mean_of, span_of


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
