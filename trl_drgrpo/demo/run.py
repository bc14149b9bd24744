"""Train the shipped model on the list-sum task with `DrGRPOTrainer`: a whole run in a minute or two of CPU time.

`run_demo` measures the model on held-out problems, trains it, measures it again and saves the model, a report and
every number. The claim that it checks: sampled accuracy rises by at least 40 percentage points. With process rewards
the task is the long list sums, and the model is warm-started on them first. `compare` trains the same by stock TRL:
model, data, seed, steps and settings are the same, only trainer and objective differ (and TRL has no step rewards).

It always runs on the CPU in float32, also where there is a GPU: for a model this small the CPU is fast enough, and the
numbers stay comparable.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.common.drawing import save_figure
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config import DrGRPOConfig
from trl_drgrpo.demo import MODEL_DIR, STOCK_OBJECTIVES
from trl_drgrpo.demo.build import TERMS, warm_start
from trl_drgrpo.demo.pace import draw_pace
from trl_drgrpo.demo.result import (
    COMPARISON_FILE,
    MODEL_FOLDER,
    OURS,
    PACE_FILE,
    PLOT_FILE,
    REPORT_FILE,
    START_FOLDER,
    DemoResult,
    prepare_output_dir,
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

# P and G.
_PROMPTS_PER_STEP = 8
_NUM_GENERATIONS = 8
STEPS = 200
# A step on long list sums takes twice as long.
PROCESS_STEPS = 60


def training_arguments(
    output_dir: Path, seed: int, steps: int, config_class: type[GRPOConfig] = DrGRPOConfig, **fields: Any
) -> Any:
    """Build the training settings of the demo and of the runs that it is compared with.

    `P = 8` prompts of `G = 8` completions per step, on the CPU in float32. `fields`: fields of `config_class` to add
    or replace, `PROCESS_SETTINGS` for example.
    """
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": _PROMPTS_PER_STEP * _NUM_GENERATIONS,
        "num_generations": _NUM_GENERATIONS,
        "max_completion_length": 128,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    return config_class(**settings | fields)


def run_demo(
    output_dir: str | Path = "runs/demo",
    seed: int = 0,
    steps: int | None = None,
    process: bool = False,
    compare: Sequence[str] = (),
    eval_size: int = 512,
    console: Console | None = None,
) -> DemoResult:
    """Measure, train, measure again, save.

    Args:
        output_dir (`str` or `Path`): Folder for `model/`, `curves.png`, `report.html` and `results.json`; see
            `prepare_output_dir`.
        seed (`int`): Seed of training problems and sampling, not negative. The held-out problems are always the same.
        steps (`int`, *optional*): Training steps, at least 1; 200 by default, 60 with process rewards.
        process (`bool`): Train on long list sums and reward every line with `line_reward`, in addition to the outcome.
        compare (`Sequence[str]`): Keys of `STOCK_OBJECTIVES`: then train the same model with stock TRL under each,
            write a report over all runs, and draw their accuracy over CPU time (`pace.png`).
        eval_size (`int`): Number of held-out problems.
        console (`rich.console.Console`, *optional*): Console for progress; standard error by default.

    Returns:
        `DemoResult`. Whether the model has learned is for the caller to judge (`result.numbers["learned"]`).

    Raises:
        InputError: On settings or a folder that do not fit.
        KeyboardInterrupt: Passed on; once training has begun, the model and the numbers so far are saved first.
    """
    default_steps = STEPS
    terms = (MIN_TERMS, MAX_TERMS)
    fields: dict[str, Any] = {}
    step_rewards: dict[str, Any] = {}
    if process:
        default_steps = PROCESS_STEPS
        terms = TERMS
        fields = PROCESS_SETTINGS
        step_rewards = {"step_reward_funcs": line_reward}
    if steps is None:
        steps = default_steps
    if steps < 1:
        raise InputError("steps", str(steps), "at least 1", "The default is enough to learn the task.")
    if seed < 0:
        raise InputError("seed", str(seed), "0 or larger", "Any such number will do.")
    if console is None:
        console = Console(stderr=True)
    settings = {"seed": seed, "steps": steps, "process": fields or None}
    output_dir = Path(output_dir)
    result = DemoResult(output_dir, make_problems(eval_size, "held_out", terms=terms), settings)
    prepare_output_dir(output_dir)
    # From here on the folder is recognizably a demo's.
    result.write()
    start = MODEL_DIR
    if process:
        console.print("learning from demonstrations of long list sums ...", highlight=False)
        with result.timed("warm_start"):
            start = warm_start(output_dir / START_FOLDER, seed)
    data = make_dataset(_PROMPTS_PER_STEP * steps, "train", seed, terms)

    common = {"reward_funcs": list_sum_reward, "train_dataset": data}
    tokenizer, model = _loaded(start)
    try:
        with result.timed("evaluate_before"):
            accuracies = result.measure("before", model, tokenizer)
        result.write()
        console.print(f"before training: {accuracies}", highlight=False)
        args = training_arguments(output_dir, seed, steps, **fields)
        trainer = DrGRPOTrainer(model, args=args, processing_class=tokenizer, **common, **step_rewards)
        if compare:
            trainer.add_callback(result.pace_of(OURS, tokenizer))
        with result.timed("train"):
            _train(trainer, console)
        with result.timed("evaluate_after"):
            accuracies = result.measure("after", model, tokenizer)
        # Printed before anything is written: the disk may be full.
        console.print(f"after training: {accuracies}", highlight=False)
    finally:
        # Also of a run that was interrupted. The trainer has turned the cache off for training, and the tokenizer in
        # use would remember where it came from.
        model.config.use_cache = True
        model.save_pretrained(output_dir / MODEL_FOLDER)
        build_tokenizer().save_pretrained(output_dir / MODEL_FOLDER)
        result.write()
    write_report(output_dir, output_dir / REPORT_FILE)
    _draw(output_dir / PLOT_FILE, lambda path: write_report(output_dir, path, "png"), console)

    # Other objectives get the same start and data. TRL logs completions as files, one per step: those of an earlier,
    # longer demo would count as this one's.
    for objective in compare:
        objective_fields = STOCK_OBJECTIVES[objective]
        switches = ", ".join(f'{name}="{value}"' for name, value in objective_fields.items())
        console.print(f"the same with stock TRL, GRPOConfig({switches}) ...", highlight=False, markup=False)
        folder = output_dir / objective
        shutil.rmtree(folder / "completions", ignore_errors=True)
        logging = {"log_completions": True, "num_completions_to_print": 0}
        args = training_arguments(folder, seed, steps, GRPOConfig, **objective_fields, **logging)
        tokenizer, model = _loaded(start)
        trainer = GRPOTrainer(model, args=args, processing_class=tokenizer, **common)
        trainer.add_callback(result.pace_of(objective, tokenizer))
        with result.timed(f"train_{objective}"):
            _train(trainer, console)
            accuracies = result.measure(objective, model, tokenizer)
        # The report reads the state, and counts tokens by the tokenizer.
        trainer.save_state()
        tokenizer.save_pretrained(folder)
        result.write()
        console.print(f"after training: {accuracies}", highlight=False)
    if compare:
        folders = [output_dir, *(output_dir / objective for objective in compare)]
        write_report(folders, output_dir / COMPARISON_FILE)
        lines = {name: [run] for name, run in result.numbers["pace"].items()}
        panels = {"list sums": lines}
        _draw(output_dir / PACE_FILE, lambda path: save_figure(draw_pace(panels, 7, 4.5), path), console)
    return result


def _draw(path: Path, draw: Callable[[Path], Any], console: Console) -> None:
    """Draw a picture, or print that matplotlib is missing."""
    try:
        draw(path)
    except (ImportError, InputError):
        missing = f'{path.name}: not drawn, matplotlib is missing. Install it: pip install "trl-drgrpo[report]"'
        console.print(missing, markup=False, highlight=False, soft_wrap=True)


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Load tokenizer and model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model


def _train(trainer: GRPOTrainer, console: Console) -> None:
    with show_progress(trainer, ProgressCallback(console, every_steps=20)):
        trainer.train()
