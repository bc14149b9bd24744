"""The study of prompts that carry signal from end to end, its tables and its plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.study.conclusions import compared, paired
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.markdown import markdown_table
from trl_drgrpo.labs.study.resumable import Resumable
from trl_drgrpo.labs.study.signal_arms import ARMS, FACTOR_OF, PLAIN, SETTINGS, SignalSettings
from trl_drgrpo.labs.study.signal_runs import SignalRun, run_arm

_ALSO_COMPARED = (("dynamic", FACTOR_OF), ("dynamic_raised", "plain_raised"))


def run_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    settings: SignalSettings = SETTINGS,
    jobs: int = 1,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train every arm from every start with every seed, those with a raised learning rate last.

    Runs that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each run.
        work_dir (`Path`): For the trainers.
        settings ([`SignalSettings`], *optional*): Sizes.
        jobs (`int`, *optional*, defaults to `1`): Runs at a time.
        on_run (`Callable`, *optional*): Called with a line of text after each run.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings` and `runs`, as in the file.
    """
    study = Resumable("signal", seeds, asdict(settings), output, jobs, on_run)
    calls = list(product(seeds, settings.starts, ARMS))
    for raised in (False, True):  # arms with a raised learning rate need the factor that another arm measures
        known = study.results.get("runs", [])
        factors = {(run["seed"], run["start"]): run["factor"] for run in known if run["arm"] == FACTOR_OF}
        study.each(
            "runs",
            ("seed", "start", "arm"),
            calls,
            partial(_run, settings, factors, work_dir),
            _told,
            lambda seed, start, arm, raised=raised: ARMS[arm].raised == raised,
        )
    return study.results


def _run(
    settings: SignalSettings,
    factors: Mapping[tuple[int, str], float],
    work_dir: Path,
    seed: int,
    start: str,
    arm: str,
) -> list[dict[str, Any]]:
    folder = work_dir / f"{start}-{arm}-{seed}"
    return [asdict(run_arm(settings, start, arm, seed, folder, factors.get((seed, start))))]


def _told(row: dict[str, Any]) -> str:
    run = SignalRun(**row)
    rates = " ".join(f"{rate:.2f}" for rate in run.pass_rate)
    return f"{run.start}, {run.arm}, seed {run.seed}: pass rate {rates}, {run.steps} steps, {run.seconds[-1]:.0f} s"


def complete_seeds(results: dict[str, Any], start: str) -> list[int]:
    """Seeds with which every arm has run.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): The start.
    """
    found: dict[int, set[str]] = {}
    for run in results["runs"]:
        if run["start"] == start:
            found.setdefault(run["seed"], set()).add(run["arm"])
    return sorted(seed for seed, arms in found.items() if arms == set(ARMS))


def _by_arm(results: dict[str, Any], start: str) -> dict[str, list[SignalRun]]:
    """The runs of each arm, ordered by seed, of seeds that are complete."""
    seeds = complete_seeds(results, start)
    runs = [SignalRun(**run) for run in results["runs"] if run["start"] == start and run["seed"] in seeds]
    return {arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in ARMS}


def _scores(results: dict[str, Any], start: str) -> dict[str, dict[str, list[float]]]:
    """For each quantity and arm, percentages by seed."""
    arms, tokens = _by_arm(results, start), results["settings"]["starts"][start]["tokens"]
    shortest = [min(run.seconds[-1] for run in runs) for runs in zip(*arms.values(), strict=True)]  # by seed
    measures: dict[str, Callable[[SignalRun, float], float]] = {
        "half of the tokens": lambda run, _: run.pass_rate_at(tokens / 2),
        "all tokens": lambda run, _: run.pass_rate_at(tokens),
        "mean over the tokens": lambda run, _: run.mean_pass_rate(tokens),
        "same CPU time": lambda run, seconds: run.pass_rate_after(seconds),
    }
    return {
        name: {
            arm: [100 * measure(run, seconds) for run, seconds in zip(runs, shortest, strict=True)]
            for arm, runs in arms.items()
        }
        for name, measure in measures.items()
    }


def table(results: dict[str, Any], start: str) -> str:
    """Costs and final pass rates of the runs from a start, as a Markdown table: mean and 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): The start.
    """
    scores = _scores(results, start)
    head = ["batches", "learning rate", "steps", "live groups, %", "CPU s", *(f"pass rate, {name}" for name in scores)]
    rows = []
    for arm, runs in _by_arm(results, start).items():
        cells = [
            ARMS[arm].label,
            f"{interval([run.learning_rate for run in runs]).mean:.1e}",
            f"{interval([run.steps for run in runs]).mean:.0f}",
            f"{interval([100 * run.live_share for run in runs]).mean:.0f}",
            f"{interval([run.seconds[-1] for run in runs]).mean:.0f}",
            *(str(interval(by_arm[arm])) for by_arm in scores.values()),
        ]
        rows.append(cells)
    return markdown_table(head, rows)


def difference_table(results: dict[str, Any], start: str) -> str:
    """Differences of the same pass rates, seed by seed, in points, as a Markdown table: mean and 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): The start.
    """
    scores = _scores(results, start)
    rows = []
    for arm, other in [*((arm, PLAIN) for arm in ARMS if arm != PLAIN), *_ALSO_COMPARED]:
        cells = [paired(by_arm[arm], by_arm[other]).text(signed=True) for by_arm in scores.values()]
        rows.append([f"{ARMS[arm].label} minus {ARMS[other].label}", *cells])
    return markdown_table(["difference, same seed", *scores], rows)


def factor_sentence(results: dict[str, Any], start: str) -> str:
    """The factor that is hidden in DAPO's mean, and its range over seeds.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): The start.
    """
    factors = [run.factor for run in _by_arm(results, start)[FACTOR_OF] if run.factor is not None]
    return f"{interval(factors).mean:.2f} on average ({min(factors):.2f} to {max(factors):.2f})"


def conclusion(results: dict[str, Any]) -> str:
    """Sentence on the arms that do better or worse than plain sampling, over the tokens.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    texts = []
    for name, start in results["settings"]["starts"].items():
        rates = _scores(results, name)["mean over the tokens"]
        found = {ARMS[arm].label: paired(rates[arm], rates[PLAIN]) for arm in ARMS if arm != PLAIN}
        title = f"{start['title'].capitalize()}, pass rate over the tokens minus plain sampling's, in points"
        texts.append(compared(title, found))
    return " ".join(texts)


def draw(results: dict[str, Any], path: Path) -> Path:
    """Pass rates over tokens and over time, a row of panels per start: means over seeds.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    starts = results["settings"]["starts"]
    figure, panels = new_figure(len(starts), 2, 11, 3.8 * len(starts), sharey="row")
    colors = (*COLORS, "#000000")
    for row, start in enumerate(starts):
        over_tokens, over_time = panels[2 * row : 2 * row + 2]
        for (arm, runs), color in zip(_by_arm(results, start).items(), colors, strict=True):
            dash = "--" if ARMS[arm].raised else "-"
            label = ARMS[arm].label.replace("`", "")
            tokens = _grid(starts[start]["tokens"])
            seconds = _grid(min(run.seconds[-1] for run in runs))
            rates = [interval([run.pass_rate_at(x) for run in runs]).mean for x in tokens]
            over_tokens.plot([x / 1000 for x in tokens], rates, dash, color=color, label=None if row else label)
            rates = [interval([run.pass_rate_after(x) for run in runs]).mean for x in seconds]
            over_time.plot(seconds, rates, dash, color=color)
        over_tokens.set(title=starts[start]["title"], xlabel="thousand generated tokens", ylabel="held-out pass rate")
        over_time.set(title=starts[start]["title"], xlabel="CPU time (s)")
    return save_figure(figure, path)


def _grid(end: float, parts: int = 12) -> list[float]:
    return [end * part / parts for part in range(parts + 1)]
