r"""The final answer of a completion, read as far as that is cheap: its variable, its value, its unit.

`x = 5\text{ cm}` is 5, of `x`, in cm. What is not read here stays text, for the comparison and for algebra. Also here:
whether a gold answer can be read.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from trl_drgrpo.rewards.functions.mathematics.cjk import ANSWER, HAN
from trl_drgrpo.rewards.functions.mathematics.guards import MAX_CHARS, MAX_DEPTH, is_well_formed
from trl_drgrpo.rewards.functions.mathematics.latex import tidy, unwrapped
from trl_drgrpo.rewards.functions.mathematics.quantities import Number, exact_number, split_scale, split_unit
from trl_drgrpo.rewards.functions.mathematics.relations import CALL, DERIVATIVE, NAME, bracketed, chain, condition
from trl_drgrpo.rewards.sample import after_thinking, last_boxed, last_tagged

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
# A variable that was set as text: 2\text{x}
_LETTER_IN_TEXT = re.compile(r"(?<=.)\\text\{([a-zA-Z])\}")
# A formula that breaks off: `\frac`, `x +`, `\sqrt{2}^`
_DANGLING = re.compile(r"(?:\\(?:frac|sqrt)|[\^_=+\\-])\s*$|\\frac(?!\{)")
# v_{\text{max}} and v_{\max}, which are v_{max}
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
    Reason why a bare gold answer, as written, cannot be compared with anything; `None` where it can be read.

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
    if len(words) > _MAX_PROSE:
        return f"prose: more than {_MAX_PROSE} words"
    return None


@functools.lru_cache(maxsize=_CACHE)
def read(text: str) -> Answer:
    """Read variable, value and unit of a tidied answer."""
    # From the outside to the inside: the label, the left side, the unit, the brackets. What is left is the value.
    variable = ""
    text = condition(unlabeled(text))
    links = chain(text)
    if links:
        text = links.text
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment:
        text = assignment[2]
        if not re.fullmatch(r"\\text\{[^{}]*\}", assignment[1]):  # \text{Area} = 5 names no variable
            variable = _PLAIN_INDEX.sub(r"_{\1\2}", assignment[1])  # v_{\max} and v_{\text{max}} are v_{max}
    text, unit = split_unit(unwrapped(text))
    parts = bracketed(text)
    if parts and len(parts.items) == 1 and parts.brackets in ("()", "{}"):
        # `(x+1)` and `\{5\}` are their only entry; pairs and sets keep their brackets.
        text = parts.items[0]
    number = exact_number(text)
    factor, unit = split_scale(unit)
    if factor > 1:  # 5 million dollars
        text = rf"({text})\cdot {factor}"
        if number:
            number = Number(number.value * factor)
    if not unit:
        text = _LETTER_IN_TEXT.sub(r"\1", text)  # 2\text{x} is 2x
    return Answer(text, unit, variable, number)


def unlabeled(text: str) -> str:
    r"""Read `\text{The answer is }5` as `5`; a tidied answer without such a beginning, or with a denial in it, stays
    as it is."""
    label = _LABEL.fullmatch(text)
    if not label or _DENIAL.search(label[1]):
        return text
    return label[2]


# "The answer is" and the like. Repetitions of blanks and of words between are bounded, so that time stays linear.
_STATEMENT = re.compile(
    r"(?:^|(?<=[\s*_(>]))(?:final |correct )?answer[*_]{0,3}\s{0,4}(?:is\b|[:=：]|\bto [^.\n:]{0,80} is\b)"
    rf"(?:[*_]{{1,3}}(?=[\s:]))?\s{{0,4}}:?(?:[*_]{{1,3}}(?=\s))?|{ANSWER}[*_]{{0,3}}",
    re.IGNORECASE,
)
# "The answer is therefore 5"
_FILLERS = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|indeed|now|simply|just|clearly|exactly|equal to|approximately|about)"
    r"[,:]?\s+){1,3}",
    re.IGNORECASE,
)
# 5 (five), 18 (dollars); a base or a modulus belongs to the number.
_REMARK = re.compile(
    r"(?<=\S)\s+\((?!.*\b(?:mod|base|not|or|\w+illion|thousand|hundred)\b)[a-zA-Z]{2}[a-zA-Z ,'-]*\)$"
)
# **18**, __18__, `18`, "18": emphasis around the beginning of the text
_EMPHASIS = re.compile(r"(\*{1,3}|_{2,3}|[`'\"])(?=\S)([^*`\n]+)\1(?!\w)")
_EMPHASIS_END = re.compile(r"(?<=[^\s*])\*{1,3}(?=[\s.,;:!?。，；]|$)")  # no power: 2**3
_HASHES = re.compile(r"^[ \t]*#{4}(?!#)(.*)$", re.MULTILINE)
# "#### Step 1: Add" and "#### Answer:", which are headings of Markdown.
_HEADING = re.compile(
    r"\d+[.)]\s+\D|(?:step|part|case)\b|(?:final |the )*(?:answer|conclusion|solution)\b|.*:$", re.IGNORECASE
)
_STARTS_WITH_NUMBER = re.compile(r"[-+(\[*]*\s*(?:[$\\€£]|\.?\d)|\(?[A-J]\)?$|[a-z]\s*=")
# A last line that is an answer by itself: a formula between dollar signs, or a number
_BARE_LINE = re.compile(r"\$+[^$]+\$+\.?|\\\(.+\\\)\.?|\\\[.+\\\]|[-+]?[\d.,/]*\d[%％]?[.。]?")
# Where the sentence that states the answer goes on to something else.
_SENTENCE_END = re.compile(
    r"(?<=[^\s.])\.(?=\s+[A-Z*(]|\s*$|\*{1,3}(?:\s|$))|\s(?:because|since|which|so that|as required)\b|"
    rf"[。！？]|[，；,;](?=\s*[{HAN}])"
)
# "The answer is 3. Or it could be 4." says two things, so does "The answer is 3. No, it is 4."
_IT = r"(?:it|that|this|the (?:\w+ )?answer)"
_IT_COULD_BE = rf"{_IT} (?:could|may|might|can)(?: also| well| instead| even)* be"
_ALTERNATIVE = re.compile(
    r"[\s.,;?!*$)\\。，；？！]*"
    rf"(?:(?:或者?|也?可能|也可以|不对，?|不，|あるいは|または)(?:是|为|為)?|"
    rf"(?:or|alternatively|maybe|perhaps|possibly),?(?: {_IT_COULD_BE}| {_IT} is| it's| maybe| perhaps)?|"
    rf"(?:but |though |and |then again,? )?{_IT_COULD_BE}|(?:(?:wait|no|actually|sorry)[,.]+ ?)+(?:{_IT} is|it's)?)"
    r"\s*([-+(\[]*[$\\]*[\d.\\(][^\n?!;]{0,60})",
    re.IGNORECASE,
)
# A formula between dollar signs; in `$5 per hour` the sign is a currency.
_MATH_SPAN = re.compile(r"(\$\$?)(?!\d[\d.,]*(?:\s|$))(.+?)\1(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]")


def boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` that is closed, `\fbox{...}` and `\boxed 5` included.

    Example:

    ```python
    >>> boxed_answer(r"First \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'

    ```
    """
    return (last_boxed(text) or "").rstrip(".,;。，；") or None


def tagged_answer(text: str) -> str | None:
    """Content of the last closed `<answer>...</answer>`; if it holds a box or a closing statement, what that says."""
    inner = last_tagged(text)
    if inner is None:
        return None
    return boxed_answer(inner) or _stated(inner) or inner or None


def final_line_answer(text: str) -> str | None:
    """Return the answer behind the last "####" or "answer is", or a last line that is a number or a formula."""
    answer = _hashed(text) or _stated(text)
    if answer:
        return answer
    last = text.rstrip().rpartition("\n")[2].strip().strip("*")
    if len(last) > MAX_CHARS or not _BARE_LINE.fullmatch(last):
        return None
    return last


def _hashed(text: str) -> str | None:
    """The answer of GSM8K's `#### 42`; a Markdown heading of that level has none."""
    length = len(text.rstrip())
    for line in reversed(list(_HASHES.finditer(text))):
        content = line[1].strip()
        if not content or _HEADING.match(content[:MAX_CHARS].lstrip("*_ ")):
            continue
        # Words alone are an answer in the last line only: further up they are a heading.
        if _STARTS_WITH_NUMBER.match(content) or line.end() >= length:
            return content
    return None


def _stated(text: str) -> str | None:
    text = text.rstrip()
    start = None
    for statement in _STATEMENT.finditer(text):
        if statement.end() < len(text):  # one that breaks off leaves the one before it
            start = statement.end()
    if start is None:
        return None
    stated = text[start:].lstrip()[:MAX_CHARS]
    answer = _first_stated(stated)
    if not answer or answer not in stated:  # respelled: what stands behind it cannot be found
        return answer
    # Two answers are both given, so that the comparison sees them both.
    alternative = _ALTERNATIVE.match(stated, stated.find(answer) + len(answer))
    return f"{answer} or {_first_stated(alternative[1])}" if alternative else answer


def _first_stated(text: str) -> str | None:
    """Return the answer that the sentence at the beginning of a text states."""
    if not text.startswith((r"\[", "$$")):  # a displayed formula goes on in the next line
        text = text.split("\n", 1)[0]
    if _FILLERS.match(text):
        text = _FILLERS.sub("", text, count=1)
    emphasis = _EMPHASIS.match(text)
    if emphasis:
        text = emphasis[2] + text[emphasis.end() :]
    text = _EMPHASIS_END.sub("", text)  # of one that was opened before the text
    boxed = boxed_answer(text)
    if boxed:
        return boxed
    formula = _MATH_SPAN.match(text)
    after = text[formula.end() :] if formula else ""
    if formula and not re.match(r"\s*(?:,|and|or|[-+*/^=])", after):  # else the formula is a part of the answer
        content = formula[2] or formula[3] or formula[4]
        # One word behind the formula may be its unit; anything longer is a comment on it.
        unit = re.match(r"\s*([a-zA-Z%]+)\s*\.?\s*$", after)
        return rf"{content} \text{{ {unit[1]} }}" if unit else content
    end = _SENTENCE_END.search(text)
    if end:
        text = text[: end.start()]
    return _REMARK.sub("", text.strip().rstrip(",;:")).strip() or None


def _auto(text: str) -> str | None:
    return boxed_answer(text) or tagged_answer(text) or final_line_answer(text)


ANSWER_FORMATS: dict[str, Callable[[str], str | None]] = {
    "auto": _auto,
    "boxed": boxed_answer,
    "tags": tagged_answer,
    "final_line": final_line_answer,
}


def extract_answer(completion: str, answer_format: str = "auto") -> str | None:
    r"""The final answer in a completion, as written.

    Args:
        completion (`str`): The model's text. Text before the last `</think>` is ignored.
        answer_format (`str`, *optional*, defaults to `"auto"`):
            `"boxed"`: the last closed `\boxed{...}`. `"tags"`: the last `<answer>...</answer>`. `"final_line"`: the
            last "#### 42" or "The answer is 42.", or a last line that is a number or a formula. `"auto"`: in this
            order.

    Returns:
        `str` or `None`: `None` where there is no answer in that place.

    Example:

    ```python
    >>> extract_answer("2 + 2 = 4, so the answer is 4.")
    '4'

    ```
    """
    return ANSWER_FORMATS[answer_format](after_thinking(completion))


def gold_answers(gold: Any) -> list[str]:
    r"""
    The correct answers that a dataset's column holds for one problem; empty for `None`, an empty string, NaN.

    `gold`: a bare answer, a solution that ends in `\boxed{...}`, "#### 42" or `<answer>...</answer>`, a number, or a
    list of these, of which any counts.
    """
    if isinstance(gold, str):
        # Marks before the bare text. `final_line` is not among them: a bare gold answer is a last line itself.
        answer = boxed_answer(gold) or _hashed(gold) or tagged_answer(gold) or gold.strip()
        return [answer] if answer else []
    if hasattr(gold, "tolist"):  # numpy and torch
        gold = gold.tolist()
    if isinstance(gold, (list, tuple)):
        return [answer for entry in gold for answer in gold_answers(entry)]
    if isinstance(gold, bool) or not isinstance(gold, (int, float)) or not math.isfinite(gold):
        return []
    if gold == int(gold):  # pandas reads a column of integers with a gap as floats: 42.0
        gold = int(gold)
    return [repr(gold)]
