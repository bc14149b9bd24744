"""The text of a completion and of a prompt, in both forms in which TRL passes them.

Prompts that are strings give completions that are strings. Prompts that are lists of messages give completions that
are lists of messages, usually of one, whose content is a string or a list of parts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Text = str | list[dict[str, Any]]  # of a prompt or a completion: plain, or messages


def completion_text(completion: Text) -> str:
    """Return a completion as one string: the text of the last assistant message, else of the last message.

    `None` content (a pure tool call) is the empty string.

    Args:
        completion (`str` or `list[dict]`): A completion as TRL passes it: a text, or messages.

    Example:

    ```python
    >>> completion_text("4"), completion_text([{"role": "assistant", "content": "4"}])
    ('4', '4')

    ```
    """
    if isinstance(completion, str):
        return completion
    last = {}
    for message in completion:
        # Behind the last turn of the assistant there may be results of tools.
        if message.get("role") == "assistant" or last.get("role") != "assistant":
            last = message
    return content_text(last.get("content"))


def one_line(text: str, longest: int) -> str:
    """Return a text on one line, cut to so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def end_on_one_line(text: str, longest: int) -> str:
    """Return the end of a text on one line: solved examples stand in front of what a prompt asks.

    Example:

    ```python
    >>> end_on_one_line("apple: food\\ntruck:", 20), end_on_one_line("apple: food\\ntruck:", 9)
    ('apple: food truck:', '...truck:')

    ```
    """
    text = " ".join(text.split())
    return text if len(text) <= longest else "..." + text[-(longest - 3) :]


def prompt_text(prompt: Text) -> str:
    """Return a prompt as one string, in which empty lines separate messages.

    Args:
        prompt (`str` or `list[dict]`): A prompt as TRL passes it: a text, or messages.

    Example:

    ```python
    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    'Be brief.\\n\\n2+2?'

    ```
    """
    if isinstance(prompt, str):
        return prompt
    # Without roles and special tokens: no chat template is known here.
    return "\n\n".join(content_text(message.get("content")) for message in prompt)


def are_messages(completions: Sequence[object]) -> bool:
    """Tell whether completions, of which there are some, are lists of messages."""
    return len(completions) > 0 and all(isinstance(completion, list) for completion in completions)


def in_other_form(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with completions and prompts in the form that they do not have.

    Messages become texts, texts become messages. Loggers are left out: nothing of this call is to be logged.
    """
    form = "text" if are_messages(kwargs["completions"]) else "messages"
    converted = {**kwargs, **in_form(kwargs, form)}
    for logger in ("log_metric", "log_extra"):
        converted.pop(logger, None)
    return converted


def in_form(kwargs: Mapping[str, Any], form: str) -> dict[str, list[Any]]:
    """Return the prompts and completions of a call as texts (`"text"`) or as messages (`"messages"`)."""
    converted = {}
    for key, role, text_of in (("prompts", "user", prompt_text), ("completions", "assistant", completion_text)):
        values = kwargs.get(key)
        if values is not None and form == "text":
            converted[key] = list(map(text_of, values))
        elif values is not None:
            converted[key] = [as_messages(value, role) for value in values]
    return converted


def as_messages(value: Text, role: str) -> list[dict[str, Any]]:
    """Return text as one message of that role; messages as they are."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value


def content_text(content: str | Sequence[object] | None) -> str:
    """Return the content of a message as one string: a string as it is, the texts of parts one after the other."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            text += part.get("text") or ""
    return text


def prompt_key(prompt: object) -> str:
    """Return a prompt's identity by content: 16 hexadecimal digits, the same in every run and process.

    A copy of the prompt in a table has the same key: Arrow gives every message the fields of all others, as `None`,
    and TRL makes parts of a text. Images do not count.

    Args:
        prompt (`str` or list of messages): The prompt as the dataset has it.

    Example:

    ```python
    >>> prompt_key("1+1?") == prompt_key("1+1?") != prompt_key([{"role": "user", "content": "1+1?"}])
    True
    >>> in_a_table = [{"content": [{"type": "text", "text": "1+1?"}], "name": None, "role": "user"}]
    >>> prompt_key(in_a_table) == prompt_key([{"role": "user", "content": "1+1?"}])
    True

    ```
    """
    if isinstance(prompt, list):
        messages = []
        for message in prompt:
            if isinstance(message, dict):
                message = {**message, "content": content_text(message.get("content"))}
            messages.append(message)
        prompt = messages
    text = prompt
    if not isinstance(text, str):
        text = json.dumps(_without_nulls(text), sort_keys=True, default=str)
    # A text may hold lone surrogates, which strict UTF-8 refuses.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _without_nulls(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
