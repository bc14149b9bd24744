import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from tiny import in_double_precision, tiny_model

from trl_drgrpo.features.fast_path.packing import pack_rows, scored_only
from trl_drgrpo.features.fast_path.sharing import attention_pair_cost, why_not_shared

WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
PROMPTS = [[40, 41, 42, 43], [40, 41, 42, 43], [50], [40, 41, 42, 43]]
COMPLETIONS = [[60, 61, 62], [63], [64, 65, 66, 67, 68], [69, 70]]


@pytest.fixture
def model(tokenizer):
    return in_double_precision(tiny_model(tokenizer))


def padded(prompts=PROMPTS, completions=COMPLETIONS, holes=()):
    """TRL's layout: prompts padded left to 6, completions padded right to 7. In rows with a hole, the second column of
    the completion is padding, and what follows stands one column later."""
    ids, mask = torch.full((len(prompts), 13), 7), torch.zeros(len(prompts), 13, dtype=torch.long)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        columns = [*range(6 - len(prompt), 6), *columns_of(i, completion, holes)]
        ids[i, columns] = torch.tensor(prompt + completion)
        mask[i, columns] = 1
    return ids, mask


def columns_of(row, completion, holes):
    return [6 + t + (t > 0 and row in holes) for t in range(len(completion))]


def forward(model, packed):
    extra = {} if packed.position_ids is None else {"position_ids": packed.position_ids}
    with scored_only(model.base_model, packed):
        logits = model(input_ids=packed.input_ids, attention_mask=packed.attention_mask, **extra).logits
    values = logits.log_softmax(-1).gather(-1, packed.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return values.masked_fill(packed.targets < 0, 0.0)


def row_by_row(model, prompts=PROMPTS, completions=COMPLETIONS):
    result = torch.zeros(len(prompts), 7, dtype=torch.float64)
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1))
    for i, row in enumerate(rows):
        result[i, : len(row)] = row.detach()
    return result, rows


def family_model(family):
    """Two layers with weights large enough to tell rows apart."""
    widths = {"n_embd": 32, "n_layer": 2, "n_head": 4} if family == "GPT2" else WIDTHS
    config = getattr(transformers, f"{family}Config")(vocab_size=100, **widths)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    "packs", [[(0,), (1,), (2,), (3,)], [(0, 1, 3), (2,)], [(3, 0), (1,), (2,)]], ids=["alone", "packed", "some"]
)
@pytest.mark.parametrize("multiple", [1, 8])
def test_log_probs_and_gradients_are_those_of_each_row_alone(model, packs, multiple):
    ids, mask = padded()
    packed = pack_rows(ids, mask, 7, packs, pad_token_id=7, multiple=multiple)
    assert packed.input_ids.size(1) % multiple == 0
    values = packed.unpack(forward(model, packed))
    expected, rows = row_by_row(model)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-13)
    weights = torch.linspace(0.5, 2.0, 28, dtype=torch.float64).view(4, 7)
    parameters = list(model.parameters())
    ours = torch.autograd.grad((values * weights).sum(), parameters)
    loss = sum((row * weights[i, : len(row)]).sum() for i, row in enumerate(rows))
    theirs = torch.autograd.grad(loss, parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_without_the_block_mask_a_pack_is_something_else(model):
    # negative control of the test above
    ids, mask = padded()
    packed = pack_rows(ids, mask, 7, [(0, 1, 3), (2,)])
    leaking = replace(packed, attention_mask=torch.ones_like(packed.input_ids))
    assert (leaking.unpack(forward(model, leaking)) - row_by_row(model)[0]).abs().max() > 1e-3


FORKS = [  # behind the prompt of four tokens
    [60, 61, 62, 63, 64, 65],
    [60, 61, 62, 70, 71],  # branches off the first one
    [60, 61, 62, 70, 72, 73],  # and this one off that
    [60, 61, 62],  # their prefix as a whole row
    [60, 61, 62, 63, 64, 65],  # the first one again
    [60, 61, 62, 63, 64, 66],  # another last token
    [80, 81],  # a second family
    [80, 82, 83],  # whose prefix is one token
    [90],
]
OTHERS = [[60, 61], [60, 61, 62]]  # behind the prompt of one token
FORK_PROMPTS = [PROMPTS[0]] * len(FORKS) + [PROMPTS[2]] * len(OTHERS)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "GPT2", "GPTNeoX"])
@pytest.mark.parametrize(
    "packs",
    [
        [tuple(range(9)), (9, 10)],
        [(4, 2, 0), (10, 9), (1,), (8, 7, 6, 5, 3)],
    ],
    ids=["all", "cut"],
)
def test_shared_prefixes_run_once_and_their_gradients_add_up(family, packs):
    model, holes = in_double_precision(family_model(family)), (1, 7)
    prompts, completions = FORK_PROMPTS, FORKS + OTHERS
    packed = pack_rows(*padded(prompts, completions, holes), 7, packs)
    inputs = [{tuple(completions[i][:k]) for i in pack for k in range(1, len(completions[i]))} for pack in packs]
    sizes = [len(prompts[pack[0]]) + len(each) for pack, each in zip(packs, inputs, strict=True)]
    assert packed.input_ids.shape == (len(packs), max(sizes))
    scored = [{tuple(completions[i][:k]) for i in pack for k in range(1, len(completions[i]) + 1)} for pack in packs]
    assert packed.targets.shape == (1, sum(len(each) for each in scored))
    values = packed.unpack(forward(model, packed))
    _, rows = row_by_row(model, prompts, completions)
    weights = torch.linspace(-0.5, 2.0, values.numel(), dtype=torch.float64).view(values.shape)
    loss = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        columns = [column - 6 for column in columns_of(i, completions[i], holes)]
        torch.testing.assert_close(values[i, columns], row, rtol=0, atol=1e-11)
        assert values[i].count_nonzero() == len(row)
        loss = loss + (row * weights[i, columns]).sum()
    ours = torch.autograd.grad((values * weights).sum(), list(model.parameters()))
    theirs = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_pack_without_branches_needs_no_mask():
    packed = pack_rows(*padded([[40, 41]] * 3, [[60, 61, 62], [60, 61], [60, 61, 63]]), 7, [(0, 1, 2)])
    assert packed.input_ids.tolist() == [[40, 41, 60, 61]]
    assert packed.attention_mask.shape == (1, 4)
    assert packed.position_ids is None


def test_rows_in_no_pack_get_zeros_and_cost_nothing(model):
    ids, mask = padded()
    packed = pack_rows(ids, mask, 7, [(1,)])
    assert packed.input_ids.tolist() == [PROMPTS[1]]  # the last token predicts nothing
    assert packed.targets.tolist() == [COMPLETIONS[1]]
    values = packed.unpack(forward(model, packed))
    assert values[[0, 2, 3]].eq(0).all()
    assert values[1, 0] < 0


@pytest.mark.parametrize("completions", [True, False])  # in lockstep a rank may have nothing left to run
def test_nothing_to_run_gives_gradients_of_zero_not_none(completions, model):
    ids, mask = padded()
    if not completions:
        mask[:, 6:] = 0
    packed = pack_rows(ids, mask, 7, [])
    assert packed.input_ids.shape == (1, 2)
    values = packed.unpack(forward(model, packed))
    assert values.eq(0).all()
    values.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters() if p is not None)


# May this model share prompts?


def log_probs_of(model):
    return lambda packed: forward(model, packed)


def test_full_attention_through_sdpa_may_share(tokenizer):
    model = tiny_model(tokenizer)
    model.train()
    assert why_not_shared(model, log_probs_of(model)) is None
    assert model.training


def test_eager_attention_may_not(tokenizer):
    model = tiny_model(tokenizer)
    model.set_attn_implementation("eager")
    assert "'eager'" in why_not_shared(model, log_probs_of(model))


def test_the_self_test_runs_branches_apart(tokenizer):
    model, blocks = tiny_model(tokenizer), []

    def watching(packed):
        blocks.extend(getattr(packed.attention_mask, "blocks", []))
        return forward(model, packed)

    assert why_not_shared(model, watching) is None
    assert len(blocks[0]) > 2


def test_the_self_test_sees_a_model_that_ignores_the_mask(tokenizer):
    model = tiny_model(tokenizer)

    def ignoring(packed):
        return forward(model, replace(packed, attention_mask=torch.ones_like(packed.input_ids)))

    assert "differ by" in why_not_shared(model, ignoring)


def test_the_self_test_sees_a_model_that_ignores_positions(tokenizer):
    model = tiny_model(tokenizer)

    def ignoring(packed):
        return forward(model, replace(packed, position_ids=None))

    assert "differ by" in why_not_shared(model, ignoring)


def test_a_model_that_raises_is_left_alone(tokenizer):
    def refusing(packed):
        raise ValueError("no mask of four dimensions")

    reason = why_not_shared(tiny_model(tokenizer), refusing)
    assert reason == "it fails with a block mask (ValueError: no mask of four dimensions)"


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("Mistral", {"sliding_window": 8}, "windowed"),
        ("Gemma2", {"head_dim": 8, "sliding_window": 8}, "not all full attention"),
        ("Mamba", {"state_size": 8}, "linear_attention"),
    ],
)
def test_windows_and_state_spaces_may_not(family, extra, reason):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **extra
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    assert reason in why_not_shared(model, log_probs_of(model))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "GPTNeoX"])
def test_other_families_share_when_their_numbers_agree(family):
    model = family_model(family)
    assert why_not_shared(model, log_probs_of(model)) is None


def test_dropout_does_not_fail_the_self_test_and_is_left_on():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    assert why_not_shared(model, log_probs_of(model)) is None
    assert all(module.training for module in model.modules())


def test_the_cost_of_attention_is_read_off_the_configuration(tokenizer):
    config = tiny_model(tokenizer).config
    # hidden 32, 4 heads of 8, 2 key-value heads, inner 64: 2*32*(32+16) + 3*32*64 = 9216 weights; 3 * 2 * 32 / 9216
    assert attention_pair_cost(config, "cuda") == pytest.approx(3 * 64 / 9216)
    assert attention_pair_cost(config, "cpu") == pytest.approx(1.3 * 64 / 9216)


def test_a_configuration_that_says_nothing_costs_an_estimate_and_no_run():
    class Refusing:
        def get_text_config(self):
            raise RuntimeError("head_dim is a per-layer attribute")

    assert 0 < attention_pair_cost(Refusing(), "cpu") < 1e-2


def test_the_tolerance_is_that_of_the_precision_it_computes_in(tokenizer):
    model = tiny_model(tokenizer)
    calls = itertools.count()

    def noisy(packed):  # as far off as bfloat16 is
        return forward(model, packed) * (1 + 2e-3 * (next(calls) % 2))

    assert "differ by" in why_not_shared(model, noisy)
    assert why_not_shared(model, noisy, torch.bfloat16) is None
