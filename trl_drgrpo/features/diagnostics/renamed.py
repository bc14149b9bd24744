"""Metrics that have another name since release 0.2: logged under both names until 0.3, read under either. And causes
of warnings, read under either name.

Dashboards, `metric_for_best_model` and the run logs of 0.1 know the old names.
"""

from collections.abc import Mapping
from typing import TypeVar

from trl_drgrpo.features.diagnostics.statistics import BUCKETS

T = TypeVar("T")

OLD_NAMES = {  # new -> old
    "completions/length_correct_mean": "completions/length_right_mean",
    "completions/length_incorrect_mean": "completions/length_wrong_mean",
    "completions/truncated_correct_frac": "completions/truncated_right_frac",
    "completions/truncated_incorrect_frac": "completions/truncated_wrong_frac",
    "drgrpo/all_correct_frac": "drgrpo/all_right_frac",
    "drgrpo/all_incorrect_frac": "drgrpo/all_wrong_frac",
} | {
    f"difficulty/gradient_weight_{kind}/{bucket}": f"difficulty/mass_{kind}/{bucket}"
    for kind in ("frac", "frac_grpo")
    for bucket in BUCKETS
}
OLD_CAUSES = {"wrong_grow": "incorrect_grow", "all_wrong": "all_incorrect"}  # old -> new
_NEW_NAMES = {old: new for new, old in OLD_NAMES.items()}
_EVALUATION = "eval_"


def with_old_names(metrics: Mapping[str, T]) -> dict[str, T]:
    """
    Metrics under their names, and under those that they had before.

    Example:

    ```python
    >>> with_old_names({"difficulty/gradient_weight_frac/0": 0.5, "reward": 1.0})
    {'difficulty/gradient_weight_frac/0': 0.5, 'reward': 1.0, 'difficulty/mass_frac/0': 0.5}

    ```
    """
    return {**metrics, **{old: metrics[new] for new, old in OLD_NAMES.items() if new in metrics}}


def with_new_names(logs: Mapping[str, T]) -> dict[str, T]:
    """
    A log of any release under the names of today, each metric once. Those of an evaluation begin with `eval_`.

    Example:

    ```python
    >>> with_new_names({"eval_difficulty/mass_frac/0": 0.5})
    {'eval_difficulty/gradient_weight_frac/0': 0.5}

    ```
    """
    renamed = {}
    for name, value in logs.items():
        prefix = _EVALUATION if name.startswith(_EVALUATION) else ""
        new = prefix + _NEW_NAMES.get(name.removeprefix(prefix), name.removeprefix(prefix))
        if new == name or new not in logs:
            renamed[new] = value
    return renamed


def with_new_causes(by_cause: Mapping[str, T]) -> dict[str, T]:
    """
    What is said by cause of a warning, under the causes of today.

    Example:

    ```python
    >>> with_new_causes({"all_wrong": False, "kl": True})
    {'all_incorrect': False, 'kl': True}

    ```
    """
    return {OLD_CAUSES.get(cause, cause): value for cause, value in by_cause.items()}
