"""Packs of rows against each row alone, and which models may run them."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from tiny import in_double_precision, tiny_model
from tiny_families import tiny

from trl_drgrpo.features.fast_path.pack_layout import MaskForm, pack_rows, scored_only
from trl_drgrpo.features.fast_path.sharing import costs_of, mask_form, rope_depends_on_width, why_not_shared
from trl_drgrpo.upstream.batches import TokenBatch

PROMPT, SHORT = [40, 41, 42, 43], [50]
COMPLETIONS = [
    [60, 61, 62, 63, 64, 65],
    [60, 61, 62, 70, 71],  # branches off the first one
    [60, 61, 62, 70, 72, 73],  # and this one off that
    [60, 61, 62],  # their prefix as a whole row
    [60, 61, 62, 63, 64, 65],  # the first one again
    [60, 61, 62, 63, 64, 66],  # another last token
    [80, 81],  # a second family
    [80, 82, 83],  # whose prefix is one token
    [90],
    [60, 61],  # behind another prompt
    [60, 61, 62],
]
PROMPTS = [PROMPT] * 9 + [SHORT] * 2
HOLES = (1, 7)  # rows in which the second column of the completion is padding, what follows one column later
TOGETHER = [tuple(range(9)), (9, 10)]


@pytest.fixture
def model(tokenizer):
    return in_double_precision(tiny_model(tokenizer))


def columns_of(row):
    return [6 + t + (t > 0 and row in HOLES) for t in range(len(COMPLETIONS[row]))]


def padded():
    """TRL's layout: prompts padded left to 6, completions padded right to 7."""
    ids, mask = torch.full((len(PROMPTS), 13), 7), torch.zeros(len(PROMPTS), 13, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        columns = [*range(6 - len(prompt), 6), *columns_of(row)]
        ids[row, columns] = torch.tensor(prompt + completion)
        mask[row, columns] = 1
    return ids, mask


def packed_rows(packs, **options):
    return pack_rows(TokenBatch(*padded(), 7), packs, **options)


def forward(model, packed):
    extra = {} if packed.position_ids is None else {"position_ids": packed.position_ids}
    with scored_only(model.base_model, packed):
        logits = model(input_ids=packed.input_ids, attention_mask=packed.attention_mask, **extra).logits
    values = logits.log_softmax(-1).gather(-1, packed.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return values.masked_fill(packed.targets < 0, 0.0)


def alone(model, row):
    """Log-probabilities of a row's completion."""
    prompt, completion = PROMPTS[row], COMPLETIONS[row]
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


@pytest.mark.parametrize("packs", [[(row,) for row in range(11)], TOGETHER, [(4, 2, 0), (10, 9)]])
def test_every_token_of_whole_rows_runs_and_counts_for_each_of_them(packs):
    expected = Counter()
    for row in itertools.chain.from_iterable(packs):
        tokens = PROMPTS[row] + COMPLETIONS[row]
        expected.update(tuple(tokens[: end + 1]) for end in range(len(tokens)))
    packed = packed_rows(packs, multiple=8, whole=True)
    positions = packed.position_ids
    if positions is None:  # no branches
        positions = torch.arange(packed.input_ids.size(1)).expand_as(packed.input_ids)
    counts = Counter()
    for line in zip(packed.input_ids.tolist(), positions.tolist(), packed.row_counts.tolist(), strict=True):
        path = []
        for token, position, rows in zip(*line, strict=True):
            path = [*path[:position], token]
            counts[tuple(path)] += rows
    assert +counts == expected


# Windows that begin within prompts, shared prefixes and completions. GptOss and Gemma2 attend eagerly.
WINDOWED = {family: {"sliding_window": 4} for family in ("Mistral", "Gemma3Text", "GptOss", "Gemma2", "Cohere2")}


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "GPT2", "GPTNeoX", *WINDOWED])
@pytest.mark.parametrize(
    ("packs", "multiple"),
    [
        ([(row,) for row in range(11)], 8),
        (TOGETHER, 1),
        ([(4, 2, 0), (10, 9), (1,), (8, 7, 6, 5, 3)], 1),
    ],
    ids=["alone", "all", "cut"],
)
def test_shared_prefixes_run_once_and_their_gradients_add_up(family, packs, multiple, tokenizer):
    model = tiny(family, tokenizer, **WINDOWED.get(family, {})).eval()
    if family not in WINDOWED:  # those have rotary angles, norms or routers in float32
        model = in_double_precision(model)
    form = mask_form(model.config)
    assert form.window == WINDOWED.get(family, {}).get("sliding_window")
    tolerance = 1e-4 if family in WINDOWED else 1e-9
    packed = packed_rows(packs, multiple=multiple, form=form)
    inputs = [{tuple(COMPLETIONS[i][:k]) for i in pack for k in range(1, len(COMPLETIONS[i]))} for pack in packs]
    width = max(len(PROMPTS[pack[0]]) + len(each) for pack, each in zip(packs, inputs, strict=True))
    assert packed.input_ids.shape == (len(packs), -(-width // multiple) * multiple)
    scored = [{tuple(COMPLETIONS[i][:k]) for i in pack for k in range(1, len(COMPLETIONS[i]) + 1)} for pack in packs]
    assert packed.targets.shape == (1, sum(len(each) for each in scored))
    values = packed.unpack(forward(model, packed))
    weights = torch.linspace(-0.5, 2.0, values.numel(), dtype=values.dtype).view(values.shape)
    loss = torch.zeros((), dtype=values.dtype)
    for i in range(len(COMPLETIONS)):
        row, columns = alone(model, i), [column - 6 for column in columns_of(i)]
        torch.testing.assert_close(values[i, columns], row, rtol=0, atol=tolerance / 10)
        assert values[i].count_nonzero() == len(row)
        loss = loss + (row * weights[i, columns]).sum()
    ours = torch.autograd.grad((values * weights).sum(), list(model.parameters()))
    theirs = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_pack_without_branches_needs_no_mask_and_rows_in_no_pack_get_zeros(model):
    packed = packed_rows([(0, 3, 5)])
    assert packed.input_ids.tolist() == [PROMPT + COMPLETIONS[0][:-1]]  # the last token predicts nothing
    assert packed.attention_mask.shape == (1, 9)
    assert packed.position_ids is None
    values = packed.unpack(forward(model, packed))
    assert values.any(dim=1).nonzero().squeeze(1).tolist() == [0, 3, 5]


@pytest.mark.parametrize("completions", [True, False])  # in lockstep a rank may have nothing left to run
def test_an_empty_pack_gives_gradients_of_zero_not_none(completions, model):
    ids, mask = padded()
    if not completions:
        mask[:, 6:] = 0
    packed = pack_rows(TokenBatch(ids, mask, 7), [])
    assert packed.input_ids.shape == (1, 2)
    values = packed.unpack(forward(model, packed))
    assert values.eq(0).all()
    values.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())


# May this model share prompts?


def refusing(model, packed):
    raise ValueError("no mask of four dimensions")


def without_a_kind(model, packed):
    raise KeyError("full_attention")


@pytest.mark.parametrize(
    ("log_probs", "reason"),
    [
        (forward, None),
        (lambda model, packed: forward(model, replace(packed, position_ids=None)), "differ by"),
        (
            lambda model, packed: forward(model, replace(packed, attention_mask=torch.ones_like(packed.input_ids))),
            "differ by",
        ),
        (refusing, "it fails with a block mask (ValueError: no mask of four dimensions)"),
        (without_a_kind, "it fails with a block mask (KeyError: 'full_attention')"),
    ],
    ids=["sound", "ignores positions", "ignores the mask", "raises", "looks for another kind of layers"],
)
def test_the_self_test_sees_what_a_model_does_with_a_pack(log_probs, reason, tokenizer):
    model, blocks = tiny_model(tokenizer).train(), []

    def watching(packed):
        blocks.extend(getattr(packed.attention_mask, "blocks", []))
        return log_probs(model, packed)

    found = why_not_shared(model, watching)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")
    assert model.training
    assert reason or len(blocks[0]) > 2  # branches attend apart in it


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Mamba", "not all attention to every token or a window (linear_attention)"),
        ("Llama4Text", "chunked"),
        ("flex", "'flex_attention'"),
        *((family, None) for family in ("Llama", "Qwen3", "GPT2", "GPTNeoX", "eager")),
        *((family, None) for family in ("Mistral", "Gemma2", "Gemma3Text", "Cohere2", "GptOss")),  # windows
    ],
)
def test_families_that_cannot_share_prompts_have_a_reason(family, reason, tokenizer):
    if family == "Mamba":
        config = transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2)
        model = transformers.MambaForCausalLM(config)
    else:
        model = tiny("Llama" if family in ("eager", "flex") else family, tokenizer)
    if family in ("eager", "flex"):
        model.set_attn_implementation({"eager": "eager", "flex": "flex_attention"}[family])
    found = why_not_shared(model, lambda packed: forward(model, packed))
    assert reason in found if reason else found is None


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "GptOss"])
@pytest.mark.parametrize("error", [-1, 1, 1000], ids=["short by one", "long by one", "no window"])
def test_the_self_test_sees_another_window(family, error, tokenizer, monkeypatch):
    right = MaskForm.masks

    def wrong(form, *packs):
        return right(replace(form, window=form.window + error), *packs)

    monkeypatch.setattr(MaskForm, "masks", wrong)
    model = tiny(family, tokenizer, sliding_window=256)  # longer than all rows of the test
    assert "differ by" in why_not_shared(model, lambda packed: forward(model, packed))
    assert model.config.sliding_window == 256


def test_dropout_does_not_fail_the_self_test_and_is_left_on():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    assert why_not_shared(model, lambda packed: forward(model, packed)) is None
    assert all(module.training for module in model.modules())


def test_windows_that_layers_cut_by_place_in_the_pack_are_not_shared():
    """GPT-Neo's window, 256 tokens by default, is longer than the rows of the self-test."""
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4
    )
    model = transformers.GPTNeoForCausalLM(config).eval()
    reason = why_not_shared(model, lambda packed: forward(model, packed))
    assert reason == "its layers hold a window of their own (window_size=256)"


def test_the_tolerance_is_that_of_the_precision_it_computes_in(tokenizer):
    model = tiny_model(tokenizer)
    calls = itertools.count()

    def noisy(packed):  # as far off as bfloat16 is
        return forward(model, packed) * (1 + 2e-3 * (next(calls) % 2))

    assert "differ by" in why_not_shared(model, noisy)
    assert why_not_shared(model, noisy, torch.bfloat16) is None


class Refusing:
    def get_text_config(self):
        raise RuntimeError("head_dim is a per-layer attribute")


def test_costs_are_read_off_the_configuration(tokenizer):
    config = tiny_model(tokenizer).config
    # hidden 32, 4 heads of 8, 2 key-value heads, inner 64: 2*32*(32+16) + 3*32*64 = 9216 weights; 2 * 32 / 9216
    assert costs_of(config, "cuda", True).pair == pytest.approx(1.75 * 64 / 9216)
    assert costs_of(config, "cpu", True).pair == pytest.approx(1.3 * 64 / 9216)
    assert 0 < costs_of(Refusing(), "cpu", True).pair < 1e-2  # an estimate, and no end of a run
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not rope_depends_on_width(config)
    assert rope_depends_on_width(transformers.Qwen2Config(rope_parameters=dynamic))
