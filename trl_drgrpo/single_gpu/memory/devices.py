"""Amounts of memory as people write and read them, and cards by name with the bytes that a program gets.

`24GB` on a graphics card means 24 GiB: that is what its driver reports, so GB and GiB (and a bare number) are the same
here, powers of 1024. A card's number is what PyTorch gives as total capacity, in a card's properties and out-of-memory
messages: less than the vendor's number, and less than `nvidia-smi` shows, by what driver and error correction keep. It
is the lowest that such messages in public logs commonly say for a card of that size (November 2026), not our own
measurement; drivers differ by up to 0.2 GiB. Where `--memory` gives measured bytes, they win.
"""

import math
import re

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened

# Left free by default: the larger of a share of the device and an amount.
MARGIN_SHARE, MARGIN_BYTES = 0.05, int(0.7 * 2**30)

_POWERS = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}


def _bytes(text: str, whole: int = 0) -> int | None:
    """Bytes of an amount, or of a share of `whole` bytes; `None` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(?:i?b)?)", text.strip().lower())
    if found is None:
        return None
    size = float(found[1]) / 100 * whole if found[2] else float(found[1]) * 1024 ** _POWERS[found[3]]
    return int(size) if math.isfinite(size) else None


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
    size = _bytes(text)
    if not size:
        remedy = "Write the memory of one device; a number alone is in GB."
        raise InputError("--memory", shortened(text), "an amount above zero, such as 24GB", remedy)
    return size


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
    margin = default if text is None else _bytes(text, memory)
    if margin is None:
        remedy = f"Leave it out for the default, here {readable(default)}."
        expected = "an amount or a share to leave free, such as 1GB, 5% or 0"
        raise InputError("--margin", shortened(str(text)), expected, remedy)
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


# Total that PyTorch shows, in GiB.
CARDS = {
    "T4": 14.56,
    "L4": 22.03,
    "A10G": 22.03,
    "RTX-3060-12GB": 11.62,
    "RTX-3090": 23.52,
    "RTX-4080": 15.57,
    "RTX-4090": 23.52,
    "RTX-5090": 31.36,
    "L40S": 44.34,
    "A100-40GB": 39.38,
    "A100-80GB": 79.14,
    "H100-80GB": 79.10,
    "H200": 139.72,
}
# Words of a card's full name that tell no two apart.
_FILLERS = r"nvidia|tesla|geforce|rtx|gb|[-_ ]"


def find_card(name: str) -> tuple[str, int]:
    """The card of a name such as `T4`, `RTX 4090`, `4090` or `NVIDIA A100-80GB`, and the bytes that a program gets.

    Args:
        name (`str`): In any case, with or without the vendor's words.

    Raises:
        `InputError`: An unknown name, or one that several cards share; names the nearest.

    Example:

    ```python
    >>> find_card("NVIDIA GeForce RTX 4090")[0], find_card("a100 80gb")[0]
    ('RTX-4090', 'A100-80GB')

    ```
    """
    shortened_names = {re.sub(_FILLERS, "", card.lower()): card for card in CARDS}
    short = re.sub(_FILLERS, "", name.lower())
    beginning = [card for each, card in shortened_names.items() if short and each.startswith(short)]  # H100, RTX 3060
    found = [shortened_names[short]] if short in shortened_names else beginning
    if len(found) == 1:
        return found[0], int(CARDS[found[0]] * 2**30)
    if found:
        remedy = f"Did you mean {' or '.join(found)}?"
        raise InputError("--device", f"{name!r}, which matches several cards", "one of them", remedy)
    otherwise = f"Known cards: {', '.join(CARDS)}. For another one pass --memory."
    near = did_you_mean(name.upper(), CARDS, otherwise, most=2, cutoff=0.6)
    raise InputError("--device", shortened(name), "cuda, cpu, or the name of a card", near)
