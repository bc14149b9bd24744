"""Rewards that look at one completion at a time, in the form TRL calls.

A subclass says how *one* completion is scored; this class turns that into `f(prompts=, completions=, <columns>, ...)`,
declares the columns it needs (so a missing one is an error before a model loads), reads strings and message lists
alike, and runs the scoring in killable workers where `limits` are given.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, UnscorableError, shortened
from trl_drgrpo.common.rows import ColumnValues
from trl_drgrpo.rewards.columns import require_kind
from trl_drgrpo.rewards.contract import OnError, check_column, check_name, check_on_error
from trl_drgrpo.rewards.isolation.isolated import Limits, scored_in_workers
from trl_drgrpo.rewards.signatures import signature_of
from trl_drgrpo.rewards.text import completion_text


class SampleReward:
    """A reward function of TRL's form from `score(completion, **columns)`.

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
    truths: tuple[str, ...] = ()  # kinds of values that the first column may hold; any, if there are none here

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

    def check_values(self, values: Mapping[str, ColumnValues]) -> None:
        """Raises [`InputError`] if the first column holds what no row could be scored by."""
        if self.columns and self.truths:
            require_kind(self.__name__, self.columns[0], values, self.truths)

    def score(self, completion: str, **columns: Any) -> float | None:
        """Reward of one completion; `None` where it cannot be scored. `columns`: this row's values."""
        raise NotImplementedError

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **kwargs: Any
    ) -> list[float | None]:
        texts = [completion_text(completion) for completion in completions]
        values = {column: column_values(kwargs, column, len(texts), self.__name__) for column in self.columns}
        calls = [((text,), {column: values[column][row] for column in values}) for row, text in enumerate(texts)]
        return scored_in_workers(
            self.score,
            calls,
            name=self.__name__,
            limits=self.limits,
            on_error=self.on_error,
            log_metric=log_metric,
            failed=self.lowest_reward,
        )


def why_unreadable(read: Callable[[Any], Any], truth: Any) -> str | None:
    """Reason why a reader of gold answers refuses one; `None` for one that it reads, or that is missing."""
    if truth is None:
        return None
    try:
        read(truth)
    except UnscorableError as error:
        return str(error)
    return None


def column_values(kwargs: Mapping[str, Any], column: str, count: int, name: str) -> Sequence[Any]:
    """One column of a call, `count` values. Refuses one that is not there, a text (whose characters would pass for
    values), no sequence, and one of another length. `name`: the reward's, for the message."""
    field, remedy = f"reward {name}", f"Pass {column}=[...] with one value per completion."
    if column not in kwargs:
        raise InputError(field, f"no column {column!r}", f"one value per completion ({count})", remedy)
    values = kwargs[column]
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or len(values) != count:
        size = f" of {len(values)}" if hasattr(values, "__len__") else ""
        got = f"a {type(values).__name__}{size} as column {column!r}"
        raise InputError(field, got, f"a list of {count} values, one per completion", remedy)
    return values
