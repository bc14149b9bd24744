"""Heads of one output: Skywork's value head and ReasonFlux's head in a file, against their published code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer
from tiny_prms import CLEAN, PROMPTS, STEPS, built, close, config, line_break_tokenizer, skywork
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import ReasonFluxScorer, SkyworkScorer
from trl_drgrpo.process_rewards.formats import Qwen2ForPrmModel
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


@torch.no_grad()
def published_skywork(model, tokenizer, problem, response):
    """Every line by itself, the step token behind it; the sigmoid of the value head there."""
    ids, flags = tokenizer.encode(problem + "\n"), []
    for line in response.split("\n"):
        ids = ids + (tokenizer.encode(line) if line else []) + tokenizer.encode("\n")
        flags.append(len(ids) - 1)
    hidden = model.model(torch.tensor([ids])).last_hidden_state
    return model.v_head["summary"](hidden)[0, flags, 0].sigmoid().tolist()


def test_skywork_scores_are_those_of_the_published_code():
    scorer = skywork()
    rows = [(p, s) for p, s in zip(PROMPTS, CLEAN, strict=True) if s]
    expected = [published_skywork(scorer.model, scorer.tokenizer, p, "\n".join(s)) for p, s in rows]
    close(scorer([p for p, _ in rows], steps=[s for _, s in rows]), expected)


def test_skywork_scores_a_step_of_several_lines_at_its_last_one():
    scorer = skywork()
    steps = ["first\n\nsecond", "third.\nfourth"]
    every_line = published_skywork(scorer.model, scorer.tokenizer, "1?", "\n".join(steps))
    assert len(every_line) == 5
    close(scorer(["1?"], steps=[steps]), [[every_line[2], every_line[4]]])


def test_a_skywork_checkpoint_loads_from_a_folder(tmp_path):
    scorer = skywork()
    scorer.model.save_pretrained(tmp_path)
    scorer.tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {"v_head.summary.weight", "v_head.summary.bias", "model.norm.weight"} <= set(weights)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForPrmModel"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # the published one has it, unused
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = scorer(PROMPTS, steps=STEPS)
    for name in ("skywork_prm", "prm"):
        named = resolve_reward({name: {"model": str(tmp_path), "device": "cpu"}}, "step_reward_funcs")
        close(named(prompts=PROMPTS, steps=STEPS), expected, 1e-6)
    assert isinstance(named._scorer, SkyworkScorer)


@pytest.fixture(scope="module")
def reasonflux_folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("reasonflux"), line_break_tokenizer()
    built(Qwen2ForCausalLM, config(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    head = {"weight": torch.randn(1, 32, generator=generator), "bias": torch.randn(1, generator=generator)}
    torch.save(head, folder / "reward_head.pt")
    return folder


@torch.no_grad()
def published_reasonflux(folder, text):
    """One number for a text: the sigmoid of the head on the last token's last hidden state."""
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder).eval(), line_break_tokenizer()
    head = torch.load(folder / "reward_head.pt")
    hidden = model.model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True).hidden_states[-1][0, -1]
    return (hidden @ head["weight"][0] + head["bias"]).sigmoid().item()


def test_reasonflux_scores_are_those_of_the_texts_so_far(reasonflux_folder):
    named = resolve_reward({"prm": {"model": str(reasonflux_folder), "device": "cpu"}}, "step_reward_funcs")
    steps = ["3+8 is 11", "So the answer is 11", "Sure"]
    expected = [published_reasonflux(reasonflux_folder, "3+8=?" + "\n\n".join(steps[:k])) for k in (1, 2, 3)]
    close(named(prompts=["3+8=?"], steps=[steps]), [expected])
    assert isinstance(named._scorer, ReasonFluxScorer)
    assert max(expected) - min(expected) > 0.02
    half = ReasonFluxScorer(str(reasonflux_folder), device="cpu", dtype="bfloat16")
    close(half(["3+8=?"], steps=[steps]), [expected], 0.1)


def test_missing_heads_are_refused(saved_model, tmp_path):
    with pytest.raises(InputError, match=r"a checkpoint without v_head.summary.bias, v_head.summary.weight"):
        SkyworkScorer(saved_model, device="cpu")
    with pytest.raises(InputError, match=r"model: got .*; expected a folder or Hub id with reward_head.pt"):
        ReasonFluxScorer(saved_model, device="cpu")
    built(Qwen2ForCausalLM, config(tiny_tokenizer())).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    torch.save({"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}, tmp_path / "reward_head.pt")
    with pytest.raises(InputError, match=r"weight \(1, 8\), bias \(1,\); expected weight \(1, 32\)"):
        ReasonFluxScorer(str(tmp_path), device="cpu")


def test_other_heads_and_step_tokens_are_refused():
    tokenizer = line_break_tokenizer()
    two = built(Qwen2ForTokenClassification, config(tokenizer, num_labels=2))
    for kind in (SkyworkScorer, ReasonFluxScorer):
        with pytest.raises(InputError, match="got 2 outputs per token; expected a head of 1 output per token"):
            kind(two, tokenizer)
    one = built(Qwen2ForPrmModel, config(tokenizer))
    with pytest.raises(InputError, match=r"step_token of 'skywork_prm': got '<step>'"):
        SkyworkScorer(one, tokenizer, step_token="<step>")
