"""Markers of line breaks, against the two authors' evaluation code; adapters; a tokenizer without the marker."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_tokenizer
from tiny_prms import CLEAN, PROMPTS, STEPS, built, close, config, line_break_tokenizer, math_psa, versa
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import MathPSAScorer, TokenClassificationScorer, VersaScorer
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

VERSA, PSA = " \n\n\n\n", " \n\n\n\n\n"


def versa_text(prompt, steps):
    return f"{prompt} \n\n" + "".join(f"{step}{VERSA}" for step in steps)


def psa_text(prompt, steps):
    return f"{prompt} " + "".join(f"Step {k}: {step}{PSA} " for k, step in enumerate(steps, start=1))


@torch.no_grad()
def published(scorer, text, marker, candidates):
    """The whole text tokenized at once; good against bad at every token that is the marker."""
    tokenizer = scorer.tokenizer
    (marker_id,) = tokenizer.encode(marker)
    ids = torch.tensor([tokenizer.encode(text)])
    good_and_bad = [tokenizer.encode(candidate)[0] for candidate in candidates]
    return scorer.model(ids).logits[:, :, good_and_bad].softmax(-1)[:, :, 0][ids == marker_id].tolist()


@pytest.mark.parametrize(
    ("make", "text", "marker", "candidates"),
    [(versa, versa_text, VERSA, ("+", "-")), (math_psa, psa_text, PSA, (" +", " -"))],
)
def test_scores_are_those_of_the_published_code(make, text, marker, candidates):
    scorer = make()
    pairs = zip(PROMPTS, CLEAN, strict=True)
    expected = [published(scorer, text(p, s), marker, candidates) if s else [] for p, s in pairs]
    assert [len(row) for row in expected] == [len(row) for row in STEPS]
    close(scorer(PROMPTS, steps=STEPS), expected)


@pytest.mark.parametrize("make", [versa, math_psa])
def test_line_breaks_of_the_policy_end_no_step(make):
    scorer = make()
    marker_id = scorer.marker_id
    for written in ("so\n\n\n\n\n\nit", "so \n \n\n\n\n it", "so   \n\n\n\n\n\n\n\n\n"):
        row = scorer._encode("1?\n\n \n\n\n\n2?", [scorer._cleaner.step(written), "2"])
        text = scorer.tokenizer.decode(row.input_ids)
        assert len(re.findall(r"\n\s*\n\s*\n\s*\n", text)) == 2  # the format's own
        assert [row.input_ids[position] for position in row.positions] == [marker_id] * 2


def test_an_adapter_is_loaded_on_the_model_under_it(tmp_path):
    tokenizer, base, folder = line_break_tokenizer(), tmp_path / "base", tmp_path / "adapter"
    model = built(Qwen2ForCausalLM, config(tokenizer))
    model.save_pretrained(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(Qwen2ForCausalLM.from_pretrained(base), lora)
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = resolve_reward({"math_psa_prm": {"model": str(folder), "device": "cpu"}}, "step_reward_funcs")
    scores = named(prompts=PROMPTS, steps=STEPS)
    close(scores, MathPSAScorer(adapted, tokenizer)(PROMPTS, steps=STEPS), 1e-6)
    bare = MathPSAScorer(model, tokenizer)(PROMPTS, steps=STEPS)
    assert max(abs(one - other) for one, other in zip(scores[1], bare[1], strict=True)) > 1e-3
    with pytest.raises(InputError, match=r"an adapter; expected a whole checkpoint with its head"):
        TokenClassificationScorer(str(folder), tokenizer)


def test_a_tokenizer_without_the_marker_is_refused():
    plain = tiny_tokenizer()
    model = built(Qwen2ForCausalLM, config(plain))
    with pytest.raises(
        InputError, match=r"marker of 'versa_prm': got ' \\n\\n\\n\\n', which is not one token of the tokenizer"
    ):
        VersaScorer(model, plain)
    pieces = line_break_tokenizer()
    headless = built(Qwen2ForTokenClassification, config(pieces, num_labels=2))
    with pytest.raises(InputError, match="without a language modeling head"):
        VersaScorer(headless, pieces)
