"""The study of step credit from end to end, in parts that an interrupted study does not repeat."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl_drgrpo.labs.provenance import provenance, study_command
from trl_drgrpo.labs.study.credit_arms import ARMS
from trl_drgrpo.labs.study.credit_runs import run_arm
from trl_drgrpo.labs.study.credit_tasks import TASKS
from trl_drgrpo.labs.study.credit_variance import measure_variance
from trl_drgrpo.labs.study.resumable import in_processes

MEASURED_BATCHES = 40


def run_credit_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    jobs: int = 1,
    on_part: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start each task's model, train its process reward model, measure the variance, train every arm and seed.

    Each task, and each task with a seed, has its own file in `work_dir`, written after each run; parts that are there
    are kept.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each task.
        output (`Path`): JSON file, written after each part.
        work_dir (`Path`): For models and parts.
        jobs (`int`, *optional*, defaults to `1`): Parts at a time, in processes of their own if more than one.
        on_part (`Callable`, *optional*): Called with a line of text after each part.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings`, `starts` and `runs`, as in the file.
    """
    results: dict[str, Any] = {**provenance(study_command("credit", len(seeds), jobs)), "settings": settings()}
    results |= {"starts": {}, "runs": []}
    work_dir.mkdir(parents=True, exist_ok=True)
    for start in in_processes(make_start, [(name, work_dir) for name in TASKS], jobs):
        results["starts"][start["task"]] = start
        on_part(f"{TASKS[start['task']].title}: the models stand, the variance is measured")
    order = [(task, arm) for task in TASKS for arm in ARMS]
    for runs in in_processes(run_seed, [(name, seed, work_dir) for seed in seeds for name in TASKS], jobs):
        results["runs"] = sorted(
            [*results["runs"], *runs], key=lambda run: (order.index((run["task"], run["arm"])), run["seed"])
        )
        output.write_text(json.dumps(results) + "\n", encoding="utf-8")
        on_part(f"{TASKS[runs[0]['task']].title}, seed {runs[0]['seed']}: {len(runs)} runs")
    return results


def settings() -> dict[str, dict[str, Any]]:
    """The sizes of each task that its numbers depend on."""
    names = ("tokens", "prompts", "num_generations", "learning_rate", "prm_rows")
    return {name: {key: getattr(task, key) for key in names} for name, task in TASKS.items()}


def make_start(name: str, work_dir: Path) -> dict[str, Any]:
    """Makes the common start of all runs of a task.

    Args:
        name (`str`): A key of [`TASKS`].
        work_dir (`Path`): Has, or gets, its folder and file.

    Returns:
        `dict[str, Any]`: `task`, `settings`, `prm` (its quality) and `variance`.
    """
    task, folder, file = TASKS[name], work_dir / name, work_dir / f"{name}.json"
    start = _read(file)
    if start and start["settings"] == settings()[name]:
        return start
    task.warm_start(folder / "model")
    start = {"task": name, "settings": settings()[name], "prm": task.train_prm(folder / "model", folder / "prm")}
    prm = task.load_prm(folder / "prm")
    start["variance"] = measure_variance(task, MEASURED_BATCHES, folder / "model", folder / "variance", prm)
    _write(start, file)
    return start


def run_seed(name: str, seed: int, work_dir: Path) -> list[dict[str, Any]]:
    """Every arm of a task with one seed.

    Args:
        name (`str`): A key of [`TASKS`].
        seed (`int`): Seed.
        work_dir (`Path`): Has the files of [`make_start`].

    Returns:
        `list[dict[str, Any]]`: A [`CreditRun`] each, as plain types.
    """
    task, folder, file = TASKS[name], work_dir / name, work_dir / f"{name}-{seed}.json"
    part = _read(file)
    if part is None or part["settings"] != settings()[name]:
        part = {"settings": settings()[name], "runs": []}
    prm = task.load_prm(folder / "prm")
    for arm in ARMS:
        if arm not in {run["arm"] for run in part["runs"]}:
            run = run_arm(task, arm, seed, folder / "model", folder / f"{arm.replace('/', '-')}-{seed}", prm)
            part["runs"].append(asdict(run))
            _write(part, file)
    return part["runs"]


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write(part: dict[str, Any], file: Path) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(part) + "\n", encoding="utf-8")
    partial.replace(file)
