r"""The places of a text where an answer stands, and rewards that score one text.

Every reward here reads completions through `texts.completion_text` and these functions, so that rewards score texts
and messages alike and look for an answer in the same places: behind the last `</think>`, in the last
`<answer>...</answer>`, in the last `\boxed{...}`.
All functions take time linear in the length of the text, whatever a policy writes.

[`SampleReward`] is the base of rewards that score one completion at a time, with `limits` in workers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.ranges import refuse_outside
from trl_drgrpo.common.rows import ColumnValues
from trl_drgrpo.rewards.columns import LogMetric, require_kind, signature_of
from trl_drgrpo.rewards.contract import Limits, OnError, Rewards, check_column, check_flag, check_name, check_on_error
from trl_drgrpo.rewards.isolation.isolated import scored_in_workers
from trl_drgrpo.rewards.texts import completion_text

_FONT = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf|tt)|mbox|hbox|boxed|fbox)\s*\{([^{}]*)\}")
_TYPESET_BLANK = re.compile(r"\\[ ,;:]|~")
_MAX_FONTS = 5  # within each other
_BLANKS = re.compile(r"\s*")
# What opens or closes: \boxed{, \boxed 5, escaped braces and backslashes, which do neither, and plain braces
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox) +([^\s\\{}$]+)|\\[{}\\]|[{}]")


def after_thinking(text: str) -> str:
    """Return the text behind the last `</think>`, up to an unclosed `<think>`; the whole text without either.

    Example:

    ```python
    >>> after_thinking("<think>3?</think> 4"), after_thinking("<think>It may be 3"), after_thinking("4")
    (' 4', '', '4')

    ```
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def last_tagged(text: str) -> str | None:
    """Return the content of the last closed `<answer>`; `None` without one.

    Example:

    ```python
    >>> last_tagged("<answer>3</answer> no, <answer>4</answer>, as </answer> shows")
    '4'

    ```
    """
    # The last opening that a closing follows; then the first closing behind it.
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.find("</answer>", start)].strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed, non-empty `\boxed{...}`; `\fbox{...}` and `\boxed 5` count.

    `None` without one.

    Example:

    ```python
    >>> last_boxed(r"First \boxed{3}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'

    ```
    """
    # One pass with a stack. A search for each box's own end would be quadratic in boxes that stay open.
    opened: list[int | None] = []  # where the content of a box starts; None for a plain brace
    last = None
    for token in _BOX_TOKEN.finditer(text):
        if token[1] is not None:  # \boxed 5
            last = slice(*token.span(1))
        elif len(token[0]) > 2:  # \boxed{
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()  # a box closes after the boxes in it: the outer one is the last
            if start is not None and _BLANKS.match(text, start).end() < token.start():  # pyright: ignore[reportOptionalMemberAccess]
                last = slice(start, token.start())
    return None if last is None else text[last].strip()


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last `<answer>` tag, else of the last `\boxed{}`; `None` without either."""
    tagged = last_tagged(text)
    return last_boxed(text) if tagged is None else tagged


def without_fonts(text: str) -> str:
    r"""Return a text without commands for fonts and boxes: `Paris` for `\text{Paris}` and `\boxed{\textbf{Paris}}`.

    Example:

    ```python
    >>> without_fonts(r"\text{New\ York}"), without_fonts(r"\textbf{\text{(B)}}"), without_fonts(r"\frac{1}{2}")
    ('New York', '(B)', '\\frac{1}{2}')

    ```
    """
    for _ in range(_MAX_FONTS):  # from the inside to the outside; what is nested deeper stays
        text = _FONT.sub(r"\1", text)
    return _TYPESET_BLANK.sub(" ", text).strip()


class SampleReward:
    """A reward function of TRL's form from `score(completion, **columns)`.

    A subclass may be a dataclass instead, whose fields are its options: these four, with a `column` or none, and
    others, which `allowed` describes.

    Args:
        name (`str`): Name in logs and metrics (`rewards/<name>/mean`).
        columns (`Sequence[str]`, *optional*): Dataset columns that `score` needs, passed to it by name.
        limits ([`Limits`], *optional*): Score in worker processes under these limits;
            `None`: in this process, for scorers that are bounded by construction.
        on_error (`str`, *optional*, defaults to `"unscorable"`): A completion whose scoring hangs, crashes or raises
            gets `lowest_reward` and is counted in `rewards/<name>/failed_frac`, or `None` where an `UnscorableError`
            says that nobody could judge the row; `"raise"`: the first such failure is an error.

    Raises:
        [`InputError`]: Another `on_error`, an empty name, a column that cannot be one, or `limits`
            that are no `Limits`.
    """

    lowest_reward: float | None = 0.0  # the least that `score` gives; `None`: not known
    threads = 1  # calls at once in this process, for a `score` that waits for others
    truths: tuple[str, ...] = ()  # kinds of values that the first column may hold; any, if there are none here
    allowed: ClassVar[Mapping[str, Any]] = {}  # what options of a dataclass may be: a range, a choice, or `bool`

    def __init__(
        self, name: str, columns: Sequence[str] = (), limits: Limits | None = None, on_error: OnError = "unscorable"
    ):
        check_on_error(on_error)
        check_name(name)
        for column in columns:
            check_column(column)
        if limits is not None and not isinstance(limits, Limits):
            remedy = "For example `Limits(timeout=5)`, in a recipe `limits: {timeout: 5}`."
            raise InputError("limits", shortened(limits), "Limits, or None", remedy)
        self.__name__ = name
        self.columns = tuple(columns)
        self.limits = limits
        self.on_error: OnError = on_error
        self.__signature__ = signature_of(self.columns)

    def __post_init__(self, *columns: str) -> None:
        options: Any = self
        if not columns and getattr(self, "column", None) is not None:
            columns = (options.column,)
        settings = {}
        for name in ("limits", "on_error"):
            if hasattr(options, name):
                settings[name] = getattr(options, name)
        # By its class: `__init__` of the instance is the one that `dataclass` has made of the fields.
        SampleReward.__init__(self, options.name, columns, **settings)
        for option, allowed in self.allowed.items():
            if allowed is bool:
                check_flag(option, getattr(self, option))
            else:
                refuse_outside(option, getattr(self, option), allowed)

    def check_values(self, values: Mapping[str, ColumnValues]) -> None:
        """Refuse a first column with values of kinds that no row could be scored by."""
        if self.columns and self.truths:
            require_kind(self.__name__, self.columns[0], values, self.truths)

    def score(self, completion: str, **columns: Any) -> float | None:
        """Return the reward of one completion; `None` if it cannot be scored. `columns`: this row's values."""
        raise NotImplementedError

    def at_sight(self, completion: str, **columns: Any) -> tuple[bool, float | None]:
        """Tell whether the reward is plain without `score`, and return it: a shortcut in this process."""
        return False, None

    def __call__(self, completions: Sequence[Any], log_metric: LogMetric = None, **kwargs: Any) -> Rewards:
        columns = {}
        for name in self.columns:
            columns[name] = column_values(kwargs, name, len(completions), self.__name__)
        rewards: Rewards = []
        # Rows that a look decides never reach a worker: of mathematical answers these are most.
        open_rows = []
        calls = []
        for row, completion in enumerate(completions):
            text = completion_text(completion)
            values = {name: column[row] for name, column in columns.items()}
            is_decided, reward = self.at_sight(text, **values)
            rewards.append(reward)
            if not is_decided:
                open_rows.append(row)
                calls.append(((text,), values))

        # Of all completions, not of those that are still open: the share must compare between batches.
        def log_share(metric: str, value: float) -> None:
            if log_metric is not None:
                log_metric(metric, value * (len(open_rows) / len(completions)))

        scores = scored_in_workers(
            self.score,
            calls,
            name=self.__name__,
            limits=self.limits,
            on_error=self.on_error,
            log_metric=log_share,
            failed=self.lowest_reward,
            threads=self.threads,
        )
        for row, score in zip(open_rows, scores, strict=True):
            rewards[row] = score
        return rewards


def column_values(kwargs: Mapping[str, Any], column: str, count: int, name: str) -> Sequence[Any]:
    """Return one column of a call, `count` values. Refuses a column that is missing, a text (whose characters would
    pass for values), no sequence, and another length. `name` is the reward's, for the message."""
    field = f"reward {name}"
    remedy = f"Pass {column}=[...] with one value per completion."
    if column not in kwargs:
        raise InputError(field, f"no column {column!r}", f"one value per completion ({count})", remedy)
    values = kwargs[column]
    size = f" of {len(values)}" if hasattr(values, "__len__") else ""
    if isinstance(values, (str, bytes, Mapping)) or not size or len(values) != count:
        got = f"a {type(values).__name__}{size} as column {column!r}"
        raise InputError(field, got, f"a list of {count} values, one per completion", remedy)
    return values
