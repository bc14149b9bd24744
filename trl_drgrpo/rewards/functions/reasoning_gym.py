r"""reasoning-gym (arXiv 2505.24760) as data and as a reward: tasks made by a program, scored by the task itself.

`make_splits` writes a task as a dataset with the columns `prompt` (messages), `answer` (text, or null where a task
has no single answer) and `entry` (JSON: the task, its configuration, and the entry that its `score_answer` asks for).
`reasoning_gym_reward` extracts the final answer from a completion and hands it to that `score_answer`.

About seeds: row `i` of nearly every task is drawn from `seed + i`, so two seeds that differ by 1 share all rows but
one. The test split therefore starts at `seed + 1_000_000`, and test questions that also occur in the training split
are left out, with a warning: in a small task (few different questions) that may be all of them.
"""

import ast
import dataclasses
import functools
import importlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError, did_you_mean, require_package
from trl_drgrpo.rewards.columns import LogMetric
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.sample import after_thinking, marked_answer
from trl_drgrpo.rewards.texts import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Entry = dict[str, Any]  # of a task, as reasoning-gym makes it: question, answer, metadata

TEST_SEED_DISTANCE = 1_000_000
DEFAULT_SEED = 0
_OWN_OPTIONS = {"test_size": 100, "system_prompt": ""}

# What the tasks' scorers raise on text that they cannot read. (Measured: 3 of 105 tasks do.)
_SCORER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


# Data ----------------------------------------------------------------------------------------------------------------


def make_splits(task: str, options: dict[str, str], with_test: bool = True) -> dict[str, "Dataset"]:
    """
    Generates a task as a training and a test split.

    Args:
        task (`str`):
            Name of a reasoning-gym task, e.g. `chain_sum`.
        options (`dict[str, str]`):
            `size` (rows to train on, defaults to the task's own, 500), `seed` (defaults to 0), `test_size` (defaults
            to 100; 0: no test split), `system_prompt` (one of reasoning-gym's: `default`, `simple`, `direct`,
            `DeepSeekZero`, `chain_of_draft`), and every field of the task's configuration.
        with_test (`bool`, *optional*, defaults to `True`):
            Whether to generate the test split at all.

    Returns:
        `dict[str, Dataset]`: `train` and, where one was asked for and a question is left in it, `test`.

    Raises:
        [`InputError`]: If reasoning-gym is not installed, or the task, an option or a value is
            unknown to it.
    """
    gym, factory = _factory_of(task)
    config = _read_options(task, factory.DATASETS[task][1], options)
    # What is left of the options is the task's own configuration.
    test_size = config.pop("test_size")
    system_prompt = config.pop("system_prompt")
    prompts = importlib.import_module("reasoning_gym.utils").SYSTEM_PROMPTS
    if system_prompt and system_prompt not in prompts:
        remedy = did_you_mean(system_prompt, prompts, "Pick one of them.")
        field = f"reasoning_gym:{task}?system_prompt"
        raise InputError(field, repr(system_prompt), f"one of {', '.join(prompts)}", remedy)
    system_prompt = prompts.get(system_prompt)
    train = _entries(gym, task, config)
    splits = {"train": _as_dataset(train, task, config, system_prompt)}
    if with_test and test_size:
        test_config = {**config, "seed": config["seed"] + TEST_SEED_DISTANCE, "size": test_size}
        test = _without_overlap(task, train, _entries(gym, task, test_config))
        if test:
            splits["test"] = _as_dataset(test, task, test_config, system_prompt)
    return splits


def _factory_of(task: str) -> tuple[Any, Any]:
    """reasoning-gym and its factory, which knows the task."""
    require_package("reasoning_gym", "dataset_name", "a reasoning_gym task", "tasks")
    gym = importlib.import_module("reasoning_gym")
    factory = importlib.import_module("reasoning_gym.factory")
    if task not in factory.DATASETS:
        expected = f"one of {len(factory.DATASETS)} tasks"
        remedy = did_you_mean(task, factory.DATASETS, "`reasoning_gym.factory.DATASETS` lists them.", most=3)
        raise InputError("dataset_name", f"reasoning_gym:{task}", expected, remedy)
    return gym, factory


def _read_options(task: str, config_class: type, options: dict[str, str]) -> dict[str, Any]:
    """Return the task's configuration from the query and our own options: every key known, every value of its
    default's type."""
    # The defaults of the task's configuration tell the types of its options.
    defaults: dict[str, Any] = {}
    for entry in dataclasses.fields(config_class):
        defaults[entry.name] = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            defaults[entry.name] = entry.default_factory()
    config = {"seed": DEFAULT_SEED, "size": defaults.get("size", 500), **_OWN_OPTIONS}
    defaults |= config
    for key, text in options.items():
        field = f"reasoning_gym:{task}?{key}"
        if key not in defaults:
            remedy = did_you_mean(key, defaults, "Remove it.")
            raise InputError(field, "an unknown option", f"one of {', '.join(defaults)}", remedy)
        config[key] = _read_value(field, text, defaults[key])
    for key, least in (("size", 1), ("test_size", 0)):
        if not least <= config[key] <= TEST_SEED_DISTANCE:
            expected = f"a number of rows from {least} to {TEST_SEED_DISTANCE}"
            remedy = "The training rows of more would overlap with the test split."
            raise InputError(f"reasoning_gym:{task}?{key}", str(config[key]), expected, remedy)
    return config


# By the type of an option's default: what a value may be. A default of another type says nothing.
_VALUE_KINDS = {bool: bool, int: int, float: (int, float), tuple: tuple, list: (list, tuple)}


def _read_value(field: str, text: str, default: object) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = text
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    kinds = _VALUE_KINDS.get(type(default), object)
    # To Python, True is an integer.
    is_bool_by_mistake = kinds is not object and isinstance(value, bool) is not isinstance(default, bool)
    if not isinstance(value, kinds) or is_bool_by_mistake:
        remedy = f"Its default is {default!r}."
        raise InputError(field, repr(text), f"a value of type {type(default).__name__}", remedy)
    return value


def _entries(gym: Any, task: str, config: dict[str, Any]) -> list[Entry]:
    try:
        dataset = gym.create_dataset(task, **config)
        return [dataset[index] for index in range(len(dataset))]
    except Exception as error:  # how the tasks refuse a configuration
        field = f"reasoning_gym:{task}"
        got = f"invalid options ({str(error) or type(error).__name__})"
        remedy = "Change the options after the `?`; the others keep the task's defaults."
        raise InputError(field, got, "options of the task", remedy) from error


def _without_overlap(task: str, train: list[Entry], test: list[Entry]) -> list[Entry]:
    # By the question: two rows of different seeds may be the same task.
    train_questions = {entry["question"] for entry in train}
    new_entries = [entry for entry in test if entry["question"] not in train_questions]
    if len(new_entries) < len(test):
        logger.warning(
            "reasoning_gym:%s: %d of %d test questions also occur among the %d different training questions and were "
            "left out. The task is small with these options: raise its difficulty, or lower size.",
            task,
            len(test) - len(new_entries),
            len(test),
            len(train_questions),
        )
    return new_entries


def _as_dataset(entries: list[Entry], task: str, config: dict[str, Any], system_prompt: str | None) -> "Dataset":
    from datasets import Dataset, Features, Value

    # Stated, since a column of answers that are all null would get a type of its own.
    text = Value("string")
    features = Features({"prompt": [{"role": text, "content": text}], "answer": text, "entry": text})
    columns = {"prompt": [], "answer": [], "entry": []}
    for entry in entries:
        prompt = [{"role": "user", "content": entry["question"]}]
        if system_prompt is not None:
            prompt.insert(0, {"role": "system", "content": system_prompt})
        answer = entry["answer"]
        if answer is not None:  # a column of texts: some tasks answer in numbers
            answer = str(answer)
        columns["prompt"].append(prompt)
        columns["answer"].append(answer)
        columns["entry"].append(_encode({"task": task, "config": config, "entry": entry}))
    return Dataset.from_dict(columns, features=features)


def _encode(value: object) -> str:
    """Return JSON with tuples marked as such, because two tasks score a tuple and a list differently."""
    return json.dumps(_mark_tuples(value), sort_keys=True)


def _decode(text: str) -> Any:
    """The inverse of `_encode`: for a column `entry`, a dict with `task`, `config` and `entry`."""

    def unmarked(mapping: dict[str, Any]) -> Any:
        return tuple(mapping["()"]) if mapping.keys() == {"()"} else mapping

    return json.loads(text, object_hook=unmarked)


def _mark_tuples(value: object) -> Any:
    if isinstance(value, tuple):
        return {"()": [_mark_tuples(item) for item in value]}
    if isinstance(value, list):
        return [_mark_tuples(item) for item in value]
    if isinstance(value, dict):
        return {key: _mark_tuples(item) for key, item in value.items()}
    return value


# Reward --------------------------------------------------------------------------------------------------------------


def reasoning_gym_reward(
    completions: Sequence[Any], entry: Sequence[str], log_metric: LogMetric = None, **kwargs: Any
) -> list[float]:
    r"""
    Score completions with the `score_answer` of the task that each row comes from.

    Many tasks give part of the points for a part of the answer; nothing is rounded here. A few tasks evaluate the
    answer as an expression on the calling thread, so a hostile answer can take its time.

    Args:
        completions (`Sequence[str]` or sequence of message lists):
            `B` completions, plain or conversational.
        entry (`Sequence[str]`):
            `B` rows of the dataset's column `entry`.
        log_metric (`Callable`, *optional*):
            Given by TRL. The share of answers at which a scorer raised is logged as
            `rewards/reasoning_gym/scorer_error_frac`.
        **kwargs:
            The other columns; not used.

    Returns:
        `list[float]` of length `B`, as a rule between 0 and 1. No answer, or one that the scorer cannot read: 0.
    """
    scores = []
    errors = 0
    for completion, text in zip(completions, entry, strict=True):
        row = _decode(text)
        # The configuration goes by its JSON text: it has lists in it, and the cache needs something hashable.
        scorer = _cached_scorer(row["task"], _encode(row["config"]))
        lines = str(row["entry"].get("answer")).strip().splitlines()
        answer = extract_answer(completion_text(completion), last_lines=len(lines))
        score = 0.0
        if answer is not None:
            try:
                score = float(scorer(answer, row["entry"]))
            except _SCORER_ERRORS:  # an answer that it cannot read
                errors += 1
        scores.append(score)
    if log_metric is not None and scores:
        log_metric("rewards/reasoning_gym/scorer_error_frac", errors / len(scores))
    return scores


def extract_answer(text: str, last_lines: int = 1) -> str | None:
    r"""
    The final answer of a completion.

    What follows the last `</think>`, if there is one, is searched for, in this order: the last `<answer>...</answer>`;
    the last `\boxed{...}` that is closed; the last line that is not blank (for a task whose answers are grids,
    as many lines as the correct answer has).

    Args:
        text (`str`): The completion.
        last_lines (`int`, *optional*, defaults to 1): Number of last lines to take, for answers that are grids.

    Returns:
        `str` without surrounding blanks, or `None` if the text is blank.

    Example:

    ```python
    >>> extract_answer("3+8=11 <answer>11</answer>"), extract_answer("so \\boxed{\\frac{1}{2}}."), extract_answer(" ")
    ('11', '\\frac{1}{2}', None)

    ```
    """
    text = after_thinking(text)
    marked = marked_answer(text)
    if marked is not None:
        return marked
    # Blank lines inside a grid belong to it.
    return "\n".join(text.rstrip().splitlines()[-last_lines:]).strip() or None


@functools.lru_cache(maxsize=64)
def _cached_scorer(task: str, config: str) -> Callable[[str, Entry], float]:
    gym, _ = _factory_of(task)
    # The scorer is a method of the data set. One row is enough of it: the entry to score comes with the call.
    return gym.create_dataset(task, **{**_decode(config), "size": 1}).score_answer


register_reward("reasoning_gym", reasoning_gym_reward, help="What the row's task of reasoning-gym gives the answer.")
