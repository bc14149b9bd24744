"""The job of `trl-drgrpo train`: checked inputs -> the four dataclasses -> rewards and data -> trainer.

The behavior is that of TRL's `trl grpo` (model loading, quantization, PEFT, mixture, resume, evaluation split,
saving, pushing), around `DrGRPOTrainer`. Everything that can fail cheaply is tried before the model loads, the
cheapest first.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console, data, flags
from trl_drgrpo.cli.data import check_prompting, prompted
from trl_drgrpo.common.disk import check_writable, sole_writer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local
from trl_drgrpo.common.ranges import refuse_out_of_range
from trl_drgrpo.config.field_kinds import refused
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.features.resume.checkpoints import checkpoint_folders, choose_start
from trl_drgrpo.process_rewards.named import step_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.single_gpu.lora_presets import check_preset, preset_values

DEMO_MODEL = "trl_drgrpo:demo"


@dataclass
class Job:
    """
    A run that is put together but not started.

    Args:
        given (`dict[str, Any]`): The values from recipe and flags, typed.
        script, training, model, mixture: The four dataclasses, built.
        reward_funcs (`list`): Reward functions, and the id of a reward model if one was named (first, as TRL does).
        step_reward_funcs (`list`): Step reward functions.
        train_dataset, eval_dataset: The splits; the latter `None` without evaluation.
        quantization_config, peft_config: For the trainer; `None` for none.
        preset (`dict[str, Any]`): Keys that `preset` adds to `given`.
    """

    given: dict[str, Any]
    script: Any
    training: Any
    model: Any
    mixture: Any
    reward_funcs: list[Any] = field(default_factory=list)
    step_reward_funcs: list[Any] = field(default_factory=list)
    train_dataset: Any = None
    eval_dataset: Any = None
    quantization_config: Any = None
    peft_config: Any = None
    preset: dict[str, Any] = field(default_factory=dict)


# Before anything is imported -----------------------------------------------------------------------------------------


def check_given(given: dict[str, Any]) -> None:
    """Checks what needs no import: model, data and checkpoint are named and, where local, exist."""
    _check_model(given.get("model_name_or_path"))
    if given.get("preset") is not None:
        check_preset(given["preset"], given)
    if not given.get("datasets"):
        if not given.get("dataset_name"):
            remedy = "Add for example `dataset_name: train.jsonl`, or `reasoning_gym:chain_sum?size=1000`."
            raise InputError("dataset_name", "none", "a dataset, or a mixture under `datasets`", remedy)
        data.check_source(given["dataset_name"])
    check_prompting(given.get("prompt_template"), given.get("system_prompt"))
    rewards = [*filter(None, [given.get("reward_model_name_or_path")]), *(given.get("reward_funcs") or [])]
    if not rewards and not given.get("step_reward_funcs"):
        remedy = (
            "No reward source provided. Add for example `reward_funcs: [accuracy_reward]`; `trl-drgrpo train "
            "--help_all` lists them."
        )
        raise InputError("reward_funcs", "none", "at least one reward, or step_reward_funcs", remedy)
    weights = given.get("reward_weights")
    if weights is not None and len(weights) != len(rewards):
        expected = f"{len(rewards)}, one per reward"
        raise InputError("reward_weights", f"{len(weights)} weights", expected, "Give one number per reward.")
    check_writable("output_dir", given.get("output_dir") or "trainer_output")


@contextmanager
def run_folder(given: dict[str, Any], dry_run: bool) -> Iterator[None]:
    """Inside the block the run's folder is this run's alone, unless it is a dry run, and a run may start there."""
    output_dir = Path(given.get("output_dir") or "trainer_output")
    writes = console.is_main_process() and not dry_run
    with sole_writer("output_dir", output_dir) if writes else nullcontext():
        _check_start(given, output_dir)
        yield


def model_path(name: str) -> str:
    """The path or Hub id behind a model's name: `trl_drgrpo:demo` is the model that comes with the package."""
    if name == DEMO_MODEL:
        return str(MODEL_DIR)
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _check_model(name: str | None) -> None:
    if not name:
        remedy = f"Add model_name_or_path to the recipe; {DEMO_MODEL} is the tiny model that comes with the package."
        raise InputError("model_name_or_path", "none", "a Hub id or a local folder", remedy)
    if name.startswith("trl_drgrpo:") and name != DEMO_MODEL:
        raise InputError("model_name_or_path", name, DEMO_MODEL, f"Did you mean {DEMO_MODEL}?")
    check_local("model_name_or_path", model_path(name))


def _check_start(given: dict[str, Any], output_dir: Path) -> None:
    resume = given.get("resume_from_checkpoint")
    if isinstance(resume, str) and resume.lower() in ("true", "false"):  # from the command line it comes as text
        resume = given["resume_from_checkpoint"] = resume.lower() == "true"
    overwrite = bool(given.get("overwrite_output_dir"))
    if resume is True and not overwrite and checkpoint_folders(output_dir):
        return  # which is the newest is found out when the run starts, once
    choose_start(output_dir, resume, overwrite, checksums=console.is_main_process())


# Put together --------------------------------------------------------------------------------------------------------


def prepare(given: dict[str, Any]) -> Job:
    """Builds the dataclasses, resolves rewards and loads data; no model. `given` has passed [`check_given`]."""
    given = dict(given)
    preset = preset_values(given["preset"], given) if given.get("preset") is not None else {}
    fields = {**preset, **given}
    job = Job(given, *(_build(name, fields) for name in flags.DATACLASSES), preset=preset)
    job.model.model_name_or_path = model_path(job.model.model_name_or_path)
    refuse_out_of_range(vars(job.model))
    _check_early_stopping(job)
    _complete_init(job)
    if job.script.reward_model_name_or_path:
        job.reward_funcs.append(job.script.reward_model_name_or_path)
    job.reward_funcs += [resolve_reward(spec) for spec in job.script.reward_funcs or []]
    job.step_reward_funcs += [step_reward(spec) for spec in job.script.step_reward_funcs or []]
    _load_datasets(job)
    from trl import get_peft_config, get_quantization_config  # pyright: ignore[reportPrivateImportUsage]

    try:
        job.quantization_config, job.peft_config = get_quantization_config(job.model), get_peft_config(job.model)
    except (ValueError, ImportError) as error:
        raise refused(error, vars(job.model), "ModelConfig") from error
    return job


def check(job: Job) -> None:
    """Checks of a job that is not started: those that the trainer makes before its model loads."""
    from trl_drgrpo.config import preflight

    preflight.prepare(
        job.training,
        job.model.model_name_or_path,
        job.reward_funcs,
        job.train_dataset,
        eval_dataset=job.eval_dataset,
        step_reward_funcs=job.step_reward_funcs,
        quantization_config=job.quantization_config,
        peft_config=job.peft_config,
    )


def _build(name: str, given: dict[str, Any]) -> Any:
    known = flags.dataclass_flags(name)
    # A copy, because the dataclasses change lists and mappings in place.
    values = copy.deepcopy({key: value for key, value in given.items() if key in known})
    try:
        return flags.import_dataclass(name)(**values)
    except InputError:
        raise
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        raise refused(error, values, name) from error


def _check_early_stopping(job: Job) -> None:
    """Mirrors the check of transformers' callback at the start of training."""
    refuse_out_of_range(vars(job.script))
    patience, training = job.script.early_stopping_patience, job.training
    if patience is not None and (training.metric_for_best_model is None or training.eval_strategy == "no"):
        expected = "metric_for_best_model and eval_strategy as well"
        remedy = "Add for example `metric_for_best_model: eval_reward`, `eval_strategy: steps` and `eval_steps: 50`."
        raise InputError("early_stopping_patience", str(patience), expected, remedy)


def _complete_init(job: Job) -> None:
    """Model-loading keys of a recipe; `model_init_kwargs` win."""
    given = job.training.model_init_kwargs
    job.training.model_init_kwargs = {
        "revision": job.model.model_revision,
        "trust_remote_code": job.training.trust_remote_code,
        "attn_implementation": job.model.attn_implementation,
        "dtype": job.model.dtype,
        **(given or {}),
    }
    job.training.derived["model_init_kwargs"] = given, job.training.model_init_kwargs


def _load_datasets(job: Job) -> None:
    evaluate = job.training.eval_strategy != "no"
    train_split, test_split = job.script.dataset_train_split, job.script.dataset_test_split
    if job.mixture.datasets:
        if job.script.dataset_name:
            console.log("Both `datasets` and `dataset_name` are given: the mixture is used, `dataset_name` ignored.")
        source, splits = "the mixture", _load_mixture(job)
    else:
        source = job.script.dataset_name
        # Without evaluation only one split is wanted; a generated task can spare itself the other one.
        wanted = None if evaluate else train_split
        splits: Any = data.load_data(
            source, name=job.script.dataset_config, split=wanted, streaming=job.script.dataset_streaming
        )
        splits = splits if wanted is None else {train_split: splits}
    job.train_dataset = _prompts(job, splits, train_split, source)
    if evaluate:
        job.eval_dataset = _prompts(job, splits, test_split, source)


def _prompts(job: Job, splits: Any, split: str, source: str) -> Any:
    """A split with its columns renamed, checked, and with the prompts that the model is to see."""
    dataset = data.rename_columns(data.take_split(splits, split, source), job.script.rename_columns or [])
    data.check_prompts(dataset, source if split == job.script.dataset_train_split else f"{source}, split {split}")
    return prompted(dataset, job.script.prompt_template, job.script.system_prompt)


def _load_mixture(job: Job) -> Any:
    from datasets.exceptions import DatasetsError
    from trl import get_dataset  # pyright: ignore[reportPrivateImportUsage]

    try:
        return get_dataset(job.mixture)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        paths = ", ".join(entry.path for entry in job.mixture.datasets)
        remedy = f"{type(error).__name__}: {str(error).rstrip('.')}."
        raise InputError(
            "datasets", f"a mixture of {paths} that does not load", "datasets that load", remedy
        ) from error


# Run -----------------------------------------------------------------------------------------------------------------


def build_trainer(job: Job) -> Any:
    """The trainer of a job: the model is loaded, nothing is trained."""
    from transformers import EarlyStoppingCallback

    from trl_drgrpo.trainer import DrGRPOTrainer

    patience = job.script.early_stopping_patience
    trainer = DrGRPOTrainer(
        model=job.model.model_name_or_path,
        reward_funcs=job.reward_funcs,
        step_reward_funcs=job.step_reward_funcs,
        args=job.training,
        train_dataset=job.train_dataset,
        eval_dataset=job.eval_dataset,
        callbacks=[EarlyStoppingCallback(patience)] if patience is not None else None,
        quantization_config=job.quantization_config,
        peft_config=job.peft_config,
    )
    trainer.dataset_name = job.script.dataset_name
    return trainer


def train(job: Job, callbacks: Sequence[Any] = ()) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Trains, saves, and pushes if asked to.

    Returns two: `output_dir`, `steps` (optimizer steps done, in total), and where logged `reward_first`,
    `reward_last` (mean rewards over the first and the last logging interval), `eval_reward_first` and
    `eval_reward_last`; and all that was logged. `callbacks` are added to the trainer's.
    """
    import transformers
    from packaging.version import Version

    from trl_drgrpo.features.diagnostics.progress import show_progress
    from trl_drgrpo.upstream.trl_overrides import swapped

    trainer = build_trainer(job)
    for callback in callbacks:
        trainer.add_callback(callback)
    with show_progress(trainer):
        trainer.train(resume_from_checkpoint=job.training.resume_from_checkpoint)
    # Only a Hub id belongs into the model card's metadata.
    name = job.script.dataset_name
    dataset_name = name if name and data.is_hub_id(name) else None
    with trainer.writing(Path(job.training.output_dir)):
        with swapped(job.training, push_to_hub=False):  # saving does not push: that comes next, and once
            trainer.save_model(job.training.output_dir)
        trainer.create_model_card(dataset_name=dataset_name)
    trainer.accelerator.print(f"Model saved to {job.training.output_dir}.")
    if job.training.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
        trainer.accelerator.print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}.")
    result = {"output_dir": job.training.output_dir, "steps": trainer.state.global_step}
    for key in ("reward", "eval_reward"):
        if logged := logged_values(key, trainer.state.log_history):
            result |= {f"{key}_first": round(logged[0], 4), f"{key}_last": round(logged[-1], 4)}
    if Version(transformers.__version__) >= Version("5.18.0"):
        trainer.end()  # finishes the trackers and destroys the process group
    return result, trainer.state.log_history


def logged_values(key: str, logged: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers that were logged under a key; a step without any reward has logged `None` or NaN."""
    values = [each.get(key) for each in logged]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
