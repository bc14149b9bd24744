"""Data inside a page: JSON that cannot end the script element it stands in, whatever a completion holds."""

import json
import re
from typing import Any

# `<` opens tags and comments; direction marks would turn the source around; surrogates have no UTF-8; and so on.
_ESCAPED = re.compile("[<>&\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]")


def embedded(value: Any) -> str:
    r"""
    A value as JSON, encodable as UTF-8, that may stand in a `<script type="application/json">` element.

    Example:

    ```python
    >>> print(embedded({"text": "</script>"}))
    {"text":"\u003c/script\u003e"}

    ```
    """
    plain = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", plain)
