"""Scores for steps: paid as rewards, or subtracted as baselines?

Question: what does a step reward give, and what does a bad one cost, in either use? Arms: the outcome alone, and four
signals in three uses, from the same warm-started model, stopped at the same generated tokens. Signals: the rule, a
process reward model trained on the rule's labels (PRM), that model's scores shuffled among the steps of a batch, and
an adversary that gives 1 to incorrect steps, else 0. Uses: a reward with the credit of the DeepSeekMath paper, a
reward with `to_go`, and a baseline. As a baseline a signal has to estimate the outcome, not the last step, so there
the scores are multiplied up to each step, with `STEP_TO_COME` for every step that is still due: after an incorrect
step the value stays 0, after each correct one it rises.

Tasks: long list sums (`trl_drgrpo.demo.build`) and two turns with an environment (`two_turns.py`). Measures:
the pass rate of the training completions, and, where the gradient has the same expectation, its variance per token
generated at the start, on the same completions. Rule: an arm differs from the outcome alone if the interval of the
differences, seed by seed, leaves out 0.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any

import long_sums
import small_models
import two_turns
from frame import Results, Row, Run, Study, compared, interval, main, mean, paired, rows_of, table
from small_models import Moments, group_gradients
from transformers import TrainerCallback

from trl_drgrpo.check.bias import sampled_batches
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.demo.build import demonstrate_with_gaps, warm_start
from trl_drgrpo.demo.task import check_steps, line_reward, list_sum_reward, numbers_of, prompt_of
from trl_drgrpo.process_rewards import TokenClassificationScorer, train_prm

StepRewards = Callable[..., list[list[float | None]]]
OUTCOME = "outcome"
STEP_TO_COME = 0.8  # the probability that any step to come is correct
SIGNALS = {"rule": "faithful rule", "prm": "trained PRM", "shuffled": "shuffled PRM", "adversarial": "adversarial PRM"}
USES: dict[str, tuple[str, dict[str, Any]]] = {  # and the fields of the configuration
    "deepseekmath": ("reward, `deepseekmath`", {"step_credit": "return_to_go", "step_baseline": "deepseekmath"}),
    "to_go": ("reward, `to_go`", {"step_credit": "return_to_go", "step_baseline": "to_go"}),
    "baseline": ("baseline", {"process_role": "baseline"}),
}
LABELS = {OUTCOME: "outcome only"}  # of the arms; the others are named signal/use
LABELS |= {f"{signal}/{use}": f"{SIGNALS[signal]} as {USES[use][0]}" for signal in SIGNALS for use in USES}
UNBIASED = [arm for arm in LABELS if arm == OUTCOME or arm.endswith("/baseline")]
LAST = 0.75  # from this share of the tokens on, a run is at its end
WARM_UP_BATCHES = 8  # not measured: an arm's coefficient is fitted on earlier batches
_VARIANCE_SEED = 10_000  # no run has it
_PROMPTS = 2_048  # more than a run takes
_MOST_STEPS = 2_000


@dataclass(frozen=True)
class Task(small_models.Task):
    """A task and the model that starts on it.

    Args:
        rule (`Callable`): Step reward function, 1 for a correct step, else 0.
        due (`Callable`): From a prompt to the number of steps of a correct answer.
        labeled_rows (`Callable`): `f(size, seed)` -> rows for `train_prm`.
        prm_prompt (`Callable` or `None`): From a prompt to the text that the process reward model reads.
        separator (`str` or list): End of a step.
    """

    rule: StepRewards = two_turns.turn_reward
    due: Callable[[Any], int] = lambda prompt: 2
    labeled_rows: Callable[[int, int], list[Row]] = two_turns.labeled_rows
    prm_prompt: Callable[[Any], str] | None = None
    separator: str | list[str] = "turn"


def _labeled_sums(size: int, seed: int) -> list[Row]:
    """Demonstrations of long sums, each line labeled by `check_steps`."""
    rng, rows = random.Random(f"long sums, labeled/{seed}"), []
    for numbers in long_sums.make_problems(size, "train", 1_000 + seed):
        text = demonstrate_with_gaps(numbers, rng)
        labels = check_steps(numbers, text)
        rows.append({"prompt": _line(prompt_of(numbers)), "steps": text.split("\n"), "labels": labels})
    return rows


def _line(prompt: Any) -> str:
    """The sum on a line of its own: without a chat template it would run into the first step."""
    return (prompt if isinstance(prompt, str) else prompt[-1]["content"]) + "\n"


TASKS = {
    "long_sums": Task(
        warm_start,
        lambda size, seed: long_sums.make_dataset(size, "train", seed),
        list_sum_reward,
        long_sums.MAX_COMPLETION,
        title="Long list sums",
        rule=line_reward,
        due=lambda prompt: len(numbers_of(prompt)),  # an addition less, and the boxed line
        labeled_rows=_labeled_sums,
        prm_prompt=_line,
        separator=["\n"],
    ),
    "two_turns": Task(
        two_turns.start,
        two_turns.make_prompts,
        two_turns.last_number_reward,
        two_turns.MAX_COMPLETION,
        two_turns.rollout,
        title="Two turns",
    ),
}
_SIZES = {"num_generations": 8, "learning_rate": 1.5e-4}
SETTINGS: dict[str, Any] = {
    "long_sums": {"tokens": 60_000, "prompts": 4, **_SIZES, "prm_rows": 4_000},
    "two_turns": {"tokens": 20_000, "prompts": 8, **_SIZES, "prm_rows": 10_000},
}
_SMALL = {"tokens": 250, "prompts": 2, "num_generations": 4, "learning_rate": 3e-3, "prm_rows": 32}
_SMALL |= {"batches": 2, "warm_start": 4}
QUICK = {"long_sums": {**_SMALL, "longest": 32}, "two_turns": {**_SMALL, "tokens": 80}}


# Signals ------------------------------------------------------------------------------------------------------------


def step_rewards(arm: str, task: Task, prm: StepRewards, seed: int) -> StepRewards | None:
    """The step reward function of an arm, if it has one. `seed`: of the shuffle."""
    if arm == OUTCOME:
        return None
    signal, use = arm.split("/")
    scores = prm if signal in ("prm", "shuffled") else task.rule
    if signal == "shuffled":
        scores = shuffled(scores, random.Random(seed))
    if signal == "adversarial":
        scores = reversed_scores(scores)
    return expected_outcome(scores, task.due) if use == "baseline" else scores


def expected_outcome(scores: StepRewards, due: Callable[[Any], int]) -> StepRewards:
    """After each step, the product of the scores so far (where there is none, it stays) and of `STEP_TO_COME` for each
    of the steps still due.

    >>> (row,) = expected_outcome(lambda **call: [[1.0, None, 0.5]], due=len)(prompts=["abcd"])
    >>> [round(value, 3) for value in row]
    [0.512, 0.64, 0.4]
    """

    def expected(prompts: Sequence[Any], **call: Any) -> list[list[float | None]]:
        estimates: list[list[float | None]] = []
        for prompt, row in zip(prompts, scores(prompts=prompts, **call), strict=True):
            so_far = accumulate((1.0 if score is None else score for score in row), mul)
            left = (max(due(prompt) - written, 0) for written in range(1, len(row) + 1))
            estimates.append([product * STEP_TO_COME**steps for product, steps in zip(so_far, left, strict=False)])
        return estimates

    return expected


def reversed_scores(scores: StepRewards) -> StepRewards:
    """1 minus the score: pays for mistakes."""

    def adversarial(**call: Any) -> list[list[float | None]]:
        return [[None if score is None else 1.0 - score for score in row] for row in scores(**call)]

    return adversarial


def shuffled(scores: StepRewards, rng: random.Random) -> StepRewards:
    """The same scores, each given to a step drawn from all of the batch; the generator is advanced."""

    def shuffled_scores(**call: Any) -> list[list[float | None]]:
        rows = scores(**call)
        pool = [score for row in rows for score in row if score is not None]
        rng.shuffle(pool)
        return [[None if score is None else pool.pop() for score in row] for row in rows]

    return shuffled_scores


# Runs ---------------------------------------------------------------------------------------------------------------


def trainer_of(
    name: str,
    arm: str,
    seed: int,
    sizes: dict[str, Any],
    folders: tuple[Path, Path],
    prm: StepRewards,
    reward: Any = None,
    **fields: Any,
) -> Any:
    """The trainer of an arm.

    Args:
        name, arm (`str`), seed (`int`): Task, arm and seed.
        sizes (`dict`): The task's settings; in miniature completions are `longest` tokens at most.
        folders (`tuple[Path, Path]`): Of the model and of the trainer.
        prm (`Callable`): The process reward model as a step reward function.
        reward (`Callable`, *optional*): Over the task's outcome.
        **fields: Further ones of the configuration.
    """
    task = TASKS[name]
    steps = step_rewards(arm, task, prm, seed)
    own = {**USES[arm.split("/")[1]][1], "step_separator": task.separator} if steps else {}
    own |= {"max_completion_length": sizes["longest"]} if "longest" in sizes else {}
    own |= {"max_steps": _MOST_STEPS, "step_reward_funcs": steps, **fields}
    return task.trainer(folders, sizes, _PROMPTS, seed, reward, **own)


def load_prm(name: str, folder: Path) -> StepRewards:
    """The trained process reward model of a task as a step reward function."""
    return TokenClassificationScorer(
        str(folder / name / "prm"), batch_size=64, name="prm", prompt_text=TASKS[name].prm_prompt
    )


def make_start(settings: dict[str, Any], folder: Path, name: str) -> list[Row]:
    """Makes the model and the process reward model of a task, and measures the variance: `prm` is its quality."""
    task, sizes, place = TASKS[name], settings[name], folder / name
    model = task.start(place / "model", steps=sizes.get("warm_start", 200))
    arguments = {"learning_rate": 1e-3, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64}
    arguments |= {"disable_tqdm": True, "logging_strategy": "no"}
    rows, held_out = task.labeled_rows(sizes["prm_rows"], 0), task.labeled_rows(min(300, sizes["prm_rows"]), 1)
    options = {"eval_rows": held_out, "step_separator": "\n", "arguments": arguments}
    quality = train_prm(str(model), rows, place / "prm", **options)
    return [{"task": name, "prm": quality, "variance": variance(sizes, folder, name)}]


def variance(sizes: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Gradient variance of the arms with one expectation, at the model that all runs start from.

    The estimate is a sum over groups that are drawn independently, so its covariance is that of a group's gradient
    over their number: with `g_p` the gradient of group p, `tr Cov = 1/(P - 1) * sum_p |g_p - mean|^2`. Times the
    tokens that a group takes, that is the variance per token generated.

    Returns:
        `dict[str, Any]`: `groups` and `tokens` that were sampled, and for each arm `variance`, with `ratio`, that over
            the variance of the outcome alone, its jackknife `standard_error`, and both at `half` the fitted
            coefficient.
    """
    prm, place = load_prm(name, folder), folder / name
    trainers = {
        arm: trainer_of(name, arm, _VARIANCE_SEED, sizes, (place / "model", place / arm.replace("/", "-")), prm)
        for arm in UNBIASED
    }
    for trainer in trainers.values():
        trainer.model.train()  # as in a run: the coefficient of a baseline is fitted as batches come
    sampler, tokens = trainers[OUTCOME], 0
    moments, halved = ({arm: Moments() for arm in trainers} for _ in range(2))
    batches = WARM_UP_BATCHES + sizes.get("batches", 40)
    for number, (sampled, rollouts) in enumerate(islice(sampled_batches(sampler), batches)):
        trained = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        advantages = {}
        for arm, trainer in trainers.items():
            trainer.on_rewards(sampled.scored)
            given = trainer.on_rollouts(sampled.scored, dict(rollouts))["advantages"]
            advantages[arm] = (given if given.dim() == 2 else given.unsqueeze(1)) * trained  # (B, T)
        if number < WARM_UP_BATCHES:
            continue
        tokens += int(trained.sum())
        for gradients in group_gradients(sampler, rollouts, sizes["num_generations"], advantages):
            for arm, gradient in gradients.items():
                moments[arm].add(gradient)
                halved[arm].add((gradients[OUTCOME] + gradient) / 2)
    reference = moments[OUTCOME]
    numbers: dict[str, Any] = {"groups": len(reference.squares), "tokens": tokens}
    for arm, each in moments.items():
        numbers[arm] = {"variance": each.variance * tokens / len(each.squares), **each.over(reference)}
        numbers[arm]["half"] = halved[arm].over(reference)
    return numbers


def train(settings: dict[str, Any], folder: Path, name: str, arm: str, seed: int) -> list[Row]:
    """Train one arm with one seed until the task's tokens are written: per optimizer step `pass_rate` and
    `tokens_by_step`; `seconds` are wall clock."""
    run: Row = {"task": name, "arm": arm, "seed": seed, "pass_rate": [], "tokens_by_step": []}

    def outcome(completions: Sequence[Any], **columns: Any) -> list[float]:
        rewards = TASKS[name].reward(completions, **columns)
        run["pass_rate"].append(fmean(rewards))
        return rewards

    folders = folder / name / "model", folder / name / f"{arm.replace('/', '-')}-{seed}"
    trainer = trainer_of(name, arm, seed, settings[name], folders, load_prm(name, folder), outcome)
    trainer.add_callback(_Stop(run, settings[name]["tokens"]))
    return [{**run, "seconds": round(trainer.train().metrics["train_runtime"], 1)}]


class _Stop(TrainerCallback):
    """Counts the tokens that the policy wrote, and ends the run when they are enough."""

    def __init__(self, run: Row, tokens: int):
        self.written, self.tokens = run["tokens_by_step"], tokens

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "completions/mean_length" in logs:  # tokens of the environment are not in it
            self.written.append(round(logs["completions/mean_length"] * args.per_device_train_batch_size))
            control.should_training_stop = sum(self.written) >= self.tokens


def measure(run: Run) -> None:
    run.each("starts", ("task",), [(name,) for name in run.settings], make_start)
    run.each("runs", ("task", "arm", "seed"), product(run.settings, LABELS, run.seeds), train)


# What the numbers say -----------------------------------------------------------------------------------------------


def mean_pass_rate(run: Row, first: float = 0.0) -> float:
    """Pass rate in percent after a share of the run's tokens, steps weighted by tokens."""
    written = accumulate(run["tokens_by_step"])
    begin = first * sum(run["tokens_by_step"])
    steps = zip(run["pass_rate"], run["tokens_by_step"], written, strict=True)
    some = [(rate * tokens, tokens) for rate, tokens, until in steps if until > begin]
    return 100 * sum(weighted for weighted, _ in some) / sum(tokens for _, tokens in some)


def rates(results: Results, name: str, first: float) -> dict[str, list[float]]:
    """Mean pass rates of each arm of a task, by seed."""
    runs = {arm: rows_of(results, task=name, arm=arm) for arm in LABELS}
    return {arm: [mean_pass_rate(run, first) for run in own] for arm, own in runs.items()}


def report(results: Results) -> list[str]:
    return [text for name in results["settings"] for text in (title(name, results), rates_table(name, results))]


def title(name: str, results: Results) -> str:
    """The line above a table."""
    seeds = len(rows_of(results, task=name, arm=OUTCOME))
    tokens = results["settings"][name]["tokens"] // 1000
    return f"{TASKS[name].title}, {tokens} thousand tokens a run, {seeds} seeds, mean and 95% interval:"


def rates_table(name: str, results: Results) -> str:
    """A row per arm: pass rates, in points over the outcome alone too, and the gradient's variance over that of the
    outcome alone, ± standard error, with the coefficient c as it is fitted and with half of it."""
    head = ["pass rate", "whole run, %", "minus outcome only", "last quarter, %", "minus outcome only"]
    (start,) = rows_of(results, "starts", task=name)
    both, rows = [rates(results, name, first) for first in (0.0, LAST)], []
    for arm, label in LABELS.items():
        cells = [label]
        for by_arm in both:
            against = "" if arm == OUTCOME else paired(by_arm[arm], by_arm[OUTCOME]).text(signed=True)
            cells += [str(interval(by_arm[arm])), against]
        found = start["variance"].get(arm)
        both_ratios = (found, found["half"]) if found else ()
        ratios = [f"{each['ratio']:.3f} ± {each['standard_error']:.3f}" for each in both_ratios] or ["", ""]
        rows.append([*cells, *(["1", ""] if arm == OUTCOME else ratios)])
    first = mean([100 * run["pass_rate"][0] for run in rows_of(results, task=name)], 1)
    lines = table([*head, "gradient variance", "with half of c"], rows).split("\n")
    lines.insert(2, f"| first step | {first} |{' |' * 5}")
    return "\n".join(lines)


def conclude(results: Results) -> str:
    texts = []
    for name in results["settings"]:
        by_arm = rates(results, name, 0.0)
        found = {LABELS[arm]: paired(own, by_arm[OUTCOME]) for arm, own in by_arm.items() if arm != OUTCOME}
        texts.append(compared(f"{TASKS[name].title}, pass rate over the run minus outcome only's, in points", found))
    return " ".join(texts)


def draw(results: Results) -> Any:
    """The pass rate at the end of the runs, one panel per task: every seed, and the mean with its interval."""
    names = list(results["settings"])
    figure, panels = new_figure(1, len(names), 5.5 * len(names), 4.2, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for row, ends in enumerate(rates(results, name, LAST).values()):
            found = interval(ends)
            axes.plot(ends, [row] * len(ends), ".", color=COLORS[0], alpha=0.35)
            axes.errorbar(found.mean, row, xerr=found.half_width, fmt="o", color=COLORS[0], capsize=3)
        axes.set(title=TASKS[name].title, xlabel="pass rate in the last quarter, %", xlim=(0, 100))
    panels[0].set_yticks(range(len(LABELS)), [label.replace("`", "") for label in LABELS.values()])
    panels[0].invert_yaxis()
    return figure


STUDY = Study("credit", "credit", 5, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
