"""The study of forks from end to end, its tables and its plot."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import COLORS, new_figure, save_figure
from trl_drgrpo.labs.study.conclusions import compared
from trl_drgrpo.labs.study.credit_arms import OUTCOME
from trl_drgrpo.labs.study.forks_runs import (
    FLAT,
    FORKS,
    LEARNING,
    SETTINGS,
    STEPS,
    ForksRun,
    ForksSettings,
    make_stage,
    mean_gradients,
    measure,
    run_arm,
)
from trl_drgrpo.labs.study.intervals import Interval, interval
from trl_drgrpo.labs.study.markdown import markdown_table
from trl_drgrpo.labs.study.results_file import write_results
from trl_drgrpo.labs.study.resumable import Resumable
from trl_drgrpo.labs.study.signal_runs import interpolate, mean_height

REWARDS = {OUTCOME: "outcome", STEPS: "outcome and steps"}


def run_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    settings: ForksSettings = SETTINGS,
    jobs: int = 1,
    on_part: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start the model of each stage, train every arm with every seed, and measure every arm's gradients.

    Parts that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each part.
        work_dir (`Path`): For models and gradients.
        settings ([`ForksSettings`], *optional*): Sizes.
        jobs (`int`, *optional*, defaults to `1`): Parts at a time.
        on_part (`Callable`, *optional*): Called with a line of text after each part.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings`, `stages`, `runs`, `gradients` and `agreement`,
            as in the file.
    """
    study = Resumable("forks", seeds, asdict(settings), output, jobs, on_part)
    work_dir.mkdir(parents=True, exist_ok=True)
    parts: dict[str, tuple[Callable[..., list[dict[str, Any]]], tuple[str, ...], list[tuple[Any, ...]]]] = {
        "stages": (_stage_part, ("stage",), [(name,) for name in settings.stages]),
        "runs": (_run_part, ("forks", "rewards", "seed"), [(*arm, seed) for seed in seeds for arm in LEARNING]),
        "gradients": (
            _gradient_part,
            ("stage", "forks", "seed"),
            [(*arm, seed) for seed in seeds for arm in product(settings.stages, FORKS)],
        ),
    }
    stages: _Stages = {}
    for name, (function, keys, calls) in parts.items():
        study.each(name, keys, calls, partial(function, settings, stages, work_dir), partial(_told, name, keys))
        stages = {stage["stage"]: stage for stage in study.results["stages"]}
    study.results["agreement"] = _agreement(study.results, seeds, work_dir)
    write_results(study.results, output)
    return study.results


_Stages = dict[str, dict[str, Any]]


def _told(name: str, keys: Sequence[str], row: dict[str, Any]) -> str:
    return f"{name}: {', '.join(str(row[key]) for key in keys)}"


def _stage_part(settings: ForksSettings, stages: _Stages, work_dir: Path, name: str) -> list[dict[str, Any]]:
    return [make_stage(settings, name, work_dir)]


def _run_part(
    settings: ForksSettings, stages: _Stages, work_dir: Path, forks: str, rewards: str, seed: int
) -> list[dict[str, Any]]:
    return [asdict(run_arm(settings, stages[next(iter(settings.stages))], forks, rewards, seed, work_dir))]


def _gradient_part(
    settings: ForksSettings, stages: _Stages, work_dir: Path, stage: str, forks: str, seed: int
) -> list[dict[str, Any]]:
    return measure(settings, stages[stage], forks, seed, work_dir)


def _agreement(results: dict[str, Any], seeds: Sequence[int], work_dir: Path) -> list[dict[str, Any]]:
    """Agreement of each arm with the flat arm, both over all seeds: the cosine of the mean gradients, and by seed the
    `scale`, the length along the flat gradient over that gradient's own (1 if both estimate the same)."""
    found, settings = [], results["settings"]
    groups = len(seeds) * settings["prompts"] * settings["batches"]
    for stage, rewards in product(settings["stages"], REWARDS):
        flat = mean_gradients(work_dir, stage, FLAT, rewards, seeds).mean(dim=0)
        variance = interval([row["variance"] for row in _gradients(results, stage, FLAT, rewards)]).mean
        square = float(flat @ flat) - variance / groups  # the mean's own noise taken out
        for forks in FORKS:
            means = mean_gradients(work_dir, stage, forks, rewards, seeds)
            mean = means.mean(dim=0)
            cosine = float(mean @ flat / (mean.norm() * flat.norm()))
            scale = (means @ flat / square).tolist()
            found.append(
                {
                    "stage": stage,
                    "forks": forks,
                    "rewards": rewards,
                    "square": square,
                    "cosine": cosine,
                    "scale": scale,
                }
            )
    return found


def _gradients(results: dict[str, Any], stage: str, forks: str, rewards: str) -> list[dict[str, Any]]:
    """Gradients of an arm, ordered by seed."""
    key = (stage, forks, rewards)
    rows = [row for row in results["gradients"] if (row["stage"], row["forks"], row["rewards"]) == key]
    return sorted(rows, key=lambda row: row["seed"])


def label(forks: str) -> str:
    """The settings of an arm, as Markdown.

    Args:
        forks (`str`): A key of [`FORKS`].
    """
    fields = ((name, value) for name, value in FORKS[forks].items() if forks != FLAT)
    return ", ".join(f"`{name}: {value}`" for name, value in fields) or "flat"


def stage_title(stage: dict[str, Any], results: dict[str, Any]) -> str:
    """The line above the table of a stage.

    Args:
        stage (`dict[str, Any]`): Of the results.
        results (`dict[str, Any]`): Of [`run_study`].
    """
    rows = _gradients(results, stage["stage"], FLAT, OUTCOME)
    groups = results["settings"]["prompts"] * results["settings"]["batches"]
    threshold = f"threshold of the entropy {stage['threshold']:.3f}"
    return (
        f"{stage['pass_rate']:.1%} correct, {threshold}, {len(rows)} seeds of {groups} groups, mean and 95% interval"
    )


def variance_table(results: dict[str, Any], stage: str) -> str:
    """Variance of the gradient times tokens, a row per arm in Markdown.

    Over the squared length of the gradient, the first column with an interval is the number of tokens at which a
    gradient and its noise are equally long. In the second ratio to flat groups each row's tokens count, shared or
    not. `along` and `cosine` compare the mean gradient with that of flat groups.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        stage (`str`): The stage.
    """
    head = ["rewards", "groups", "tokens of a group", "thousand tokens to signal = noise", "over flat"]
    head += ["over flat, all rows' tokens", "along", "cosine"]
    rows = []
    for rewards, forks in product(REWARDS, FORKS):
        seeds, key = _gradients(results, stage, forks, rewards), (stage, forks, rewards)
        (agreed,) = (a for a in results["agreement"] if (a["stage"], a["forks"], a["rewards"]) == key)
        needed = [row["variance"] * row["tokens"] / agreed["square"] / 1000 for row in seeds]
        cells = [REWARDS[rewards], label(forks), f"{interval([row['tokens'] for row in seeds]).mean:.0f}"]
        cells.append(str(interval(needed)))
        if forks == FLAT:
            cells += ["1", "1", "1", "1"]
        else:
            cells += [over_flat(results, *key, tokens).text(2) for tokens in ("tokens", "all_tokens")]
            cells += [interval(agreed["scale"]).text(2), f"{agreed['cosine']:.2f}"]
        rows.append(cells)
    return markdown_table(head, rows)


def over_flat(results: dict[str, Any], stage: str, forks: str, rewards: str, tokens: str = "tokens") -> Interval:
    """Variance times tokens over that of flat groups: the ratio of the means over seeds, with a jackknife's interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        stage, forks, rewards (`str`): The arm.
        tokens (`str`, *optional*, defaults to `"tokens"`): Those sampled, or `"all_tokens"`.
    """
    both = zip(_gradients(results, stage, forks, rewards), _gradients(results, stage, FLAT, rewards), strict=True)
    costs = [(own["variance"] * own[tokens], flat["variance"] * flat[tokens]) for own, flat in both]
    own_sum, flat_sum = map(sum, zip(*costs, strict=True))
    ratio, count = own_sum / flat_sum, len(costs)
    return interval([count * ratio - (count - 1) * (own_sum - own) / (flat_sum - flat) for own, flat in costs])


def _runs(results: dict[str, Any], forks: str, rewards: str) -> list[ForksRun]:
    """Runs of an arm, ordered by seed."""
    runs = [ForksRun(**run) for run in results["runs"] if (run["forks"], run["rewards"]) == (forks, rewards)]
    return sorted(runs, key=lambda run: run.seed)


def learning_title(results: dict[str, Any]) -> str:
    """The line above the table of the runs.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    seeds, tokens = len({run["seed"] for run in results["runs"]}), results["settings"]["tokens"]
    return f"{tokens // 1000} thousand tokens a run, {seeds} seeds, mean and 95% interval"


def learning_table(results: dict[str, Any]) -> str:
    """Held-out pass rates in percent, and in points over flat groups with the same rewards and seed, as Markdown.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    tokens = results["settings"]["tokens"]
    measures: dict[str, Callable[[ForksRun], float]] = {
        "mean over the tokens": lambda run: 100 * mean_height(run.tokens, run.pass_rate, tokens),
        "all tokens": lambda run: 100 * interpolate(run.tokens, run.pass_rate, tokens),
    }
    head = ["rewards", "groups", "steps", "rows that fork, %"]
    head += [name for over in measures for name in (f"pass rate, {over}", "minus flat")]
    rows = []
    for forks, rewards in LEARNING:
        runs, flat = _runs(results, forks, rewards), _runs(results, FLAT, rewards)
        cells = [REWARDS[rewards], label(forks), f"{interval([run.steps for run in runs]).mean:.0f}"]
        cells.append(f"{interval([100 * sum(run.cut) / len(run.cut) for run in runs]).mean:.0f}")
        for rate in measures.values():
            cells.append(str(interval([rate(run) for run in runs])))
            found = interval([rate(own) - rate(its) for own, its in zip(runs, flat, strict=True)])
            cells.append("" if forks == FLAT else found.text(signed=True))
        rows.append(cells)
    return markdown_table(head, rows)


def conclusion(results: dict[str, Any]) -> str:
    """Sentence on the forks that have a smaller or a larger gradient variance than flat groups.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    texts = []
    for stage, rewards in product(results["stages"], REWARDS):
        found = {label(forks): over_flat(results, stage["stage"], forks, rewards) for forks in FORKS if forks != FLAT}
        title = f"{stage['pass_rate']:.0%} correct, {REWARDS[rewards]}: gradient variance at equal tokens, over flat"
        texts.append(compared(title, found, even=1.0, decimals=2))
    return " ".join(texts)


def draw(results: dict[str, Any], path: Path) -> Path:
    """Variance times tokens over that of flat groups, and pass rates over tokens: means over seeds.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure, (left, right) = new_figure(1, 2, 12, 4.2)
    arms = [forks for forks in FORKS if forks != FLAT]
    series = [(stage, rewards) for stage in results["stages"] for rewards in REWARDS]
    for place, ((stage, rewards), color) in enumerate(zip(series, COLORS, strict=False)):
        found = [over_flat(results, stage["stage"], forks, rewards) for forks in arms]
        left.errorbar(
            [each.mean for each in found],
            [row + 0.15 * (place - (len(series) - 1) / 2) for row in range(len(arms))],
            xerr=[each.half_width for each in found],
            fmt="o",
            capsize=3,
            color=color,
            label=f"{stage['pass_rate']:.0%} correct, {REWARDS[rewards]}",
        )
    left.axvline(1, color="gray", linewidth=1)
    left.set_yticks(range(len(arms)), [label(forks).replace("`", "") for forks in arms])
    left.invert_yaxis()
    left.set(xlabel="gradient variance x sampled tokens, over flat groups")
    tokens = results["settings"]["tokens"]
    grid = [tokens * part / 12 for part in range(13)]
    for (forks, rewards), color in zip(LEARNING, COLORS, strict=False):
        runs = _runs(results, forks, rewards)
        rates = [interval([interpolate(run.tokens, run.pass_rate, x) for run in runs]).mean for x in grid]
        name = f"{label(forks).replace('`', '')}, {REWARDS[rewards]}"
        right.plot([x / 1000 for x in grid], rates, "-" if rewards == OUTCOME else "--", color=color, label=name)
    right.set(xlabel="thousand sampled tokens", ylabel="held-out pass rate")
    return save_figure(figure, path)
