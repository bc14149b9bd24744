"""Train the shipped model on the list-sum task with `DrGRPOTrainer`: a whole run in about two minutes of CPU time.

`run_demo` measures the model on held-out problems, trains it, measures it again and saves the model, the curves and
every number. The claim that it checks: sampled accuracy rises by at least 40 percentage points. With process rewards
the task is the long list sums, and the model is warm-started on them first. `compare` trains the same by stock TRL:
model, data, seed, steps and settings are the same, only trainer and objective differ (and TRL has no step rewards).

It always runs on the CPU in float32, also where there is a GPU: for a model this small the CPU is fast enough, and the
numbers stay comparable.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config import DrGRPOConfig
from trl_drgrpo.demo import STOCK_OBJECTIVES
from trl_drgrpo.demo.build import TERMS, warm_start
from trl_drgrpo.demo.result import (
    COMPARISON_FILE,
    PLOT_FILE,
    REPORT_FILE,
    START_FOLDER,
    DemoResult,
    Evaluation,
    check_output_dir,
    evaluate,
)
from trl_drgrpo.demo.task import (
    MAX_TERMS,
    MIN_TERMS,
    PROCESS_SETTINGS,
    build_tokenizer,
    line_reward,
    list_sum_reward,
    make_dataset,
    make_problems,
)
from trl_drgrpo.features.diagnostics.progress import ProgressCallback, show_progress
from trl_drgrpo.report import write_report
from trl_drgrpo.trainer import DrGRPOTrainer

# Name in the curves -> key in the training logs.
_CURVES = {
    "pass_rate": "drgrpo/pass_rate",
    "length_mean": "completions/mean_length",
    "length_correct_mean": "completions/length_correct_mean",
    "length_incorrect_mean": "completions/length_incorrect_mean",
}
_PROCESS_CURVES = {"steps_mean": "process/steps_mean", "process_reward": "process/reward_mean"}


def curves_of(history: Sequence[Mapping[str, Any]], process: bool = False) -> dict[str, list[float | None]]:
    """The curves of a run, one entry per step of a trainer's `log_history`: `step` and the names above, with step
    rewards also theirs; `None` where a batch had no such completion."""
    keys = _CURVES | _PROCESS_CURVES if process else _CURVES
    steps = [entry for entry in history if "reward" in entry]  # the closing summary of a run carries no reward
    return {"step": [entry["step"] for entry in steps]} | {
        name: [entry.get(key) for entry in steps] for name, key in keys.items()
    }


_PROMPTS_PER_STEP, _NUM_GENERATIONS, _MAX_COMPLETION_LENGTH = 8, 8, 128  # P, G, T
_LEARNING_RATE = 3e-4
STEPS, PROCESS_STEPS = 200, 60  # a step on long list sums takes twice as long


def training_arguments(output_dir: Path, seed: int, steps: int, **fields: Any) -> DrGRPOConfig:
    """The demo's training settings: `P = 8` prompts of `G = 8` completions per step, on the CPU in float32. `fields`:
    those of [`DrGRPOConfig`] to add or replace, `PROCESS_SETTINGS` for example."""
    return DrGRPOConfig(**{**training_settings(output_dir, seed, steps), **fields})


def training_settings(output_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    """The settings that the demo and the runs it is compared with share, as fields of [`trl.GRPOConfig`]."""
    return {
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


def run_demo(
    output_dir: str | Path = "runs/demo",
    seed: int = 0,
    steps: int | None = None,
    eval_size: int = 512,
    console: Console | None = None,
    process: bool = False,
    compare: Sequence[str] = (),
) -> DemoResult:
    """Measure, train, measure again, save.

    Args:
        output_dir (`str` or `Path`): Folder for `model/`, `curves.png`, `report.html` and `results.json`; see
            `check_output_dir`.
        seed (`int`): Seed of training problems and sampling, not negative. The held-out problems are always the same.
        steps (`int`, *optional*): Training steps, at least 1; 200 by default, 60 with process rewards.
        eval_size (`int`): Number of held-out problems.
        console (`rich.console.Console`, *optional*): Console for progress; standard error by default.
        process (`bool`): Train on long list sums and reward every line with `line_reward`, in addition to the outcome.
        compare (`Sequence[str]`): Keys of `STOCK_OBJECTIVES`: then train the same model with stock TRL under each, and
            write a report over all runs.

    Returns:
        `DemoResult`. Whether the model has learned is for the caller to judge (`result.learned`).

    Raises:
        InputError: On settings or a folder that do not fit.
        KeyboardInterrupt: Passed on; once training has begun, the model and the numbers so far are saved first.
    """
    if steps is None:
        steps = PROCESS_STEPS if process else STEPS
    if steps < 1:
        raise InputError("steps", str(steps), "at least 1", "The default is enough to learn the task.")
    if seed < 0:
        raise InputError("seed", str(seed), "0 or larger", "Any such number will do.")
    console = console or Console(stderr=True)
    problems = make_problems(eval_size, "held_out", terms=_terms(process))
    result = DemoResult(Path(output_dir), seed, steps, problems, process)
    check_output_dir(result.output_dir)
    result.write()  # from here on the folder is recognisably a demo's
    with _one_thread():
        _measure_train_measure(result, console)
    console.print(f"after training: {_in_words(result.after)}", highlight=False)
    result.report = write_report(result.output_dir, result.output_dir / REPORT_FILE)
    try:
        result.plot = write_report(result.output_dir, result.output_dir / PLOT_FILE, "png")
    except (ImportError, InputError):
        missing = f'{PLOT_FILE}: not drawn, matplotlib is missing. Install it: pip install "trl-drgrpo[report]"'
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
    if compare:
        for objective in compare:
            _train_stock(objective, result, console)
        folders = [result.output_dir, *(result.output_dir / objective for objective in compare)]
        result.comparison = write_report(folders, result.output_dir / COMPARISON_FILE)
        result.write()
    return result


def _terms(process: bool) -> tuple[int, int]:
    return TERMS if process else (MIN_TERMS, MAX_TERMS)


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
    if result.process:
        console.print("learning from demonstrations of long list sums ...", highlight=False)
        with result.timed("warm_start"):
            warm_start(result.output_dir / START_FOLDER, result.seed)
    tokenizer = AutoTokenizer.from_pretrained(result.start_dir)
    model = AutoModelForCausalLM.from_pretrained(result.start_dir, dtype=torch.float32)
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
    """Train the model in place; whatever stops it, the curves so far are in `result`."""
    process = PROCESS_SETTINGS if result.process else {}
    args = training_arguments(result.output_dir, result.seed, result.steps, **process)
    rewards = {"step_reward_funcs": line_reward} if result.process else {}
    trainer = _trainer(DrGRPOTrainer, model, args, tokenizer, result, **rewards)
    try:
        _run(trainer, console)
    finally:
        result.curves = curves_of(trainer.state.log_history, result.process)


def _train_stock(objective: str, result: DemoResult, console: Console) -> None:
    """The same run by stock TRL under one of its objectives, measured on the same held-out problems; it leaves the
    files that the report reads."""
    fields = STOCK_OBJECTIVES[objective]
    said = ", ".join(f'{name}="{value}"' for name, value in fields.items())
    console.print(f"the same with stock TRL, GRPOConfig({said}) ...", highlight=False, markup=False)
    folder = result.output_dir / objective
    shutil.rmtree(folder / "completions", ignore_errors=True)  # an earlier, longer demo's
    settings = {**training_settings(folder, result.seed, result.steps), **fields}
    args = GRPOConfig(**settings, log_completions=True, num_completions_to_print=0)
    tokenizer = AutoTokenizer.from_pretrained(result.start_dir)
    with result.timed(f"train_{objective}"), _one_thread():
        model = AutoModelForCausalLM.from_pretrained(result.start_dir, dtype=torch.float32)
        trainer = _trainer(GRPOTrainer, model, args, tokenizer, result)
        _run(trainer, console)
        trainer.save_state()
        tokenizer.save_pretrained(folder)
        result.stock[objective] = _measure(trainer.model, tokenizer, result)
    result.write()
    console.print(f"after training: {_in_words(result.stock[objective])}", highlight=False)


def _trainer(kind: Any, model: Any, args: Any, tokenizer: Any, result: DemoResult, **rewards: Any) -> Any:
    data = make_dataset(_PROMPTS_PER_STEP * result.steps, "train", result.seed, _terms(result.process))
    rewards = {"reward_funcs": list_sum_reward, **rewards}
    return kind(model=model, args=args, train_dataset=data, processing_class=tokenizer, **rewards)


def _run(trainer: Any, console: Console) -> None:
    with show_progress(trainer, ProgressCallback(console, every_steps=20)):
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
