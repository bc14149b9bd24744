"""Datasets by name, and the prompts that a model sees of them; each problem in one line.

One name, `dataset_name` in a recipe, stands for a dataset on the Hub, a local folder or file, or a task that is
generated on the spot. Local and generated data need no network, also with `HF_HUB_OFFLINE=1`. The columns are checked
here, before a model loads: `prompt` must exist, and be text or messages in every row.

A base model is prompted with plain text, and with which text matters (arXiv 2503.20783, section 2). `r1` and
`qwen_math` are the two templates of that paper's official code, letter by letter; without a template the problem
itself is the prompt, its third choice. An instruction-tuned model gets messages instead: its own chat template makes
text of them, and `system_prompt` puts one message in front (a template of one's own then is the user's message).
"""

import glob
import os
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from trl_drgrpo.cli import console
from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.common.hub_errors import hub_reason, quiet_retries
from trl_drgrpo.common.reading import reading, user_path
from trl_drgrpo.common.rows import check_prompt_values
from trl_drgrpo.features.sampling.pass_rates import write_pass_rates

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict


AnyDataset = TypeVar("AnyDataset", bound="Dataset | IterableDataset")

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_GENERATED = ("reasoning_gym:", "trl_drgrpo:")
_LIKELY_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")
# Tasks that come with the package -> the function that makes a split of one, and its options with their defaults.
_TASKS = {
    "list_sum": ("trl_drgrpo.demo.task:make_dataset", {"size": 2000, "seed": 0, "test_size": 200}),
    "larger": ("trl_drgrpo.demo.larger:make_larger_dataset", {"size": 512, "seed": 0, "test_size": 100}),
}


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
            - `trl_drgrpo:list_sum?size=..&seed=..&test_size=..`, the demo's task (defaults 2000, 0 and 200), or
              `trl_drgrpo:larger?..`, the larger of two numbers (defaults 512, 0 and 100); splits `train` and `test`,
              which share no problem;
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
    import datasets

    splits: Any
    if source.startswith(_GENERATED):
        splits = datasets.DatasetDict(**_generated(source, with_test=split != "train"))
    elif _is_local(source):
        splits = _load_local(source, name, streaming)
    else:
        splits = _load(source, name, streaming, source)
    # What was generated, or saved by `save_to_disk`, is in memory.
    if streaming and isinstance(splits, datasets.DatasetDict):
        streams = {str(key): part.to_iterable_dataset() for key, part in splits.items()}
        splits = datasets.IterableDatasetDict(**streams)
    if split is None:
        return splits
    return take_split(splits, split, source)


def take_split(splits: Mapping[Any, AnyDataset], split: str, source: str) -> AnyDataset:
    """Return one split of what [`load_data`] returned, or a part of one, such as `test[:128]`; `source` is for the
    message. Refuses a split that is missing or empty."""
    name = split.partition("[")[0]
    if name not in splits:
        names = ", ".join(map(str, splits)) or "none"
        remedy = "Name one of them as dataset_train_split or dataset_test_split"
        # A single file is the split train, and has no other.
        if _is_local(source) and os.path.isfile(user_path(source)):
            remedy += "; for two splits put train.jsonl and test.jsonl into one folder and name the folder"
        elif source.startswith("reasoning_gym:") and split == "test":
            remedy = "A test split needs test_size above 0 and questions that are not among the training questions"
        raise InputError("dataset split", f"{split!r} of {source}", f"one of its splits: {names}", f"{remedy}.")
    dataset = splits[name]
    if name != split:
        dataset = _part(dataset, name, split)
    if first_row(dataset) is None:
        raise _empty(f"{source}, split {split}")
    return dataset


def _part(dataset: Any, name: str, split: str) -> Any:
    """Return rows of a split that a specification in the style of `datasets` names: `test[:128]`, `train[10%:]`."""
    import datasets

    remedy = "Write for example test[:128] or train[10%:]; of a stream take whole splits."
    if not isinstance(dataset, datasets.Dataset):
        raise InputError("dataset split", f"{split!r} of a stream", "a whole split", remedy)
    # The library's own reader of such specifications, which asserts some of what it expects.
    try:
        (rows,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(dataset)})
    except (ValueError, AssertionError) as error:
        raise InputError("dataset split", repr(split), "a part that datasets can read", remedy) from error
    return dataset.select(range(rows.from_, rows.to))


def check_prompts(dataset: "Dataset | IterableDataset", source: str) -> list[str]:
    """
    Return the column names of a split, whose column `prompt` must hold text or messages.

    Looks at every row; of a stream, at those that [`check_prompt_values`] reads. `source` is for the message.
    """
    row = first_row(dataset) or {}
    columns = list(dataset.column_names or row)
    if "prompt" not in columns:
        likely = [column for column in _LIKELY_PROMPTS if column in columns]
        near = likely or get_close_matches("prompt", columns, n=1, cutoff=0.6)
        column = "<column>"
        remedy = "Rename the one that holds the prompts"
        if near:
            column = near[0]
            remedy = f"{column!r} looks like it: rename it"
        remedy += f" with `rename_columns: [{column}=prompt]` in a recipe, or with dataset.rename_column in Python."
        got = f"{source} with the columns {', '.join(columns)}"
        raise InputError("dataset_name", got, "a column 'prompt'", remedy)
    check_prompt_values(dataset, "prompt", f" of {source}")
    return columns


def rename_columns(dataset: Any, renamings: Iterable[str]) -> Any:
    """Rename columns of a split, each `old=new`."""
    # A stream may not know its columns before it is read.
    columns = dataset.column_names or first_row(dataset) or {}
    for old, new in checked_renamings(renamings, columns):
        dataset = dataset.rename_column(old, new)
    return dataset


def checked_renamings(renamings: Iterable[str], columns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield old and new names, each written `old=new`. Refuses a malformed renaming, a missing column and a name that
    is taken."""
    names = list(columns)
    for renaming in renamings:
        old, equals, new = renaming.partition("=")
        if not (old and equals and new):
            raise InputError("rename_columns", repr(renaming), "old=new", "For example question=prompt.")
        if old not in names:
            expected = f"one of the columns: {', '.join(names)}"
            raise InputError("rename_columns", repr(renaming), expected, "Put an existing column on the left.")
        if new in names and new != old:
            got = f"{renaming!r}, but there is a column {new} already"
            raise InputError("rename_columns", got, "a new name", f"Rename that one first: `{new}=<other>`.")
        # The next renaming sees the columns as they are after this one.
        names[names.index(old)] = new
        yield old, new


def first_row(dataset: "Dataset | IterableDataset") -> dict[str, Any] | None:
    """Return the first row, or `None` if there is none. A stream is read here for the first time."""
    rows = iter(dataset)
    with reading("dataset_name", "a dataset", "data that can be read", "Correct its files."):
        return next(rows, None)


# Generated -----------------------------------------------------------------------------------------------------------


def _generated(source: str, with_test: bool) -> dict[str, "Dataset"]:
    task, options = _parse_query(source)
    if source.startswith("reasoning_gym:"):
        from trl_drgrpo.rewards.functions.reasoning_gym import make_splits

        return make_splits(task, options, with_test)
    if task not in _TASKS:
        names = [f"trl_drgrpo:{name}" for name in _TASKS]
        remedy = did_you_mean(source, names, "Name one of them.")
        raise InputError("dataset_name", source, f"{' or '.join(names)}, or another source", remedy)
    # Options are whole numbers. A slip of the pen must not fill the memory, so they have at most seven digits.
    place, defaults = _TASKS[task]
    numbers = dict(defaults)
    for key, text in options.items():
        if key not in numbers:
            raise InputError(f"{source}: {key}", "an unknown option", f"one of {', '.join(numbers)}", "Remove it.")
        if not re.fullmatch("[0-9]{1,7}", text):
            expected = "a whole number below 10,000,000"
            raise InputError(f"{source}: {key}", shortened(text), expected, f"Its default is {numbers[key]}.")
        numbers[key] = int(text)
    make_dataset = pkgutil.resolve_name(place)
    splits = {"train": make_dataset(numbers["size"], "train", numbers["seed"])}
    if numbers["test_size"]:
        splits["test"] = make_dataset(numbers["test_size"], "held_out", numbers["seed"])
    return splits


def _parse_query(source: str) -> tuple[str, dict[str, str]]:
    """Read `prefix:task?a=1&b=2` as `("task", {"a": "1", "b": "2"})`; `%26` and the like are decoded, `+` stays a
    plus."""
    task, _, query = source.partition(":")[2].partition("?")
    options = {}
    for option in filter(None, query.split("&")):
        key, equals, value = option.partition("=")
        if not (key and equals) or key in options:
            expected = "options `key=value` joined by &, each once"
            raise InputError("dataset_name", f"{option!r} in {source}", expected, "For example ?size=500.")
        options[key] = unquote(value)
    return task, options


# Local and Hub -------------------------------------------------------------------------------------------------------


def check_source(source: str) -> None:
    """Check, without importing anything, that a local source of [`load_data`] exists and is of a supported type."""
    if source.startswith(_GENERATED) or is_hub_id(source):
        return
    path = user_path(source)
    # Unlike `Path.exists` this gives False, and no error, for a name that is too long.
    if not os.path.exists(path):
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError("dataset_name", f"{source}, which does not exist", "an existing file or folder", remedy)
    if path.is_file() and path.suffix not in FILE_TYPES:
        expected = f"a file ending in {', '.join(FILE_TYPES)}, or a folder"
        raise InputError("dataset_name", f"{source}, a {path.suffix or 'nameless'} file", expected, "Convert it.")
    if path.is_dir():
        _check_folder(path, source)
    elif not path.is_file():
        raise InputError("dataset_name", f"{source}, a device or a pipe", "a file or a folder", "Write a file first.")


# A search through a whole disk would not end.
_MOST_FOLDERS = 10_000


def _check_folder(path: Path, source: str) -> None:
    """Refuse a folder that `datasets` would search for hours, or in which it would wait for a pipe."""
    expected = "a folder of data files"
    remedy = "Name the folder that holds the data and nothing else."
    if os.path.realpath(path).startswith(("/proc", "/sys", "/dev")):
        raise InputError("dataset_name", f"{source}, a folder of the system", expected, remedy)
    for folders, (folder, _, names) in enumerate(os.walk(path), start=1):
        if folders > _MOST_FOLDERS:
            got = f"{source}, a folder with more than {_MOST_FOLDERS:,} folders in it"
            raise InputError("dataset_name", got, expected, remedy)
        for name in names:
            file = os.path.join(folder, name)
            # A link to nowhere does not exist, and is left to the library.
            if os.path.exists(file) and not os.path.isfile(file):
                got = f"{source}, which holds a device or a pipe, {file}"
                raise InputError("dataset_name", got, expected, "Remove it.")


def is_hub_id(source: str) -> bool:
    """Tell whether [`load_data`] would look for the name on the Hub."""
    return not source.startswith(_GENERATED) and not _is_local(source)


def _is_local(source: str) -> bool:
    """Tell whether the name is that of a file or folder: one that exists, or one that cannot be a Hub id."""
    # A Hub id has one slash at most.
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        return True
    path = user_path(source)
    return path.suffix in FILE_TYPES or os.path.exists(path)


def _load_local(source: str, name: str | None, streaming: bool) -> Any:
    check_source(source)
    import datasets

    path = user_path(source)
    if path.is_file():
        # The library takes patterns, which the name of a file is not: a[1].jsonl is no a1.jsonl.
        pattern = glob.escape(str(path))
        return _load(FILE_TYPES[path.suffix], None, streaming, source, data_files=pattern)
    # `save_to_disk` writes the first file for several splits, the second for one.
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        with reading("dataset_name", source, "a folder that save_to_disk wrote", "Save it again."):
            loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            return loaded
        return datasets.DatasetDict({"train": loaded})
    return _load(str(path), name, streaming, source)


def _load(path: str, name: str | None, streaming: bool, source: str, **kwargs: Any) -> Any:
    import datasets

    try:
        with quiet_retries():
            return datasets.load_dataset(path, name=name, streaming=streaming, **kwargs)
    # The reader of JSON files raises this for a file without a row.
    except StopIteration as error:
        raise _empty(source) from error
    # Anything else: readers of pandas, of pyarrow and of a data card's YAML raise their own.
    except Exception as error:
        raise _not_loaded(source, error) from error


def load_mixture(mixture: Any) -> Any:
    """Return the splits of TRL's mixture of datasets."""
    from trl import get_dataset  # pyright: ignore[reportPrivateImportUsage]

    try:
        return get_dataset(mixture)
    except Exception as error:
        paths = ", ".join(entry.path for entry in mixture.datasets)
        remedy = f"{type(error).__name__}: {str(error).rstrip('.')}."
        raise InputError(
            "datasets", f"a mixture of {paths} that does not load", "datasets that load", remedy
        ) from error


def _empty(source: str) -> InputError:
    return InputError("dataset_name", f"{source}, which is empty", "at least one row", "Add prompts.")


def _not_loaded(source: str, error: Exception) -> InputError:
    # The library wraps what a reader has raised, and says less than that.
    cause = error.__cause__ or error
    reason = f"{type(cause).__name__}: {cause}".rstrip(".")
    if _is_local(source):
        expected = f"data that can be read: {', '.join(FILE_TYPES)} files, or a folder from save_to_disk"
        return InputError("dataset_name", f"{source}, which could not be read", expected, f"{reason:.300}.")
    from datasets import config

    if config.HF_HUB_OFFLINE:
        got = f"{source}, which is neither a local path nor in the local cache, in offline mode (HF_HUB_OFFLINE=1)"
        remedy = "Unset HF_HUB_OFFLINE to download it, or correct the path."
        return InputError("dataset_name", got, "a local path, or a Hub dataset loaded once before", remedy)
    expected = "an existing dataset that you can read, or a local path"
    at_the_hub = hub_reason(error)
    if at_the_hub is not None:
        got, remedy = at_the_hub
        return InputError("dataset_name", f"{source}, {got}", expected, remedy)
    got = f"{source}, which could not be loaded from the Hub ({reason:.300})"
    remedy = "Check the id, the network and `hf auth login`; dataset_config names its configuration."
    return InputError("dataset_name", got, expected, remedy)


SLOT = "{prompt}"
# A name in doubled braces, or anything in single ones.
_SLOTS = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([^{}]+)\}")
# A name in braces by itself. Behind a letter, a brace, `^` or `_` it is LaTeX: `\boxed{x}`, `\frac{a}{b}`, `x^{n}`.
_NAMES = re.compile(r"(?<![\w\\^{}\]])\{([A-Za-z_]\w*)\}(?!\})")
TEMPLATES = {
    "qwen_math": (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "r1": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {prompt}\nAssistant: <think>"
    ),
}


def template_text(template: str) -> str:
    r"""
    Return the text behind a template's name (`"qwen_math"`, `"r1"`), or the text itself, which must hold `{prompt}`.

    The name of any other column in braces stands for its value (of a list, one value per line). Other braces, those of
    `\boxed{}` for example, are text; doubled braces around a column's name are that name in braces.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if isinstance(template, str) and SLOT in template:
        return template
    remedy = did_you_mean(template, TEMPLATES, "For example `Question: {prompt} Answer:`.", form="{!r}")
    expected = f"one of {', '.join(TEMPLATES)}, or a template with {SLOT} in it"
    raise InputError("prompt_template", repr(template), expected, remedy)


def check_prompting(prompt_template: str | None, system_prompt: str | None) -> None:
    """Check the two options of [`prompted`] before any data is read."""
    if prompt_template is None:
        return
    template_text(prompt_template)
    if system_prompt is not None and prompt_template in TEMPLATES:
        got = f"one together with prompt_template {prompt_template!r}"
        expected = "only one of them: that template is a whole conversation as plain text"
        raise InputError("system_prompt", got, expected, "Remove it for a base model, the template for a chat model.")


def prompted(dataset: Any, prompt_template: str | None = None, system_prompt: str | None = None) -> Any:
    """
    Return a split with the prompts that the model is to see; the same one if neither option is given.

    `prompt_template` ([`template_text`]) needs text prompts. `system_prompt` makes each prompt a conversation that
    starts with this message, and needs prompts without a system message of their own.
    """
    check_prompting(prompt_template, system_prompt)
    if prompt_template is None and system_prompt is None:
        return dataset
    options = {"prompt_template": prompt_template, "system_prompt": system_prompt}
    # The first row is tried at once, for an error in one line: `map` would wrap it, and a stream would wait.
    row = first_row(dataset)
    if row is not None:
        check_slots(dataset.column_names or row, prompt_template)
        as_prompted(row, **options)
    return dataset.map(as_prompted, fn_kwargs=options)


def check_slots(columns: Iterable[str], prompt_template: str | None) -> None:
    """Refuse names in braces that are no column: a slip of the pen would stand in every prompt as it is."""
    if prompt_template is None:
        return
    columns = list(columns)
    for name in _NAMES.findall(template_text(prompt_template)):
        if name not in columns:
            remedy = f"If it is meant as text, double the braces: {{{{{name}}}}}."
            near = get_close_matches(name, columns, n=1, cutoff=0.6)
            if near:
                remedy = f"Did you mean {{{near[0]}}}? {remedy}"
            expected = f"one of the columns {', '.join(columns)}"
            raise InputError("prompt_template", f"the slot {{{name}}}", expected, remedy)


def as_prompted(row: Mapping[str, Any], prompt_template: str | None, system_prompt: str | None) -> dict[str, Any]:
    """Return the `prompt` of a row as the model is to see it."""
    prompt = row["prompt"]
    if prompt_template is not None:
        if not isinstance(prompt, str):
            got = "a template for prompts that are messages"
            remedy = "Remove prompt_template: the tokenizer's chat template formats messages."
            raise InputError("prompt_template", got, "plain-text prompts", remedy)
        prompt = _SLOTS.sub(lambda slot: _value(row, slot), template_text(prompt_template))
    if system_prompt is None:
        return {"prompt": prompt}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt)
    if messages and messages[0].get("role") == "system":
        expected = "prompts without a system message"
        remedy = "Remove system_prompt, or the message from the data."
        raise InputError("system_prompt", "one for prompts that begin with a system message", expected, remedy)
    return {"prompt": [{"role": "system", "content": system_prompt}, *messages]}


def _value(row: Mapping[str, Any], slot: re.Match) -> str:
    """Return the text for a slot: the column's value, or the slot's own text where there is no such column."""
    # With a column `x` of value 3, `{x}` is 3 and `{{x}}` is {3}, as in `\boxed{{x}}`. Without one, `{x}` stays as it
    # is and `{{x}}` is {x}.
    in_double_braces = slot[1]
    if in_double_braces and in_double_braces not in row:
        return f"{{{in_double_braces}}}"
    value = row.get(in_double_braces or slot[2], slot[0])
    if isinstance(value, list | tuple):
        value = "\n".join(map(str, value))
    return f"{{{value}}}" if in_double_braces else str(value)


def write_rates(path: str, rows: Sequence[Mapping[str, Any]], correct: Sequence[bool | None], by: str = "") -> None:
    """Write the pass rates of prompts, for `prior_pass_rates`, and say so. `by`: of which reward."""
    prompts = [row["prompt"] for row in rows]
    written, unjudged = write_pass_rates(Path(path), prompts, correct)
    message = f"Pass rates of {written} prompts{by}: {path}"
    if unjudged:
        message += f"; {unjudged} without a score are left out"
    console.log(message)
