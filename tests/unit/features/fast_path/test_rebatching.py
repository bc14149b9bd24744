"""Models whose rows depend on what stands around them are found; those that only shift positions are not."""

import pytest
import torch
import transformers
from tiny import random_weights, sizes, tiny_model
from tiny_families import tiny

from trl_drgrpo.features.fast_path.rebatching import why_not_rebatched


def log_probs(logits, targets):
    return logits.log_softmax(dim=-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def asked(model, forward=None):
    forward = forward or (lambda **inputs: model(**inputs).logits)
    takes_positions = "Bloom" not in type(model).__name__ and "Mamba" not in type(model).__name__

    def planned(packed):
        logits = forward(input_ids=packed.input_ids, attention_mask=packed.attention_mask)
        return log_probs(logits.flatten(0, 1)[packed.predictors].unsqueeze(0), packed.targets)

    def padded(tokens, positions):
        more = {"position_ids": positions} if takes_positions else {}
        logits = forward(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, **more)
        width = tokens.completion_width
        return log_probs(logits[:, -width - 1 : -1], tokens.input_ids[:, -width:])

    return why_not_rebatched(model, planned, padded)


def of(tokenizer, family, **fields):
    """A small model of a family that keeps more than keys and values."""
    config = getattr(transformers, f"{family}Config")(**{**sizes(tokenizer), "intermediate_size": 64, **fields})
    return random_weights(transformers.AutoModelForCausalLM.from_config, config)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text", "GPT2", "OPT", "Bloom", "DeepseekV3"])
def test_attention_hides_padding(family, tokenizer):
    model = tiny(family, tokenizer).train()
    assert asked(model) is None
    assert all(module.training for module in model.modules())


STATES = {
    "Mamba": {"state_size": 8},
    "Lfm2": {"num_key_value_heads": 2, "full_attn_idxs": [1]},
    "FalconH1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize("family", STATES)
def test_states_that_the_mask_keeps_padding_out_of(family, tokenizer):
    assert asked(of(tokenizer, family, **STATES[family])) is None


def test_a_state_that_padding_reaches(tokenizer):
    fields = {"num_key_value_heads": 1, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 64}
    assert "depends on its padding" in asked(of(tokenizer, "RecurrentGemma", **fields))


def test_an_index_that_selects_tokens(tokenizer):
    fields = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    fields |= {"index_topk": 999, "index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4}
    model = of(tokenizer, "GlmMoeDsa", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **fields)
    assert "selects tokens by an index" in asked(model)


def by_width(model):
    return lambda input_ids, **more: model(input_ids, **more).logits * (1 + input_ids.size(1) / 100)


def by_neighbors(model):
    def forward(**inputs):
        logits = model(**inputs).logits
        return logits + 0.1 * logits.mean(dim=(0, 1))

    return forward


def not_a_number(model):
    return lambda **inputs: model(**inputs).logits * torch.nan


def refusing(model):
    def forward(**inputs):
        raise ValueError("no rows without images")

    return forward


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        (by_width, "depends on its padding"),
        (by_neighbors, "depends on its padding"),
        (not_a_number, "differ by nan"),
        (refusing, "it fails on rows of its vocabulary (ValueError: no rows without images)"),
    ],
)
def test_the_self_test_sees_what_stands_around_a_row(mutant, reason, tokenizer):
    model = tiny_model(tokenizer)
    assert reason in asked(model, mutant(model))
