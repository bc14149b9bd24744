"""Cards by name: how many bytes a program gets of what stands on the box.

`usable` is what PyTorch gives as total capacity, in a card's properties and out-of-memory messages: less than the
vendor's number (`nominal`), and less than `nvidia-smi` shows (`reported`), by what driver and error correction keep.
It is the lowest that such messages in public logs commonly say for a card of that size (November 2026), not our own
measurement; drivers differ by up to 0.2 GiB. Where `--memory` gives measured bytes, they win.
"""

from dataclasses import dataclass

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened


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
