"""Running estimates of prompts' pass rates, shrunk to that of all prompts, and forgetting."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError

_FIELDS = "{'key': ..., 'pass_rate': ..., 'completions': ...}"


def prompt_key(prompt: Any) -> str:
    """A prompt's identity by content: 16 hexadecimal digits, the same in every run and process.

    Args:
        prompt (`str` or list of messages): As in the dataset.

    Example:

    ```python
    >>> prompt_key("1+1?") == prompt_key("1+1?") != prompt_key([{"role": "user", "content": "1+1?"}])
    True

    ```
    """
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class PassRates:
    """Estimates of pass rates, by the content of prompts.

    Args:
        memory (`float`, *optional*, defaults to `0.7`): Weight that the counts of a prompt keep at its next visit.
        shrinkage (`float`, *optional*, defaults to `4.0`): Completions' worth of the mean over all prompts.

    Example:

    ```python
    >>> rates = PassRates()
    >>> rates.update("a", correct=8, scored=8)
    >>> round(rates.estimate("a"), 2), round(rates.estimate("never seen"), 2)
    (0.97, 0.9)

    ```
    """

    def __init__(self, memory: float = 0.7, shrinkage: float = 4.0):
        self.memory, self.shrinkage = memory, shrinkage
        self.counts: dict[str, tuple[float, float]] = {}  # correct and scored completions, discounted
        self.correct, self.scored = 1.0, 2.0  # of all prompts, discounted; before any visit 1/2

    def estimate(self, key: str) -> float:
        """The pass rate of a prompt, 0 to 1."""
        correct, scored = self.counts.get(key, (0.0, 0.0))
        return (correct + self.shrinkage * self.mean) / (scored + self.shrinkage)

    @property
    def mean(self) -> float:
        """The mean over completions of all prompts, the newest the heaviest."""
        return self.correct / self.scored

    def update(self, key: str, correct: int, scored: int) -> None:
        """Take in the completions of one visit.

        Args:
            key (`str`): See [`prompt_key`].
            correct, scored (`int`): Completions that were correct, and that could be judged.
        """
        before = self.counts.get(key, (0.0, 0.0))
        self.counts[key] = (self.memory * before[0] + correct, self.memory * before[1] + scored)
        forgotten = 0.999**scored
        self.correct, self.scored = forgotten * self.correct + correct, forgotten * self.scored + scored

    def read_prior(self, path: Path, keys: Sequence[str]) -> int:
        """Take in a file of pass rates from before the run: JSON lines as `trl-drgrpo score --pass_rates` writes them.

        Args:
            path (`Path`): The file.
            keys (`Sequence[str]`): Keys of the training prompts; empty: not checked (a stream).

        Returns:
            `int`: How many of the prompts it knows.

        Raises:
            `InputError`: It cannot be read, or knows none of the prompts.
        """
        known = 0
        wanted = set(keys)
        for number, line in enumerate(_lines(path), 1):
            try:
                row = json.loads(line)
                key, rate, completions = str(row["key"]), float(row["pass_rate"]), float(row.get("completions", 8))
                if not (0 <= rate <= 1 and completions > 0):
                    raise ValueError("out of range")
            except (ValueError, KeyError, TypeError) as error:
                got = f"{path}, line {number}: {line.strip()[:80]!r} ({type(error).__name__}: {error})"
                raise InputError("prior_pass_rates", got, _FIELDS, "Write it with trl-drgrpo score.") from error
            if not wanted or key in wanted:
                known += 1
                self.counts[key] = (rate * completions, completions)
                self.correct, self.scored = self.correct + rate * completions, self.scored + completions
        if not known:
            remedy = "Keys are hashes of prompts: score the prompts of this dataset, with its system prompt."
            raise InputError("prior_pass_rates", f"{path}, which knows none of the prompts", "the same data", remedy)
        return known

    def state_dict(self) -> dict[str, Any]:
        """The estimates, JSON-ready."""
        return {"counts": self.counts, "correct": self.correct, "scored": self.scored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.counts = {key: (float(c), float(n)) for key, (c, n) in state["counts"].items()}
        self.correct, self.scored = float(state["correct"]), float(state["scored"])


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path} ({type(error).__name__}: {error})"
        raise InputError("prior_pass_rates", got, "a file of JSON lines", "Check the path.") from error
