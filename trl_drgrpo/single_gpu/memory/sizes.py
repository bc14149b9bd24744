"""Amounts of memory as people write them, and as they like to read them.

`24GB` on a graphics card means 24 GiB: that is what its driver reports, so GB and GiB (and a bare number) are the same
here, powers of 1024.
"""

import math
import re

from trl_drgrpo.common.errors import InputError

_POWERS = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_memory(text: str, field: str = "--memory") -> int:
    """Bytes of an amount such as `24GB`, `24 GiB`, `24g`, `16384MB` or `24` (gigabytes).

    Args:
        text (`str`): The amount.
        field (`str`): What it was given as, for the error.

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
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    size = int(float(found[1]) * 1024 ** _POWERS[found[2]]) if found else 0
    if size <= 0 or not math.isfinite(size):
        remedy = "Write the memory of one device; a number alone is in GB."
        raise InputError(field, repr(text), "an amount above zero, such as 24GB", remedy)
    return size


def readable(size: float) -> str:
    """An amount for a human, in GB or MB of 1024.

    Example:

    ```python
    >>> readable(24 * 2**30), readable(5 * 2**20)
    ('24.0 GB', '5.0 MB')

    ```
    """
    return f"{size / 2**30:.1f} GB" if abs(size) >= 2**29 else f"{size / 2**20:.1f} MB"
