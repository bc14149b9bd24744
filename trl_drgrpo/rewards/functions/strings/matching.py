r"""Rewards that hold an answer against a column: equal text, equal number, the same choice. No symbolic mathematics.

Where the answer is looked for is one setting, `where`, read as everywhere in this package: what follows the last
`</think>`; in it the last `<answer>...</answer>`, else the last `\boxed{...}`, else the last line that is not blank.
Models name a choice of several in many ways; these are tried from the most explicit to the least, and the first that
finds a letter decides.

What is ambiguous scores 0: an answer tag with two numbers in it, or two letters, would otherwise be correct by
listing. A row without a truth (`None`) is left unscored.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from trl_drgrpo.common.errors import InputError, UnscorableError, shortened
from trl_drgrpo.common.ranges import Choice, Range
from trl_drgrpo.rewards.contract import OnError
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.sample import SampleReward, after_thinking, marked_answer, without_fonts

_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WHERE = Choice(("answer", "marked", "whole"))
Quotient = tuple[Decimal, Decimal]  # numerator and denominator: `3/4` stays exact


def answer_text(completion: str, where: str) -> str | None:
    r"""
    The part of a completion that holds its answer, or `None`.

    `where`: `"answer"`, the last `<answer>...</answer>` behind `</think>`, else the last `\boxed{...}`, else the last
    line; `"marked"`, the tag or the box; `"whole"`, everything.

    Example:

    ```python
    >>> answer_text("so\n7", "answer"), answer_text("so\n7", "marked"), answer_text("<answer>7</answer>", "marked")
    ('7', None, '7')

    ```
    """
    if where == "whole":
        return completion
    # A mark wins over the last line: models often go on after they have given the answer.
    text = after_thinking(completion)
    answer = marked_answer(text)
    if answer is None and where == "answer":
        answer = text.rstrip().rpartition("\n")[2].strip() or None
    return answer


class AgainstColumn(SampleReward):
    """Holds a completion against the truth in a column. A row without a truth is left unscored, and one whose truth
    cannot be read is an `UnscorableError`."""

    column: Any
    truths = ("text", "number")
    ignore_case: bool = False

    def score(self, completion: str, **columns: Any) -> float | None:
        """Return 1.0 or 0.0; `None` for a row without a truth."""
        value = columns[self.column]
        truth = None if value is None else self.read(value)
        return None if truth is None else float(self.is_right(completion, truth))

    def check_row(self, **columns: Any) -> str | None:
        """Reason why the row's gold answer cannot be read."""
        try:  # any completion will do: what fails on an empty one is the truth
            self.score("", **columns)
        except UnscorableError as error:
            return str(error)
        return None

    def normal(self, text: str) -> str:
        """Return a text as it is compared."""
        text = text.strip()
        return text.casefold() if self.ignore_case else text

    def read(self, truth: object) -> Any:
        """Read the truth from a value of the column; `None`: there is none."""
        raise NotImplementedError

    def is_right(self, completion: str, truth: Any) -> bool:
        """Tell whether a completion says the same. `truth`: from `read`."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class ExactMatchReward(AgainstColumn):
    r"""1 where the answer is the column's text, blanks at both ends left out.

    What only sets it as text does not count: `\boxed{\text{Paris}}` is Paris, and `\boxed{\text{(B)}}` B.

    Args:
        column (`str`, *optional*, defaults to `"answer"`): Dataset column with the truth: a text, something that
            prints as one, or a list of which any will do. `None`: the row stays unscored.
        where (`str`, *optional*, defaults to `"answer"`): Part of the completion that counts, see [`answer_text`].
        ignore_case (`bool`, *optional*, defaults to `False`): Whether upper and lower case are the same.
        name (`str`, *optional*, defaults to `"exact_match_reward"`): Name in logs.

    Raises:
        [`InputError`]: An unknown `where`.

    Example:

    ```python
    >>> exact_match_reward(completions=["I think\n<answer> Rome </answer>", "Rom"], answer=["Rome", "Rome"])
    [1.0, 0.0]

    ```
    """

    column: str = "answer"
    where: str = "answer"
    ignore_case: bool = False
    name: str = "exact_match_reward"

    truths = ("text", "number", "boolean", "list")
    allowed: ClassVar = {"where": _WHERE, "ignore_case": bool}

    def read(self, truth: object) -> set[str] | None:
        values = truth if isinstance(truth, (list, tuple)) else [truth]
        truths = set()
        for value in values:
            if isinstance(value, (dict, list, tuple)):
                raise UnscorableError(f"{self.column} is {shortened(value)}, which is no text")
            if value is not None:
                truths.add(self.normal(str(value)))
        return truths or None

    def is_right(self, completion: str, truth: set[str]) -> bool:
        answer = answer_text(completion, self.where)
        if answer is None:
            return False
        # As it stands, without fonts, and without brackets around a letter: any of the three may be the truth.
        spellings = [answer]
        if self.where != "whole":
            plain = without_fonts(answer)
            spellings += [plain, _CHOICE.sub(r"\1", plain)]
        return not truth.isdisjoint(map(self.normal, spellings))


@dataclass(eq=False, repr=False)
class NumericReward(AgainstColumn):
    r"""1 where the answer's number is the column's, within a tolerance.

    Numbers are read with a sign, thousands separators, a fraction part, an exponent, and as a quotient of two (`3/4`);
    currency, units and percent signs around them are left out, so `50%` is 50. What an answer tag or `\boxed{}` holds
    must be one number (`\boxed{1, 2}` and `\frac{1}{2}` are not: use a mathematical reward for them); elsewhere the
    last number counts. Numbers without tolerance are compared exactly, of whatever length.

    Args:
        column (`str`, *optional*, defaults to `"answer"`): Dataset column with a number, or a text with one; of a text
            with `####`, as in GSM8K, the part behind it. `None`: the row stays unscored.
        where (`str`, *optional*, defaults to `"answer"`): Part of the completion that counts, see [`answer_text`].
            With `"whole"`, the last number of the completion.
        abs_tol (`float`, *optional*, defaults to 0.0): Largest difference that still counts as equal.
        rel_tol (`float`, *optional*, defaults to 0.0): The same as a share of the truth.
        thousands (`str`, *optional*, defaults to `","`): Thousands separator: `","`, `"."`, `" "`, `"'"`, or `""` for
            none. With `"."` the decimal separator is the comma.
        name (`str`, *optional*, defaults to `"numeric_reward"`): Name in logs.
        on_error (`str`, *optional*, defaults to `"unscorable"`): What a truth that is no number costs.
        only_number (`bool`, *optional*, defaults to `False`): Whether several numbers are incorrect without a tag or
            box, too. A model that is paid for its last number learns to recite several.

    Raises:
        [`InputError`]: A negative tolerance, an unknown `where` or separator.

    Example:

    ```python
    >>> numeric_reward(completions=["That is $1,250.00.", "<answer>3/4</answer>"], answer=["1250", 0.75])
    [1.0, 1.0]

    ```
    """

    column: str = "answer"
    where: str = "answer"
    abs_tol: float = 0.0
    rel_tol: float = 0.0
    thousands: str = ","
    name: str = "numeric_reward"
    on_error: OnError = "unscorable"
    only_number: bool = False

    allowed: ClassVar = dict.fromkeys(("abs_tol", "rel_tol"), Range(0, remedy="0 compares exactly."))
    allowed |= {"where": _WHERE, "only_number": bool, "thousands": Choice((",", ".", " ", "'", ""))}

    def is_right(self, completion: str, truth: Quotient) -> bool:
        answer = answer_text(completion, self.where)
        if answer is None:
            return False
        numbers = list(self._numbers(answer))
        if not numbers:
            return False
        # Of a whole text the last number counts. A mark promises one answer, so several there are none.
        is_marked = self.where != "whole" and answer_text(completion, "marked") is not None
        if len(numbers) > 1 and (is_marked or self.only_number):  # correct by listing
            return False
        return self._equal(numbers[-1], truth)

    def read(self, truth: object) -> Quotient:
        if isinstance(truth, str):
            numbers = list(self._numbers(truth.rpartition("####")[2]))
            if len(numbers) == 1:
                return numbers[0]
        elif not isinstance(truth, bool):
            with contextlib.suppress(InvalidOperation):
                number = Decimal(str(truth))  # by its text: 0.1 is meant, and not the float next to it
                if number.is_finite():
                    return number, Decimal(1)
        raise UnscorableError(f"column {self.column!r} holds {truth!r}, which is not one number")

    def _numbers(self, text: str) -> Iterator[Quotient]:
        """The numbers of a text, in order, each as numerator and denominator."""
        point = "," if self.thousands == "." else "."
        inside = re.escape(self.thousands)
        # Every run of digits and separators is read once, so the time is linear in the text.
        number = rf"\d(?:[\d{inside}]*\d)?(?:{re.escape(point)}\d+)?|{re.escape(point)}\d+"
        # An exponent of four digits at most, which a Decimal holds; a denominator, unless it is a date: 1/2/2024.
        tail = r"(?P<e>[eE][-+]?\d{1,4}(?!\w))?(?:/(?P<d>\d+)(?![\d/]))?"
        pattern = rf"(?<![\w)])[-+−]?(?P<n>{number}){tail}|(?P<m>{number})"  # m: after a letter, so without a sign
        for match in re.finditer(pattern, text):
            yield from self._read(match, point)

    def _read(self, match: re.Match[str], point: str) -> Iterator[Quotient]:
        # `1,234.5` is one number, `1,2,3.5` are three: groups behind the first separator have three digits.
        digits = match["n"] or match["m"]
        integer, _, fraction = digits.partition(point)
        pieces = integer.split(self.thousands) if self.thousands else [integer]
        is_grouped = 1 <= len(pieces[0]) <= 3 and all(len(piece) == 3 for piece in pieces[1:])
        if len(pieces) > 1 and not is_grouped:
            # A list such as `1,2,3`: several numbers, of which the last takes the fraction.
            for piece in pieces[:-1]:
                if piece:
                    yield Decimal(piece), Decimal(1)
            pieces = pieces[-1:]
        sign = "-" if match[0][0] in "-−" else ""
        value = Decimal(f"{sign}{''.join(pieces) or 0}.{fraction or 0}{match['e'] or ''}")
        denominator = Decimal(match["d"] or 1)
        if denominator:  # 3/0 is no number
            yield value, denominator

    def _equal(self, number: Quotient, truth: Quotient) -> bool:
        # Decimals of one denominator are compared exactly: as floats, long numbers that differ would be equal.
        quotient = _quotient(number)
        true_quotient = _quotient(truth)
        if number == truth or (number[1] != truth[1] and quotient == true_quotient):
            return True
        tolerance = max(float(self.abs_tol), float(self.rel_tol) * abs(true_quotient))
        if not tolerance > 0 or not (math.isfinite(quotient) and math.isfinite(true_quotient)):
            return False
        return abs(quotient - true_quotient) <= tolerance


def _quotient(number: Quotient) -> float:
    try:
        return float(number[0]) / float(number[1])
    except (OverflowError, ZeroDivisionError):
        return math.inf


exact_match_reward = ExactMatchReward()
numeric_reward = NumericReward()


@dataclass(eq=False, repr=False)
class ChoiceReward(AgainstColumn):
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

    column: str = "answer"
    letters: str = "ABCDE"
    name: str = "choice_reward"
    on_error: OnError = "unscorable"

    def __post_init__(self):
        super().__post_init__()
        letters = self.letters if isinstance(self.letters, str) else ""
        if not re.fullmatch(r"[A-Z]{2,26}", letters) or len(set(letters)) < len(letters):
            expected = "different capital letters, such as ABCD"
            raise InputError("letters", repr(self.letters), expected, "Name every choice once.")

    def is_right(self, completion: str, truth: str) -> bool:
        return self.choice(completion) == truth

    def choice(self, completion: str) -> str | None:
        """The letter that a completion picks; `None` for none or more than one."""
        text = after_thinking(completion)
        marked = marked_answer(text)
        if marked is not None:
            picked = self._in_short(marked)
        else:
            # From the most explicit way to the least.
            picked = self._by_phrase(text) or self._alone(text) or set(re.findall(rf"\(([{self.letters}])\)", text))
        return picked.pop() if len(picked) == 1 else None  # two letters would be correct by listing

    def read(self, truth: object) -> str:
        # A position, as MMLU has it, or the letter. To Python, `True` is the integer 1.
        if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(self.letters):
            return self.letters[truth]
        if isinstance(truth, str):
            picked = self._in_short(truth)
            if len(picked) == 1:
                return picked.pop()
        expected = f"one of {self.letters} or a position from 0"
        raise UnscorableError(f"column {self.column!r} holds {truth!r}, which is not {expected}")

    def _alone(self, text: str) -> set[str]:
        """A bare letter, perhaps in brackets, or a letter in front of its choice: `B`, `**(B)**`, `B) Paris`."""
        text = text.strip()
        match = re.match(rf"[\s(*\[$]*([{self.letters}])(?![\w'’])[)\].:*$]*(?=\s|$)", text)
        if match is None or (match.end() < len(text) and match[0][-1] not in ").:]"):
            return set()  # `A` of `A train leaves` is a word
        picked = {match[1]}
        # `A. or B.` and a list of all the choices name more than one.
        alternatives = rf"\b(?:or|and)\b[\s(*]*([{self.letters}])\b|(?<!\w)([{self.letters}])[)\]:]"
        for after_or, bracketed in re.findall(alternatives, text[match.end(1) :]):
            picked.add(after_or or bracketed)
        return picked

    def _in_short(self, text: str) -> set[str]:
        """Choices named by the contents of a tag, a box or a column, in capitals or small letters."""
        text = without_fonts(text)
        picked = self._alone(text)
        if not picked and len(text) <= 4:  # `b`, `(b)`, `b.`; in a longer text `a` is a word
            picked = self._alone(text.upper())
        return picked or self._by_phrase(text) or set(re.findall(rf"(?<!\w)[{self.letters}](?![\w'’])", text))

    def _by_phrase(self, text: str) -> set[str]:
        # A letter and what may be set around it, of bounded length: the pattern is searched for in any text.
        letter = rf"[\s(*\[$]{{0,8}}(?:\\boxed\{{)?[{self.letters}](?![\w'’])[)\]*.$}}]{{0,8}}"
        lead = r"(?i:\b(?:answer|choice|option)(?:\s+is|\s*[:=])(?:\s*:)?(?:\s+(?:option|choice))?)[\s:*]{0,8}"
        # With what follows on "or": "The answer is A or B" picks two.
        phrases = re.findall(rf"{lead}({letter}(?:\s*(?:,|/|\bor\b|\band\b)+{letter})*)", text)
        return set(re.findall(rf"(?<!\w)[{self.letters}](?!\w)", " ".join(phrases)))


choice_reward = ChoiceReward()


register_reward(
    "exact_match_reward",
    exact_match_reward,
    help="1 if the answer is the column's text.",
    factory=ExactMatchReward,
    is_harmless=True,
)
register_reward(
    "numeric_reward",
    numeric_reward,
    help="1 if the answer is the column's number.",
    factory=NumericReward,
    is_harmless=True,
)
register_reward(
    "choice_reward",
    choice_reward,
    help="1 if the answer is the column's choice.",
    factory=ChoiceReward,
    is_harmless=True,
)
