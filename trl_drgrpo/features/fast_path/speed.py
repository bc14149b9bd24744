"""The parts of the fast path, and for each one that is off the reason: said once, kept for the run log and `check`."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

logger = logging.getLogger(__name__)


class SpeedPart(StrEnum):
    """Parts of the fast path: those of generation, those of training, then those of a decoding step over groups."""

    PROMPTS_ONCE = "prompts run once"
    GROUP_CACHE = "group cache"
    RECORDED_STEPS = "recorded steps"
    DROPPED_ROWS = "dropped rows"
    PLANNED = "planned micro-batches"
    SKIPPED_ROWS = "skipped rows"
    SHARED_PROMPTS = "shared prompts"
    FUSED_LAYERS = "fused layers"
    JOINED_ADAPTERS = "joined adapters"


def in_words(facts: Mapping[str, str]) -> str:
    """
    Return [`Speed.facts`] in one line: the parts that are used, then the others by their reason.

    Example:

    ```python
    >>> in_words({"prompts run once": "yes", "group cache": "it is windowed", "recorded steps": "it is windowed"})
    'prompts run once; without group cache, recorded steps: it is windowed'

    ```
    """
    # Parts that are off for the same reason share a phrase.
    parts_of: dict[str, list[str]] = {}
    for part, reason in facts.items():
        parts_of.setdefault(reason, []).append(part)
    phrases = []
    used = parts_of.pop("yes", None)
    if used:
        phrases.append(", ".join(used))
    for reason, parts in parts_of.items():
        phrases.append(f"without {', '.join(parts)}: {reason}")
    return "; ".join(phrases)


GENERATION = (SpeedPart.PROMPTS_ONCE, SpeedPart.GROUP_CACHE, SpeedPart.RECORDED_STEPS, SpeedPart.DROPPED_ROWS)
TRAINING = (SpeedPart.PLANNED, SpeedPart.SKIPPED_ROWS, SpeedPart.SHARED_PROMPTS)


class Speed:
    """Record of what a model gets of the fast path, under these settings and on this host.

    Args:
        say (`Callable[[str], None]`, *optional*): Gets each line; a warning in the log by default.

    Attributes:
        barred (`dict[SpeedPart, str]`): Parts that must not be used on this host, with the reason: see [`Speed.bar`].
        uses (`Counter`): How often each part has saved work: prompts that were not run again, steps over a group
            cache, replayed steps, rows that left or were skipped, planned micro-batches, rows packed behind another,
            generations with fused layers, adapters that were joined.

    Example:

    ```python
    >>> speed = Speed(print)
    >>> speed.on(SpeedPart.PROMPTS_ONCE)
    >>> speed.off("it is windowed", SpeedPart.GROUP_CACHE, SpeedPart.RECORDED_STEPS)
    Fast path without group cache, recorded steps: it is windowed.
    >>> speed.off("it is windowed", SpeedPart.GROUP_CACHE, SpeedPart.RECORDED_STEPS)  # said already
    >>> speed.facts()
    {'prompts run once': 'yes', 'group cache': 'it is windowed', 'recorded steps': 'it is windowed'}

    ```
    """

    def __init__(self, say: Callable[[str], None] = logger.warning):
        self._say = say
        self._reasons: dict[SpeedPart, str | None] = {}
        self._said: set[str] = set()
        self.barred: dict[SpeedPart, str] = {}
        self.uses: Counter[SpeedPart] = Counter()

    def bar(self, reasons: Mapping[SpeedPart, str]) -> None:
        """Switch parts off for good, and say so: a proof has found that they do not work on this host."""
        for part, reason in reasons.items():
            self.barred[part] = reason
            self.off(reason, part)

    def on(self, *parts: SpeedPart) -> None:
        """Note that these parts are used."""
        self._reasons |= dict.fromkeys(parts)

    def off(self, reason: str, *parts: SpeedPart, expected: bool = False) -> None:
        """
        Note why these parts are not used, and say it in one line.

        `expected`: the user has switched them off, or this machine has no use for them. The log gets it as
        information, the console nothing.
        """
        self._reasons |= dict.fromkeys(parts, reason)
        line = f"Fast path without {', '.join(parts)}: {reason}."
        # Reasons are found anew in every generation. A line is said once.
        if line in self._said:
            return
        self._said.add(line)
        say = logger.info if expected else self._say
        say(line)

    def set(self, part: SpeedPart, reason: str | None) -> None:
        """Note a part as used, or the reason why it is not."""
        if reason is None:
            self.on(part)
        else:
            self.off(reason, part)

    def facts(self) -> dict[str, str]:
        """Return `"yes"` or the reason, by the name of each part that has been decided, in their order."""
        return {part.value: self._reasons[part] or "yes" for part in SpeedPart if part in self._reasons}
