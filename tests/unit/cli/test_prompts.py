"""Templates and system messages: what the model sees is what the paper's code and the options say."""

import pytest
from datasets import Dataset

from trl_drgrpo.cli.data import TEMPLATES, prompted, template_text
from trl_drgrpo.common.errors import InputError


@pytest.fixture
def problems():
    return Dataset.from_dict({"prompt": ["What is {1,2}?", "1+1="], "solution": ["{1,2}", "2"]})


def test_a_template_surrounds_the_problem_and_leaves_other_braces_alone(problems):
    first = prompted(problems, "qwen_math")[0]
    assert first == {
        "prompt": "<|im_start|>system\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<|im_end|>\n<|im_start|>user\nWhat is {1,2}?<|im_end|>\n<|im_start|>assistant\n",
        "solution": "{1,2}",
    }


def test_the_r1_template_opens_the_thinking(problems):
    prompt = prompted(problems, "r1")[1]["prompt"]
    assert prompt.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant ")
    assert prompt.endswith("\nUser: 1+1=\nAssistant: <think>")


def test_a_text_of_ones_own(problems):
    assert prompted(problems, "Q: {prompt}\nA:")["prompt"] == ["Q: What is {1,2}?\nA:", "Q: 1+1=\nA:"]


def test_a_problem_that_mentions_the_slot_is_not_filled_in_twice():
    dataset = Dataset.from_dict({"prompt": ["{prompt}{prompt}"]})
    assert prompted(dataset, "<{prompt}>")["prompt"] == ["<{prompt}{prompt}>"]


def test_a_system_prompt_makes_a_conversation(problems):
    system, user = prompted(problems, system_prompt="Be short.")[1]["prompt"]
    assert (system["role"], system["content"]) == ("system", "Be short.")
    assert (user["role"], user["content"]) == ("user", "1+1=")


def test_a_system_prompt_goes_in_front_of_messages():
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]]})
    assert [m["role"] for m in prompted(dataset, system_prompt="Be short.")[0]["prompt"]] == ["system", "user"]


def test_streams_are_mapped_as_they_come(problems):
    stream = prompted(problems.to_iterable_dataset(), "{prompt}!")
    assert [row["prompt"] for row in stream] == ["What is {1,2}?!", "1+1=!"]


def test_other_columns_have_their_slots_and_lists_their_lines():
    dataset = Dataset.from_dict({"prompt": ["Add."], "tests": [["assert f(1)", "assert f(2)"]], "level": [3]})
    template = "{prompt} Level {level}, {{unknown}}, \\boxed{x}, x^{n}, {1,2}.\n{tests}"
    prompt = prompted(dataset, template)[0]["prompt"]
    assert prompt == "Add. Level 3, {unknown}, \\boxed{x}, x^{n}, {1,2}.\nassert f(1)\nassert f(2)"
    assert prompted(dataset, "{prompt} {{level}}")[0]["prompt"] == "Add. {3}"


def test_a_slot_that_is_no_column_is_refused(problems):
    message = (
        r"^prompt_template: got the slot \{soluton\}; .* the columns prompt, solution. Did you mean \{solution\}\?"
    )
    for dataset in (problems, problems.to_iterable_dataset()):
        with pytest.raises(InputError, match=message):
            prompted(dataset, "{prompt} {soluton}")


def test_with_a_system_prompt_a_template_of_ones_own_is_the_users_message(problems):
    system, user = prompted(problems, "Q: {prompt}", "Be short.")[1]["prompt"]
    assert (system["content"], user["role"], user["content"]) == ("Be short.", "user", "Q: 1+1=")


def test_without_options_the_dataset_is_the_same_one(problems):
    assert prompted(problems) is problems


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "qwen_maths"}, "prompt_template: got 'qwen_maths'; .* Did you mean 'qwen_math'?"),
        ({"prompt_template": "no slot"}, "a template with {prompt} in it"),
        ({"prompt_template": "r1", "system_prompt": "x"}, "system_prompt: got one together with prompt_template 'r1'"),
    ],
)
def test_what_cannot_be_meant_is_refused(problems, options, message):
    with pytest.raises(InputError, match=message):
        prompted(problems, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "r1"}, "a template for prompts that are messages"),
        ({"system_prompt": "x"}, "one for prompts that begin with a system message"),
    ],
)
def test_messages_that_do_not_fit_are_refused(options, message):
    dataset = Dataset.from_dict({"prompt": [[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]]})
    with pytest.raises(InputError, match=message):
        prompted(dataset, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_has_one_slot(name):
    assert template_text(name).count("{prompt}") == 1
