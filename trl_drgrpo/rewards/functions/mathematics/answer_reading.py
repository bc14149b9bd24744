r"""An answer, read as far as that is cheap: its variable, its value, its unit; and whether a gold answer can be read.

`x = 5\text{ cm}` is 5, of `x`, in cm. What is not read here stays text, for the comparison and for algebra.
"""

import functools
import re
from typing import NamedTuple

from trl_drgrpo.rewards.functions.mathematics.brackets import bracketed
from trl_drgrpo.rewards.functions.mathematics.guards import MAX_CHARS, MAX_DEPTH, is_well_formed
from trl_drgrpo.rewards.functions.mathematics.latex import tidy, unwrapped
from trl_drgrpo.rewards.functions.mathematics.quantities import Number, exact_number
from trl_drgrpo.rewards.functions.mathematics.relations import CALL, DERIVATIVE, NAME, chain, condition
from trl_drgrpo.rewards.functions.mathematics.units import split_scale, split_unit

_CACHE = 4096
# Left sides that only name what is given: x, x_1, f(3), m\angle ABC; none that calculates.
_LEFT_SIDE = rf"{NAME}|{CALL}|{DERIVATIVE}|\\text\{{[^{{}}]*\}}|[^=<>\d+*/^,{{}}-]{{1,40}}?"
_ASSIGNMENT = re.compile(rf"({_LEFT_SIDE}) ?(?:=|\\in(?![a-zA-Z])) ?([^=<>]+)")
# "The answer is 5", as text or not.
_LABEL = re.compile(
    r"((?:\\text\{[^{}]*\}[^{}=<>]{0,20})?\\text\{[^{}]*(?:\b(?:is|are|equals)|:) ?\}|"
    r"(?:[A-Za-z]+ ){1,6}(?:is|are|equals)(?![a-zA-Z])) ?(\S.*)"
)
_DENIAL = re.compile(r"(?i)\b(?:not|never|no|or|if|than|there|wrong|false|neither|nor|isn|unless|without)\b|n't")
_LETTER_IN_TEXT = re.compile(r"(?<=.)\\text\{([a-zA-Z])\}")
_DANGLING = re.compile(r"(?:\\(?:frac|sqrt)|[\^_=+\\-])\s*$|\\frac(?!\{)")
_PLAIN_INDEX = re.compile(r"_\{(?:\\text\{(\w+)\}|\\(max|min))\}")
_MAX_PROSE = 6  # words; a longer text is no answer that can be compared


class Answer(NamedTuple):
    """An answer, read as far as that is cheap.

    Args:
        text (`str`): The tidied answer without unit and without `x =`.
        unit (`str`): In one spelling; empty where there is none.
        variable (`str`): The left side of `x = 5` or `x \\in [0, 1]`; empty where there is none.
        number (`Number`, *optional*): The exact value, where it is a number.
    """

    text: str
    unit: str
    variable: str
    number: Number | None

    @property
    def equation(self) -> str:
        """The answer with its left side."""
        return f"{self.variable} = {self.text}" if self.variable else self.text


@functools.lru_cache(maxsize=_CACHE)
def unreadable(gold: str) -> str | None:
    r"""
    Why a bare gold answer, as written, cannot be compared with anything; `None` where it can be read.

    Example:

    ```python
    >>> unreadable(r"\frac{1}{"), unreadable(r"\frac{1}{2}")
    ('a bracket is not closed, or more than 20 are nested', None)

    ```
    """
    if len(gold) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if not re.search(r"\w|\\", gold):
        return "empty"
    if not is_well_formed(gold):
        return f"a bracket is not closed, or more than {MAX_DEPTH} are nested"
    text = tidy(gold)
    if not re.search(r"\w|\\", text):
        return "empty"
    if _DANGLING.search(text):
        return "a formula that breaks off"
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return f"prose: more than {_MAX_PROSE} words" if len(words) > _MAX_PROSE else None


@functools.lru_cache(maxsize=_CACHE)
def read(text: str) -> Answer:
    """Variable, value and unit of a tidied answer."""
    variable, text = "", condition(unlabeled(text))
    if links := chain(text):
        text = links.text
    if assignment := _ASSIGNMENT.fullmatch(text):
        is_label = re.fullmatch(r"\\text\{[^{}]*\}", assignment[1])  # \text{Area} = 5
        variable = "" if is_label else _PLAIN_INDEX.sub(r"_{\1\2}", assignment[1])
        text = assignment[2]
    text, unit = split_unit(unwrapped(text))
    text = _without_parentheses(text)
    number, (factor, unit) = exact_number(text), split_scale(unit)
    if factor > 1:  # 5 million dollars
        text = rf"({text})\cdot {factor}"
        number = Number(number.value * factor) if number else None
    text = text if unit else _LETTER_IN_TEXT.sub(r"\1", text)
    return Answer(text, unit, variable, number)


def unlabeled(text: str) -> str:
    r"""`5` of `\text{The answer is }5`; a tidied answer without such a beginning, or with a denial in it, as it is."""
    label = _LABEL.fullmatch(text)
    return label[2] if label and not _DENIAL.search(label[1]) else text


def _without_parentheses(text: str) -> str:
    """`(x+1)` and `\\{5\\}` without brackets; pairs and sets keep theirs."""
    parts = bracketed(text)
    return parts.items[0] if parts and len(parts.items) == 1 and parts.brackets in ("()", "{}") else text
