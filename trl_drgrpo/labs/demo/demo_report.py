"""The demo's report: tables for the terminal and a plot, all from the numbers of one `DemoResult`."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trl_drgrpo.common.drawing import COLORS, ROLES, draw_trend, new_figure, save_figure
from trl_drgrpo.labs.demo.process import step_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trl_drgrpo.labs.demo.result import DemoResult

_SAMPLES = 3


def print_report(result: "DemoResult", console: Console) -> None:
    """Print the before/after table, three held-out samples and the paths of the files."""
    console.print(before_after_table(result))
    if result.stock:
        console.print(objectives_table(result))
        console.print("One seed: a difference of a few points is noise.\n", highlight=False)
    console.print(samples_table(result))
    files = {
        "report": result.report,
        "comparison": result.comparison,
        "plot": result.plot,
        "numbers": result.results_file,
        "model": result.model_dir,
    }
    for name, path in files.items():
        if path is not None:
            console.print(f"{name + ':':12}{path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nLoad it:\n{loading_snippet(result.model_dir)}", highlight=False, markup=False, soft_wrap=True)


def before_after_table(result: "DemoResult") -> Table:
    """Accuracies, mean lengths and, with step rewards, the steps on held-out problems, before and after training."""
    size = len(result.problems)
    table = Table(title=f"Held-out problems ({size}), before and after {result.steps} steps", title_justify="left")
    table.add_column("measure")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for mode in ("sampled", "greedy"):
        before, after = 100 * result.before[mode].accuracy, 100 * result.after[mode].accuracy
        table.add_row(f"{mode} accuracy", f"{before:.1f}%", f"{after:.1f}%", f"{after - before:+.1f} points")
    before, after = result.before["sampled"], result.after["sampled"]
    for name, old, new in (
        ("mean length, correct (tokens)", before.length_correct_mean, after.length_correct_mean),
        ("mean length, incorrect (tokens)", before.length_incorrect_mean, after.length_incorrect_mean),
    ):
        change = "" if old is None or new is None else f"{new - old:+.1f}"
        table.add_row(name, *("none" if value is None else f"{value:.1f}" for value in (old, new)), change)
    if result.process:
        old, new = (step_numbers(result.problems, evaluation.texts) for evaluation in (before, after))
        steps, correct = [[numbers[name] for numbers in (old, new)] for name in ("steps_mean", "process_reward")]
        table.add_row("steps per completion", *(f"{value:.1f}" for value in steps), f"{steps[1] - steps[0]:+.1f}")
        change = f"{100 * (correct[1] - correct[0]):+.1f} points"
        table.add_row("correct steps", *(f"{value:.1%}" for value in correct), change)
    return table


def objectives_table(result: "DemoResult") -> Table:
    """Held-out accuracies and lengths after the same number of steps, under each objective that was trained."""
    table = Table(title=f"The same start, problems and {result.steps} steps, by objective", title_justify="left")
    table.add_column("run", no_wrap=True, min_width=len("trl_dr_grpo_no_std"))
    for name in ("sampled accuracy", "greedy accuracy", "tokens, correct", "tokens, incorrect"):
        table.add_column(name, justify="right")
    for name, found in {"DrGRPOTrainer": result.after, **result.stock}.items():
        sampled = found["sampled"]
        lengths = (sampled.length_correct_mean, sampled.length_incorrect_mean)
        table.add_row(
            name,
            *(f"{100 * found[mode].accuracy:.1f}%" for mode in ("sampled", "greedy")),
            *("none" if value is None else f"{value:.1f}" for value in lengths),
        )
    return table


def samples_table(result: "DemoResult") -> Table:
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


def loading_snippet(model_dir: Path) -> str:
    """Three lines of Python that load the saved model."""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'model = AutoModelForCausalLM.from_pretrained("{model_dir.as_posix()}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{model_dir.as_posix()}")'
    )


def draw_curves(curves: dict[str, list[float | None]], path: Path) -> Path:
    """Plot pass rate and completion lengths over the training steps into a PNG file; `None` leaves a gap.
    `ImportError` without matplotlib."""
    figure, (rate, length) = new_figure(1, 2, 9, 3.6)
    steps = curves["step"]
    _curve(rate, steps, curves["pass_rate"], COLORS[2], None)
    rate.set(xlabel="training step", ylabel="pass rate (training problems)", ylim=(0, 1.02))
    _curve(length, steps, curves["length_correct_mean"], ROLES["correct"], "correct completions")
    _curve(length, steps, curves["length_incorrect_mean"], ROLES["incorrect"], "incorrect completions")
    length.set(xlabel="training step", ylabel="mean length (tokens)")
    return save_figure(figure, path)


def _curve(axes: "Axes", steps: list[float | None], values: list[float | None], color: str, label: str | None) -> None:
    """Draw one curve: each step faintly, and the mean of up to nine neighboring steps that have a value."""
    points = [
        (step, value) for step, value in zip(steps, values, strict=True) if step is not None and value is not None
    ]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    windows = [ys[max(0, i - 4) : i + 5] for i in range(len(ys))]
    draw_trend(axes, xs, ys, [sum(window) / len(window) for window in windows], color, label)
