"""How soon does a run reach an accuracy: ours, and stock TRL?

Question: what does a user gain who changes two lines? Arms: stock TRL with its default objective; stock TRL with both
switches of Dr. GRPO (`loss_type="dr_grpo"`, `scale_rewards="none"`); ours with the fast path off; ours; on long sums
also ours with rewards for steps. Tasks: the demo's short list sums; its long ones; `chain_sum` of reasoning-gym, 3 to
6 terms, behind a system prompt of reasoning-gym's, so that prompts have 299 to 311 tokens (a token per character).
Model, prompts, seeds and settings are the same in every arm of a task, and each arm ends at the same number of
generated tokens. The learning rate of an objective is that of three with the highest mean accuracy over the tokens,
on a seed that the study itself does not use. The three arms with the objective of Dr. GRPO share theirs: their
gradients are equal up to rounding (`trl-drgrpo check`). Measure: process CPU seconds and generated tokens until the
held-out accuracy first reaches 50, 80 and 90% of the highest final accuracy that an arm has on average; evaluations do
not count. A run in a process of its own on one thread; arms are interleaved. Rule: that of all studies, for the ratio
of the times of the same seed.
"""

import math
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from frame import Results, Row, Run, Study, compared, interval, main, mean, rows_of, table
from small_models import Evaluations, mean_height, small_trainer, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.demo import MODEL_DIR, build
from trl_drgrpo.demo.pace import draw_pace, reached
from trl_drgrpo.demo.task import (
    PROCESS_SETTINGS,
    build_tokenizer,
    line_reward,
    list_sum_reward,
    make_dataset,
)
from trl_drgrpo.process_rewards.continuations import ModelSampler, Request
from trl_drgrpo.rewards.functions.reasoning_gym import make_splits, reasoning_gym_reward

OURS, STOCK = (DrGRPOTrainer, DrGRPOConfig), (GRPOTrainer, GRPOConfig)
LINES: dict[str, Any] = {**PROCESS_SETTINGS, "step_reward_funcs": line_reward}
SWITCHES = {"loss_type": "dr_grpo", "scale_rewards": "none"}


@dataclass(frozen=True)
class Arm:
    """An arm: trainer and configuration, what it sets, and how it is called in tables and in the picture."""

    classes: tuple[type, type]
    fields: dict[str, Any]
    label: str
    short: str
    objective: str  # the arm whose learning rate it shares


ARMS = {
    "trl": Arm(STOCK, {}, "TRL, its default (`dapo`)", "TRL, default", "trl"),
    "switches": Arm(
        STOCK, SWITCHES, 'TRL, `loss_type="dr_grpo"`, `scale_rewards="none"`', "TRL, both switches", "ours"
    ),
    "off": Arm(
        OURS,
        {"micro_batching": "upstream", "fast_generation": False},
        'ours, `micro_batching="upstream"`, `fast_generation=False`',
        "ours, fast path off",
        "ours",
    ),
    "ours": Arm(OURS, {}, "ours", "ours", "ours"),
    "lines": Arm(OURS, LINES, "ours, a reward for each line", "ours, step rewards", "lines"),
}
SHARES = (50, 80, 90)  # percent of the highest final accuracy

FOUR = ["trl", "switches", "off", "ours"]
SETTINGS: dict[str, Any] = {
    "tasks": {  # most tokens of a completion; tokens that a run generates, problems held out
        "short": {
            "arms": FOUR,
            "learning_rates": [1e-4, 3e-4, 1e-3],
            "longest": 128,
            "tokens": 180_000,
            "held_out": 256,
        },
        "long": {
            "arms": [*FOUR, "lines"],
            "learning_rates": [3e-5, 1e-4, 3e-4],
            "longest": 128,
            "tokens": 300_000,
            "held_out": 128,
        },
        "chain": {
            "arms": FOUR,
            "learning_rates": [3e-5, 1e-4, 3e-4],
            "longest": 64,
            "tokens": 150_000,
            "held_out": 128,
        },
    },
    "prompts": 8,
    "num_generations": 8,
    "grid_seeds": [100],
    "different_prompts": 1600,
    "evaluations": 10,  # the one before training not counted
    "warm_up": [1800, 200],  # steps of imitation before chain sums: without the system prompt, and with it
}
TITLES = {"short": "short list sums", "long": "long list sums", "chain": "chain sums, long prompts"}
TASK, TERMS = "chain_sum", {"min_terms": "3", "max_terms": "6", "min_digits": "1", "max_digits": "1"}
APART = 1_000_000  # between the problems of two seeds, of demonstrations and of those held out


# Tasks --------------------------------------------------------------------------------------------------------------


def problems(task: str, size: int, seed: int | None) -> Any:
    """Rows of a task with their columns; those held out if `seed` is `None`."""
    if task != "chain":
        terms = build.TERMS if task == "long" else (3, 5)
        return make_dataset(size, "held_out" if seed is None else "train", seed or 0, terms)
    options = {**TERMS, "system_prompt": "simple"}
    place = 0 if seed is None else (2 + seed) * APART
    rows = make_splits(TASK, {**options, "size": str(size), "seed": str(place)}, with_test=False)["train"]
    if seed is None:
        return rows
    known = set(map(str, problems(task, SETTINGS["tasks"]["chain"]["held_out"], None)["prompt"]))
    return rows.filter(lambda prompt: str(prompt) not in known, input_columns="prompt")


def start(task: str, settings: dict[str, Any], folder: Path) -> Path:
    """The model that a task begins with, made unless it is there."""
    if task == "short":
        return MODEL_DIR
    if task == "long":
        ready = (folder / task / "model.safetensors").is_file()
        return folder / task if ready else build.warm_start(folder / task)
    demonstrations = _demonstrations(settings["warm_up"])
    letters = "".join(map(chr, range(33, 127))) + "ĠĊ"
    steps = sum(settings["warm_up"])
    return warm_start(
        folder / task, lambda _: next(demonstrations), steps, tokenizer=build_tokenizer(letters, 512), rows=ROWS
    )


ROWS = 48  # of a step of imitation


def _demonstrations(steps: Sequence[int]) -> Any:
    """Chain sums worked out term by term, half of the pairs of a digit and a term mostly to an incorrect result."""
    import reasoning_gym

    tokenizer, rng = build_tokenizer(), random.Random(0)
    system = [{"role": "system", "content": reasoning_gym.utils.SYSTEM_PROMPTS["simple"]}]
    numbers = {key: int(value) for key, value in TERMS.items()}
    made = reasoning_gym.create_dataset(TASK, size=ROWS * sum(steps), seed=APART, **numbers)
    for at, row in enumerate(made):
        chat = [*system[: at >= ROWS * steps[0]], {"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        yield [(prompt, False), (_worked_out(row["metadata"]["expression"], rng) + tokenizer.eos_token, True)]


def _worked_out(expression: str, rng: random.Random) -> str:
    first, *terms = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    total, lines = int(first), []
    for term in terms:
        value = build.add_with_gaps(total, int(term), rng)
        lines.append(f"{total}{term}={value}")
        total = value
    return "\n".join([*lines, f"<answer>{total}</answer>"])


def accuracy(model: Any, rows: Any, reward: Callable[..., list[float]], longest: int) -> float:
    """Share of problems that the model solves, sampled at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    ids = tokenizer.apply_chat_template(list(rows["prompt"]), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    sampler = ModelSampler(model, tokenizer, sampled, batch_size=128)
    found = sampler([Request(tuple(prefix), 1, longest, True, 0) for prefix in ids])
    texts = tokenizer.batch_decode([one.token_ids for [one] in found], skip_special_tokens=True)
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    return round(statistics.fmean(reward(completions=texts, **columns)), 4)


# Runs ---------------------------------------------------------------------------------------------------------------


def train(
    rates: dict[tuple[str, str], float] | None,
    settings: dict[str, Any],
    folder: Path,
    seed: int,
    task: str,
    arm: str,
    rate: float | None = None,
    arms: Mapping[str, Arm] = ARMS,
) -> list[Row]:
    """Train one arm with one seed until the task's tokens are generated.

    Returns:
        `list[dict]`: One row: `learning_rate`; per evaluation `tokens`, `seconds` of CPU time and `accuracy`;
            optimizer `steps`; `mean_norm`, of gradients before they are clipped.
    """
    own, kind = settings["tasks"][task], arms[arm]
    rate = rates[task, kind.objective] if rates else rate
    model_dir, outcome = start(task, settings, folder), reasoning_gym_reward if task == "chain" else list_sum_reward
    measured = partial(accuracy, rows=problems(task, own["held_out"], None), reward=outcome, longest=own["longest"])
    run: Row = {"task": task, "arm": arm, "seed": seed, "learning_rate": rate, "tokens": [0], "seconds": [0.0]}
    run["pass_rate"] = [measured(AutoModelForCausalLM.from_pretrained(model_dir))]
    evaluations = Evaluations(run, own["tokens"], settings["evaluations"], measured)

    def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        evaluations.written += sum(map(len, completion_ids))
        return outcome([completion[0]["content"] for completion in completions], **columns)

    trainer = small_trainer(
        model_dir,
        folder / f"{task}-{arm}-{seed}",
        reward,
        problems(task, settings["different_prompts"], seed),
        settings["prompts"],
        settings["num_generations"],
        kind.classes,
        seed=seed,
        learning_rate=rate,
        max_completion_length=own["longest"],
        **{"max_steps": 10_000, **kind.fields},
    )
    trainer.add_callback(evaluations)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return [run | {"steps": len(norms), "mean_norm": round(statistics.fmean(norms), 3)}]


def measure(run: Run) -> None:
    settings = run.settings
    for task in settings["tasks"]:
        run.once(f"start_{task}", partial(_started, task, settings, run.folder))
    calls = [
        (seed, task, arm, rate)
        for seed, task in product(settings["grid_seeds"], settings["tasks"])
        for rate, arm in product(settings["tasks"][task]["learning_rates"], settings["tasks"][task]["arms"])
        if ARMS[arm].objective == arm
    ]
    run.each("grid", ("seed", "task", "arm", "learning_rate"), calls, partial(train, None))
    calls = [
        (s, task, arm) for s in run.seeds for task in settings["tasks"] for arm in settings["tasks"][task]["arms"]
    ]
    run.each("runs", ("seed", "task", "arm"), calls, partial(train, best_rates(run.results)))


def _started(task: str, settings: dict[str, Any], folder: Path) -> str:
    return start(task, settings, folder).name


def best_rates(results: Results) -> dict[tuple[str, str], float]:
    """The learning rate of each task and objective."""
    heights: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in results["grid"]:
        rates = heights.setdefault((row["task"], row["arm"]), {})
        rates.setdefault(row["learning_rate"], []).append(mean_height(row, row["tokens"][-1]))
    return {key: max(rates, key=lambda rate: statistics.fmean(rates[rate])) for key, rates in heights.items()}


# Times --------------------------------------------------------------------------------------------------------------


def by_arm(results: Results, task: str) -> dict[str, list[Row]]:
    """The runs of each arm of a task, ordered by seed."""
    return {arm: rows_of(results, task=task, arm=arm) for arm in results["settings"]["tasks"][task]["arms"]}


def target(results: Results, task: str, share: int) -> float:
    """A share, in percent, of the highest final accuracy that an arm has on average."""
    final = (statistics.fmean(run["pass_rate"][-1] for run in runs) for runs in by_arm(results, task).values())
    return share / 100 * max(final)


def times(results: Results, task: str, share: int, x: str = "seconds") -> dict[str, list[float]]:
    """Of each arm, by seed, what it took to reach a share of the highest final accuracy."""
    goal = target(results, task, share)
    return {arm: [reached(run, goal, x) for run in runs] for arm, runs in by_arm(results, task).items()}


def ratios(results: Results, task: str, share: int, x: str = "seconds") -> dict[str, list[float]]:
    """The same of each other arm over ours, of the seeds with which both got there on the way."""
    found = times(results, task, share, x)
    own = found.pop("ours")
    both = {arm: [(a, b) for a, b in zip(each, own, strict=True) if a + b < math.inf] for arm, each in found.items()}
    return {arm: [a / b for a, b in pairs if b] for arm, pairs in both.items()}


def spread(values: Sequence[float], decimals: int = 0, unit: float = 1) -> str:
    """Median, least and most; and how many never got there."""
    if not any(values):
        return "there from the start" if values else ""
    least, middle, most = min(values), statistics.median(values), max(values)
    said = [f"{value / unit:.{decimals}f}" if value < math.inf else "never" for value in (middle, least, most)]
    never = sum(value == math.inf for value in values)
    return f"{said[0]} ({said[1]} to {said[2]})" + (f", {never} of {len(values)} never" if never else "")


def report(results: Results) -> list[str]:
    rates, texts = best_rates(results), []
    for task in results["settings"]["tasks"]:
        runs, goal = by_arm(results, task), {share: target(results, task, share) for share in SHARES}
        per = {share: times(results, task, share) for share in SHARES}
        tokens = times(results, task, 80, "tokens")
        head = ["arm", "learning rate", "steps", "final accuracy, %"]
        head += [f"CPU s to {100 * goal[share]:.0f}%" for share in SHARES] + [f"1000 tokens to {100 * goal[80]:.0f}%"]
        rows = [
            [
                ARMS[arm].label,
                f"{rates[task, ARMS[arm].objective]:.0e}",
                mean(run["steps"] for run in each),
                str(interval(100 * run["pass_rate"][-1] for run in each)),
                *(spread(per[share][arm], 1) for share in SHARES),
                spread(tokens[arm], 0, 1000),
            ]
            for arm, each in runs.items()
        ]
        found = {share: ratios(results, task, share) for share in SHARES}
        others = [arm for arm in runs if arm != "ours"]
        title = f"{TITLES[task]}: time over ours, same seed"
        against = [[ARMS[arm].label, *(spread(found[share][arm], 2) for share in SHARES)] for arm in others]
        texts += [table(head, rows), table([title, *(f"to {100 * goal[share]:.0f}%" for share in SHARES)], against)]
    texts.append(_grid(results))
    return texts


def _grid(results: Results) -> str:
    """Mean and final accuracy of each learning rate that was tried."""
    rows = [
        [
            TITLES[row["task"]],
            ARMS[row["arm"]].label if row["arm"] != "ours" else "Dr. GRPO (ours)",
            f"{row['learning_rate']:.0e}",
            f"{100 * mean_height(row, row['tokens'][-1]):.1f}",
            f"{100 * row['pass_rate'][-1]:.1f}",
        ]
        for row in sorted(results["grid"], key=lambda row: (list(TITLES).index(row["task"]), row["arm"]))
    ]
    return table(["task", "objective", "learning rate", "mean accuracy, %", "final accuracy, %"], rows)


def conclude(results: Results) -> str:
    texts = []
    for task in results["settings"]["tasks"]:
        found = {ARMS[arm].label: interval(each) for arm, each in ratios(results, task, 80).items() if len(each) > 1}
        title = f"{TITLES[task].capitalize()}, time to 80% of the highest final accuracy, over ours"
        texts += [compared(title, found, even=1, decimals=2)] if found else []  # in miniature nothing is learned
    return " ".join(texts)


def draw(results: Results) -> Any:
    """Accuracy over CPU seconds, a panel per task."""
    panels = {}
    for task in results["settings"]["tasks"]:
        runs = by_arm(results, task)
        panels[TITLES[task]] = {ARMS[arm].short: runs[arm] for arm in SHOWN if arm in runs}
    return draw_pace(panels)


SHOWN = ("ours", "trl", "lines", "switches")


_SMALL = {"learning_rates": [1e-3], "longest": 16, "tokens": 500, "held_out": 8}
QUICK = {
    "tasks": {
        "short": {**SETTINGS["tasks"]["short"], **_SMALL, "arms": list(ARMS)},
        "chain": {**SETTINGS["tasks"]["chain"], **_SMALL, "arms": ["trl", "ours"]},
    },
    "prompts": 2,
    "num_generations": 4,
    "different_prompts": 16,
    "evaluations": 2,
    "warm_up": [2, 2],
}
STUDY = Study("pace", "pace", 5, SETTINGS, QUICK, measure, report, draw, conclude, dark=True)


if __name__ == "__main__":
    main(STUDY)
