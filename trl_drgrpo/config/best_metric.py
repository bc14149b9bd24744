"""`metric_for_best_model`: the metric of an evaluation that says which checkpoint is the best.

transformers finds out that there is no such metric when the first evaluation is over, with a `KeyError`. A metric that
is nearly one of those that every evaluation has is a misspelling, and refused before a model loads; any other may be
one that a reward function logs itself.
"""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from trl_drgrpo.common.errors import InputError

_PREFIX = "eval_"
_EVERY_RUN = ("loss", "reward", "reward_std", "frac_reward_zero_std", "drgrpo/pass_rate", "drgrpo/reward_min")
_EVERY_REWARD = ("mean", "std", "failed_frac")
_MISSPELLED = 0.8  # similarity from which on it is one


def check_best_metric(
    args: Any, reward_names: Sequence[str], step_reward_names: Sequence[str] = (), datasets: Iterable[str] = ()
) -> None:
    """Refuse a misspelled metric before a model loads.

    Args:
        args ([`DrGRPOConfig`]): `metric_for_best_model` may be left out, and goes with or without `eval_`.
        reward_names, step_reward_names (`Sequence[str]`): The reward functions, and the step reward functions.
        datasets (`Iterable[str]`, *optional*): Names of the evaluation sets, where there are several.

    Raises:
        `InputError`: Names the metric that was probably meant.
    """
    if args.metric_for_best_model is None:
        return
    named = [*(f"rewards/{name}" for name in reward_names), *(f"process_rewards/{name}" for name in step_reward_names)]
    known = [*_EVERY_RUN, *(f"{name}/{kind}" for name in named for kind in _EVERY_REWARD)]
    known += [f"{dataset}_loss" for dataset in datasets]
    wanted = args.metric_for_best_model.removeprefix(_PREFIX)
    unfinished = [f"{wanted}/mean"] if f"{wanted}/mean" in known else []
    near = unfinished or get_close_matches(wanted, known, n=1, cutoff=_MISSPELLED)
    if near and wanted not in known:
        remedy = f"Did you mean {_PREFIX}{near[0]}?"
        raise InputError("metric_for_best_model", args.metric_for_best_model, "a metric of the evaluations", remedy)


def with_best_metric(args: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in training, with a value for `metric_for_best_model`.

    Args:
        args ([`DrGRPOConfig`]): As above.
        metrics (`dict[str, Any]`): Metrics of the evaluation. `None`, where no completion had a reward, becomes the
            worst value there is: no checkpoint is the best by it.

    Raises:
        `InputError`: The evaluation has no such metric; names the nearest ones.
    """
    if args.metric_for_best_model is None:
        return metrics
    name = _PREFIX + args.metric_for_best_model.removeprefix(_PREFIX)
    if name not in metrics:
        near = get_close_matches(name, metrics, n=3, cutoff=0.0)
        remedy = "Resume from the newest checkpoint with a metric that the evaluations have."
        expected = f"a metric of the evaluations, such as {', '.join(near)}"
        raise InputError("metric_for_best_model", args.metric_for_best_model, expected, remedy)
    if metrics[name] is None:
        return {**metrics, name: -math.inf if args.greater_is_better else math.inf}
    return metrics
