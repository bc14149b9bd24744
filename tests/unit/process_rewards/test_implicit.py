"""Implicit rewards of two models, against log-probabilities summed by hand."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import save_tiny, tiny_tokenizer
from tiny_prms import CLEAN, PROMPTS, SCORERS, STEPS, built, close, config, line_break_tokenizer
from transformers import Qwen2ForCausalLM

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import ImplicitRewardScorer
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


@torch.no_grad()
def by_hand(model, tokenizer, prompt, steps):
    """Log-probability of each step and the separator behind it, one token at a time, of a byte-level tokenizer."""
    ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    sums = []
    for k, step in enumerate(steps):
        total = 0.0
        for token in tokenizer.encode(step + ("\n\n" if k + 1 < len(steps) else "")):
            total += model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[token].item()
            ids = [*ids, token]
        sums.append(total)
    return sums


def test_a_steps_reward_is_the_log_ratio_of_its_tokens():
    scorer = SCORERS["implicit"](beta=0.3)
    mine = by_hand(scorer.model, scorer.tokenizer, PROMPTS[0], CLEAN[0])
    reference = by_hand(scorer.reference, scorer.tokenizer, PROMPTS[0], CLEAN[0])
    expected = [0.3 * (one - other) for one, other in zip(mine, reference, strict=True)]
    close(scorer(PROMPTS[:1], steps=STEPS[:1]), [expected], 1e-4)
    assert max(map(abs, expected)) > 0.1
    summed = SCORERS["implicit"](beta=0.3, cumulative=True)(PROMPTS[:1], steps=STEPS[:1])
    close(summed, [[expected[0], sum(expected)]], 1e-4)


def test_a_token_across_a_boundary_belongs_to_the_step_before():
    tokenizer = line_break_tokenizer()  # a full stop and an empty line are one token
    row = SCORERS["implicit"](tokenizer=tokenizer)._encode("1?", ["is 1.", "so"])
    ends = [tokenizer.decode(row.input_ids[: position + 1]) for position in row.positions]
    assert [ends[0][-8:], ends[1][-6:], ends[2][-2:]] == ["sistant\n", "s 1.\n\n", "so"]


def test_an_adapters_reference_is_what_is_under_it():
    tokenizer = tiny_tokenizer()
    base = built(Qwen2ForCausalLM, config(tokenizer))
    bare = copy.deepcopy(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(base, lora)
    scores = ImplicitRewardScorer(adapted, tokenizer=tokenizer)(PROMPTS, steps=STEPS)
    close(scores, ImplicitRewardScorer(adapted, bare, tokenizer)(PROMPTS, steps=STEPS), 1e-6)
    assert max(abs(score) for row in scores for score in row) > 1e-3


def test_two_folders_in_a_recipe(tmp_path):
    scorer = SCORERS["implicit"]()
    for name, model in (("eurusprm", scorer.model), ("base", scorer.reference)):
        save_tiny(tmp_path / name, scorer.tokenizer, model)
    options = {"model": str(tmp_path / "eurusprm"), "reference": str(tmp_path / "base"), "device": "cpu"}
    for name in ("implicit_prm", "prm"):
        named = resolve_reward({name: options}, "step_reward_funcs")
        close(named(prompts=PROMPTS, steps=STEPS), scorer(PROMPTS, steps=STEPS), 1e-6)
    with pytest.raises(InputError, match=r"implicit_prm.reference: got ./nowhere, which does not exist"):
        resolve_reward({"implicit_prm": {**options, "reference": "./nowhere"}}, "step_reward_funcs")
    line_break_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match=r"reference of 'implicit_prm': got a tokenizer in which \d+ entries differ"):
        ImplicitRewardScorer(options["model"], options["reference"], device="cpu")


def test_models_that_cannot_be_compared_are_refused():
    tokenizer = tiny_tokenizer()
    model = built(Qwen2ForCausalLM, config(tokenizer))
    small = built(Qwen2ForCausalLM, config(tokenizer, vocab_size=100, pad_token_id=None, eos_token_id=None))
    for reference, options, message in (
        (None, {}, "reference of 'implicit_prm': got none"),
        (small, {}, "reference of 'implicit_prm': got 100 tokens; expected at least 259"),
        (model, {"beta": 0}, "beta: got 0"),
    ):
        with pytest.raises(InputError, match=message):
            ImplicitRewardScorer(model, reference, tokenizer, **options)
    for template, message in (
        ("{{ messages[0]['content'] }}{{ messages[1]['content'][:2] }}", "or changes the answer"),
        ("{{ messages[1]['content'] }}", "a chat template that leaves the prompt out"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=message):
            ImplicitRewardScorer(model, model, tokenizer)
