"""Step verifiers and process reward models: each format against its published recipe, batching, cutting, bad input."""

import json
import re
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_tokenizer
from tiny_prms import CLEAN, PROMPTS, SCORERS, STEPS, close, marked_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards import (
    ChatTurnScorer,
    MathPSAScorer,
    SkyworkScorer,
    TokenClassificationScorer,
    step_verifier,
)
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


@pytest.fixture(params=SCORERS)
def make(request):
    return SCORERS[request.param]


# The published recipes, one row at a time ----------------------------------------------------------------------------


@torch.no_grad()
def by_recipe_token_classification(scorer, prompt, steps):
    tokenizer, ids, ends = scorer.tokenizer, scorer.tokenizer(prompt)["input_ids"], []
    for step in steps:
        ids = ids + tokenizer(step)["input_ids"] + tokenizer("\n")["input_ids"]
        ends.append(len(ids) - 1)
    return scorer.model(torch.tensor([ids])).logits[0].softmax(-1)[ends, 1].tolist()


@torch.no_grad()
def by_recipe_math_shepherd(scorer, prompt, steps):
    tokenizer = scorer.tokenizer
    good, bad = tokenizer.convert_tokens_to_ids(["▁+", "▁-"])
    answer = "\n".join(f"Step {k}: {step} ки" for k, step in enumerate(steps, start=1))
    ids = torch.tensor([tokenizer.encode(f"{prompt} {answer}")])
    probabilities = scorer.model(ids).logits[:, :, [good, bad]].softmax(-1)[:, :, 0]
    return probabilities[ids == tokenizer.convert_tokens_to_ids("▁ки")].tolist()


@torch.no_grad()
def by_recipe_qwen_math(scorer, prompt, steps):
    answer = "<extra_0>".join(steps) + "<extra_0>"
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    text = scorer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    ids = torch.tensor([scorer.tokenizer.encode(text)])
    probabilities = scorer.model(input_ids=ids)[0].softmax(-1)
    return probabilities[ids == scorer.tokenizer.convert_tokens_to_ids("<extra_0>")][:, 1].tolist()


@torch.no_grad()
def by_recipe_chat_turn(scorer, prompt, steps):
    """Turn by turn: one forward pass per step on the chat up to its answer."""
    good, bad = scorer.tokenizer.convert_tokens_to_ids(["+", "-"])
    chat, scores = [], []
    for k, step in enumerate(steps):
        chat.append({"role": "user", "content": step if k else f"{prompt} {step}"})
        ids = scorer.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        scores.append(scorer.model(torch.tensor([ids])).logits[0, -1, [good, bad]].softmax(-1)[0].item())
        chat.append({"role": "assistant", "content": "+"})
    return scores


def by_recipe_line_breaks(scorer, text, candidates):
    """The whole text tokenized at once; good against bad at every token that is the marker."""
    tokenizer = scorer.tokenizer
    (marker_id,) = tokenizer.encode(scorer.marker)
    ids = torch.tensor([tokenizer.encode(text)])
    good_and_bad = [tokenizer.encode(candidate)[0] for candidate in candidates]
    return scorer.model(ids).logits[:, :, good_and_bad].softmax(-1)[:, :, 0][ids == marker_id].tolist()


@torch.no_grad()
def by_recipe_versa(scorer, prompt, steps):
    text = f"{prompt} \n\n" + "".join(f"{step} \n\n\n\n" for step in steps)
    return by_recipe_line_breaks(scorer, text, ("+", "-"))


@torch.no_grad()
def by_recipe_math_psa(scorer, prompt, steps):
    text = f"{prompt} " + "".join(f"Step {k}: {step} \n\n\n\n\n " for k, step in enumerate(steps, start=1))
    return by_recipe_line_breaks(scorer, text, (" +", " -"))


@torch.no_grad()
def every_line_by_recipe(scorer, prompt, response):
    """Skywork: every line by itself, the step token behind it; the sigmoid of the value head there."""
    tokenizer = scorer.tokenizer
    ids, flags = tokenizer.encode(prompt + "\n"), []
    for line in response.split("\n"):
        ids = ids + (tokenizer.encode(line) if line else []) + tokenizer.encode("\n")
        flags.append(len(ids) - 1)
    hidden = scorer.model.model(torch.tensor([ids])).last_hidden_state
    return scorer.model.v_head["summary"](hidden)[0, flags, 0].sigmoid().tolist()


def by_recipe_skywork(scorer, prompt, steps):
    return every_line_by_recipe(scorer, prompt, "\n".join(steps))


RECIPES = {
    "token_classification": by_recipe_token_classification,
    "math_shepherd": by_recipe_math_shepherd,
    "qwen_math": by_recipe_qwen_math,
    "chat_turn": by_recipe_chat_turn,
    "versa": by_recipe_versa,
    "math_psa": by_recipe_math_psa,
    "skywork": by_recipe_skywork,
}


@pytest.mark.parametrize("kind", RECIPES)
def test_scores_are_those_of_the_published_recipe(kind):
    scorer, recipe = SCORERS[kind](), RECIPES[kind]
    expected = [recipe(scorer, p, s) if s else [] for p, s in zip(PROMPTS, CLEAN, strict=True)]
    scores = scorer(prompts=PROMPTS, completions=PROMPTS, steps=STEPS)
    close(scores, expected)
    flat = [score for row in scores for score in row]
    assert max(flat) - min(flat) > 0.02  # scores that do not vary prove nothing


@pytest.mark.parametrize("kind", ["versa", "math_psa"])
def test_line_breaks_of_the_policy_end_no_step(kind):
    scorer = SCORERS[kind]()
    for written in ("so\n\n\n\n\n\nit", "so \n \n\n\n\n it", "so   \n\n\n\n\n\n\n\n\n"):
        row = scorer._encode("1?\n\n \n\n\n\n2?", [scorer._cleaner.step(written), "2"])
        text = scorer.tokenizer.decode(row.input_ids)
        assert len(re.findall(r"\n\s*\n\s*\n\s*\n", text)) == 2  # the format's own
        assert [row.input_ids[position] for position in row.positions] == [scorer.marker_id] * 2


def test_skywork_scores_a_step_of_several_lines_at_its_last_one():
    scorer = SCORERS["skywork"]()
    steps = ["first\n\nsecond", "third.\nfourth"]
    every_line = every_line_by_recipe(scorer, "1?", "\n".join(steps))
    assert len(every_line) == 5
    close(scorer(["1?"], steps=[steps]), [[every_line[2], every_line[4]]])


# What holds for every format -----------------------------------------------------------------------------------------


def test_batched_equals_one_by_one_and_any_batch(make):
    scorer = make(batch_size=8)
    together = scorer(PROMPTS, steps=STEPS)
    alone = [scorer([p], steps=[s])[0] for p, s in zip(PROMPTS, STEPS, strict=True)]
    close(together, alone)
    padded = scorer([*PROMPTS, "a long question " * 9], steps=[*STEPS, ("so", "it is")])  # every row gets padding
    close(padded[:4], alone)
    close(make(batch_size=2)(PROMPTS[::-1], steps=STEPS[::-1])[::-1], alone)


def test_whitespace_behind_a_step_does_not_matter(make):
    scorer = make()
    bare = scorer(PROMPTS, steps=CLEAN)
    assert scorer(PROMPTS, steps=STEPS) == bare
    with_tail = [(*row, "\n<|im_end|>") for row in CLEAN]  # a step without text cannot be scored
    assert scorer(PROMPTS, steps=with_tail) == [[*row, None if row else 0.0] for row in bare]  # nothing written: 0


def test_a_step_is_scored_on_what_is_up_to_it(make):
    """The number is read at the right place: nothing behind a step changes it, and the step itself does."""
    scorer = make()
    first = scorer(["2?"], steps=[["it is 2.", "so 2", "sure"]])[0]
    later = scorer(["2?"], steps=[["it is 2.", "so 2", "no: 3, not 2"]])[0]
    assert first[:2] == pytest.approx(later[:2], abs=1e-6)
    assert abs(first[2] - later[2]) > 1e-6
    if scorer.is_causal:  # nor does it matter whether there is anything behind it
        assert scorer(["2?"], steps=[["it is 2.", "so 2"]])[0] == pytest.approx(first[:2], abs=1e-6)
    earlier = scorer(["2?"], steps=[["it is 2.", "so 3", "sure"]])[0]
    assert first[0] == pytest.approx(earlier[0], abs=1e-6)
    assert all(abs(one - other) > 1e-6 for one, other in zip(first[1:], earlier[1:], strict=True))


def test_markers_written_by_the_policy_are_taken_out(make):
    scorer = make()
    bare = scorer(["2?"], steps=[["it is 2", "so 2"]])
    copies = {"qwen_math_prm": ("<extra_0>", "<extra_<extra_0>0>"), "math_shepherd_prm": (" ки", "\ue002 ки")}
    for copy in (*copies.get(scorer.__name__, ()), "\ue002"):
        assert scorer(["2?"], steps=[[f"it is 2{copy}", "so 2"]]) == bare
        assert scorer([f"2?{copy}"], steps=[["it is 2", "so 2"]]) == bare


def test_prompts_as_messages(make):
    scorer = make()
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert scorer(messages, steps=STEPS) == scorer(PROMPTS, steps=STEPS)
    contents = [[{"type": "text", "text": prompt}, {"type": "image"}] for prompt in PROMPTS]
    parts = [[{"role": "user", "content": content}] for content in contents]
    assert scorer(parts, steps=STEPS) == scorer(PROMPTS, steps=STEPS)
    loud = make(prompt_text=lambda prompt: prompt[-1]["content"].upper())
    assert loud(messages, steps=STEPS) == scorer([prompt.upper() for prompt in PROMPTS], steps=STEPS)


def test_long_prompts_lose_their_left_and_say_so_once(make):
    full = make()
    prompt = "abcdefghij"
    start = len(full._encode(prompt, CLEAN[0]).input_ids)
    short = make(max_length=start - 4)
    logged = {}
    with pytest.warns(UserWarning, match="prompts of longer rows are truncated from the left") as caught:
        scores = short([prompt, "ab"], steps=[STEPS[0], STEPS[3]], log_metric=logged.__setitem__)
    assert len(caught) == 1
    row = full._encode(prompt, CLEAN[0])
    expected = row.input_ids[: row.cut[0]] + row.input_ids[row.cut[0] + 4 :]
    fitted = row.fit(start - 4)
    assert fitted.input_ids == expected
    text = full.tokenizer.decode(fitted.input_ids)
    assert "efghij" in text
    assert "abc" not in text
    assert all(step in text for step in CLEAN[0])
    close([scores[1]], full(["ab"], steps=[STEPS[3]]))
    assert scores[0] != full([prompt], steps=[STEPS[0]])[0]
    assert logged == {f"process_rewards/{full.__name__}/truncated_frac": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short([prompt], steps=[STEPS[0]])


def test_steps_that_do_not_fit_are_worth_nothing(make):
    scorer = make(max_length=60)
    with pytest.warns(UserWarning, match="what does not fit gets 0") as caught:
        scores = scorer(["1?", "2?"], steps=[("so " * 60, "2"), ("2",)])
    assert len(caught) == 1
    assert scores[0] == [0.0, 0.0]  # the completion is to blame, as it is for one without text
    assert scores[1][0] is not None


@pytest.mark.parametrize("prompt", ["1?", "so many words " * 5])
def test_no_later_step_changes_the_score_of_a_step_in_a_row_that_is_too_long(make, prompt):
    scorer = make(max_length=100)
    if not scorer.is_causal:
        pytest.skip("its scores read later text")
    steps = ("  ", "it is 2.", "<|im_end|>", "so 3.", "and so on " * 3, "4.", "so " * 60, "5.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = scorer([prompt], steps=[steps])[0]
        for count in range(1, len(steps)):
            close([scorer([prompt], steps=[steps[:count]])[0]], [whole[:count]])
    assert whole[0] == 0.0
    assert whole[2] is None
    assert 0.0 < whole[1] < 1.0
    assert whole[6:] == [0.0, 0.0]


def test_an_encoder_says_that_it_reads_later_text():
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = BertForTokenClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes))
    assert TokenClassificationScorer(encoder, tokenizer).is_causal is False
    assert SCORERS["token_classification"]().is_causal is True
    assert TokenClassificationScorer.is_causal is None  # before it is loaded


def test_names_and_evaluation_mode(make):
    scorer = make(name="mine")
    assert scorer.__name__ == "mine"
    with pytest.raises(InputError, match="1 rows of steps for 2 prompts"):
        scorer(["a", "b"], steps=[("a",)])
    scorer.model.train()  # somebody else's doing: dropout must not get into the scores
    assert scorer(PROMPTS, steps=STEPS) == scorer(PROMPTS, steps=STEPS)
    assert not scorer.model.training


# Loading and bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "architecture", "published"),
    [
        ("token_classification", "Qwen2ForTokenClassification", {"score.weight"}),
        ("chat_turn", "Qwen2ForCausalLM", {"lm_head.weight"}),
        ("qwen_math", "Qwen2ForProcessRewardModel", {"score.0.weight", "score.0.bias", "score.2.weight"}),
        ("skywork", "Qwen2ForPrmModel", {"v_head.summary.weight", "v_head.summary.bias"}),
    ],
)
def test_a_checkpoint_loads_from_a_folder(kind, architecture, published, tmp_path):
    scorer = SCORERS[kind]()
    save_tiny(tmp_path, scorer.tokenizer, scorer.model)
    weights = load_file(tmp_path / "model.safetensors")
    assert {*published, "model.norm.weight"} <= set(weights)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    if kind == "skywork":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # the published one has it, unused
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = scorer(PROMPTS, steps=STEPS)
    for name in (scorer.__name__, "prm"):
        if (kind, name) != ("chat_turn", "prm"):  # whose configuration does not say which format it has
            named = resolve_reward({name: {"model": str(tmp_path), "device": "cpu"}}, "step_reward_funcs")
            close(named(prompts=PROMPTS, steps=STEPS, completions=PROMPTS, trainer_state=None), expected, 1e-6)
            assert named.__name__ == name
            assert type(named) is type(scorer)
            assert named.is_causal
    half = type(scorer)(str(tmp_path), device="cpu", dtype="bfloat16")
    assert next(half.model.parameters()).dtype == torch.bfloat16
    close(half(PROMPTS, steps=STEPS), expected, 0.1)


def test_models_with_adapters_are_scored_alike():
    scorer = SCORERS["chat_turn"]()
    expected = scorer(PROMPTS, steps=STEPS)
    adapted = get_peft_model(scorer.model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with_adapter = ChatTurnScorer(adapted, scorer.tokenizer)
    close(with_adapter(PROMPTS, steps=STEPS), expected, 1e-6)  # a fresh adapter changes nothing
    widths = []
    adapted.register_forward_hook(lambda *hooked: widths.append(hooked[-1].logits.size(1)))
    with_adapter(PROMPTS[:1], steps=STEPS[:1])
    assert widths == [2]  # logits at the two answers only, not at every token


def test_token_classifiers_load_quantized(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    assert bitsandbytes is not None
    scorer = SCORERS["token_classification"]()
    save_tiny(tmp_path, scorer.tokenizer, scorer.model)
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device": "cpu"}
    quantized = TokenClassificationScorer(str(tmp_path), **options)
    close(quantized(PROMPTS, steps=STEPS), scorer(PROMPTS, steps=STEPS), 0.2)
    with pytest.raises(InputError, match="quantization_config: got a model that is already loaded"):
        TokenClassificationScorer(scorer.model, scorer.tokenizer, **options)


def without_template():
    tokenizer = marked_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def merging():
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġx"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "x")]))  # " x" is one token, but not that of "x"
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a", pad_token="b")


PLAIN = tiny_tokenizer()
CLASSES = {"model": Qwen2ForTokenClassification, "changes": {"num_labels": 3}}
REFUSED = [
    ("token_classification", CLASSES, "3 outputs per .* 2 classes"),
    ("qwen_math", CLASSES, "got 3 outputs per token"),
    ("qwen_math", {"model": Qwen2ForCausalLM}, "2 classes per token"),
    ("chat_turn", CLASSES, "without a language modeling head"),
    ("qwen_math", {"tokenizer": PLAIN}, "marker of 'qwen_math_prm': got '<extra_0>'"),
    ("versa", {"tokenizer": PLAIN}, r"marker of 'versa_prm': got ' \\n\\n\\n\\n', which is"),
    ("math_shepherd", {"good": "good"}, "good of 'math_shepherd_prm'"),
    ("math_shepherd", {"marker": "#"}, "marker of .*: got '#'"),  # the unknown token is no marker
    ("math_shepherd", {"tokenizer": merging(), "marker": "x"}, "merges the marker"),
    ("qwen_math", {"tokenizer": without_template()}, "no chat template"),
    ("skywork", {"model": Qwen2ForTokenClassification}, "got 2 outputs .* a head of 1 output per token"),
    ("skywork", {"step_token": "<step>"}, "step_token of .*: got '<step>'"),
    ("token_classification", {"batch_size": 0}, "batch_size: got 0"),
    ("chat_turn", {"bach_size": 1}, "bach_size: got an unknown option; .* Did you mean batch_size?"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_a_checkpoint_of_another_format_is_refused(kind, options, message):
    with pytest.raises(InputError, match=message):
        SCORERS[kind](**options)


def test_folders_without_a_model_or_without_its_head_are_refused(saved_model, tmp_path):
    nothing = str(tmp_path / "nothing")
    loaded = SCORERS["token_classification"]().model
    for kind, arguments, message in (
        (TokenClassificationScorer, (loaded,), "tokenizer: got none for a model that is already loaded"),
        (TokenClassificationScorer, (saved_model,), "a checkpoint without score"),
        (SkyworkScorer, (saved_model,), "a checkpoint without v_head.summary.bias, v_head.summary.weight"),
        (TokenClassificationScorer, (nothing,), "tokenizer: got"),
        (TokenClassificationScorer, (nothing, PLAIN), "model: got"),
    ):
        with pytest.raises(InputError, match=message):
            kind(*arguments, device="cpu")


@pytest.mark.parametrize("kind", ["qwen_math", "implicit"])
def test_an_answer_that_the_chat_template_cuts_is_worth_nothing(kind):
    """Templates of reasoning models write an answer without what it thought."""
    scorer = SCORERS[kind]()
    expected = scorer(["1?"], steps=[("1", "it is 1")])
    content, template = "message['content']", scorer.tokenizer.chat_template
    scorer.tokenizer.chat_template = template.replace(content, f"{content}.split('</think>')[-1]")
    with pytest.warns(UserWarning, match="the chat template left a part of the answer out; such steps get 0"):
        scores = scorer(["1?", "1?"], steps=[("1", "so</think>", "it is 1"), ("1", "it is 1")])
    close(scores[1:], expected)
    assert scores[0] == [0.0, 0.0, 0.0]


def test_an_adapter_is_loaded_on_the_model_under_it(tmp_path):
    scorer, base, folder = SCORERS["math_psa"](), tmp_path / "base", tmp_path / "adapter"
    model, tokenizer = scorer.model, scorer.tokenizer
    model.save_pretrained(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(Qwen2ForCausalLM.from_pretrained(base), lora)
    named = resolve_reward(
        {"math_psa_prm": {"model": save_tiny(folder, tokenizer, adapted), "device": "cpu"}}, "step_reward_funcs"
    )
    scores = named(prompts=PROMPTS, steps=STEPS)
    close(scores, MathPSAScorer(adapted, tokenizer)(PROMPTS, steps=STEPS), 1e-6)
    bare = scorer(PROMPTS, steps=STEPS)
    assert max(abs(one - other) for one, other in zip(scores[1], bare[1], strict=True)) > 1e-3
    with pytest.raises(InputError, match=r"an adapter; expected a whole checkpoint with its head"):
        TokenClassificationScorer(str(folder), tokenizer)


# Rules ---------------------------------------------------------------------------------------------------------------


def test_a_verifier_sees_the_prompt_the_steps_before_and_its_row():
    seen = []

    def verify(prompt, previous_steps, step, **columns):
        seen.append((prompt, previous_steps, step, columns))
        return len(seen) > 1

    reward = step_verifier(verify)
    of_the_trainer = {"completion_ids": [[1, 2], [3]], "step_ends": [[0, 1], [0]], "trainer_state": object()}
    call = {"prompts": ["p", "q"], "completions": ["ab", "c"], "steps": [("a", "b"), ("c",)], "answer": ["x", "y"]}
    assert reward(**call, **of_the_trainer, log_metric=print) == [[0.0, 1.0], [1.0]]
    x, y = {"answer": "x"}, {"answer": "y"}
    assert seen == [("p", (), "a", x), ("p", ("a",), "b", x), ("q", (), "c", y)]
    assert reward.__name__ == "verify"
    same = step_verifier(lambda prompt, previous_steps, step, answer: float(step == answer), name="same")
    assert same(["p"], ["a"], [("a", "b")], answer=["a"], other=[1], step=[1]) == [[1.0, 0.0]]  # columns that it names
    assert same.__name__ == "same"
    for nothing in (None, float("nan")):
        assert step_verifier(lambda p, before, step, nothing=nothing: nothing)(["p"], steps=[("a",)]) == [[None]]


@pytest.mark.parametrize(
    ("result", "message"), [("good", "str 'good'"), (float("inf"), "inf"), (ZeroDivisionError(), "ZeroDivision")]
)
def test_a_verifier_that_fails_names_row_and_step(result, message):
    def broken(prompt, previous_steps, step):
        if step != "bad":
            return torch.tensor(0.5)
        if isinstance(result, Exception):
            raise result
        return result

    call = {"prompts": ["p", "q"], "completions": ["", ""], "steps": [("a",), ("b", "bad")]}
    with pytest.raises(RewardError, match=f"'broken': got {message}.* at step 1 of row 1"):
        step_verifier(broken)(**call)


def test_a_verifier_cannot_be_asynchronous():
    async def later(prompt, previous_steps, step):
        return 1.0

    with pytest.raises(InputError, match="step_verifier: got an asynchronous function"):
        step_verifier(later)
