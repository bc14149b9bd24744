"""The parts of the planner: amounts, the ledger, stand-ins against the real thing, depths, and the setup of a run."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_weights
from tiny_families import STATES, configuration_with_states, tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Row, plan_window
from trl_drgrpo.features.fast_path.sharing import costs_of
from trl_drgrpo.single_gpu.memory import Adapter, Planner, Setup, estimate, meta_layers, parse_memory, passes, propose
from trl_drgrpo.single_gpu.memory.memory_settings import CARDS, find_card, from_keys, parse_margin
from trl_drgrpo.single_gpu.memory.meta_layers import (
    HEAD_TOKENS,
    HEAD_VOCABULARY,
    Ledger,
    Precision,
    QuantizedLinear,
    fused_head,
)
from trl_drgrpo.single_gpu.memory.meta_model import Skeleton
from trl_drgrpo.single_gpu.memory.micro_batch_shapes import (
    Shape,
    _shape,
    scored_shapes,
    shares_prompts,
    trained_shapes,
)

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen(layers=5, vocabulary=500, **changes):
    return Qwen2Config(vocab_size=vocabulary, num_hidden_layers=layers, **{**SMALL, **changes})


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 2**30), ("24", 24 * 2**30), ("0.5 GiB", 2**29), ("16384mb", 2**34), ("80g", 80 * 2**30)],
)
def test_amounts_are_read_as_people_write_them(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["0", "0GB", "-3GB", "lots", "", "24XB", "nan", "inf", "1e400GB", "GB"])
def test_text_that_is_no_amount_is_refused(text):
    with pytest.raises(InputError, match="--memory: got .*; expected an amount above zero"):
        parse_memory(text)


def test_the_ledger_counts_storages_not_views_and_sees_them_go():
    kept = torch.empty(1000)
    with Ledger() as ledger:
        ledger.known([kept])
        ledger.mark("one")
        first = torch.empty(100, dtype=torch.float32)
        views = [first[:50], first.view(10, 10), kept.detach()]
        assert ledger.live == 400
        ledger.mark("two")
        second = first + 1
        assert ledger.live == 800
        del first, views
        assert ledger.live == 400
        third = second * 2
        del second, third
    assert ledger.live == 0
    assert dict(ledger.peaks)["one"] == 400
    assert dict(ledger.peaks)["two"] == 800


def test_saved_tensors_are_counted_until_backward_frees_them():
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)
    with Ledger() as ledger:
        ledger.known([weight, x])
        out = (x @ weight).exp()  # exp keeps its result, 32 x 64 numbers of 4 bytes
        loss = out.sum()
        del out
        assert ledger.live >= 32 * 64 * 4
        loss.backward()
        del loss
        assert ledger.live == weight.grad.nbytes


@pytest.mark.parametrize(("rows", "vocabulary"), [(200, 3000), (5000, 700), (64, 40000)])
def test_the_fused_head_stands_in_for_trls(rows, vocabulary):
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == (HEAD_TOKENS, HEAD_VOCABULARY)

    labels = torch.zeros(rows, dtype=torch.long)

    def peak(run):
        hidden = torch.zeros(rows, 16, requires_grad=True)
        weight = torch.zeros(vocabulary, 16, requires_grad=True)
        with Ledger() as ledger:
            ledger.known([hidden, weight, labels])
            run(hidden, weight).sum().backward()
        return max(ledger.peaks.values())

    def real(hidden, weight):
        return chunked_logprob.ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, HEAD_VOCABULARY, None, 1.0, ("log_probs", "entropy")
        )[0]

    def stand_in(hidden, weight):
        return fused_head(hidden, weight, None, torch.float32, "cpu")

    assert peak(real) <= peak(stand_in) <= 1.05 * peak(real)


def test_a_four_bit_layer_weighs_what_bitsandbytes_says():
    bnb = pytest.importorskip("bitsandbytes")
    for nested in (False, True):
        layer = bnb.nn.Linear4bit(256, 512, bias=False, quant_type="nf4", compress_statistics=nested)
        layer.load_state_dict({"weight": torch.randn(512, 256)})
        layer = layer.to("cpu")
        if layer.weight.quant_state is None:
            layer.weight = layer.weight.__class__(torch.randn(512, 256), quant_type="nf4", compress_statistics=nested)
            layer.weight._quantize(torch.device("cpu"))
        state = layer.weight.quant_state
        real = layer.weight.nbytes + state.absmax.nbytes + state.code.nbytes
        if nested:
            real += state.state2.absmax.nbytes + state.state2.code.nbytes
        ours = QuantizedLinear(512, 256, None, torch.float32, Setup(bits=4, nested=nested))
        planned = ours.weight.nbytes + ours.scales.nbytes
        assert real <= planned <= 1.01 * real + 8


@pytest.mark.parametrize(
    ("checkpointing", "adapter"), [(True, None), (False, None), (True, Adapter(8, "all-linear", 0.05))]
)
def test_two_depths_give_every_other(checkpointing, adapter):
    lengths = {"prompt": 24, "completion": 40, "batch": 4, "accumulation": 2, "steps_per_generation": 2}
    setup = Setup(device="cpu", autocast=None, checkpointing=checkpointing, adapter=adapter, **lengths)
    planner = Planner(qwen(layers=6), setup)
    assert planner.is_extrapolated
    shape = Shape(packs=4, width=64, scored=160, layout=160, padded=256, masked=True, later=True)
    for run, rest in ((passes.train, [shape]), (passes.score, [shape]), (passes.generate, [])):
        assert max(planner.peaks(run, setup, *rest).values()) == max(run(planner.full, setup, *rest).values())


def _deepseek():
    fields = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    fields |= {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    return transformers.DeepseekV3Config(
        **SMALL, **fields, v_head_dim=8, vocab_size=300, num_hidden_layers=9, first_k_dense_replace=3
    )


def _rwkv():
    widths = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128}
    return transformers.RwkvConfig(**widths, vocab_size=300, num_hidden_layers=6)


@pytest.mark.parametrize("config", [_deepseek(), _rwkv()], ids=lambda config: config.model_type)
def test_other_layers_may_stand_in_front(config, monkeypatch):
    setup = Setup(prompt=8, completion=8, batch=2)
    planner = Planner(config, setup)
    assert planner.is_extrapolated
    monkeypatch.setattr(Planner, "_build_shallow", lambda self: {})
    assert planner.estimate(setup).phases == Planner(config, setup).estimate(setup).phases


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Jamba"])
def test_calls_that_come_again_change_no_plan(family, tokenizer, monkeypatch):
    config = configuration_with_states(family, tokenizer)
    setup = Setup(prompt=8, completion=8, batch=2, adapter=Adapter(4, "all-linear"))
    phases = Planner(config, setup).estimate(setup).phases
    monkeypatch.setattr(meta_layers, "_call", lambda *call: None)
    assert Planner(config, setup).estimate(setup).phases == phases


def test_calls_that_come_again_are_not_run():
    calls = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    values = torch.empty(4, 3, dtype=torch.long, device="meta")
    with Noted(), Ledger() as ledger:
        ledger.known([values])
        sums = [values + number for number in (1, 1, 1.0, True)]
        parts = [torch.ops.aten._unsafe_view(values, [12]) for _ in range(2)]
    assert [tensor.dtype for tensor in sums] == [torch.long, torch.long, torch.float32, torch.long]
    assert calls.count(torch.ops.aten.add.Tensor) == 3  # 1 and True are of other types
    assert ledger.live == sum(tensor.nbytes for tensor in sums)
    assert parts[1].untyped_storage()._cdata == values.untyped_storage()._cdata


def test_layers_that_differ_are_run_at_full_depth():
    config = qwen(layers=5, layer_types=["full_attention"] * 4 + ["sliding_attention"], sliding_window=16)
    assert not Planner(config, Setup(device="cpu", prompt=8, completion=8)).is_extrapolated


@pytest.mark.parametrize(
    ("model_type", "period"),
    [
        ("gpt_oss", ["sliding_attention", "full_attention"]),
        ("qwen3_5_text", ["linear_attention", "linear_attention", "linear_attention", "full_attention"]),
    ],
)
def test_alternating_layers_are_run_at_two_depths(model_type, period, monkeypatch):
    """With one and two periods; a plan is that of the full depth."""
    fields = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 300}
    fields |= {"layer_types": period * 3, "num_hidden_layers": 3 * len(period)}
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    setup = Setup(device="cpu", autocast=None, prompt=16, completion=16, batch=8, group=4)
    planner = Planner(config, setup)
    assert planner.is_extrapolated
    plan = planner.estimate(setup)
    monkeypatch.setattr(Planner, "_build_shallow", lambda self: {})
    full_depth = Planner(config, setup).estimate(setup)
    for phase in plan.phases:
        assert plan.tensors_of(phase) == pytest.approx(full_depth.tensors_of(phase), rel=0.01)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(vocab_size=300, num_hidden_layers=4, **SMALL), marks=pytest.mark.slow),
        Gemma2Config(vocab_size=300, num_hidden_layers=4, head_dim=16, **SMALL),
        GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=300, n_positions=256),
        Qwen3MoeConfig(
            vocab_size=300,
            num_hidden_layers=4,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            head_dim=16,
            **SMALL,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_architectures_are_planned_without_a_table(config):
    setup = Setup(prompt=16, completion=32, batch=2, accumulation=4, steps_per_generation=4)
    full = Planner(config, setup).estimate(setup)
    assert full.trained == full.parameters > 0
    adapted = replace(setup, adapter=Adapter(4, "all-linear"))
    lora = Planner(config, adapted).estimate(adapted)
    assert 0 < lora.trained < lora.parameters == full.parameters
    assert lora.tensors < full.tensors


def test_the_text_part_of_a_vision_model_is_planned_like_the_model_it_is_made_of():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": 500, "num_hidden_layers": 5, "tie_word_embeddings": False, **SMALL}
    config = Qwen2VLConfig(text_config={**text, "rope_parameters": rope}).get_text_config(decoder=True)
    adapter = Adapter(4, "all-linear")
    setup = Setup(prompt=16, completion=32, batch=2, accumulation=4, adapter=adapter, fast_generation=False)
    found, plain = (Planner(each, setup).estimate(setup) for each in (config, qwen(tie_word_embeddings=False)))
    assert (found.parameters, found.trained) == (plain.parameters, plain.trained)
    assert list(found.phases) == list(plain.phases)
    for name, parts in found.phases.items():  # three positions per token in place of one
        assert sum(parts.values()) == pytest.approx(sum(plain.phases[name].values()), rel=1e-4)


def test_names_of_cards():
    for card, gigabytes in CARDS.items():
        written = f"NVIDIA {card.lower().replace('-', ' ')}"
        assert find_card(card) == find_card(written) == (card, int(gigabytes * 2**30))
    assert find_card("4090")[0] == "RTX-4090"
    assert find_card("h100")[0] == "H100-80GB"


@pytest.mark.parametrize(
    ("text", "gigabytes", "margin"),
    [(None, 10, 0.7), (None, 20, 1.0), ("8%", 100, 8.0), ("1.5GB", 8, 1.5), ("0", 8, 0)],
)
def test_a_margin_is_an_amount_or_a_share(text, gigabytes, margin):
    assert parse_margin(text, gigabytes * 2**30) == int(margin * 2**30)


def test_autocast_keeps_casts_of_weights_and_not_of_views():
    weight = nn.Parameter(torch.empty(4, 8, device="meta"))
    inputs = torch.empty(2, 8, device="meta")
    with torch.no_grad(), Precision(torch.bfloat16, "cuda") as precision:
        assert (inputs @ weight.T).dtype == torch.bfloat16
        assert not precision._casts
        nn.functional.linear(inputs, weight)
        assert list(precision._casts) == [id(weight)]


def test_a_model_without_attention_is_planned_beside_vllm():
    setup = Setup(prompt=16, completion=32, batch=2, vllm=True)
    config = MambaConfig(vocab_size=300, num_hidden_layers=2, hidden_size=32, state_size=4)
    sync = Planner(config, setup, 2**34).estimate(setup).phases["sync"]
    assert sync["vLLM: base"] > 0


def test_more_of_anything_needs_more():
    setup = Setup(prompt=16, completion=32, batch=2, accumulation=4, steps_per_generation=4)
    planner = Planner(qwen(), setup)

    def peak(**changes):
        return planner.estimate(replace(setup, **changes)).tensors

    least = peak()
    for changes in ({"batch": 4}, {"completion": 64}, {"prompt": 64}, {"checkpointing": False}):
        assert peak(**changes) > least
    assert peak(optimizer="sgd") < peak(optimizer="adamw_bnb_8bit") < least


def test_a_reference_model_and_vllm_are_counted():
    setup = Setup(prompt=16, completion=32, batch=2, accumulation=4, steps_per_generation=4, reference=True)
    with_reference = Planner(qwen(), setup).estimate(setup)
    weights = 4 * with_reference.parameters
    assert weights <= with_reference.phases[with_reference.peak]["reference model"] < 1.01 * weights
    setup = Setup(prompt=16, completion=32, batch=2, vllm=True, vllm_share=0.25)
    awake = Planner(qwen(), setup, 2**34).estimate(setup).phases
    engines = [{part: n for part, n in awake[phase].items() if part.startswith("vLLM")} for phase in ("train", "sync")]
    assert engines[0] == engines[1]
    assert engines[0]["vLLM: base"] == 2 * with_reference.parameters
    assert sum(engines[0].values()) == 2**32
    assert "generate" not in awake
    asleep = replace(setup, vllm_sleeps=True)
    planner = Planner(qwen(), asleep, 2**34)
    phases = planner.estimate(asleep).phases
    assert [name for name, parts in phases.items() if "vLLM: base" in parts] == ["sync"]
    assert "sleep" not in planner.host()


def test_vllm_with_adapters_is_counted():
    lora = Setup(adapter=Adapter(4, "all-linear"), dtype="bfloat16", bits=4, vllm=True, vllm_sleeps=True)
    planner = Planner(qwen(), lora, 2**34)
    sync = planner.estimate(lora).phases["sync"]
    assert sync["vLLM: base"] == sync["layers"] + sync["embeddings and head"]  # in 4 bits as here
    assert sync["vLLM: adapters"] == planner.adapters // 2
    assert "one layer merged" not in sync
    assert planner.host()["sleep"]["vLLM: base"] == sync["vLLM: base"]
    with pytest.raises(InputError, match="vllm_gpu_memory_utilization: got 0.3, .*; expected at least 0"):
        Planner(qwen(), lora, 2 * sync["vLLM: base"]).estimate(lora)
    merged = replace(lora, bits=0, vllm_lora="merged")
    planner = Planner(qwen(), merged, 2**34)
    sync = planner.estimate(merged).phases["sync"]
    assert "vLLM: adapters" not in sync
    assert sync["one layer merged"] > 0
    assert "sleep" not in planner.host()


@pytest.mark.parametrize(("changes", "size"), [({}, 2), ({"autocast": None}, 2), ({"bits": 4, "autocast": None}, 4)])
def test_copies_of_joined_adapters_are_counted_in_generation(changes, size, monkeypatch):
    lora = Setup(adapter=Adapter(4, "all-linear"), dtype="bfloat16", completion=64, prompt=16, **changes)

    def generation():
        planner = Planner(qwen(), lora)
        return planner.estimate(lora).tensors_of("generate"), planner.adapters // 4

    counted, elements = generation()
    monkeypatch.setattr(passes, "_joined_adapters", lambda skeleton: 0)
    assert counted - generation()[0] == size * elements


def test_the_host_beside_a_gpu():
    full, lora = Setup(), Setup(adapter=Adapter(4, "all-linear"), dtype="bfloat16")
    planner = Planner(qwen(), full)
    phases = planner.host()  # float32 from files in bfloat16: four threads cast what they read
    assert phases["load"]["weights, on their way"] == 4 * (2 * 500 * 64 + 2 * 128 * 64)
    assert phases["save"]["weights, to be written"] == 4 * planner.parameters
    assert set(phases) == {"load", "save"}
    adapted = Planner(qwen(), lora)
    phases = adapted.host()
    assert "weights, on their way" not in phases["load"]  # pages of the files
    assert phases["save"]["weights, to be written"] == adapted.adapters
    assert phases["merge"]["base in float32"] == 4 * planner.parameters
    assert set(Planner(qwen(), replace(lora, device="cpu")).host()) == {"merge"}


def test_the_setup_of_a_recipe():
    setup = from_keys({"use_peft": True, "lora_target_modules": ["all-linear"], "load_in_4bit": True, "beta": 0.1}, 99)
    assert setup.adapter == Adapter(16, "all-linear", 0.05)
    assert (setup.bits, setup.prompt, setup.reference, setup.autocast) == (4, 99, True, "bfloat16")
    assert from_keys({}, 9, "cpu").autocast is None
    options = {"offload": True, "every_n_layers": 2}
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        checkpoints = from_keys({name: options, "generation_rows": 3}, 9)
        assert (checkpoints.offload, checkpoints.checkpoint_every, checkpoints.rows_at_once) == (True, 2, 3)
    assert not from_keys({"gradient_checkpointing_kwargs": options}, 9, "cpu").offload  # it is the host
    with pytest.raises(InputError, match="load_in_4bit"):
        from_keys({"load_in_4bit": True}, 9)
    with pytest.raises(InputError, match="num_generations"):
        from_keys({"num_generations": 0}, 9)


def test_adapters_that_fit_nothing_are_refused():
    with pytest.raises(InputError, match="lora_target_modules"):
        Skeleton(qwen(), Setup(adapter=Adapter(4, ("nowhere",))))


def test_measurements_of_others_with_unfused_logits():
    """Qwen3-1.7B with TRL 1.12, whose backward holds three float32 copies of the logits: 2.744 GiB measured on an RTX
    3070. All but the logits comes from the plan; `recipes/studies/memory.md` has the arithmetic."""
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    widths = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(vocab_size=151_936, num_hidden_layers=28, head_dim=128, tie_word_embeddings=True, **widths)
    batches = {"batch": 8, "accumulation": 4, "steps_per_generation": 4, "prompt": 11, "completion": 96}
    setup = Setup(dtype="bfloat16", bits=4, nested=True, adapter=Adapter(8, linears), exact=False, **batches)
    planner = Planner(config, setup)
    parts = planner.estimate(setup).phases["train"]
    # TRL's adapters are in bfloat16, this package's in float32.
    adapters = (parts["adapters"] + parts["optimizer state"] + parts["gradients"]) / 2
    checkpointed = 28 * 2048 * 2 * 8 * (11 + 96)
    logits = 3 * 4 * 8 * 96 * 151_936
    total = parts["embeddings and head"] + parts["layers"] + adapters + checkpointed + logits
    assert total / 2**30 == pytest.approx(2.744, rel=0.015)


def test_rounds_hold_fewer_keys_and_values():
    setup = Setup(
        dtype="bfloat16", prompt=64, completion=256, batch=2, accumulation=8, steps_per_generation=8, group=8
    )
    planner = Planner(qwen(), setup)
    at_once, in_rounds = (
        planner.estimate(replace(setup, generation_rows=rows)).phases["generate"] for rows in (None, 8)
    )
    # 5 layers x keys and values x 2 heads x 16 numbers of 2 bytes; one prompt of 64 tokens less, and 8 completions.
    fewer = (64 + 8 * 256) * 5 * 2 * 2 * 16 * 2
    assert at_once["keys and values"] - in_rounds["keys and values"] == pytest.approx(fewer, rel=0.01)
    assert planner.estimate(replace(setup, generation_rows=99)).phases["generate"] == at_once


def test_checkpoints_on_the_host():
    setup = Setup(dtype="bfloat16", prompt=64, completion=256, batch=4, accumulation=2, exact=False)
    planner = Planner(qwen(layers=40), setup)
    offloaded = replace(setup, offload=True)
    on_device, on_host = (planner.estimate(each).phases["train"]["activations"] for each in (setup, offloaded))
    # In backward one layer's input is back on the device, all others are not.
    one_input = 4 * 320 * 64 * 2
    assert on_device - on_host == pytest.approx(39 * one_input, rel=0.05)
    # PyTorch pins powers of two.
    assert planner.host(offloaded)["train"]["checkpoints"] == 40 * 2**18 > 40 * one_input
    assert "train" not in planner.host(setup)


def test_checkpoints_of_every_other_layer():
    setup = Setup(dtype="bfloat16", prompt=64, completion=256, batch=4, checkpointing=True)
    none, every_other, all_layers = (
        Planner(qwen(), each).estimate(each).phases["train"]["activations"]
        for each in (replace(setup, checkpointing=False), replace(setup, checkpoint_every=2), setup)
    )
    assert all_layers < every_other < none


def test_remedies_that_cost_time_alone_are_proposed_last():
    lengths = {"prompt": 64, "completion": 2048, "batch": 1, "accumulation": 32, "steps_per_generation": 32}
    setup = Setup(dtype="bfloat16", adapter=Adapter(8, "all-linear"), **lengths)
    planner = Planner(qwen(layers=40), setup)
    given = ("max_completion_length", "per_device_train_batch_size")

    def proposed(memory, *more_given):
        return propose(planner, setup, memory, (*given, *more_given, "steps_per_generation"), rows=32)

    total_at_once, total_in_rounds = (
        planner.estimate(each).total for each in (setup, replace(setup, generation_rows=1))
    )
    assert "generation_rows" not in proposed(total_at_once).keys
    rounds = proposed(total_at_once - 1)
    assert rounds.fits
    assert rounds.keys["generation_rows"] == 16
    assert "gradient_checkpointing_kwargs" not in rounds.keys
    offloaded = proposed(total_in_rounds - 1)
    assert offloaded.fits
    assert offloaded.keys["gradient_checkpointing_kwargs"] == {"offload": True}
    assert not proposed(total_in_rounds - 1, "gradient_checkpointing_kwargs").fits
    assert not proposed(total_at_once - 1, "generation_rows", "gradient_checkpointing_kwargs").fits


def test_tied_embeddings_count_once():
    tied, untied = (Skeleton(qwen(tie_word_embeddings=tie), Setup()).parameters for tie in (True, False))
    assert untied - tied == 500 * 64
    assert isinstance(Skeleton(qwen(), Setup()).head, nn.Linear)


def test_repeated_operations_have_the_same_size():
    """On the meta device results are remembered: bytes must be those of every op run for itself."""

    def peaks(device):
        with Ledger() as ledger:
            for size in (3, 5, 3):
                x = torch.empty(size, 4, device=device, requires_grad=True)
                y = (x.t().contiguous() * 2.0).to(torch.float64) + torch.ones(size, device=device)
                y[:, 1:].sum().backward()
                ledger.mark(f"{size}")
        return ledger.live, dict(ledger.peaks)

    assert peaks("meta") == peaks("cpu")


def test_the_watch_over_movement_is_counted():
    from trl_drgrpo.features.diagnostics.movement import MovementWatch, _sample

    assert MovementWatch().__init__.__defaults__[2] == estimate.WATCHED  # type: ignore[union-attr]
    model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(300, 7, dtype=torch.bfloat16))
    samples = _sample(model, estimate.WATCHED)
    real = sum(t.nbytes for each in samples for t in (each.index, each.start, each.touched))
    assert estimate._watched(list(model.parameters())) == real


def test_completions_at_their_limit_behind_one_prompt():
    # 2 prompts, 4 completions each: packs of 96 + 4 * (12 - 1) tokens, both in the only micro-batch
    setup = Setup(device="cpu", prompt=96, completion=12, batch=4, accumulation=2, steps_per_generation=2, group=4)
    assert trained_shapes(qwen(), setup) == (Shape(2, 140, 96, 96, 8 * 108, masked=True, apart=(280, 12320)),)
    alone = replace(setup, share_prompts=False)
    assert trained_shapes(qwen(), alone) == (Shape(4, 107, 48, 48, 4 * 108, masked=False, later=True),)


def test_models_that_cannot_share_prompts_are_planned_without():
    assert shares_prompts(qwen(), Setup())
    assert not shares_prompts(qwen(), Setup(group=1))
    assert not shares_prompts(qwen(), Setup(exact=False))
    assert shares_prompts(Gemma2Config(vocab_size=300, num_hidden_layers=4, head_dim=16, **SMALL), Setup())  # windows
    assert not shares_prompts(Llama4TextConfig(vocab_size=300, num_hidden_layers=4, head_dim=16, **SMALL), Setup())


@given(st.data())
def test_no_window_holds_more_than_planned(data):
    """Whatever lengths and forks a generation holds: no micro-batch has a larger mask than the largest planned one,
    nor more tokens, in all or to score, but for what lies between the kinds of windows that are tried."""
    group, batch = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([2, 4, 8]))
    slots = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if batch * n % group == 0]))
    prompt, completion = data.draw(st.integers(64, 300)), data.draw(st.integers(64, 300))
    config = qwen()
    setup = Setup(
        device=data.draw(st.sampled_from(["cpu", "cuda"])),
        prompt=prompt,
        completion=completion,
        batch=batch,
        accumulation=slots,
        steps_per_generation=slots,
        group=group,
    )
    rows = []
    for number in range(batch * slots // group):
        own = data.draw(st.integers(prompt // 4, prompt))
        shared = data.draw(st.integers(0, completion))  # two rows each have so many tokens in common
        for i in range(group):
            length = data.draw(st.integers(1, completion))
            tokens = (-(i // 2) - 1,) * min(shared, length) + (i,) * (length - min(shared, length))
            rows.append(Row(number, own, length, completion=tokens))
    budget = Budget(batch, max(r.prompt_length for r in rows) + max(r.completion_length for r in rows))
    costs = costs_of(config, setup.device, shares_prompts(config, setup))
    planned = trained_shapes(config, setup)
    most, largest, scored = (max(each) for each in zip(*(sizes(shape) for shape in planned), strict=True))
    for micro_batch in plan_window(rows, slots, budget, costs):
        tokens, mask, to_score = sizes(_shape(rows, micro_batch, costs, later=False))
        assert tokens <= 1.3 * most
        assert mask <= largest
        assert to_score <= 1.3 * scored


def sizes(shape):
    """Tokens, query-key pairs of the mask, and tokens to score."""
    tokens = shape.packs * shape.width
    return tokens, tokens * shape.width * shape.masked, shape.scored


def test_rows_that_are_scored_before_any_is_left_out():
    setup = Setup(device="cpu", prompt=40, completion=40, batch=4, accumulation=4, steps_per_generation=4, group=4)
    most = max(shape.packs * shape.width for shape in scored_shapes(qwen(), setup))
    assert most <= 4 * 80
    assert scored_shapes(qwen(), replace(setup, exact=False)) == (Shape(4, 80, 160, 160, 320, True, True),)


def test_a_generation_holds_each_prompt_once(tokenizer):
    setup = Setup(device="cpu", autocast=None, prompt=100, completion=20, batch=8, group=4)
    own = replace(setup, fast_generation=False)
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 heads of 16, float32
    config = qwen(layers=2)

    def cache(config, setup):
        return Planner(config, setup).estimate(setup).phases["generate"]["keys and values"]

    assert cache(config, setup) == (2 * 100 + 8 * 20) * per_token
    assert cache(config, own) == 8 * 120 * per_token
    latent = tiny("DeepseekV3", tokenizer).config
    assert cache(latent, setup) == cache(latent, own)


# Running states

SHORT = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
ADAPTED = {"use_peft": True, "lora_target_modules": ["all-linear"]}


@pytest.mark.parametrize("family", [*STATES, "Bloom", "Falcon", "Llama4Text", "Mpt", "GptOss", "DeepseekV3"])
def test_every_family_is_planned(family, tokenizer):
    if family == "Mpt":
        config = transformers.MptConfig(vocab_size=200, d_model=32, n_layers=2, n_heads=4)
    elif family in STATES:
        config = configuration_with_states(family, tokenizer)
    else:
        config = tiny(family, tokenizer).config
    setup = from_keys(SHORT, 8, "cpu")
    plan = Planner(config, setup).estimate(setup)
    assert plan.phases["generate"]
    assert plan.phases["train"]
    if family != "Llama4Text":  # whose router is a linear layer with two results
        setup = from_keys({**SHORT, **ADAPTED}, 8, "cpu")
        assert Planner(config, setup).estimate(setup).trained > 0


@pytest.mark.parametrize("family", [name for name in STATES if name not in ("RecurrentGemma", "Rwkv", "Mamba2")])
def test_states_take_in_the_plan_what_they_take_in_a_cache(family, tokenizer):
    config = configuration_with_states(family, tokenizer)
    setup = from_keys({**SHORT, "fast_generation": False}, 8, "cpu")
    planned = Planner(config, setup).estimate(setup).phases["generate"]["keys and values"]
    model = random_weights(AutoModelForCausalLM.from_config, config).eval()
    with torch.no_grad():
        cache = model(torch.ones(4, 16, dtype=torch.long), use_cache=True).past_key_values
    tensors = []
    for layer in cache.layers:
        for value in vars(layer).values():
            tensors += value.values() if isinstance(value, dict) else [value]
    assert planned == sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def test_a_model_that_cannot_run_without_weights_is_one_error(tokenizer, monkeypatch):
    config = tiny("Llama", tokenizer).config
    monkeypatch.setattr(transformers.LlamaModel, "forward", lambda *args, **kwargs: torch.tensor(1)[3])
    setup = from_keys(SHORT, 8, "cpu")
    with pytest.raises(InputError, match=r"llama, whose \w+ step cannot be run without weights"):
        Planner(config, setup).estimate(setup)
