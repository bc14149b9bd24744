r"""One spelling for LaTeX answers that look alike, and the cheap checks that keep a hostile one away from algebra.

`\frac12`, `\dfrac{1}{2}` and `\frac{1}{2}` are one answer in three spellings. After `tidy` most pairs of equal answers
are equal strings, so that the slow parser and sympy are left with the rest. Nothing here evaluates anything: all
functions are regular expressions and single passes over a text of bounded length.

`is_well_formed` and `is_cheap` are the two guards: a text that is too long, too deeply nested or unbalanced is no
answer, and one like `9^{9^{9}}` or `9999999!` is never handed to sympy, which would compute it.
"""

import functools
import re

MAX_CHARS = 1000  # no answer of MATH or GSM8K has more than a tenth of it
MAX_DEPTH = 20
_MAX_DIGITS = 300
_MAX_POWER = 10_000  # product of the numeric exponents: 10^{10000} takes a millisecond, 9^{9^9} takes all day
_MAX_POWER_OF_SUM = 100  # (a+b+c)^{100} has 5151 terms
_MAX_FACTORIAL = 1000

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "\u00a0": " ",
        "\u202f": " ",
        "\t": " ",
        "\n": " ",
        "\r": " ",
    }
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
# The row separator `\\` comes first in each alternation, so that `\\ ` is not read as a backslash and a space command.
_SPACING = re.compile(
    r"\\\\|\\[,;: ]|\\!|~|\\(?:q?quad|displaystyle|textstyle|limits|thinspace)(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}"
)
_SIZES = re.compile(r"\\\\|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*(?:\.(?!\d))?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|\\!)\s*(?=\d{3}(?!\d))")
_FONTS = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|bf|it|sf)|mbox|hbox|operatorname\*?)(?=\s*\{)")
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z}]))\s*")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z])")
_ROOT_SIGN = re.compile(r"√\s*(\d+|[a-zA-Z])?")
_DOLLARS = re.compile(r"(?<!\\)\$")
# Patterns and what stands in their place, applied in this order.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\text\s*\{\s*\}", ""),
        (r"\{:\}", ":"),
        (r"\\(?:text)?color\s*\{[a-zA-Z]+\}|\\underline(?=\s*\{)|\\(?:bf|rm|it|bfseries)(?![a-zA-Z])", ""),
        (r"(?<!\\)\{\s*([^{}]+?)\s*\\choose(?![a-zA-Z])\s*([^{}]+?)\s*\}", r"{\\binom{\1}{\2}}"),
        (r"^\s*(\w+)\s*\\choose(?![a-zA-Z])\s*(\w+)\s*$", r"\\binom{\1}{\2}"),
        (r"\^\s*(?:\\prime(?![a-zA-Z])|\{\s*\\prime\s*\})", "'"),
        (r"(?<!\\)\\$", ""),
        (r"\\text\s*\{\s*(?:percent|%|\\%)\s*\}|(?<![a-zA-Z\\])percent(?:age)?(?![a-zA-Z])", r"\\%"),
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
        (r"\\cup(?![a-zA-Z])|(?<![a-zA-Z\\])U(?=\s*[(\[])(?<=[)\] ]U)", r"\\cup "),
        (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\sqrt"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])", r"\\degree "),
        (r"((?:^|[(\[{,=])\s*)\+", r"\1"),
    )
]
_TIGHT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        # Between numbers of three digits the space tells a list, `100, 200`, from a number, `100,200`.
        (r"(?<![0-9A-Za-z.])(?!(?<=\d,) \d{3}(?!\d)) | (?![0-9A-Za-z.\\])|(?<=[0-9.]) (?=\\)", ""),
        (r"(\\log)_(\d)", r"\1_{\2}"),
        (r"([\^_])(-?\d+|[a-zA-Z])", r"\1{\2}"),
        (r"\{\.(?=\d)", "{0."),
    )
]


@functools.lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""One spelling for what looks alike: macros, spaces, wrappers and missing braces.

    Args:
        text (`str`): An answer, in LaTeX or plain; at most `MAX_CHARS` characters.

    Returns:
        `str`: The same answer; units, currency and percent signs stay, where they stood.

    Example:

    ```python
    >>> tidy(r"$\left( \dfrac 12,\, \sqrt3 \right)$")
    '(\\frac{1}{2},\\sqrt{3})'

    ```
    """
    text = _ROOT_SIGN.sub(lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt", text.translate(_UNICODE))
    text = unwrapped(text)
    if len(_DOLLARS.findall(text)) % 2 == 0:  # $x = 1$ or $x = 2$
        text = _DOLLARS.sub("", text)
    if "matrix" not in text and "array" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _THOUSANDS.sub("", _SIZES.sub(lambda m: m[0] if m[0] == r"\\" else "", text))
    text = _SPACING.sub(lambda m: m[0] if m[0] == r"\\" else "" if m[0] == r"\!" else " ", text)
    text = _AND.sub(", ", _FONTS.sub(r"\\text", text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _with_braces(text)
    for pattern, replacement in _TIGHT:
        text = pattern.sub(replacement, text)
    return unwrapped(text)


def unwrapped(text: str) -> str:
    r"""`text` without what surrounds all of it: dollar signs, brackets of mathematics, bold, `\text{}`, a dot."""
    while True:
        before, text = text, text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
        if (wrapped := _FONTS.match(text) or re.match(r"\\[fd]?boxed|\\fbox", text)) and text.endswith("}"):
            start = text.find("{", wrapped.end())
            if start >= 0 and not text[wrapped.end() : start].strip() and group_end(text, start) == len(text):
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
_TAKES_ARGUMENTS = re.compile(r"\\(?:(frac)|sqrt)(?![a-zA-Z])\s*(?:\[[^\[\]]*\])?")
_ONE_TOKEN = re.compile(r"\s*(\\[a-zA-Z]+|[0-9a-zA-Z])")


def _with_braces(text: str) -> str:
    r"""`\frac12`, `\frac 1{72}`, `\frac{270}7` and `\sqrt 2` with the braces that TeX adds."""
    parts, position = [], 0
    while macro := _TAKES_ARGUMENTS.search(text, position):
        parts.append(text[position : macro.end()].rstrip())
        position = macro.end()
        for _ in range(2 if macro[1] else 1):
            space = len(text[position:]) - len(text[position:].lstrip())
            if text.startswith("{", position + space):
                end = group_end(text, position + space)
                if end < 0:
                    break
                parts.append("{" + _with_braces(text[position + space + 1 : end - 1]) + "}")
                position = end
            elif token := _ONE_TOKEN.match(text, position):
                if token[1] in (r"\sqrt", r"\frac"):
                    break
                parts.append("{" + token[1] + "}")
                position = token.end()
    parts.append(text[position:])
    return "".join(parts)


# Guards --------------------------------------------------------------------------------------------------------------

_BRACKET = re.compile(r"\\[{}]|\\\\|\\.|[{}()\[\]]", re.DOTALL)
_OPENING, _CLOSING = ("{", "(", "[", r"\{"), ("}", ")", "]", r"\}")
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS},}}")
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i*int|lim|bigcup|bigcap)(?![a-zA-Z])")
_EXPONENT = re.compile(r"(.)\s*\^\s*")
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\}|\w+)\s*\^")
_INTEGER = re.compile(r"\d+")
_CHEAP_BINOMIAL = re.compile(r"\\binom\{\d{1,6}\}\{\d{1,2}\}")


def is_well_formed(text: str) -> bool:
    """Whether `text` is short, not deeply nested, and closes every brace it opens (intervals may mix theirs)."""
    if not text.strip() or len(text) > MAX_CHARS:
        return False
    depth = braces = 0
    for token in _BRACKET.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        braces += (token == "{") - (token == "}")
        if depth > MAX_DEPTH or depth < 0 or braces < 0:
            return False
    return depth == 0 and braces == 0


def is_cheap(text: str) -> bool:
    r"""Whether sympy can be trusted with `text`: no towers of powers, huge factorials, sums or integrals.

    Args:
        text (`str`): A tidied answer.

    Returns:
        `bool`: `False` means that only its spelling is compared. The limits err on the side of refusing.

    Example:

    ```python
    >>> is_cheap("2^{100}"), is_cheap("9^{9^{9}}"), is_cheap("9999999!")
    (True, False, False)

    ```
    """
    if _LONG_NUMBER.search(text) or _UNBOUNDED.search(text) or _TOWER.search(text):
        return False
    return _powers_are_cheap(text) and _counts_are_cheap(text)


def _powers_are_cheap(text: str) -> bool:
    of_numbers = of_sums = 1
    for power in _EXPONENT.finditer(text):
        base, start = power[1], power.end()
        end = group_end(text, start) if text.startswith("{", start) else -1
        exponent = text[start:end] if end > 0 else _argument(text, start)
        sizes = [int(number) for number in _INTEGER.findall(exponent)]
        if ("^" in exponent and sizes) or "!" in exponent or "binom" in exponent:
            return False
        for size in sizes:
            if base.isdigit():
                of_numbers *= max(size, 1)
            elif base in ")}]|":
                of_sums *= max(size, 1)
            elif size > _MAX_POWER:
                return False
    return of_numbers <= _MAX_POWER and of_sums <= _MAX_POWER_OF_SUM


def _argument(text: str, start: int) -> str:
    """What stands after a `^` without braces: up to the end of a bracket, or of the number."""
    if text.startswith("(", start):
        end = text.find(")", start)
        return text[start:] if end < 0 or "(" in text[start + 1 : end] else text[start:end]
    return text[start : start + 1 + len(re.match(r"\d*", text[start + 1 :])[0])]  # pyright: ignore[reportOptionalSubscript]


def _counts_are_cheap(text: str) -> bool:
    """Factorials and binomials of small numbers only, and no factorial of a factorial."""
    text = _CHEAP_BINOMIAL.sub(str(_MAX_FACTORIAL + 1), text)  # the number, so that no factorial of it passes
    if "!" not in text and "binom" not in text:
        return True
    if "!!" in text or (re.search(r"[)}\]]\s*!", text) and (text.count("!") > 1 or "^" in text)):
        return False
    return all(int(number) <= _MAX_FACTORIAL for number in _INTEGER.findall(text))
