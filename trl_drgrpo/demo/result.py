"""The demo's numbers: a model measured on the list-sum task, the results of a run, their file and their tables.

Accuracies and lengths are measured here, not taken from the training logs: on held-out problems, the same ones before
and after, and independent of the trainer.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_drgrpo.common.disk import check_writable, write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.output_folders import check_output_folder
from trl_drgrpo.demo import STOCK_OBJECTIVES
from trl_drgrpo.demo.pace import Pace, reached
from trl_drgrpo.demo.task import list_sum_reward, prompt_of, step_numbers
from trl_drgrpo.upstream.versions import installed_versions

REQUIRED_GAIN_POINTS = 40.0
MADE_BY = "trl-drgrpo demo"
RESULTS_FILE = "results.json"
PLOT_FILE = "curves.png"
MODEL_FOLDER = "model"
REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
START_FOLDER = "start"
PACE_FILE = "pace.png"
_DEMO_FILES = (
    RESULTS_FILE,
    PLOT_FILE,
    MODEL_FOLDER,
    REPORT_FILE,
    COMPARISON_FILE,
    START_FOLDER,
    PACE_FILE,
    *STOCK_OBJECTIVES,
)
# Of a run that is compared: held-out problems of an evaluation, and evaluations during training.
PACE_PROBLEMS = 128
PACE_EVALUATIONS = 10
OURS = "DrGRPOTrainer"
_SAMPLES = 8


def evaluate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Sequence[int]],
    sample: bool,
    seed: int = 0,
    batch_size: int = 256,
    max_new_tokens: int = 128,
) -> tuple[dict[str, Any], list[str]]:
    """
    Generate one completion per problem (its terms) and judge it.

    `sample`: at temperature 1 from the whole distribution, else greedily. `seed`: seed of the sampling; the global
    random state is put back afterwards. `batch_size`: problems per call of `model.generate`. The tokenizer pads on the
    left.

    Returns:
        `tuple[dict, list[str]]`: the numbers, and the completions in order. `accuracy`: share of correct completions;
        `length_correct_mean`, `length_incorrect_mean` (`None` if there is none), `length_mean`: mean tokens, end token
        included; and the numbers of [`~trl_drgrpo.demo.task.step_numbers`].
    """
    import torch

    texts = []
    lengths = []
    was_training = model.training
    model.eval()
    # The whole distribution: a folder's own generation settings may cut it, and transformers' default has top_k 50.
    decoding: dict[str, Any] = {"do_sample": sample}
    if sample:
        decoding |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    # Generators are put back, so that an evaluation during training changes none of its draws.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(problems), batch_size):
            chats = [prompt_of(numbers) for numbers in problems[start : start + batch_size]]
            inputs: Any = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            )
            inputs = inputs.to(model.device)
            # (B, prompt + T), and without the prompts (B, T).
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, **decoding)
            completions = output[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
            # The end token is another one than the padding, so it counts.
            lengths += (completions != tokenizer.pad_token_id).sum(dim=1).tolist()
    model.train(was_training)
    rewards = list_sum_reward(texts, list(map(sum, problems)))
    numbers: dict[str, Any] = {"accuracy": statistics.fmean(rewards)}
    lengths_by_reward: dict[float, list[int]] = {1.0: [], 0.0: []}
    for length, reward in zip(lengths, rewards, strict=True):
        lengths_by_reward[reward].append(length)
    for name, reward in (("correct", 1.0), ("incorrect", 0.0)):
        chosen = lengths_by_reward[reward]
        numbers[f"length_{name}_mean"] = statistics.fmean(chosen) if chosen else None
    numbers["length_mean"] = statistics.fmean(lengths)
    return numbers | step_numbers(problems, texts), texts


class DemoResult:
    """Results of a run, also of one that is going on.

    Args:
        output_dir (`Path`): Folder of the files.
        problems (`list[tuple[int, ...]]`): The held-out problems.
        settings (`dict`): `seed`, `steps`, and `process`: the settings of process rewards, `None` without them.

    Attributes:
        numbers (`dict[str, Any]`): Content of `results.json`. `before` and `after` have a measurement each for
            `sampled` and `greedy` decoding, `stock` has the same by objective of stock TRL. `pace`: accuracy by CPU
            time of each run that is compared ([`~trl_drgrpo.demo.pace.Pace`]).
        samples (`dict[str, list[str]]`): Sampled completions `before` and `after`.
    """

    def __init__(self, output_dir: Path, problems: list[tuple[int, ...]], settings: dict[str, Any]):
        self.output_dir = output_dir
        self.problems = problems
        self.samples: dict[str, list[str]] = {}
        self.numbers: dict[str, Any] = {
            "made_by": MADE_BY,
            "status": "unfinished",
            "settings": {"held_out_problems": len(problems), **settings},
            "before": {},
            "after": {},
            "stock": {},
            "pace": {},
            "gain_points": None,
            "required_gain_points": REQUIRED_GAIN_POINTS,
            "learned": False,
            "seconds": {},
            "versions": installed_versions(),
        }

    def measure(self, stage: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
        """Measure sampled and greedy accuracy on the held-out problems, and return both in words.

        `stage`: `before`, `after`, or an objective of stock TRL.
        """
        sampled, self.samples[stage] = evaluate(model, tokenizer, self.problems, sample=True)
        greedy, _ = evaluate(model, tokenizer, self.problems, sample=False)
        # An objective of stock TRL has its place among the others of its kind.
        stages = self.numbers
        if stage not in stages:
            stages = stages["stock"]
        stages[stage] = {"sampled": sampled, "greedy": greedy}
        if stage == "after":
            gain = 100 * (sampled["accuracy"] - self.numbers["before"]["sampled"]["accuracy"])
            self.numbers |= {"status": "finished", "gain_points": gain, "learned": gain >= REQUIRED_GAIN_POINTS}
        return f"sampled accuracy {sampled['accuracy']:.1%}, greedy accuracy {greedy['accuracy']:.1%}"

    def pace_of(self, name: str, tokenizer: PreTrainedTokenizerBase) -> Pace:
        """Return a callback for a run that is compared: accuracy on the first held-out problems as it trains."""

        def measured(model: PreTrainedModel) -> float:
            numbers, _ = evaluate(model, tokenizer, self.problems[:PACE_PROBLEMS], sample=True)
            return numbers["accuracy"]

        run: dict[str, list[float]] = {"seconds": [], "pass_rate": []}
        self.numbers["pace"][name] = run
        # A short run is evaluated after every step.
        every_steps = max(1, self.numbers["settings"]["steps"] // PACE_EVALUATIONS)
        return Pace(run, measured, every_steps)

    def write(self) -> None:
        """Write every number so far; `made_by` marks the folder as a demo's."""
        write_whole(self.output_dir / RESULTS_FILE, json.dumps(self.numbers, indent=1) + "\n")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record the seconds of a stage."""
        start = time.perf_counter()
        yield
        self.numbers["seconds"][stage] = round(time.perf_counter() - start, 2)


def prepare_output_dir(output_dir: Path) -> None:
    """
    Make sure that a run may write to a folder, before anything slow starts; create it if it is not there.

    An earlier demo's files make room and unrelated files are left alone, but a file of the same name that no demo
    wrote is never touched.
    """
    check_writable("output_dir", str(output_dir))
    check_output_folder("output_dir", str(output_dir), {})
    existing = [name for name in _DEMO_FILES if (output_dir / name).exists()]
    # The mark is looked for in the text: a demo that was killed may have left no whole JSON.
    results = output_dir / RESULTS_FILE
    mark = f'"made_by": "{MADE_BY}"'.encode()
    if existing and not (results.is_file() and mark in results.read_bytes()):
        got = f"{output_dir}, which holds {', '.join(existing)}, not written by a demo"
        remedy = "Nothing was changed there. Choose another folder."
        raise InputError("output_dir", got, "a new or empty folder, or an earlier demo's", remedy)
    output_dir.mkdir(parents=True, exist_ok=True)
    # Pictures and pages of an earlier demo would stand beside the numbers of this one, if it draws none.
    for name in (PLOT_FILE, REPORT_FILE, COMPARISON_FILE, PACE_FILE):
        (output_dir / name).unlink(missing_ok=True)


_NEXT = (
    "trl-drgrpo check                                      # half a minute: is the gradient right on this machine?",
    "trl-drgrpo train --config recipes/cpu_quickstart.yaml # from a recipe, in a checkout",
)


def print_report(result: DemoResult, console: Console) -> None:
    """Print the before/after table, eight held-out samples, the paths of the files and the next commands."""
    console.print(before_after_table(result))
    if result.numbers["stock"]:
        console.print(objectives_table(result))
        console.print(pace_sentence(result), highlight=False)
        console.print("One seed: a difference of a few points is noise.\n", highlight=False)
    console.print(samples_table(result))
    files = {
        "report": REPORT_FILE,
        "comparison": COMPARISON_FILE,
        "pace": PACE_FILE,
        "plot": PLOT_FILE,
        "numbers": RESULTS_FILE,
        "model": MODEL_FOLDER,
    }
    lines = []
    for name, file in files.items():
        path = result.output_dir / file
        if path.exists():
            lines.append(f"{name + ':':12}{path}")
    model = (result.output_dir / MODEL_FOLDER).as_posix()
    lines += [
        "\nLoad it:",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{model}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{model}")',
        "\nNext:",
        *_NEXT,
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def before_after_table(result: DemoResult) -> Table:
    """Tabulate accuracies, mean lengths and, with step rewards, the steps on held-out problems, before and after."""
    settings = result.numbers["settings"]
    title = f"Held-out problems ({len(result.problems)}), before and after {settings['steps']} steps"
    table = _table(title, "measure", "before", "after", "change")
    rows = [
        ("sampled accuracy", "sampled", "accuracy", True),
        ("greedy accuracy", "greedy", "accuracy", True),
        ("mean length, correct (tokens)", "sampled", "length_correct_mean", False),
        ("mean length, incorrect (tokens)", "sampled", "length_incorrect_mean", False),
    ]
    if settings["process"]:
        rows.append(("steps per completion", "sampled", "steps_mean", False))
        rows.append(("correct steps", "sampled", "process_reward", True))
    for measure, mode, key, is_share in rows:
        old = result.numbers["before"][mode][key]
        new = result.numbers["after"][mode][key]
        # A model without a correct completion has no length of correct ones.
        change = ""
        if old is not None and new is not None:
            change = f"{new - old:+.1f}"
            if is_share:
                change = f"{100 * (new - old):+.1f} points"
        table.add_row(measure, _shown(old, is_share), _shown(new, is_share), change)
    return table


def objectives_table(result: DemoResult) -> Table:
    """Tabulate held-out accuracies and lengths after the same number of steps, under each objective."""
    title = f"The same start, problems and {result.numbers['settings']['steps']} steps, by objective"
    heads = ("sampled accuracy", "greedy accuracy", "tokens, correct", "tokens, incorrect")
    table = _table(title, "run", *heads)
    for name, numbers in {OURS: result.numbers["after"], **result.numbers["stock"]}.items():
        sampled = numbers["sampled"]
        table.add_row(
            name,
            _shown(sampled["accuracy"], True),
            _shown(numbers["greedy"]["accuracy"], True),
            _shown(sampled["length_correct_mean"], False),
            _shown(sampled["length_incorrect_mean"], False),
        )
    return table


def pace_sentence(result: DemoResult) -> str:
    """State the CPU seconds until each run that is compared reached 80% of the highest final accuracy among them."""
    runs = result.numbers["pace"]
    goal = 0.8 * max(run["pass_rate"][-1] for run in runs.values())
    parts = []
    for name, run in runs.items():
        seconds = reached(run, goal)
        pace = f"{seconds:.0f} s" if seconds < math.inf else "never"
        parts.append(f"{name} {pace}")
    return f"CPU time to {goal:.0%} sampled accuracy, evaluations left out: {', '.join(parts)}."


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _shown(value: float | None, is_share: bool) -> str:
    if value is None:
        return "none"
    if is_share:
        return f"{value:.1%}"
    return f"{value:.1f}"


def samples_table(result: DemoResult) -> Table:
    """Tabulate the first held-out problems, not picked, with the model's samples before and after training."""
    problems = result.problems[:_SAMPLES]
    stages = ("before", "after")
    sums = [sum(numbers) for numbers in problems]
    verdicts = {}
    counts = []
    for stage in stages:
        verdicts[stage] = list_sum_reward(result.samples[stage][:_SAMPLES], sums)
        counts.append(f"{sum(verdicts[stage]):.0f} correct {stage}")
    title = f"The first {len(problems)} held-out problems, sampled: {', '.join(counts)}"
    table = Table("prompt", *stages, title=title, title_justify="left")
    for row, numbers in enumerate(problems):
        texts = ["+".join(map(str, numbers)) + f", is {sums[row]}"]
        for stage in stages:
            verdict = "correct" if verdicts[stage][row] else "incorrect"
            texts.append(f"{verdict}: {', '.join(result.samples[stage][row].split())}")
        # As `Text`, in which rich reads no markup.
        table.add_row(*map(Text, texts))
    return table
