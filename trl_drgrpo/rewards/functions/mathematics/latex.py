r"""One spelling for LaTeX answers that look alike.

`\frac12`, `\dfrac{1}{2}` and `\frac{1}{2}` are one answer in three spellings. After `tidy` most pairs of equal answers
are equal strings, so that the slow parser and sympy are left with the rest. Nothing here evaluates anything: all
functions are regular expressions and single passes over a text of bounded length.
"""

import functools
import re

from trl_drgrpo.rewards.functions.mathematics.signs import GREEK, in_ascii

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
# The row separator `\\` comes first in each alternation, so that `\\ ` is not read as a backslash and a space command.
_SPACING = re.compile(
    r"\\\\|\\[,;: ]|\\!|~|\\(?:q?quad|displaystyle|textstyle|limits|thinspace)(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}"
)
_SIZES = re.compile(r"\\\\|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*(?:\.(?!\d))?")
_SPACES_OF_MACROS = {r"\\": r"\\", r"\!": ""}
# 10,\!080 and 58{,}500
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))")
_FONTS = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|bf|it|sf)|mbox|hbox|operatorname\*?)(?=\s*\{)")
# `1 \text{ and } 2`, `x = 1 or x = 2`: a list
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z}]))\s*")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_BLANK = re.compile(r"[\t\n\r]")
_DOLLARS = re.compile(r"(?<!\\)\$")
_ABOUT = r"(?:approximately|approx\.?|about|roughly|around)"
ACCENTS = "vec|hat|bar|tilde|dot|ddot|overline|widehat|mathbb|mathbf|mathcal|boldsymbol"
GREEK_NAMES = "|".join(sorted({*GREEK.values()} - {"pi"}))
_GREEK_LETTER = re.compile(rf"\\(?:{GREEK_NAMES})(?![a-zA-Z])")
_MACRO = re.compile(r"\\[a-zA-Z]+")
# Between numbers of three digits the space tells a list, `100, 200`, from a number, `100,200`.
_SPACES = r"(?<![0-9A-Za-z.])(?!(?<=\d,) \d{3}(?!\d)) | (?![0-9A-Za-z.\\])|(?<=[0-9.]) (?=\\)"


Rules = list[tuple[re.Pattern[str], str]]


def rules(*spellings: tuple[str, str]) -> Rules:
    """Compile patterns and their replacements, which are applied in this order."""
    return [(re.compile(pattern), replacement) for pattern, replacement in spellings]


def respelled(text: str, spellings: Rules) -> str:
    """Apply all rules, one after the other."""
    for pattern, replacement in spellings:
        text = pattern.sub(replacement, text)
    return text


# Applied in this order. `(?![a-zA-Z])` ends the name of a macro: `\le` is no part of `\left`.
_SPELLINGS = rules(
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\text\s*\{\s*\}", ""),
    (r"\\text\s*\{\s*d\s*\}(?=\s*(?:[a-zA-Z]|\^|\\(?!text)))", "d"),  # an upright d of a derivative or integral
    (rf"^\s*(?:\\text\s*\{{\s*{_ABOUT}\s*\}}|{_ABOUT}(?![a-zA-Z]))", r"\\approx "),
    (r"\\(?:simeq|doteq)(?![a-zA-Z])", r"\\approx"),
    (r"\\var(epsilon|theta|kappa|rho|sigma|phi)(?![a-zA-Z])", r"\\\1"),
    (r"\\mid(?![a-zA-Z])", "|"),
    (r"\\AA(?![a-zA-Z])|\\(?:mathring|r)\s*\{A\}", "Å"),
    # siunitx, then fonts in the old style of TeX
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1\\text{\2}"),
    (r"\\(?:si|unit|rm)\s*(?=\{)", r"\\text"),
    (r"(?<!\\)\{\s*\\rm(?![a-zA-Z])", r"\\text{"),
    (r"\{:\}", ":"),
    (r"\\(?:text)?color\s*\{[a-zA-Z]+\}|\\underline(?=\s*\{)|\\(?:bf|rm|it|bfseries)(?![a-zA-Z])", ""),
    (r"(?<!\\)\{\s*([^{}]+?)\s*\\choose(?![a-zA-Z])\s*([^{}]+?)\s*\}", r"{\\binom{\1}{\2}}"),
    (r"^\s*(\w+)\s*\\choose(?![a-zA-Z])\s*(\w+)\s*$", r"\\binom{\1}{\2}"),
    (r"\^\s*(?:\\prime(?![a-zA-Z])|\{\s*\\prime\s*\})", "'"),
    (r"(?<!\\)\\$", ""),
    (r"\\text\s*\{\s*(?:percent|%|\\%)\s*\}|(?<![a-zA-Z\\])percent(?:age)?(?![a-zA-Z])", r"\\%"),
    (r"\\lg(?![a-zA-Z])", r"\\log"),
    (r"\\leq(?:slant)?(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?:slant)?(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\*\*", "^"),
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])|\*", r"\\cdot "),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\cup(?![a-zA-Z])|(?<![a-zA-Z\\])U(?=\s*[(\[])(?<=[)\] ]U)", r"\\cup "),  # (0,1) U (2,3)
    # what people write without LaTeX
    (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\sqrt"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
    (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty"),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])", r"\\degree "),
    (r"((?:^|[(\[{,=])\s*)\+", r"\1"),  # a plus sign in front of a number
)
# Spaces go first and last: the rules between them make new places where a space says nothing.
_TIGHT = rules(
    (r"\s+", " "),
    (_SPACES, ""),
    (r"(\\log)_(\d)", r"\1_{\2}"),
    (rf"([\^_])(-?\d+|[a-zA-Z]|\\(?:{GREEK_NAMES}|pi|infty|max|min)(?![a-zA-Z]))", r"\1{\2}"),
    (r"(\\(?:cdot|pm|pi|le|ge))\{(\d+|[a-zA-Z])\}", r"\1 \2"),
    (r"(?<![\\a-zA-Z}\]^_])\{(\d+|[a-zA-Z])\}", r"\1"),  # {10}^{33}
    (_SPACES, ""),
    (r"\{\.(?=\d)", "{0."),
)


@functools.lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""
    One spelling for what looks alike: macros, spaces, wrappers and missing braces. Units, currency and percent signs
    stay where they stood. `text` has at most `MAX_CHARS` characters.

    Example:

    ```python
    >>> tidy(r"$\left( \dfrac 12,\, \sqrt3 \right)$")
    '(\\frac{1}{2},\\sqrt{3})'

    ```
    """
    if not text.isascii():
        text = in_ascii(text)
    text = unwrapped(_BLANK.sub(" ", text))
    if len(_DOLLARS.findall(text)) % 2 == 0:  # $x = 1$ or $x = 2$; an odd one is a currency
        text = _DOLLARS.sub("", text)
    # `\\frac` is an escape too many, except in a matrix, where `\\` ends a row.
    if "matrix" not in text and "array" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _SIZES.sub(lambda match: _SPACES_OF_MACROS.get(match[0], ""), text)
    text = _THOUSANDS.sub("", text)  # while their spaces are still macros: `1\,000` is a number, `1 000` may be two
    text = _SPACING.sub(lambda match: _SPACES_OF_MACROS.get(match[0], " "), text)
    text = _AND.sub(", ", _FONTS.sub(r"\\text", text))
    text = _with_braces(respelled(text, _SPELLINGS))
    return unwrapped(respelled(text, _TIGHT))


def letters(text: str) -> set[str]:
    """The variables in a text, Greek ones by their macros. The names of other macros are none; \\pi is a number."""
    return {*_GREEK_LETTER.findall(text), *re.findall("[a-zA-Z]", _MACRO.sub(" ", text))}


def unwrapped(text: str) -> str:
    r"""Return `text` without what surrounds all of it: dollar signs, brackets of mathematics, bold, `\text{}`, a
    dot."""
    while True:  # until nothing changes: wrappers stand in each other, as in `$\boxed{\text{5.}}$`
        before = text
        text = text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : len(text) - len(closing)]
            # `$1$ or $2$` begins and ends with the sign, too, but is not wrapped by one pair of them.
            if inner and text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
        wrapped = _FONTS.match(text) or re.match(r"\\[fd]?boxed|\\fbox", text)
        if wrapped and text.endswith("}"):
            start = text.find("{", wrapped.end())
            between = text[wrapped.end() : start].strip()
            if start >= 0 and not between and group_end(text, start) == len(text):
                text = text[start + 1 : -1]
        if text.startswith("{") and group_end(text, 0) == len(text):
            text = text[1:-1]
        if text == before:
            return text


def group_end(text: str, start: int) -> int:
    r"""Index after the brace that closes the one at `start`; -1 where none does. `\{` and `\}` do not count."""
    depth = 0
    for token in _BRACE.finditer(text, start):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAKES_ARGUMENTS = re.compile(rf"\\(?:(frac)|sqrt|{ACCENTS})(?![a-zA-Z])\s*(?:\[[^\[\]]*\])?")
_ONE_TOKEN = re.compile(r"\s*(\\[a-zA-Z]+|[0-9a-zA-Z])")
_SPACE = re.compile(r"\s*")


def _with_braces(text: str) -> str:
    r"""Give `\frac12`, `\frac 1{72}`, `\frac{270}7` and `\sqrt 2` the braces that TeX adds."""
    parts = []
    position = 0
    macro = _TAKES_ARGUMENTS.search(text)
    while macro:
        parts.append(text[position : macro.end()].rstrip())
        position = macro.end()
        for _ in range(2 if macro[1] else 1):  # \frac takes two arguments
            start = _SPACE.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]
            if text.startswith("{", start):
                end = group_end(text, start)
                if end < 0:
                    break
                parts.append("{" + _with_braces(text[start + 1 : end - 1]) + "}")
                position = end
                continue
            token = _ONE_TOKEN.match(text, position)
            if token:
                if token[1] in (r"\sqrt", r"\frac"):  # `\frac\sqrt2 3` is no LaTeX, so it stays as it is
                    break
                parts.append("{" + token[1] + "}")
                position = token.end()
        macro = _TAKES_ARGUMENTS.search(text, position)
    parts.append(text[position:])
    return "".join(parts)
