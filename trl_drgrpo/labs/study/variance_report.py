"""The study of gradient variance as tables, a sentence and a plot."""

from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.measured_models import MODELS, mean_of, runs_of
from trl_drgrpo.labs.study.variance_study import DIVISORS

_LABELS = {"row": "mean per row (grpo)", "batch": "batch's tokens (dapo)", "constant": "constant (dr_grpo)"}


def noise_table(results: dict[str, Any], with_std: bool = False) -> str:
    """Groups until signal and noise are equal, per divisor, as a Markdown table: mean and 95% interval over seeds.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.variance_study.run_study`].
        with_std (`bool`, *optional*, defaults to `False`): Whether advantages are divided by the group's std.
    """
    lines = [
        f"| {'with' if with_std else 'without'} std | tokens | correct, % | {' | '.join(_LABELS.values())} "
        "| constant over mean per row |",
        "|---" * 7 + "|",
    ]
    for name in results["settings"]["models"]:
        runs = runs_of(results, name)
        row, constant = (DIVISORS[key][with_std] for key in ("row", "constant"))
        cells = [f"{mean_of(runs, 'length'):.1f}", f"{100 * mean_of(runs, 'pass_rate'):.0f}"]
        cells += [_cell([run["noise"][pair[with_std]] for run in runs], 1) for pair in DIVISORS.values()]
        cells.append(_cell([_ratio(run["noise"][constant], run["noise"][row]) for run in runs], 2))
        lines.append(f"| {MODELS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shape_table(results: dict[str, Any]) -> str:
    """Growth of a completion's gradient with its length, shares of the variance, and bias, as a Markdown table.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.variance_study.run_study`].
    """
    lines = [
        "| without std | spread of lengths | exponent of the length | longest third, mean per row, % "
        "| longest third, constant, % | alignment, mean per row | alignment, batch's tokens |",
        "|---" * 7 + "|",
    ]
    for name in results["settings"]["models"]:
        runs = runs_of(results, name)
        cells = [
            f"{mean_of(runs, 'spread'):.2f}",
            _cell([run["exponent"] for run in runs], 2),
            *(_cell([100 * run["shares"][divisor][-1] for run in runs], 0) for divisor in ("row", "constant")),
            *(_cell([run["alignment"][DIVISORS[divisor][0]] for run in runs], 2) for divisor in ("row", "batch")),
        ]
        lines.append(f"| {MODELS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sentence(results: dict[str, Any]) -> str:
    """Growth of the noise with the length, from the shortest to the longest completions of the constructed models."""
    names = [name for name in results["settings"]["models"] if MODELS[name].constructed]
    first, last = runs_of(results, names[0]), runs_of(results, names[-1])
    longer = mean_of(last, "length") / mean_of(first, "length")
    grown = {}
    for divisor, (key, _) in DIVISORS.items():
        grown[divisor] = _cell([_ratio(b["noise"][key], a["noise"][key]) for a, b in zip(first, last, strict=True)], 2)
    return (
        f"With {longer:.1f} times as many tokens of the constructed task, the noise is {grown['constant']} times as "
        f"large under a constant divisor, {grown['batch']} under the batch's tokens and {grown['row']} under a mean "
        "per row."
    )


def draw(results: dict[str, Any], path: Path) -> Path:
    """Noise over the mean length per divisor, constructed models and others, and the exponents.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.variance_study.run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, panels = new_figure(1, 2, 9.0, 3.8)
    kinds = {True: "even digit, comments of growing length", False: "list sums of growing length"}
    for axes, (constructed, title) in zip(panels, kinds.items(), strict=True):
        names = [name for name in results["settings"]["models"] if MODELS[name].constructed == constructed]
        for color, (divisor, (key, _)) in zip(COLORS, DIVISORS.items(), strict=False):
            points = [(runs_of(results, name), name) for name in names]
            x = [mean_of(runs, "length") for runs, _ in points]
            y = [interval(_known([run["noise"][key] for run in runs])) for runs, _ in points]
            spread = [each.half_width for each in y]
            axes.errorbar(
                x, [each.mean for each in y], spread, fmt="o-", color=color, markersize=4, label=_LABELS[divisor]
            )
        axes.set(title=title, xlabel="mean length (tokens)", ylabel="groups until signal = noise")
        axes.set_ylim(bottom=0)
    return save_figure(figure, path)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _cell(values: list[float | None], decimals: int) -> str:
    if len(_known(values)) < len(values):
        return "unknown"
    return interval(_known(values)).text(decimals)
