import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.steps import Steps, StepSegmenter, one_step_frac, step_segmenter
from trl_drgrpo.process_rewards.steps.alignment import CONTEXT, Aligner

EOS = "<|end|>"
ALPHABET = bytes_to_unicode()  # GPT-2's, from bytes to characters


def wrapped(backend, **special):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def byte_level():
    """Byte-level BPE with the merges that matter, and entries that no text encodes to but a model may emit."""

    def spell(raw):
        return "".join(map(ALPHABET.__getitem__, raw))

    merges = [(b"\n", b"\n"), (b".", b"\n\n"), (b"\n\n", b"\n"), (b"!", b"\n\n"), (b"!\n\n", b"B"), (b"\r", b"\n")]
    merges += [(b"\r\n", b"\r\n"), (b"\xf0", b"\x9f"), (b"\xc3", b"\xa9"), (b"o", b"k"), (b" ", b"ok")]
    odd = [b"\x80\xc3", b"\x98\x80A", b"\xff\xff", b"\x9f\x98", b"a\xf0\x9f", b"\xef\xbf", b"\xbd.", b"\n\n\xf0\x9f"]
    vocab = {spell(bytes([byte])): i for i, byte in enumerate(ALPHABET)}
    for raw in [first + second for first, second in merges] + odd:
        vocab.setdefault(spell(raw), len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(spell(first), spell(second)) for first, second in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, eos_token=EOS, pad_token="<|pad|>")


def sentencepiece(decoder="llama"):
    """Metaspace and byte fallback, as in Llama 2: a line break has no entry of its own and becomes `<0x0A>`."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcStep12=.+é日", "▁a", "▁St", "St", "ep", "▁Step", "▁▁", "<0x"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "a"), ("S", "t"), ("▁", "St"), ("e", "p"), ("▁St", "ep"), ("▁", "▁")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    metaspace = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    backend.decoder = decoders.Sequence(fallback if decoder == "llama" else metaspace)
    return wrapped(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def word_level():
    """Words only: an unknown one is `[UNK]`, and the decode puts a space between any two."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "[EOS]", "Step", "1", "2", "=", "###", "."])}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(backend, unk_token="[UNK]", eos_token="[EOS]")


def with_neighbors(decoder, words):
    """Decoders that look at the token before or after: the windows are for them."""
    backend = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoder
    return wrapped(backend, eos_token="[EOS]")


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": sentencepiece("metaspace"),
    "word_level": word_level(),
    "word_piece": with_neighbors(decoders.WordPiece(cleanup=True), ["a", "##b", "##c", ".", "do", "not", "##", "'s"]),
    "bpe_suffix": with_neighbors(decoders.BPEDecoder(), ["a</w>", "b", "c", "dd</w>", "e", ".</w>"]),
    "slow_bytes": ByT5Tokenizer(),
}
KINDS = ["byte_level", "sentencepiece", "word_level"]
BYTES = TOKENIZERS["byte_level"]
PIECES = TOKENIZERS["sentencepiece"]
WORDS = TOKENIZERS["word_level"]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def cut(text, spec="\n\n", tokenizer=BYTES, tool_mask=None):
    return step_segmenter(spec)(encode(tokenizer, text), tokenizer, tool_mask)


def check_partition(steps, ids, tokenizer):
    """What holds for every completion of at least one token."""
    text, last = Aligner(tokenizer).align(ids).text, len(ids) - 1
    assert len(steps.texts) == len(steps.ends) > 0
    if steps.closing is None:
        assert "".join(steps.texts) == text
        assert steps.ends[-1] == last
    else:
        assert text.startswith("".join(steps.texts))
        assert steps.ends[-1] < steps.closing == last
    step_of = [k for k, (start, end) in enumerate(pairwise((-1, *steps.ends[:-1], last))) for _ in range(start, end)]
    assert step_of == sorted(step_of)
    assert len(step_of) == len(ids)  # every token has one step
    assert set(step_of) == set(range(len(steps.ends)))  # every step has a token: ends are strictly increasing


# --- which token ends a step -------------------------------------------------------------------------------------


def test_the_merges_are_there():
    # without them the golden cases below would say nothing about tokens that span a separator
    assert BYTES.convert_ids_to_tokens(encode(BYTES, "ok.\n\nok!\n\nB")) == ["ok", ".ĊĊ", "ok", "!ĊĊB"]
    assert len(encode(BYTES, "😀")) == 3
    assert PIECES.convert_ids_to_tokens(encode(PIECES, "a\n😀"))[1:3] == ["<0x0A>", "<0xF0>"]


@pytest.mark.parametrize(
    ("text", "texts", "ends", "closing"),
    [
        # tokens: ok .\n\n ok <eos>
        (f"ok.\n\nok{EOS}", ["ok.\n\n", f"ok{EOS}"], [1, 3], None),
        # truncated: the same without EOS
        ("ok.\n\nok", ["ok.\n\n", "ok"], [1, 2], None),
        # !\n\nB is one token: B belongs to the step the token ends. tokens: ok !\n\nB ok
        ("ok!\n\nBok", ["ok!\n\nB", "ok"], [1, 2], None),
        # so a separator right after it ends nothing; ok !\n\nB \n\n ok
        ("ok!\n\nB\n\nok", ["ok!\n\nB", "\n\nok"], [1, 3], None),
        # leading separators make no empty step; \n\n ok .\n\n ok
        ("\n\nok.\n\nok", ["\n\nok.\n\n", "ok"], [2, 3], None),
        # what trails the last separator is the closing: the decision to stop
        (f"ok.\n\nok.\n\n{EOS}", ["ok.\n\n", "ok.\n\n"], [1, 3], 4),
        (f"ok.\n\nok.\n\n \n\n{EOS}", ["ok.\n\n", "ok.\n\n"], [1, 3], 6),
        (f"ok.\n\n{EOS}\n\n<|pad|>", ["ok.\n\n"], [1], 4),
        # further line breaks belong to the next step; ok .\n\n \n\n\n ok
        ("ok.\n\n\n\n\nok", ["ok.\n\n", "\n\n\nok"], [1, 3], None),
        ("ok.\n\n\nok", ["ok.\n\n", "\nok"], [1, 3], None),
        ("ok.\n\n \n\nok", ["ok.\n\n", " \n\nok"], [1, 4], None),
        # Windows line breaks; ok \r\n\r\n ok
        ("ok\r\n\r\nok", ["ok\r\n\r\n", "ok"], [1, 2], None),
        ("ok\r\n\r\n\r\nok", ["ok\r\n\r\n", "\r\nok"], [1, 3], None),
        ("ok\r\nok", ["ok\r\nok"], [2], None),
        ("ok\r\rok", ["ok\r\rok"], [3], None),  # a \n might have followed in the next token
        # an emoji is three tokens (F0 9F, 98, 80); none of them ends a step alone
        ("😀\n\n😀", ["😀\n\n", "😀"], [3, 6], None),
        # nothing to cut, nothing to read
        ("ok", ["ok"], [0], None),
        (f"\n\n\n\n{EOS}", [f"\n\n\n\n{EOS}"], [2], None),
        (EOS, [EOS], [0], None),
    ],
)
def test_byte_level_bpe(text, texts, ends, closing):
    assert cut(text) == Steps(tuple(texts), tuple(ends), closing)


def test_a_step_never_ends_inside_a_character():
    ids = BYTES.convert_tokens_to_ids(["o", ".ĊĊ", "ok"])
    broken = BYTES.convert_tokens_to_ids(["o", "ĊĊðŁ", "ĺ", "Ģ", "o"])  # the token of the separator begins an emoji
    assert step_segmenter("\n\n")(ids, BYTES).ends == (1, 2)
    assert step_segmenter("\n\n")(broken, BYTES) == Steps(("o\n\n😀", "o"), (3, 4))
    assert step_segmenter(1)(broken, BYTES) == Steps(("o", "\n\n😀", "o"), (0, 3, 4))
    assert step_segmenter(2)(broken, BYTES).ends == (3, 4)
    # ".\n\n" has ended the step; the line breaks after it share a token with the next step's emoji
    ids = BYTES.convert_tokens_to_ids(["ok", ".ĊĊ", "ĊĊðŁ", "ĺ", "Ģ", "o"])
    assert step_segmenter("\n\n")(ids, BYTES) == Steps(("ok.\n\n", "\n\n😀o"), (1, 5))
    # é is one token of two bytes by a merge; 😀 is three tokens: the cut at 2 moves to 3, the next one stays at 4
    assert cut("a😀bcd", 2) == Steps(("a😀", "bc", "d"), (3, 5, 6))
    junk = BYTES.convert_tokens_to_ids(["ÿÿ", "ÿÿ", ".ĊĊ", "ÿÿ", "ðŁ"])  # broken bytes are text like any other
    assert step_segmenter("\n\n")(junk, BYTES) == Steps(("����.\n\n", "���"), (2, 4))
    literal = encode(BYTES, "a\N{REPLACEMENT CHARACTER}b")  # the character that also marks broken bytes: three tokens
    assert step_segmenter(1)(literal, BYTES).ends == (0, 3, 4)
    run = encode(PIECES, "a\N{REPLACEMENT CHARACTER}😀b")  # ▁a, a run of three and four byte tokens, b
    assert step_segmenter(1)(run, PIECES).ends == (0, 3, 7, 8)
    slow = TOKENIZERS["slow_bytes"]  # its decode leaves broken characters out
    assert step_segmenter(1)(encode(slow, "a😀\n\nb"), slow) == Steps(("a", "😀", "\n", "\n", "b"), (0, 4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "texts", "ends"),
    [
        # tokens: ▁Step 1 <0A> <0A> St ep 2 </s>; the decode drops the first space
        ("Step1\n\nStep2</s>", ["Step1\n\n", "Step2</s>"], [3, 7]),
        # a later ▁ is a space that opens its step: ▁a <0A> <0A> ▁a
        ("a\n\n a", ["a\n\n", " a"], [2, 3]),
        (" a\n\na", [" a\n\n", "a"], [3, 4]),  # tokens: ▁ ▁a <0A> <0A> a: of two spaces one is left
        # line breaks and emoji share a run of byte tokens: ▁a <0A> <0A> <F0> <9F> <98> <80> <0A> <0A> b
        ("a\n\n😀\n\nb", ["a\n\n", "😀\n\n", "b"], [2, 8, 9]),
        ("a\r\n\r\na", ["a\r\n\r\n", "a"], [4, 5]),
    ],
)
@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_a_sentencepiece_tokenizer_keeps_the_spaces_of_steps(name, text, texts, ends):
    tokenizer = TOKENIZERS[name]
    assert cut(text, tokenizer=tokenizer) == Steps(tuple(texts), tuple(ends))


def test_word_level():
    # the decode knows no line break and joins words with spaces, and an unknown word is something to read
    steps = cut("Step 1 ### Step what ### [EOS]", ["###"], WORDS)
    assert steps == Steps(("Step 1 ###", " Step [UNK] ###"), (2, 5), 6)
    assert cut("### what ### 2", ["###"], WORDS) == Steps(("### [UNK] ###", " 2"), (2, 3))


def test_empty_completions_have_no_steps():
    for spec in ["\n\n", "re:x", "turn", 3, lambda text: [5]]:
        assert step_segmenter(spec)([], BYTES) == Steps((), ())
        assert step_segmenter(spec)([], BYTES, []) == Steps((), ())


def test_ids_that_decode_to_nothing():
    unknown = len(BYTES) + 7  # models pad their vocabulary, and a random one samples from the padding
    ids = [unknown, *encode(BYTES, "ok.\n\n"), unknown, *encode(BYTES, "ok"), unknown]
    assert step_segmenter("\n\n")(ids, BYTES) == Steps(("ok.\n\n", "ok"), (2, 5))
    assert step_segmenter("\n\n")([unknown, unknown], BYTES) == Steps(("",), (1,))
    ids = [len(WORDS) + 7, *encode(WORDS, "1 ### 2")]
    assert step_segmenter(["###"])(ids, WORDS) == Steps(("1 ###", " 2"), (2, 3))


def test_the_segmenter_follows_the_tokenizer_it_is_given():
    segmenter = step_segmenter("\n\n")
    for tokenizer in [BYTES, PIECES, BYTES]:
        ids = encode(tokenizer, "a\n\na")
        assert segmenter(ids, tokenizer).texts == ("a\n\n", "a")


# --- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text", "texts"),
    [
        (["\n\n", "\n"], "a\nb\n\nc", ["a\n", "b\n\n", "c"]),  # \n\n is one token
        (["\n", "\n\n###"], "a\n\n###b", ["a\n\n", "###b"]),  # the first to be complete; \n\n is one token
        (["x", "abxc"], "1abxc2", ["1abx", "c2"]),
        (["\r\n"], "a\nb\r\nc", ["a\n", "b\r\n", "c"]),  # a separator that was written on Windows
        ("\\n\\n", "a\n\nb", ["a\n\n", "b"]),  # as a shell passes it on
        ("###", "###a######b### ###", ["###a###", "###b###"]),
        ("\r", "a\rb\r\nc", ["a\r", "b\r\n", "c"]),  # asked for, it is a separator like any other
        ("###", "a###\n\nb", ["a###", "\n\nb"]),  # other line breaks are not part of it
        ("Step ", "Step 1 Step 2", ["Step 1 Step ", "2"]),
        ("###", "### ###a###b", ["### ###a###", "b"]),
        (["turn"], "a turn b", ["a turn", " b"]),
        (["."], "a.b.c...", ["a.", "b.", "c."]),
        (EOS, f"a{EOS}b{EOS}", [f"a{EOS}", f"b{EOS}"]),
        (r"re:[.!]\s+", "a. b!  c", ["a. ", "b!  ", "c"]),
        (r"re:(?=Step \d)", "Step 1: a Step 2: b", ["Step 1: a ", "Step 2: b"]),
        (re.compile("X", re.IGNORECASE), "axbXc", ["ax", "bX", "c"]),
        (r"re:\n\n", "a\r\n\r\nb", ["a\r\n\r\nb"]),  # a regex is used as it is
        (lambda text: [1, 3], "abcd", ["a", "bc", "d"]),
        (lambda text: [len(text)], "abcd", ["abcd"]),
        (lambda text: (), "abcd", ["abcd"]),
        (lambda text: [1, 2, 3], "a  b", ["a", "  b"]),  # a step of spaces only is none
        ("tokens:2", "abcde", ["ab", "cd", "e"]),
        (2, f"abcd{EOS}", ["ab", "cd"]),
        (1, "abc", ["a", "b", "c"]),
        (100, "abc", ["abc"]),
        ("turn", "abc", ["abc"]),
    ],
)
def test_every_rule_cuts_a_text_into_its_steps(spec, text, texts):
    steps = cut(text, spec)
    assert list(steps.texts) == texts
    check_partition(steps, encode(BYTES, text), BYTES)


@pytest.mark.parametrize(
    ("spec", "mask", "texts"),
    [
        # model: a.\n\nb  tool: X\n\nY  model: c\n\nd (every character but .\n\n and \n\n is a token)
        ("\n\n", None, ["a.\n\n", "bX\n\n", "Yc\n\n", "d"]),
        ("\n\n", "111000111", ["a.\n\n", "bX\n\nYc\n\n", "d"]),  # the tool's line breaks end nothing
        ("\n\n", "110000111", ["a.\n\nbX\n\nY", "c\n\n", "d"]),  # a tool's result follows the step that asked for it
        ("\n\n", "111000011", ["a.\n\n", "bX\n\nYc\n\n", "d"]),
        ("turn", "111000111", ["a.\n\nbX\n\nY", "c\n\nd"]),
        ("turn", "111000000", ["a.\n\nbX\n\nYc\n\nd"]),
        ("turn", "100110011", ["a.\n\nb", "X\n\nYc", "\n\nd"]),
        ("turn", "001110011", ["a.\n\nbX\n\nYc", "\n\nd"]),  # what comes before the model's first token is in its turn
        ("turn", "000000000", ["a.\n\nbX\n\nYc\n\nd"]),
        ("\n\n", "000010001", ["a.\n\nbX\n\nYc\n\nd"]),  # the model wrote nothing to read before its line breaks
        (2, "111000111", ["a.\n\n", "bX\n\nYc", "\n\nd"]),
        (3, "111000111", ["a.\n\nbX\n\nY", "c\n\nd"]),
    ],
)
def test_tool_results(spec, mask, texts):
    tool_mask = None if mask is None else [int(entry) for entry in mask]
    ids = encode(BYTES, "a.\n\nbX\n\nYc\n\nd")
    assert len(ids) == 9
    assert list(step_segmenter(spec)(ids, BYTES, tool_mask).texts) == texts
    ids = encode(BYTES, f"aX{EOS}")
    assert step_segmenter("turn")(ids, BYTES, [1, 0, 1]).ends == (1, 2)  # a turn of EOS is a turn
    assert step_segmenter(1)(ids, BYTES, [1, 0, 1]) == Steps(("aX",), (1,), 2)


def test_one_step_frac():
    one, two, none = Steps(("a",), (0,)), Steps(("a", "b"), (0, 1)), Steps((), ())
    assert one_step_frac([one, two, none, one, one]) == 0.75  # 3 of 4; the empty one says nothing
    assert one_step_frac([none]) == one_step_frac([]) == 0.0


def test_the_factory_returns_what_it_built():
    segmenter = step_segmenter("turn")
    assert isinstance(segmenter, StepSegmenter)
    assert step_segmenter(segmenter) is segmenter
    assert repr(segmenter) == "StepSegmenter('turn')"
    assert step_segmenter(str.splitlines).name == "splitlines"


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "step_separator: got an empty separator; expected at least one character. Examples:"),
        ([], "got an empty list"),
        (["\n", 3], "got 3 in a list; expected strings"),
        (["re:x"], "got 're:x' in a list; expected plain separators. Use one regex"),
        ("re:(", r"got the regex '(' (missing ), unterminated subpattern at position 0)"),
        (r"re:\n*", r"got the regex '\\n*', which matches the empty string"),
        (re.compile(b"a"), "got a regex of bytes, b'a'"),
        (0, "got an interval of 0 tokens; expected an integer of at least 1"),
        ("tokens:1.5", "got an interval of '1.5' tokens"),
        ("token:64", "Did you mean 'tokens'? To use it as a separator, put it in a list: ['token:64']."),
        ("turn:3", "Did you mean 'turn'?"),
        ("xyzzy", "expected a separator, 're:<pattern>', 'tokens:<n>', 'sentence' or 'turn'. To use"),
        (None, "got None; expected a string, a list of strings, a regex, an integer or a function"),
        (True, "got True"),
    ],
)
def test_errors_of_a_spec(spec, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        step_segmenter(spec)
    assert error.value.field == "step_separator"
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"^step_segmenter: "):
        step_segmenter(spec, field="step_segmenter")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([2, 1], "got 1 after 2 at position 1 of what ends returned for a text of 4 characters"),
        ([0, 2], "got 0 after 0"),
        ([2, 5], "got 5 after 2"),
        ([1.0], "got 1.0 at position 0"),
        ([True], "got True at position 0"),
        (None, "got NoneType from ends"),
    ],
)
def test_errors_of_a_function(offsets, message):
    def ends(text):
        return offsets

    with pytest.raises(InputError, match=re.escape(f"step_separator: {message}")):
        cut("abcd", ends)


def test_errors_of_a_tool_mask():
    with pytest.raises(InputError, match="tool_mask: got 2 entries for 3 completion tokens; expected one entry per"):
        cut("abc", "turn", tool_mask=[1, 0])
    with pytest.raises(InputError, match="tool_mask: got 2; expected 0 or 1"):
        cut("abc", "turn", tool_mask=[1, 2, 0])


# --- properties ---------------------------------------------------------------------------------------------------

CHARACTERS = st.one_of(st.characters(codec="utf-8"), st.sampled_from("\n\n\n\r .aokSé日😀👩‍🚀e\u0301\u200b\ufffd▁#"))
TEXTS = st.lists(CHARACTERS, max_size=40).map("".join)
SPECS = st.sampled_from(["\n\n", ["\n\n", "\n", " "], "###", r"re:[.\n]+", "re:(?=o)", "sentence", 1, 3, "turn"])


def random_ids(tokenizer):
    """Any sequence of tokens, broken UTF-8 and ids outside the vocabulary included."""
    highest = len(tokenizer) + 1 if tokenizer.is_fast else len(tokenizer) - 1
    return st.lists(st.integers(0, highest), min_size=1, max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_random_tokens_are_partitioned(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer))
    mask = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    check_partition(step_segmenter(data.draw(SPECS))(ids, tokenizer, mask), ids, tokenizer)


@given(
    stretches=st.lists(
        st.text(alphabet="aoké日😀 .", min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=6
    ),
    breaks=st.lists(st.sampled_from(["\n\n", "\r\n\r\n"]), min_size=7, max_size=7),
    leading=st.booleans(),
    trailing=st.sampled_from(["", EOS, f" {EOS}<|pad|>"]),
    closing=st.sampled_from(["", EOS, f"\n\n{EOS}", f" {EOS}<|pad|>"]),
)
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_steps_are_what_was_joined(tokenizer, stretches, breaks, leading, trailing, closing):
    expected = [stretch + br for stretch, br in zip(stretches, breaks, strict=False)]
    if closing:
        closing = closing if expected[-1].endswith("\n\n") and tokenizer is BYTES else EOS
    else:
        expected[-1] = stretches[-1] + trailing
    expected[0] = (breaks[-1] if leading else "") + expected[0]
    if tokenizer is PIECES:
        expected = [text.replace(EOS, "</s>").replace("<|pad|>", "") for text in expected]
        closing = closing.replace(EOS, "</s>")
    steps = cut("".join(expected) + closing, "\n\n", tokenizer)
    assert list(steps.texts) == expected
    assert (steps.closing is not None) == bool(closing)


@pytest.mark.parametrize(
    ("tokenizer", "spec", "tokens", "others"),
    [
        (BYTES, "tokens:3", ["ok", "o", "ðŁ"], (["o"], ["ĺ", "Ģ"])),  # a character begins before the boundary
        (BYTES, "\n\n", ["ok", "ĊĊðŁ"], (["o"], ["ĺ", "Ģ"])),  # a token of line breaks and of its first bytes
        (BYTES, "\n", ["ok", "č"], (["o"], ["Ċ"])),  # half of \r\n
        (PIECES, "\n", ["▁a", "<0x0A>"], (["St"], ["<0xF0>"])),  # one run of bytes, and not UTF-8
        (PIECES, "\n", ["▁a", "<0x0A>"], (["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"], ["<0xF0>", "<0x9F>"])),
    ],
)
def test_later_tokens_do_not_move_the_end_of_a_step(tokenizer, spec, tokens, others):
    segmenter = step_segmenter(spec)
    ends = []
    for more in others:
        ids = tokenizer.convert_tokens_to_ids([*tokens, *more, *("ok" if tokenizer is BYTES else "S1")])
        ends.append({end for end in segmenter(ids, tokenizer).ends if end < len(tokens)})
    assert ends[0] == ends[1]
    assert bool(ends[0]) == (tokenizer is PIECES)


def pieces_of(name):
    """Tokens that meet at a boundary: line breaks, parts of characters, both in one, and any other."""
    tokenizer = TOKENIZERS[name]
    ids = range(len(tokenizer)) if name != "slow_bytes" else range(259)
    spelled = [i for i in ids if re.search("[ĊčðŁ\n\r#.!?]|<0x(0A|0D|F0|9F|98|80)>", decode_both(tokenizer, i))]
    return st.sampled_from([*spelled, *ids[:3]]) | st.sampled_from(ids)


def decode_both(tokenizer, token_id):
    return str(tokenizer.convert_ids_to_tokens([token_id])[0]) + decode(tokenizer, [token_id])


@pytest.mark.parametrize(
    "spec", ["\n", "\n\n", ["\n", "#\n"], "é", "\r", "sentence", "tokens:1", "tokens:3", "turn"], ids=repr
)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=max(30, settings.default.max_examples // 2))  # of each of many pairs
@given(data=st.data())
def test_the_tokens_before_a_step_determine_where_it_begins(name, spec, data):
    tokenizer, segmenter = TOKENIZERS[name], step_segmenter(spec)
    assert segmenter.rule.by_prefix
    tokens = st.lists(pieces_of(name), min_size=1, max_size=12)
    ids, one, other = data.draw(tokens), data.draw(tokens), data.draw(tokens)
    mask = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    found = []
    for more in (one, other):
        steps = segmenter([*ids, *more], tokenizer, mask and [*mask, *[1] * len(more)])
        kept = [end for end in steps.ends if end < len(ids)]
        found.append((kept, steps.texts[: len(kept)]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("spec", "looks_ahead"),
    [
        ("re:\n\n", False),
        (r"re:\n+", True),  # a further line break moves the end
        (r"re:(?=Step )", True),
        (lambda text: [i + 1 for i, char in enumerate(text) if char == "\n"], False),
        (lambda text: [len(text) // 2], True),
        ("\n", False),
    ],
)
def test_rules_that_look_ahead_are_found_out(spec, looks_ahead):
    ids = encode(PIECES, "a=1\n\nStep b=2\n\nStep c=3")
    assert step_segmenter(spec).looks_ahead(ids, PIECES) == looks_ahead


def test_looking_ahead_is_said_once_for_each_of_what_it_biases(caplog):
    segmenter = step_segmenter(r"re:\n+")
    rows = [encode(PIECES, text) for text in ("a=1", "a=1\n\nStep b=2")]
    for biased in ("forks", "forks", "step_baseline='to_go'"):
        segmenter.warn_of_looking_ahead(biased, rows, PIECES, [[1] * (len(ids) + 1) for ids in rows])
    assert caplog.text.count("depends on the text after it, which slightly biases forks (completion 1 of") == 1
    assert caplog.text.count("slightly biases step_baseline='to_go' (completion 1 of the batch). Use a rule that") == 1


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_text_and_cuts_are_those_of_decoding_every_prefix(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=60))
    alignment = Aligner(tokenizer).align(ids)
    if "\ufffd" in decode(tokenizer, ids) and name in ("sentencepiece", "metaspace"):
        return  # their decode makes each byte of a run a U+FFFD where one of them is broken
    assert alignment.text == decode(tokenizer, ids)
    whole = {i for i in range(len(ids)) if not decode(tokenizer, ids[: i + 1]).endswith("\ufffd")}
    for token, offset in zip(alignment.tokens, alignment.offsets, strict=True):
        assert decode(tokenizer, ids[: token + 1]) == alignment.text[:offset]
    assert alignment.tokens[-1] == len(ids) - 1
    if name in KINDS:
        assert whole <= {*alignment.tokens}


class Decodes:
    """A tokenizer of characters whose decode is a function of their text."""

    all_special_ids = ()

    def __init__(self, changed):
        self.changed = changed

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        return self.changed("".join(map(chr, ids)))

    def convert_ids_to_tokens(self, ids):
        return [chr(i) for i in ids]


def test_a_decode_that_cannot_be_followed_is_cut_up_to_there():
    ids, backwards = [ord(char) for char in "ab\n\ncd"], Decodes(lambda text: text[::-1])
    assert step_segmenter("\n\n")(ids, backwards).ends == (5,)
    assert step_segmenter(1)(ids, backwards).ends == (0, 5)
    changes = Decodes(lambda text: text if len(text) < 2 * CONTEXT + 2 else text[:8] + "\n\nb" * 40)
    ids = [ord(char) for char in "a\n\nb\n\nc" + "d" * 40]
    assert step_segmenter("\n\n")(ids, changes).ends == (2, 5, 47 - 1)


# --- cost ---------------------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **keywords):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **keywords)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_long_completions_of_text_are_decoded_once(name):
    counting = Counting(TOKENIZERS[name])
    ids = encode(counting.tokenizer, "Step 1+1=2 ok.\n\n" * 3000)[:30_000]
    steps = step_segmenter("\n\n")(ids, counting)
    assert len(ids) == 30_000
    assert len(steps.ends) > 1500
    assert counting.decoded < 30_000 + 100  # once as a whole, three tokens per entry of the vocabulary


@pytest.mark.parametrize("unit", [[0xF0, 0x9F, 0x98, 0x80], [0xFF], [0x98, 0x41, 0xE6], [0x0A, 0xF0, 0x9F]])
def test_long_completions_of_broken_bytes_are_decoded_in_windows(unit):
    byte_ids = {byte: i for i, byte in enumerate(ALPHABET)}
    counting = Counting(BYTES)
    ids = [byte_ids[byte] for byte in unit] * (3000 // len(unit))
    check_partition(step_segmenter("\n")(ids, counting), ids, BYTES)
    assert counting.decoded < (2 * CONTEXT + 3) * len(ids)
