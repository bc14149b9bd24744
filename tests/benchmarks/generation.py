"""Generating with transformers: its own loop against this package's, same prompts, same tokens.

Process CPU time (wall time on a GPU):

- one new token: the cost of running the prompts (`G` completions each);
- completions that end after a quarter of the longest on average (a random model with that many end tokens);
- 4 prompts x 8 completions of up to 192 tokens on a Qwen3 of 192 wide and 4 layers, one token in 256 is an end;
- the same, against continuous batching of transformers (with forks, a cache of fixed size): seconds per 1000 tokens,
  for it samples others;
- a hybrid: 4 prompts x 8 completions on a Qwen3.5 of 192 wide, three layers of running states and one of attention.

The last column: keys and values in the last step.

Run: `make bench`, or this file with `--pairs 5`, `--device cuda`.
"""

from contextlib import nullcontext
from functools import partial

import torch
from bench import command_line, interleaved, medians, now, print_head, print_row, quietly, random_model
from fast_path import build_model
from transformers import (
    ContinuousBatchingConfig,
    Gemma3TextConfig,
    GenerationConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.upstream.kv_cache import CACHE

GROUP = 8
TABLES = ["prompts", "ends", "long-ends", "continuous", "hybrid"]


def groups_of(model, prompt, prompts):
    """The same random prompts in each call, each `GROUP` times."""
    torch.manual_seed(1)
    return torch.randint(1000, model.config.vocab_size, (prompts, prompt)).repeat_interleave(GROUP, dim=0)


def seconds(model, prompt, prompts, device, shared, speed=None, **settings):
    """Seconds of one generation, and its tokens. `speed` is told what is used."""
    ids = groups_of(model, prompt, prompts).to(device)
    config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, **settings)
    start = now(device)
    with torch.no_grad(), shared_prefill(model, speed=speed) if shared else nullcontext():
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return now(device) - start, tokens


def cache_bytes(model, *args, **settings):
    """Bytes of keys and values in the last step of one generation."""
    held = []

    def note(module, arguments, kwargs):
        tensors = [value for layer in kwargs[CACHE].layers for value in vars(layer).values()]
        held.append(sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor) and each.dim() > 1))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    seconds(model, *args, **settings)
    hook.remove()
    return held[-1]


def compare(label, model, pairs, *args, **settings):
    """One line of a table."""
    runs = [partial(seconds, model, *args, shared, **settings) for shared in (False, True)]
    theirs, ours = interleaved(pairs, *runs)
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(theirs, ours, strict=True))
    held = [cache_bytes(model, *args, shared, **settings) / 1e6 for shared in (False, True)]
    taken = [[seconds for seconds, _ in each] for each in (theirs, ours)]
    cells = "same tokens" if same else "OTHER TOKENS", f"{held[0]:.0f} -> {held[1]:.0f}"
    print_row(label, *medians(*taken), *cells)


def continuous_seconds(model, prompt, prompts, device, **settings):
    """Seconds of one generation by continuous batching, per 1000 tokens."""
    ids = groups_of(model, prompt, prompts).tolist()
    config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, **settings)
    room = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512)
    start = now(device)
    with torch.no_grad():
        outputs = model.generate_batch(
            ids, generation_config=config, continuous_batching_config=room, progress_bar=False
        )
    return 1000 * (now(device) - start) / sum(len(output.generated_tokens) for output in outputs.values())


def own_seconds(model, prompt, *args, **settings):
    """Seconds of one generation with shared prompts, per 1000 tokens."""
    taken, tokens = seconds(model, prompt, *args, True, **settings)
    return 1000 * taken / (tokens[:, prompt:] != 0).sum().item()


def continuous(label, model, pairs, *args, **settings):
    """The same against continuous batching."""
    runs = [partial(measure, model, *args, **settings) for measure in (continuous_seconds, own_seconds)]
    print_row(label, *medians(*interleaved(pairs, *runs)), "", "")


def small_model(device, vocabulary=2048, width=192, layers=4):
    """A Qwen3 in which attention over long prompts is what takes the time."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64 or 1,
        head_dim=32,
        max_position_embeddings=4096,
    )
    return random_model(config, device).eval()


def hybrid_model(device, vocabulary=2048, width=192):
    """A Qwen3.5 of three layers of running states and one of attention."""
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64 or 1,
        head_dim=32,
        linear_num_key_heads=width // 64 or 1,
        linear_num_value_heads=width // 32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=4096,
    )
    return random_model(config, device).eval()


def window_model(device, vocabulary=2048, width=192, window=128):
    """A Gemma 3 of three layers with a sliding window and one of full attention."""
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64 or 1,
        head_dim=32,
        sliding_window=window,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
    )
    return random_model(config, device).eval()


def experts_model(device, vocabulary=2048, width=192):
    """A Qwen3 of eight experts in each of four layers, of which a token chooses two."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        moe_intermediate_size=width,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64 or 1,
        head_dim=32,
        max_position_embeddings=4096,
    )
    return random_model(config, device).eval()


def main():
    parser = command_line(__doc__, pairs=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES, help="which lines")
    arguments = quietly(parser)
    print_head("case", "stock, s", "ours, s", "ratio (min to max)", "", "keys and values, MB")
    pairs, device = arguments.pairs, arguments.device
    large, small, hybrid = build_model(512, 8, 4096, device).eval(), small_model(device), hybrid_model(device)
    mean_32 = {"max_new_tokens": 128, "eos_token_id": list(range(4096 // 32))}  # one token in 32 ends a completion
    some = {"max_new_tokens": 192, "eos_token_id": list(range(2048 // 256))}
    lines = {
        "prompts": ("1 token", (64, 256, 512, 1024), compare, large, pairs, 2, {"max_new_tokens": 1}),
        "ends": ("up to 128 tokens, 32 on average", (16, 256), compare, large, max(1, pairs // 2), 4, mean_32),
        "long-ends": ("192 tokens, some end before", (64, 256, 512, 1024), compare, small, pairs, 4, some),
        "continuous": (
            "per 1000 tokens, against continuous batching",
            (64, 256),
            continuous,
            small,
            pairs,
            4,
            some,
        ),
        "hybrid": ("hybrid, 192 tokens, some end before", (64, 256, 512), compare, hybrid, pairs, 4, some),
    }
    for name in arguments.tables:
        label, lengths, line, model, pairs, prompts, settings = lines[name]
        for length in lengths:
            line(f"prompt {length}, {label}", model, pairs, length, prompts, device, **settings)


if __name__ == "__main__":
    main()
