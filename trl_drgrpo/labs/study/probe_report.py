"""The study of the probe as tables, sentences and a plot."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.measured_models import MODELS, mean_of, runs_of
from trl_drgrpo.labs.study.ranks import RankCorrelation, rank_correlation

_PREDICTORS: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "states": ("AUC", lambda run: run["states"][0]),
    "difference": ("AUC above the position's", lambda run: run["difference"][0]),
    "open_stops": ("open stops", lambda run: run["open_stops"]),
    "apart": ("distance of the states", lambda run: run["apart"]),
}
DECLARED = "states"


def table(results: dict[str, Any]) -> str:
    """Each model's probes and effect as a Markdown table, means over seeds, the effect with its 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.probe_study.run_study`].
    """
    lines = [
        "| model | correct, % | incorrect / correct, tokens | AUC, state | AUC, position | open stops | distance "
        "| GRPO minus Dr. GRPO, tokens |",
        "|---" * 8 + "|",
    ]
    for name in results["settings"]["models"]:
        runs = runs_of(results, name)
        states, position = ([run[key][0] for run in runs] for key in ("states", "position"))
        cells = [
            f"{100 * mean_of(runs, 'pass_rate'):.0f}",
            f"{mean_of(runs, 'length_wrong'):.1f} / {mean_of(runs, 'length_right'):.1f}",
            interval(states).text(3),
            interval(position).text(3),
            f"{mean_of(runs, 'open_stops'):.2f}",
            f"{mean_of(runs, 'apart'):.3f}",
            interval([_effect(run) for run in runs]).text(1, signed=True),
        ]
        lines.append(f"| {MODELS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def correlation_table(results: dict[str, Any]) -> str:
    """Rank correlations of the effect over models as a Markdown table: predictors in rows, 95% intervals.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.probe_study.run_study`].
    """
    sets = {"all": False, "not constructed": True}
    lines = [f"| rank correlation of the effect with | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for name, (title, _) in _PREDICTORS.items():
        cells = [str(correlation(results, name, only)) for only in sets.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def correlation(results: dict[str, Any], predictor: str, natural: bool = False) -> RankCorrelation:
    """Rank correlation over models, means over seeds.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.probe_study.run_study`].
        predictor (`str`): `states`, `difference`, `open_stops` or `apart`.
        natural (`bool`, *optional*, defaults to `False`): Only over models that were not constructed.
    """
    names = [name for name in results["settings"]["models"] if not (natural and MODELS[name].constructed)]
    x, y = (
        [statistics.fmean(measure(run) for run in runs_of(results, name)) for name in names]
        for measure in (_PREDICTORS[predictor][1], _effect)
    )
    return rank_correlation(x, y)


def sentence(results: dict[str, Any]) -> str:
    """Sentence on the prediction, from the declared correlation."""
    found = correlation(results, DECLARED)
    natural = correlation(results, DECLARED, natural=True)
    parts = [f"{each} (p = {each.p_value:.3f}, one-sided): {_verdict(each)}" for each in (found, natural)]
    return (
        f"Over {found.points} models the rank correlation of the AUC with the effect in tokens is {parts[0]}. "
        f"Over the {natural.points} that were not constructed it is {parts[1]}."
    )


def _verdict(found: RankCorrelation) -> str:
    if found.low > 0:
        return "the prediction is borne out"
    return "the prediction is contradicted" if found.high < 0 else "the prediction is not borne out"


def draw(results: dict[str, Any], path: Path) -> Path:
    """The effect over the AUC, a point per model with its interval over seeds.

    Args:
        results (`dict[str, Any]`): Of [`~trl_drgrpo.labs.study.probe_study.run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, (axes,) = new_figure(1, 1, 7.5, 4.2)
    for number, name in enumerate(results["settings"]["models"], start=1):
        x = interval([run["states"][0] for run in runs_of(results, name)])
        y = interval([_effect(run) for run in runs_of(results, name)])
        color = COLORS[1] if MODELS[name].constructed else COLORS[0]
        axes.errorbar(x.mean, y.mean, y.half_width, x.half_width, "o", color=color, markersize=5, linewidth=0.8)
        axes.annotate(str(number), (x.mean, y.mean), (4, 4), textcoords="offset points", fontsize=8)
        axes.plot([], [], "o", color=color, label=f"{number} {MODELS[name].title}")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.axvline(0.5, color="black", linewidth=0.6)
    axes.set(xlabel="AUC of the probe where an answer may stop", ylabel="gap, GRPO minus Dr. GRPO, in tokens")
    return save_figure(figure, path)


def _effect(run: dict[str, Any]) -> float:
    """GRPO's effect on the gap between incorrect and correct lengths less Dr. GRPO's, in tokens per unit update."""
    return run["gap"][0]
