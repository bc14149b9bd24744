"""The demo's numbers: a model measured on the list-sum task, the results of a run and its files, tables and a plot.

Accuracies and lengths are those of this file, not of the training logs: they are taken on held-out problems, the same
ones before and after, and do not depend on the trainer.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trl_drgrpo.common.disk import check_writable
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.demo import MODEL_DIR, STOCK_OBJECTIVES
from trl_drgrpo.demo.task import PROCESS_SETTINGS, list_sum_reward, prompt_of, step_numbers
from trl_drgrpo.upstream.versions import installed_versions


@dataclass(frozen=True)
class Evaluation:
    """Result of one decoding mode on a set of problems.

    Args:
        accuracy (`float`): Share of correct completions, 0 to 1.
        length_correct_mean (`float` or `None`): Mean tokens of correct completions, end token included; `None`
            if there is none.
        length_incorrect_mean (`float` or `None`): The same for incorrect ones.
        length_mean (`float`): Mean length of all completions in tokens.
        texts (`tuple[str, ...]`): The completions, one per problem, in order.
        correct (`tuple[bool, ...]`): Whether each is correct.
    """

    accuracy: float
    length_correct_mean: float | None
    length_incorrect_mean: float | None
    length_mean: float
    texts: tuple[str, ...]
    correct: tuple[bool, ...]

    def numbers(self) -> dict[str, float | None]:
        """The four numbers without the completions, for a results file."""
        return {name: value for name, value in vars(self).items() if name not in ("texts", "correct")}


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Sequence[int]],
    sample: bool,
    seed: int = 0,
    batch_size: int = 256,
    max_new_tokens: int = 128,
) -> Evaluation:
    """
    Generate one completion per problem (its terms) and judge it.

    `sample`: at temperature 1 from the whole distribution, else greedily. `seed`: of the sampling; the global random
    state is put back afterwards. `batch_size`: problems per call of `model.generate`. The tokenizer pads on the left.
    """
    import torch

    texts: list[str] = []
    lengths: list[int] = []
    was_training = model.training
    model.eval()
    decoding = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(problems), batch_size):
            chats = [prompt_of(numbers) for numbers in problems[start : start + batch_size]]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            ).to(model.device)
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, **decoding)  # (B, prompt + T)
            completions = output[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
            lengths += (completions != tokenizer.pad_token_id).sum(dim=1).tolist()
    model.train(was_training)
    correct = [reward == 1.0 for reward in list_sum_reward(texts, [sum(numbers) for numbers in problems])]
    by_verdict = [[n for n, ok in zip(lengths, correct, strict=True) if ok is kind] for kind in (True, False)]
    of_correct, of_incorrect = (sum(some) / len(some) if some else None for some in by_verdict)
    return Evaluation(
        accuracy=sum(correct) / len(correct),
        length_correct_mean=of_correct,
        length_incorrect_mean=of_incorrect,
        length_mean=sum(lengths) / len(lengths),
        texts=tuple(texts),
        correct=tuple(correct),
    )


REQUIRED_GAIN_POINTS = 40.0
MADE_BY = "trl-drgrpo demo"
RESULTS_FILE, PLOT_FILE, MODEL_FOLDER = "results.json", "curves.png", "model"
REPORT_FILE, COMPARISON_FILE, START_FOLDER = "report.html", "comparison.html", "start"
_OWN = (RESULTS_FILE, PLOT_FILE, MODEL_FOLDER, REPORT_FILE, COMPARISON_FILE, START_FOLDER, *STOCK_OBJECTIVES)


@dataclass
class DemoResult:
    """Results of a run, also of one that is going on.

    Args:
        output_dir (`Path`): Folder of the files.
        seed, steps (`int`): Settings of the run.
        process (`bool`): Whether the lists are long and every line is rewarded, next to the outcome.
        problems (`list[tuple[int, ...]]`): The held-out problems, in the order of the completions.
        status (`str`): `"unfinished"` until everything is measured, then `"finished"`.
        before, after (`dict[str, Evaluation]`): Held-out measurements, keys `sampled` and `greedy`.
        curves (`dict[str, list]`): Per training step: `step`, `pass_rate` (0 to 1) and lengths in tokens.
        plot (`Path` or `None`): The plot, once drawn; stays `None` without matplotlib.
        report (`Path` or `None`): The page of `trl-drgrpo report` over the run, once written.
        stock (`dict[str, dict[str, Evaluation]]`): Held-out measurements after the runs by stock TRL, by objective.
        comparison (`Path` or `None`): The page over this run and those of stock TRL, if there were any.
        seconds (`dict[str, float]`): Wall-clock seconds per stage.
    """

    output_dir: Path
    seed: int
    steps: int
    problems: list[tuple[int, ...]]
    process: bool = False
    status: str = "unfinished"
    before: dict[str, Evaluation] = field(default_factory=dict)
    after: dict[str, Evaluation] = field(default_factory=dict)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    plot: Path | None = None
    report: Path | None = None
    stock: dict[str, dict[str, Evaluation]] = field(default_factory=dict)
    comparison: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        """Folder of the saved model."""
        return self.output_dir / MODEL_FOLDER

    @property
    def start_dir(self) -> Path:
        """Folder of the model that the run starts from: the shipped one, or with process rewards its warm start."""
        return self.output_dir / START_FOLDER if self.process else MODEL_DIR

    @property
    def results_file(self) -> Path:
        """The JSON file with all numbers; its `made_by` marks the folder as a demo's."""
        return self.output_dir / RESULTS_FILE

    @property
    def gain_points(self) -> float | None:
        """Gain in sampled held-out accuracy, in percentage points; `None` before the second measurement."""
        if "sampled" not in self.after:
            return None
        return 100 * (self.after["sampled"].accuracy - self.before["sampled"].accuracy)

    @property
    def learned(self) -> bool:
        """Whether the gain reaches what the demo claims."""
        return self.gain_points is not None and self.gain_points >= REQUIRED_GAIN_POINTS

    def numbers(self, evaluation: Evaluation) -> dict[str, float | None]:
        """All numbers of a measurement, those of its steps included."""
        return evaluation.numbers() | step_numbers(self.problems, evaluation.texts)

    def write(self) -> None:
        """Write every number so far to `results_file`."""
        numbers = {
            "made_by": MADE_BY,
            "status": self.status,
            "settings": {
                "seed": self.seed,
                "steps": self.steps,
                "held_out_problems": len(self.problems),
                "process": PROCESS_SETTINGS if self.process else None,
            },
            "before": {mode: self.numbers(evaluation) for mode, evaluation in self.before.items()},
            "after": {mode: self.numbers(evaluation) for mode, evaluation in self.after.items()},
            "stock": {
                name: {mode: self.numbers(evaluation) for mode, evaluation in found.items()}
                for name, found in self.stock.items()
            },
            "gain_points": self.gain_points,
            "required_gain_points": REQUIRED_GAIN_POINTS,
            "learned": self.learned,
            "seconds": {stage: round(seconds, 2) for stage, seconds in self.seconds.items()},
            "versions": installed_versions(),
            "curves": self.curves,
        }
        self.results_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record how long a stage takes."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


def check_output_dir(output_dir: Path) -> None:
    """
    Make sure that a run may write to a folder, before anything slow starts; create it if it is not there.

    An earlier demo's files are overwritten and unrelated files are left alone, but a file of the same name that no
    demo wrote is never touched.
    """
    check_writable("output_dir", str(output_dir))
    taken = [name for name in _OWN if (output_dir / name).exists()]
    if taken and not _is_a_demos(output_dir):
        got = f"{output_dir}, which holds {', '.join(taken)}, not written by a demo"
        remedy = "Nothing was changed there. Choose another folder."
        raise InputError("output_dir", got, "a new or empty folder, or an earlier demo's", remedy)
    output_dir.mkdir(parents=True, exist_ok=True)


def _is_a_demos(output_dir: Path) -> bool:
    """Whether the results file in a folder says that a demo wrote it."""
    try:
        numbers = json.loads((output_dir / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(numbers, dict) and numbers.get("made_by") == MADE_BY


_SAMPLES = 3


def print_report(result: DemoResult, console: Console) -> None:
    """Print the before/after table, three held-out samples and the paths of the files."""
    console.print(before_after_table(result))
    if result.stock:
        console.print(objectives_table(result))
        console.print("One seed: a difference of a few points is noise.\n", highlight=False)
    console.print(samples_table(result))
    files = {"report": result.report, "comparison": result.comparison, "plot": result.plot}
    files |= {"numbers": result.results_file, "model": result.model_dir}
    lines = [f"{name + ':':12}{path}" for name, path in files.items() if path is not None]
    folder = result.model_dir.as_posix()
    lines += [
        "\nLoad it:",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def before_after_table(result: DemoResult) -> Table:
    """Accuracies, mean lengths and, with step rewards, the steps on held-out problems, before and after training."""
    size = len(result.problems)
    table = _table(f"Held-out problems ({size}), before and after {result.steps} steps", "before", "after", "change")
    measured = {mode: (result.before[mode], result.after[mode]) for mode in ("sampled", "greedy")}
    for mode, pair in measured.items():
        table.add_row(f"{mode} accuracy", *_changed([each.accuracy for each in pair], share=True))
    for kind in ("correct", "incorrect"):
        lengths = [getattr(each, f"length_{kind}_mean") for each in measured["sampled"]]
        table.add_row(f"mean length, {kind} (tokens)", *_changed(lengths))
    if result.process:
        steps = [step_numbers(result.problems, each.texts) for each in measured["sampled"]]
        table.add_row("steps per completion", *_changed([each["steps_mean"] for each in steps]))
        table.add_row("correct steps", *_changed([each["process_reward"] for each in steps], share=True))
    return table


def objectives_table(result: DemoResult) -> Table:
    """Held-out accuracies and lengths after the same number of steps, under each objective that was trained."""
    heads = ("sampled accuracy", "greedy accuracy", "tokens, correct", "tokens, incorrect")
    table = _table(f"The same start, problems and {result.steps} steps, by objective", *heads, first="run")
    for name, found in {"DrGRPOTrainer": result.after, **result.stock}.items():
        sampled = found["sampled"]
        accuracies = [_shown(found[mode].accuracy, share=True) for mode in ("sampled", "greedy")]
        table.add_row(name, *accuracies, _shown(sampled.length_correct_mean), _shown(sampled.length_incorrect_mean))
    return table


def _table(title: str, *numbers: str, first: str = "measure") -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _shown(value: float | None, share: bool = False) -> str:
    if value is None:
        return "none"
    return f"{value:.1%}" if share else f"{value:.1f}"


def _changed(pair: Sequence[float | None], share: bool = False) -> list[str]:
    """Two values, and the difference where there are both."""
    old, new = pair
    change = ""
    if old is not None and new is not None:
        change = f"{100 * (new - old):+.1f} points" if share else f"{new - old:+.1f}"
    return [_shown(old, share), _shown(new, share), change]


def samples_table(result: DemoResult) -> Table:
    """The first three held-out problems with the model's samples before and after training; not picked."""
    table = Table(title=f"The first {_SAMPLES} held-out problems, sampled", title_justify="left", show_lines=True)
    for name in ("prompt", "before", "after"):
        table.add_column(name)
    for row, numbers in enumerate(result.problems[:_SAMPLES]):
        cells = [Text("+".join(map(str, numbers)))]
        for evaluation in (result.before["sampled"], result.after["sampled"]):
            verdict = "correct" if evaluation.correct[row] else f"incorrect, {sum(numbers)} is correct"
            cells.append(Text(f"{evaluation.texts[row]}\n({verdict})"))
        table.add_row(*cells)
    return table
