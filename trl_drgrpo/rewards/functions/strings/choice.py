r"""A reward for multiple choice: which letter does the completion pick, and is it the correct one?

Models name their choice in many ways; the ways are tried from the most explicit to the least, and the first that finds
a letter decides. A completion that names two choices in that way picks none: it would otherwise be correct by listing.
"""

import re
from typing import Any

from trl_drgrpo.common.errors import InputError, UnscorableError
from trl_drgrpo.rewards.contract import OnError
from trl_drgrpo.rewards.sample import SampleReward, why_unreadable
from trl_drgrpo.rewards.text import after_thinking, marked_answer


class ChoiceReward(SampleReward):
    r"""1 where the completion picks the column's choice, A to E as a rule.

    Searched behind the last `</think>`, the first place that names a choice decides: `<answer>`, `\boxed{}`, a phrase
    ("answer is (B)", "Answer: B"), the whole text as a bare letter, a letter in parentheses. Two different choices in
    that place are ambiguous and score 0, as does none.

    Args:
        column (`str`, *optional*, defaults to `"answer"`): Dataset column with the letter (`B`, `(b)`, `B. Paris`) or
            the position of the choice as a whole number from 0. `None`: the row stays unscored.
        letters (`str`, *optional*, defaults to `"ABCDE"`): The choices.
        name (`str`, *optional*, defaults to `"choice_reward"`): Name in logs.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What a truth that is no choice costs.

    Raises:
        [`InputError`]: `letters` that are not different capital letters.

    Example:

    ```python
    >>> choice_reward(completions=["The answer is (B).", "(A) or (B)", r"\boxed{b}"], answer=["B", "B", 1])
    [1.0, 0.0, 1.0]

    ```
    """

    truths = ("text", "number")

    def __init__(
        self,
        column: str = "answer",
        letters: str = "ABCDE",
        name: str = "choice_reward",
        on_error: OnError = "unscorable",
    ):
        super().__init__(name, columns=(column,), on_error=on_error)
        if (
            not isinstance(letters, str)
            or not re.fullmatch(r"[A-Z]{2,26}", letters)
            or len(set(letters)) < len(letters)
        ):
            raise InputError(
                "letters", repr(letters), "different capital letters, such as ABCD", "Name every choice once."
            )
        self.column, self.letters = column, letters

    def score(self, completion: str, **columns: Any) -> float | None:
        """1.0 or 0.0; `None` for a row without a truth, `UnscorableError` for a truth that is no choice."""
        truth = columns[self.column]
        if truth is None:
            return None
        return float(self.choice(completion) == self._truth(truth))

    def choice(self, completion: str) -> str | None:
        """The letter that a completion picks; `None` for none or more than one."""
        text = after_thinking(completion)
        if (marked := marked_answer(text)) is not None:
            picked = self._in_short(marked)
        else:
            picked = self._by_phrase(text) or self._alone(text) or set(re.findall(rf"\(([{self.letters}])\)", text))
        return picked.pop() if len(picked) == 1 else None

    def check_row(self, **columns: Any) -> str | None:
        """Reason why the row's gold answer cannot be read."""
        return why_unreadable(self._truth, columns[self.column])

    def _truth(self, truth: Any) -> str:
        if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(self.letters):
            return self.letters[truth]
        picked = self._in_short(truth) if isinstance(truth, str) else set()
        if len(picked) != 1:
            expected = f"one of {self.letters} or a position from 0"
            raise UnscorableError(f"column {self.column!r} holds {truth!r}, which is not {expected}")
        return picked.pop()

    def _alone(self, text: str) -> set[str]:
        """A bare letter, perhaps in brackets, or a letter in front of its choice: `B`, `**(B)**`, `B) Paris`."""
        text = text.strip()
        match = re.match(rf"[\s(*\[$]*([{self.letters}])(?![\w'’])[)\].:*$]*(?=\s|$)", text)
        bare = match is not None and (match.end() == len(text) or match[0][-1] in ").:]")
        if match is None or not bare:
            return set()
        # `A. or B.` and a list of all the choices name more than one
        others = rf"\b(?:or|and)\b[\s(*]*([{self.letters}])\b|(?<!\w)([{self.letters}])[)\]:]"
        return {match[1], *(one or two for one, two in re.findall(others, text[match.end(1) :]))}

    def _in_short(self, text: str) -> set[str]:
        """Choices named by the contents of a tag, a box or a column, in capitals or small letters."""
        text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text).strip()
        if picked := self._alone(text):
            return picked
        if len(text) <= 4 and (picked := self._alone(text.upper())):  # `b`, `(b)`, `b.`
            return picked
        return self._by_phrase(text) or set(re.findall(rf"(?<!\w)[{self.letters}](?![\w'’])", text))

    def _by_phrase(self, text: str) -> set[str]:
        letter = rf"[\s(*\[$]{{0,8}}(?:\\boxed\{{)?[{self.letters}](?![\w'’])[)\]*.$}}]{{0,8}}"
        lead = r"(?i:\b(?:answer|choice|option)(?:\s+is|\s*[:=])(?:\s*:)?(?:\s+(?:option|choice))?)[\s:*]{0,8}"
        found = re.findall(rf"{lead}({letter}(?:\s*(?:,|/|\bor\b|\band\b)+{letter})*)", text)
        return set(re.findall(rf"(?<!\w)[{self.letters}](?!\w)", " ".join(found)))


choice_reward = ChoiceReward()
