"""Train the shipped model on the list-sum task with `DrGRPOTrainer`: a whole run in about two minutes of CPU time.

`run_demo` measures the model on held-out problems, trains it, measures it again and saves the model, the curves and
every number. The claim that it checks: sampled accuracy rises by at least 40 percentage points.

It always runs on the CPU in float32, also where there is a GPU: for a model this small the CPU is fast enough, and the
numbers stay comparable.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.demo.build import MODEL_DIR
from trl_drgrpo.demo.evaluate import Evaluation, evaluate
from trl_drgrpo.demo.process import PROCESS_SETTINGS, line_reward, step_numbers
from trl_drgrpo.demo.progress import CurvesCallback
from trl_drgrpo.demo.report import draw_curves, library_versions
from trl_drgrpo.demo.task import list_sum_reward, make_dataset, make_problems
from trl_drgrpo.demo.tokenizer import build_tokenizer
from trl_drgrpo.diagnostics.progress import show_progress
from trl_drgrpo.errors import InputError

REQUIRED_GAIN_POINTS = 40.0
MADE_BY = "trl-drgrpo demo"
RESULTS_FILE, PLOT_FILE, MODEL_FOLDER = "results.json", "curves.png", "model"

_PROMPTS_PER_STEP, _NUM_GENERATIONS, _MAX_COMPLETION_LENGTH = 8, 8, 128  # P, G, T
_LEARNING_RATE = 3e-4


@dataclass
class DemoResult:
    """What a run gave, or has given so far.

    Args:
        output_dir (`Path`): Where the files are.
        seed, steps (`int`): Settings of the run.
        process (`bool`): Whether every line is rewarded, next to the outcome.
        problems (`list[tuple[int, ...]]`): The held-out problems, in the order of the completions.
        status (`str`): `"unfinished"` until everything is measured, then `"finished"`.
        before, after (`dict[str, Evaluation]`): Held-out measurements, keys `sampled` and `greedy`.
        curves (`dict[str, list]`): Per training step: `step`, `pass_rate` (0 to 1) and lengths in tokens.
        plot (`Path` or `None`): The plot, once drawn; stays `None` without matplotlib.
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
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        """Folder of the saved model."""
        return self.output_dir / MODEL_FOLDER

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
    def learnt(self) -> bool:
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
            "gain_points": self.gain_points,
            "required_gain_points": REQUIRED_GAIN_POINTS,
            "learnt": self.learnt,
            "seconds": {stage: round(seconds, 2) for stage, seconds in self.seconds.items()},
            "versions": library_versions(),
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
    """Make sure that a run may write to a folder, before anything slow starts.

    An earlier demo's files are overwritten and unrelated files are left alone, but a file of the same name that no
    demo wrote is never touched.

    Args:
        output_dir (`Path`): The folder; created if it is not there.

    Raises:
        InputError: If it cannot be a folder, or holds a `model`, `curves.png` or `results.json` of another origin.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "output_dir", f"'{output_dir}' ({error.strerror})", "a folder to write to", "Choose another folder."
        ) from error
    taken = [name for name in (RESULTS_FILE, PLOT_FILE, MODEL_FOLDER) if (output_dir / name).exists()]
    if taken and not _is_a_demos(output_dir):
        raise InputError(
            "output_dir",
            f"'{output_dir}', which holds {', '.join(taken)} of another origin",
            "a new or empty folder, or an earlier demo's",
            "Nothing was changed there. Choose another folder.",
        )


def _is_a_demos(output_dir: Path) -> bool:
    """Whether the results file in a folder says that a demo wrote it."""
    try:
        numbers = json.loads((output_dir / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(numbers, dict) and numbers.get("made_by") == MADE_BY


def training_arguments(output_dir: Path, seed: int, steps: int, **fields: Any) -> DrGRPOConfig:
    """The demo's training settings: `P = 8` prompts of `G = 8` completions per step, on the CPU in float32.

    Args:
        output_dir (`Path`): Folder of the run.
        seed, steps (`int`): Settings of the run.
        **fields: Fields of [`DrGRPOConfig`] to add or replace, `PROCESS_SETTINGS` for example.
    """
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": _PROMPTS_PER_STEP * _NUM_GENERATIONS,
        "num_generations": _NUM_GENERATIONS,
        "max_completion_length": _MAX_COMPLETION_LENGTH,
        "learning_rate": _LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    return DrGRPOConfig(**{**settings, **fields})


def run_demo(
    output_dir: str | Path = "runs/demo",
    seed: int = 0,
    steps: int = 200,
    eval_size: int = 512,
    console: Console | None = None,
    process: bool = False,
) -> DemoResult:
    """Measure, train, measure again, save.

    Args:
        output_dir (`str` or `Path`): Folder for `model/`, `curves.png` and `results.json`; see `check_output_dir`.
        seed (`int`): Seed of training problems and sampling, not negative. The held-out problems are always the same.
        steps (`int`): Training steps, at least 1.
        eval_size (`int`): Number of held-out problems.
        console (`rich.console.Console`, *optional*): Where progress goes; standard error by default.
        process (`bool`): Reward every line with `line_reward`, next to the outcome.

    Returns:
        `DemoResult`. Whether the model has learnt is for the caller to judge (`result.learnt`).

    Raises:
        InputError: On settings or a folder that do not fit.
        KeyboardInterrupt: As it came; once training has begun, the model and the numbers so far are saved first.
    """
    if steps < 1:
        raise InputError("steps", str(steps), "at least 1", "200 steps are enough to learn the task.")
    if seed < 0:
        raise InputError("seed", str(seed), "0 or larger", "Any such number will do.")
    console = console or Console(stderr=True)
    result = DemoResult(Path(output_dir), seed, steps, make_problems(eval_size, "held_out"), process)
    check_output_dir(result.output_dir)
    result.write()  # from here on the folder is recognisably a demo's
    with _one_thread():
        _measure_train_measure(result, console)
    console.print(f"after training: {_in_words(result.after)}", highlight=False)
    try:
        result.plot = draw_curves(result.curves, result.output_dir / PLOT_FILE)
    except ImportError:
        missing = f'{PLOT_FILE}: not drawn, matplotlib is missing. Install it: pip install "trl-drgrpo[report]"'
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: so small a model gains nothing from more, and they stall where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure_train_measure(result: DemoResult, console: Console) -> None:
    """The run itself; whatever stops it, the model and the numbers so far are saved."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    try:
        with result.timed("evaluate_before"):
            result.before = _measure(model, tokenizer, result)
        result.write()
        console.print(f"before training: {_in_words(result.before)}", highlight=False)
        with result.timed("train"):
            _train(model, tokenizer, result, console)
        with result.timed("evaluate_after"):
            result.after = _measure(model, tokenizer, result)
        result.status = "finished"
    finally:
        model.config.use_cache = True  # the trainer turns it off for training
        model.save_pretrained(result.model_dir)
        build_tokenizer().save_pretrained(result.model_dir)  # the one in use remembers padding and where it came from
        result.write()


def _train(model: Any, tokenizer: Any, result: DemoResult, console: Console) -> None:
    """Train the model in place; the curves grow in `result` step by step."""
    progress = CurvesCallback(console, process=result.process)
    result.curves = progress.curves
    trainer = DrGRPOTrainer(
        model=model,
        reward_funcs=list_sum_reward,
        args=training_arguments(
            result.output_dir, result.seed, result.steps, **(PROCESS_SETTINGS if result.process else {})
        ),
        train_dataset=make_dataset(_PROMPTS_PER_STEP * result.steps, "train", result.seed),
        processing_class=tokenizer,
        step_reward_funcs=line_reward if result.process else None,
    )
    with show_progress(trainer, progress):
        trainer.train()


def _measure(model: Any, tokenizer: Any, result: DemoResult) -> dict[str, Evaluation]:
    """Sampled and greedy accuracy on the held-out problems."""
    return {
        mode: evaluate(
            model, tokenizer, result.problems, sample=mode == "sampled", max_new_tokens=_MAX_COMPLETION_LENGTH
        )
        for mode in ("sampled", "greedy")
    }


def _in_words(evaluations: dict[str, Evaluation]) -> str:
    """Both accuracies in one phrase."""
    return ", ".join(f"{mode} accuracy {evaluation.accuracy:.1%}" for mode, evaluation in evaluations.items())
