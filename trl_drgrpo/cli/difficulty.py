"""`difficulty_range`: training on the prompts alone that a model passes now and then.

Plain filtering, for those who want it. What is left out is no part of the objective any more, and what the model
learns of it meanwhile is not seen; `curriculum` spares the same generations and weights the rest so that it stays.
"""

import os
from collections.abc import Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError

FIELD = "difficulty_range"


def check_difficulty(given: Mapping[str, Any]) -> None:
    """Checks the two keys before anything is imported.

    Args:
        given (`Mapping[str, Any]`): The values from recipe and flags, typed.

    Raises:
        [`InputError`]: Not two rising pass rates, or no file of pass rates.
    """
    path, limits = given.get("prior_pass_rates"), given.get(FIELD)
    if path is not None and not os.path.isfile(Path(path).expanduser()):
        remedy = "Write it with `trl-drgrpo score --pass_rates`."
        raise InputError("prior_pass_rates", f"{path}, which is not a file", "a file of pass rates", remedy)
    if limits is None:
        return
    if not (len(limits) == 2 and 0 <= limits[0] <= limits[1] <= 1):
        expected = "two pass rates from 0 to 1, the lower one first"
        raise InputError(FIELD, " ".join(map(str, limits)) or "none", expected, "For example 0.1 0.9.")
    if path is None:
        remedy = "Name a file that `trl-drgrpo score --pass_rates` wrote, or leave difficulty_range out."
        raise InputError(FIELD, f"{limits} without prior_pass_rates", "a file of pass rates as well", remedy)


def within_range(dataset: Any, limits: list[float], path: str) -> tuple[Any, str]:
    """The rows whose prompts have a pass rate within limits, or none that is known.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): With the prompts as the model sees them.
        limits (`list[float]`): Lowest and highest pass rate that stay.
        path (`str`): File of pass rates.

    Returns:
        `tuple`: The dataset with those rows, and what was done, in words.

    Raises:
        [`InputError`]: The file cannot be read or knows none of the prompts, or no row stays.
    """
    from trl_drgrpo.features.sampling.pass_rates import read_pass_rates, unknown_prompts
    from trl_drgrpo.rewards.text import prompt_key

    low, high = limits
    rates = {key: rate for key, (rate, _) in read_pass_rates(Path(path).expanduser()).items()}

    def stays(key: str) -> bool:
        return key not in rates or low <= rates[key] <= high

    if not hasattr(dataset, "__len__"):
        kept = dataset.filter(lambda row: stays(prompt_key(row["prompt"])))
        if next(iter(kept), None) is None:
            raise _nothing_left(limits, path, "of the stream's")
        return kept, f"a stream, whose prompts outside the range are skipped; {_CHANGES}"
    batches = dataset.select_columns(["prompt"]).iter(1000)  # several times as fast as row by row
    keys = [prompt_key(prompt) for batch in batches for prompt in batch["prompt"]]
    if not any(key in rates for key in keys):
        raise unknown_prompts(Path(path))
    staying = list(compress(range(len(keys)), map(stays, keys)))
    if not staying:
        raise _nothing_left(limits, path, f"of {len(keys)}")
    unknown = sum(key not in rates for key in keys)
    said = f"{len(staying)} of {len(keys)} prompts are kept, {unknown} of them not in {path}; {_CHANGES}"
    return dataset.select(staying), said


_CHANGES = "this changes the objective, a mean over the kept prompts"


def _nothing_left(limits: list[float], path: str, of_how_many: str) -> InputError:
    got = f"{limits}, which contains none {of_how_many} prompts according to {path}"
    return InputError(FIELD, got, "a range with prompts in it", "Widen it.")
