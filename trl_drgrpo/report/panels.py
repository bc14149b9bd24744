"""Panels of the report and their metrics: one list for the page, the figure and the tables."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from trl_drgrpo.features.diagnostics.statistics import QUARTERS

BY_DIFFICULTY = ("difficulty/", "sampling/keep_probability/")  # not curves over the steps: one chart of their own


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
    _one("Entropy", "nats per token", "entropy"),
    _one("KL to the reference", "nats per token", "kl"),
    _one("Gradient norm", "before clipping", "grad_norm"),
    _one("Truncated", "share of completions", "completions/truncated_frac", "completions/clipped_ratio", share=True),
    _one("Clipped tokens", "share of tokens", "clip_ratio/region_mean", "clip_ratio"),
    Panel(
        "Weight by length",
        "mean ratio to vLLM's probabilities",
        tuple(
            Line(label, (name,))
            for label, name in zip(("shortest quarter", "second", "third", "longest quarter"), QUARTERS, strict=True)
        ),
        hint="What token losses are multiplied by. Curves that part are a length bias: take token_truncate.",
    ),
    Panel(
        "Weight by correctness",
        "mean ratio to vLLM's probabilities",
        (
            Line("correct", ("sampling/weight_correct_mean",), "correct"),
            Line("incorrect", ("sampling/weight_incorrect_mean",), "incorrect"),
        ),
    ),
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
    Panel(
        "Sampled prompts",
        "per batch",
        (
            Line("drawn", ("sampling/draws",)),
            Line("generated", ("sampling/groups_generated",)),
            Line("live", ("sampling/groups_live",)),
        ),
        hint="Live: the group's rewards differ, so it carries a signal.",
    ),
    Panel(
        "Sampled groups",
        "per batch",
        (Line("trained on", ("sampling/groups_trained",)), Line("dropped", ("sampling/groups_dropped",))),
        hint="Dropped: live groups beyond those that a batch takes.",
    ),
    _one("Sampling rounds", "per batch", "sampling/rounds"),
    _one("Tokens per live group", "generated tokens", "sampling/tokens_per_live_group"),
    Panel(
        "Sampling weight",
        "times the advantages",
        (Line("mean", ("sampling/weight_mean",)), Line("largest", ("sampling/weight_max",))),
        hint="Keeps the objective: small where few groups carry a signal, large where a prompt was rarely kept.",
    ),
    _one("Effective groups", "of a batch", "sampling/effective_groups", hint="Equal weights count in full."),
    Panel(
        "Curriculum",
        "share",
        (
            Line("kept of the prompts drawn", ("sampling/keep_probability",)),
            Line("estimated pass rate", ("sampling/pass_rate_estimate",)),
        ),
        share=True,
    ),
    _one("DAPO's factor", "on the gradient", "sampling/dapo_factor"),
    Panel(
        "Forks",
        "share of completions",
        (Line("cut", ("forks/cut_frac",)), Line("live, of those cut", ("forks/live_frac",))),
        hint="Live: the branches behind the last cut earned different rewards.",
        share=True,
    ),
    _one("First fork", "share of the completion before it", "forks/cut_position", share=True),
    _one(
        "Sampled tokens",
        "share of the tokens of all completions",
        "forks/sampled_token_frac",
        hint="The others are prefixes that branches share, written once.",
        share=True,
    ),
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
            panels.append(replace(panel, lines=tuple(lines)))
    return panels


def _reward_panels(metrics: Collection[str]) -> list[Panel]:
    names = sorted(
        name for name in metrics if name.startswith(("rewards/", "process_rewards/")) and name.endswith("/mean")
    )
    if len([name for name in names if name.startswith("rewards/")]) < 2:  # then it is the reward
        names = [name for name in names if not name.startswith("rewards/")]
    titles = [name.split("/", 1)[1].removesuffix("/mean") for name in names]
    return [
        _one(f"{title}, steps", "mean step reward", name)
        if name.startswith("process_")
        else _one(title, "mean reward", name)
        for title, name in zip(titles, names, strict=True)
    ]


def other_metrics(metrics: Collection[str], panels: Sequence[Panel]) -> list[str]:
    """Logged metrics that no panel draws, nor the heat map; sorted."""
    drawn = {name for panel in panels for line in panel.lines for name in line.metrics}
    return sorted(name for name in metrics if name not in drawn and not name.startswith(BY_DIFFICULTY))


def difficulty_metric(kind: str, bucket: str) -> str:
    """Name of a difficulty metric. `kind`: `"groups_frac"`, `"gradient_weight_frac"`, `"gradient_weight_frac_grpo"` or
    `"keep_probability"`."""
    return f"{'sampling' if kind == 'keep_probability' else 'difficulty'}/{kind}/{bucket}"
