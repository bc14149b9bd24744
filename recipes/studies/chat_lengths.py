"""Does the length bias show in a pretrained chat model that answers freely?

Question: `grpo` divides a token's loss by the length of its row, so long incorrect answers are pushed away less than
short ones. Do incorrect answers of a real model (SmolLM2-135M-Instruct, LoRA on all linear layers) become longer?
Task: "Which is larger, 73 or 25?" without examples; correct is an answer whose only number is the larger one. Before
training: what an update of each objective would do to the decision to go on. Arms of the training: stock TRL with
`loss_type="grpo"` and its std; ours. Model, prompts, seeds and settings are the same in both, and both take the same
number of steps. Measure: tokens of incorrect answers in training, and the share of them that end by themselves. Rule:
that of all studies, for runs of the same seed; one seed has no interval.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from frame import Interval, Results, Row, Run, Study, compared, interval, main, paired, rows_of, table
from chat_model import alone, chat_tokenizer, sampled_ids
from length_bias import ARMS as OBJECTIVES
from pace import STOCK
from small_models import small_trainer
from transformers import AutoModelForCausalLM

from trl_drgrpo import lora_preset
from trl_drgrpo.check.bias import Rollouts, push_table, pushes
from trl_drgrpo.common.drawing import COLORS, new_figure, smoothed
from trl_drgrpo.demo.larger import make_larger_dataset
from trl_drgrpo.demo.smollm2 import smollm2_folder

SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "longest": 32,  # tokens of an answer
    "questions": 48,  # before training
    "questions_of_a_batch": 8,  # of the push
    "different_prompts": 64,
    "prompts": 4,  # of a step
    "steps": 12,
    "learning_rate": 3e-4,
}
QUICK = {
    "num_generations": 2,
    "longest": 4,
    "questions": 4,
    "questions_of_a_batch": 2,
    "prompts": 1,
    "steps": 3,
}
ARMS = {"dr_grpo": "ours", "grpo": 'TRL, `loss_type="grpo"`'}
THIRDS = {"first third of the steps": 0, "last third": 2}


# Runs ---------------------------------------------------------------------------------------------------------------


def conversation(question: str) -> list[dict[str, str]]:
    """The prompt of a question: neither a system prompt nor examples."""
    return [{"role": "user", "content": question}]


def is_only_number(text: str, answer: str) -> bool:
    """Return whether the answer is the only number of a text.

    >>> is_only_number("73 is larger.", "73"), is_only_number("73 is larger than 25.", "73")
    (True, False)
    """
    return re.findall(r"\d+", text) == [answer]


def free_answers(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Answers of the model before training.

    Returns:
        `dict`: Per answer, those to a question one after the other: `lengths` in tokens; `stopped`, by itself;
            `correct`.
    """
    questions = make_larger_dataset(settings["questions"])
    conversations = [conversation(question) for question in questions["prompt"]]
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder())
    rows = sampled_ids(model, conversations, settings["num_generations"], settings["longest"], batch_size=48)
    tokenizer = chat_tokenizer()
    answers: dict[str, list[Any]] = {"lengths": [], "stopped": [], "correct": []}
    for samples, expected in zip(rows, questions["answer"], strict=True):
        for ids in samples:
            answers["lengths"].append(len(ids))
            answers["stopped"].append(ids[-1] == tokenizer.eos_token_id)
            answers["correct"].append(is_only_number(tokenizer.decode(ids, skip_special_tokens=True), expected))
    return answers


def train(settings: dict[str, Any], folder: Path, seed: int, arm: str) -> list[Row]:
    """Train one arm with one seed.

    Returns:
        `list[dict]`: One row; `correct` and `incorrect` have a list per step of the lengths of these answers, in
            tokens. A length above `longest` means an answer that was cut off.
    """
    run: Row = {"arm": arm, "seed": seed, "correct": [], "incorrect": []}
    end = chat_tokenizer().eos_token_id

    def reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **columns: Any
    ) -> list[float]:
        lengths: dict[bool, list[int]] = {True: [], False: []}
        rewards = []
        for completion, ids, expected in zip(completions, completion_ids, answer, strict=True):
            is_correct = is_only_number(completion[0]["content"], expected)
            length = len(ids)
            if ids[-1] != end:
                length = settings["longest"] + 1
            lengths[is_correct].append(length)
            rewards.append(float(is_correct))
        run["correct"].append(lengths[True])
        run["incorrect"].append(lengths[False])
        return rewards

    questions = make_larger_dataset(settings["different_prompts"], seed=seed)
    classes, fields = OBJECTIVES[arm]
    prompts = settings["prompts"]
    if classes == STOCK:  # a group at a time: all rows at once took more than 8 GB
        fields = {**fields, "gradient_accumulation_steps": prompts}
        prompts = 1
    trainer = small_trainer(
        Path(smollm2_folder()),
        folder / f"{arm}-{seed}",
        reward,
        questions.map(lambda row: {"prompt": conversation(row["prompt"])}),
        prompts,
        settings["num_generations"],
        classes,
        seed=seed,
        learning_rate=settings["learning_rate"],
        max_completion_length=settings["longest"],
        max_steps=settings["steps"],
        peft_config=lora_preset("lora"),
        **fields,
    )
    trainer.train()
    return [run]


def measure(run: Run) -> None:
    run.once("free_answers", partial(free_answers, run.settings))
    run.each("runs", ("seed", "arm"), product(run.seeds, ARMS), partial(alone, train))


# Tables -------------------------------------------------------------------------------------------------------------


def report(results: Results) -> list[str]:
    return [_free_table(results), _push_table(results), _training_table(results)]


def _free_table(results: Results) -> str:
    answers = results["free_answers"]
    lengths = np.array(answers["lengths"])
    stopped = np.array(answers["stopped"])
    correct = np.array(answers["correct"])
    rows = []
    for role, chosen in (("correct", correct), ("incorrect", ~correct)):
        if not chosen.any():
            continue
        cut_off = 100 * (1 - stopped[chosen].mean())
        rows.append([role, str(chosen.sum()), f"{lengths[chosen].mean():.1f}", f"{cut_off:.0f}"])
    return table(["free answers, before training", "number", "mean tokens", "cut off, %"], rows)


def _push_table(results: Results) -> str:
    """Make the table of how an update of each objective would change the decision to go on."""
    settings = results["settings"]
    answers = {name: np.array(values) for name, values in results["free_answers"].items()}
    rows_of_a_batch = settings["questions_of_a_batch"] * settings["num_generations"]
    batches = []
    for first in range(0, len(answers["lengths"]), rows_of_a_batch):
        part = slice(first, first + rows_of_a_batch)
        correct = answers["correct"][part]
        batches.append(
            Rollouts(
                correct.astype(float),
                correct,
                answers["lengths"][part],
                settings["num_generations"],
                settings["longest"],
                answers["stopped"][part],
            )
        )
    return push_table(pushes(batches))


def in_third(steps: Sequence[Sequence[int]], third: int) -> list[int]:
    """Return the lengths of a third of the steps.

    >>> in_third([[1], [2, 3], [4], [5], [6], [7]], 2)
    [6, 7]
    """
    first = len(steps) * third // 3
    last = len(steps) * (third + 1) // 3
    return list(chain.from_iterable(steps[first:last]))


def incorrect_tokens(run: Row, longest: int, third: int) -> float:
    """Mean tokens of incorrect answers in a third of the steps; those cut off count as the longest."""
    return statistics.fmean(min(length, longest) for length in in_third(run["incorrect"], third))


def _shares(runs: Iterable[Row], third: int, longest: int) -> tuple[str, str]:
    """Pass rate, and the share of incorrect answers that are cut off, in percent over the seeds."""
    passed = []
    cut_off = []
    for run in runs:
        correct = in_third(run["correct"], third)
        incorrect = in_third(run["incorrect"], third)
        passed.append(100 * len(correct) / (len(correct) + len(incorrect)))
        cut_off.append(100 * statistics.fmean(length > longest for length in incorrect))
    return str(interval(passed)), str(interval(cut_off))


def _training_table(results: Results) -> str:
    longest = results["settings"]["longest"]
    head = ["in training", "steps", "correct, %", "tokens of an incorrect answer", "incorrect and cut off, %"]
    rows = []
    for arm, label in ARMS.items():
        runs = rows_of(results, arm=arm)
        for title, third in THIRDS.items():
            passed, cut_off = _shares(runs, third, longest)
            lengths = interval(incorrect_tokens(run, longest, third) for run in runs)
            rows.append([label, title, passed, str(lengths), cut_off])
    return table(head, rows)


def longer_incorrect_answers(results: Results, third: int) -> Interval:
    """Tokens of an incorrect answer in a third of the steps, `grpo` minus ours, seed by seed."""
    longest = results["settings"]["longest"]
    tokens = {}
    for arm in ARMS:
        tokens[arm] = [incorrect_tokens(run, longest, third) for run in rows_of(results, arm=arm)]
    return paired(tokens["grpo"], tokens["dr_grpo"])


def conclude(results: Results) -> str:
    differences = {title: longer_incorrect_answers(results, third) for title, third in THIRDS.items()}
    if any(difference.half_width == float("inf") for difference in differences.values()):
        return ""
    return compared("Tokens of an incorrect answer, `grpo` minus ours", differences)


def draw(results: Results) -> Any:
    """Pass rate and tokens of incorrect answers over the steps, a line per run."""
    longest = results["settings"]["longest"]
    figure, (left, right) = new_figure(1, 2, 8, 3.2)
    for (arm, label), color in zip(ARMS.items(), COLORS, strict=False):
        for run in rows_of(results, arm=arm):
            pass_rates = []
            lengths: list[float | None] = []
            for correct, incorrect in zip(run["correct"], run["incorrect"], strict=True):
                pass_rates.append(100 * len(correct) / (len(correct) + len(incorrect)))
                tokens = [min(length, longest) for length in incorrect]
                lengths.append(statistics.fmean(tokens) if tokens else None)
            name = f"{label.replace('`', '')}, seed {run['seed']}"
            left.plot(smoothed(pass_rates), color=color, label=name)
            right.plot(smoothed(lengths), color=color)
    left.set(xlabel="step", ylabel="correct, %")
    right.set(xlabel="step", ylabel="tokens of an incorrect answer")
    left.legend()
    return figure


STUDY = Study("chat_lengths", "chat_model", 2, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
