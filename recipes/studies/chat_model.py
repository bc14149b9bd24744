"""How soon does a pretrained chat model learn: with ours, and with stock TRL?

Question: what does a user gain who fine-tunes a real model (SmolLM2-135M-Instruct, LoRA on all linear layers) and
changes two lines? Arms: ours; stock TRL with both switches of Dr. GRPO (`loss_type="dr_grpo"`,
`scale_rewards="none"`); stock TRL with its default objective. Tasks: the larger of two numbers, the first letter of a
word, two numbers as JSON. A prompt is a conversation that shows solved examples; without them the model is hardly ever
correct. The reward is 1 if the whole answer is the expected one, else 0: nothing else pays. Model, prompts, seeds and
settings are the same in every arm. A run ends with the step in which its CPU seconds are used up; evaluations do not
count. Learning rates come from runs of 60 seconds on the first letter of a word, three rates for ours and three for
TRL with both switches, on a seed that the study itself does not use. Each arm has a rate that this grid does not tell
apart from the best one. Some runs of stock TRL have the rate of ours, so that steps can be compared; its default
objective has only those. Measure: accuracy on held-out questions, sampled at temperature 1, over process CPU seconds
of one thread. A run has a process of its own. Rule: that of all studies, for runs of the same seed; the pairs of all
tasks are also taken together.
"""

import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from frame import Interval, Results, Row, Run, Study, compared, interval, main, mean, rows_of, table
from pace import ARMS, SHARES, by_arm, spread, target, times
from small_models import mean_height, small_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo import lora_preset
from trl_drgrpo.demo.pace import Pace, draw_pace
from trl_drgrpo.demo.smollm2 import smollm2_folder
from trl_drgrpo.evaluation.models import Decoding
from trl_drgrpo.evaluation.running import model_sampler
from trl_drgrpo.process_rewards.continuations import Request

OURS, OTHERS = "ours", ("switches", "trl")
SYSTEM_PROMPT = "Be brief."

SETTINGS: dict[str, Any] = {
    "tasks": {  # most tokens of an answer
        "larger": {"arms": [OURS, *OTHERS], "longest": 8},
        "letter": {"arms": [OURS, *OTHERS], "longest": 6},
        "json": {"arms": [OURS, *OTHERS], "longest": 20},
    },
    "seconds": 60,  # of CPU time that a run trains
    "evaluations": [1 / 12, 1 / 4, 1 / 2, 1],  # shares of these seconds; the one before training not counted
    "prompts": 2,
    "num_generations": 8,
    "different_prompts": 1024,
    "held_out": 24,
    "answers": 4,  # to each held-out question, in an evaluation
    "learning_rates": {OURS: 3e-4, "switches": 6e-4, "trl": 6e-4},
    "grid": [  # task, arm, learning rate, seconds
        *(["letter", OURS, rate, 60] for rate in (1e-4, 3e-4, 6e-4)),
        *(["letter", arm, rate, 60] for arm, rate in product(OTHERS, (3e-4, 6e-4, 1e-3, 2e-3))),
        *(["larger", OURS, rate, 30] for rate in (3e-4, 1e-3)),
    ],
    "grid_seeds": [100],
    "grid_evaluations": [1 / 4, 1 / 2, 1],
    "same_rate": {"larger": [0, 1], "letter": [0, 1], "json": [0]},  # seeds; stock TRL with the rate of ours
}
QUICK = {
    "tasks": {"letter": {"arms": [OURS, *OTHERS], "longest": 3}},
    "seconds": 0.1,
    "evaluations": [1],
    "prompts": 1,
    "num_generations": 2,
    "different_prompts": 4,
    "held_out": 2,
    "answers": 1,
    "grid": [["letter", OURS, 1e-3, 0.1]],
    "same_rate": {"letter": [0]},
}


# Tasks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        title (`str`): Its name on the page and in the picture.
        draw (`Callable`): Draws a question.
        examples (`tuple[Question, ...]`): Solved examples in each prompt.
    """

    title: str
    draw: Callable[[random.Random], Question]
    examples: tuple[Question, ...]

    def conversation(self, question: Question) -> list[dict[str, str]]:
        """The prompt of a question."""
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        for example in self.examples:
            messages.append({"role": "user", "content": example.text})
            messages.append({"role": "assistant", "content": example.answer})
        return [*messages, {"role": "user", "content": question.text}]


def draw_numbers(rng: random.Random) -> Question:
    first, second = rng.sample(range(10, 100), 2)
    return Question(f"Larger: {first} or {second}?", str(max(first, second)))


@lru_cache(maxsize=1)
def words() -> list[str]:
    """Words of four to seven letters that are one token: the model reads no letters, it has to know them."""
    tokens = chat_tokenizer().get_vocab()
    return sorted(token[1:] for token in tokens if re.fullmatch("Ġ[a-z]{4,7}", token))


def draw_word(rng: random.Random) -> Question:
    word = rng.choice(words())
    return Question(f'First letter of "{word}"?', word[0])


def draw_pair(rng: random.Random) -> Question:
    first, second = rng.sample(range(10, 100), 2)
    return Question(f"{first}, {second}", json.dumps({"min": min(first, second), "max": max(first, second)}))


def draw_two_words(rng: random.Random) -> Question:
    first, second = rng.sample(words(), 2)
    return Question(f'First letters of "{first}" and "{second}"?', f"{first[0]}\n{second[0]}")


TASKS = {
    "larger": Task("larger of two numbers", draw_numbers, (Question("Larger: 59 or 63?", "63"),)),
    "letter": Task(
        "first letter of a word",
        draw_word,
        (Question('First letter of "table"?', "t"), Question('First letter of "circle"?', "c")),
    ),
    "json": Task("smaller and larger as JSON", draw_pair, (Question("70, 18", '{"min": 18, "max": 70}'),)),
    "lines": Task(  # of `chat_settings.py`
        "first letters of two words, a line each",
        draw_two_words,
        (
            Question('First letters of "table" and "circle"?', "t\nc"),
            Question('First letters of "green" and "mountain"?', "g\nm"),
        ),
    ),
}


def held_out_questions(task: str, count: int) -> list[Question]:
    """Questions that no run trains on."""
    rng = random.Random(f"{task}, held out")
    return [TASKS[task].draw(rng) for _ in range(count)]


def training_rows(task: str, settings: Mapping[str, Any], seed: int) -> Any:
    """The training dataset of a seed, without the held-out questions."""
    from datasets import Dataset

    held_out = held_out_questions(task, settings["held_out"])
    rng = random.Random(f"{task}, {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < settings["different_prompts"]:
        question = TASKS[task].draw(rng)
        if question not in held_out:
            rows.append({"prompt": TASKS[task].conversation(question), "answer": question.answer})
    return Dataset.from_list(rows)


def is_correct(text: str, answer: str) -> bool:
    """Return whether the whole text is the answer; a final period is allowed, and any layout of JSON.

    >>> is_correct("63.", "63"), is_correct("63 or 59", "63"), is_correct('{"age":39}', '{"age": 39}')
    (True, False, True)
    """
    return _read(text.strip().removesuffix(".")) == _read(answer)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def accuracy(model: Any, task: str, settings: Mapping[str, Any]) -> float:
    """Share of correct answers to the held-out questions."""
    questions = held_out_questions(task, settings["held_out"])
    rates = pass_rates(
        model,
        [TASKS[task].conversation(question) for question in questions],
        [question.answer for question in questions],
        is_correct,
        settings["answers"],
        settings["tasks"][task]["longest"],
        batch_size=48,
    )
    return round(statistics.fmean(rates), 4)


def pass_rates(
    model: Any,
    conversations: Sequence[Any],
    answers: Sequence[str],
    is_correct: Callable[[str, str], bool],
    count: int,
    longest: int,
    batch_size: int,
) -> list[float]:
    """Share of correct answers to each question, of `count` sampled ones. Each call draws the same random numbers."""
    rates = []
    for answer, samples in zip(answers, sampled_ids(model, conversations, count, longest, batch_size), strict=True):
        texts = chat_tokenizer().batch_decode(samples, skip_special_tokens=True)
        rates.append(statistics.fmean(is_correct(text, answer) for text in texts))
    return rates


def sampled_ids(
    model: Any, conversations: Sequence[Any], count: int, longest: int, batch_size: int
) -> list[list[Sequence[int]]]:
    """Token ids of `count` sampled answers to each conversation."""
    tokenizer = chat_tokenizer()
    encoded = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)
    requests = [Request(tuple(ids), count, longest, True, 0) for ids in encoded["input_ids"]]
    sampler = model_sampler(model, tokenizer, Decoding(longest), batch_size)
    return [[sample.token_ids for sample in samples] for samples in sampler(requests)]


@lru_cache(maxsize=1)
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder())


# Runs ---------------------------------------------------------------------------------------------------------------


class Budget(Pace):
    """Evaluates when shares of a run's CPU seconds are used up, ends the run at the last one, and measures its steps.

    Args:
        run (`dict`): As in [`Pace`]; gets the lists `step_seconds` of CPU time and `peak_bytes`, an entry per step.
        measure (`Callable`): From the model to its pass rate.
        due (`Sequence[float]`): CPU seconds at which it evaluates: after the step that passes one or several of them.
        clock (`Callable`, *optional*): As in [`Pace`].
    """

    def __init__(
        self,
        run: Row,
        measure: Callable[[Any], float],
        due: Sequence[float],
        clock: Callable[[], float] = time.process_time,
    ):
        super().__init__(run, measure, clock=clock)
        self.due = list(due)
        self.step_begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_begun = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self.clock()
        self.run["step_seconds"].append(round(now - self.step_begun, 2))
        self.run["peak_bytes"].append(take_peak())
        left = [seconds for seconds in self.due if seconds > now - self.begun]
        if len(left) < len(self.due):
            self.evaluate(kwargs["model"])
            take_peak()  # the evaluation's
        self.due = left
        control.should_training_stop = not left


def take_peak() -> int:
    """Return the most bytes that the process had resident since the last call, and begin anew; Linux alone says it."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return 1024 * int(peak[1]) if peak else 0


def alone(function: Callable[..., list[Row]], *call: Any) -> list[Row]:
    """Call a function in a process of its own, whose memory no earlier run has touched."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:  # forked: nothing is imported again
        return pool.submit(function, *call).result()


def train(
    starts: Mapping[str, float],
    rates: Mapping[str, float],
    settings: dict[str, Any],
    folder: Path,
    seed: int,
    task: str,
    arm: str,
    rate: float | None = None,
    budget: float | None = None,
) -> list[Row]:
    """Train one arm with one seed until its CPU seconds are used up; with a `rate` and a `budget`, a run of the grid.

    Returns:
        `list[dict]`: One row: `learning_rate`; `budget` in seconds; per evaluation `seconds` of CPU time and
            `pass_rate`; per step `step_seconds`, `peak_bytes` and `lengths`, the number and the tokens of correct and
            of incorrect answers; optimizer `steps`; `evaluation_seconds` of CPU time.
    """
    shares = settings["evaluations" if budget is None else "grid_evaluations"]
    seconds = settings["seconds"] if budget is None else budget
    due = [seconds * share for share in shares]
    learning_rate = rates[arm] if rate is None else rate
    run: Row = {"task": task, "arm": arm, "seed": seed, "learning_rate": learning_rate, "budget": seconds}
    run |= {"seconds": [0.0], "pass_rate": [starts[task]], "step_seconds": [], "peak_bytes": [], "lengths": []}
    evaluation_seconds = []

    def measure_accuracy(model: Any) -> float:
        begun = time.process_time()
        result = accuracy(model, task, settings)
        evaluation_seconds.append(time.process_time() - begun)
        return result

    def reward(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **columns: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        correct = [is_correct(text, expected) for text, expected in zip(texts, answer, strict=True)]
        run["lengths"].append(length_counts(correct, completion_ids))
        return list(map(float, correct))

    trainer = small_trainer(
        Path(smollm2_folder()),
        folder / f"{task}-{arm}-{seed}",
        reward,
        training_rows(task, settings, seed),
        settings["prompts"],
        settings["num_generations"],
        ARMS[arm].classes,
        seed=seed,
        learning_rate=learning_rate,
        max_completion_length=settings["tasks"][task]["longest"],
        max_steps=10_000,
        peft_config=lora_preset("lora"),
        **ARMS[arm].fields,
    )
    trainer.add_callback(Budget(run, measure_accuracy, due))
    take_peak()
    trainer.train()
    return [run | {"steps": len(run["step_seconds"]), "evaluation_seconds": round(sum(evaluation_seconds), 1)}]


def length_counts(correct: Sequence[bool], completion_ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of correct answers and their tokens, and the same of incorrect ones.

    >>> length_counts([True, False, True], [[1], [1, 2, 3], [1, 2]])
    [2, 3, 1, 3]
    """
    counts = {True: [0, 0], False: [0, 0]}
    for is_right, ids in zip(correct, completion_ids, strict=True):
        counts[is_right][0] += 1
        counts[is_right][1] += len(ids)
    return counts[True] + counts[False]


def measure(run: Run) -> None:
    settings = run.settings
    starts = {task: run.once(f"start_{task}", partial(start, task, settings)) for task in settings["tasks"]}
    calls = [(seed, *entry) for seed, entry in product(settings["grid_seeds"], settings["grid"])]
    run.each("grid", ("seed", "task", "arm", "learning_rate", "budget"), calls, partial(alone, train, starts, {}))
    rates = settings["learning_rates"]
    calls = [
        (seed, task, arm)
        for seed in run.seeds
        for task in settings["tasks"]
        for arm in settings["tasks"][task]["arms"]
    ]
    run.each("runs", ("seed", "task", "arm"), calls, partial(alone, train, starts, rates))
    calls = [
        (seed, task, arm) for task, seeds in settings["same_rate"].items() for seed, arm in product(seeds, OTHERS)
    ]
    same_rate = dict.fromkeys(OTHERS, rates[OURS])
    run.each("same_rate", ("seed", "task", "arm"), calls, partial(alone, train, starts, same_rate))


def start(task: str, settings: dict[str, Any]) -> float:
    """Accuracy of the model before it is trained."""
    return accuracy(AutoModelForCausalLM.from_pretrained(smollm2_folder()), task, settings)


# Tables -------------------------------------------------------------------------------------------------------------


def mean_accuracy(run: Row) -> float:
    """Mean accuracy over the CPU seconds of a run, in percent."""
    return 100 * mean_height(run, run["budget"], "seconds")


def final_accuracy(run: Row) -> float:
    """Accuracy after the last step, in percent."""
    return 100 * run["pass_rate"][-1]


PARTS = {"runs": "", "same_rate": ", with the learning rate of ours"}


@dataclass(frozen=True)
class Comparison:
    """A comparison of ours with another arm.

    Args:
        title (`str`): Its name in tables and sentences.
        value (`Callable`): From a run of ours and one of the other arm with the same seed to a number.
        even (`float`): The number that means no difference.
    """

    title: str
    value: Callable[[Row, Row], float]
    even: float = 0.0


def mean_step(run: Row) -> float:
    """CPU seconds of a step."""
    return statistics.fmean(run["step_seconds"])


COMPARISONS = [
    Comparison(
        "mean accuracy over the run, ours minus the other's, in points",
        lambda own, other: mean_accuracy(own) - mean_accuracy(other),
    ),
    Comparison(
        "final accuracy, ours minus the other's, in points",
        lambda own, other: final_accuracy(own) - final_accuracy(other),
    ),
    Comparison(
        "CPU seconds of a step, the other's over ours",
        lambda own, other: mean_step(other) / mean_step(own),
        even=1.0,
    ),
]


def paired_runs(results: Results, task: str, arm: str, part: str) -> list[tuple[Row, Row]]:
    """Return the runs of ours, and of another arm in a part of the results, that have the same seed."""
    own_by_seed = {run["seed"]: run for run in rows_of(results, task=task, arm=OURS)}
    others = rows_of(results, part, task=task, arm=arm)
    return [(own_by_seed[run["seed"]], run) for run in others if run["seed"] in own_by_seed]


def compare(results: Results, comparison: Comparison) -> dict[str, Interval]:
    """Intervals by arm: of each task, and of the pairs of all tasks together."""
    intervals = {}
    for part, arm in product(PARTS, OTHERS):
        label = f"{ARMS[arm].label}{PARTS[part]}"
        values_of_all: list[float] = []
        for task in results["settings"]["tasks"]:
            pairs = paired_runs(results, task, arm, part)
            values = [comparison.value(own, other) for own, other in pairs]
            values_of_all += values
            if values:
                intervals[f"{TASKS[task].title}, {label}"] = interval(values)
        if values_of_all:
            intervals[f"all tasks, {label}"] = interval(values_of_all)
    return intervals


def report(results: Results) -> list[str]:
    texts = [_task_table(results, task) for task in results["settings"]["tasks"]]
    columns = {comparison: compare(results, comparison) for comparison in COMPARISONS}
    rows = []
    for label in columns[COMPARISONS[0]]:
        cells = [intervals[label].text(signed=not comparison.even) for comparison, intervals in columns.items()]
        rows.append([label, *cells])
    comparison_table = table(["ours against", *(comparison.title for comparison in COMPARISONS)], rows)
    return [*texts, comparison_table, _same_answers(results), _length_table(results), _grid_table(results)]


def _same_answers(results: Results) -> str:
    """Steps in which an arm wrote as many correct and incorrect answers as ours, with as many tokens, as a table."""
    rows = []
    for arm in OTHERS:
        same = []
        for task in results["settings"]["tasks"]:
            for own, other in paired_runs(results, task, arm, "same_rate"):
                steps = zip(own["lengths"], other["lengths"], strict=False)  # ours takes more of them
                same += [counts == own_counts for own_counts, counts in steps]
        rows.append([ARMS[arm].label, str(len(same)), str(sum(same))])
    head = ["with the learning rate of ours, all tasks and seeds", "steps"]
    head += ["with the same answers as ours at the same step: number and tokens"]
    return table(head, rows)


def _task_table(results: Results, task: str) -> str:
    goals = {share: 100 * target(results, task, share) for share in SHARES}
    head = [TASKS[task].title, "steps", "CPU s a step", "peak memory of a step, GB", "accuracy, %: final"]
    head += ["mean over the run", *(f"CPU s to {goal:.0f}%" for goal in goals.values())]
    rows = []
    for arm, runs in by_arm(results, task).items():
        rows.append(
            [
                ARMS[arm].label,
                mean(run["steps"] for run in runs),
                str(interval(map(mean_step, runs))),
                interval(statistics.fmean(run["peak_bytes"]) / 1e9 for run in runs).text(2),
                str(interval(map(final_accuracy, runs))),
                str(interval(mean_accuracy(run) for run in runs)),
                *(spread(times(results, task, share)[arm]) for share in goals),
            ]
        )
    return table(head, rows)


def _length_table(results: Results) -> str:
    """Tokens of correct and incorrect answers in the first and the last third of the steps, all seeds together."""
    head = ["tokens of an answer", "correct: first third of the steps", "last third", "incorrect: first third"]
    rows = []
    for task in results["settings"]["tasks"]:
        for arm, runs in by_arm(results, task).items():
            first, last = _mean_lengths(runs, 0), _mean_lengths(runs, 2)
            rows.append([f"{TASKS[task].title}, {ARMS[arm].label}", first[0], last[0], first[1], last[1]])
    return table([*head, "last third"], rows)


def _mean_lengths(runs: Sequence[Row], third: int) -> tuple[str, str]:
    """Mean tokens of correct and of incorrect answers in a third of the steps; empty where there were none."""
    steps: list[list[int]] = []
    for run in runs:
        taken = len(run["lengths"])
        steps += run["lengths"][taken * third // 3 : taken * (third + 1) // 3]
    correct, correct_tokens, incorrect, incorrect_tokens = map(sum, zip([0, 0, 0, 0], *steps, strict=True))
    return _ratio(correct_tokens, correct), _ratio(incorrect_tokens, incorrect)


def _ratio(tokens: int, answers: int) -> str:
    return f"{tokens / answers:.1f}" if answers else ""


def _grid_table(results: Results) -> str:
    rows = [
        [
            f"{TASKS[row['task']].title}, {ARMS[row['arm']].label}",
            f"{row['learning_rate']:.0e}",
            str(row["budget"]),
            str(row["steps"]),
            f"{mean_accuracy(row):.1f}",
            f"{final_accuracy(row):.1f}",
        ]
        for row in results["grid"]
    ]
    head = ["learning rates tried", "learning rate", "CPU s", "steps", "mean accuracy, %", "final accuracy, %"]
    return table(head, rows)


def conclude(results: Results) -> str:
    sentences = []
    for comparison in COMPARISONS:
        title = comparison.title[0].upper() + comparison.title[1:]
        intervals = compare(results, comparison).items()
        of_several_runs = {label: value for label, value in intervals if value.half_width < math.inf}
        sentences.append(compared(title, of_several_runs, comparison.even))
    return "\n\n".join(sentences)


def draw(results: Results) -> Any:
    """Accuracy over CPU seconds, a panel per task."""
    panels = {}
    for task in results["settings"]["tasks"]:
        panels[TASKS[task].title] = {ARMS[arm].short: runs for arm, runs in by_arm(results, task).items()}
    return draw_pace(panels)


STUDY = Study("chat_model", "chat_model", 3, SETTINGS, QUICK, measure, report, draw, conclude, dark=True)


if __name__ == "__main__":
    main(STUDY)
