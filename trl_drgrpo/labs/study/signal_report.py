"""The study of prompts that carry signal from end to end, its tables and its plot."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.provenance import provenance, study_command
from trl_drgrpo.labs.study.conclusions import compared, paired
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.results_file import earlier_results, write_results
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
    """Train every arm from every start with every seed, seed after seed.

    Runs that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each run.
        work_dir (`Path`): For the trainers.
        settings ([`SignalSettings`], *optional*): Sizes.
        jobs (`int`, *optional*, defaults to `1`): Runs at a time.
        on_run (`Callable`, *optional*): Told in a line what was done.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings` and `runs`, what the file holds.
    """
    results: dict[str, Any] = {**provenance(study_command("signal", len(seeds), jobs)), "settings": asdict(settings)}
    runs = results["runs"] = earlier_results(output, results).get("runs", [])
    place = {key: at for at, key in enumerate(product(seeds, settings.starts, ARMS))}
    done = {(run["seed"], run["start"], run["arm"]) for run in runs}
    for run in _runs([key for key in place if key not in done], runs, settings, work_dir, jobs):
        runs.append(asdict(run))
        runs.sort(key=lambda run: place.get((run["seed"], run["start"], run["arm"]), len(place)))
        write_results(results, output)
        rates = " ".join(f"{rate:.2f}" for rate in run.pass_rate)
        on_run(
            f"{run.start}, {run.arm}, seed {run.seed}: pass rate {rates}, {run.steps} steps, {run.seconds[-1]:.0f} s"
        )
    return results


def _runs(
    left: list[tuple[int, str, str]],
    known: Sequence[dict[str, Any]],
    settings: SignalSettings,
    work_dir: Path,
    jobs: int,
) -> Iterator[SignalRun]:
    """The runs as they end, each in a process of its own; those that need a factor wait for it."""
    factors = {(run["seed"], run["start"]): run["factor"] for run in known if run["arm"] == FACTOR_OF}
    under_way: set[Future[SignalRun]] = set()
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        while left or under_way:
            for key in list(left):
                seed, start, arm = key
                if len(under_way) < jobs and (not ARMS[arm].raised or (seed, start) in factors):
                    folder, factor = work_dir / f"{start}-{arm}-{seed}", factors.get((seed, start))
                    under_way.add(pool.submit(run_arm, settings, start, arm, seed, folder, factor))
                    left.remove(key)
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for run in (future.result() for future in ended):
                if run.arm == FACTOR_OF:
                    factors[run.seed, run.start] = run.factor
                yield run


def complete_seeds(results: dict[str, Any], start: str) -> list[int]:
    """Seeds of which every arm has run.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): Which start.
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
    """What the runs from a start took, and the pass rates they came to, as a Markdown table: mean and 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): Which start.
    """
    scores = _scores(results, start)
    head = ["batches", "learning rate", "steps", "live groups, %", "CPU s", *(f"pass rate, {name}" for name in scores)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm, runs in _by_arm(results, start).items():
        cells = [
            ARMS[arm].label,
            f"{interval([run.learning_rate for run in runs]).mean:.1e}",
            f"{interval([run.steps for run in runs]).mean:.0f}",
            f"{interval([100 * run.live_share for run in runs]).mean:.0f}",
            f"{interval([run.seconds[-1] for run in runs]).mean:.0f}",
            *(str(interval(by_arm[arm])) for by_arm in scores.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference_table(results: dict[str, Any], start: str) -> str:
    """Differences of the same pass rates, seed by seed, in points, as a Markdown table: mean and 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): Which start.
    """
    scores = _scores(results, start)
    lines = [f"| difference, same seed | {' | '.join(scores)} |", "|---" * (len(scores) + 1) + "|"]
    for arm, other in [*((arm, PLAIN) for arm in ARMS if arm != PLAIN), *_ALSO_COMPARED]:
        cells = []
        for by_arm in scores.values():
            found = interval([own - its for own, its in zip(by_arm[arm], by_arm[other], strict=True)])
            cells.append(f"{found.mean:+.1f} ± {found.half_width:.1f}")
        lines.append(f"| {ARMS[arm].label} minus {ARMS[other].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def factor_sentence(results: dict[str, Any], start: str) -> str:
    """The factor that is hidden in DAPO's mean, and its range over seeds.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        start (`str`): Which start.
    """
    factors = [run.factor for run in _by_arm(results, start)[FACTOR_OF] if run.factor is not None]
    return f"{interval(factors).mean:.2f} on average ({min(factors):.2f} to {max(factors):.2f})"


def conclusion(results: dict[str, Any]) -> str:
    """Which arms do better or worse than plain sampling, over the tokens.

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
