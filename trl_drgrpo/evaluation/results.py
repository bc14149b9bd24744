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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.common import __version__
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule

KIND = "eval"  # the column of a sample's row with all that the evaluation says of it
Row = dict[str, Any]

RESAMPLES = 10_000
INTERVAL = f"95%, percentile bootstrap over prompts ({RESAMPLES:,} resamples)"


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
        expected = "a number from 0 to the number of samples"
        raise InputError("correct", f"{correct} of {samples}", expected, "Check the counts.")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_over_prompts(values: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Mean and 95% interval.

    Args:
        values (`Sequence[float]`): One per prompt.
        seed (`int`, *optional*, defaults to `0`): Of the bootstrap.

    Returns:
        `dict`: `value`: the mean, `None` over no prompts; `low`, `high`: the ends of the interval, `None` where all
        prompts have the same value: their bootstrap has no width, whatever the uncertainty; `prompts`: their number.

    Example:

    ```python
    >>> mean_over_prompts([1.0, 1.0])
    {'value': 1.0, 'low': None, 'high': None, 'prompts': 2}

    ```
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean()) if len(array) else None
    low = None
    high = None
    if len(array) and array.min() < array.max():
        low, high = bootstrap(len(array), lambda drawn: float(array[drawn].mean()), RESAMPLES, seed)
    return {"value": mean, "low": low, "high": high, "prompts": len(array)}


def bootstrap(count: int, statistic: Callable[[np.ndarray], float], resamples: int, seed: int = 0) -> Sequence[float]:
    """Ends of the 95% interval of a statistic, from the percentile bootstrap.

    Args:
        count (`int`): How many prompts there are.
        statistic (`Callable`): From the indices of `count` prompts, drawn with replacement; NaN is left out.
        resamples (`int`): How often they are drawn.
        seed (`int`, *optional*, defaults to `0`): Of the draws.
    """
    generator = np.random.default_rng(seed)
    resampled = [statistic(generator.integers(count, size=count)) for _ in range(resamples)]
    return [float(end) for end in np.nanquantile(resampled, (0.025, 0.975))]


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
    rewards = [row[KIND]["rewards"][rule.name] for row in rows]
    verdicts = rule.judge([math.nan if value is None else value for value in rewards])
    if verdicts is None:
        not_a_verdict = next(value for value in rewards if value not in (None, 0.0, 1.0))
        remedy = "Set the lowest reward of a correct completion: --correct_threshold. The samples are kept."
        raise InputError(
            "correct_threshold", f"none for {rule.name}, which gave {not_a_verdict:g}", "a number", remedy
        )
    return verdicts


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
    rewards_of_rows = [row[KIND]["rewards"] for row in rows]
    scored: dict[str, list[float]] = {name: [] for name in rewards_of_rows[0]}
    for rewards in rewards_of_rows:
        for name, reward in rewards.items():
            if reward is not None:
                scored[name].append(reward)
    means = {name: sum(values) / len(values) if values else None for name, values in scored.items()}
    return {
        "prompts": len({row[KIND]["problem"] for row in rows}),
        "completions": len(rows),
        "unscorable": sum(verdict is None for verdict in correct),
        "failed": sum("failures" in row[KIND] for row in rows),
        "truncated": sum(row[KIND]["finish_reason"] == "length" for row in rows),
        "length_mean": sum(row[KIND]["tokens"] for row in rows) / len(rows),
        "rewards": means,
        "pass_at": {str(k): mean_over_prompts(list(_by_prompt(rows, correct, k).values())) for k in ks},
    }


def results(
    facts: Mapping[str, Any], models: Mapping[str, tuple[Mapping[str, Any], Sequence[Row]]], ks: Sequence[int]
) -> dict[str, Any]:
    """The whole result.

    Args:
        facts (`Mapping[str, Any]`): Where the numbers come from, the data, the sampling; and under `correct`, which
            completions are: `reward` and `threshold`.
        models (`Mapping[str, tuple]`): By role, the baseline first: facts about it, and its samples.
        ks (`Sequence[int]`): For pass@k.

    Returns:
        `dict`: The facts, the numbers of each model, and with a baseline the `difference` of pass@k to it: paired,
        prompt by prompt, over prompts that both have a value for.
    """
    names = list(next(iter(models.values()))[1][0][KIND]["rewards"])
    correct = {role: judged(rows, names, *facts["correct"].values()) for role, (_, rows) in models.items()}
    model_entries = [
        {"role": role, **about, **model_numbers(rows, correct[role], ks)} for role, (about, rows) in models.items()
    ]
    difference = {}
    for k in ks if "baseline" in models else ():
        model_means, baseline_means = (_by_prompt(models[role][1], correct[role], k) for role in ("model", "baseline"))
        difference[str(k)] = mean_over_prompts(
            [model_means[i] - baseline_means[i] for i in model_means if i in baseline_means]
        )
    made_by = f"trl-drgrpo {__version__}"
    numbers = {"interval": INTERVAL, "models": model_entries, "difference": difference or None}
    return {"format": FORMAT, "made_by": made_by, **facts, **numbers}


def as_json(content: Mapping[str, Any]) -> str:
    """The result as it stands in its file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, the newest last; other files and other formats are left out."""
    dated_contents = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            complete = content["format"] == FORMAT and content["models"] and content["dataset"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if complete:
            dated_contents.append((path.stat().st_mtime, content))
    return [content for _, content in sorted(dated_contents, key=lambda dated: dated[0])]


def _by_prompt(rows: Sequence[Row], correct: Sequence[bool | None], k: int) -> dict[int, float]:
    """pass@k of each prompt with at least `k` scored completions."""
    verdicts: dict[int, list[bool]] = {}
    for row, is_correct in zip(rows, correct, strict=True):
        if is_correct is not None:
            verdicts.setdefault(row[KIND]["problem"], []).append(is_correct)
    return {
        i: pass_at_k(len(verdicts_of_prompt), sum(verdicts_of_prompt), k)
        for i, verdicts_of_prompt in verdicts.items()
        if len(verdicts_of_prompt) >= k
    }
