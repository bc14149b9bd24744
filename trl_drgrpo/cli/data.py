"""Loads a dataset by name and reports each problem in one line.

One name, `dataset_name` in a recipe, stands for a dataset on the Hub, a local folder or file, or a task that is
generated on the spot. Local and generated data need no network, also with `HF_HUB_OFFLINE=1`. The columns are checked
here, before a model loads: `prompt` must exist, and be text or messages in every row.
"""

import glob
import importlib
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_reason, quiet_retries
from trl_drgrpo.common.rows import check_prompt_values

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

AnyDataset = TypeVar("AnyDataset", bound="Dataset | IterableDataset")

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_GENERATED = ("reasoning_gym:", "trl_drgrpo:")
_LIKELY_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")
LIST_SUM_OPTIONS = {"size": 2000, "seed": 0, "test_size": 200}


def load_data(
    source: str, *, name: str | None = None, split: str | None = None, streaming: bool = False
) -> "Dataset | DatasetDict | IterableDataset | IterableDatasetDict":
    """
    Loads or generates a dataset.

    Args:
        source (`str`):
            One of

            - a folder: one written by `save_to_disk`, or one of data files (`train.jsonl`, `test.jsonl`, ...);
            - a file: `.json`, `.jsonl`, `.parquet` or `.csv`, which becomes the split `train`;
            - `reasoning_gym:<task>?size=..&seed=..&test_size=..&<any field of the task's configuration>=..`, see
              [`trl_drgrpo.rewards.functions.reasoning_gym.make_splits`] (splits `train` and `test`);
            - `trl_drgrpo:list_sum?size=..&seed=..&test_size=..`, the demo's task (defaults 2000, 0 and 200; splits
              `train` and `test`, which share no problem);
            - anything else: the id of a dataset on the Hub.
        name (`str`, *optional*):
            Configuration of a Hub dataset or of a folder that has several.
        split (`str`, *optional*):
            Name of the split to return; all of them if left out.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to return iterable datasets.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`] if `split` is given, else the dict of all splits.

    Raises:
        [`InputError`]: If there is nothing there, if it cannot be read, or if the split is missing
            or empty.
    """
    splits: Any
    if source.startswith(_GENERATED):
        splits = _generate(source, streaming, with_test=split != "train")
    elif _is_local(source):
        splits = _load_local(source, name, streaming)
    else:
        splits = _load(source, name, streaming, source)
    return splits if split is None else take_split(splits, split, source)


def take_split(splits: Mapping[Any, AnyDataset], split: str, source: str) -> AnyDataset:
    """One split of what [`load_data`] returned; `source` is for the message. Refuses a split that is missing or
    empty."""
    if split not in splits:
        found = ", ".join(map(str, splits)) or "none"
        remedy = "Name one of them as dataset_train_split or dataset_test_split"
        if _is_local(source) and os.path.isfile(Path(source).expanduser()):
            remedy += "; for two splits put train.jsonl and test.jsonl into one folder and name the folder"
        elif source.startswith("reasoning_gym:") and split == "test":
            remedy = "A test split needs test_size above 0 and questions that are not among the training questions"
        raise InputError("dataset split", f"{split!r} of {source}", f"one of its splits: {found}", f"{remedy}.")
    dataset = splits[split]
    if first_row(dataset) is None:
        raise _empty(f"{source}, split {split}")
    return dataset


def check_prompts(dataset: "Dataset | IterableDataset", source: str) -> list[str]:
    """
    The column names of a split, whose column `prompt` must hold text or messages.

    Looks at every row; of a stream, at those that [`check_prompt_values`] reads. `source` is for the message.
    """
    row = first_row(dataset) or {}
    columns = list(dataset.column_names or row)
    if "prompt" not in columns:
        likely = [column for column in _LIKELY_PROMPTS if column in columns]
        near = likely or get_close_matches("prompt", columns, n=1, cutoff=0.6)
        remedy = f"{near[0]!r} looks like it: rename" if near else "Rename the one that holds the prompts"
        raise InputError(
            "dataset_name",
            f"{source} with the columns {', '.join(columns)}",
            "a column 'prompt'",
            f"{remedy} it with `rename_columns: [{near[0] if near else '<column>'}=prompt]` in a recipe, or with "
            "dataset.rename_column in Python.",
        )
    check_prompt_values(dataset, "prompt", f" of {source}")
    return columns


def rename_columns(dataset: Any, renamings: list[str]) -> Any:
    """Renames columns, each `old=new`. Refuses a malformed renaming, a missing column and a name that is taken."""
    for renaming in renamings:
        old, equals, new = renaming.partition("=")
        columns = list(dataset.column_names or first_row(dataset) or {})
        if not (old and equals and new):
            raise InputError("rename_columns", repr(renaming), "old=new", "For example question=prompt.")
        if old not in columns:
            expected = f"one of the columns: {', '.join(columns)}"
            raise InputError("rename_columns", repr(renaming), expected, "Put an existing column on the left.")
        if new in columns and new != old:
            remedy = f"Rename that one first: `{new}=<other>`."
            raise InputError(
                "rename_columns", f"{renaming!r}, but there is a column {new} already", "a new name", remedy
            )
        dataset = dataset.rename_column(old, new)
    return dataset


def first_row(dataset: "Dataset | IterableDataset") -> dict[str, Any] | None:
    """The first row, or `None` if there is none."""
    return next(iter(dataset), None)


# Generated -----------------------------------------------------------------------------------------------------------


def _generate(source: str, streaming: bool, with_test: bool) -> "DatasetDict | IterableDatasetDict":
    import datasets

    task, options = _parse_query(source)
    if source.startswith("reasoning_gym:"):
        make_splits = importlib.import_module("trl_drgrpo.rewards.functions.reasoning_gym").make_splits
        splits = make_splits(task, options, with_test)
    elif task == "list_sum":
        splits = _list_sum(source, options)
    else:
        remedy = "Did you mean trl_drgrpo:list_sum?"
        raise InputError("dataset_name", source, "trl_drgrpo:list_sum or another source", remedy)
    return _stream(splits) if streaming else datasets.DatasetDict(**splits)


def _parse_query(source: str) -> tuple[str, dict[str, str]]:
    """`prefix:task?a=1&b=2` -> `("task", {"a": "1", "b": "2"})`; `%26` and the like are decoded, `+` stays a plus."""
    task, _, query = source.partition(":")[2].partition("?")
    options: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not (key and equals) or key in options:
            got = f"{pair!r} in {source}"
            raise InputError(
                "dataset_name", got, "options `key=value` joined by &, each once", "For example ?size=500."
            )
        options[key] = unquote(value)
    return task, options


def _list_sum(source: str, options: dict[str, str]) -> dict[str, "Dataset"]:
    numbers = dict(LIST_SUM_OPTIONS)
    for key, text in options.items():
        if key not in numbers:
            expected = f"one of {', '.join(numbers)}"
            raise InputError(f"{source}: {key}", "an unknown option", expected, "Remove it.")
        if not text.isdigit():
            raise InputError(f"{source}: {key}", repr(text), "a whole number", f"Its default is {numbers[key]}.")
        numbers[key] = int(text)
    make_dataset: Callable[[int, str, int], Any] = importlib.import_module("trl_drgrpo.labs.demo.task").make_dataset
    splits = {"train": make_dataset(numbers["size"], "train", numbers["seed"])}
    if numbers["test_size"]:
        splits["test"] = make_dataset(numbers["test_size"], "held_out", numbers["seed"])
    return splits


# Local and Hub -------------------------------------------------------------------------------------------------------


def check_source(source: str) -> None:
    """Checks, without importing anything, that a local source of [`load_data`] exists and is of a supported type."""
    if source.startswith(_GENERATED) or is_hub_id(source):
        return
    path = Path(source).expanduser()
    if not os.path.exists(path):  # unlike Path.exists false, and no error, for a name that is too long
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError("dataset_name", f"{source}, which does not exist", "an existing file or folder", remedy)
    if path.is_file() and path.suffix not in FILE_TYPES:
        expected = f"a file ending in {', '.join(FILE_TYPES)}, or a folder"
        raise InputError("dataset_name", f"{source}, a {path.suffix or 'nameless'} file", expected, "Convert it.")


def is_hub_id(source: str) -> bool:
    """Whether [`load_data`] would look for the name on the Hub."""
    return not source.startswith(_GENERATED) and not _is_local(source)


def _is_local(source: str) -> bool:
    """Whether the name is that of a file or folder: one that exists, or one that cannot be a Hub id."""
    path = Path(source).expanduser()
    return (
        os.path.exists(path)
        or path.suffix in FILE_TYPES
        or source.startswith((".", "/", "~"))
        or source.count("/") > 1
    )


def _load_local(source: str, name: str | None, streaming: bool) -> Any:
    check_source(source)
    import datasets

    path = Path(source).expanduser()
    if path.is_file():  # its name is no pattern: a[1].jsonl is no a1.jsonl
        return _load(FILE_TYPES[path.suffix], None, streaming, source, data_files=glob.escape(str(path)))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        splits: Any = loaded if isinstance(loaded, datasets.DatasetDict) else datasets.DatasetDict({"train": loaded})
        return _stream(splits) if streaming else splits
    return _load(str(path), name, streaming, source)


def _stream(splits: Mapping[Any, "Dataset"]) -> "IterableDatasetDict":
    import datasets

    return datasets.IterableDatasetDict(**{str(key): split.to_iterable_dataset() for key, split in splits.items()})


def _load(path: str, name: str | None, streaming: bool, source: str, **kwargs: Any) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        with quiet_retries():
            return datasets.load_dataset(path, name=name, streaming=streaming, **kwargs)
    except StopIteration as error:  # what the reader of JSON files raises for a file without a row
        raise _empty(source) from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise _not_loaded(source, error) from error


def _empty(source: str) -> InputError:
    return InputError("dataset_name", f"{source}, which is empty", "at least one row", "Add prompts.")


def _not_loaded(source: str, error: Exception) -> InputError:
    reason = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}".rstrip(".")
    if _is_local(source):
        expected = f"data that can be read: {', '.join(FILE_TYPES)} files, or a folder from save_to_disk"
        return InputError("dataset_name", f"{source}, which could not be read", expected, f"{reason:.300}.")
    if importlib.import_module("datasets").config.HF_HUB_OFFLINE:
        return InputError(
            "dataset_name",
            f"{source}, which is neither a local path nor in the local cache, in offline mode (HF_HUB_OFFLINE=1)",
            "a local path, or a Hub dataset loaded once before",
            "Unset HF_HUB_OFFLINE to download it, or correct the path.",
        )
    expected = "an existing dataset that you can read, or a local path"
    if (found := hub_reason(error)) is not None:
        return InputError("dataset_name", f"{source}, {found[0]}", expected, found[1])
    remedy = "Check the id, the network and `hf auth login`; dataset_config names its configuration."
    return InputError(
        "dataset_name", f"{source}, which could not be loaded from the Hub ({reason:.300})", expected, remedy
    )
