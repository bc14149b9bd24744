r"""From the problems of a dataset to the prompts that a model sees: a template of plain text, or a system message.

A base model is prompted with plain text, and with which text matters (arXiv 2503.20783, section 2). `r1` and
`qwen_math` are the two templates of that paper's official code, letter by letter; without a template the problem
itself is the prompt, its third choice. An instruction-tuned model gets messages instead: its own chat template makes
text of them, and `system_prompt` puts one message in front (a template of one's own then is the user's message).
"""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from trl_drgrpo.common.errors import InputError, did_you_mean

SLOT = "{prompt}"
_SLOTS = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([^{}]+)\}")
# A name in braces by itself. Behind a letter, a brace, `^` or `_` it is LaTeX: `\boxed{x}`, `\frac{a}{b}`, `x^{n}`.
_NAMES = re.compile(r"(?<![\w\\^{}\]])\{([A-Za-z_]\w*)\}(?!\})")
TEMPLATES = {
    "qwen_math": (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "r1": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {prompt}\nAssistant: <think>"
    ),
}


def template_text(template: str) -> str:
    r"""
    The text behind a template's name (`"qwen_math"`, `"r1"`), or the text itself, which must contain `{prompt}`.

    The name of any other column in braces stands for its value (of a list, one value per line). Other braces, those of
    `\boxed{}` for example, are text; doubled braces around a column's name are that name in braces.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if isinstance(template, str) and SLOT in template:
        return template
    remedy = did_you_mean(template, TEMPLATES, "For example `Question: {prompt} Answer:`.", form="{!r}")
    expected = f"one of {', '.join(TEMPLATES)}, or a template with {SLOT} in it"
    raise InputError("prompt_template", repr(template), expected, remedy)


def check_prompting(prompt_template: str | None, system_prompt: str | None) -> None:
    """Checks the two options of [`prompted`] before any data is read."""
    if prompt_template is None:
        return
    template_text(prompt_template)
    if system_prompt is not None and prompt_template in TEMPLATES:
        got = f"one together with prompt_template {prompt_template!r}"
        expected = "only one of them: that template is a whole conversation as plain text"
        raise InputError("system_prompt", got, expected, "Remove it for a base model, the template for a chat model.")


def prompted(dataset: Any, prompt_template: str | None = None, system_prompt: str | None = None) -> Any:
    """
    A split with the prompts that the model is to see; the same one if neither option is given.

    `prompt_template` ([`template_text`]) needs text prompts. `system_prompt` makes each prompt a conversation that
    starts with this message, and needs prompts without a system message of their own.
    """
    check_prompting(prompt_template, system_prompt)
    if prompt_template is not None:
        _check_slots(dataset, template_text(prompt_template))
        _try_on_first_row(dataset, _from_template, template_text(prompt_template))
        dataset = dataset.map(_from_template, fn_kwargs={"text": template_text(prompt_template)})
    if system_prompt is not None:
        _try_on_first_row(dataset, _with_system_prompt, system_prompt)
        dataset = dataset.map(_with_system_prompt, fn_kwargs={"system_prompt": system_prompt})
    return dataset


def _check_slots(dataset: Any, text: str) -> None:
    """Names in braces that are no column: a slip of the pen would stand in every prompt as it is."""
    columns = list(dataset.column_names or next(iter(dataset), {}))
    for name in _NAMES.findall(text):
        if name not in columns:
            near = get_close_matches(name, columns, n=1, cutoff=0.6)
            remedy = f"Did you mean {{{near[0]}}}? " if near else ""
            remedy += f"If it is meant as text, double the braces: {{{{{name}}}}}."
            got = f"the slot {{{name}}}"
            raise InputError("prompt_template", got, f"one of the columns {', '.join(columns)}", remedy.strip())


def _try_on_first_row(dataset: Any, apply: Callable[[Mapping[str, Any], str], Any], text: str) -> None:
    """An error of the first row now, in one line: `map` would wrap it, and a stream would raise it in the run."""
    for row in dataset:
        apply(row, text)
        break


def _from_template(row: Mapping[str, Any], text: str) -> dict[str, str]:
    if not isinstance(row["prompt"], str):
        remedy = "Remove prompt_template: the tokenizer's chat template formats messages."
        raise InputError("prompt_template", "a template for prompts that are messages", "plain-text prompts", remedy)
    return {"prompt": _SLOTS.sub(lambda slot: _value(row, slot), text)}


def _value(row: Mapping[str, Any], slot: re.Match) -> str:
    """Text for a slot: the column's value, or the slot's own text where there is no such column."""
    doubled, name = slot[1], slot[2]
    if doubled and doubled not in row:
        return f"{{{doubled}}}"
    value = row.get(doubled or name, slot[0])
    text = "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{{{text}}}" if doubled else text


def _with_system_prompt(row: Mapping[str, Any], system_prompt: str) -> dict[str, Any]:
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages and messages[0].get("role") == "system":
        expected = "prompts without a system message"
        remedy = "Remove system_prompt, or the message from the data."
        raise InputError("system_prompt", "one for prompts that begin with a system message", expected, remedy)
    return {"prompt": [{"role": "system", "content": system_prompt}, *messages]}
