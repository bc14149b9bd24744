"""The text of a completion or a prompt, whichever form TRL hands over.

Plain data give strings; conversational data give lists of messages, whose content is a string or a list of parts.
Every reward here reads them through these two functions, so that a reward scores both alike.
"""

from typing import Any


def completion_text(completion: Any) -> str:
    """What the model wrote, as one string.

    Args:
        completion (`str` or `list[dict]`): A string, or messages: the text of the last assistant message counts (of the
            last message, where none is the assistant's). `None` content (a pure tool call) is the empty string.

    Returns:
        `str`.
    """
    if isinstance(completion, str):
        return completion
    messages = list(completion)
    own = [message for message in messages if message.get("role") == "assistant"] or messages
    return _content_text(own[-1].get("content")) if own else ""


def prompt_text(prompt: Any) -> str:
    """What the model was asked: a string as it is, of messages the text of each, separated by empty lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_content_text(message.get("content")) for message in prompt)


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
