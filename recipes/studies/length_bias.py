"""The length bias in a small language model: the real trainers, one arm per objective, on three tasks.

Arms: TRL's `GRPOTrainer` with `loss_type="grpo"`, with its defaults and with `loss_type="dr_grpo"` (its std left on),
and `DrGRPOTrainer`. Model, prompts, seeds, steps and settings are the same in every arm. Measure: before training, the
change of the lengths by one update of each objective; curves during it, recorded from the completions that reach the
reward function, so in every arm alike; at the end the gap, incorrect answers minus correct ones, as a mean over the
last 20 steps. Rule: an objective shows the bias if its gap is above that of Dr. GRPO with the same seed.

The tasks are the files `guessing.py`, `arithmetic.py` and `verify.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import small_models
from frame import Interval, Results, Row, Run, Study, compared, interval, known, mean, paired, rows_of, table
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.check import bias
from trl_drgrpo.check.bias import OBJECTIVES, REFERENCE
from trl_drgrpo.check.stop_push import Push
from trl_drgrpo.common.drawing import ROLES, draw_trend, new_figure

ARMS: dict[str, tuple[tuple[type, type], dict[str, Any]]] = {  # classes and objective, under the keys of OBJECTIVES
    "grpo": ((GRPOTrainer, GRPOConfig), {"loss_type": "grpo", "scale_rewards": "group"}),
    "dapo": ((GRPOTrainer, GRPOConfig), {}),
    "dr_grpo_with_std": ((GRPOTrainer, GRPOConfig), {"loss_type": "dr_grpo"}),
    "dr_grpo": ((DrGRPOTrainer, DrGRPOConfig), {}),
}
SETTINGS: dict[str, Any] = {"steps": 200, "prompts": 16, "num_generations": 8, "learning_rate": 1e-4}
QUICK = {"steps": 2, "prompts": 2, "num_generations": 4, "warm_start": 2, "longest": 32}
LAST = 20  # steps whose mean is the end of a run
TRUE_VERDICTS = 0.995  # of a run's answers: below it a model does not know whether it is correct
_MOVED = 0.01  # a pass rate that moves less counts as the same
_CURVES = {  # heading and decimals
    "length_wrong": ("incorrect answers (tokens)", 1),
    "length_right": ("correct answers (tokens)", 1),
    "entropy": ("entropy (nats)", 2),
    "pass_rate": ("pass rate", 3),
    "verdicts": ("true verdicts", 4),
}


@dataclass(frozen=True)
class Task(small_models.Task):
    """A task and the model that starts on it.

    Args:
        warm_start_steps (`int`): Its steps.
        environment_tokens (`int`): Tokens of a completion that the environment writes.
        fixed_tokens (`int`): Tokens of a completion that the model writes and that the answer's length leaves out.
        verdict (`Callable`, *optional*): A second reward function, 1 for a true verdict on the own answer, else 0.
        verdict_weight, chance (`float`): Its weight, and the pass rate of a guess, which stays if nothing is learned.
        decisions (`Callable`, *optional*): `f(lengths, stopped)` -> decisions to go on or to stop in each row, where
            these are not its tokens.
        learnable (`bool`): Whether correct answers can be learned.
        rows, batches (`int`): Of the measurement of one update.
    """

    warm_start_steps: int = 0
    environment_tokens: int = 0
    fixed_tokens: int = 0
    verdict: Callable[..., list[float]] | None = None
    verdict_weight: float = 1.0
    chance: float = 0.0
    decisions: Callable[[Any, Any], Any] | None = None
    learnable: bool = False
    rows: int = 256
    batches: int = 12

    def trainer_on(
        self, reward: Any, folders: tuple[Path, Path], sizes: Mapping[str, Any], size: int, seed: int, **fields: Any
    ) -> Any:
        """A trainer; `reward` decides what is correct, as the task's own does. In miniature `sizes` have `longest`,
        tokens of a completion where the trainer generates by itself."""
        if self.rollout is None and "longest" in sizes:
            fields["max_completion_length"] = sizes["longest"]
        if self.verdict is not None:
            reward, fields["reward_weights"] = [reward, self.verdict], [1.0, self.verdict_weight]
        return self.trainer(folders, sizes, size, seed, reward, **fields)


def study(name: str, task: Task, seeds: int, **settings: Any) -> Study:
    """The study of a task; `settings` differ from [`SETTINGS`]."""
    settings = {**SETTINGS, **settings}
    return Study(name, "length_bias", seeds, settings, QUICK, partial(measure, task), partial(report, task), draw)


def measure(task: Task, run: Run) -> None:
    model = task.start(run.folder / "model", run.settings.get("warm_start", task.warm_start_steps))
    run.once("one_step", partial(one_step, task, run.settings, model, run.folder))
    run.each("runs", ("seed", "arm"), product(run.seeds, ARMS), partial(train, task))


def one_step(task: Task, settings: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Before training, the effect of one update of each objective, and its push on the decision to stop."""
    rows, batches = (16, 3) if "warm_start" in settings else (task.rows, task.batches)
    sizes = {**settings, "prompts": rows // settings["num_generations"]}
    trainer = task.trainer_on(task.reward, (model, folder / "one_step"), sizes, rows * batches, 0, trainer_seed=42)
    seen: list[bias.Rollouts] = []
    changes = bias.measure_model(trainer, batches, lambda rollouts, *batch: seen.append(rollouts))
    return bias.plain({**vars(changes), "pushes": bias.pushes(seen, task.decisions)})


def train(task: Task, settings: dict[str, Any], folder: Path, seed: int, arm: str) -> list[Row]:
    """Train one arm with one seed.

    Returns:
        `list[dict]`: One row. Curves per optimizer step: `length_right` and `length_wrong`, mean tokens of correct and
        of incorrect answers (`None` where there is none); `pass_rate`; `entropy` as the trainer logs it, in nats per
        token, that of `DrGRPOTrainer` over rows with an advantage; `tokens_by_step` that the model wrote; `verdicts`,
        share of answers with a true one. `tokens` and `seconds` (wall clock) are those of the run.
    """
    names = ("length_right", "length_wrong", "pass_rate", "entropy", "tokens_by_step", "verdicts")
    run: Row = {"arm": arm, "seed": seed, **{name: [] for name in names}}

    def recorded(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        rewards = task.reward(completions, **columns)
        written = [len(ids) - task.environment_tokens for ids in completion_ids]
        for correct, curve in ((1.0, "length_right"), (0.0, "length_wrong")):
            lengths = [n - task.fixed_tokens for n, reward in zip(written, rewards, strict=True) if reward == correct]
            run[curve].append(round(fmean(lengths), 4) if lengths else None)
        run["pass_rate"].append(round(fmean(rewards), 4))
        if task.verdict is not None:
            run["verdicts"].append(round(fmean(task.verdict(completions, **columns)), 4))
        run["tokens_by_step"].append(sum(written))
        return rewards

    classes, objective = ARMS[arm]
    folders, steps = (folder / "model", folder / f"{arm}-{seed}"), settings["steps"]
    fields = {"max_steps": steps, "classes": classes, **objective}
    trainer = task.trainer_on(recorded, folders, settings, settings["prompts"] * steps, seed, **fields)
    run["seconds"] = round(trainer.train().metrics["train_runtime"], 1)
    run["entropy"] = [round(entry["entropy"], 4) for entry in trainer.state.log_history if "entropy" in entry]
    return [{**run, "tokens": sum(run["tokens_by_step"])}]


# What the numbers say -----------------------------------------------------------------------------------------------


def end(run: Row, curve: str) -> float:
    """Mean of a curve over the last steps, those without a value left out."""
    values = [value for value in run[curve][-LAST:] if value is not None]
    return fmean(values) if values else float("nan")


def gap(run: Row) -> float:
    """Length of incorrect answers minus that of correct ones at the end."""
    return end(run, "length_wrong") - end(run, "length_right")


def smoothed(run: Row) -> list[float]:
    """Pass rate as a mean over the last [`LAST`] steps, from the first step that has as many (or the last one)."""
    rates = run["pass_rate"]
    return [fmean(rates[max(0, step - LAST) : step]) for step in range(min(LAST, len(rates)), len(rates) + 1)]


def tokens_until(run: Row, rate: float) -> int | None:
    """Tokens written until the smoothed pass rate first was this high; `None`: never."""
    written = list(accumulate(run["tokens_by_step"]))[-len(smoothed(run)) :]
    return next((tokens for tokens, found in zip(written, smoothed(run), strict=True) if found >= rate), None)


def by_arm(results: Results) -> dict[str, list[Row]]:
    """The runs of each arm, in the order of [`ARMS`], by seed."""
    return {arm: rows for arm in ARMS if (rows := rows_of(results, arm=arm))}


def minus_reference(results: Results, arm: str, measure: Callable[[Row], float]) -> Interval:
    """Differences from Dr. GRPO with the same seed."""
    reference = {run["seed"]: run for run in by_arm(results)[REFERENCE]}
    runs = [run for run in by_arm(results)[arm] if run["seed"] in reference]
    return paired([measure(run) for run in runs], [measure(reference[run["seed"]]) for run in runs])


def report(task: Task, results: Results) -> list[str]:
    texts = [_one_step_table(results, False), _one_step_table(results, True)]
    texts += [_ends_table(task, results), _differences_table(task, results)]
    if task.verdict is not None:
        pushes = results["one_step"]["pushes"]
        texts.append(bias.push_table({arm: {k: Push(**push) for k, push in of.items()} for arm, of in pushes.items()}))
        texts.append(_gap_table(results))
    return [*texts, conclude(task, results)]


def _one_step_table(results: Results, difference: bool) -> str:
    measured = results["one_step"]["differences_from_dr_grpo" if difference else "changes"]
    columns = {"incorrect answers, tokens": "length_wrong", "correct answers, tokens": "length_right"}
    columns |= {"pass rate, points": "pass_rate"}  # of a hundred
    rows = []
    for name, objective in OBJECTIVES.items():
        cells = []
        for quantity in columns.values():
            scale, found = 100 if quantity == "pass_rate" else 1, measured[name][quantity]
            value, error = (scale * known(found[key]) for key in ("value", "standard_error"))
            cells.append(f"{value:+.1f} ± {error:.1f}")
        if not (difference and name == REFERENCE):
            rows.append([objective.label, *cells])
    return table(["minus Dr. GRPO" if difference else "objective", *columns], rows)


def _curves(task: Task) -> dict[str, tuple[str, int]]:
    return {name: each for name, each in _CURVES.items() if name != "verdicts" or task.verdict is not None}


def _ends_table(task: Task, results: Results) -> str:
    """Where correct answers can be learned, the last column counts the tokens until the pass rate reached the best
    value of the worst run; else the pass rate is the same throughout, and all tokens count."""
    runs, curves = results["runs"], _curves(task)
    head = [f"mean of the last {LAST} steps", *(title for title, _ in curves.values()), "thousand tokens written"]
    level = int(100 * min(max(smoothed(run)) for run in runs)) / 100 if task.learnable else None
    head += [] if level is None else [f"thousand until {level:.2f} passed"]
    first = [mean([next(iter(run[name]), None) for run in runs], decimals) for name, (_, decimals) in curves.items()]
    rows = []
    for arm, own in by_arm(results).items():
        cells = [interval(end(run, name) for run in own).text(decimals) for name, (_, decimals) in curves.items()]
        cells.append(interval(run["tokens"] / 1000 for run in own).text(0))
        if level is not None:
            cells.append(interval((tokens_until(run, level) or run["tokens"]) / 1000 for run in own).text(0))
        rows.append([OBJECTIVES[arm].label, *cells])
    lines = table(head, rows).split("\n")
    lines.insert(2, f"| at the first step | {' | '.join(first)} |{' |' * (len(head) - 1 - len(first))}")
    return "\n".join(lines)


def _differences_table(task: Task, results: Results) -> str:
    curves, rows = _curves(task), []
    for arm in [arm for arm in by_arm(results) if arm != REFERENCE]:
        found = (minus_reference(results, arm, partial(end, curve=name)) for name in curves)
        decimals = (each for _, each in curves.values())
        rows.append(
            [OBJECTIVES[arm].label, *(each.text(n, signed=True) for each, n in zip(found, decimals, strict=True))]
        )
    return table(["minus Dr. GRPO, same seed", *(title for title, _ in curves.values())], rows)


def _gap_table(results: Results) -> str:
    rows = []
    for arm, runs in by_arm(results).items():
        against = "" if arm == REFERENCE else minus_reference(results, arm, gap).text(signed=True)
        rows.append([OBJECTIVES[arm].label, interval(map(gap, runs)).text(signed=True), against])
    return table(["incorrect minus correct answers (tokens)", "at the end", "minus Dr. GRPO, same seed"], rows)


def conclude(task: Task, results: Results) -> str:
    """Sentence on the objectives under which the bias shows, and on whether the runs met their conditions."""
    found = {arm: minus_reference(results, arm, gap) for arm in by_arm(results) if arm != REFERENCE}
    text = sentence(found)
    if task.verdict is None:
        return text
    runs = results["runs"]
    verdicts = [fmean(run["verdicts"]) for run in runs]
    seeds = sorted({run["seed"] for run in runs})  # arms of a seed share their prompts, so a seed is one observation
    rate = interval(fmean(end(run, "pass_rate") for run in runs if run["seed"] == seed) for seed in seeds)
    counts = min(verdicts) > TRUE_VERDICTS and abs(rate.mean - task.chance) < max(_MOVED, rate.half_width)
    return (
        f"{text} Verdicts were true in {100 * fmean(verdicts):.2f}% of the answers, {100 * min(verdicts):.2f}% in the "
        f"worst run; the pass rate was {rate.text(3)} at the end, chance being {task.chance:.3f}: the runs "
        f"{'count' if counts else 'do not count'}."
    )


def sentence(differences: Mapping[str, Interval]) -> str:
    """Sentence on the objectives under which the length bias shows.

    Args:
        differences (`Mapping[str, Interval]`): By objective, incorrect answers minus correct ones, minus the same
            under Dr. GRPO.
    """
    labels = {OBJECTIVES[name].label: found for name, found in differences.items()}
    shown = [label for label, found in labels.items() if found.mean > found.half_width]
    text = compared("Incorrect minus correct answers at the end, minus the same under Dr. GRPO, in tokens", labels)
    return f"{text} The length bias {'shows under ' + ' and '.join(shown) if shown else 'does not show'}."


def draw(results: Results) -> Any:
    """Lengths of correct and incorrect answers over the steps, one panel per arm: every seed, and their mean."""
    shown = by_arm(results)
    figure, panels = new_figure(1, len(shown), 3.25 * len(shown), 3.6, sharey=True)
    for axes, (arm, runs) in zip(panels, shown.items(), strict=True):
        for side, role in (("wrong", "incorrect"), ("right", "correct")):
            curves = np.array([run[f"length_{side}"] for run in runs], dtype=float)  # (seeds, steps)
            label = f"{role} answers" if axes is panels[0] else None
            draw_trend(axes, range(curves.shape[1]), curves.T, np.nanmean(curves, axis=0), ROLES[role], label)
        axes.set(title=OBJECTIVES[arm].label, xlabel="optimizer step")
    panels[0].set_ylabel("mean length (tokens)")
    return figure
