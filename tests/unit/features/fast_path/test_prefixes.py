"""Generations that begin with tokens of earlier ones: nothing is run twice, and the tokens are the same."""

import gc
import weakref

import pytest
import torch
from tiny_families import tiny
from transformers import GenerationConfig

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.decoding.prefixes import Prefixes
from trl_drgrpo.features.fast_path.fast_path import FastPath

PROMPTS = ["what is 1+2? tell me now", "7*8=", "12345+67890="]
PAD = 257


def call(model, rows, kept=None, shares=True, **settings):
    """Completions of rows of token ids, without padding, and the shapes of what was run."""
    limits = settings.pop("limits", None)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ends = {"pad_token_id": PAD, "eos_token_id": list(range(10)), "suppress_tokens": [PAD]}
    config = GenerationConfig(**{"do_sample": True, "max_new_tokens": 40, **ends, **settings})
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(0)
    with shared_prefill(model, shares, limits, kept):
        tokens = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
    hook.remove()
    return tokens.tolist(), shapes


def branches(rows, completions, cuts):
    """Two continuations of each row, at its cut."""
    starts = [
        row + [token for token in ids[:cut] if token != PAD]
        for row, ids, cut in zip(rows, completions, cuts, strict=True)
    ]
    return [start for start in starts for _ in range(2)]


@pytest.mark.parametrize(
    ("family", "greedy"), [("Qwen3", False), ("Gemma2", False), ("GPT2", False), ("GptOss", True)]
)
def test_continuations_run_one_token_per_row(tokenizer, family, greedy):
    model = tiny(family, tokenizer).eval()
    kept = Prefixes()
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS for _ in range(2)]
    completions, _ = call(model, rows, kept, do_sample=not greedy)
    for cuts in ([9, 3, 1, 0, 13, 22], [5, 0, 1, 7, 2, 30, 3, 4, 5, 6, 7, 1]):  # the second of continuations
        rows = branches(rows, completions, cuts)
        different = len({tuple(row) for row in rows})
        completions, shapes = call(model, rows, kept, do_sample=not greedy)
        again, again_shapes = call(model, rows, do_sample=not greedy)
        assert shapes[0] == (different, 1)
        assert again_shapes[0] == (different, max(map(len, rows)))
        assert completions == again


def test_what_is_missing_is_run(tokenizer):
    model = tiny("Qwen3", tokenizer).eval()
    kept = Prefixes()
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    call(model, rows, kept)
    longer = [[*rows[0], 40, 41, 42, 43], [*rows[1], 50], rows[2][:-1]]
    completions, shapes = call(model, longer, kept)
    assert shapes[0] == (3, 4)
    assert completions == call(model, longer)[0]
    strange = [*longer, [100, 101]]
    completions, shapes = call(model, strange, kept)
    assert shapes[0] == (4, max(map(len, strange)))
    assert completions == call(model, strange)[0]


def test_a_window_that_was_left_behind_is_run_again(tokenizer):
    model = tiny("Mistral", tokenizer).eval()  # a window of 16: of a prompt of 24 tokens, the last 15 are held
    kept = Prefixes()
    row = tokenizer(PROMPTS[0])["input_ids"]
    assert len(row) > 20
    call(model, [row], kept)
    completions, shapes = call(model, [row[:20]], kept)
    assert shapes[0] == (1, 20)
    assert completions == call(model, [row[:20]])[0]


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_rows_end_at_their_limits(model, tokenizer, settings):
    model.eval()
    rows = [tokenizer("7*8=")["input_ids"]] * 6
    limits = [0, 1, 5, 12, 30, 99]
    ends = {"eos_token_id": 3}  # hardly ever; the longest goes on as it would
    free = call(model, rows, **settings, **ends)[0]
    limited = call(model, rows, limits=limits, **settings, **ends)[0]
    for limit, with_limit, without in zip(limits, limited, free, strict=True):
        assert [token for token in with_limit if token != PAD] == [token for token in without if token != PAD][:limit]


def test_what_is_kept_is_freed_behind_the_block(model, tokenizer):
    fast_path = FastPath(None)
    with fast_path.keeping_prefixes():
        call(model.eval(), [tokenizer("7*8=")["input_ids"]] * 2, fast_path._kept)
        keys = weakref.ref(fast_path._kept._held[-1].own[0][0])
        assert keys() is not None
    gc.collect()
    assert fast_path._kept is None
    assert keys() is None
