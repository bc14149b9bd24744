"""Panels of the report and their metrics: one list for the page, the figure and the tables."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trl_drgrpo.features.diagnostics.statistics import QUARTERS

# These have one chart of their own, in place of curves over steps.
BY_DIFFICULTY = ("difficulty/", "sampling/keep_probability/")
_ROLES = ("correct", "incorrect")


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


def _panel(
    title: str, unit: str, metrics: str | Mapping[str, str], hint: str = "", share: bool = False, stacked: bool = False
) -> Panel:
    """Build a panel of one curve, or of one per label.

    A curve that is logged under several names has spaces between them; its role is in its label.
    """
    if isinstance(metrics, str):
        metrics = {"": metrics}
    lines = []
    for label, names in metrics.items():
        # "all correct" has the color of "correct".
        role = label.removeprefix("all ")
        if role not in _ROLES:
            role = ""
        lines.append(Line(label, tuple(names.split()), role))
    return Panel(title, unit, tuple(lines), stacked, hint, share)


_WEIGHT = "mean ratio to vLLM's probabilities"
# In the order of the page. A panel that has nothing to draw is left out.
PANELS = (
    _panel("Reward", "weighted sum", "reward"),
    _panel("Pass rate", "share of completions", "drgrpo/pass_rate", share=True),
    _panel(
        "Completion length",
        "tokens",
        {
            "correct": "completions/length_correct_mean",
            "incorrect": "completions/length_incorrect_mean",
            "all": "completions/mean_length",
        },
        "Incorrect answers that grow while correct ones do not are the length bias that Dr. GRPO removes.",
    ),
    _panel(
        "Dead groups",
        "share of groups",
        {
            "all correct": "drgrpo/all_correct_frac",
            "all incorrect": "drgrpo/all_incorrect_frac",
            "all equal": "drgrpo/dead_groups_frac frac_reward_zero_std",
        },
        "Groups in which all rewards are equal: they train nothing.",
        share=True,
        stacked=True,
    ),
    _panel("Entropy", "nats per token", "entropy"),
    _panel("KL to the reference", "nats per token", "kl"),
    _panel("Gradient norm", "before clipping", "grad_norm"),
    _panel("Truncated", "share of completions", "completions/clipped_ratio", share=True),
    _panel("Clipped tokens", "share of tokens", "clip_ratio/region_mean clip_ratio"),
    _panel(
        "Weight by length",
        _WEIGHT,
        dict(zip(("shortest quarter", "second", "third", "longest quarter"), QUARTERS, strict=True)),
        "What token losses are multiplied by. Curves that part are a length bias: take token_truncate.",
    ),
    _panel("Weight by correctness", _WEIGHT, {role: f"sampling/weight_{role}_mean" for role in _ROLES}),
    _panel(
        "Time per phase",
        "seconds",
        {phase: f"time/{phase}_s" for phase in ("generate", "score", "train")},
        stacked=True,
    ),
    _panel("Speed", "tokens per second", "time/tokens_per_s"),
    _panel("Effective group size", "completions", "drgrpo/effective_group_size"),
    _panel("Useful tokens", "share of what ran", "drgrpo/useful_token_frac", share=True),
    _panel(
        "Sampled prompts",
        "per batch",
        {"drawn": "sampling/draws", "generated": "sampling/groups_generated", "live": "sampling/groups_live"},
        "Live: the group's rewards differ.",
    ),
    _panel(
        "Sampled groups",
        "per batch",
        {"trained on": "sampling/groups_trained", "dropped": "sampling/groups_dropped"},
        "Dropped: live groups beyond those that a batch takes.",
    ),
    _panel("Sampling rounds", "per batch", "sampling/rounds"),
    _panel("Tokens per live group", "generated tokens", "sampling/tokens_per_live_group"),
    _panel(
        "Sampling weight",
        "times the advantages",
        {"mean": "sampling/weight_mean", "largest": "sampling/weight_max"},
        "Keeps the objective: small where few groups are live, large where a prompt was rarely kept.",
    ),
    _panel("Effective groups", "of a batch", "sampling/effective_groups", "Equal weights count in full."),
    _panel(
        "Curriculum",
        "share",
        {
            "kept of the prompts drawn": "sampling/keep_probability",
            "estimated pass rate": "sampling/pass_rate_estimate",
        },
        share=True,
    ),
    _panel("DAPO's factor", "on the gradient", "sampling/dapo_factor"),
    _panel(
        "Forks",
        "share of completions",
        {"cut": "forks/cut_frac", "live, of those cut": "forks/live_frac"},
        "Live: the branches behind the last cut earned different rewards.",
        share=True,
    ),
    _panel("First fork", "share of the completion before it", "forks/cut_position", share=True),
    _panel(
        "Sampled tokens",
        "share of the tokens of all completions",
        "forks/sampled_token_frac",
        "The others are prefixes that branches share, written once.",
        share=True,
    ),
    _panel("Different completions", "share of a group", "completions/unique_frac", share=True),
    _panel("Process reward", "mean over steps", "process/reward_mean"),
    _panel("Steps per completion", "steps", "process/steps_mean"),
    _panel("Loss", "", "loss", "On policy Dr. GRPO's is −Σ A / (B·L) over the tokens, GRPO's 0: no sign of progress."),
    _panel("Learning rate", "", "learning_rate"),
)


def panels_for(metrics: Collection[str]) -> list[Panel]:
    """
    Return the panels that have something to draw, with the curves that are there, and one for each reward function.

    `metrics`: those that any of the runs logged. Completions of all kinds, and groups of equal rewards, are drawn only
    where correct and incorrect ones are not.
    """
    panels = []
    for panel in (*PANELS, *_reward_panels(metrics)):
        lines = [line for line in panel.lines if not set(line.metrics).isdisjoint(metrics)]
        # "all" says nothing more beside "correct" and "incorrect".
        lines = [line for line in lines if line.role] or lines
        if lines:
            panels.append(replace(panel, lines=tuple(lines)))
    return panels


def _reward_panels(metrics: Collection[str]) -> list[Panel]:
    of_steps = []
    of_rewards = []
    # Not by `_panel`, which would split a name with spaces.
    for name in sorted(metrics):
        kind, _, reward = name.partition("/")
        if not name.endswith("/mean"):
            continue
        title = reward.removesuffix("/mean")
        lines = (Line("", (name,)),)
        if kind == "process_rewards":
            of_steps.append(Panel(f"{title}, steps", "mean step reward", lines))
        elif kind == "rewards":
            of_rewards.append(Panel(title, "mean reward", lines))
    # A single reward's curve is that of the reward.
    if len(of_rewards) == 1:
        return of_steps
    return of_steps + of_rewards


def other_metrics(metrics: Collection[str], panels: Sequence[Panel]) -> list[str]:
    """Return the logged metrics that neither a panel nor the heat map draws, sorted."""
    undrawn = {name for name in metrics if not name.startswith(BY_DIFFICULTY)}
    for panel in panels:
        for line in panel.lines:
            undrawn.difference_update(line.metrics)
    return sorted(undrawn)


def difficulty_metric(kind: str, bucket: str) -> str:
    """Return the name of a difficulty metric.

    `kind`: `"groups_frac"`, `"gradient_weight_frac"`, `"gradient_weight_frac_grpo"` or `"keep_probability"`.
    """
    if kind == "keep_probability":
        return f"sampling/{kind}/{bucket}"
    return f"difficulty/{kind}/{bucket}"
