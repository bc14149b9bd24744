"""Configurations of models that recipes name, as their `config.json` is published, as far as a plan reads it.

Of Qwen3.5 4B and Gemma 4 E4B the text part alone.
"""

from transformers import CONFIG_MAPPING

PUBLISHED = {
    "Qwen/Qwen3.5-4B": (
        "qwen3_5_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
            "vocab_size": 248320,
            "tie_word_embeddings": True,
        },
    ),
    "google/gemma-4-E4B-it": (
        "gemma4_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_kv_shared_layers": 18,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "LiquidAI/LFM2-1.2B": (
        "lfm2",
        {
            "hidden_size": 2048,
            "block_ff_dim": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
            "vocab_size": 65536,
        },
    ),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
    ),
}


def published_fields(name):
    """The configuration of a model, as `config.json` has it."""
    model_type, fields = PUBLISHED[name]
    return {"model_type": model_type, **fields}


def save_published(name, folder):
    """Writes the configuration of a model; the folder."""
    model_type, fields = PUBLISHED[name]
    CONFIG_MAPPING[model_type](**fields).save_pretrained(folder)
    return str(folder)
