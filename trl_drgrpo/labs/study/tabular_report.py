"""Rung a as numbers, table and plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, ROLES, new_figure, save_figure
from trl_drgrpo.labs.study.conclusions import length_bias, paired
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.objectives import OBJECTIVES, gradient_weight
from trl_drgrpo.labs.study.tabular import TabularRun, TabularTask, run_tabular

_STRIDE = 10  # steps between two points of the stored curves


def tabular_study(seeds: Sequence[int], task: TabularTask = TabularTask()) -> dict[str, Any]:  # noqa: B008 (frozen)
    """Every objective with every seed.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each objective.
        task ([`TabularTask`]): Sizes.

    Returns:
        `dict[str, Any]`: `task`, `seeds`, `objectives` (per objective: lengths of correct and incorrect answers at the
        start and per seed at the end, in tokens, and thinned curves), `gradient_mass` (sum of |A| in a group by its
        number of correct answers, with and without std).
    """
    objectives = {}
    for name in OBJECTIVES:
        runs = [run_tabular(name, seed, task) for seed in seeds]
        objectives[name] = {
            "length_right_end": [round(run.length_right[-1], 3) for run in runs],
            "length_wrong_end": [round(run.length_wrong[-1], 3) for run in runs],
            "length_start": round(runs[0].length_right[0], 3),
            "curves": [_thinned(run) for run in runs],
        }
    weights = {
        "without_std": gradient_weight(task.num_generations, False),
        "with_std": gradient_weight(task.num_generations, True),
    }
    return {
        "task": dataclasses.asdict(task),
        "seeds": list(seeds),
        "objectives": objectives,
        "gradient_mass": weights,
        "stride": _STRIDE,
    }


def _thinned(run: TabularRun) -> dict[str, list[float]]:
    return {
        "right": [round(length, 2) for length in run.length_right[::_STRIDE]],
        "wrong": [round(length, 2) for length in run.length_wrong[::_STRIDE]],
    }


def table(results: dict[str, Any]) -> str:
    """The lengths at the end as a Markdown table, mean and 95% interval over seeds, in tokens."""
    start = next(iter(results["objectives"].values()))["length_start"]
    lines = [
        f"| objective | incorrect answers, from {start:.1f} tokens to | correct answers, from {start:.1f} tokens to |",
        "|---|---|---|",
    ]
    for name, found in results["objectives"].items():
        wrong, right = interval(found["length_wrong_end"]), interval(found["length_right_end"])
        lines.append(f"| {OBJECTIVES[name].label} | {wrong} | {right} |")
    return "\n".join(lines)


def drift_table(many: dict[str, Any], single: dict[str, Any]) -> str:
    """The expected updates as a Markdown table, positive where answers get shorter.

    Args:
        many, single (`dict[str, Any]`): Of [`length_drift`], in a batch of many groups and in a batch of one.
    """
    columns = ("correct", "incorrect", "one shared rate", "one group: correct", "one group: incorrect")
    lines = [f"| objective | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, objective in OBJECTIVES.items():
        cells = (f"{value:+.2f}" for value in (*many[name], *single[name][:2]))
        lines.append(f"| {objective.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gradient_weight_table(results: dict[str, Any]) -> str:
    """The difficulty bias as a Markdown table: pull on a prompt by its correct answers, the even prompt being 1."""
    weights = results["gradient_mass"]
    group = len(weights["with_std"]) - 1
    even = {name: values[group // 2] for name, values in weights.items()}
    lines = [f"| correct answers of {group} | without std (Dr. GRPO) | with std | ratio |", "|---|---|---|---|"]
    for right in range(1, group):
        without, std = (weights[name][right] / even[name] for name in ("without_std", "with_std"))
        lines.append(f"| {right} | {without:.2f} | {std:.2f} | {std / without:.2f} |")
    return "\n".join(lines)


def conclusion(results: dict[str, Any]) -> str:
    """Sentence on the objectives under which the length bias shows."""
    gaps = {
        name: [w - r for w, r in zip(found["length_wrong_end"], found["length_right_end"], strict=True)]
        for name, found in results["objectives"].items()
    }
    return length_bias({name: paired(own, gaps["dr_grpo"]) for name, own in gaps.items() if name != "dr_grpo"})


def draw(results: dict[str, Any], path: Path) -> Path:
    """Lengths over the steps for the objectives, all seeds, and the gradient weight by difficulty.

    Args:
        results (`dict[str, Any]`): Of [`tabular_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, axes = new_figure(1, 3, 12, 3.8)
    for panel, name in zip(axes, ("grpo", "dr_grpo"), strict=False):
        for side, role in (("wrong", "incorrect"), ("right", "correct")):
            for number, curve in enumerate(results["objectives"][name]["curves"]):
                steps = [results["stride"] * i for i in range(len(curve[side]))]
                label = None if number or panel is not axes[0] else f"{role} answers"
                panel.plot(steps, curve[side], color=ROLES[role], alpha=0.6, linewidth=1.2, label=label)
        panel.set(title=OBJECTIVES[name].label, xlabel="optimizer step", ylim=(0, results["task"]["max_length"] * 0.8))
    axes[0].set_ylabel("expected length (tokens)")
    _draw_gradient_weight(axes[-1], results["gradient_mass"])
    return save_figure(figure, path)


def _draw_gradient_weight(axes: Any, weights: dict[str, list[float]]) -> None:
    group = len(weights["with_std"]) - 1
    for name, color, label in (("with_std", COLORS[1], "with std"), ("without_std", COLORS[0], "without (Dr. GRPO)")):
        even = weights[name][group // 2]
        axes.plot(
            [k / group for k in range(group + 1)],
            [weight / even for weight in weights[name]],
            "o-",
            color=color,
            label=label,
        )
    axes.set(
        title="Pull on a prompt by its difficulty", xlabel="pass rate of the group", ylabel="sum of |A|, even = 1"
    )
