"""The job of `trl-drgrpo train`: checked inputs -> the four dataclasses -> rewards and data -> trainer.

The behavior is that of TRL's `trl grpo` (model loading, quantization, PEFT, mixture, resume, evaluation split,
saving, pushing), around `DrGRPOTrainer`. Everything that can fail cheaply is tried before the model loads, the
cheapest first.
"""

import copy
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_drgrpo.cli import console, data, flags
from trl_drgrpo.cli.recipe import dump
from trl_drgrpo.cli.run_keys import check_model_name, keep_recipe, model_path, needs_trust_recipe
from trl_drgrpo.common.disk import check_writable, sole_writer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import UPLOAD_EXCLUDES
from trl_drgrpo.common.output_folders import checkpoint_folders, recorded_base
from trl_drgrpo.common.ranges import refuse_out_of_range
from trl_drgrpo.common.rows import first_row
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.config.field_kinds import refused
from trl_drgrpo.features.resume.checkpoints import check_output_of_run, choose_start, newest_complete_checkpoint
from trl_drgrpo.process_rewards.named import step_reward
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import origin, resolve_object, resolve_reward
from trl_drgrpo.rewards.trial import try_rewards
from trl_drgrpo.single_gpu.lora_presets import check_preset, preset_values

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from trl_drgrpo.cli.script_arguments import DrGRPOScriptArguments
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.trainer import DrGRPOTrainer


@dataclass
class Job:
    """
    A run that is put together but not started.

    Args:
        values (`dict[str, Any]`): The values from recipe and flags, typed.
        preset (`dict[str, Any]`): Keys that `preset` adds to them.
        script, training, model: The dataclasses, built.
        inputs (`dict[str, Any]`): Further arguments of the trainer: `reward_funcs` (the id of a reward model first, as
            TRL does), `step_reward_funcs`, `train_dataset`, `eval_dataset` (`None` without evaluation),
            `quantization_config` and `peft_config` (`None` for none); and those named of `tools`,
            `environment_factory` and `rollout_func`.
    """

    values: dict[str, Any]
    preset: dict[str, Any]
    script: "DrGRPOScriptArguments"
    training: "DrGRPOConfig"
    model: Any
    inputs: dict[str, Any]


# Before anything is imported -----------------------------------------------------------------------------------------


def check_names(values: dict[str, Any]) -> None:
    """Check what needs no import: model, data and checkpoint are named and, where local, exist."""
    check_model_name(values.get("model_name_or_path"))
    if values.get("preset") is not None:
        check_preset(values["preset"], values)
    if not values.get("datasets"):
        if not values.get("dataset_name"):
            remedy = "Add for example `dataset_name: train.jsonl`, or `reasoning_gym:chain_sum?size=1000`."
            raise InputError("dataset_name", "none", "a dataset, or a mixture under `datasets`", remedy)
        data.check_source(values["dataset_name"])
    data.check_prompting(values.get("prompt_template"), values.get("system_prompt"))
    sources = ("reward_funcs", "step_reward_funcs", "reward_model_name_or_path", "environment_factory")
    if not any(values.get(key) for key in sources):
        remedy = (
            "No reward source provided. Add for example `reward_funcs: [accuracy_reward]`; `trl-drgrpo train "
            "--help_all` lists them."
        )
        raise InputError("reward_funcs", "none", "at least one reward, or step_reward_funcs", remedy)
    check_writable("output_dir", values.get("output_dir") or "trainer_output")


@contextmanager
def run_folder(values: dict[str, Any], dry_run: bool) -> Iterator[None]:
    """Keep a run's folder for this run alone inside the block, unless it is a dry run; refuse one where none may
    start."""
    output_dir = Path(values.get("output_dir") or "trainer_output")
    resume = values.get("resume_from_checkpoint")
    overwrite = bool(values.get("overwrite_output_dir"))
    is_main = console.is_main_process()
    # One process locks the folder for all of the run.
    lock = nullcontext()
    if is_main and not dry_run:
        lock = sole_writer("output_dir", output_dir)
    with lock:
        # Which of several checkpoints is the newest is found out when the run starts, once.
        if resume is not True or overwrite or not checkpoint_folders(output_dir):
            choose_start(output_dir, resume, overwrite, checksums=is_main)
        check_output_of_run(output_dir, resume, _input_folders(values))
        yield


def _input_folders(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders that a run reads, by setting."""
    model = model_path(values.get("model_name_or_path") or "")
    folders = {
        "model_name_or_path": model,
        "its base model": recorded_base(model),
        "reward_model_name_or_path": values.get("reward_model_name_or_path"),
        "dataset_name": values.get("dataset_name"),
    }
    for spec in values.get("step_reward_funcs") or ():
        # `runs/prm`, `{prm: runs/prm}` or `{prm: {model: runs/prm}}`.
        scorer = spec
        if isinstance(scorer, Mapping):
            scorer = next(iter(scorer.values()))
        if isinstance(scorer, Mapping):
            scorer = scorer.get("model")
        folders[f"step reward {scorer}"] = scorer
    return {name: path for name, path in folders.items() if isinstance(path, str) and path}


# Put together --------------------------------------------------------------------------------------------------------


def prepare(values: dict[str, Any]) -> Job:
    """Build the dataclasses, resolve rewards and load data; no model. `values` have passed [`check_names`]."""
    preset = {}
    if values.get("preset") is not None:
        preset = preset_values(values["preset"], values)
    # Explicit values win over the preset's.
    script, training, model, mixture = (build(name, {**preset, **values}) for name in flags.DATACLASSES)
    model.model_name_or_path = model_path(model.model_name_or_path)
    refuse_out_of_range(vars(model))
    refuse_out_of_range(vars(script))
    # Mirrors the check of transformers' callback at the start of training.
    patience = script.early_stopping_patience
    if patience is not None and (training.metric_for_best_model is None or training.eval_strategy == "no"):
        expected = "metric_for_best_model and eval_strategy as well"
        remedy = "Add for example `metric_for_best_model: eval_reward`, `eval_strategy: steps` and `eval_steps: 50`."
        raise InputError("early_stopping_patience", str(patience), expected, remedy)
    # As `trl grpo` puts them together; `model_init_kwargs` wins over the model's keys of a recipe. The card tells what
    # somebody has set from `derived`.
    model_init_kwargs = training.model_init_kwargs
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(model_init_kwargs or {}),
    }
    training.derived["model_init_kwargs"] = (model_init_kwargs, training.model_init_kwargs)
    inputs = _functions(script)
    inputs |= _datasets(script, mixture, evaluate=training.eval_strategy != "no")
    from trl import get_peft_config, get_quantization_config  # pyright: ignore[reportPrivateImportUsage]

    from trl_drgrpo.single_gpu.peft_adapters import adapt_language_model_only

    with _refusals(vars(model), "ModelConfig"):
        quantization_config = get_quantization_config(model)
        peft_config = get_peft_config(model)
        inputs |= {"quantization_config": quantization_config, "peft_config": peft_config}
    # The preset adapts all linear layers, which in a model with several parts means those of the language model.
    if "lora_target_modules" in preset and peft_config is not None:
        adapt_language_model_only(peft_config)
    return Job(values, preset, script, training, model, inputs)


def _functions(script: "DrGRPOScriptArguments") -> dict[str, Any]:
    """Return the rewards and the user's other functions, by argument of the trainer."""
    # A reward model comes first, as in TRL: weights go by position.
    rewards = []
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    specs: Any = script.reward_funcs or []
    rewards += map(resolve_reward, specs)
    step_rewards = [step_reward(spec) for spec in script.step_reward_funcs or []]
    functions: dict[str, Any] = {"reward_funcs": rewards, "step_reward_funcs": step_rewards}
    if script.tools:
        functions["tools"] = [resolve_object(path, "tools") for path in script.tools]
    for field in ("environment_factory", "rollout_func"):
        path = getattr(script, field)
        if path:
            functions[field] = resolve_object(path, field)
    return functions


def dry_run(job: Job) -> str:
    """Return the resolved configuration of a job, checked as by the trainer before its model loads."""
    from trl_drgrpo.config import preflight

    preflight.prepare(job.training, job.model.model_name_or_path, **job.inputs)
    row = first_row(job.inputs["train_dataset"])
    # Whoever else writes completions may pass anything on to rewards.
    is_plain = not (job.inputs.get("environment_factory") or job.inputs.get("rollout_func"))
    if row is not None and is_plain:
        try_rewards(job.inputs["reward_funcs"], row)
    return render(job)


def build(name: str, values: dict[str, Any]) -> Any:
    """Build one of the four dataclasses, from the values of its own fields."""
    fields = flags.dataclass_flags(name)
    arguments = {key: value for key, value in values.items() if key in fields}
    # A copy, because the dataclasses change lists and mappings in place.
    arguments = copy.deepcopy(arguments)
    with _refusals(arguments, name):
        return flags.import_dataclass(name)(**arguments)


@contextmanager
def _refusals(values: Mapping[str, Any], owner: str) -> Iterator[None]:
    """Make one `InputError` of what a library says about a whole configuration."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        raise refused(error, values, owner) from error


def _datasets(script: "DrGRPOScriptArguments", mixture: Any, evaluate: bool) -> dict[str, Any]:
    """Return the splits, with the prompts that the model is to see."""
    source = script.dataset_name or ""
    train_split = script.dataset_train_split
    splits: Any
    if mixture.datasets:
        if source:
            console.log("Both `datasets` and `dataset_name` are given: the mixture is used, `dataset_name` ignored.")
        source = "the mixture"
        splits = data.load_mixture(mixture)
    else:
        options: dict[str, Any] = {"name": script.dataset_config, "streaming": script.dataset_streaming}
        if evaluate:
            splits = data.load_data(source, **options)
        # A generated task can spare itself the other split.
        else:
            splits = {train_split: data.load_data(source, split=train_split, **options)}

    def prompts(split: str, name: str) -> Any:
        dataset = data.take_split(splits, split, source)
        dataset = data.rename_columns(dataset, script.rename_columns or [])
        data.check_prompts(dataset, name)
        return data.prompted(dataset, script.prompt_template, script.system_prompt)

    datasets = {"train_dataset": prompts(train_split, source), "eval_dataset": None}
    if evaluate:
        test_split = script.dataset_test_split
        datasets["eval_dataset"] = prompts(test_split, f"{source}, split {test_split}")
    return datasets


# Run -----------------------------------------------------------------------------------------------------------------


def build_trainer(job: Job) -> "DrGRPOTrainer":
    """Return the trainer of a job: the model is loaded, nothing is trained."""
    from transformers import EarlyStoppingCallback

    from trl_drgrpo.trainer import DrGRPOTrainer

    model = job.model.model_name_or_path
    console.log(f"Loading {model}")
    callbacks = []
    if job.script.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(job.script.early_stopping_patience))
    trainer = DrGRPOTrainer(model=model, args=job.training, callbacks=callbacks, **job.inputs)
    trainer.dataset_name = job.script.dataset_name
    return trainer


def train(job: Job) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Train, save, and push if asked to.

    Returns two: `output_dir`, `steps` (optimizer steps done, in total), and where logged `reward_first`,
    `reward_last` (mean rewards over the first and the last logging interval), the same of `eval_reward`, `step_reward`
    and `eval_step_reward` (a single evaluation as `eval_reward_at_step_<n>`); and all that was logged.
    """
    import transformers
    from packaging.version import Version

    from trl_drgrpo.features.diagnostics.progress import show_progress
    from trl_drgrpo.upstream.trl_overrides import swapped

    recipe = render(job)
    trainer = build_trainer(job)
    args = job.training
    trainer.add_callback(_keeps_recipe(recipe))
    with show_progress(trainer):
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    # Only a Hub id belongs into the model card's metadata.
    dataset_name = job.script.dataset_name
    if not dataset_name or not data.is_hub_id(dataset_name):
        dataset_name = None
    with trainer.writing(Path(args.output_dir)):
        # `save_model` would push by itself: that comes behind the card, and once.
        with swapped(args, push_to_hub=False):
            trainer.save_model(args.output_dir)
        trainer.create_model_card(dataset_name=dataset_name)
    trainer.accelerator.print(f"Model saved to {args.output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
        trainer.accelerator.print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}.")
    result = {"output_dir": args.output_dir, "steps": trainer.state.global_step}
    result |= first_and_last(trainer.state.log_history)
    # Finishes the trackers and destroys the process group.
    if Version(transformers.__version__) >= Version("5.18.0"):
        trainer.end()
    return result, trainer.state.log_history


# Keys of the log, and what the result calls them.
_RESULTS = {
    "reward": "reward",
    "eval_reward": "eval_reward",
    "process/reward_mean": "step_reward",
    "eval_process/reward_mean": "eval_step_reward",
}


def first_and_last(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the first and the last logged value of each reward; a single evaluation by its step."""
    result = {}
    for key, name in _RESULTS.items():
        logged = [entry for entry in history if logged_values(key, [entry])]
        if not logged or _is_zero_by_definition(key, history):
            continue
        first, last = (round(entry[key], 4) for entry in (logged[0], logged[-1]))
        if key.startswith("eval_") and len(logged) == 1:
            # As both first and last it would read as no change. It may come before training, or after it.
            result[f"{name}_at_step_{logged[0]['step']}"] = first
        else:
            result |= {f"{name}_first": first, f"{name}_last": last}
    return result


def _is_zero_by_definition(key: str, logged: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether this is the reward of a run that has step rewards only."""
    from trl_drgrpo.process_rewards.without_outcome import PROCESS_ONLY

    if key not in ("reward", "eval_reward"):
        return False
    return any(PROCESS_ONLY in entry for entry in logged)


def logged_values(key: str, logged: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the numbers that were logged under a key; a step without any reward has logged `None` or NaN."""
    values = [entry.get(key) for entry in logged]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


# Words about it -----------------------------------------------------------------------------------------------------

OBJECTIVE = ("loss_type", "scale_rewards", "beta", "loss_normalizer", "advantage_baseline", "num_generations")


def render(job: Job) -> str:
    """Return the resolved configuration of a run: YAML with comments, without tokens."""
    objective = {key: getattr(job.training, key) for key in OBJECTIVE}
    if objective["loss_normalizer"] is None:
        objective["loss_normalizer"] = job.training.max_completion_length
    defaults = flags.read_flags()
    changed = {}
    for key, value in scrubbed(job.values).items():
        if key not in (*OBJECTIVE, "hub_token") and value != defaults[key].default:
            changed[key] = value
    text = f"# Objective\n{dump(objective)}# Given, and not the default\n{dump(changed)}# Derived\n"
    for name, value in derived(job).items():
        text += f"# {name}: {value}\n"
    return text


def derived(job: Job) -> dict[str, Any]:
    """Return sizes of steps and data derived from a configuration. Rows are completions; prompts are different
    prompts."""
    args = job.training
    per_device = args.per_device_train_batch_size
    accumulated = args.gradient_accumulation_steps
    processes = args.world_size
    rows = per_device * accumulated * processes
    factors = f"{per_device} per device x {accumulated} accumulated x {processes} process"
    if processes > 1:
        factors += "es"
    precision = "full precision"
    if args.bf16:
        precision = "bf16"
    elif args.fp16:
        precision = "fp16"
    facts: dict[str, Any] = {
        "rows per optimizer step": f"{rows} ({factors})",
        "prompts per optimizer step": f"{rows / args.num_generations:g}",
        "rows per generation batch": args.generation_batch_size,
        "prompts per generation batch": args.generation_batch_size // args.num_generations,
        "optimizer steps per generation batch": f"{args.generation_batch_size * args.num_iterations / rows:g}",
        "device": f"{args.device.type}, {precision}",
        "model": job.model.model_name_or_path,
    }
    if job.preset:
        settings = ", ".join(f"{key} {value}" for key, value in job.preset.items())
        facts[f"preset {job.script.preset} sets, on this device"] = settings
    datasets = {"train data": job.inputs["train_dataset"], "evaluation data": job.inputs["eval_dataset"]}
    for name, dataset in datasets.items():
        if dataset is not None:
            size = len(dataset) if hasattr(dataset, "__len__") else "a stream of"
            columns = ", ".join(dataset.column_names or ["unknown"])
            facts[name] = f"{size} rows, columns {columns}"
    rewards = {"reward": job.inputs["reward_funcs"], "step reward": job.inputs["step_reward_funcs"]}
    for kind, funcs in rewards.items():
        for reward in funcs:
            if isinstance(reward, str):
                facts[f"{kind} {reward}"] = "a model"
            else:
                facts[f"{kind} {reward_name(reward)}"] = origin(reward)
    return facts


def _keeps_recipe(text: str) -> "TrainerCallback":
    """Return a callback that writes a run's recipe, YAML, into its log folder when training begins: a run that starts
    anew has deleted the old log by then."""
    from trl_drgrpo.upstream.description import DescribingCallback

    class KeepsRecipe(DescribingCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero and args.run_log:
                keep_recipe(Path(args.output_dir), text)

    return KeepsRecipe()


def say(place: str, words: Callable[[], str]) -> None:
    """Print what describes a run, from the main process; a failure here ends no run and hides nothing."""
    from trl_drgrpo.upstream.description import DescriptionGuard

    if console.is_main_process():
        with DescriptionGuard()(place):
            console.log(words())


# Key of the log, its name in the summary, and the format of its values.
_SHOWN = (
    ("eval_drgrpo/pass_rate", "pass rate on the evaluation data", "{:.0%}"),
    ("eval_reward", "reward on the evaluation data", "{:.3g}"),
    ("eval_process/reward_mean", "step reward on the evaluation data", "{:.3g}"),
    ("drgrpo/pass_rate", "pass rate in training", "{:.0%}"),
    ("reward", "reward in training", "{:.3g}"),
    ("process/reward_mean", "step reward in training", "{:.3g}"),
)


def closing(
    output_dir: str, logged: Sequence[Mapping[str, Any]], seconds: float, run_log: bool, recipe: Mapping[str, Any]
) -> str:
    """Return the summary of a finished run.

    Args:
        output_dir (`str`): Its folder.
        logged (`Sequence[Mapping]`): The log history.
        seconds (`float`): Training time.
        run_log (`bool`): Whether the run keeps its recipe, which `eval` reads.
        recipe (`Mapping[str, Any]`): The values of the recipe.

    Returns:
        `str`: Lines without a break at the end.
    """
    from trl_drgrpo.features.diagnostics.progress import spoken_time

    lines = [f"Trained in {spoken_time(seconds)}. Model: {output_dir}"]
    for key, name, form in _SHOWN:
        values = logged_values(key, logged)
        if len(values) > 1 and not _is_zero_by_definition(key, logged):
            first = form.format(values[0])
            last = form.format(values[-1])
            lines.append(f"  {name}: {first} -> {last} (first and last logged)")
    # Commands to copy.
    folder = shlex.quote(output_dir)
    name = shlex.quote(Path(output_dir).name)
    evaluate = f"  trl-drgrpo eval --model {folder} --num_samples 8"
    generate = f"  trl-drgrpo generate --model {folder}"
    # Code that came with the recipe runs again only if the user says so: a model's own in both, a reward's in `eval`.
    brings_code = needs_trust_recipe("trust_remote_code", recipe)
    if brings_code:
        generate += " --trust_recipe"
    if brings_code or needs_trust_recipe("reward_funcs", recipe):
        evaluate += " --trust_recipe"
    lines += ["Next:", f"  trl-drgrpo report {folder}"]
    if run_log:
        lines.append(evaluate)
    lines += [generate, f"  hf upload YOUR_NAME/{name} {folder} {UPLOAD_EXCLUDES}"]
    return "\n".join(lines)


def interrupted(output_dir: Path) -> str:
    """Name the safe checkpoint of an interrupted run, by its folder, and how to go on."""
    checkpoint = newest_complete_checkpoint(output_dir)
    if checkpoint is None:
        return (
            f"No checkpoint in {output_dir} is complete: the run starts from scratch. `--save_strategy steps "
            "--save_steps N` writes one every N steps."
        )
    go_on = shlex.join(["--resume_from_checkpoint", str(checkpoint)])
    return f"Saved: {checkpoint}. To continue: the same command with {go_on}, without --overwrite_output_dir."
