"""Characters that cannot be seen, or that turn the text around them, made visible."""

import re

# Control characters but tab and line break, direction marks, line separators, byte order mark, surrogates, ...
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""
    The text with a code in the place of every character that cannot be seen.

    Example:

    ```python
    >>> visible("a\x1b[31mb\u202e")
    'a⟨U+001B⟩[31mb⟨U+202E⟩'

    ```
    """
    return _UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", str(text))
