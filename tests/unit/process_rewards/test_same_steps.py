"""One segmenter and one default: whatever cuts completions cuts the same steps. And sentences, by the text before."""

import inspect
import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards import ImplicitRewardScorer, TokenClassificationScorer, label_steps, train_prm
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR, step_segmenter
from trl_drgrpo.process_rewards.steps.segmenter import configured_segmenter, joining_text, segmenter_without_turns
from trl_drgrpo.search.problem import SearchSettings

EOS = "<|im_end|>"
SOLUTIONS = [
    # As models write them: paragraphs, some behind more than one empty line, an answer at the end.
    "Natalia sold 48 clips in April.\n\nIn May she sold half as many: 48 / 2 = 24.\n\n\nIn all 48 + 24 = 72.\n\n"
    "The answer is \\boxed{72}.",
    "Let's go step by step.\n\n1. A pen costs $2.50, so 3 pens cost $7.50.\n\n2. He pays $10.00.\n   He gets $2.50 "
    "back.\n\n\n\n**Answer:** $2.50\n\n",
    "Step 1: We have $x^2 - 5x + 6 = 0$.\r\n\r\nStep 2: So $(x-2)(x-3) = 0$.\r\n\r\n\r\nStep 3: $x = 2$ or $x = 3$.",
    "We can count it in Python:\n\n```python\ntotal = 0\n\nfor i in range(10):\n    total += i\n```\n\nIt prints 45."
    "\n\nSo the sum is 45.\n",
    "Первый шаг: 2 + 2 = 4.\n\n第二步：4 × 4 = 16。\n\nTroisième étape : √16 = 4 😀.\n\n",
    "\n\nThe text begins with an empty line.\n\n \n\nWhite space is no step.\n\n\t\n",
    "One line and no separator",
    "a\n\n\n\nb",
    " ",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    """Words that begin with their space, and marks that take the line breaks behind them along, as in Qwen's."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    backend.train_from_iterator([*SOLUTIONS, *("".join(steps) for steps in SENTENCES)], trainer)
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=EOS)


SEPARATORS = ["\n\n", "\n", ["\n\n", "```"], "re:\\n\\n", "sentence"]


def steps_of_a_run(text, separator, tokenizer):
    """As a trainer cuts a completion; what closes it is no step."""
    spec = [separator] if isinstance(separator, str) else separator
    return configured_segmenter(spec)(tokenizer.encode(text + EOS), tokenizer)


def labeled(text, tokenizer, **options):
    def generate(prefixes, k):
        return [[text] * k for _ in prefixes]

    def verifier(completions, **columns):
        return [1.0] * len(completions)

    rows = list(label_steps([{"prompt": "p"}], generate, verifier, tokenizer, rollouts=1, **options))
    return rows[0]["steps"] if rows else []


def bare(text, separator):
    """A step's text for comparisons of what was cut: without the separator and EOS behind it."""
    return segmenter_without_turns(separator).rule.without_end(text.removesuffix(EOS)).rstrip("\r\n")


@pytest.mark.parametrize("separator", SEPARATORS, ids=repr)
@pytest.mark.parametrize("text", SOLUTIONS, ids=lambda text: repr(text[:12]))
def test_labels_scores_and_runs_have_the_same_steps(text, separator, tokenizer):
    of_run = [bare(step, separator) for step in steps_of_a_run(text, separator, tokenizer).texts]
    of_run = of_run if text.strip() else []  # a completion without text has nothing to label
    assert [bare(step, separator) for step in labeled(text, tokenizer, separator=separator)] == of_run
    of_text = [bare(step, separator) for step in segmenter_without_turns(separator).of_text(text)]
    # A text shows no tokens, so a step may end inside one: a line break behind a separator belongs to either step.
    assert [step.lstrip("\r\n") for step in of_text if text.strip()] == [step.lstrip("\r\n") for step in of_run]


def test_empty_lines_are_no_steps(tokenizer):
    assert labeled(SOLUTIONS[1], tokenizer) == [
        "Let's go step by step.",
        "1. A pen costs $2.50, so 3 pens cost $7.50.",
        "2. He pays $10.00.\n   He gets $2.50 back.",
        "**Answer:** $2.50",
    ]
    assert len(labeled(SOLUTIONS[0], tokenizer, separator="\n")) == 4
    assert labeled(SOLUTIONS[2], tokenizer)[0] == "Step 1: We have $x^2 - 5x + 6 = 0$."  # with its \r\n


def test_labels_of_a_rollout_begin_where_the_step_ends(tokenizer):
    """The tokens of a prefix are those of the completion up to the step's end, separators that share a token with
    the next step included."""
    prefixes = []

    def generate(given, k):
        prefixes.extend(given)
        return [[SOLUTIONS[3]] * k for _ in given]

    list(label_steps([{"prompt": "p"}], generate, lambda completions, **columns: [1.0] * len(completions), tokenizer))
    ids, prompt = tokenizer.encode(SOLUTIONS[3]), tokenizer.encode("p")
    ends = step_segmenter(DEFAULT_SEPARATOR)(ids, tokenizer).ends
    assert sorted(prefixes[1:], key=len) == [[*prompt, *ids[: end + 1]] for end in ends[:-1]]


def test_there_is_one_default():
    defaults = [
        DrGRPOConfig("out", use_cpu=True, bf16=False).separators(has_turns=False),
        inspect.signature(label_steps).parameters["separator"].default,
        inspect.signature(train_prm).parameters["step_separator"].default,
        SearchSettings.step_separator,
        ImplicitRewardScorer.settings["step_separator"],
    ]
    assert defaults == [["\n\n"], *["\n\n"] * 4]
    assert TokenClassificationScorer.settings["step_separator"] is None  # the model's own


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("\\n", "\n"),
        ("\n\n", "\n\n"),
        (["\n"], "\n"),
        ("", ""),
        (" ки\n", " ки\n"),
        ("sentence", None),
        ("re:x", None),
    ],
)
def test_the_text_behind_given_steps_is_a_separator(separator, expected):
    if expected is None:
        with pytest.raises(InputError, match="step_separator: got .*; expected the text behind every step"):
            joining_text(separator)
    else:
        assert joining_text(separator) == expected


@pytest.mark.parametrize(
    "command",
    [
        "search --model trl_drgrpo:demo --dataset_name trl_drgrpo:list_sum --strategy beam --budget_tokens 600 "
        "--reward_funcs list_sum_reward --output {} --step_separator turn",
        "label-steps --model trl_drgrpo:demo --data trl_drgrpo:list_sum --reward list_sum_reward --output {} "
        "--step_separator turn",
        "train-prm --model trl_drgrpo:demo --data {} --output_dir {} --step_separator turn",
    ],
)
def test_turns_are_of_environments(command, tmp_path, capsys):
    assert main(command.format(*[tmp_path / "file.jsonl"] * 2).split()) == 2
    assert "step_separator: got 'turn'; expected" in capsys.readouterr().err


# Sentences -----------------------------------------------------------------------------------------------------------

SENTENCES = [
    ["She buys three apples.", " Then she eats one.", " How many are left?", " Two!"],
    ["The price is 3.50 dollars.", " So two cost 7.00 dollars."],
    ["So 3 + 4 = 7. Then 7 * 2 = 14, and we are done.", " Good."],  # behind a digit it may be a decimal point
    ["So 3 + 4 = 7.\n", "Then 7 * 2 = 14."],  # a line ends anyway
    ["1. First we add.\n", "2. Then we stop.\r\n", "Done."],
    ["Solve $x = 5$.", " Hence \\boxed{5}.", " It is **5**.", " It is (five).", " Yes."],
    ["For n! we use (n+1)! of it.", " Mr. Smith agrees, e.g. here, vs. there.", " Done."],
    ["Take $\\left. x \\right. y$ here.", " Done."],
    ["A, B, ... and so on.", " Done."],
    ["```\n", "x = math.sqrt(4).real\n", "```\n", "The root is two.", " Done."],
    ["no mark at all"],
]


@pytest.mark.parametrize("steps", SENTENCES, ids=lambda steps: steps[0][:20])
def test_sentences_end_before_the_next_word(steps, tokenizer):
    text = "".join(steps)
    assert [step.removesuffix(EOS) for step in steps_of_a_run(text, "sentence", tokenizer).texts] == steps
    # A text shows no tokens: a line break behind the mark belongs to the next step.
    assert [step.strip("\r\n") for step in step_segmenter("sentence").of_text(text)] == [
        step.strip("\r\n") for step in steps
    ]


def test_marks_without_spaces_end_sentences():
    assert step_segmenter("sentence").of_text("答案是三。所以对！完了？好") == (
        "答案是三。",
        "所以对！",
        "完了？",
        "好",
    )


def test_a_separator_with_a_space_takes_the_next_word_along_and_a_sentence_does_not(tokenizer):
    text = "".join(SENTENCES[0])
    assert steps_of_a_run(text, ". ", tokenizer).texts[0] == "She buys three apples. Then"
    assert steps_of_a_run(text, "sentence", tokenizer).texts[0] == "She buys three apples."


@pytest.mark.parametrize("steps", SENTENCES, ids=lambda steps: steps[0][:20])
def test_later_text_does_not_move_the_end_of_a_sentence(steps, tokenizer):
    ids, segmenter = tokenizer.encode("".join(steps)), step_segmenter("sentence")
    ends = segmenter(ids, tokenizer).ends
    for cut in range(1, len(ids)):
        for following in (" Then", "5", ".", "\n", "a"):
            seen = segmenter([*ids[:cut], *tokenizer.encode(following)], tokenizer).ends
            assert [end for end in seen if end < cut - 1] == [end for end in ends if end < cut - 1]


def test_a_recipe_labels_as_it_trains(tmp_path, capsys):
    recipe = {
        "model_name_or_path": "trl_drgrpo:demo",
        "dataset_name": "trl_drgrpo:list_sum?size=3&test_size=0",
        "reward_funcs": ["list_sum_reward"],
        "step_separator": ["\n"],
        "max_completion_length": 32,
        "system_prompt": "Add.",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    output = tmp_path / "labels.jsonl"
    call = ["label-steps", "--config", str(tmp_path / "recipe.yaml"), "--rollouts", "1", "--output"]
    assert main([*call, str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["prompt"][0] == {"role": "system", "content": "Add."} for row in rows)
    assert max(len(row["steps"]) for row in rows) > 1
    other = tmp_path / "other.jsonl"
    assert main([*call, str(other), "--system_prompt", "Sum.", "--step_separator", "tokens:4", "--limit", "2"]) == 2
    assert "--limit" in capsys.readouterr().err
    assert main([*call, str(other), "--system_prompt", "Sum.", "--step_separator", "tokens:4"]) == 0
    rows = [json.loads(line) for line in other.read_text().splitlines()]
    assert {row["prompt"][0]["content"] for row in rows} == {"Sum."}
    assert main([*call, str(other)]) == 2  # the file of another call
    assert "other.jsonl, written with" in capsys.readouterr().err
