r"""The text of a completion or a prompt, whichever form TRL hands over, and the places in it where an answer stands.

Plain data give strings; conversational data give lists of messages, whose content is a string or a list of parts.
Every reward here reads them through these functions, so that rewards score both alike and look for an answer in the
same places: behind the last `</think>`, in the last `<answer>...</answer>`, in the last `\boxed{...}`.
All of it takes time linear in the length of the text, whatever a policy writes.
"""

import hashlib
import json
import re
from typing import Any

_BLANKS = re.compile(r"\s*")
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox) +([^\s\\{}$]+)|\\[{}\\]|[{}]")


def completion_text(completion: Any) -> str:
    """A completion (text, or messages) as one string: the text of the last assistant message, else of the last
    message. `None` content (a pure tool call) is the empty string."""
    if isinstance(completion, str):
        return completion
    messages = list(completion)
    own = [message for message in messages if message.get("role") == "assistant"] or messages
    return _content_text(own[-1].get("content")) if own else ""


def prompt_text(prompt: Any) -> str:
    """The prompt as one string: messages are separated by empty lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_content_text(message.get("content")) for message in prompt)


def prompt_key(prompt: Any) -> str:
    """A prompt's identity by content: 16 hexadecimal digits, the same in every run and process.

    A copy of the prompt in a table has the same key: Arrow gives every message the fields of all others, as `None`,
    and TRL makes parts of a text. Images do not count.

    Args:
        prompt (`str` or list of messages): As in the dataset.

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
        prompt = [{**m, "content": _content_text(m.get("content"))} if isinstance(m, dict) else m for m in prompt]
    text = prompt if isinstance(prompt, str) else json.dumps(_without_nulls(prompt), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def after_thinking(text: str) -> str:
    """The text behind the last `</think>`, up to an unclosed `<think>`; the whole text without either.

    Example:

    ```python
    >>> after_thinking("<think>3?</think> 4"), after_thinking("<think>It may be 3"), after_thinking("4")
    (' 4', '', '4')

    ```
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def last_tagged(text: str) -> str | None:
    """The content of the last closed `<answer>`; `None` without one.

    Example:

    ```python
    >>> last_tagged("<answer>3</answer> no, <answer>4</answer>, as </answer> shows")
    '4'

    ```
    """
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.find("</answer>", start)].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed, non-empty `\boxed{...}`; `\fbox{...}` and `\boxed 5` count.

    `None` without one.

    Example:

    ```python
    >>> last_boxed(r"First \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'

    ```
    """
    opened: list[int | None] = []  # where the content of a box starts; None for a plain brace
    found = None
    for token in _BOX_TOKEN.finditer(text):
        if token[1] is not None:
            found = slice(*token.span(1))
        elif len(token[0]) > 2:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None and _BLANKS.match(text, start).end() < token.start():  # pyright: ignore[reportOptionalMemberAccess]
                found = slice(start, token.start())
    return None if found is None else text[found].strip()


def marked_answer(text: str) -> str | None:
    r"""The content of the last `<answer>` tag, else of the last `\boxed{}`; `None` where there is neither."""
    tagged = last_tagged(text)
    return last_boxed(text) if tagged is None else tagged


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
