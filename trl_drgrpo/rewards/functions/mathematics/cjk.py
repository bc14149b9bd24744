r"""Answers in Chinese and Japanese, respelled as the English ones that the rest of this folder reads.

`答案是42元` is `42\text{ yuan}`, `3或4` is `3 or 4`, `5厘米` is `5\text{ cm}`. Only words of the tables count: a text
with any other is compared by its spelling, so that a word not known here never becomes a wrong answer's excuse.
"""

import re

from trl_drgrpo.rewards.functions.mathematics.latex import respelled, rules

HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # with the Japanese syllables
# A label with a verb or a colon, whose verb is not denied.
_NAME = "(?:答案|答え|正解|答)"
_VERB = "(?:应该|應該|应|應|就|即)?(?:是|为|為|等于|等於|选|は)(?![不否非])"
ANSWER = rf"{_NAME}[*_]{{0,3}}(?:{_VERB}\s*[:：=＝]?|[:：=＝])"
_MEASURES_TEXT = """
m 米 公尺 メートル, cm 厘米 公分, mm 毫米, dm 分米, km 千米 公里, g 克, kg 千克 公斤, mg 毫克, t 吨, L 升, mL 毫升,
s 秒 秒钟, min 分钟 分鐘, h 小时 小時 时 時間, day 天 日, week 周 星期, month 个月 月, y 年 岁 歳,
dollar 美元 ドル, cent 美分, euro 欧元, yuan 元 元钱 块 块钱 圆 人民币, yen 円 日元, point 分
"""
_MEASURES: dict[str, str] = {}
for _symbol, *_names in map(str.split, _MEASURES_TEXT.split(",")):
    _MEASURES |= dict.fromkeys(_names, _symbol)
_MEASURE = "|".join(sorted(_MEASURES, key=len, reverse=True))
# Counting words, which say nothing: 42个 is 42, and 42个苹果 are 42 apples.
_COUNTERS = "个個名位人只隻头頭条條本张張件次种種组組棵辆輛枚箱瓶支朵袋页頁倍题題道层層间間つ匹回"
# No noun has them: 3个半, 3个以上, 3个或4个.
_NO_NOUN = "不否非无無没或和与與及且到至约約多少余餘几半分之以上下左右大小高低比倍万億亿千百十点加减乘除负另"
_NOUN = rf"(?:(?![{_NO_NOUN}])[{HAN}]){{1,6}}"
_UNIT = re.compile(
    r"(?<=[\d)}])\s*(?P<text>\\(?:text|mathrm|mbox)\s*\{\s*)?"
    rf"(?:(?P<power>平方|立方)?(?P<measure>{_MEASURE})(?:[/每](?P<power_below>平方|立方)?(?P<below>{_MEASURE}))?|"
    rf"(?P<degree>度)|[{_COUNTERS}](?P<noun>{_NOUN})?)"
    r"(?(text)\s*\})(?=\s*(?:$|[,;.)\]$}]|\\[,;)\]]|\\text\{ or))"
)
_POWERS = {"平方": "^2", "立方": "^3", None: ""}


def _as_text(words: str) -> str:
    """A pattern for words, set as text or not, whose first group is the beginning of that text."""
    return rf"(\\text\s*\{{\s*)?(?:{words})\s*(?(1)\}})"


_PROSE = f"(?:(?![不否非没無无或])[{HAN}\\s,])"  # without a denial
_WORDS = rules(
    (f"^{_PROSE}{{0,30}}?" + _as_text(rf"{_PROSE}{{0,30}}?{ANSWER}"), ""),
    # "The area is 42"
    ("^" + _as_text(f"{_PROSE}{{1,12}}(?:是|为|為|等于|等於|有|は|:)") + rf"\s*(?=[^{HAN}\s])", ""),
    (r"(?:です|である|だ|となります|となる)\s*$", ""),
    (rf"^\s*{_as_text('无解|無解|解なし|没有解')}\s*$", "no solution"),
    (rf"^\s*{_as_text('不存在')}\s*$", "does not exist"),
    (rf"^\s*{_as_text('空集')}\s*$", r"\\emptyset"),
    (rf"^\s*{_as_text('(?:全体|所有|任意|一切)实数')}\s*$", r"\\mathbb{R}"),
    (rf"(?<![{HAN}]){_as_text('(?:或者|或|または)(?:是|为|為)?')}", r" \\text{ or }"),
    (rf"(?<![{HAN}]){_as_text('和|与|與|以及|及|且|と')}", r" \\text{ and }"),
    (r"根号\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"百分之\s*(\d+(?:\.\d+)?)", r"\1%"),
    (r"(\d+)\s*分之\s*(\d+)", r"\\frac{\2}{\1}"),
    (r"(?<=\d)\s*[万萬]", r"\\cdot 10^{4}"),
    (r"(?<=\d)\s*[亿億]", r"\\cdot 10^{8}"),
)
_HAN = re.compile(f"[{HAN}]")


def in_english(text: str) -> str:
    r"""
    A text of [`in_ascii`] with the words of its label, its connectives and its units in English.

    Example:

    ```python
    >>> in_english("答案是42元"), in_english("3或4"), in_english("42苹果")
    ('42\\text{ yuan}', '3 \\text{ or }4', '42苹果')

    ```
    """
    if not _HAN.search(text):
        return text
    return _UNIT.sub(_unit, respelled(text, _WORDS))


def _unit(match: re.Match[str]) -> str:
    if match["degree"]:
        return r"^\circ "
    if match["noun"]:
        return rf"\text{{ {match['noun']}}}"
    if not match["measure"]:
        return ""  # a counting word
    unit = _MEASURES[match["measure"]] + _POWERS[match["power"]]
    if match["below"]:
        unit += f"/{_MEASURES[match['below']]}{_POWERS[match['power_below']]}"
    return rf"\text{{ {unit}}}"
