"""Process reward models of the published architectures, small enough to build in milliseconds."""

from functools import partial

import pytest
from tiny import CHAT_TEMPLATE, random_weights, sizes, tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from trl_drgrpo.process_rewards import (
    ChatTurnScorer,
    ImplicitRewardScorer,
    MathPSAScorer,
    MathShepherdScorer,
    QwenMathScorer,
    SkyworkScorer,
    TokenClassificationScorer,
    VersaScorer,
)
from trl_drgrpo.process_rewards.prm_architectures import Qwen2ForPrmModel, Qwen2ForProcessRewardModel

PROMPTS = ["3+8=?", "What is the sum of 5, 11 and 7? Think it over.", "1+1=?", "7+7=?"]
STEPS = [
    ("3+8 is 11.\n\n", "So the answer is 11.<|im_end|>"),
    ("5+11=16.\n\n", "16+7=22.\n\n", "Wait, 16+7=23.\n\n", "The answer is 23.<|im_end|>"),
    (),
    ("It is 14",),
]
CLEAN = [[step.replace("<|im_end|>", "").rstrip() for step in row] for row in STEPS]


def config(tokenizer, kind=Qwen2Config, **changes):
    values = {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # wide enough that scores differ
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return kind(**sizes(tokenizer, **{**values, **changes}))


def built(kind, configuration, seed=0):
    return random_weights(kind, configuration, seed).eval()


def marked_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<extra_0>"]})
    return tokenizer


def metaspace_tokenizer():
    """SentencePiece-like, as Mistral's: a word's token holds the space before it."""
    characters = sorted({*"0123456789+-=.,:?!\n", *"abcdefghijklmnopqrstuvwxyz", *"ASTWIQ", "▁"})
    words = [("<unk>", -20.0), ("<s>", -20.0), ("</s>", -20.0), ("▁ки", -1.0), ("▁+", -1.0), ("▁-", -1.0)]
    tokenizer = Tokenizer(models.Unigram([*words, *((character, -4.0) for character in characters)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def line_break_tokenizer():
    """Byte-level BPE that cuts as Qwen2.5 and Llama 3 do: line breaks, with the space before them, are one token."""
    breaks = [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), ("ĊĊĊĊ", "Ċ"), ("Ġ", "ĊĊĊĊĊ"), ("Ġ", "ĊĊĊĊ"), ("Ġ", "ĊĊ")]
    merges = [*breaks, ("Ġ", "+"), ("Ġ", "-"), (".", "ĊĊ"), ("Ġ", "1")]
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*characters, *dict.fromkeys("".join(pair) for pair in merges)])}
    cuts = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cuts), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def close(got, expected, tolerance=1e-5):
    assert [len(row) for row in got] == [len(row) for row in expected]
    for row, other in zip(got, expected, strict=True):
        assert row == pytest.approx(other, abs=tolerance)


KINDS = {  # the scorer, its tokenizer, its model and the configuration of that
    "token_classification": (TokenClassificationScorer, tiny_tokenizer, Qwen2ForTokenClassification, Qwen2Config),
    "math_shepherd": (MathShepherdScorer, metaspace_tokenizer, LlamaForCausalLM, LlamaConfig),
    "qwen_math": (QwenMathScorer, marked_tokenizer, Qwen2ForProcessRewardModel, Qwen2Config),
    "chat_turn": (ChatTurnScorer, tiny_tokenizer, Qwen2ForCausalLM, Qwen2Config),
    "versa": (VersaScorer, line_break_tokenizer, LlamaForCausalLM, LlamaConfig),
    "math_psa": (MathPSAScorer, line_break_tokenizer, Qwen2ForCausalLM, Qwen2Config),
    "skywork": (SkyworkScorer, line_break_tokenizer, Qwen2ForPrmModel, Qwen2Config),
    "implicit": (ImplicitRewardScorer, tiny_tokenizer, Qwen2ForCausalLM, Qwen2Config),
}


def made(kind, model=None, tokenizer=None, changes=None, **options):
    """A scorer; with another class of model, another tokenizer, another configuration."""
    scorer, own_tokenizer, own_model, configuration = KINDS[kind]
    tokenizer = tokenizer or own_tokenizer()
    seeds = range(2 if kind == "implicit" else 1)  # the model, and its reference
    models = [built(model or own_model, config(tokenizer, configuration, **(changes or {})), seed) for seed in seeds]
    return scorer(*models, **{"tokenizer": tokenizer, **options})


SCORERS = {kind: partial(made, kind) for kind in KINDS}
