"""Decoding steps of fewer operations: how many there are, the same tokens as transformers' loop, and what stands
aside."""

import gc
import sys
import weakref
from functools import partial, wraps

import pytest
import torch
import transformers
from decoded import MIXED, assert_same_tokens, generate
from launch_counts import decoding_step, per_layer
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny import random_weights
from tiny_bases import load, nf4, save_base
from tiny_families import configuration_with_states, tiny
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config

from trl_drgrpo.check.small import small_model
from trl_drgrpo.features.fast_path.decoding import (
    forwards,
    fused_function,
    fused_layers,
    group_cache,
    hybrid_layers,
    joined_adapters,
    replay,
    state_updates,
)
from trl_drgrpo.features.fast_path.speed import Speed
from trl_drgrpo.single_gpu.peft_adapters import keep_4bit_layout
from trl_drgrpo.upstream import lora_layers
from trl_drgrpo.upstream.model_parts import ROTARY

# Upper bounds, of a layer of Qwen2: norms 2, linear layers 7, rotation 4, cache 2, attention 8, activation 2, sums 2.
PER_LAYER = 27
OF_ADAPTERS = 11  # A of the four inputs, B of the seven layers
# Upper bounds, of a layer of running states in bfloat16. transformers: 87, 30 and 46.
PER_STATES = {"Qwen3_5Text": 46, "Lfm2": 16, "NemotronH": 30}
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def in_bfloat16(layers, **lora):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, **heads)
    model = random_weights(AutoModelForCausalLM.from_config, config).to(torch.bfloat16).eval()
    return get_peft_model(model, LoraConfig(**{**LORA, **lora})).eval() if lora else model


def adapted(family, tokenizer, **lora):
    """A model of a family with adapters that change its tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(tiny(family, tokenizer), LoraConfig(**{**LORA, **lora}))


def assert_same_tokens_with(model, joined="yes", **settings):
    """Ours are those of transformers' loop; `joined`: the beginning of what is said of the adapters."""
    speed = Speed()
    assert_same_tokens(model, speed=speed, **settings)
    facts = speed.facts()
    assert facts["joined adapters"].startswith(joined), facts
    assert facts["group cache"] == "yes"
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.fixture
def fixed_steps(monkeypatch):
    """Steps of fixed shapes, as they are recorded on a GPU."""
    monkeypatch.setattr(forwards, "why_not_recorded", lambda model, device: None)
    monkeypatch.setattr(replay, "record", lambda step, device: (step(), step))


# How many


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_has_few_operations(autocast):
    bare = per_layer(in_bfloat16, decoding_step, autocast=autocast)
    assert bare.total() <= PER_LAYER, bare
    with_adapters = per_layer(lambda layers: in_bfloat16(layers, r=4), decoding_step, autocast=autocast)
    assert with_adapters.total() <= PER_LAYER + OF_ADAPTERS, with_adapters


@pytest.mark.parametrize("family", PER_STATES)
def test_a_layer_of_running_states_has_few_operations(tokenizer, family):
    kind = "conv" if family == "Lfm2" else "linear_attention"

    def build(layers):
        config = configuration_with_states(family, tokenizer)
        kinds = {"layer_types": ["full_attention"] + [kind] * layers, "num_hidden_layers": layers + 1}
        config = type(config)(**{**config.to_dict(), **kinds})
        return random_weights(AutoModelForCausalLM.from_config, config).to(torch.bfloat16).eval()

    counts = per_layer(build, decoding_step)
    assert counts.total() <= PER_STATES[family], counts


def test_a_recorded_step_writes_scores_into_place_and_adds_one_mask(fixed_steps, monkeypatch):
    monkeypatch.setattr(group_cache, "writes_into_place", lambda device: True)
    counts = per_layer(in_bfloat16, decoding_step)
    assert counts.total() <= PER_LAYER, counts
    assert counts["aten.add_"] == 1


@pytest.mark.parametrize("family", ["Qwen2", "Gemma2", "GptOss"])
def test_scores_in_place_give_the_same_tokens(tokenizer, fixed_steps, family, monkeypatch):
    """Scores are written in place, as on a GPU; with padding, a window, a softcap and sinks."""
    monkeypatch.setattr(group_cache, "writes_into_place", lambda device: True)
    speed = Speed()
    assert_same_tokens(tiny(family, tokenizer), speed=speed)
    assert speed.facts()["recorded steps"] == "yes"


# Adapters

VARIETIES = {
    "all linear layers": {},
    "rank-stabilized": {"use_rslora": True, "lora_alpha": 3},
    "ranks of their own": {"rank_pattern": {"q_proj": 2, "up_proj": 7}, "alpha_pattern": {"k_proj": 1}},
    "a part": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "modules to save": {"target_modules": ["k_proj", "up_proj"], "modules_to_save": ["lm_head"]},
    "trained biases of the base": {"bias": "lora_only"},
    "dropout in evaluation": {"lora_dropout": 0.5},
}


@pytest.mark.parametrize("variety", VARIETIES)
def test_adapters_are_joined(tokenizer, variety):
    assert_same_tokens_with(adapted("Qwen2", tokenizer, **VARIETIES[variety]))


@pytest.mark.parametrize("family", ["GPT2", "Cohere2", "Phi3", "Gemma2", "Qwen3Moe"])
def test_adapters_of_other_families_are_joined(tokenizer, family):
    targets = {"GPT2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}}
    experts = "ParamWrapper of Qwen3MoeExperts has a forward of its own (6 of 14 layers)"
    said = experts if family == "Qwen3Moe" else "yes"
    assert_same_tokens_with(adapted(family, tokenizer, **targets.get(family, {})), said)


def test_layers_that_read_the_same_input_share_a_product(tokenizer, monkeypatch):
    """Also where attention and MLP are parallel, and o is called between them."""
    joined = []
    original = joined_adapters.SharedProduct.__init__

    def noted(self, layers, dtype):
        joined.append(len(layers))
        original(self, layers, dtype)

    monkeypatch.setattr(joined_adapters.SharedProduct, "__init__", noted)
    for family, sizes in (("Qwen2", [3, 1, 2, 1] * 2), ("Cohere2", [5, 1, 1] * 2)):
        generate(adapted(family, tokenizer), MIXED)
        assert joined[-len(sizes) :] == sizes
        joined.clear()


def test_copies_of_adapters_are_gone_after_a_generation(tokenizer, monkeypatch):
    """By their references: copies that wait for the garbage collector hold memory in training."""
    products = []
    original = joined_adapters.SharedProduct.__init__

    def noted(self, layers, dtype):
        products.append(weakref.ref(self))
        original(self, layers, dtype)

    monkeypatch.setattr(joined_adapters.SharedProduct, "__init__", noted)
    model = adapted("Qwen2", tokenizer)
    gc.collect()
    gc.disable()
    try:
        generate(model, MIXED, max_new_tokens=5)
        assert [product() for product in products] == [None] * len(products)
    finally:
        gc.enable()
    assert products


def test_several_active_adapters_are_one_of_a_larger_rank(tokenizer):
    model = adapted("Qwen2", tokenizer)
    model.add_adapter(
        "second", LoraConfig(**{**LORA, "r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"]})
    )
    model.base_model.set_adapter(["default", "second"])
    assert_same_tokens_with(model)


def test_a_generation_uses_the_adapters_as_they_are(tokenizer):
    """Trained since the last generation, another one active, switched off, merged; frozen ones, too."""
    model = adapted("Qwen2", tokenizer)
    assert_same_tokens_with(model)
    before = generate(model, MIXED)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    assert_same_tokens_with(model)
    assert not torch.equal(generate(model, MIXED)[0], before)
    model.add_adapter("second", LoraConfig(**{**LORA, "target_modules": ["k_proj"]}))
    model.set_adapter("second", inference_mode=True)
    assert_same_tokens_with(model)
    with model.disable_adapter():
        speed = Speed()
        assert_same_tokens(model, speed=speed)
        assert "joined adapters" not in speed.facts()
    model.merge_adapter()
    assert_same_tokens(model)


def test_parameters_are_only_read(tokenizer):
    model = adapted("Qwen2", tokenizer).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokens = generate(model, MIXED, max_new_tokens=5)[0]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == before[name].dtype
        assert torch.equal(parameter, before[name])
        assert not parameter.is_inference()
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize(
    ("base", "adapters"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32")]
)
def test_products_have_the_fewer_bits(tokenizer, base, adapters):
    """Adapters of fewer bits than the base are computed as PEFT does."""
    model = adapted("Qwen2", tokenizer).to(getattr(torch, base))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, adapters))
    speed = Speed()
    ours = generate(model, MIXED, speed=speed, max_new_tokens=5)[0]
    assert speed.facts()["joined adapters"] == "yes"
    if base != "bfloat16":  # whose tokens diverge by rounding
        assert torch.equal(ours, generate(model, MIXED, shares=False, max_new_tokens=5)[0])


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"use_dora": True}, "an adapter is a DoraLinearVariant (14 of 14 layers)"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "an adapter has a bias of its own (2 of 2 layers)"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            "Embedding of Embedding has a forward of its own (1 of 3 layers)",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_other_adapters_keep_their_forward_and_it_is_said(tokenizer, lora, reason, caplog):
    assert_same_tokens_with(adapted("Qwen2", tokenizer, **lora), joined=reason)
    assert caplog.text.count(f"Fast path without joined adapters: {reason}.") == 1


def test_dropout_in_training_stands_aside(tokenizer):
    model, speed = adapted("Qwen2", tokenizer, lora_dropout=0.5), Speed()
    generate(model, MIXED, training=True, speed=speed, max_new_tokens=3)
    assert speed.facts()["joined adapters"].startswith("an adapter uses dropout")


def test_a_hook_on_an_adapter_is_still_called(tokenizer):
    model, calls = adapted("Qwen2", tokenizer), []
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    hook = layer.lora_A["default"].register_forward_hook(lambda *args: calls.append(1))
    assert_same_tokens_with(model, joined="a hook watches an adapter (1 of 14 layers)")
    hook.remove()
    assert len(calls) > 40


def test_one_input_for_two_steps_is_computed_twice(tokenizer):
    """A tensor that comes again may have other values."""
    layer = next(m for m in adapted("Qwen2", tokenizer).modules() if hasattr(m, "lora_A"))
    product = joined_adapters.SharedProduct([layer, layer], torch.float32)
    states = torch.ones(2, 1, layer.in_features)
    with torch.no_grad():
        first = product.add(0, torch.zeros(2, 1, layer.out_features), states).clone()
        states.mul_(2)
        torch.testing.assert_close(product.add(0, torch.zeros(2, 1, layer.out_features), states), 2 * first)


@pytest.mark.parametrize("quantization", [nf4(), BitsAndBytesConfig(load_in_8bit=True)], ids=["4 bits", "8 bits"])
def test_adapters_on_a_quantized_base_are_joined(tokenizer, tmp_path, quantization):
    path = save_base(tmp_path, tokenizer)
    model = load(path, quantization_config=quantization)
    keep_4bit_layout(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**LORA))
    assert_same_tokens_with(model)


# Running states


@pytest.fixture
def functions(monkeypatch):
    """Functions of models' files that stood aside for others, by name: the newest."""
    made = {}
    original = fused_layers.FusedLayers.__init__

    def noted(self, *args):
        original(self, *args)
        made.update({name: function for _, name, function in self._functions})

    monkeypatch.setattr(fused_layers.FusedLayers, "__init__", noted)
    return made


def with_states(family, tokenizer):
    return random_weights(AutoModelForCausalLM.from_config, configuration_with_states(family, tokenizer))


CONVOLUTION = "causal_conv1d_update"
UPDATES = {
    "Lfm2": CONVOLUTION,
    "Qwen3_5Text": "torch_recurrent_gated_delta_rule",
    "NemotronH": "mamba2_selective_state_update",
    "FalconH1": "mamba2_selective_state_update",
    "Jamba": "mamba_selective_state_update",
}


@pytest.mark.parametrize("family", UPDATES)
def test_states_are_updated_in_place(tokenizer, family, functions):
    model, speed = with_states(family, tokenizer), Speed()
    assert_same_tokens(model, speed=speed)
    agreement = functions[CONVOLUTION].agrees, functions[UPDATES[family]].agrees
    if agreement == (None, None) and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("layers of this transformers do not call their files' functions")
    assert agreement == (True, True)
    if family == "Qwen3_5Text":
        assert functions[ROTARY].agrees  # of a quarter of the columns
    assert speed.facts()["fused layers"] == "yes"
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert_same_tokens(adapted, limits=[8, 1, 5, 12, 30, 40, 40, 3, 2, 1])


def test_states_that_decay_by_column(tokenizer, functions):
    """Kimi's delta attention, whose heads are also gated by a sigmoid. Its other attention has no group cache."""
    if "kimi_linear" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Kimi Linear")
    config = CONFIG_MAPPING["kimi_linear"]()
    model = small_model(config, tokenizer)
    assert_same_tokens(model)
    assert functions["recurrent_kimi_delta_attention"].agrees
    gated = [form for form in map(fused_layers._norm_forms.get, model.modules()) if form and form.inputs == 2]
    assert (gated[0].activation, gated[0].is_first) == (torch.sigmoid, False)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gated_norms_of_groups(groups, norm_before_gate):
    norm_class = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1").FalconH1RMSNormGated
    norm = norm_class(32, n_groups=groups, norm_before_gate=norm_before_gate)
    states, gate = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32))
        form = fused_layers._norm_form(norm, [hybrid_layers.gated_forms])
        assert (form.columns, form.is_first) == (32 // groups, not norm_before_gate)
        fused = fused_layers._fused_norm(norm, form)
        torch.testing.assert_close(fused(states, gate=gate), norm(states, gate))
        torch.testing.assert_close(fused(states), norm(states))


def test_kernels_of_other_packages_are_left_in_place(tokenizer, functions, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.upstream.state_functions.find_spec", {"fla": True}.get)
    assert_same_tokens(with_states("Qwen3_5Text", tokenizer))
    assert set(functions) == {ROTARY, CONVOLUTION}


def test_a_call_that_asks_for_more_is_the_models():
    states, window = torch.randn(2, 4, 1), torch.randn(2, 4, 3)
    weight = torch.randn(4, 3)
    convolution = partial(state_updates.convolution, states, window)
    assert convolution(weight) is not None
    assert convolution(weight.half()) is None
    assert convolution(torch.randn(4, 5)) is None
    assert convolution(weight, activation="relu") is None
    assert state_updates.convolution(torch.randn(2, 4, 2), window, weight) is None
    of_heads, of_values = torch.randn(2, 1, 2, 4), torch.randn(2, 1, 2)
    rule = partial(state_updates.delta_rule, of_heads, of_heads, of_heads, of_values, of_values)
    state = torch.randn(2, 2, 4, 4)
    assert rule(state, True) is not None
    assert rule(None, True) is None
    assert rule(state.half(), True) is None
    assert rule(state, True, cu_seqlens=torch.tensor([0, 1])) is None


@wraps(state_updates.delta_rule)
def _forgetting(*args, rule=state_updates.delta_rule, initial_state=None, **kwargs):
    return rule(*args, initial_state=initial_state.clone(), **kwargs)[0], initial_state


@wraps(state_updates.convolution)
def _unwritten(states, window, *args, update=state_updates.convolution, **kwargs):
    return update(states, window.clone(), *args, **kwargs)


def test_a_function_with_another_parameter_is_left_in_place(tokenizer, functions, monkeypatch):
    """The effect of the parameter may not show in the first call."""
    model = with_states("Qwen3_5Text", tokenizer)
    file = sys.modules[type(model).__module__]
    original = file.causal_conv1d_update

    def with_scale(hidden_states, conv_state, weight, bias=None, activation=None, scale=1.0):
        return scale * original(hidden_states, conv_state, weight, bias, activation)

    monkeypatch.setattr(file, CONVOLUTION, with_scale)
    assert_same_tokens(model)
    assert CONVOLUTION not in functions


STATE_MUTANTS = {
    "fla": (_forgetting, "torch_recurrent_gated_delta_rule"),
    "causal_conv1d": (_unwritten, CONVOLUTION),
}


@pytest.mark.parametrize("package", STATE_MUTANTS)
def test_a_state_that_is_not_the_models_is_noticed(tokenizer, package, functions, monkeypatch):
    """The first output is right: only the state tells."""
    mutant, name = STATE_MUTANTS[package]
    monkeypatch.setitem(state_updates.INSTEAD_OF, package, mutant)
    assert_same_tokens(with_states("Qwen3_5Text", tokenizer))
    assert functions[name].agrees is False


# Norms and rotations


class OtherNorm(nn.Module):
    """Looks like an RMS norm, and is none."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.eps = weight, 1e-6

    def forward(self, states):
        return self.weight * states / (states.abs().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("family", "norms", "rotates"),
    [("Llama", 5, True), ("Qwen3", 9, True), ("Gemma2", 9, True), ("Cohere2", 0, False), ("GPT2", 0, None)],
)
def test_fused_operations_of_torch_are_found_by_comparison(tokenizer, family, norms, rotates, monkeypatch):
    rotations = []
    original = fused_layers.Rotation.__init__

    def noted(self, own):
        rotations.append(self)
        original(self, own)

    monkeypatch.setattr(fused_layers.Rotation, "__init__", noted)
    model, speed = tiny(family, tokenizer), Speed()
    assert_same_tokens(model, speed=speed)
    forms = [fused_layers._norm_forms[module] for module in model.modules()]
    assert sum(form is not None for form in forms) == norms
    assert (rotations[-1].agrees if rotations else None) is rotates
    assert (speed.facts()["fused layers"] == "yes") == bool(norms or rotates)


def test_layers_that_are_no_rms_norm_stay(tokenizer, caplog):
    model = tiny("Llama", tokenizer)
    model.model.norm = OtherNorm(model.model.norm.weight)
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3  # a number of its own is found
    assert_same_tokens(model)
    assert fused_layers._norm_forms[model.model.norm] is None
    assert fused_layers._norm_forms[model.model.layers[0].input_layernorm].eps == 1e-3
    assert "Fast path" not in caplog.text


def test_the_model_is_as_it_was(tokenizer):
    model = adapted("Llama", tokenizer)
    file = sys.modules[type(model.get_base_model()).__module__]
    rotary = getattr(file, ROTARY)
    seen = []

    def failing(module, args):
        seen.append((getattr(file, ROTARY), "forward" in vars(model.get_base_model().model.norm)))
        if len(seen) == 6:
            raise KeyError("elsewhere")

    hook = model.get_base_model().model.register_forward_pre_hook(failing)
    with pytest.raises(KeyError, match="elsewhere"):
        generate(model, MIXED)
    hook.remove()
    assert isinstance(seen[-1][0], fused_layers.Rotation)
    assert seen[-1][1]
    assert getattr(file, ROTARY) is rotary
    assert all("forward" not in vars(module) for module in model.modules())


def _unscaled(layers, dtype, factors=lora_layers.low_rank_factors):
    down, ups = factors(layers, dtype)
    return down, [up / 2 for up in ups]


def _failing(layers, dtype):
    raise RuntimeError("of a size")


MUTANTS = {
    "adapters": (joined_adapters, "low_rank_factors", _unscaled),
    "an error": (joined_adapters, "low_rank_factors", _failing),
    "rotation": (fused_function, "_is_close", lambda *args: True),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_logits_are_noticed_and_layers_left_as_they_are(tokenizer, mutant, monkeypatch, caplog):
    owner, name, value = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value)
    family = "Cohere2" if mutant == "rotation" else "Qwen2"  # Cohere rotates neighboring pairs
    model, speed = adapted(family, tokenizer), Speed()
    for _ in range(2):
        assert_same_tokens(model, speed=speed)
    facts = speed.facts()
    assert facts["group cache"] == "yes"
    reason = "RuntimeError: of a size" if mutant == "an error" else "its logits differ by"
    assert facts["fused layers"].startswith(reason)
    assert caplog.text.count("Fast path without fused layers, joined adapters: ") == 1


def test_adapters_that_add_nothing_yet_are_compared_when_they_do(tokenizer, monkeypatch):
    """B is zero before the first optimizer step, and any scale of it right."""
    monkeypatch.setattr(joined_adapters, "low_rank_factors", _unscaled)
    model, speed = adapted("Qwen2", tokenizer, init_lora_weights=True), Speed()
    assert_same_tokens(model, speed=speed)
    assert speed.facts()["joined adapters"] == "yes"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(0))
    assert_same_tokens(model, speed=speed)
    assert speed.facts()["joined adapters"].startswith("its logits differ by")
