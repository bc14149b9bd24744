"""Generating with transformers: its own loop against shared prefill and dropped rows, same prompts, same tokens.

Two tables, process CPU time (wall time on a GPU), interleaved in one process, medians of ratios:

- one new token: the cost of running the prompts (`G` completions each);
- completions that end after a quarter of the longest on average (a random model with that many end tokens).

Run: `make bench`, or this file with `--pairs 5`, `--device cuda`.
"""

import argparse
import os
import statistics
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from fast_path import build_model
from transformers import GenerationConfig

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill

GROUP = 8


def seconds(model, prompt, prompts, shared, device, **settings):
    """Seconds of one generation, and its tokens."""
    torch.manual_seed(1)
    ids = torch.randint(1000, 4000, (prompts, prompt)).repeat_interleave(GROUP, dim=0).to(device)
    config = GenerationConfig(do_sample=True, pad_token_id=0, **settings)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": config}
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    with torch.no_grad():
        if shared:
            with shared_prefill(model):
                tokens = model.generate(**arguments)
        else:
            tokens = model.generate(**arguments)
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start, tokens


def compare(label, model, pairs, *args, **settings):
    """One line of a table."""
    stock, ours, same = [], [], True
    for pair in range(pairs + 1):
        a, theirs = seconds(model, *args[:2], False, args[2], **settings)
        b, tokens = seconds(model, *args[:2], True, args[2], **settings)
        same = same and torch.equal(theirs, tokens)
        if pair:  # the first pair warms up
            stock.append(a)
            ours.append(b)
    ratios = [a / b for a, b in zip(stock, ours, strict=True)]
    spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
    tokens = "same tokens" if same else "OTHER TOKENS"
    print(
        f"| {label} | {statistics.median(stock):.2f} | {statistics.median(ours):.2f} | {spread} | {tokens} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs per line, after one that warms up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    model = build_model(512, 8, 4096, arguments.device).eval()
    print("| case | stock, s | ours, s | ratio (min to max) | |\n|---|---|---|---|---|", flush=True)
    for prompt in (64, 256, 512, 1024):
        compare(f"prompt {prompt}, 1 token", model, arguments.pairs, prompt, 2, arguments.device, max_new_tokens=1)
    ends = list(range(4096 // 32))  # one token in 32 ends a completion
    for prompt in (16, 256):
        label = f"prompt {prompt}, up to 128 tokens, 32 on average"
        settings = {"max_new_tokens": 128, "eos_token_id": ends}
        compare(label, model, max(1, arguments.pairs // 2), prompt, 4, arguments.device, **settings)


if __name__ == "__main__":
    main()
