"""A rung as numbers, tables and plot: every arm with every seed, the one-step measurement before it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_drgrpo.common.drawing import ROLES, draw_trend, new_figure, save_figure
from trl_drgrpo.features.diagnostics.stop_push import Push
from trl_drgrpo.labs.study.conclusions import length_bias
from trl_drgrpo.labs.study.direction import REFERENCE, Rollouts
from trl_drgrpo.labs.study.intervals import Interval, interval
from trl_drgrpo.labs.study.markdown import markdown_table
from trl_drgrpo.labs.study.objectives import OBJECTIVES
from trl_drgrpo.labs.study.resumable import Resumable
from trl_drgrpo.labs.study.tables import changes_as_dict, push_table, pushes, pushes_as_dict
from trl_drgrpo.labs.study.trajectories import ARMS, LAST, Rung, Trajectory, run_arm

TRUE_VERDICTS = 0.995  # of a run's answers: below it a model does not know whether it is correct
_MOVED = 0.01  # a pass rate that moves less counts as the same
_CURVES = {  # heading and decimals
    "length_wrong": ("incorrect answers (tokens)", 1),
    "length_right": ("correct answers (tokens)", 1),
    "entropy": ("entropy (nats)", 2),
    "pass_rate": ("pass rate", 3),
    "verdicts": ("true verdicts", 4),
}


def run_study(
    rung: Rung,
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    jobs: int = 1,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start the model, measure one step, and train every arm with every seed.

    Runs that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        rung ([`Rung`]): The rung to study.
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each run.
        work_dir (`Path`): For the model and the trainers.
        jobs (`int`, *optional*, defaults to `1`): Runs at a time, in processes of their own if more than one.
        on_run (`Callable`, *optional*): Called with a line of text after each run.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings`, `one_step` and `runs`, as in the file.
    """
    study = Resumable(rung.name, seeds, asdict(rung.settings), output, jobs, on_run)
    model_dir = work_dir / "model"
    if not (model_dir / "model.safetensors").is_file():
        rung.warm_start(model_dir)
        on_run("the model is warm-started")
    study.once("one_step", partial(_one_step, rung, model_dir, work_dir))
    calls = list(product(seeds, ARMS))
    study.each("runs", ("seed", "arm"), calls, partial(_run, rung, model_dir, work_dir), _told)
    return study.results


def _run(rung: Rung, model_dir: Path, work_dir: Path, seed: int, arm: str) -> list[dict[str, Any]]:
    return [run_arm(rung, arm, seed, model_dir, work_dir / f"{arm}-{seed}").as_dict()]


def _told(row: dict[str, Any]) -> str:
    run = Trajectory.from_dict(row)
    lengths = f"incorrect {run.end('length_wrong'):.1f}, correct {run.end('length_right'):.1f} tokens at the end"
    return f"{OBJECTIVES[run.arm].label}, seed {run.seed}: {lengths}"


def _one_step(rung: Rung, model_dir: Path, work_dir: Path) -> dict[str, Any]:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.labs.study.probe import measure_model
    from trl_drgrpo.trainer import DrGRPOTrainer

    args = DrGRPOConfig(
        output_dir=str(work_dir / "one_step"),
        per_device_train_batch_size=rung.measured_rows,
        num_generations=rung.settings.num_generations,
        max_completion_length=rung.max_completion,
        reward_weights=rung.reward_weights,
        use_cpu=True,
        bf16=False,
        report_to="none",
        run_log=False,
    )
    trainer = DrGRPOTrainer(
        model=str(model_dir),
        reward_funcs=rung.rewards,
        args=args,
        train_dataset=rung.make_prompts(rung.measured_rows * rung.measured_batches, 0),
        rollout_func=rung.rollout(0) if rung.rollout else None,
    )
    seen: list[Rollouts] = []
    measured = changes_as_dict(
        measure_model(trainer, rung.measured_batches, lambda _, rollouts: seen.append(rollouts))
    )
    return measured | {"pushes": pushes_as_dict(pushes(seen, rung.decisions))}


def trajectories(results: dict[str, Any]) -> list[Trajectory]:
    """The runs of a results file."""
    return [Trajectory.from_dict(run) for run in results["runs"]]


def arms(results: dict[str, Any]) -> list[str]:
    """The arms of a results file, as keys of [`ARMS`] in their order."""
    ran = {run["arm"] for run in results["runs"]}
    return [arm for arm in ARMS if arm in ran]


def table(rung: Rung, results: dict[str, Any]) -> str:
    """Final values of each arm as a Markdown table: mean and 95% interval over seeds.

    Where correct answers can be learned, the last column counts the tokens until the pass rate reached the best value
    of the worst run; else the pass rate is the same throughout, and all tokens count.

    Args:
        rung ([`Rung`]): The rung of the results.
        results (`dict[str, Any]`): Of [`run_study`].
    """
    runs = trajectories(results)
    curves = _curves(rung)
    headings = [heading for heading, _ in curves.values()] + ["thousand tokens written"]
    level = int(100 * min(run.best() for run in runs)) / 100 if rung.learnable else None
    if level is not None:
        headings.append(f"thousand until {level:.2f} passed")
    start = [f"{interval([getattr(run, name)[0] for run in runs]).mean:.{n}f}" for name, (_, n) in curves.items()]
    lines = [
        f"| mean of the last {LAST} steps | {' | '.join(headings)} |",
        "|---" * (len(headings) + 1) + "|",
        f"| at the first step | {' | '.join(start)} |{' |' * (len(headings) - len(start))}",
    ]
    for arm in arms(results):
        own = [run for run in runs if run.arm == arm]
        cells = [interval([run.end(name) for run in own]).text(n) for name, (_, n) in curves.items()]
        cells.append(interval([run.tokens / 1000 for run in own]).text(0))
        if level is not None:
            cells.append(interval([(run.tokens_until(level) or run.tokens) / 1000 for run in own]).text(0))
        lines.append(f"| {OBJECTIVES[arm].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def difference_table(rung: Rung, results: dict[str, Any]) -> str:
    """The same ends as differences from Dr. GRPO, seed by seed, as a Markdown table: mean and 95% interval.

    Args:
        rung ([`Rung`]): The rung of the results.
        results (`dict[str, Any]`): Of [`run_study`].
    """
    runs = {(run.arm, run.seed): run for run in trajectories(results)}
    seeds = sorted(seed for arm, seed in runs if arm == REFERENCE)
    curves, rows = _curves(rung), []
    for arm in arms(results):
        if arm == REFERENCE:
            continue
        pairs = [(runs[arm, seed], runs[REFERENCE, seed]) for seed in seeds if (arm, seed) in runs]
        cells = [
            interval([own.end(name) - reference.end(name) for own, reference in pairs]).text(decimals, signed=True)
            for name, (_, decimals) in curves.items()
        ]
        rows.append([OBJECTIVES[arm].label, *cells])
    return markdown_table(["minus Dr. GRPO, same seed", *(heading for heading, _ in curves.values())], rows)


def gap_differences(results: dict[str, Any]) -> dict[str, Interval]:
    """Per arm, incorrect answers minus correct ones at the end, minus the same under Dr. GRPO with the same seed.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    gaps = {(run.arm, run.seed): run.gap() for run in trajectories(results)}
    return {
        arm: interval(
            [
                gap - gaps[REFERENCE, seed]
                for (own, seed), gap in gaps.items()
                if own == arm and (REFERENCE, seed) in gaps
            ]
        )
        for arm in arms(results)
        if arm != REFERENCE
    }


def gap_table(results: dict[str, Any]) -> str:
    """Incorrect answers minus correct ones at the end, in tokens, as a Markdown table: mean and 95% interval.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    differences, rows = gap_differences(results), []
    for arm in arms(results):
        own = interval([run.gap() for run in trajectories(results) if run.arm == arm])
        against = "" if arm == REFERENCE else differences[arm].text(signed=True)
        rows.append([OBJECTIVES[arm].label, own.text(signed=True), against])
    head = ["incorrect minus correct answers (tokens)", "at the end", "minus Dr. GRPO, same seed"]
    return markdown_table(head, rows)


def _curves(rung: Rung) -> dict[str, tuple[str, int]]:
    return {name: each for name, each in _CURVES.items() if name != "verdicts" or rung.verdict is not None}


def one_step_table(results: dict[str, Any], difference: bool = False) -> str:
    """The measurement before training as a Markdown table, per update of unit length, ± standard error.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        difference (`bool`, *optional*, defaults to `False`): Differences from Dr. GRPO. They are free of the noise
            that objectives share because they are measured on the same batches.
    """
    quantities = {"length_wrong": 1, "length_right": 1, "pass_rate": 100}  # and the scale: points of a hundred
    measured = results["one_step"]["differences_from_dr_grpo" if difference else "changes"]
    first = "minus Dr. GRPO" if difference else "objective"
    rows = []
    for name, objective in OBJECTIVES.items():
        if difference and name == REFERENCE:
            continue
        cells = [
            f"{scale * measured[name][q]['value']:+.1f} ± {scale * measured[name][q]['standard_error']:.1f}"
            for q, scale in quantities.items()
        ]
        rows.append([objective.label, *cells])
    return markdown_table([first, "incorrect answers, tokens", "correct answers, tokens", "pass rate, points"], rows)


def conclusion(rung: Rung, results: dict[str, Any]) -> str:
    """Sentence on the objectives under which the length bias shows, and on whether the runs met their conditions.

    Args:
        rung ([`Rung`]): The rung of the results.
        results (`dict[str, Any]`): Of [`run_study`].
    """
    text = length_bias(gap_differences(results))
    if rung.verdict is None:
        return text
    runs = trajectories(results)
    verdicts = [fmean(run.verdicts) for run in runs]
    seeds = sorted({run.seed for run in runs})  # arms of a seed share their prompts, so a seed is one observation
    rate = interval([fmean(run.end("pass_rate") for run in runs if run.seed == seed) for seed in seeds])
    counts = min(verdicts) > TRUE_VERDICTS and abs(rate.mean - rung.chance) < max(_MOVED, rate.half_width)
    return (
        f"{text} Verdicts were true in {100 * fmean(verdicts):.2f}% of the answers, {100 * min(verdicts):.2f}% in the "
        f"worst run; the pass rate was {rate.text(3)} at the end, chance being {rung.chance:.3f}: the runs "
        f"{'count' if counts else 'do not count'}."
    )


def pushes_table(results: dict[str, Any]) -> str:
    """The push on the decision to go on, before training, as a Markdown table.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    found = results["one_step"]["pushes"]
    return push_table({name: {kind: Push(**push) for kind, push in of.items()} for name, of in found.items()})


def draw(results: dict[str, Any], path: Path) -> Path:
    """Lengths of correct and incorrect answers over the steps, one panel per arm: every seed, and their mean.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    import numpy as np

    shown = arms(results)
    figure, panels = new_figure(1, len(shown), 3.25 * len(shown), 3.6, sharey=True)
    for axes, arm in zip(panels, shown, strict=True):
        own = [run for run in trajectories(results) if run.arm == arm]
        for side, role in (("wrong", "incorrect"), ("right", "correct")):
            curves = np.array([getattr(run, f"length_{side}") for run in own])  # (seeds, steps)
            label = f"{role} answers" if axes is panels[0] else None
            draw_trend(axes, range(curves.shape[1]), curves.T, np.nanmean(curves, axis=0), ROLES[role], label)
        axes.set(title=OBJECTIVES[arm].label, xlabel="optimizer step")
    panels[0].set_ylabel("mean length (tokens)")
    return save_figure(figure, path)
