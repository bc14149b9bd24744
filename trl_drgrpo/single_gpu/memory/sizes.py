"""Amounts of memory as people write them, and as they like to read them.

`24GB` on a graphics card means 24 GiB: that is what its driver reports, so GB and GiB (and a bare number) are the same
here, powers of 1024.
"""

import math
import re

from trl_drgrpo.common.errors import InputError, shortened

# Left free by default: the larger of a share of the device and an amount.
MARGIN_SHARE, MARGIN_BYTES = 0.05, int(0.7 * 2**30)

_POWERS = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_memory(text: str, field: str = "--memory") -> int:
    """Bytes of an amount such as `24GB`, `24 GiB`, `24g`, `16384MB` or `24` (gigabytes).

    Args:
        text (`str`): The amount.
        field (`str`): Name of the setting, for the error.

    Returns:
        `int`: Bytes, positive.

    Raises:
        `InputError`: No amount, or none above zero.

    Example:

    ```python
    >>> parse_memory("24GB") == parse_memory("24") == 24 * 2**30
    True

    ```
    """
    remedy = "Write the memory of one device; a number alone is in GB."
    return parse_amount(text, field, "an amount above zero, such as 24GB", remedy)


def parse_amount(text: str, field: str, expected: str, remedy: str) -> int:
    """Bytes of an amount above zero; else an error that says so in these words."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    amount = float(found[1]) * 1024 ** _POWERS[found[2]] if found else 0.0
    if amount < 1 or not math.isfinite(amount):
        raise InputError(field, shortened(text), expected, remedy)
    return int(amount)


def default_margin(memory: int) -> int:
    """Bytes to leave free on a device: 5% of it or 0.7 GB, whichever is more."""
    return max(int(MARGIN_SHARE * memory), MARGIN_BYTES)


def parse_margin(text: str | None, memory: int, field: str = "--margin") -> int:
    """Bytes to leave free on a device of `memory` bytes.

    Args:
        text (`str`, *optional*): An amount as [`parse_memory`] takes it, a share such as `8%`, or `0`. `None`:
            [`default_margin`].
        memory (`int`): Bytes of the device.
        field (`str`): Name of the setting, for the error.

    Raises:
        `InputError`: Neither of them, or a margin that leaves nothing.

    Example:

    ```python
    >>> parse_margin("10%", 20 * 2**30) == parse_margin("2GB", 20 * 2**30) == 2 * 2**30
    True

    ```
    """
    default = default_margin(memory)
    share = None if text is None else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if text is None:
        margin = default
    elif share:
        margin = int(float(share[1]) / 100 * memory)
    elif re.fullmatch(r"\s*0+(?:\.0+)?\s*([kmgt]?i?b)?\s*", text.lower()):
        margin = 0
    else:
        remedy = f"Leave it out for the default, here {readable(default)}."
        margin = parse_amount(text, field, "an amount or a share to leave free, such as 1GB, 5% or 0", remedy)
    if margin >= memory:
        got = f"{readable(margin)}, which leaves nothing of {readable(memory)}"
        raise InputError(field, got, "less than the memory", "Give a smaller margin, or more memory.")
    return margin


def readable(size: float) -> str:
    """An amount for a human, in GB or MB of 1024.

    Example:

    ```python
    >>> readable(24 * 2**30), readable(5 * 2**20)
    ('24.0 GB', '5.0 MB')

    ```
    """
    return f"{size / 2**30:.1f} GB" if abs(size) >= 2**29 else f"{size / 2**20:.1f} MB"
