"""Single settings in the training of a pretrained chat model.

Question: which findings on tiny models show on a real one (SmolLM2-135M-Instruct, LoRA on all linear layers)? Arms,
each against plain training of the same task: a divisor ten times as large, and as its control a tenth of the learning
rate; a base in 4 bits (NF4); dynamic sampling; answers that fork after the first number; a reward for each line; the
share of the written lines that are correct, as the outcome. Tasks: the first letter of a word and two numbers as JSON,
as in `chat_model.py`; the first letters of two words, a line each. Every run ends at the same number of generated
tokens: those of groups that dynamic sampling drops count, and those that branches share count once. Measure: held-out
accuracy, sampled at temperature 1, as a mean over the tokens and at the end. Rule: that of all studies, for runs of
the same seed.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from frame import Interval, Results, Row, Run, Study, compared, interval, main, mean, paired, rows_of, table
from chat_model import (
    TASKS,
    accuracy,
    alone,
    is_correct,
    length_counts,
    start,
    take_peak,
    training_rows,
)
from small_models import Evaluations, mean_height, small_trainer

from trl_drgrpo import lora_preset
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.demo.smollm2 import smollm2_folder
from trl_drgrpo.demo.task import PROCESS_SETTINGS

SETTINGS: dict[str, Any] = {
    "tasks": {  # most tokens of an answer, tokens that a run generates
        "letter": {"longest": 6, "tokens": 800},
        "json": {"longest": 20, "tokens": 4_000},
        "lines": {"longest": 8, "tokens": 1_600},
    },
    "evaluations": 2,  # the one before training not counted
    "prompts": 2,
    "num_generations": 8,
    "different_prompts": 1024,
    "held_out": 24,
    "answers": 4,  # to each held-out question, in an evaluation
    "learning_rate": 3e-4,
}
QUICK = {
    "tasks": {"json": {"longest": 10, "tokens": 60}, "lines": {"longest": 4, "tokens": 40}},
    "evaluations": 1,
    "num_generations": 4,  # forks need so many
    "different_prompts": 20,  # dynamic sampling draws up to ten times two
    "held_out": 2,
    "answers": 1,
}


@dataclass(frozen=True)
class Arm:
    """An arm.

    Args:
        label (`str`): Its name in tables.
        fields (`dict`, *optional*): What it sets in the configuration.
        in_4_bits (`bool`, *optional*): Whether the base is quantized (NF4).
        lines (`str`, *optional*): `"steps"`: lines are rewarded beside the outcome; `"share"`: the share of the
            written lines that are correct is the outcome.
    """

    label: str
    fields: dict[str, Any] = field(default_factory=dict)
    in_4_bits: bool = False
    lines: str = ""


MAX_NORM = 1.0  # of a gradient, the default of `max_grad_norm`; longer ones are clipped
PLAIN = "plain"
ARMS: dict[str, dict[str, Arm]] = {
    "letter": {
        PLAIN: Arm("plain"),
        "divisor": Arm("divisor L = 60 in the place of 6", {"loss_normalizer": 60}),
        "rate": Arm("learning rate 3e-5 in the place of 3e-4", {"learning_rate": 3e-5}),
        "4 bits": Arm("base in 4 bits (NF4)", in_4_bits=True),
    },
    "json": {
        PLAIN: Arm("plain"),
        "dynamic": Arm("`dynamic_sampling: true`", {"dynamic_sampling": True}),
        "forks": Arm("`forks: 2`, after the first number", {"forks": 2, "step_separator": [","]}),
    },
    "lines": {
        PLAIN: Arm("plain: 1 if both lines are correct"),
        "share": Arm("the share of the written lines that are correct, as the outcome", lines="share"),
        "steps": Arm("plain, and 1 for each correct line", PROCESS_SETTINGS, lines="steps"),
    },
}


# Runs ---------------------------------------------------------------------------------------------------------------


class TokenBudget(Evaluations):
    """Evaluates at equal distances in tokens, ends the run at the last one, and measures its steps.

    The run gets the lists `step_seconds` of CPU time, `peak_bytes` and `grad_norms`, an entry per step.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_begun = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run["step_seconds"].append(round(time.process_time() - self.step_begun, 2))
        self.run["peak_bytes"].append(take_peak())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "grad_norm" in logs:
            self.run["grad_norms"].append(round(logs["grad_norm"], 4))
        super().on_log(args, state, control, logs=logs, **kwargs)

    def evaluate(self, model: Any) -> None:
        super().evaluate(model)
        take_peak()  # the evaluation's


def correct_lines(lines: Sequence[str], answer: str) -> list[float]:
    """Return 1 for each line that is the line of the answer at the same place, else 0.

    >>> correct_lines(["t\\n", "x\\n", "m"], "t\\nc")
    [1.0, 0.0, 0.0]
    """
    expected = answer.split("\n") + [""] * len(lines)
    return [float(line.strip().removesuffix(".") == right) for line, right in zip(lines, expected, strict=False)]


def reward_lines(steps: Sequence[Sequence[str]], answer: Sequence[str], **columns: Any) -> list[list[float]]:
    """Step reward: 1 for a line that is correct."""
    return [correct_lines(lines, expected) for lines, expected in zip(steps, answer, strict=True)]


def reward_share(texts: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Outcome reward: the share of the written lines that are correct. One correct line is enough for all of it."""
    steps = [text.strip().split("\n") for text in texts]
    return list(map(statistics.fmean, reward_lines(steps, answer)))


def shared_tokens(logs: Mapping[str, float], rows: int) -> float:
    """Return the tokens of a step that rows share with another one, as a negative number: all rows are counted."""
    unshared = logs.get("forks/sampled_token_frac", 1.0)
    return logs["completions/mean_length"] * rows * (unshared - 1)


def train(
    starts: Mapping[str, float], settings: dict[str, Any], folder: Path, seed: int, task: str, arm: str
) -> list[Row]:
    """Train one arm with one seed until the task's tokens are generated.

    Returns:
        `list[dict]`: One row: per evaluation `tokens`, `seconds` of CPU time and `pass_rate`; per step `step_seconds`,
            `peak_bytes` and `grad_norms`, before they are clipped; per call of the reward function `lengths`, the
            number and the tokens of correct and of incorrect answers; optimizer `steps`.
    """
    options = ARMS[task][arm]
    longest = settings["tasks"][task]["longest"]
    run: Row = {"task": task, "arm": arm, "seed": seed, "tokens": [0], "seconds": [0.0], "pass_rate": [starts[task]]}
    run |= {"step_seconds": [], "peak_bytes": [], "grad_norms": [], "lengths": []}
    budget = TokenBudget(
        run,
        settings["tasks"][task]["tokens"],
        settings["evaluations"],
        partial(accuracy, task=task, settings=settings),
        shared_tokens,
    )

    def reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **columns: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        correct = [is_correct(text, expected) for text, expected in zip(texts, answer, strict=True)]
        budget.written += sum(map(len, completion_ids))
        run["lengths"].append(length_counts(correct, completion_ids))
        if options.lines == "share":
            return reward_share(texts, answer)
        return list(map(float, correct))

    fields = {"learning_rate": settings["learning_rate"], **options.fields}
    if options.lines == "steps":
        fields["step_reward_funcs"] = reward_lines
    if options.in_4_bits:
        fields["quantization_config"] = lora_preset("qlora").quantization_config  # type: ignore[attr-defined]
    trainer = small_trainer(
        Path(smollm2_folder()),
        folder / f"{task}-{arm}-{seed}",
        reward,
        training_rows(task, settings, seed),
        settings["prompts"],
        settings["num_generations"],
        seed=seed,
        max_completion_length=longest,
        max_steps=10_000,
        peft_config=lora_preset("lora"),
        **fields,
    )
    trainer.add_callback(budget)
    take_peak()
    trainer.train()
    return [run | {"steps": len(run["step_seconds"])}]


def measure(run: Run) -> None:
    settings = run.settings
    starts = {task: run.once(f"start_{task}", partial(start, task, settings)) for task in settings["tasks"]}
    calls = [(seed, task, arm) for seed in run.seeds for task in settings["tasks"] for arm in ARMS[task]]
    run.each("runs", ("seed", "task", "arm"), calls, partial(alone, partial(train, starts)))


# Tables -------------------------------------------------------------------------------------------------------------


def mean_accuracy(run: Row, results: Results) -> float:
    """Mean accuracy over the tokens of a run, in percent."""
    return 100 * mean_height(run, results["settings"]["tasks"][run["task"]]["tokens"])


def final_accuracy(run: Row) -> float:
    """Accuracy at the end of a run, in percent."""
    return 100 * run["pass_rate"][-1]


def by_arm(results: Results, task: str) -> dict[str, list[Row]]:
    """The runs of each arm of a task, ordered by seed."""
    return {arm: rows for arm in ARMS[task] if (rows := rows_of(results, task=task, arm=arm))}


def against_plain(results: Results, task: str, arm: str) -> Interval:
    """Mean accuracy over the tokens, an arm's minus that of plain training, seed by seed, in points."""
    arms = by_arm(results, task)
    plain = {run["seed"]: mean_accuracy(run, results) for run in arms[PLAIN]}
    runs = [run for run in arms[arm] if run["seed"] in plain]
    return paired([mean_accuracy(run, results) for run in runs], [plain[run["seed"]] for run in runs])


def report(results: Results) -> list[str]:
    return [_task_table(results, task) for task in results["settings"]["tasks"]]


def _task_table(results: Results, task: str) -> str:
    head = [TASKS[task].title, "steps", "mean accuracy over the tokens, %", "minus plain, points"]
    head += ["accuracy halfway, %", "final accuracy, %"]
    head += ["CPU s a step", "peak memory of a step, GB", "gradient norm, median", "steps clipped"]
    rows = []
    for arm, runs in by_arm(results, task).items():
        norms = [norm for run in runs for norm in run["grad_norms"] if norm]
        difference = "" if arm == PLAIN else against_plain(results, task, arm).text(signed=True)
        rows.append(
            [
                ARMS[task][arm].label,
                mean(run["steps"] for run in runs),
                str(interval(mean_accuracy(run, results) for run in runs)),
                difference,
                str(interval(100 * run["pass_rate"][1] for run in runs)),
                str(interval(map(final_accuracy, runs))),
                str(interval(statistics.fmean(run["step_seconds"]) for run in runs)),
                interval(statistics.fmean(run["peak_bytes"]) / 1e9 for run in runs).text(2),
                f"{statistics.median(norms):.2f}" if norms else "no signal",
                str(sum(norm > MAX_NORM for norm in norms)),
            ]
        )
    return table(head, rows)


def conclude(results: Results) -> str:
    differences = {}
    for task in results["settings"]["tasks"]:
        for arm in by_arm(results, task):
            if arm != PLAIN:
                differences[f"{TASKS[task].title}: {ARMS[task][arm].label}"] = against_plain(results, task, arm)
    of_several_runs = {label: value for label, value in differences.items() if value.half_width < math.inf}
    if not of_several_runs:
        return ""
    return compared("Mean accuracy over the tokens, minus plain, in points", of_several_runs)


def draw(results: Results) -> Any:
    """Accuracy over generated tokens, a panel per task and a line per run."""
    tasks = results["settings"]["tasks"]
    figure, panels = new_figure(1, len(tasks), 4 * len(tasks), 3.4)
    for axes, task in zip(panels, tasks, strict=True):
        for (arm, runs), color in zip(by_arm(results, task).items(), COLORS, strict=False):
            for number, run in enumerate(runs):
                label = arm if number == 0 else None
                axes.plot(run["tokens"], [100 * rate for rate in run["pass_rate"]], color=color, label=label)
        axes.set_title(TASKS[task].title, loc="left")
        axes.set_xlabel("tokens")
        axes.legend()
    panels[0].set_ylabel("held-out accuracy, %")
    return figure


STUDY = Study("chat_settings", "chat_model", 2, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
