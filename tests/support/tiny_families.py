"""Random models of the families that TRL trains, each small enough for two steps in a second."""

import transformers
from tiny import random_weights, sizes
from transformers import AutoModelForCausalLM

DENSE = ("Llama", "Gemma", "Gemma3Text", "GPT2")
EXPERTS = {
    "Qwen3Moe": {"moe_intermediate_size": 32, "num_experts": 4, "decoder_sparse_step": 1},
    "GptOss": {"num_local_experts": 4, "sliding_window": 16},
    "Mixtral": {"num_local_experts": 4},
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
