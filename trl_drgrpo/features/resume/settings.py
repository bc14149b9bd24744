"""Settings that decide a run, as a checkpoint records them, and what becomes of a difference when the run is resumed.

Every field of the configuration is in exactly one class: those of `ON_RESUME`, the objective, or, all others, the
settings whose new value wins and is said. So a field that a newer TRL adds is compared, too. Beside the fields stand
the facts that no field holds (`FACTS`): model, reference, data, tokenizer, options of rewards, versions.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from datasets import Dataset

from trl_drgrpo.common.secrets import scrubbed
from trl_drgrpo.features.diagnostics.run_facts import OBJECTIVE_FIELDS, adapter_facts, fields_of, names_in
from trl_drgrpo.rewards.options import reward_options
from trl_drgrpo.upstream.versions import LIBRARIES, installed_versions

if TYPE_CHECKING:
    from trl_drgrpo.upstream.argument_types import Data
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

ON_RESUME = {
    # With the optimizer's state: torch restores them from there, whatever the arguments say.
    "kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "refused": ("optim", "loss_normalizer", "base", "reference"),
    # The new value wins, and completions that are not trained on yet are generated again.
    "generated again": names_in("""
        per_device_train_batch_size gradient_accumulation_steps steps_per_generation
        generation_batch_size num_iterations num_generations
    """),
    # The new value wins without a word: none of them changes what is trained. The last line is said as what it leads
    # to: the dtype, attention and base of the model, the device, `warmup_steps`.
    "unsaid": names_in("""
        output_dir overwrite_output_dir resume_from_checkpoint restore_callback_states_from_checkpoint
        report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
        disable_tqdm log_level log_level_replica log_on_each_node log_completions log_multimodal
        num_completions_to_print log_unique_prompts log_completions_hub_repo logging_first_step
        run_log record_groups run_warnings skip_memory_metrics debug local_rank
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
        hub_revision save_on_each_node do_train do_eval do_predict include_for_metrics
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context torch_empty_cache_steps
        ddp_backend ddp_timeout ddp_bucket_cap_mb vllm_server_base_url vllm_server_host
        vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        model_init_kwargs trust_remote_code use_cpu warmup_ratio
    """),
}
FACTS = names_in("""
    base reference dtype attn_implementation quantization adapter tokenizer chat_template
    train_dataset reward_options device versions
""")
_ROWS = 5_000  # that are compared: a second's worth of text
_ROWS_OF_MEDIA = 64  # of pictures and the like, which are decoded
_MEDIA = ("Image", "Audio", "Video")
_VALUES = 16  # of each weight


def classes_of(field: str) -> list[str]:
    """Return the classes that a field, or a fact, is in: one of `ON_RESUME`, `objective` or `anew`."""
    listed = [name for name, settings in ON_RESUME.items() if field in settings]
    if listed:  # several only by mistake, which a test finds
        return listed
    return ["objective"] if field in OBJECTIVE_FIELDS else ["anew"]


def resume_facts(
    trainer: "TrainerProtocol",
    options: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Return the settings that a checkpoint records, JSON-ready and without secrets.

    Args:
        trainer ([`DrGRPOTrainer`]): With the model as it was built, before a checkpoint's weights are loaded.
        options (`Mapping[str, Any]`): Options of its rewards, see `options_of_rewards`.
        optimizer (`torch.optim.Optimizer`, *optional*): The one that the trainer was given.
    """
    args = trainer.args
    names = [field.name for field in dataclasses.fields(args)]
    compared = [name for name in names if classes_of(name)[0] in ("kept", "anew")]
    facts = fields_of(args, compared)
    optim = str(getattr(args.optim, "value", args.optim))
    if optimizer:
        optim = type(optimizer).__name__
    facts["optim"] = optim.removesuffix("_fused")  # another implementation, the same state
    tokenizer = trainer.text_tokenizer
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()  # not every tokenizer has it
    facts |= {
        **model_facts(trainer),
        "adapter": adapter_facts(trainer.unwrapped_model),
        "tokenizer": f"{len(tokenizer)} tokens ({_digest(sorted(added.items()))})",
        "chat_template": _digest(tokenizer.chat_template) if tokenizer.chat_template else None,
        "train_dataset": dataset_mark(trainer.train_dataset),
        "reward_options": options,
        "device": trainer.accelerator.device.type,
        "versions": installed_versions([*LIBRARIES, "peft", "accelerate"]),
    }
    return json.loads(json.dumps(scrubbed(facts), default=lambda value: type(value).__name__))


def geometry(trainer: "TrainerProtocol") -> dict[str, int]:
    """Return batch sizes and process count: with others, `micro_step` and pending completions mean nothing."""
    # The sizes that `micro_step` and pending completions are counted in.
    fields = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    fields += ("num_iterations", "num_generations")
    return {**fields_of(trainer.args, fields), "num_processes": trainer.accelerator.num_processes}


def options_of_rewards(trainer: "TrainerProtocol") -> dict[str, Any]:
    """Return the options of all rewards by name and path; a function without any has none."""
    names = list(trainer.reward_func_names)
    rewards: list[object] = list(trainer.reward_funcs)
    if trainer.step_scorer:
        names += trainer.step_scorer.names
        rewards += trainer.step_scorer.funcs
    options = {}
    for name, reward in zip(names, rewards, strict=True):
        paths = reward_options(reward)
        if paths.keys() != {"function"}:
            options |= {f"{name}.{path}": value for path, value in paths.items()}
    return options


def model_facts(trainer: "TrainerProtocol") -> dict[str, Any]:
    """Return what tells the model under an adapter, and the reference of the KL term, from others."""
    model = trainer.unwrapped_model
    config = model.config
    is_adapted = hasattr(model, "peft_config")
    base = {}
    reference_adapter = {}  # the copy of an adapter that goes on has TRL's name, `ref`
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            weights = reference_adapter if ".ref." in name else base
            weights[name] = weight
    weights = list(model.parameters())
    if is_adapted:  # trained weights may be of another dtype than their base
        weights = [*base.values(), *reference_adapter.values()]
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        quantization = fields_of(quantization, ("quant_method", "load_in_4bit"))
    facts: dict[str, Any] = {
        "dtype": str(weights[0].dtype if weights else None).removeprefix("torch."),
        "attn_implementation": trainer.attention,
        "quantization": quantization,
        # For messages alone: a folder may move.
        "model": getattr(config, "_name_or_path", "") or type(model).__name__,
        "base": None,
        "reference": None,
    }
    if trainer.in_lockstep:  # a process may hold a part of the weights only
        return facts
    if is_adapted:
        facts["base"] = weights_mark(base)
    # Without KL there is no reference, and none is compared.
    if trainer.args.beta:
        reference = reference_adapter or base  # of an adapter that goes on, the copy of it
        if trainer.ref_model is not None:
            reference = dict(trainer.ref_model.named_parameters())
        if reference:
            facts["reference"] = weights_mark(reference)
    return facts


def weights_mark(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the number of weights and a checksum of some values of each."""
    digest = xxhash.xxh3_64()
    count = 0
    for weight in weights.values():
        values = weight.detach().flatten()
        count += values.numel()
        sample = values[:: values.numel() // _VALUES + 1]
        digest.update(sample.float().cpu().numpy().tobytes())  # numpy has no bfloat16
    return f"{count:,} weights ({digest.hexdigest()[:8]})"


def dataset_mark(dataset: "Data") -> str | None:
    """Return number of rows, columns, and a checksum of at most 5,000 rows, evenly spaced; `None` for streamed data.

    Example:

    ```python
    >>> dataset_mark(Dataset.from_dict({"prompt": ["1+1=", "2+2="]}))
    '2 rows of prompt (89e765d1)'

    ```
    """
    # A stream has no rows that could be picked by their number.
    if not isinstance(dataset, Dataset):
        return None
    plain = dataset.with_format(None)  # a transform may draw random numbers
    has_media = any(type(feature).__name__ in _MEDIA for feature in dataset.features.values())
    most_rows = _ROWS_OF_MEDIA if has_media else _ROWS
    stride = max(1, -(-len(plain) // most_rows))  # rounded up
    digest = xxhash.xxh3_64()
    for i in range(0, len(plain), stride):
        digest.update(json.dumps(plain[i], sort_keys=True, default=lambda value: type(value).__name__).encode())
    columns = ", ".join(sorted(dataset.column_names))
    return f"{len(dataset)} rows of {columns} ({digest.hexdigest()[:8]})"


def _digest(value: object) -> str:
    return xxhash.xxh3_64(json.dumps(value, default=str).encode()).hexdigest()[:8]
