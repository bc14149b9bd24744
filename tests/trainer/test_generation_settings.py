"""Sampling as the configuration says, whatever the model brings along; and where
completions end."""

import json
from pathlib import Path

import pytest
import torch
from runs import STOCK
from tiny import tiny_model
from transformers import GenerationConfig
from trl import GRPOTrainer

from trl_drgrpo.common.generation import own_settings, that_do_something, without_own_settings
from trl_drgrpo.process_rewards.continuations import ModelSampler, Request
from trl_drgrpo.upstream.stop_strings import EndToken, StopStrings

OWN = {
    "min_p": 0.4,
    "suppress_tokens": list(range(100, 200)),
    "bad_words_ids": [[65]],
    "no_repeat_ngram_size": 1,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.1,
    "top_h": 0.3,
    "sequence_bias": [[[66], 9.0]],
    "begin_suppress_tokens": list(range(40, 250)),
    "forced_eos_token_id": 5,
    "min_new_tokens": 8,
    "exponential_decay_length_penalty": (1, 3.0),
    "guidance_scale": 1.5,
    "num_beams": 2,
    "num_return_sequences": 2,
    "max_time": 1e-9,
    "stop_strings": ["e"],
    "return_dict_in_generate": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 2,
    "assistant_early_exit": 1,
    "cache_implementation": "quantized",
    "max_new_tokens": 2,
    # What TRL states itself.
    "repetition_penalty": 5.0,
    "temperature": 0.2,
    "top_k": 2,
    "top_p": 0.2,
    "do_sample": False,
}
STATED = ("repetition_penalty", "temperature", "top_k", "top_p", "do_sample", "max_new_tokens")


def with_own(tokenizer, **own):
    model = tiny_model(tokenizer)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


def sampled(trainer):
    """Completions of eight prompts."""
    torch.manual_seed(0)
    inputs = [{"prompt": f"{i}+{i}="} for i in range(2) for _ in range(4)]
    rollouts = trainer.sample_rollouts(inputs)
    rows = zip(rollouts["completion_ids"], rollouts["completion_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]


@pytest.mark.parametrize("own", OWN)
def test_a_models_own_settings_change_no_sample(own, build, tokenizer, caplog):
    plain = sampled(build())
    caplog.clear()
    trainer = build(model=with_own(tokenizer, **{own: OWN[own]}))
    said = [message for message in caplog.messages if "generation_config has" in message]
    if own in STATED:
        assert said == []
    else:
        assert said[0].startswith(f"The model's generation_config has {own}=")
    assert sampled(trainer) == plain
    assert getattr(trainer.model.generation_config, own) == OWN[own]  # as it was, for whoever loads the model
    assert sampled(build(model=with_own(tokenizer, **{own: OWN[own]}), fast_generation=False)) == plain


def test_trl_alone_takes_them(build, settings, tokenizer):
    """Without the mend the samples differ, which these models show."""
    plain = sampled_by_trl(build, tokenizer)
    for own in ("min_p", "suppress_tokens", "typical_p", "epsilon_cutoff", "begin_suppress_tokens"):
        assert sampled_by_trl(build, tokenizer, **{own: OWN[own]}) != plain, own


def sampled_by_trl(build, tokenizer, **own):
    trainer = build(trainer_class=GRPOTrainer, model=with_own(tokenizer, **own), **STOCK)
    torch.manual_seed(0)
    return trainer._generate_single_turn([tokenizer.encode("1+1=")] * 4, None, {}, 4)[0]


def test_an_adapters_base_is_asked_too(build, tokenizer, saved_model):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = sampled(build(model=tiny_model(tokenizer), peft_config=lora))
    trainer = build(model=with_own(tokenizer, no_repeat_ngram_size=1, min_p=0.4), peft_config=lora)
    assert own_settings(trainer.model) == {"min_p": 0.4, "no_repeat_ngram_size": 1}
    assert sampled(trainer) == plain


def test_generation_kwargs_are_used_and_said(build, tokenizer, caplog):
    trainer = build(
        model=with_own(tokenizer, suppress_tokens=[1]), generation_kwargs={"suppress_tokens": list(range(258))}
    )
    assert {token for row in sampled(trainer) for token in row} <= {256, 257, 258}
    assert "generation_kwargs: suppress_tokens=" in caplog.text
    assert "generation_config has" not in caplog.text


def test_guidance_runs_the_model_between_two_steps(build, caplog):
    guided = {"generation_kwargs": {"guidance_scale": 1.5}}
    samples = sampled(build(**guided))
    assert samples == sampled(build(**guided, fast_generation=False)) != sampled(build())
    assert "generation_kwargs: guidance_scale=1.5" in caplog.text


def test_a_quantized_cache_is_said():
    settings = {"cache_implementation": "quantized", "top_k": -1}
    assert [name for name, _, _ in that_do_something(settings)] == ["cache_implementation"]
    assert not list(that_do_something({"cache_implementation": "static"}))


def test_evaluations_sample_as_training_does(tokenizer):
    decoding = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}

    def answers(model):
        found = ModelSampler(model, tokenizer, decoding, 8)([Request((1, 2, 3), 4, 12, True, 0)])
        return [each.token_ids for each in found[0]]

    plain = answers(tiny_model(tokenizer))
    assert answers(with_own(tokenizer, **{name: OWN[name] for name in OWN if name not in STATED})) == plain
    # And end where training ends: at the tokenizer's end token as well.
    model = tiny_model(tokenizer)
    model.generation_config.eos_token_id = [3, 7]
    assert ModelSampler(model, tokenizer, decoding, 8).ends == {3, 7, tokenizer.eos_token_id}


def test_settings_are_back_after_an_error(tokenizer):
    model = with_own(tokenizer, min_p=0.4)

    def fail():
        with without_own_settings(model):
            raise RuntimeError(model.generation_config.min_p)

    with pytest.raises(RuntimeError, match="None"):
        fail()
    assert model.generation_config.min_p == 0.4
    model.generation_config = GenerationConfig()
    assert own_settings(model) == {}
    assert own_settings(object()) == {}


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("more", [101, [101, 110], 258])
def test_tokens_behind_an_end_token_of_generation_kwargs_are_not_trained(more, fast, build, tokenizer):
    trainer = build(generation_kwargs={"eos_token_id": more}, fast_generation=fast, max_completion_length=40)
    ends = {*trainer.stop_token_ids}
    assert ends >= ({more} if isinstance(more, int) else set(more)) | {tokenizer.eos_token_id}
    rows = sampled(trainer)
    assert all(not ends.intersection(row[:-1]) for row in rows)
    assert any(row[-1] in ends for row in rows)
    clipped = trainer._metrics["train"]["completions/clipped_ratio"][-1]
    assert clipped == sum(row[-1] not in ends for row in rows) / len(rows)


STRINGS = ["a", "ab", "\x01", *map(chr, range(60, 90))]  # what a random model writes now and then


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("strings", [STRINGS, "e"], ids=["list", "text"])
def test_a_stop_string_ends_a_completion(strings, fast, build, tokenizer):
    fields = {"max_completion_length": 40, "mask_truncated_completions": True, "fast_generation": fast}
    trainer = build(generation_kwargs={"stop_strings": strings}, **fields)
    logged = []
    trainer.reward_funcs[0] = lambda completions, completion_ids, **kwargs: (
        logged.append([*zip(completions, completion_ids, strict=True)])
        or [float(i % 3) for i in range(len(completions))]
    )
    trained = sampled(trainer)
    stops = [strings] if isinstance(strings, str) else strings
    ends = trainer.stop_token_ids
    stopped = cut = 0
    for (text, ids), row in zip(logged[0], trained, strict=True):
        first = [text.find(string) + len(string) for string in stops if string in text]
        if first:
            assert min(first) == len(text)  # nothing behind it
            assert isinstance(ids[-1], EndToken)
            stopped += 1
        elif ids[-1] not in ends:
            assert len(ids) == 40
            cut += 1
        is_whole = bool(first) or ids[-1] in ends
        assert row == (list(ids) if is_whole else [])  # rows cut off by the limit are masked, these are not
    assert stopped
    assert trainer._metrics["train"]["completions/clipped_ratio"][-1] == cut / len(trained)


def test_runs_with_stop_strings_are_whole(train):
    trainer = train(generation_kwargs={"stop_strings": STRINGS}, max_steps=2, log_completions=False)
    log = Path(trainer.args.output_dir, "_drgrpo")
    recorded = [json.loads(line) for path in log.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert recorded
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("prompt", "completion", "strings", "kept"),
    [
        ("p", "abc</a>def", ["</a>"], "abc</a>"),
        ("p", "abc", ["</a>"], None),
        ("p", "x1y2", ["2", "1"], "x1"),
        ("p</a>", "b</a>c", ["</a>"], "b</a>"),  # one in the prompt ends nothing
        ("p</", "a>bc", ["</a>"], "a>"),  # one that begins there does
        ("p", "é日x", ["日"], "é日"),
        ("", "ab", ["a"], "a"),
        ("p", "", ["a"], None),
    ],
)
def test_a_stop_string_ends_a_row_behind_it(prompt, completion, strings, kept, tokenizer):
    ids = tokenizer.encode(completion)
    row = StopStrings(strings, tokenizer, [258]).cut(tokenizer.encode(prompt), ids)
    assert row == (ids if kept is None else tokenizer.encode(kept))
    assert (row[-1:] != [] and row[-1] in [258]) == (kept is not None)


def test_a_marked_token_is_its_id():
    import pickle

    marked = EndToken(65, [256])
    assert marked == 65
    assert marked == 256
    assert marked != 66
    assert marked in [7, 256]
    assert torch.tensor([1, marked]).tolist() == [1, 65]
    assert json.dumps([marked]) == "[65]"
    assert type(pickle.loads(pickle.dumps(marked))) is int
