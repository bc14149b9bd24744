"""Evaluation: the estimator against enumeration, intervals, samples that go on where they ended, the card."""

import itertools
import json
import math
import random
import statistics

import pytest
import torch
from chat_server import Server
from evaluations import result, samples
from huggingface_hub import ModelCard
from tiny import save_tiny

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.evaluation.models import (
    Decoding,
    Loading,
    base_name,
    check_model,
    holds_model,
    is_adapter,
    load_model,
    weights_mark,
)
from trl_drgrpo.evaluation.results import as_json, judged, mean_over_prompts, pass_at_k, read_results
from trl_drgrpo.evaluation.running import check_context, model_sampler, score_completions, server_sampler
from trl_drgrpo.evaluation.steps import compared
from trl_drgrpo.evaluation.table import is_whole, notes, public_name, put_into_card, table, title
from trl_drgrpo.features.fast_path.decoding import decoder
from trl_drgrpo.process_rewards.continuations import Continuation, Request


@pytest.mark.parametrize(
    ("n", "c", "k"), [(1, 0, 1), (5, 2, 1), (5, 2, 3), (6, 1, 4), (6, 6, 2), (6, 0, 6), (6, 3, 6)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n, c, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k", "field"), [(4, 1, 5, "k"), (4, 1, 0, "k"), (4, 5, 1, "correct")])
def test_pass_at_k_refuses_what_cannot_be(n, c, k, field):
    with pytest.raises(InputError, match=f"^{field}: "):
        pass_at_k(n, c, k)


def test_the_interval_is_that_of_the_mean_over_prompts():
    values = [1.0] * 60 + [0.0] * 140
    found = mean_over_prompts(values)
    error = statistics.pstdev(values) / math.sqrt(len(values))
    interval = {"low": 0.3 - 1.96 * error, "high": 0.3 + 1.96 * error}
    assert found == pytest.approx({"value": 0.3, **interval, "prompts": 200}, abs=0.01)
    assert found["value"] == pytest.approx(0.3)
    assert found == mean_over_prompts(values)
    nothing = {"low": None, "high": None}
    assert mean_over_prompts([0.0] * 5) == {"value": 0.0, **nothing, "prompts": 5}
    assert mean_over_prompts([]) == {"value": None, **nothing, "prompts": 0}


def test_numbers_of_a_model_and_the_paired_difference():
    model = samples([1, 1, 0, 0], [1, 0, 0, 0], [None, None, None, None], ["KeyError: 'x'", 1, None, 0])
    baseline = samples([0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0])
    content = result(model, baseline, ks=(1, 4))
    before, after = content["models"]
    # Prompts 0, 1 and 3 have scored completions: (2/4 + 1/4 + 1/2) / 3.
    assert after["pass_at"]["1"]["value"] == pytest.approx(1.25 / 3)
    assert (after["pass_at"]["1"]["prompts"], after["pass_at"]["4"]["prompts"]) == (3, 2)
    assert after["pass_at"]["4"]["value"] == 1.0
    assert (after["prompts"], after["completions"], after["unscorable"], after["failed"]) == (4, 16, 6, 1)
    assert before["pass_at"]["1"]["value"] == pytest.approx((0 + 1 + 1 + 0.25) / 4)
    # Over prompts that both have: 1/2 - 0, 1/4 - 1, 1/2 - 1/4.
    assert content["difference"]["1"]["value"] == pytest.approx(0 / 3, abs=1e-12)
    assert (content["difference"]["1"]["prompts"], content["difference"]["4"]["prompts"]) == (3, 2)
    assert after["rewards"] == {"accuracy": 0.4}
    said = notes(content)
    assert "model: 1 prompt with fewer than 1 scored completion left out of pass@1." in said
    assert "model: 2 prompts with fewer than 4 scored completions left out of pass@4." in said
    assert any("too narrow" in note for note in said)


def test_rewards_other_than_0_and_1_need_a_threshold():
    rows = samples([0.2, 0.7], [1.0, None])
    with pytest.raises(InputError, match=r"correct_threshold: got none for accuracy, which gave 0.2"):
        judged(rows, ["accuracy"], None, None)
    assert judged(rows, ["accuracy"], None, 0.5) == [False, True, True, None]


def test_the_table_says_all_of_it():
    content = result(samples([1, 0], [1, 1], finish="length"), samples([0, 0], [1, 0]), dataset="gsm8k")
    head, rows = table(content)
    assert head == ["model", "pass@1 [95%]", "mean accuracy", "tokens", "cut off", "unscorable"]
    assert [row[0] for row in rows] == ["baseline: /home/me/baseline", "model: /home/me/model", "difference, paired"]
    assert rows[1][1].startswith("75.0% [")
    assert rows[1][4] == "100.0%"
    assert rows[2][1] == "+50.0 points"  # the same for both prompts
    assert title(content) == (
        "gsm8k, split test: 2 prompts, 4 completions of each (temperature 1, at most 64 tokens, seed 0); correct by "
        "accuracy"
    )
    part = {**content, "dataset": {**content["dataset"], "of": 9}}
    assert (is_whole(content), is_whole(part)) == (True, False)
    assert title(part).startswith("gsm8k, split test: 2 prompts (the first of 9), 4 completions")
    how = {"prompt_template": "r1", "system_prompt": None}
    greedy = {**content, "prompt": how, "sampling": {**content["sampling"], "temperature": 0, "top_k": 5}}
    assert "(greedy, top_k 5, at most" in title(greedy)
    assert title(greedy).endswith("; prompt template r1")


def test_a_card_states_the_newest_evaluations_and_no_path(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("---\ntags:\n- x\n---\n\n# Mine\n\n## Use\n\ntext\n\n## Limits\n\n- some\n", encoding="utf-8")
    put_into_card(readme, [result(samples([1, 0]), samples([0, 0]), dataset="/home/me/a.jsonl")])
    newest = result(samples([1, 1, 1, 0], [1, 0, 0, 0]), ks=(1, 2), dataset="openai/gsm8k")
    put_into_card(readme, [newest])
    once = readme.read_text("utf-8")
    put_into_card(readme, [newest])
    assert readme.read_text("utf-8") == once
    assert "/home/me" not in once
    assert once.count("## Evaluation\n") == 1
    assert once.index("## Use") < once.index("## Evaluation") < once.index("## Limits") < once.index("- some")
    card = ModelCard.load(readme)
    assert card.data.tags == ["x"]
    stated = [(each.metric_type, each.metric_value) for each in card.data.eval_results]
    assert stated == [("pass@1", 0.5), ("pass@2", 0.75)]
    first = card.data.eval_results[0]
    assert (first.dataset_name, first.dataset_split) == ("openai/gsm8k", "test")
    assert first.metric_args["num_samples"] == 4
    assert first.metric_args["prompts"] == 2
    assert "| model: this one | 50.0% [" in once


def test_a_card_of_somebody_else_keeps_what_it_says(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# Mine\n\nNothing else.\n", encoding="utf-8")
    put_into_card(readme, [result(samples([1, 0]))])
    text = readme.read_text("utf-8")
    assert text.index("Nothing else.") < text.index("## Evaluation")
    assert public_name("/home/me/x", "a local model") == "a local model"
    assert public_name("data/math.jsonl", "-") == "math.jsonl"


def test_results_are_read_back_and_what_is_none_is_left_out(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(as_json(result(samples([number]))))
    (tmp_path / "torn.json").write_text('{"format": 1, "models": [')
    (tmp_path / "other.json").write_text("[]")
    found = read_results(tmp_path)
    assert sorted(each["models"][0]["pass_at"]["1"]["value"] for each in found) == [0.0, 1.0]
    assert read_results(tmp_path / "nowhere") == []


# Step scores ---------------------------------------------------------------------------------------------------------


def test_auc_is_the_share_of_pairs_in_order_and_its_interval_is_over_prompts():
    rng = random.Random(0)
    scores = [[round(rng.random(), 1) for _ in range(rng.randint(1, 4))] for _ in range(60)]
    labels = [[rng.random() < 0.3 + score / 2 for score in row] for row in scores]
    prompts = [str(i % 20) for i in range(60)]
    found = compared(scores, labels, [None] * 60, prompts)["against"]
    assert list(found) == ["labels"]
    pairs = [pair for row, of_steps in zip(scores, labels, strict=True) for pair in zip(row, of_steps, strict=True)]
    order = [(g > b) + (g == b) / 2 for g, good in pairs for b, bad in pairs if good and not bad]
    numbers = found["labels"]
    assert numbers["auc"] == pytest.approx(sum(order) / len(order))
    assert numbers["brier"] == pytest.approx(sum((score - label) ** 2 for score, label in pairs) / len(pairs))
    assert numbers["auc_low"] < numbers["auc"] < numbers["auc_high"]
    again = compared(scores * 4, labels * 4, [None] * 240, [*prompts] * 4)["against"]["labels"]
    assert again["auc_high"] - again["auc_low"] == pytest.approx(numbers["auc_high"] - numbers["auc_low"])
    apart = compared(scores * 4, labels * 4, [None] * 240, list(map(str, range(240))))["against"]["labels"]
    assert apart["auc_high"] - apart["auc_low"] < 0.7 * (numbers["auc_high"] - numbers["auc_low"])
    assert sum(each["count"] for each in numbers["bins"]) == len(pairs)


def test_calibration_and_path_values_by_hand():
    scores = [[0.5, 0.8], [0.9], [None, 0.1], [None], [1.0, 0.25]]
    found = compared(scores, [None] * 5, [True, True, False, True, None], list("abcde"))["against"]
    assert [each["count"] for each in found.values()] == [3, 3, 3]
    assert found["min"]["brier"] == pytest.approx((0.5**2 + 0.1**2 + 0.1**2) / 3)
    assert found["product"]["brier"] == pytest.approx((0.6**2 + 0.1**2 + 0.1**2) / 3)
    assert found["last"]["ece"] == pytest.approx((0.2 + 0.1 + 0.1) / 3)
    # One bin: (0.82 + 0.88) / 2 against one half.
    assert compared([[0.82, 0.88]], [[True, False]], [None], ["a"])["against"]["labels"]["ece"] == pytest.approx(0.35)
    # No probabilities, one kind of label, one prompt.
    logits = compared([[-1.0, 3.0]], [[False, True]], [None], ["a"])["against"]["labels"]
    assert [logits[key] for key in ("auc", "auc_low", "brier", "ece", "bins")] == [1.0, None, None, None, []]
    assert compared([[0.5]], [[True]], [None], ["a"])["against"]["labels"]["auc"] is None


@pytest.mark.parametrize(
    ("row", "labels", "expected"),
    [
        ([0.9, 0.4, 0.1], [True, False, False], (1, 1.0, 0, None)),
        ([0.4, 0.4, 0.1], [True, False, False], (1, 0.0, 0, None)),
        ([0.9, 0.5, 0.6], [True, False, False], (1, 0.0, 0, None)),
        ([None, 0.4, 0.1], [True, False, None], (1, 1.0, 0, None)),
        ([0.5, 0.9], [True, True], (0, None, 1, 1.0)),
        ([0.5, 0.4], [True, True], (0, None, 1, 0.0)),
        ([0.5, 0.4], [None, False], (0, None, 0, None)),
        ([0.5, 0.4], None, (0, None, 0, None)),
    ],
)
def test_the_first_error(row, labels, expected):
    found = compared([row], [labels], [None], ["a"])["first_error"]
    assert (found["incorrect"], found["incorrect_accuracy"], found["correct"], found["correct_accuracy"]) == expected
    both = compared([row, [0.1], [0.9]], [labels, [False], [True]], [None] * 3, list("abc"))["first_error"]
    accuracy = [both["incorrect_accuracy"], both["correct_accuracy"]]
    assert both["f1"] == pytest.approx(statistics.harmonic_mean(accuracy))


# Sampling and scoring ------------------------------------------------------------------------------------------------


def test_completions_of_prompts_of_different_lengths_are_those_of_the_model(model, tokenizer, monkeypatch):
    shared = []
    ours = decoder.decode
    monkeypatch.setattr(decoder, "decode", lambda *args, **kwargs: shared.append(1) or ours(*args, **kwargs))
    prompts = [tokenizer(text)["input_ids"] for text in ("1+1=", "how many are 12 and 7?", "7")]
    greedy = model_sampler(model.eval(), tokenizer, Decoding(12, temperature=0), batch_size=3)
    for prompt, [found] in zip(prompts, greedy([Request(tuple(p), 1, 12, True, 0) for p in prompts]), strict=True):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert list(found.token_ids) == alone[0, len(prompt) :].tolist()
    sampler = model_sampler(model, tokenizer, Decoding(12), batch_size=4)
    requests = [Request(tuple(prompt), 3, 12, True, 7) for prompt in prompts]
    found = sampler(requests)
    assert len(shared) == 1 + 3  # of 3 and of 9 completions: each prompt is run once for those in a batch
    assert len({each.token_ids for each in found[0]}) > 1
    for each in (each for of in found for each in of):
        assert (each.token_ids[-1] in sampler.ends) == (each.end == "stop")
        assert not sampler.ends & set(each.token_ids[:-1])
        assert each.end == "stop" or len(each.token_ids) == 12


def test_decoding_out_of_range_and_a_prompt_without_room_behind_it_are_named(model):
    for field, value in {"temperature": -1, "top_p": 0, "max_completion_length": 0}.items():
        with pytest.raises(InputError, match=field):
            Decoding(**{field: value})
    check_context(model.config, [1000, 24], Decoding(24))  # the context is 1024
    with pytest.raises(InputError, match=r"max_completion_length: got 25 after a prompt of 1000 tokens, row 1 "):
        check_context(model.config, [24, 1000], Decoding(25))


def test_a_server_is_asked_as_the_model_would_be(tokenizer):
    reply = json.dumps({"choices": [{"token_ids": [5, 6], "finish_reason": "stop", "stop_reason": None}]}).encode()
    server = Server(lambda number, body: (200, {}, reply))
    try:
        decoding = Decoding(9, temperature=0.5, top_k=3, repetition_penalty=1.1)
        sampler = server_sampler(server.url.removesuffix("/v1"), "tiny", tokenizer, decoding, 4)
        assert sampler([Request((1, 2), 2, 9, True, 3)]) == [[Continuation((5, 6), 2, "stop")] * 2]
    finally:
        server.close()
    bodies = [body for _, _, body in server.requests]
    assert {body["seed"] for body in bodies} == {3, 4}
    for body in bodies:
        assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2], 9, 0.5)
        assert (body["top_k"], body["repetition_penalty"]) == (3, 1.1)
        # What is off is said, too: a server fills in what is missing from the model's generation_config.
        assert (body["top_p"], body["min_p"]) == (1.0, 0.0)


def test_a_failure_of_one_completion_is_that_one_alone():
    def moody(completions, answer, **kwargs):
        if "1" in answer:
            raise KeyError("one")
        return [1.0] * len(completions)

    rows = [{"prompt": "?", "completion": "x", "completion_ids": [1], "answer": str(i)} for i in range(3)]
    scores = score_completions(moody, rows, "moody")
    assert scores.rewards == [1.0, None, 1.0]
    assert scores.failures == {1: "KeyError: 'one'"}


# Models --------------------------------------------------------------------------------------------------------------


def test_an_adapters_folder_is_a_model_too(saved_model, tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": saved_model, "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    name = str(tmp_path)
    assert is_adapter(name)
    assert holds_model(tmp_path)
    assert base_name(name) == saved_model
    assert base_name(saved_model) is None
    check_model("model", name)
    check_model("model", saved_model)
    with pytest.raises(InputError, match="base: got /nowhere/at/all, which does not exist"):
        check_model("model", name, "/nowhere/at/all")
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(InputError, match="model: got .*/run, a run without a saved model; .*run/checkpoint-5"):
        check_model("model", str(tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="model: got .*/empty, a folder without config.json"):
        check_model("model", str(tmp_path / "empty"))


def test_a_model_that_had_diverged_is_one_line(model, tokenizer, tmp_path):
    sampler = model_sampler(model, tokenizer, Decoding(max_completion_length=4), batch_size=2)
    model.lm_head.weight.data.fill_(3e38)  # finite, and the logits are not
    with pytest.raises(InputError, match="^model: got logits that are NaN or infinite; .* earlier checkpoint"):
        sampler([Request((5, 6), 2, 4, True, 0)])
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match=r"^model: got .*, whose weight lm_head.weight is NaN"):
        load_model(save_tiny(tmp_path, tokenizer, model), Loading())


def test_other_weights_have_another_mark(tmp_path):
    assert weights_mark("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (tmp_path / "model.safetensors").write_bytes(b"12")
    before = weights_mark(str(tmp_path))
    (tmp_path / "README.md").write_text("x")
    assert weights_mark(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert weights_mark(str(tmp_path)) != before
