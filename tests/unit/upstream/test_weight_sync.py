"""Merged copies of LoRA layers against PEFT's own merge, the base untouched; and bases that vLLM cannot be sent."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from runs import length_reward
from tiny import tiny_model
from transformers import BitsAndBytesConfig

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, UpstreamError
from trl_drgrpo.upstream import weight_sync
from trl_drgrpo.upstream.weight_sync import merged_while_read, refuse_unsendable, why_merged

IA3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM", init_ia3_weights=False)
ADAPTERS = {
    "linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "rank-stabilized": {"target_modules": ["q_proj"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "bias": {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    "parameters": {"target_modules": [], "target_parameters": ["mlp.up_proj.weight", "mlp.down_proj.weight"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]},
    "ia3": {"config": IA3},
}


def adapted(tokenizer, dtype=torch.float32, config=None, **options):
    torch.manual_seed(3)
    config = config or LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return get_peft_model(tiny_model(tokenizer).to(dtype), config)


def values(model):
    return {name: param.data.clone() for name, param in model.named_parameters()}


def read(model):
    """What TRL does: merge, hand over views one by one, unmerge."""
    model.merge_adapter()
    seen = {name: param.data for name, param in model.named_parameters()}
    model.unmerge_adapter()
    return seen


def different(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def assert_read_as_merged_by_peft(model):
    """What is read is PEFT's merge, and the model is as before, already in the block."""
    before = values(model)
    with merged_while_read(model):
        seen = read(model)  # looked at after `unmerge_adapter`, as vLLM's packing does
        assert different(before, values(model)) == []
    assert different(before, values(model)) == []
    assert not any(getattr(module, "merged", False) for module in model.modules())
    model.merge_adapter()
    assert different(seen, values(model)) == []
    assert different(seen, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_merged_weights_are_pefts_and_the_model_stays_as_it_was(options, dtype, tokenizer):
    assert_read_as_merged_by_peft(adapted(tokenizer, dtype, **options))


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens"]])
def test_tied_weights_get_the_adapters_of_all_that_share_them(targets, tokenizer):
    plain = tiny_model(tokenizer)
    layers = plain.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    plain.lm_head.weight = plain.model.embed_tokens.weight
    torch.manual_seed(3)
    assert_read_as_merged_by_peft(
        get_peft_model(plain, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    )


def test_control_pefts_own_way_moves_the_base_and_takes_the_adapter_back(tokenizer):
    model = adapted(tokenizer, torch.bfloat16, target_modules="all-linear")
    before = values(model)
    seen = read(model)
    moved = [name for name in before if not torch.equal(before[name], values(model)[name])]
    assert len(moved) == 14  # seven linear layers in two blocks
    name = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    assert (seen[name] - before[name]).abs().max() < 0.02  # a view: the adapter has been subtracted again


def test_the_methods_of_the_model_come_back_also_after_an_error(tokenizer):
    model = adapted(tokenizer, target_modules="all-linear")
    with pytest.raises(KeyError), merged_while_read(model):
        raise KeyError
    assert not {"merge_adapter", "unmerge_adapter", "named_parameters"} & set(vars(model))


def test_an_error_while_merging_leaves_the_base_alone(tokenizer, monkeypatch):
    model = adapted(tokenizer, target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    before, as_peft = values(model), layer.merge

    def failing():
        as_peft()
        raise KeyError

    monkeypatch.setattr(layer, "merge", failing)
    with pytest.raises(KeyError), merged_while_read(model):
        read(model)
    assert [name for name, value in values(model).items() if not torch.equal(before[name], value)] == []
    assert layer.merged_adapters == []


def test_a_sync_that_reads_the_weights_elsewhere_is_refused(tokenizer):
    def reading_a_dict():
        with merged_while_read(model):
            model.merge_adapter()
            model.state_dict()
            model.unmerge_adapter()

    model = adapted(tokenizer, target_modules="all-linear")
    with pytest.raises(UpstreamError, match="no merged weight was read"):
        reading_a_dict()


def test_a_model_without_adapters_is_left_alone(tokenizer):
    plain = tiny_model(tokenizer)
    with merged_while_read(plain):
        assert "named_parameters" not in vars(plain)


# Quantized bases


def arguments(**changes):
    return DrGRPOConfig(use_cpu=True, bf16=False, **{"use_vllm": True, "vllm_lora": "merged", **changes})


FOUR, EIGHT = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)


def test_a_checkpoint_that_is_stored_quantised_is_refused(tmp_path, tokenizer):
    tiny_model(tokenizer).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stored}))
    with pytest.raises(InputError, match="is stored so, load_in_4bit"):
        refuse_unsendable(arguments(), str(tmp_path))
    dequantizing = SimpleNamespace(quant_method="mxfp4", dequantize=True)
    refuse_unsendable(arguments(), str(tmp_path), dequantizing)
    refuse_unsendable(arguments(use_vllm=False), str(tmp_path))


def test_a_model_that_was_loaded_in_4_bits_is_refused(saved_model):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=FOUR)
    for each in (model, get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))):
        with pytest.raises(InputError, match="loaded in 4 bits"):
            refuse_unsendable(arguments(), each)
    refuse_unsendable(arguments(), AutoModelForCausalLM.from_pretrained(saved_model))


@pytest.mark.parametrize(
    ("options", "asked", "reason"),
    [
        ({}, FOUR, None),
        ({"init_lora_weights": "gaussian", "use_rslora": True, "lora_dropout": 0.1}, FOUR, None),
        ({"use_dora": True}, FOUR, "use_dora=True"),
        ({"init_lora_weights": "olora"}, FOUR, "init_lora_weights='olora' changes the base's weights"),
        ({"r": 600}, FOUR, "its rank of 600 is above 512"),
        ({}, EIGHT, "vLLM loads none but 4-bit weights of bitsandbytes beside it"),
    ],
    ids=["lora", "variants", "dora", "olora", "rank", "8 bits"],
)
def test_beside_a_base_in_4_bits_plain_lora_travels_alone(options, asked, reason):
    adapter = LoraConfig(task_type="CAUSAL_LM", **options)
    if reason is None:
        refuse_unsendable(arguments(vllm_lora="auto"), "a/model", asked, adapter)
        return
    with pytest.raises(InputError, match=f"whose adapter cannot travel alone: {reason}; expected plain LoRA"):
        refuse_unsendable(arguments(vllm_lora="auto"), "a/model", asked, adapter)


def test_other_kinds_than_lora_do_not_travel():
    assert why_merged(IA3) == "IA3 is not LoRA"
    assert why_merged(LoraConfig(layers_to_transform=[0], exclude_modules=["q_proj"])) is None


def test_a_colocated_engine_needs_the_plugin_for_4_bits(monkeypatch):
    monkeypatch.setattr(weight_sync, "is_vllm_available", lambda min_version: True)
    lora = LoraConfig(task_type="CAUSAL_LM")
    refuse_unsendable(arguments(vllm_lora="auto", vllm_mode="server"), "a/model", FOUR, lora)
    with pytest.raises(InputError, match="expected the package vllm-bnb-plugin"):
        refuse_unsendable(arguments(vllm_lora="auto"), "a/model", FOUR, lora)


def test_virtual_tokens_are_refused(tokenizer, prompts):
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    message = "use_vllm: got True with an adapter of type PROMPT_TUNING"
    with pytest.raises(InputError, match=message):
        DrGRPOTrainer("a/model-that-does-not-exist", length_reward, arguments(), prompts, peft_config=config)
    with pytest.raises(InputError, match=message):
        refuse_unsendable(arguments(), get_peft_model(tiny_model(tokenizer), config))
    refuse_unsendable(arguments(use_vllm=False), get_peft_model(tiny_model(tokenizer), config))
