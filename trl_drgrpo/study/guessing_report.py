"""Rung b as numbers, tables and plot: every arm with every seed, the one-step measurement before it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl_drgrpo.study.guessing import MAX_COMPLETION, guessing_rollout, make_prompts, verdict_reward, warm_start
from trl_drgrpo.study.intervals import interval
from trl_drgrpo.study.objectives import OBJECTIVES
from trl_drgrpo.study.tables import changes_as_dict
from trl_drgrpo.study.trajectories import ARMS, LAST, GuessingSettings, Trajectory, run_arm
from trl_drgrpo.versions import installed_versions

_MEASURED_ROWS, _MEASURED_BATCHES = 256, 12
DEFAULTS = GuessingSettings()
_COLUMNS = {"length_wrong": "wrong answers", "length_right": "right answers", "entropy": "entropy (nats)"}


def guessing_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    settings: GuessingSettings = DEFAULTS,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start the model, measure one step, and train every arm with every seed.

    Runs that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each run.
        work_dir (`Path`): For the model and the trainers.
        settings ([`GuessingSettings`]): Sizes of a run.
        on_run (`Callable`, *optional*): Told in a line what was done.

    Returns:
        `dict[str, Any]`: `settings`, `versions`, `one_step` and `runs`, what the file holds.
    """
    results: dict[str, Any] = {"settings": asdict(settings), "versions": installed_versions(), "one_step": None}
    kept = _kept(output, results)
    results |= {"one_step": kept.get("one_step"), "runs": kept.get("runs", [])}
    model_dir = work_dir / "model"
    if not (model_dir / "model.safetensors").is_file():
        warm_start(model_dir)
        on_run("the model is warm-started")
    if results["one_step"] is None:
        results["one_step"] = _one_step(model_dir, work_dir)
        _write(results, output)
        on_run("one step is measured")
    done = {(run["arm"], run["seed"]) for run in results["runs"]}
    for seed in seeds:
        for arm in ARMS:
            if (arm, seed) in done:
                continue
            trajectory = run_arm(arm, seed, model_dir, work_dir / f"{arm}-{seed}", settings)
            results["runs"].append(trajectory.as_dict())
            _write(results, output)
            wrong, right = trajectory.end("length_wrong"), trajectory.end("length_right")
            on_run(f"{OBJECTIVES[arm].label}, seed {seed}: wrong {wrong:.1f}, right {right:.1f} tokens at the end")
    return results


def _kept(output: Path, results: dict[str, Any]) -> dict[str, Any]:
    try:
        earlier = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return earlier if all(earlier.get(key) == results[key] for key in ("settings", "versions")) else {}


def _write(results: dict[str, Any], output: Path) -> None:
    output.write_text(json.dumps(results) + "\n", encoding="utf-8")


def _one_step(model_dir: Path, work_dir: Path) -> dict[str, Any]:
    from trl_drgrpo.config import DrGRPOConfig
    from trl_drgrpo.study.probe import measure_model
    from trl_drgrpo.trainer import DrGRPOTrainer

    args = DrGRPOConfig(
        output_dir=str(work_dir / "one_step"),
        per_device_train_batch_size=_MEASURED_ROWS,
        num_generations=GuessingSettings.num_generations,
        max_completion_length=MAX_COMPLETION,
        use_cpu=True,
        bf16=False,
        report_to="none",
        run_log=False,
    )
    trainer = DrGRPOTrainer(
        model=str(model_dir),
        reward_funcs=verdict_reward,
        args=args,
        train_dataset=make_prompts(_MEASURED_ROWS * _MEASURED_BATCHES, seed=0),
        rollout_func=guessing_rollout(0),
    )
    return changes_as_dict(measure_model(trainer, _MEASURED_BATCHES))


def trajectories(results: dict[str, Any]) -> list[Trajectory]:
    """The runs of a results file."""
    return [Trajectory(**run) for run in results["runs"]]


def table(results: dict[str, Any]) -> str:
    """Lengths and entropy over the last steps as a Markdown table, mean and 95% interval over seeds."""
    runs = trajectories(results)
    start = {name: interval([getattr(run, name)[0] for run in runs]) for name in ("length_wrong", "length_right")}
    lines = [
        f"| mean of the last {LAST} steps | {' | '.join(_COLUMNS.values())} | pass rate | tokens written |",
        "|---" * (len(_COLUMNS) + 3) + "|",
        f"| at the first step | {start['length_wrong'].mean:.1f} | {start['length_right'].mean:.1f} | | | |",
    ]
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm]
        cells = [str(interval([run.end(name) for run in own])) for name in ("length_wrong", "length_right")]
        entropy = interval([run.end("entropy") for run in own])
        cells.append(f"{entropy.mean:.2f} ± {entropy.half_width:.2f}")
        rate, tokens = interval([run.end("pass_rate") for run in own]), interval([run.tokens / 1000 for run in own])
        cells += [f"{rate.mean:.3f} ± {rate.half_width:.3f}", f"{tokens.mean:.0f} ± {tokens.half_width:.0f} thousand"]
        lines.append(f"| {OBJECTIVES[arm].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def one_step_table(results: dict[str, Any]) -> str:
    """The measurement before training as a Markdown table: tokens per update of unit length, ± standard error."""
    lines = ["| objective | right answers, tokens | wrong answers, tokens |", "|---|---|---|"]
    for name, objective in OBJECTIVES.items():
        found = results["one_step"]["changes"][name]
        cells = [
            f"{found[q]['value']:+.1f} ± {found[q]['standard_error']:.1f}" for q in ("length_right", "length_wrong")
        ]
        lines.append(f"| {objective.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> Path:
    """Lengths of right and wrong answers over the steps, one panel per arm: every seed, and their mean.

    Args:
        results (`dict[str, Any]`): Of [`guessing_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, arm in zip(figure.subplots(1, len(ARMS), sharey=True), ARMS, strict=True):
        own = [run for run in trajectories(results) if run.arm == arm]
        for name, colour, label in (("length_wrong", "#d55e00", "wrong"), ("length_right", "#0072b2", "right")):
            curves = np.array([getattr(run, name) for run in own])
            axes.plot(curves.T, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(np.nanmean(curves, axis=0), color=colour, linewidth=2, label=f"{label} answers")
        axes.set(title=OBJECTIVES[arm].label, xlabel="optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("mean length of the comment (tokens)")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    return path
