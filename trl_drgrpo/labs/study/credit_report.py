"""The study of step credit as tables and a plot."""

from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.study.conclusions import compared, paired
from trl_drgrpo.labs.study.credit_arms import ARMS, OUTCOME
from trl_drgrpo.labs.study.credit_runs import CreditRun
from trl_drgrpo.labs.study.intervals import interval

LAST = 0.75  # from this share of the tokens on, a run is at its end
TITLES = {"long_sums": "Long list sums", "two_turns": "Two turns"}


def title(task: str, results: dict[str, Any]) -> str:
    """The line above a table.

    Args:
        task (`str`): A key of `TASKS`.
        results (`dict[str, Any]`): Of [`run_credit_study`].
    """
    seeds = len({run["seed"] for run in results["runs"] if run["task"] == task})
    tokens = results["settings"][task]["tokens"]
    return f"{TITLES[task]}, {tokens // 1000} thousand tokens a run, {seeds} seeds, mean and 95% interval"


def runs_by_arm(task: str, results: dict[str, Any]) -> dict[str, dict[int, CreditRun]]:
    """The runs of a task: arm -> seed -> run.

    Args:
        task (`str`), results (`dict[str, Any]`): As in [`title`].
    """
    found: dict[str, dict[int, CreditRun]] = {arm: {} for arm in ARMS}
    for run in results["runs"]:
        if run["task"] == task:
            found[run["arm"]][run["seed"]] = CreditRun(**run)
    return found


def table(task: str, results: dict[str, Any]) -> str:
    """A row per arm in Markdown: pass rates, in points over the outcome alone too, and the gradient's variance.

    Differences are taken seed by seed. The variance, per token generated and over that of the outcome alone, stands
    where the gradient has the same expectation; it is measured on the same completions, ± standard error, with the
    coefficient c as it is fitted and with half of it.

    Args:
        task (`str`), results (`dict[str, Any]`): As in [`title`].
    """
    arms = runs_by_arm(task, results)
    reference = arms[OUTCOME]
    variance = results["starts"][task]["variance"]
    headings = (
        *("whole run, %", "minus outcome only", "last quarter, %", "minus outcome only"),
        *("gradient variance", "with half of c"),
    )
    lines = [f"| pass rate | {' | '.join(headings)} |", "|---" * (len(headings) + 1) + "|"]
    first = [100 * run.pass_rate[0] for runs in arms.values() for run in runs.values()]
    lines.append(f"| first step | {interval(first).mean:.1f} |{' |' * (len(headings) - 1)}")
    for name, runs in arms.items():
        cells = []
        for start in (0.0, LAST):
            rates = {seed: 100 * run.mean_pass_rate(start) for seed, run in runs.items()}
            cells.append(str(interval(list(rates.values()))))
            differences = [
                rate - 100 * reference[seed].mean_pass_rate(start)
                for seed, rate in rates.items()
                if seed in reference and name != OUTCOME
            ]
            cells.append(interval(differences).text(signed=True) if differences else "")
        if name == OUTCOME:
            cells += ["1", ""]
        else:
            found = variance.get(name)
            cells += [_ratio(found), _ratio(found["half"])] if found else ["", ""]
        lines.append(f"| {ARMS[name].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(found: dict[str, float]) -> str:
    return f"{found['ratio']:.3f} ± {found['standard_error']:.3f}"


def conclusion(results: dict[str, Any]) -> str:
    """Sentence on the arms that do better or worse than the outcome alone, over the run.

    Args:
        results (`dict[str, Any]`): Of [`run_credit_study`].
    """
    texts = []
    for task in results["settings"]:
        rates = {
            arm: [100 * runs[seed].mean_pass_rate(0.0) for seed in sorted(runs)]
            for arm, runs in runs_by_arm(task, results).items()
        }
        found = {ARMS[arm].label: paired(own, rates[OUTCOME]) for arm, own in rates.items() if arm != OUTCOME}
        texts.append(compared(f"{TITLES[task]}, pass rate over the run minus outcome only's, in points", found))
    return " ".join(texts)


def draw(results: dict[str, Any], path: Path) -> Path:
    """The pass rate at the end of the runs, one panel per task: every seed, and the mean with its interval.

    Args:
        results (`dict[str, Any]`): Of [`run_credit_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    tasks = list(results["settings"])
    figure, panels = new_figure(1, len(tasks), 5.5 * len(tasks), 4.2, sharey=True)
    rows = range(len(ARMS))
    for axes, task in zip(panels, tasks, strict=True):
        for row, runs in zip(rows, runs_by_arm(task, results).values(), strict=True):
            ends = [100 * run.mean_pass_rate(LAST) for run in runs.values()]
            found = interval(ends)
            axes.plot(ends, [row] * len(ends), ".", color=COLORS[0], alpha=0.35)
            axes.errorbar(found.mean, row, xerr=found.half_width, fmt="o", color=COLORS[0], capsize=3)
        axes.set(title=TITLES[task], xlabel="pass rate in the last quarter, %", xlim=(0, 100))
    panels[0].set_yticks(list(rows), [arm.label.replace("`", "") for arm in ARMS.values()])
    panels[0].invert_yaxis()
    return save_figure(figure, path)
