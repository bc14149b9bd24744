"""One completion with its row, and where in the row a foreign function's arguments stand.

The other stacks keep the correct answer in other columns than TRL's rewards do (verl: `reward_model["ground_truth"]`,
OpenRLHF: `label`), so a column is named by a path (`reward_model.ground_truth`), and where none is named the usual
places of that stack are looked up in order.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.columns import PER_CALL
from trl_drgrpo.rewards.sample import column_values
from trl_drgrpo.rewards.text import completion_text, prompt_text

# What TRL passes to a reward function that is not a column of the dataset.
NOT_COLUMNS = (*PER_CALL, "environments")


@dataclass(frozen=True)
class Sample:
    """One completion and its row.

    Args:
        prompt (`str` or `list[dict]`): As TRL hands it over; the empty string where it does not.
        completion (`str` or `list[dict]`): As TRL hands it over.
        columns (`dict[str, Any]`): This row's values of the other columns.
    """

    prompt: Any
    completion: Any
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """The completion as one string."""
        return completion_text(self.completion)


def read_samples(
    completions: Sequence[Any], prompts: Sequence[Any] | None, keywords: Mapping[str, Any], reward: str
) -> list[Sample]:
    """The rows of one call, from the lists that TRL passes; `InputError` where one of them is none."""
    count = len(completions)
    given = [""] * count if prompts is None else prompts
    columns = {name: column_values(keywords, name, count, reward) for name in keywords if name not in NOT_COLUMNS}
    return [
        Sample(prompt, completion, {name: values[row] for name, values in columns.items()})
        for row, (prompt, completion) in enumerate(zip(given, completions, strict=True))
    ]


@dataclass(frozen=True)
class Place:
    """
    Where a value stands in a row.

    Args:
        what (`str`): What is looked for, for the message: `"the ground truth"`.
        option (`str`): The adapter's option that names the column.
        path (`str`, *optional*): The column, or a path into it: `reward_model.ground_truth`.
        usual (`Sequence[str]`): Paths that are tried, in order, where no `path` is given.
    """

    what: str
    option: str
    path: str | None
    usual: tuple[str, ...]

    def column(self, columns: Iterable[str], reward: str) -> str:
        """The path that applies to a dataset with these columns; refuses one without. `reward`: its name, for the
        message."""
        names = list(columns)
        for path in (self.path,) if self.path else self.usual:
            if path in names or path.split(".")[0] in names:
                return path
        wanted = f"the column {self.path!r}" if self.path else f"one of the columns {', '.join(self.usual)}"
        raise InputError(
            f"reward {reward}",
            f"a dataset with the columns {', '.join(names) or '(none)'}",
            f"{self.what} in {wanted}",
            f"Point {self.option}=... to it, or rename the column.",
        )

    def value(self, row: Mapping[str, Any], reward: str) -> Any:
        """This row's value; `None` where a mapping on the way there does not have it, or is null."""
        path = self.column(row, reward)
        if path in row:
            return row[path]
        head, *keys = path.split(".")
        value = decoded(row[head])
        for key in keys:
            if value is None:
                return None
            if not isinstance(value, Mapping):
                raise InputError(
                    f"reward {reward}",
                    f"a {type(value).__name__} where {path!r} needs a mapping with {key!r}",
                    f"{self.what} under {path!r}",
                    f"Point {self.option}=... to it.",
                )
            value = decoded(value.get(key)) if key != keys[-1] else value.get(key)
        return value


def decoded(cell: Any) -> Any:
    """A mapping or a list that a dataset stores as JSON text; anything else as it is."""
    if isinstance(cell, str) and cell.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    return cell


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Text as one message of that role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def as_text(value: Any, role: str) -> str:
    """Messages as text: of a completion what the model wrote, of a prompt all messages."""
    return completion_text(value) if role == "assistant" else prompt_text(value)
