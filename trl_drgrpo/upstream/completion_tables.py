"""The tables of completions that TRL sends to trackers, made of columns that Parquet and the trackers take.

TRL puts prompts, completions, rewards and what reward functions have logged with `log_extra` into one table. One value
that Parquet has no type for, or rows of different shapes in the table of wandb, such as the messages of a conversation
with tools, cost the table of the whole batch. Here such a column becomes text, and wandb is told that rows may differ.
"""

import json
from collections import deque
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

from transformers.utils.logging import get_logger

from trl_drgrpo.upstream.private_state import swapped

logger = get_logger(__name__)


def make_plain(logs: MutableMapping[str, Any]) -> None:
    """Make the columns of TRL's next table plain, in place. A column of `log_extra` that lacks rows is left out."""
    # In place: the columns are deques of TRL's, to which it goes on to append.
    for name in ("prompt", "completion"):
        _replace(logs[name], plain_column(logs[name]))
    rows = len(logs["prompt"])
    for name, values in list(logs["extra"].items()):
        if len(values) == rows:
            _replace(values, plain_column(values))
        else:
            logger.warning_once("log_extra: %r has not one value per completion: left out of the table.", name)
            del logs["extra"][name]


def _replace(column: "deque[Any]", values: Sequence[Any]) -> None:
    column.clear()
    column.extend(values)


def plain_column(values: Sequence[Any]) -> list[Any]:
    """Return a column as Parquet holds it: arrays and tensors as numbers; as text where Parquet has no type for it.

    Example:

    ```python
    >>> plain_column([1, None, 2]), plain_column([1, "a", None])
    ([1, None, 2], ['1', 'a', None])

    ```
    """
    import pyarrow

    plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    try:
        # As pandas does when TRL has it write Parquet: whatever fails here would fail there, for the whole table.
        array = pyarrow.array(plain, from_pandas=True)
        if not pyarrow.types.is_binary(array.type):  # trackers read bytes as UTF-8
            return plain
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
        pass
    return list(map(_text, plain))


def _text(value: object) -> str | None:
    if value is None:  # stays a null
        return None
    text = str(value)
    if isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", errors="replace").decode("utf-8")  # a tokenizer may leave a lone surrogate


class _MixedTables:
    """The module `wandb` with tables whose rows may be of different types."""

    def __init__(self, wandb: ModuleType):
        self._wandb = wandb

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wandb, name)
        return partial(value, allow_mixed_types=True) if name == "Table" else value


def mixed_tables(trl_module: ModuleType) -> AbstractContextManager[None]:
    """Inside the block TRL makes tables for wandb whose rows may differ; nothing where wandb is not installed."""
    wandb = vars(trl_module).get("wandb")
    return nullcontext() if wandb is None else swapped(trl_module, wandb=_MixedTables(wandb))
