"""Amounts of memory as people write and read them, and cards by name with the bytes that a program gets.

`24GB` on a graphics card means 24 GiB: that is what its driver reports, so GB and GiB (and a bare number) are the same
here, powers of 1024. `usable` of a card is what PyTorch gives as total capacity, in a card's properties and
out-of-memory messages: less than the vendor's number (`nominal`), and less than `nvidia-smi` shows (`reported`), by
what driver and error correction keep. It is the lowest that such messages in public logs commonly say for a card of
that size (November 2026), not our own measurement; drivers differ by up to 0.2 GiB. Where `--memory` gives measured
bytes, they win.
"""

import math
import re
from dataclasses import dataclass

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened

# Left free by default: the larger of a share of the device and an amount.
MARGIN_SHARE, MARGIN_BYTES = 0.05, int(0.7 * 2**30)

_POWERS = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_memory(text: str) -> int:
    """Bytes of an amount such as `24GB`, `24 GiB`, `24g`, `16384MB` or `24` (gigabytes).

    Args:
        text (`str`): The amount.

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
    return _amount(text, "--memory", "an amount above zero, such as 24GB", remedy)


def _amount(text: str, field: str, expected: str, remedy: str) -> int:
    """Bytes of an amount above zero; else an error that says so in these words."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    amount = float(found[1]) * 1024 ** _POWERS[found[2]] if found else 0.0
    if amount < 1 or not math.isfinite(amount):
        raise InputError(field, shortened(text), expected, remedy)
    return int(amount)


def default_margin(memory: int) -> int:
    """Bytes to leave free on a device: 5% of it or 0.7 GB, whichever is more."""
    return max(int(MARGIN_SHARE * memory), MARGIN_BYTES)


def parse_margin(text: str | None, memory: int) -> int:
    """Bytes to leave free on a device of `memory` bytes.

    Args:
        text (`str`, *optional*): An amount as [`parse_memory`] takes it, a share such as `8%`, or `0`. `None`:
            [`default_margin`].
        memory (`int`): Bytes of the device.

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
        margin = _amount(text, "--margin", "an amount or a share to leave free, such as 1GB, 5% or 0", remedy)
    if margin >= memory:
        got = f"{readable(margin)}, which leaves nothing of {readable(memory)}"
        raise InputError("--margin", got, "less than the memory", "Give a smaller margin, or more memory.")
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


@dataclass(frozen=True)
class Card:
    """A graphics card.

    Args:
        name (`str`): As `--device` takes it.
        nominal (`int`): The vendor's number, in GB.
        reported (`int`): Total that `nvidia-smi` shows, in MiB.
        usable (`float`): Total that PyTorch shows, in GiB.
    """

    name: str
    nominal: int
    reported: int
    usable: float

    @property
    def memory(self) -> int:
        """Usable bytes."""
        return int(self.usable * 2**30)


CARDS = (
    Card("T4", 16, 15360, 14.56),
    Card("L4", 24, 23034, 22.03),
    Card("A10G", 24, 23028, 22.03),
    Card("RTX-3060-12GB", 12, 12288, 11.62),
    Card("RTX-3090", 24, 24576, 23.52),
    Card("RTX-4080", 16, 16376, 15.57),
    Card("RTX-4090", 24, 24564, 23.52),
    Card("RTX-5090", 32, 32607, 31.36),
    Card("L40S", 48, 46068, 44.34),
    Card("A100-40GB", 40, 40960, 39.38),
    Card("A100-80GB", 80, 81920, 79.14),
    Card("H100-80GB", 80, 81559, 79.10),
    Card("H200", 141, 143771, 139.72),
)
# Words of a card's full name that tell no two apart.
_FILLERS = ("nvidia", "tesla", "geforce", "rtx", "gb", "-", "_", " ")


def find_card(name: str) -> Card:
    """The card of a name such as `T4`, `RTX 4090`, `4090` or `NVIDIA A100-80GB`.

    Args:
        name (`str`): In any case, with or without the vendor's words.

    Raises:
        `InputError`: An unknown name, or one that several cards share; names the nearest.

    Example:

    ```python
    >>> find_card("NVIDIA GeForce RTX 4090").usable, find_card("a100 80gb").nominal
    (23.52, 80)

    ```
    """
    short = _short(name)
    found = [card for card in CARDS if _short(card.name) == short]
    if not found and short:  # what the name begins with: H100, RTX 3060
        found = [card for card in CARDS if _short(card.name).startswith(short)]
    if len(found) == 1:
        return found[0]
    if found:
        remedy = f"Did you mean {' or '.join(card.name for card in found)}?"
        raise InputError("--device", f"{name!r}, which matches several cards", "one of them", remedy)
    names = [card.name for card in CARDS]
    otherwise = f"Known cards: {', '.join(names)}. For another one pass --memory."
    near = did_you_mean(name.upper(), names, otherwise, most=2, cutoff=0.6)
    raise InputError("--device", shortened(name), "cuda, cpu, or the name of a card", near)


def _short(name: str) -> str:
    name = name.lower()
    for filler in _FILLERS:
        name = name.replace(filler, "")
    return name
