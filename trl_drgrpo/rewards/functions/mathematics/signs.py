r"""Signs of other scripts and of typesetting in the one spelling that the rest of this folder reads: ASCII and macros.

`４２％`, `٤٢`, `½`, `x²`, `3×4`, `√2`, `（1，2）` and `π` are what models and people write where LaTeX has `42\%`,
`\frac{1}{2}`, `x^{2}` and so on.
"""

import re
import unicodedata

_GREEK_FROM_ALPHA = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi o pi rho varsigma sigma tau upsilon phi
chi psi omega
"""
GREEK = {chr(0x3B1 + index): name for index, name in enumerate(_GREEK_FROM_ALPHA.split())}
GREEK |= {letter.upper(): GREEK[letter].capitalize() for letter in "γδθλξπσφψω"}
GREEK |= {"ϕ": "phi", "ϵ": "epsilon", "\u00b5": "mu", "\u2126": "Omega", "ℓ": "ell", "ħ": "hbar"}
# Signs and their macros, which a space ends; then those that stand for themselves.
_MACROS_OF_SIGNS = """
× times ✕ times ✖ times ⨯ times · cdot ⋅ cdot ∙ cdot • cdot ∗ cdot ∞ infty ± pm ∓ mp ∪ cup ∩ cap ∈ in ≤ le ≦ le
⩽ le ≥ ge ≧ ge ⩾ ge ≠ ne ≈ approx ≒ approx ∅ emptyset ⌊ lfloor ⌋ rfloor ⌈ lceil ⌉ rceil ∠ angle ∑ sum ∫ int
∂ partial
"""
_MACROS = [*GREEK.items(), *re.findall(r"(\S) (\w+)", _MACROS_OF_SIGNS)]
_UNICODE = str.maketrans({sign: rf"\{name} " for sign, name in _MACROS})
_UNICODE |= str.maketrans({"°": r"^\circ ", "˚": r"^\circ ", "º": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F"})
_UNICODE |= str.maketrans({"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"})
# One sign for one: dashes, divisions, a ratio, a prime, Å, then commas, points and the percent sign of other scripts.
_UNICODE |= str.maketrans("−‐‑‒–÷⁄∕∶′\u212b、。，٪٫٬", "-----///:'Å,.,%.,")
# Spaces of all widths, and what has none.
_UNICODE |= dict.fromkeys([0xA0, 0x202F, 0x205F, 0x3000, *range(0x2000, 0x200B)], " ")
_UNICODE |= dict.fromkeys([0xAD, 0x200B, 0x200C, 0x200D, 0x200E, 0x200F, 0x2060, 0xFEFF])

_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_LOWERED = re.compile("[\u2080-\u208e\u2090-\u209c]+")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
# Full-width forms (not the tilde, which is a range), letters of mathematics, and units in one sign (㎝): what NFKC
# makes of them.
_OTHER_FORMS = re.compile("[\uff01-\uff5d\uff5f-\uffef\u3300-\u33ff\U0001d400-\U0001d7ff]+")
_OTHER_DIGIT = re.compile(r"[^\W\D0-9]")
_ROOT_SIGN = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))?")
_DEGREES_OF_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}


def in_ascii(text: str) -> str:
    r"""
    A text with ASCII and macros in place of signs that mean the same. Letters of other scripts stay, but for Greek.

    Example:

    ```python
    >>> in_ascii("x² ≤ ½"), in_ascii("（１，２）"), in_ascii("√2")
    ('x^{2} \\le  \\frac{1}{2}', '(1,2)', '\\sqrt{2}')

    ```
    """
    # NFKC of the whole text would not do: it turns `x²` into `x2`, and `3½` into `31/2`.
    text = _RAISED.sub(lambda match: f"^{{{_compatible(match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_compatible(match[0])}}}", text)
    text = _VULGAR_FRACTION.sub(_fraction, text)
    text = _OTHER_FORMS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _OTHER_DIGIT.sub(lambda match: str(unicodedata.digit(match[0])), text)
    # Roots last: the number below a root may have been written in other digits.
    return _ROOT_SIGN.sub(_root, text.translate(_UNICODE))


def _compatible(text: str) -> str:
    """Read `\u207b\u2078` as `-8`, `\u00be` as 3 and 4 with a fraction slash."""
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _fraction(match: re.Match[str]) -> str:
    return r"\frac{{{}}}{{{}}}".format(*_compatible(match[0]).split("\u2044"))


def _root(match: re.Match[str]) -> str:
    root = rf"\sqrt{_DEGREES_OF_ROOTS[match[1]]}"
    of = match[2] or match[3]
    return f"{root}{{{of}}}" if of else root
