"""Names of settings that earlier releases of TRL and transformers had, or other tools have, and what to write instead.
Loaded on the way to an error."""

from collections.abc import Collection

from trl_drgrpo.common.errors import did_you_mean

# Names that scripts and recipes for earlier releases of TRL and transformers hold, or other tools, and what to do.
_RENAMED = {  # those that are not near their new name
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "torch_dtype": "dtype",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
_GONE = {
    "answer_column": "Write rename_columns: [<column>=answer].",
    "prompt_column": "Write rename_columns: [<column>=prompt].",
    "group_by_length": "Remove it: rows are batched by length here.",
    "include_inputs_for_metrics": "Set include_for_metrics.",
    "logging_dir": "Set the environment variable TENSORBOARD_LOGGING_DIR.",
    "max_new_tokens": "Set max_completion_length.",
    "max_prompt_length": "Remove it: TRL no longer truncates prompts. Filter long ones out of the dataset.",
    "vllm_device": "Remove it: vllm_mode='colocate' shares the training devices, a server has its own.",
}
_WITHOUT_EFFECT = """
    fp16_backend fp16_opt_level half_precision_backend jit_mode_eval save_safetensors use_ipex use_mps_device
    vllm_dtype vllm_enable_prefix_caching
"""
_ACCELERATES = """
    accelerate_config compute_environment deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config
    enable_cpu_affinity fp8_config gpu_ids machine_rank main_process_ip main_process_port main_training_function
    megatron_lm_config mixed_precision mpirun_config multi_gpu num_machines num_processes rdzv_backend same_network
    tpu_env tpu_use_cluster tpu_use_sudo use_fsdp
"""
_LAUNCH = "It belongs to accelerate: accelerate launch --config_file <file> -m trl_drgrpo.cli.main train ..."
_GONE |= dict.fromkeys(_WITHOUT_EFFECT.split(), "Remove it: there is nothing to choose any more.")
_GONE |= dict.fromkeys(_ACCELERATES.split(), _LAUNCH)


def remedy_for_name(name: str, known: Collection[str], otherwise: str = "Remove it.") -> str:
    """
    Return what to do about a key, a flag (with its dashes) or an argument that does not exist. `known`: those that do.

    Example:

    ```python
    >>> remedy_for_name("--torch-dtype", ["--dtype"])
    'It is called --dtype now.'

    ```
    """
    dashes = "--" if name.startswith("--") else ""
    plain = name.lstrip("-").replace("-", "_")
    renamed = dashes + _RENAMED.get(plain, "")
    if renamed in known:
        return f"It is called {renamed} now."
    return _GONE.get(plain) or did_you_mean(dashes + plain, known, otherwise, cutoff=0.7)
