r"""Tell whether two mathematical answers are the same: by spelling, by value, by structure, and only then by algebra.

Math-Verify reads the LaTeX and compares what is left for it, such as `\frac{\sqrt{3}}{3}` and `\frac{1}{\sqrt{3}}`.
It is not asked what the cheap steps before it decide, which are most samples of a run, and neither what it gets wrong:
small numbers (it rounds to six places), bases (`52_8` counts as 52), `\frac12`, units, the order in `(2, 1)`.
Tuples, intervals, sets, unions and matrices are taken apart here and compared entry by entry.

`deep=False` leaves algebra out; what remains is bounded, and quick. Bounding algebra is the business of the caller.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from trl_drgrpo.rewards.functions.mathematics import relations
from trl_drgrpo.rewards.functions.mathematics.answers import Answer, read, unlabeled
from trl_drgrpo.rewards.functions.mathematics.cjk import in_english
from trl_drgrpo.rewards.functions.mathematics.guards import MAX_CHARS, is_cheap, is_well_formed
from trl_drgrpo.rewards.functions.mathematics.latex import letters, tidy
from trl_drgrpo.rewards.functions.mathematics.quantities import (
    PERCENT,
    exact_number,
    is_near,
    letter_unit,
    numbers_equal,
    percent_equal,
    units_agree,
)
from trl_drgrpo.rewards.functions.mathematics.signs import in_ascii

# A number with its base: `52_8`, `1A_{16}`, `11_{\text{two}}`
_BASED = re.compile(r"([\dA-Za-z]+)_\{?(?:\\text\{[a-z]+\}|\d+)\}?")
_WRAPPED = re.compile(r"\\text\{|\}")
# Words, "yes" and "no", a choice. `abc` is a product, so a word has four letters at least.
_WORD = re.compile(r"[A-Za-z](?:[A-Za-z' ]|-(?=[A-Za-z]{3})){3,}|(?i:yes|no)|\([A-Z]\)|[A-Z]")
_ARTICLE = re.compile(r"(?i:the|an?) (?=[A-Za-z]{3})")
_VECTOR = re.compile(r"\\(?:vec|mathbf|boldsymbol)(?:\s*\{\s*([a-zA-Z])\s*\}|\s+([a-zA-Z])(?![a-zA-Z]))")
_RATIO = re.compile(r"(\d+) ?: ?(\d+)")
_MAX_ENTRIES = 30  # of a set; in a longer one only spelling is compared


# Public --------------------------------------------------------------------------------------------------------------


def equivalent(gold: str, answer: str, deep: bool = True) -> bool | None:
    r"""Tell whether `answer` says the same as `gold`.

    Args:
        gold (`str`): A readable gold answer.
        answer (`str`): What was extracted from a completion.
        deep (`bool`, *optional*, defaults to `True`): Whether algebra may be used. It may take as long as it takes.

    Returns:
        `bool` or `None`: `None` only with `deep=False`: cheap means do not decide it.

    Example:

    ```python
    >>> equivalent(r"\frac12", "0.5"), equivalent(r"12\text{ m}", r"12\text{ g}"), equivalent("3+c", "3+d", deep=False)
    (True, False, None)

    ```
    """
    gold = _respelled(gold)
    answer = _respelled(answer)
    choice = _words(tidy(gold)) or ""
    if re.fullmatch(r"[A-J]", choice):
        # Before brackets are checked, which `C)` leaves open.
        letter = relations.choice(answer, choice)
        if letter:
            return letter == choice
    if not is_well_formed(answer):  # the gold answer was checked when the row was read
        return False
    if _VECTOR.search(gold):
        # The answer may write the same vector with an arrow, in bold or as a plain letter.
        gold = _VECTOR.sub(r"\\text{\1\2}", gold)
        answer = _VECTOR.sub(r"\\text{\1\2}", answer)
    gold_text = tidy(relations.union(gold))
    answer_text = tidy(relations.union(answer))
    # Macros in place of signs lengthen a text, so a bound on the answer as written is not enough.
    if len(answer_text) > 2 * MAX_CHARS:
        return gold_text == answer_text
    return _same(gold_text, answer_text, deep)


def _respelled(text: str) -> str:
    """Write an answer of other scripts in ASCII, as far as it can be read."""
    if text.isascii() or len(text) > MAX_CHARS:
        return text
    return in_english(in_ascii(text))  # before `tidy`, which no longer finds the words


# By spelling, value and structure ------------------------------------------------------------------------------------


def _same(gold: str, answer: str, deep: bool) -> bool | None:
    # From the cheapest to the dearest: each step either decides or leaves the pair to the next.
    if gold == answer:
        return True
    gold = unlabeled(gold)
    answer = unlabeled(answer)
    # Forms that say a value twice, `\frac13 \approx 0.33` or `2 + 3 = 5`: both sayings have to agree.
    claim = relations.approximation(answer)
    if claim:
        return _same_as_claimed(gold, claim, deep)
    claim = relations.approximation(gold)
    if claim:  # of a gold answer either side is true
        return _either(_same(side, answer, deep) for side in {*claim})
    links = relations.chain(answer)
    if links:
        agreed = _all_same([links.last] * len(links.links), links.links, deep)
        if agreed is False:  # `2 + 2 = 5 = 4` is false, whatever it ends in
            return False
        verdict = _same(gold, links.text, deep)
        if verdict and not agreed:  # only algebra can tell whether the chain is true
            return None
        return verdict
    return _same_as_read(read(gold), read(answer), deep)


def _same_as_read(a: Answer, b: Answer, deep: bool) -> bool | None:
    """Compare a gold answer with another one, of which variable, value and unit were read."""
    # 50% may answer 0.5, so a percent sign that only one of them has is left to the numbers.
    if not units_agree(a.unit, b.unit) and PERCENT not in (a.unit, b.unit):
        return False
    # A name that only one of them has is forgiven: `5` and `x = 5`.
    if a.variable != b.variable and a.variable and b.variable:
        variables = (a.variable, b.variable)
        if any(re.fullmatch(relations.CALL, variable) for variable in variables):  # f(2) = 5 against f(3) = 5
            return False
        are_names = all(re.fullmatch(relations.NAME, variable) for variable in variables)
        if are_names and a.number and b.number:  # x = 5 against y = 5
            return False
        return relations.same_formula(a.equation, b.equation, deep)

    if a.number and b.number:
        return _same_numbers(a, b)
    if _same_with_letter(a, b) or _same_with_letter(b, a) or _is_ratio(a, b):
        return True
    if PERCENT in (a.unit, b.unit) and a.unit != b.unit:  # no numbers, so it is not 50% against 0.5
        return False
    if a.text == b.text:
        return True

    # Before algebra, which ignores the order in `(2, 1)` and reads a word as a product of its letters.
    verdict = _same_intervals(a.text, b.text, deep)
    if verdict is not _UNDECIDED:
        return verdict
    verdict = _same_words(a.text, b.text)
    if verdict is not _UNDECIDED:
        return verdict
    verdict = _same_collections(relations.spread(a.text), relations.spread(b.text), deep)
    if verdict is not _UNDECIDED:
        return verdict

    if a.number and not a.unit:
        # Only of the answer: a gold `12 m` may be a product.
        quantity = letter_unit(b.text)
        if quantity:
            return _same_numbers(a, read(quantity[0]))
    constant = _constant(a.text)
    if constant and _constant(b.text):
        # The constant of integration is C or c; to algebra these are two variables.
        return relations.same_formula(a.text, b.text[:-1] + constant, deep)
    if relations.is_relation(a.text) != relations.is_relation(b.text):
        return _relation_against_other(a, b, deep)
    return relations.same_formula(a.text, b.text, deep)


_UNDECIDED = object()  # this step says nothing; `None` is a verdict, "only algebra can tell"


def _same_numbers(a: Answer, b: Answer) -> bool:
    if a.number is None or b.number is None:
        return False
    if (a.unit == PERCENT) == (b.unit == PERCENT):
        return numbers_equal(a.number, b.number)
    if b.unit == PERCENT:
        return _same_numbers(b, a)
    return not b.unit and percent_equal(a.number, b.number)


def _same_with_letter(with_unit: Answer, bare: Answer) -> bool:
    r"""Compare `12 \text{ m}` with `12 m`, the same with the unit set as a variable."""
    if bare.unit or not with_unit.unit:
        return False
    quantity = letter_unit(bare.text)
    if not quantity or quantity[1] != with_unit.unit:
        return False
    return _same_numbers(with_unit, read(quantity[0]))


def _is_ratio(gold: Answer, answer: Answer) -> bool:
    """Tell whether the answer is a fraction as a ratio, `5:3`, in lowest terms. A gold `5:03` is a time."""
    ratio = _RATIO.fullmatch(answer.text)
    if not ratio or not gold.number:
        return False
    # The fraction is in lowest terms, so `10:6` does not answer 5/3.
    return (int(ratio[1]), int(ratio[2])) == gold.number.value.as_integer_ratio()


def _constant(text: str) -> str | None:
    """Return the last letter of `x^2+C`, if it occurs once and there are others."""
    variables = letters(text[:-1])
    if not variables or variables & {"c", "C"} or not re.search(r"\+ ?[cC]$", text):
        return None
    return text[-1]


def _same_as_claimed(gold: str, claim: relations.Approximation, deep: bool) -> bool | None:
    r"""Compare with `\sqrt{2} \approx 1.41`: its left side, or its right side if that is precise; neither if it is
    false."""
    exact = read(claim.exact)
    rounded = read(claim.rounded)
    # Nothing to check: only one side is there, or the other is no number, or has another unit.
    is_claim = claim.exact != claim.rounded and rounded.number is not None
    if not is_claim or rounded.unit not in ("", PERCENT, exact.unit):
        return _same(gold, claim.exact, deep)
    value = None
    if exact.number:
        value = exact.number.value
    elif deep and is_cheap(exact.text):
        from trl_drgrpo.rewards.functions.mathematics.algebra import real_value

        value = real_value(relations.for_algebra(exact.text))
    if value is None:
        verdict = _same(gold, claim.exact, deep)
        if deep:
            return verdict
        # Only algebra can tell whether the claim is true, so that no side is right before it.
        return _either([verdict, _same(gold, claim.rounded, deep)]) and None
    if rounded.unit == PERCENT != exact.unit:  # \frac13 \approx 33.3\%
        value *= 100
    if not is_near(rounded.text, value):  # \pi \approx 3.20 is false, whatever is due
        return False
    sides = claim[:1]
    if is_near(rounded.text, value, precisely=True):  # `\sqrt2 \approx 1.41` answers 1.41, too; `\approx 1` does not
        sides = claim
    return _either(_same(gold, side, deep) for side in sides)


def _either(verdicts: Iterable[bool | None]) -> bool | None:
    """Return `True` if one is, else undecided if one is, else `False`."""
    verdicts = [*verdicts]
    if True in verdicts:
        return True
    return None if None in verdicts else False


def _same_words(gold: str, answer: str) -> Any:
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
        # `52_8` by its spelling, as algebra takes it for 52; `x_2` is a variable, which is left to algebra.
        if gold[:1].isdigit() or answer[:1].isdigit():
            return _WRAPPED.sub("", gold) == _WRAPPED.sub("", answer)
        return _UNDECIDED
    if ":" in gold or ":" in answer:  # times and ratios: 8:30 is no quotient
        return _letters(gold) == _letters(answer)
    a = _words(gold)
    b = _words(answer)
    if a is None and b is None:
        return _UNDECIDED
    if a is None or b is None:
        # A single letter may be a variable, which algebra compares with a formula.
        return False if len(a or b or "") > 1 else _UNDECIDED
    if len(a) == len(b) == 1:  # A and a may be two variables
        return a == b
    return a.casefold() == b.casefold()


def _letters(text: str) -> str:
    return re.sub(r"\\text|[{}\s.]", "", text).casefold()


def _words(text: str) -> str | None:
    """Return the text of an answer in words or of a choice, without its wrapper; `None` for mathematics."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"\s+", " ", plain).strip().rstrip(".")
    if plain == "DNE":
        return "does not exist"
    plain = _ARTICLE.sub("", plain)
    return plain.strip("()") if _WORD.fullmatch(plain) else None


def _same_intervals(gold: str, answer: str, deep: bool) -> Any:
    gold_interval = relations.interval(gold)
    answer_interval = relations.interval(answer)
    if gold_interval and answer_interval:
        if gold_interval[0] != answer_interval[0]:  # inequalities of two variables
            return _UNDECIDED
        return _same(gold_interval[1], answer_interval[1], deep)
    if gold_interval and _may_be_interval(answer):
        return _same_collections(gold_interval[1], answer, deep)
    if answer_interval and _may_be_interval(gold):
        return _same_collections(gold, answer_interval[1], deep)
    return _UNDECIDED


def _may_be_interval(text: str) -> bool:
    return r"\infty" in text or relations.bracketed(text) is not None


def _same_collections(gold: str, answer: str, deep: bool) -> Any:
    gold_matrix = relations.matrix(gold)
    answer_matrix = relations.matrix(answer)
    if gold_matrix and answer_matrix:
        if [*map(len, gold_matrix)] != [*map(len, answer_matrix)]:
            return False
        return _all_same([*chain(*gold_matrix)], [*chain(*answer_matrix)], deep)
    if gold_matrix:
        return _same_vector(gold_matrix, answer, deep)
    if answer_matrix:
        return _same_vector(answer_matrix, gold, deep)

    # 100,200 is a number; 100, 200 is a list.
    gold_list = None if exact_number(gold) else relations.collection(gold)
    answer_list = None if exact_number(answer) else relations.collection(answer)
    if gold_list is None and answer_list is None:
        return _UNDECIDED
    if gold_list is None or answer_list is None:
        if answer_list and answer_list.brackets == "" and len(answer_list.items) <= _MAX_ENTRIES:
            # `0.5 or 1/2` is one answer, given twice.
            verdict = _all_same([gold] * len(answer_list.items), answer_list.items, deep)
            if verdict is not False:
                return verdict
        # A relation may still say the same as an interval: `x > 5` and `(5, \infty)`.
        return _UNDECIDED if relations.is_relation(gold) or relations.is_relation(answer) else False
    if len(gold_list.items) != len(answer_list.items):
        return False

    kinds = {gold_list.brackets, answer_list.brackets}
    if kinds <= {"", "()"}:
        # `x = 2, y = 3` against `(2, 3)`: the names give the order.
        gold_values = relations.by_name(gold_list.items)
        answer_values = relations.by_name(answer_list.items)
        if bool(gold_values) != bool(answer_values):
            return _all_same(gold_values or gold_list.items, answer_values or answer_list.items, deep)
    if kinds <= {"", "{}"} or kinds == {"U"}:
        return _same_in_any_order(gold_list.items, answer_list.items, deep)
    # `(2, 3)` may answer `2, 3`, but `2, 3` is no point `(2, 3)`.
    if (gold_list.brackets, answer_list.brackets) == ("", "()") or len(kinds) == 1:
        return _all_same(gold_list.items, answer_list.items, deep)
    return False


def _same_vector(matrix: Sequence[Sequence[str]], text: str, deep: bool) -> Any:
    """Compare a matrix with a tuple: one column is a vector."""
    vector = relations.bracketed(text)
    if not vector or vector.brackets != "()":
        return False
    column = [*chain(*matrix)]
    if not len(column) == len(matrix) == len(vector.items):  # with more entries than rows it is no column
        return False
    return _all_same(column, vector.items, deep)


def _all_same(gold: Sequence[str], answer: Sequence[str], deep: bool) -> bool | None:
    # The cheap look at all entries first: one that differs spares the algebra for the others.
    verdicts = [_same(a, b, False) for a, b in zip(gold, answer, strict=True)]
    if False in verdicts:
        return False
    if not deep:
        return None if None in verdicts else True
    for verdict, a, b in zip(verdicts, gold, answer, strict=True):
        if not verdict and not _same(a, b, True):
            return False
    return True


def _same_in_any_order(gold: tuple[str, ...], answer: tuple[str, ...], deep: bool) -> bool | None:
    if len(gold) > _MAX_ENTRIES:
        return sorted(gold) == sorted(answer)
    unmatched = list(answer)
    open_entries = []
    for entry in gold:
        if not _take_partner(entry, unmatched, False):
            open_entries.append(entry)
    if not open_entries:
        return True
    for entry in open_entries:
        # One entry without any possible partner spares the algebra for all the others.
        if all(_same(entry, candidate, False) is False for candidate in unmatched):
            return False
    if not deep:
        return None
    return all(_take_partner(entry, unmatched, True) for entry in open_entries)


def _take_partner(entry: str, unmatched: list[str], deep: bool) -> bool:
    """Take the partner of an entry out of the unmatched ones; return whether there was one."""
    for candidate in unmatched:
        # Sameness is an equivalence, so each entry may take the first partner that fits.
        if _same(entry, candidate, deep):
            unmatched.remove(candidate)
            return True
    return False


def _relation_against_other(a: Answer, b: Answer, deep: bool) -> bool | None:
    """Compare a relation with something else: `x > 5` says the same as `(5, \\infty)`; no other relation is the same
    as something that is none."""
    relation = a.text
    value = b.text
    if relations.is_relation(value):
        relation, value = value, relation
    if value.startswith(("(", "[")) and "=" not in relation:
        return relations.same_formula(relation, value, deep)
    name = a.variable or b.variable
    if name and "=" in relation:  # y = 2x against y - 2x = 0
        return relations.same_formula(a.equation, b.equation, deep)
    return False
