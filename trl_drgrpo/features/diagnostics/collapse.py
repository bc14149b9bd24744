"""Causes around a policy that solves nothing (any more): all cut off, all incorrect, the reward collapsed."""

import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from trl_drgrpo.features.diagnostics.series import moved
from trl_drgrpo.features.diagnostics.watch import Watch, mean_of, span_of

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
