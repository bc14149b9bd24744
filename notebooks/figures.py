"""What the notebooks draw: token weights of one group, of a recorded run and of tokens, and the drift of lengths.

Names that are not public come to the notebooks through here.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.cli.short_commands import stay_offline_and_quiet

stay_offline_and_quiet()  # before the libraries below read their environment
warnings.filterwarnings("ignore", "IProgress not found")  # bars need no widgets
from trl_drgrpo.check.bias import OBJECTIVES, gradient_weight
from trl_drgrpo.common.drawing import COLORS, ROLES, draw_histories, new_figure, save_figure
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.report.groups import group_widget_html
from trl_drgrpo.report.records import Group
from trl_drgrpo.report.run_folders import Run, read_run

sys.path.append(str(Path(__file__).parents[1] / "recipes/studies"))
from frame import table
from tabular import SETTINGS, length_scores

__all__ = [
    "OBJECTIVES",
    "draw_histories",
    "gradient_weight",
    "group_widget_html",
    "read_run",
    "save_figure",
    "stay_offline_and_quiet",
    "training_arguments",
]
_TOKENS = 100  # length of all answers but the first


def draw_divisors(num_generations: int = 8) -> Any:
    """The length bias of one group in the left panel, the difficulty bias in the right one.

    Args:
        num_generations (`int`, *optional*, defaults to `8`): G, at least 2.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, (by_length, by_group) = new_figure(1, 2, 11, 3.6)
    lengths = np.unique(np.geomspace(_TOKENS / 10, _TOKENS * 10, 40).astype(int))
    arms = (("grpo", 1, "--"), ("dapo", 1, ":"), ("dapo", 16, "-."), ("dr_grpo", 1, "-"))
    for (name, prompts, dash), color in zip(arms, COLORS, strict=False):
        weights = [_first_weight(name, prompts * num_generations, num_generations, n) for n in (_TOKENS, *lengths)]
        label = OBJECTIVES[name].label + (f", {prompts} group{'s' * (prompts > 1)}" if name == "dapo" else "")
        by_length.plot(lengths, np.array(weights[1:]) / weights[0], dash, color=color, label=label)
    by_length.set(
        xscale="log",
        yscale="log",
        title="By the length of the answer",
        xlabel=f"tokens of the answer (others: {_TOKENS})",
        ylabel=f"weight of its tokens ({_TOKENS} tokens = 1)",
    )
    correct = range(1, num_generations)
    for name, dash, suffix in (("dr_grpo_with_std", "o--", "std on"), ("dr_grpo", "D-", "no std")):
        groups = [np.repeat([1.0, 0.0], [k, num_generations - k]) for k in correct]
        advantages = [OBJECTIVES[name].advantages(group, num_generations) for group in groups]
        for row, role in ((0, "correct"), (-1, "incorrect")):
            values = [group[row] for group in advantages]
            fill = "white" if suffix == "std on" else ROLES[role]
            by_group.plot(correct, values, dash, color=ROLES[role], mfc=fill, label=f"{role} answer, {suffix}")
    by_group.set(title="By the group", xlabel=f"correct answers of {num_generations}", ylabel="advantage")
    for axes in (by_length, by_group):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _first_weight(objective: str, rows: int, num_generations: int, length: int) -> float:
    lengths = np.full(rows, _TOKENS)
    lengths[0] = length
    rewards = (np.arange(rows) % 2).astype(float)
    return OBJECTIVES[objective].token_weights(rewards, lengths, num_generations, 1.0)[0]


@dataclass(frozen=True)
class ExampleGroup:
    """A group whose correct answers all have one length, and whose incorrect ones all have one.

    Args:
        right (`int`): Number of correct answers, 0 to G; they come first.
        length_right, length_wrong (`int`): Tokens of a correct and of an incorrect answer, at least 1.
        num_generations (`int`, *optional*, defaults to `8`): G, at least 2.
        max_length (`int`, *optional*, defaults to `256`): Tokens at which answers are cut; also L.

    Example:

    ```python
    >>> group = ExampleGroup(right=1, length_right=10, length_wrong=300, num_generations=4)
    >>> group.rewards, group.lengths
    (array([1., 0., 0., 0.]), array([ 10, 256, 256, 256]))

    ```
    """

    right: int
    length_right: int
    length_wrong: int
    num_generations: int = 8
    max_length: int = 256

    @property
    def is_right(self) -> np.ndarray:
        """Mask of correct answers, `(G,)`, bool."""
        return np.arange(self.num_generations) < self.right

    @property
    def rewards(self) -> np.ndarray:
        """1 for a correct answer, 0 for an incorrect one, `(G,)`."""
        return self.is_right.astype(float)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the answers after the cut, `(G,)`."""
        return np.minimum(np.where(self.is_right, self.length_right, self.length_wrong), self.max_length)

    def token_weights(self, objective: str) -> np.ndarray:
        """Weight of a token of each answer, 1 in the even group of the same mean length, `(G,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.

        Returns:
            `np.ndarray` of shape `(G,)`: Positive for correct answers, negative for incorrect ones, 0 in a group whose
            answers are all correct or all incorrect.

        Example: with lengths of 10 and 30 tokens, GRPO gives a token of the correct answer 3 times the weight.

        ```python
        >>> group = ExampleGroup(right=1, length_right=10, length_wrong=30, num_generations=2)
        >>> group.token_weights("grpo").round(2), group.token_weights("dr_grpo").round(2)
        (array([ 2.  , -0.67]), array([ 1., -1.]))

        ```
        """
        return relative_token_weights(objective, self.rewards, self.lengths)

    def pulls(self, objective: str) -> np.ndarray:
        """Sum of the token weights of each answer, 1 for an answer of the even group, `(G,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
        """
        return self.token_weights(objective) * self.lengths / self.lengths.mean()


def relative_token_weights(objective: str, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Weight of a token of each answer of any group, 1 in the even group of the same mean length, `(G,)`.

    The batch and L cancel. `assets/group_widget.js` of the report computes the same in a browser.

    Args:
        objective (`str`): A key of `OBJECTIVES`.
        rewards (`np.ndarray` of shape `(G,)`): Rewards, none missing, at least two.
        lengths (`np.ndarray` of shape `(G,)`): Tokens, at least 1.
    """
    chosen, size = OBJECTIVES[objective], len(rewards)
    even = (np.arange(size) < size // 2).astype(float)
    alike = np.full(size, lengths.mean())
    weights = chosen.token_weights(rewards, lengths, size, 1.0)
    return weights / np.abs(chosen.token_weights(even, alike, size, 1.0)).mean()


COMPARED = ("grpo", "dapo", "dr_grpo")  # drawn by default
_RIGHT, _WRONG, _NEUTRAL = ROLES["correct"], ROLES["incorrect"], "#555555"
_MARKERS = ("o", "s", "D", "^", "v")


def draw_groups(groups: Sequence[ExampleGroup], objectives: Sequence[str] = COMPARED) -> Any:
    """One column per group: the lengths of its answers, the weight of a token of each, the pull of each.

    Args:
        groups (`Sequence[ExampleGroup]`): At least one.
        objectives (`Sequence[str]`, *optional*): Keys of `OBJECTIVES`.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    count = len(groups)
    figure, panels = new_figure(3, count, 1.2 + 3.8 * count, 7.2, sharey="row", sharex="col")
    for column, group in enumerate(groups):
        lengths, weights, pulls = panels[column::count]
        _draw_lengths(lengths, group)
        _draw_values(weights, group, {name: group.token_weights(name) for name in objectives})
        _draw_values(pulls, group, {name: group.pulls(name) for name in objectives})
        pulls.set_xlabel("answer of the group")
    labels = ("length (tokens)", "weight of a token\n(even group = 1)", "pull of the answer\n(even group = 1)")
    for axes, label in zip(panels[::count], labels, strict=True):
        axes.set_ylabel(label)
    _legend(figure, objectives)
    return figure


def _draw_lengths(axes: Any, group: ExampleGroup) -> None:
    colors = [_RIGHT if right else _WRONG for right in group.is_right]
    axes.bar(np.arange(group.num_generations) + 1, group.lengths, color=colors, width=0.7)
    axes.set_title(f"{group.right} of {group.num_generations} correct", fontsize=11)


def _draw_values(axes: Any, group: ExampleGroup, values: dict[str, np.ndarray]) -> None:
    colors = [_RIGHT if right else _WRONG for right in group.is_right]
    offsets = np.linspace(-0.26, 0.26, len(values)) if len(values) > 1 else [0.0]
    for name, offset in zip(values, offsets, strict=True):
        at, filled = np.arange(group.num_generations) + 1 + offset, name == "dr_grpo"
        axes.vlines(at, 0, values[name], color=colors, linewidth=1.2, alpha=0.6)
        axes.scatter(
            at,
            values[name],
            marker=_marker(name),
            s=34,
            zorder=3,
            c=colors if filled else "white",
            edgecolors=colors,
        )
    axes.axhline(0, color=_NEUTRAL, linewidth=0.8)
    for level in (-1, 1):
        axes.axhline(level, color=_NEUTRAL, linewidth=0.8, linestyle=":")
    axes.set_xticks(np.arange(group.num_generations) + 1)


def _legend(figure: Any, objectives: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_RIGHT, label="correct answer"), Patch(color=_WRONG, label="incorrect answer")]
    for name in objectives:
        fill = _NEUTRAL if name == "dr_grpo" else "white"
        style: dict[str, Any] = {
            "marker": _marker(name),
            "markerfacecolor": fill,
            "markeredgecolor": _NEUTRAL,
            "linestyle": "",
        }
        handles.append(Line2D([], [], label=OBJECTIVES[name].label, **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _marker(objective: str) -> str:
    return _MARKERS[list(OBJECTIVES).index(objective)]


def draw_token_credit(tokens: Sequence[Sequence[str]], advantages: Mapping[str, Any]) -> Any:
    """One panel per kind of credit, one row per completion: blue tokens become likelier, orange ones less likely.

    Args:
        tokens (`Sequence[Sequence[str]]`): Decoded tokens of each completion, B rows.
        advantages (`Mapping[str, Any]`): Title -> tensor or array of shape `(B, T)`, 0 behind a completion's end.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("credit", ["#d55e00", "#ffffff", "#0072b2"])
    longest = max(len(row) for row in tokens)
    height = 0.6 + len(advantages) * (0.6 + 0.35 * len(tokens))
    figure, panels = new_figure(len(advantages), 1, 1 + 0.4 * longest, height, sharex=True)
    for axes, (title, values) in zip(panels, advantages.items(), strict=True):
        bound = float(abs(values).max()) or 1.0
        axes.imshow(values, cmap=colors, vmin=-bound, vmax=bound, aspect="auto", alpha=0.6)
        for row, texts in enumerate(tokens):
            for column, text in enumerate(texts):
                axes.text(column, row, _visible(text), ha="center", va="center", fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(yticks=range(len(tokens)), yticklabels=range(1, len(tokens) + 1), ylabel="completion", xticks=[])
        axes.grid(visible=False)
    return figure


def _visible(token: str) -> str:
    shown = "■" if token.startswith("<|") else token.replace("\n", "↵")
    return shown.replace("$", r"\$")


@dataclass(frozen=True)
class CounterfactualWeights:
    """The recorded answers of a run, N of them, by step and group.

    Args:
        steps (`np.ndarray` of shape `(N,)`, int): Optimizer step that was first trained on them.
        groups (`np.ndarray` of shape `(N,)`, int): Number of the group within its step.
        rewards (`np.ndarray` of shape `(N,)`): Combined outcome rewards.
        right (`np.ndarray` of shape `(N,)`, bool): Verdicts; all false where the run does not record them.
        lengths (`np.ndarray` of shape `(N,)`, int): Tokens.
        advantages (`np.ndarray` of shape `(N,)`): Outcome advantages as recorded; NaN where none is.
        token_weights (`dict[str, np.ndarray]` of shape `(N,)`): Per key of `OBJECTIVES`, the weight of each token of
            the answer in the update direction, the recorded groups of a step being the batch.
        groups_left_out (`int`): Groups in which a reward or a length is missing.
    """

    steps: np.ndarray
    groups: np.ndarray
    rewards: np.ndarray
    right: np.ndarray
    lengths: np.ndarray
    advantages: np.ndarray
    token_weights: dict[str, np.ndarray]
    groups_left_out: int

    def pulls(self, objective: str) -> np.ndarray:
        """Sum of the token weights of each answer, `(N,)`.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
        """
        return self.token_weights[objective] * self.lengths

    def share(self, objective: str, chosen: np.ndarray) -> float:
        """Share of the chosen answers in `sum |pull|`, 0 to 1; NaN if that sum is 0.

        Args:
            objective (`str`): A key of `OBJECTIVES`.
            chosen (`np.ndarray` of shape `(N,)`, bool): Mask of the answers.
        """
        pulls = np.abs(self.pulls(objective))
        return float(pulls[chosen].sum() / pulls.sum()) if pulls.sum() > 0 else float("nan")


def counterfactual_weights(run: Run) -> CounterfactualWeights:
    """The weights of a run's recorded training groups under every objective.

    Step rewards are not part of it: weights are those of the outcome reward with the group's mean as baseline. With
    `record_groups=-1` a step's batch is complete; with fewer groups "batch" (DAPO) divides by the tokens of those.

    Args:
        run ([`Run`]): From `trl_drgrpo.report.run_folders.read_run`.

    Returns:
        [`CounterfactualWeights`].

    Raises:
        [`InputError`]: No group was recorded, or the run does not say its L.
    """
    normalizer = run.objective.get("loss_normalizer")
    recorded = [group for _, group in run.completions.looked_at() if group.mode == "train"] if run.completions else []
    usable = sorted((group for group in recorded if _is_whole(group)), key=lambda group: (group.step, group.index))
    if not usable or not isinstance(normalizer, int | float):
        got = f"a run of {run.kind} with {len(usable)} complete groups recorded and loss_normalizer={normalizer}"
        remedy = "Train with DrGRPOTrainer, run_log=True and record_groups=-1."
        raise InputError(run.path, got, "a run log with recorded groups and L", remedy)
    rows = [(group, row) for group in usable for row in group.rows]
    steps = np.array([group.step for group, _ in rows])
    rewards = np.array([row.reward for _, row in rows], dtype=float)
    lengths = np.array([row.length for _, row in rows])
    return CounterfactualWeights(
        steps=steps,
        groups=np.array([group.index for group, _ in rows]),
        rewards=rewards,
        right=np.array([row.right is True for _, row in rows]),
        lengths=lengths,
        advantages=np.array([row.advantage for _, row in rows], dtype=float),
        token_weights=_weights(steps, rewards, lengths, len(usable[0].rows), normalizer),
        groups_left_out=len(recorded) - len(usable),
    )


def _is_whole(group: Group) -> bool:
    return len(group.rows) > 1 and all(row.reward is not None and row.length for row in group.rows)


def _weights(
    steps: np.ndarray, rewards: np.ndarray, lengths: np.ndarray, num_generations: int, normalizer: float
) -> dict[str, np.ndarray]:
    """Weights step by step: each step is a batch of its own."""
    weights = {name: np.empty(len(steps)) for name in OBJECTIVES}
    for step in np.unique(steps):
        batch = steps == step
        for name, objective in OBJECTIVES.items():
            weights[name][batch] = objective.token_weights(rewards[batch], lengths[batch], num_generations, normalizer)
    return weights


def length_drift(prompts: int, batches: int = 5000, seed: int = 0) -> dict[str, np.ndarray]:
    """Expected update of the stopping rates at the start, in units of its standard deviation from batch to batch.

    Args:
        prompts (`int`): Groups in a batch; DAPO's divisor depends on it.
        batches (`int`, *optional*, defaults to `5000`): Drawn batches; a 0 has standard error `1 / sqrt(batches)`.
        seed (`int`, *optional*, defaults to `0`): Of the random numbers.

    Returns:
        `dict[str, np.ndarray]`: Per key of `OBJECTIVES`, of the rate of correct answers, of incorrect ones, and of one
        rate shared by both, `(3,)`. Positive: answers get shorter.
    """
    rng, size, longest = np.random.default_rng(seed), SETTINGS["num_generations"], SETTINGS["max_length"]
    stop = np.full(prompts * size, 1 / SETTINGS["start_length"])
    updates: dict[str, list[list[float]]] = {name: [] for name in OBJECTIVES}
    for _ in range(batches):
        is_right = rng.random(len(stop)) < SETTINGS["right_probability"]
        drawn = rng.geometric(stop)
        lengths = np.minimum(drawn, longest)
        scores = length_scores(lengths, drawn <= longest, stop)
        for name, objective in OBJECTIVES.items():
            terms = scores * objective.token_weights(is_right.astype(float), lengths, size, longest)
            updates[name].append([terms[is_right].sum(), terms[~is_right].sum(), terms.sum()])
    return {name: np.mean(found, axis=0) / np.std(found, axis=0) for name, found in updates.items()}


def drift_table(many: dict[str, Any], single: dict[str, Any]) -> str:
    """The expected updates of [`length_drift`] as a Markdown table, in a batch of many groups and in one of a single
    group; positive where answers get shorter."""
    columns = ("correct", "incorrect", "one shared rate", "one group: correct", "one group: incorrect")
    rows = [
        [objective.label, *(f"{value:+.2f}" for value in (*many[name], *single[name][:2]))]
        for name, objective in OBJECTIVES.items()
    ]
    return table(["objective", *columns], rows)
