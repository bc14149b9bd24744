"""Facts of a run for `run.json` of the run log: objective, settings, rewards, versions.

Settings are picked by name, never copied as a whole, and scrubbed: no token, password or key gets into the file.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.common.rows import is_conversational
from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.features.model_card.objective import objective_of, plain_data
from trl_drgrpo.upstream.versions import LIBRARIES, installed_versions

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.step_scorer import StepScorer
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


def names_in(text: str) -> tuple[str, ...]:
    """Return the names in a text. A long table of names reads better without quotes."""
    return tuple(text.split())


# Fields of the configuration, a line for each matter. One that this version of TRL does not have is left out.
_OBJECTIVE = names_in("""
    advantage_baseline beta beta_warmup_steps
    epsilon epsilon_high delta scale_by_running_std
    importance_sampling_level use_bias_correction_kl entropy_coef use_adaptive_entropy
    top_entropy_quantile mask_truncated_completions off_policy_mask_threshold
""")
_VLLM_OBJECTIVE = names_in("""
    vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max
""")
_STEP_OBJECTIVE = ("process_role", "step_credit", "step_baseline", "deepseekmath_step_std")
_WEIGHTS = ("outcome_weight", "process_weight")
_SAMPLING = names_in("""
    num_generations temperature top_p top_k min_p repetition_penalty
    forks fork_depth fork_at fork_threshold
""")
# Fields that the objective of a run is made of, also those that its rewards and their steps are named with.
OBJECTIVE_FIELDS = (
    *_OBJECTIVE,
    *_VLLM_OBJECTIVE,
    *_STEP_OBJECTIVE,
    *_WEIGHTS,
    *_SAMPLING,
    *("reward_weights", "step_reward_weights", "step_separator", "loss_normalizer"),
)
_SETTINGS = names_in(f"""
    learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm optim
    per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size
    num_iterations num_generations_eval max_completion_length max_turn_length
    {" ".join(_SAMPLING)}
    dynamic_sampling max_sampling_rounds curriculum curriculum_q_min
    use_vllm vllm_mode seed bf16 fp16 gradient_checkpointing
    logging_steps micro_batching share_prompts fast_generation generation_rows on_reward_error
    record_groups
""")
_ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules")


def start_facts(trainer: "TrainerProtocol") -> dict[str, Any]:
    """Return facts of one start of a run: run, versions, device, number of processes."""
    device = trainer.accelerator.device
    name = device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "run_id": trainer.run_id,
        "versions": installed_versions([*LIBRARIES, "peft", "accelerate"]),
        "device": name,
        "processes": trainer.accelerator.num_processes,
    }


def run_facts(trainer: "TrainerProtocol", correctness: CorrectnessRule | None) -> dict[str, Any]:
    """Return facts of the run, JSON-ready. `correctness` decides which completions are correct."""
    info = getattr(trainer.train_dataset, "info", None)
    # `right` is the reward that decides what is correct: a reader of the log needs no configuration.
    facts: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "max_steps": trainer.state.max_steps,
        "model": str(getattr(trainer.model.config, "_name_or_path", "")) or type(trainer.model).__name__,
        "adapter": adapter_facts(trainer.unwrapped_model),
        "dataset": trainer.dataset_name or getattr(info, "dataset_name", None) or None,
        "prompts": "messages" if is_conversational(trainer.train_dataset) else "texts",
        "special_tokens": trainer.text_tokenizer.all_special_tokens,
        "formula": objective_of(trainer)[0],
        "objective": _objective(trainer),
        "settings": fields_of(trainer.args, _SETTINGS),
        "rewards": {"names": list(trainer.reward_func_names), "weights": trainer.reward_weights.tolist()},
        "step_rewards": None,
        "right": None,
    }
    scorer = trainer.step_scorer
    if scorer:
        facts["step_rewards"] = {"names": list(scorer.names), "weights": list(scorer.weights)}
    if correctness:
        facts["right"] = {"reward": correctness.name, "threshold": correctness.threshold}
    return scrubbed(facts)


def objective_facts(trainer: "TrainerProtocol") -> dict[str, Any]:
    """Return facts that define the objective, in one flat JSON-ready mapping that a resumed run compares: the
    objective of `run_facts`, rewards with their weights, how completions are sampled."""
    scorer = trainer.step_scorer
    step_rewards = []
    if scorer:
        step_rewards = _weighted(scorer.names, scorer.weights)
    return {
        **_objective(trainer),
        "rewards": _weighted(trainer.reward_func_names, trainer.reward_weights.tolist()),
        "step_rewards": step_rewards,
        **fields_of(trainer.args, _SAMPLING),
    }


def _objective(trainer: "TrainerProtocol") -> dict[str, Any]:
    """Return the terms of the objective by name; `None` for a setting that has no effect in this run."""
    args = trainer.args
    # Settings of vLLM and of steps are `None` where they have no effect: a resumed run must not be told of them.
    objective = {"loss_normalizer": trainer.loss_normalizer} | fields_of(args, _OBJECTIVE)
    objective |= dict.fromkeys((*_VLLM_OBJECTIVE, *_STEP_OBJECTIVE, "step_separator"))
    if args.use_vllm:
        objective |= fields_of(args, _VLLM_OBJECTIVE)
    if trainer.step_scorer:
        objective |= {name: getattr(args, name) for name in _STEP_OBJECTIVE}
        objective["step_separator"] = _separator(trainer, trainer.step_scorer)
    objective["state_keys"] = trainer.turns.state_keys_of
    objective["dynamic_sampling"] = None  # True keeps the objective
    if args.dynamic_sampling == "dapo":
        objective["dynamic_sampling"] = "dapo"
    objective["advantages"] = trainer.own_advantages
    return objective | fields_of(args, _WEIGHTS)


def _separator(trainer: "TrainerProtocol", scorer: "StepScorer") -> list[str] | str:
    """Return the configured rule for step ends, or the name of a segmenter that the trainer was given instead."""
    from trl_drgrpo.process_rewards.steps.segmenter import configured_segmenter

    if scorer.segmenter.name == configured_segmenter(trainer.step_separator).name:
        return trainer.step_separator
    return scorer.segmenter.name


def _weighted(names: Sequence[str], weights: Sequence[float]) -> list[str]:
    return [f"{weight:g} * {name}" for name, weight in zip(names, weights, strict=True)]


def fields_of(config: object, names: Iterable[str]) -> dict[str, Any]:
    """Return fields by name, those that this version has; enumerations by their value."""
    return {name: plain_data(getattr(config, name)) for name in names if hasattr(config, name)}


def adapter_facts(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return kind and sizes of a model's adapter; `None` where it has none."""
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return None
    facts = fields_of(config, _ADAPTER)
    modules = getattr(config, "target_modules", None)
    if isinstance(modules, set):  # its order differs from process to process
        facts["target_modules"] = sorted(modules)
    return facts
