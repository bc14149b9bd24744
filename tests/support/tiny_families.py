"""Random models of the families that TRL trains, each small enough for two steps in a second."""

import transformers
from tiny import random_weights, sizes
from transformers import AutoModelForCausalLM

DENSE = ("Llama", "Gemma", "Gemma3Text", "GPT2")
EXPERTS = {
    "Qwen3Moe": {"moe_intermediate_size": 32, "num_experts": 4, "decoder_sparse_step": 1},
    "GptOss": {"num_local_experts": 4, "sliding_window": 16},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4},
    "MiniMaxM2": {"num_local_experts": 4},
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
MORE = {  # what a family needs besides
    "GptOss": WINDOWS,
    "Gemma3Text": WINDOWS,
    # eager: below transformers 5.18 the default for Gemma 2 is sdpa, which leaves out the softcap
    "Gemma2": {**WINDOWS, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "Cohere2": WINDOWS,
    "Mistral": {"sliding_window": 16},
    "Phi3": {"sliding_window": None},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "DeepseekV3": LATENT,
    "Llama4Text": {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
}
WITHOUT_GROUPS = ("GPT2", "Bloom", "Falcon")  # of key-value heads


def tiny(family, tokenizer, **changes):
    """A causal language model of `<family>Config`; the same weights every time."""
    fields = sizes(tokenizer)
    if family not in WITHOUT_GROUPS:
        fields |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    if family in EXPERTS:
        fields |= {"num_experts_per_tok": 2, **EXPERTS[family]}
    fields |= MORE.get(family, {}) | changes
    config = getattr(transformers, f"{family}Config")(**fields)
    return random_weights(AutoModelForCausalLM.from_config, config)


# Families whose layers hold running states, keys of an indexer, or a cache of their own.
_LINEAR = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SPARSE = {
    **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
    "head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
STATES = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3_5Text": _LINEAR,
    "Qwen3Next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "OlmoHybrid": _LINEAR,
    "NemotronH": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "GraniteMoeHybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 64},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "DeepseekV32": _SPARSE,
    "GlmMoeDsa": _SPARSE,
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 16},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 256},
}


def configuration_with_states(family, tokenizer):
    """The configuration of a small model of a family in `STATES`."""
    fields = sizes(tokenizer, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=512)
    return getattr(transformers, f"{family}Config")(**{**fields, **STATES[family]})
