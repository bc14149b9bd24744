"""Numbers of an evaluation: pass@k and its interval over prompts, as one dictionary ready for JSON, and its file.

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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.common import __version__
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule

FORMAT = 1  # of a result's file
KIND = "eval"  # column of a sample's row that holds the evaluation's own data
Row = dict[str, Any]

RESAMPLES = 10_000
INTERVAL = f"95%, percentile bootstrap over prompts ({RESAMPLES:,} resamples)"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate the chance that at least one of `k` completions of a prompt is correct, from `k` or more of them.

    Args:
        samples (`int`): Completions of the prompt, at least `k`.
        correct (`int`): How many are correct.
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
        expected = "a whole number from 1 to the number of samples"
        remedy = "Sample at least k completions of each prompt."
        raise InputError("k", f"{k} of {samples} samples", expected, remedy)
    if not 0 <= correct <= samples:
        expected = "a number from 0 to the number of samples"
        raise InputError("correct", f"{correct} of {samples}", expected, "Check the counts.")
    # Of all ways to choose k samples, the share in which none is correct. Whole numbers of any size are exact here.
    without_correct = math.comb(samples - correct, k)
    return 1 - without_correct / math.comb(samples, k)


def mean_over_prompts(values: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Return the mean and its 95% interval.

    Args:
        values (`Sequence[float]`): One per prompt.
        seed (`int`, *optional*, defaults to `0`): Seed of the bootstrap.

    Returns:
        `dict`: `value`: the mean, `None` without prompts; `low`, `high`: the ends of the interval, `None` where all
        prompts have the same value: their bootstrap has no width, whatever the uncertainty; `prompts`: their number.

    Example:

    ```python
    >>> mean_over_prompts([1.0, 1.0])
    {'value': 1.0, 'low': None, 'high': None, 'prompts': 2}

    ```
    """
    estimate: dict[str, Any] = {"value": None, "low": None, "high": None, "prompts": len(values)}
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return estimate
    estimate["value"] = float(array.mean())
    if array.min() < array.max():

        def resampled_mean(drawn: np.ndarray) -> float:
            return float(array[drawn].mean())

        low, high = bootstrap(len(array), resampled_mean, RESAMPLES, seed)
        estimate |= {"low": low, "high": high}
    return estimate


def bootstrap(count: int, statistic: Callable[[np.ndarray], float], resamples: int, seed: int = 0) -> Sequence[float]:
    """Return the ends of the 95% interval of a statistic, from the percentile bootstrap.

    Args:
        count (`int`): Number of prompts.
        statistic (`Callable`): Takes the indices of `count` prompts, drawn with replacement; NaN is left out.
        resamples (`int`): Number of draws.
        seed (`int`, *optional*, defaults to `0`): Seed of the draws.
    """
    generator = np.random.default_rng(seed)  # fixed by default: the same samples give the same interval
    # One draw at a time: all of them at once would be a table of resamples x prompts.
    resampled = []
    for _ in range(resamples):
        drawn = generator.integers(count, size=count)
        resampled.append(statistic(drawn))
    return np.nanquantile(resampled, (0.025, 0.975)).tolist()


def judged(
    rows: Sequence[Row], names: Sequence[str], reward: str | None, threshold: float | None
) -> list[bool | None]:
    """Judge samples as correct or incorrect by their rewards.

    Args:
        rows (`Sequence[dict]`): Rows of the samples' file.
        names (`Sequence[str]`): The rewards, in their order.
        reward (`str`, *optional*): Name of the reward that decides on correctness; the first by default.
        threshold (`float`, *optional*): Lowest reward of a correct sample; needed for rewards other than 0 and 1.

    Returns:
        `list[bool | None]`: `None` where the reward gave none.

    Raises:
        `InputError`: Rewards other than 0 and 1 without a threshold.
    """
    rule = CorrectnessRule(names, reward, threshold)
    # numpy turns None, a completion that could not be scored, into NaN, which the rule judges as None.
    rewards = [row[KIND]["rewards"][rule.name] for row in rows]
    rewards = np.array(rewards, dtype=np.float64).tolist()
    verdicts = rule.judge(rewards)
    if verdicts is None:  # some reward is neither 0 nor 1, and no threshold says what is correct
        not_a_verdict = next(value for value in rewards if value not in (0.0, 1.0) and not math.isnan(value))
        got = f"none for {rule.name}, which gave {not_a_verdict:g}"
        remedy = "Set the lowest reward of a correct completion: --correct_threshold. The samples are kept."
        raise InputError("correct_threshold", got, "a number", remedy)
    return verdicts


def model_numbers(rows: Sequence[Row], correct: Sequence[bool | None], ks: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of one model.

    Args:
        rows (`Sequence[dict]`): Its samples.
        correct (`Sequence[bool | None]`): Result of [`judged`].
        ks (`Sequence[int]`): Values of `k` in pass@k.

    Returns:
        `dict`: `prompts`, `completions`, `unscorable`, `failed`, `truncated` (counts), `length_mean` (tokens),
        `rewards` (means), and `pass_at`: for each `k` value, interval and number of prompts.
    """
    # Each mean over the completions that have the value: a reward that could not score some is not 0 for them.
    samples = [row[KIND] for row in rows]
    means: dict[str, float | None] = {}
    for name in samples[0]["rewards"]:
        scored = []
        for sample in samples:
            value = sample["rewards"].get(name)
            if value is not None:
                scored.append(value)
        means[name] = sum(scored) / len(scored) if scored else None
    pass_at = {}
    for k in ks:
        values = _by_prompt(rows, correct, k).values()
        pass_at[str(k)] = mean_over_prompts(list(values))
    return {
        "prompts": len({sample["problem"] for sample in samples}),
        "completions": len(samples),
        "unscorable": list(correct).count(None),
        "failed": sum("failures" in sample for sample in samples),
        "truncated": sum(sample["finish_reason"] == "length" for sample in samples),
        "length_mean": sum(sample["tokens"] for sample in samples) / len(samples),
        "rewards": means,
        "pass_at": pass_at,
    }


def results(
    facts: Mapping[str, Any], models: Mapping[str, tuple[Mapping[str, Any], Sequence[Row]]], ks: Sequence[int]
) -> dict[str, Any]:
    """Return the complete result.

    Args:
        facts (`Mapping[str, Any]`): Origin of the numbers, data and sampling; under `correct` the rule for correct
            completions: `reward` and `threshold`.
        models (`Mapping[str, tuple]`): By role, the baseline first: facts about it, and its samples.
        ks (`Sequence[int]`): Values of `k` in pass@k.

    Returns:
        `dict`: The facts, the numbers of each model, and with a baseline the `difference` of pass@k to it: paired,
        prompt by prompt, over prompts that both have a value for.
    """
    # All models were scored by the same rewards, so any row of any model names them.
    _, first_rows = next(iter(models.values()))
    names = list(first_rows[0][KIND]["rewards"])
    correct = {}
    model_entries = []
    for role, (about, rows) in models.items():
        correct[role] = judged(rows, names, *facts["correct"].values())
        numbers = model_numbers(rows, correct[role], ks)
        model_entries.append({"role": role, **about, **numbers})
    # Prompt by prompt, so that the difficulty of a prompt, which both models meet, cancels out.
    difference = {}
    if "baseline" in models:
        for k in ks:
            values = _by_prompt(models["model"][1], correct["model"], k)
            baseline = _by_prompt(models["baseline"][1], correct["baseline"], k)
            differences = []
            for prompt, value in values.items():
                if prompt in baseline:
                    differences.append(value - baseline[prompt])
            difference[str(k)] = mean_over_prompts(differences)
    return {
        "format": FORMAT,
        "made_by": f"trl-drgrpo {__version__}",
        **facts,
        "interval": INTERVAL,
        "models": model_entries,
        "difference": difference or None,
    }


def as_json(content: Mapping[str, Any]) -> str:
    """Write a result as the text of its file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Read the results in a folder, the newest last; other files and other formats are left out."""
    dated_contents = []
    for path in sorted(folder.glob("*.json")):
        # Anything may lie in that folder, so a file that does not look like a result is no error.
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            is_complete = content["format"] == FORMAT and content["models"] and content["dataset"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_complete:
            dated_contents.append((path.stat().st_mtime, content))
    dated_contents.sort(key=itemgetter(0))  # by the time alone: two contents of one time cannot be compared
    return [content for _, content in dated_contents]


def _by_prompt(rows: Sequence[Row], correct: Sequence[bool | None], k: int) -> dict[int, float]:
    """Return pass@k of each prompt with at least `k` scored completions."""
    verdicts_of_prompts: dict[int, list[bool]] = defaultdict(list)  # by number of the prompt
    for row, is_correct in zip(rows, correct, strict=True):
        if is_correct is not None:
            verdicts_of_prompts[row[KIND]["problem"]].append(is_correct)
    values = {}
    for prompt, verdicts in verdicts_of_prompts.items():
        if len(verdicts) >= k:  # of fewer nothing can be said about k
            values[prompt] = pass_at_k(len(verdicts), sum(verdicts), k)
    return values
