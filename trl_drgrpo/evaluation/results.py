"""Numbers of an evaluation: pass@k and its interval over prompts, as one JSON-ready dictionary, and the file of it.

A prompt whose completions the reward could not score counts in no mean; one with fewer scored completions than `k`
counts in no pass@k. Both are counted. Completions that were cut at the limit count by their reward.

The estimator is that of Chen et al. (arXiv 2107.03374, equation 1): with `n` samples of a prompt, `c` of them
correct, `1 - C(n - c, k) / C(n, k)` is the unbiased estimate of the chance that one of `k` samples is correct; for
`k = 1` it is `c / n`. The mean runs over prompts. The interval is the percentile bootstrap over prompts: prompts are
drawn anew, and the samples of a prompt stay together, so it covers both the choice of prompts and the sampling. Two
models are compared prompt by prompt: the interval of the difference is that of the paired differences.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.common import __version__
from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.evaluation.running import KIND, Row
from trl_drgrpo.features.diagnostics.correctness import CorrectnessRule

RESAMPLES = 10_000
INTERVAL = f"95%, percentile bootstrap over prompts ({RESAMPLES:,} resamples)"
_VALUES_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Args:
        value (`float`, *optional*): The mean; `None` over no prompts.
        low, high (`float`, *optional*): Ends of the 95% interval. `None` where all prompts have the same value: their
            bootstrap has no width, whatever the uncertainty.
        prompts (`int`): Prompts in the mean.
    """

    value: float | None
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of `k` completions of a prompt is correct, estimated from more of them.

    Args:
        samples (`int`): Completions of the prompt, at least `k`.
        correct (`int`): Those that are correct.
        k (`int`): At least 1.

    Returns:
        `float`: 0 to 1.

    Raises:
        `InputError`: Fewer completions than `k`, or more correct ones than there are.

    Example:

    ```python
    >>> pass_at_k(8, 2, 1), round(pass_at_k(8, 2, 4), 4), pass_at_k(8, 2, 8)
    (0.25, 0.7857, 1.0)

    ```
    """
    if not 1 <= k <= samples:
        remedy = "Sample at least k completions of each prompt."
        raise InputError("k", f"{k} of {samples} samples", "a whole number from 1 to the number of samples", remedy)
    if not 0 <= correct <= samples:
        raise InputError(
            "correct", f"{correct} of {samples}", "a number from 0 to the number of samples", "Check the counts."
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_over_prompts(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean and 95% interval.

    Args:
        values (`Sequence[float]`): One per prompt.
        seed (`int`, *optional*, defaults to `0`): Of the bootstrap.

    Returns:
        [`Estimate`]

    Example:

    ```python
    >>> mean_over_prompts([1.0, 1.0])
    Estimate(value=1.0, low=None, high=None, prompts=2)

    ```
    """
    if not len(values):
        return Estimate(None, None, None, 0)
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if array.min() == array.max():
        return Estimate(mean, None, None, len(array))
    generator = np.random.default_rng(seed)
    at_once = max(1, _VALUES_AT_ONCE // len(array))
    means: list[np.ndarray] = []
    for start in range(0, RESAMPLES, at_once):
        drawn = generator.integers(len(array), size=(min(at_once, RESAMPLES - start), len(array)))
        means.append(array[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Estimate(mean, float(low), float(high), len(array))


FORMAT = 1


def judged(
    rows: Sequence[Row], names: Sequence[str], reward: str | None, threshold: float | None
) -> list[bool | None]:
    """Rule for correct samples.

    Args:
        rows (`Sequence[dict]`): Of the samples' file.
        names (`Sequence[str]`): The rewards, in their order.
        reward (`str`, *optional*): The one that decides on correctness; the first by default.
        threshold (`float`, *optional*): Correct from this reward on; needed for rewards other than 0 and 1.

    Returns:
        `list[bool | None]`: `None` where the reward gave none.

    Raises:
        `InputError`: Rewards other than 0 and 1 without a threshold.
    """
    rule = CorrectnessRule(names, reward, threshold)
    given = [row[KIND]["rewards"][rule.name] for row in rows]
    found = rule.judge([math.nan if value is None else value for value in given])
    if found is None:
        other = next(value for value in given if value not in (None, 0.0, 1.0))
        remedy = "Set the lowest reward of a correct completion: --correct_threshold. The samples are kept."
        raise InputError("correct_threshold", f"none for {rule.name}, which gave {other:g}", "a number", remedy)
    return found


def model_numbers(rows: Sequence[Row], correct: Sequence[bool | None], ks: Sequence[int]) -> dict[str, Any]:
    """Numbers of one model.

    Args:
        rows (`Sequence[dict]`): Its samples.
        correct (`Sequence[bool | None]`): Of [`judged`].
        ks (`Sequence[int]`): For pass@k.

    Returns:
        `dict`: `prompts`, `completions`, `unscorable`, `failed`, `truncated` (counts), `length_mean` (tokens),
        `rewards` (means), and `pass_at`: for each `k` value, interval and number of prompts.
    """
    names = list(rows[0][KIND]["rewards"])
    rewards = {name: [row[KIND]["rewards"][name] for row in rows] for name in names}
    return {
        "prompts": len({row[KIND]["problem"] for row in rows}),
        "completions": len(rows),
        "unscorable": sum(each is None for each in correct),
        "failed": sum("failures" in row[KIND] for row in rows),
        "truncated": sum(row[KIND]["finish_reason"] == "length" for row in rows),
        "length_mean": sum(row[KIND]["tokens"] for row in rows) / len(rows),
        "rewards": {name: _mean(value for value in values if value is not None) for name, values in rewards.items()},
        "pass_at": {str(k): asdict(mean_over_prompts(list(_by_prompt(rows, correct, k).values()))) for k in ks},
    }


def differences(
    rows: Sequence[Row],
    correct: Sequence[bool | None],
    other_rows: Sequence[Row],
    other_correct: Sequence[bool | None],
    ks: Sequence[int],
) -> dict[str, Any]:
    """The paired difference of pass@k to another model, prompt by prompt, with its interval; over prompts that both
    have a value for. The order of the arguments is that of the subtraction."""
    found = {}
    for k in ks:
        ours, theirs = _by_prompt(rows, correct, k), _by_prompt(other_rows, other_correct, k)
        found[str(k)] = asdict(mean_over_prompts([ours[i] - theirs[i] for i in ours if i in theirs]))
    return found


def results(facts: Mapping[str, Any], models: Sequence[Mapping[str, Any]], difference: Any) -> dict[str, Any]:
    """The whole result. `facts`: where the numbers come from, the data, the sampling; `models`: role, name and numbers
    of each, the baseline first; `difference`: of [`differences`], `None` with one model."""
    return {
        "format": FORMAT,
        "made_by": f"trl-drgrpo {__version__}",
        **facts,
        "interval": INTERVAL,
        "models": list(models),
        "difference": difference,
    }


def as_json(content: Mapping[str, Any]) -> str:
    """The result as it stands in its file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write the result, whole or not at all."""
    write_whole(path, as_json(content))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, the newest last; other files and other formats are left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            complete = content["format"] == FORMAT and content["models"] and content["dataset"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if complete:
            found.append((path.stat().st_mtime, content))
    return [content for _, content in sorted(found, key=lambda each: each[0])]


def _by_prompt(rows: Sequence[Row], correct: Sequence[bool | None], k: int) -> dict[int, float]:
    """pass@k of each prompt with at least `k` scored completions."""
    verdicts: dict[int, list[bool]] = {}
    for row, is_correct in zip(rows, correct, strict=True):
        if is_correct is not None:
            verdicts.setdefault(row[KIND]["problem"], []).append(is_correct)
    return {i: pass_at_k(len(each), sum(each), k) for i, each in verdicts.items() if len(each) >= k}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
