"""The prompts of a dataset as a model is to see them, as rows, checked against the rewards before a model loads."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trl_drgrpo.cli import data
from trl_drgrpo.cli.prompts import prompted

Row = dict[str, Any]


def prompt_rows(
    dataset: Any,
    source: str,
    rewards: Sequence[tuple[str, Any, Sequence[str]]],
    *,
    renamings: Sequence[str] = (),
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    limit: int | None = None,
) -> list[Row]:
    """Rows with `prompt` and the columns that the rewards need.

    Args:
        dataset ([`~datasets.Dataset`]): A split.
        source (`str`): Its name, for messages.
        rewards (`Sequence[tuple]`): Name, reward function, and columns that it gets beside the dataset's.
        renamings, prompt_template, system_prompt: As in `train`.
        limit (`int`, *optional*): Only so many of the first rows.

    Raises:
        [`InputError`]: A missing column, values that no reward can read, a program that is not there.
    """
    from trl_drgrpo.common.rows import column_values
    from trl_drgrpo.rewards.columns import check_columns, check_ready, check_values

    dataset = data.rename_columns(dataset, list(renamings))
    columns = data.check_prompts(dataset, source)
    for name, reward, more in rewards:
        check_columns(reward, [*columns, *more], name)
        check_values(reward, column_values(dataset, [column for column in columns if column != "prompt"]))
        check_ready(reward)
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    return [dict(row) for row in prompted(dataset, prompt_template, system_prompt)]


def digest(value: Any) -> str:
    """A short name for a value that JSON knows, equal for equal values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
