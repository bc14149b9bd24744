"""Panels of the report and their metrics: one list for the page, the figure and the tables."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trl_drgrpo.features.diagnostics.statistics import BUCKETS


@dataclass(frozen=True)
class Line:
    """One curve of a panel.

    Args:
        label (`str`): In the legend.
        metrics (`tuple[str, ...]`): Names under which it may be logged; the first one that is there counts.
        role (`str`, *optional*): `"correct"`, `"incorrect"` or `""`: each has the same color in every panel.
    """

    label: str
    metrics: tuple[str, ...]
    role: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves that share axes.

    Args:
        title, unit (`str`): Above the axes.
        lines (`tuple[Line, ...]`): At least one.
        stacked (`bool`): Whether the lines are parts of a whole, drawn one on the other.
        hint (`str`): How to read it, in one sentence.
        share (`bool`): Whether the values run from 0 to 1.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    stacked: bool = False
    hint: str = ""
    share: bool = False


def _one(title: str, unit: str, *metrics: str, hint: str = "", share: bool = False) -> Panel:
    return Panel(title, unit, (Line("", metrics),), hint=hint, share=share)


PANELS = (
    _one("Reward", "weighted sum", "reward"),
    _one("Pass rate", "share of completions", "drgrpo/pass_rate", share=True),
    Panel(
        "Completion length",
        "tokens",
        (
            Line("correct", ("completions/length_correct_mean",), "correct"),
            Line("incorrect", ("completions/length_incorrect_mean",), "incorrect"),
            Line("all", ("completions/mean_length",)),
        ),
        hint="Incorrect answers that grow while correct ones do not are the length bias that Dr. GRPO removes.",
    ),
    Panel(
        "Dead groups",
        "share of groups",
        (
            Line("all correct", ("drgrpo/all_correct_frac",), "correct"),
            Line("all incorrect", ("drgrpo/all_incorrect_frac",), "incorrect"),
            Line("all equal", ("drgrpo/zero_signal_frac", "frac_reward_zero_std")),
        ),
        stacked=True,
        hint="Groups in which every reward is equal: they teach nothing.",
        share=True,
    ),
    Panel(
        "Entropy",
        "nats per token",
        (Line("all rows", ("entropy",)), Line("rows with a signal", ("entropy/with_signal",))),
    ),
    _one("KL to the reference", "nats per token", "kl"),
    _one("Gradient norm", "before clipping", "grad_norm"),
    _one("Truncated", "share of completions", "completions/truncated_frac", "completions/clipped_ratio", share=True),
    _one("Clipped tokens", "share of tokens", "clip_ratio/region_mean", "clip_ratio"),
    Panel(
        "Time per phase",
        "seconds",
        (
            Line("generate", ("time/generate_s",)),
            Line("score", ("time/score_s",)),
            Line("train", ("time/train_s",)),
        ),
        stacked=True,
    ),
    _one("Speed", "tokens per second", "time/tokens_per_s"),
    _one("Effective group size", "completions", "drgrpo/effective_group_size"),
    _one("Useful tokens", "share of what ran", "drgrpo/useful_token_frac", share=True),
    _one("Different completions", "share of a group", "completions/unique_frac", share=True),
    _one("Process reward", "mean over steps", "process/reward_mean"),
    _one("Steps per completion", "steps", "process/steps_mean"),
    _one(
        "Loss",
        "",
        "loss",
        hint="On policy Dr. GRPO's is −Σ A / (B·L) over the tokens, GRPO's 0: no sign of progress.",
    ),
    _one("Learning rate", "", "learning_rate"),
)


def panels_for(metrics: Collection[str]) -> list[Panel]:
    """
    The panels that have something to draw, with the curves that are there, and one for each reward function.

    `metrics`: those that any of the runs logged. Completions of all kinds, and groups of equal rewards, are drawn only
    where correct and incorrect ones are not.
    """
    panels = []
    for panel in (*PANELS, *_reward_panels(metrics)):
        lines = [line for line in panel.lines if any(name in metrics for name in line.metrics)]
        if any(line.role for line in lines):
            lines = [line for line in lines if line.role]
        if lines:
            panels.append(Panel(panel.title, panel.unit, tuple(lines), panel.stacked, panel.hint, panel.share))
    return panels


def _reward_panels(metrics: Collection[str]) -> list[Panel]:
    names = sorted(
        name for name in metrics if name.startswith(("rewards/", "process_rewards/")) and name.endswith("/mean")
    )
    if len([name for name in names if name.startswith("rewards/")]) < 2:  # then it is the reward
        names = [name for name in names if not name.startswith("rewards/")]
    return [_one(name.split("/", 1)[1].removesuffix("/mean"), "mean reward", name) for name in names]


def other_metrics(metrics: Collection[str], panels: Sequence[Panel]) -> list[str]:
    """Logged metrics that no panel draws, nor the heat map; sorted."""
    drawn = {name for panel in panels for line in panel.lines for name in line.metrics}
    return sorted(name for name in metrics if name not in drawn and not name.startswith("difficulty/"))


def difficulty_metric(kind: str, bucket: str) -> str:
    """Name of a difficulty metric. `kind`: `"groups_frac"`, `"gradient_weight_frac"` or
    `"gradient_weight_frac_grpo"`."""
    if bucket not in BUCKETS:
        raise ValueError(f"bucket: got {bucket!r}; expected one of {', '.join(BUCKETS)}.")
    return f"difficulty/{kind}/{bucket}"
