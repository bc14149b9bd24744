"""Pass rates of prompts: running estimates and files of them.

An estimate is shrunk to the mean of all prompts, and forgets old completions. A file has one JSON object per line and
prompt: `key`, `pass_rate` and `completions` count, `prompt` is for the reader.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.rewards.texts import one_line, prompt_key, prompt_text

_FIELDS = "{'key': ..., 'pass_rate': ..., 'completions': ...}"
_PROMPT_CHARACTERS = 120

Rates = dict[str, tuple[float, float]]  # by key of the prompt: pass rate, and the number of its completions


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
        self.memory = memory
        self.shrinkage = shrinkage
        self.counts: dict[str, tuple[float, float]] = {}  # correct and scored completions, discounted
        # The same counts over all prompts; before any visit their mean is 1/2.
        self.correct = 1.0
        self.scored = 2.0

    def estimate(self, key: str) -> float:
        """Return the pass rate of a prompt, 0 to 1."""
        correct, scored = self.counts.get(key, (0.0, 0.0))
        # As if it had had some more completions, with the pass rate of all prompts.
        return (correct + self.shrinkage * self.mean) / (scored + self.shrinkage)

    @property
    def mean(self) -> float:
        """Mean over the completions of all prompts; newer ones weigh more."""
        return self.correct / self.scored

    def update(self, key: str, correct: int, scored: int) -> None:
        """Take in the completions of one visit.

        Args:
            key (`str`): See [`prompt_key`].
            correct, scored (`int`): Completions that were correct, and that could be judged.
        """
        correct_before, scored_before = self.counts.get(key, (0.0, 0.0))
        correct_now = self.memory * correct_before + correct
        scored_now = self.memory * scored_before + scored
        self.counts[key] = (correct_now, scored_now)
        # The mean forgets by completions: it is over about the newest thousand.
        memory = 0.999**scored
        self.correct = memory * self.correct + correct
        self.scored = memory * self.scored + scored

    def take_prior(self, rates: Rates) -> None:
        """Take in pass rates from before the run.

        Args:
            rates (`dict`): Result of [`read_pass_rates`].
        """
        for key, (rate, completions) in rates.items():
            self.counts[key] = (rate * completions, completions)
            self.correct += rate * completions
            self.scored += completions

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates, ready for JSON."""
        return {"counts": self.counts, "correct": self.correct, "scored": self.scored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        # JSON has turned the pairs into lists.
        self.counts = {key: (float(correct), float(scored)) for key, (correct, scored) in state["counts"].items()}
        self.correct = float(state["correct"])
        self.scored = float(state["scored"])


def read_pass_rates(path: Path) -> Rates:
    """Read pass rates from a file of JSON lines, as `trl-drgrpo score --pass_rates` writes them.

    Args:
        path (`Path`): The file.

    Returns:
        `dict[str, tuple[float, float]]`: By key of the prompt, its pass rate and the number of its completions.

    Raises:
        `InputError`: It cannot be read, or is empty; names the line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path} ({type(error).__name__}: {error})"
        raise InputError("prior_pass_rates", got, "a file of JSON lines", "Check the path.") from error
    rates: Rates = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key = str(row["key"])
            rate = float(row["pass_rate"])
            completions = float(row.get("completions", 8))
            if not (0 <= rate <= 1 and 0 < completions < math.inf):  # NaN is in no range
                raise ValueError("out of range")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            got = f"{path}, line {number}: {shortened(line.strip(), 80)} ({type(error).__name__}: {error})"
            raise InputError("prior_pass_rates", got, _FIELDS, "Write it with trl-drgrpo score.") from error
        rates[key] = (rate, completions)
    if not rates:
        remedy = "Write it with trl-drgrpo score --pass_rates."
        raise InputError("prior_pass_rates", f"{path}, which is empty", "one line per prompt", remedy)
    return rates


def write_pass_rates(path: Path, prompts: Iterable[Any], correct: Iterable[bool | None]) -> tuple[int, int]:
    """Write a file of pass rates.

    Args:
        path (`Path`): The file.
        prompts (`Iterable`): One per completion, texts or messages.
        correct (`Iterable[bool | None]`): One per completion; `None` = could not be judged, and does not count.

    Returns:
        `tuple[int, int]`: Prompts that were written, and prompts without a completion that could be judged.
    """
    # Of each prompt its text, for the reader of the file, and the verdicts on its completions.
    verdicts_of: dict[str, tuple[Any, list[bool]]] = {}
    for prompt, is_correct in zip(prompts, correct, strict=True):
        _, verdicts = verdicts_of.setdefault(prompt_key(prompt), (prompt, []))
        if is_correct is not None:
            verdicts.append(is_correct)
    lines = []
    for key, (prompt, verdicts) in verdicts_of.items():
        if not verdicts:
            continue
        rate = sum(verdicts) / len(verdicts)
        text = one_line(prompt_text(prompt), _PROMPT_CHARACTERS)
        row = {"key": key, "pass_rate": rate, "completions": len(verdicts), "prompt": text}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_whole(Path(path), "".join(lines))
    return len(lines), len(verdicts_of) - len(lines)
