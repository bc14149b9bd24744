"""How many operations one layer has, without a GPU: a GPU launches a kernel for each, and waits for most of them.

Operations that are not views, per decoder layer of a tiny Qwen2 in bfloat16: in a decoding step of transformers' loop
and of ours, and in forward and backward of a training pack. Adapters are float32 LoRA on all linear layers; "autocast"
is how the trainer runs with `bf16`. A second table has layers of running states. An operation of bitsandbytes counts
once: `gemm_4bit` decides by the card and the number of rows whether it multiplies by 4-bit weights or dequantizes
first.

Run: `make bench-launches` (half a minute). `--four_bit cuda`: milliseconds of one 4-bit linear layer on a GPU instead,
as bitsandbytes multiplies and with the weights dequantized first, for 1 to 64 rows.
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial

import torch
from bench import command_line, interleaved, print_head, print_row, quietly, random_model, ratio
from launch_counts import decoding_step, per_layer, training_step
from peft import LoraConfig, get_peft_model
from tiny import tiny_tokenizer
from tiny_bases import load, nf4, save_base
from tiny_families import configuration_with_states
from transformers import Qwen2Config

from trl_drgrpo.single_gpu.peft_adapters import keep_4bit_layout
from trl_drgrpo.upstream.private_state import swapped


def with_adapters(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def in_bfloat16(layers):
    """A Qwen2 of so many layers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, dtype="bfloat16", **heads
    )
    return random_model(config).eval()


def in_four_bits(layers):
    """The same with its linear layers in NF4, double quantization and `gemm_4bit`."""
    quantization = nf4()
    quantization.bnb_4bit_compute_dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        path = save_base(folder, tiny_tokenizer(), bias=True, dtype=torch.bfloat16, num_hidden_layers=layers)
        model = load(path, dtype=torch.bfloat16, quantization_config=quantization).eval()
    keep_4bit_layout(model)  # as the trainer does; repacked weights of some CPUs are another product
    return model


def dequantized_first(layer, states):
    """Compute a 4-bit linear layer by a product with its weights in the dtype of the input."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(states.dtype)
    return torch.nn.functional.linear(states, weight, layer.bias)


def dequantizing_step(model, **options):
    """[`decoding_step`] with weights that are dequantized first."""
    from bitsandbytes.nn import Linear4bit

    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, Linear4bit):
                stack.enter_context(swapped(layer, forward=partial(dequantized_first, layer)))
        return decoding_step(model, **options)


def counted_table():
    print_head("per layer", "without adapters", "LoRA adds", "LoRA under autocast adds")
    theirs = partial(decoding_step, shares=False)
    lines = {
        "decoding step, transformers": (in_bfloat16, theirs),
        "decoding step, ours": (in_bfloat16, decoding_step),
        "decoding step in 4 bits, transformers": (in_four_bits, theirs),
        "decoding step in 4 bits, ours": (in_four_bits, decoding_step),
        "decoding step in 4 bits, ours, dequantized first": (in_four_bits, dequantizing_step),
        "forward and backward": (in_bfloat16, training_step),
        "forward and backward in 4 bits": (in_four_bits, training_step),
    }
    for label, (build, count) in lines.items():

        def adapted(layers, build=build):
            return with_adapters(build(layers))

        bare = per_layer(build, count).total()
        added = [per_layer(adapted, count, autocast=autocast).total() - bare for autocast in (False, True)]
        print_row(label, str(bare), *map(str, added))


def hybrid(family, kind, layers):
    """A tiny hybrid in bfloat16: a layer of attention, and so many of running states."""
    config = configuration_with_states(family, tiny_tokenizer())
    kinds = {"layer_types": ["full_attention"] + [kind] * layers, "num_hidden_layers": layers + 1}
    return random_model(type(config)(**{**config.to_dict(), **kinds})).to(torch.bfloat16).eval()


def hybrid_table():
    print_head("decoding step, per layer of running states", "transformers", "ours")
    lines = {
        "gated delta rule (Qwen3.5)": ("Qwen3_5Text", "linear_attention"),
        "short convolution (LFM2)": ("Lfm2", "conv"),
        "Mamba 2 (Nemotron-H)": ("NemotronH", "linear_attention"),
    }
    for label, (family, kind) in lines.items():
        counts = [per_layer(partial(hybrid, family, kind), decoding_step, shares=shares) for shares in (False, True)]
        print_row(label, *(str(count.total()) for count in counts))


def milliseconds(layer, states, device, repeats=50):
    """Milliseconds of one forward."""
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    with torch.no_grad():
        layer(states)
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            layer(states)
        synchronize()
    return 1000 * (time.perf_counter() - start) / repeats


def timed_table(device, pairs):
    from bitsandbytes.nn import Linear4bit

    print_head("4-bit linear layer", "rows", "bitsandbytes, ms", "dequantized first, ms", "ratio (min to max)")
    shapes = [(1536, 8960), (3584, 3584), (3584, 18944)] if device == "cuda" else [(128, 256)]
    for inputs, outputs in shapes:
        layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
        for rows in (1, 4, 8, 16, 32, 64):
            states = torch.randn(rows, 1, inputs, dtype=torch.bfloat16, device=device)
            arms = [layer, partial(dequantized_first, layer)]
            taken = interleaved(pairs, *(partial(milliseconds, arm, states, device) for arm in arms))
            cells = [f"{statistics.median(times):.3f}" for times in taken]
            print_row(f"{inputs} x {outputs}", str(rows), *cells, ratio(*taken))


def main():
    parser = command_line(__doc__, pairs=5)
    parser.add_argument("--four_bit", choices=("cuda", "cpu"), help="time a 4-bit linear layer there instead")
    arguments = quietly(parser)
    if arguments.four_bit:
        timed_table(arguments.four_bit, arguments.pairs)
    else:
        counted_table()
        hybrid_table()


if __name__ == "__main__":
    main()
