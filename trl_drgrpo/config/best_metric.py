"""`metric_for_best_model`: the metric by which checkpoints are compared, chosen, checked and read.

transformers compares by the loss where none is given. In GRPO that says nothing: a policy's loss on its own samples is
the mean of advantages that sum to 0 in a group, about 0 before, during and after training. Here the default is the
held-out reward. transformers also finds out that there is no metric of a name when the first evaluation is over, with
a `KeyError`. What is nearly a metric that every evaluation has is a misspelling, and refused before a model loads; any
other may be one that a reward function logs itself.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOConfig

    from trl_drgrpo.config.config import DrGRPOConfig

logger = logging.getLogger(__name__)

# Metrics of an evaluation, by name. TRL logs None where no completion had a reward.
Metrics = dict[str, float]

PREFIX = "eval_"
_DEFAULT = "eval_reward"
_CHOSEN = "metric_for_best_model is not set: checkpoints are compared by %s, the held-out reward."
# Metrics that every evaluation has, and those that it has of every reward.
_EVERY_RUN = ("reward", "reward_std", "frac_reward_zero_std", "drgrpo/pass_rate", "drgrpo/reward_min")
_EVERY_REWARD = ("mean", "std", "failed_frac")
_MORE_IS_BETTER = ("reward", "drgrpo/pass_rate")
# Endings, as evaluation sets and reward functions stand before them.
_LESS_IS_BETTER = ("kl", "clipped_ratio", "failed_frac", "unscorable_frac", "frac_reward_zero_std", "dead_groups_frac")
_OF_THE_MACHINE = ("runtime", "samples_per_second", "steps_per_second", "num_tokens", "tokens_per_s")
# Schedules that follow the metric.
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
# Similarity to a known metric from which on a name counts as a misspelling of it.
_MISSPELLED = 0.8
_NO_LOSS = (
    "The loss of a policy on its own samples is about 0 whatever it has learned, as the advantages of a group sum to "
    "0. Compare by the reward: {}."
)


def needs_best_metric(config: "GRPOConfig") -> bool:
    """Tell whether a configuration compares checkpoints, or schedules the learning rate, by a metric."""
    if config.load_best_model_at_end or config.save_strategy == "best":
        return True
    return config.lr_scheduler_type in _BY_METRIC


def choose_best_metric(config: "GRPOConfig") -> None:
    """Set the metric, and the direction in which it is better, where they are left out; say so."""
    if config.metric_for_best_model is None and needs_best_metric(config):
        config.metric_for_best_model = _DEFAULT
        logger.warning(_CHOSEN, _DEFAULT)
    # transformers takes a metric for a gain unless its name ends in "loss": a KL would be maximized.
    if config.metric_for_best_model is not None and config.greater_is_better is None:
        config.greater_is_better = not str(config.metric_for_best_model).endswith(_LESS_IS_BETTER)
    # Anything else than a mapping is refused by the rules that come after this.
    if config.lr_scheduler_type in _BY_METRIC and isinstance(config.lr_scheduler_kwargs, dict | None):
        config.lr_scheduler_kwargs = {"mode": _mode(config), **(config.lr_scheduler_kwargs or {})}


def _mode(config: "GRPOConfig") -> str:
    """Return the direction of a schedule that follows the metric; torch's own default is for a loss."""
    return "max" if config.greater_is_better else "min"


def prepare_early_stopping(
    config: "GRPOConfig", callbacks: "Iterable[TrainerCallback | type[TrainerCallback]]"
) -> None:
    """Give transformers' callback the metric that it compares by; refuse it where nothing is evaluated, which it
    would find out when training begins."""
    from transformers import EarlyStoppingCallback

    # transformers takes callbacks as objects or as classes.
    classes = [callback if isinstance(callback, type) else type(callback) for callback in callbacks]
    if not any(issubclass(callback, EarlyStoppingCallback) for callback in classes):
        return
    if config.eval_strategy == "no":
        remedy = "Set eval_strategy='steps' and eval_steps, or leave the callback out."
        raise InputError("callbacks", "EarlyStoppingCallback with eval_strategy 'no'", "evaluations", remedy)
    if config.metric_for_best_model is None:
        config.metric_for_best_model = _DEFAULT
        config.greater_is_better = True
        logger.warning(_CHOSEN, _DEFAULT)


def best_metric_rules(config: "DrGRPOConfig") -> Iterator[InputError]:
    """Values by which the best checkpoint would be any, or the worst."""
    configured = config.metric_for_best_model or ""
    metric = configured.removeprefix(PREFIX)
    remedy = None
    if metric == "loss":
        remedy = _NO_LOSS.format(_DEFAULT)
    elif metric.endswith(_OF_THE_MACHINE):
        remedy = f"It says nothing of the answers. Compare by the reward: {_DEFAULT}."
    if remedy:
        yield InputError("metric_for_best_model", configured, "a metric of the answers", remedy)
    if metric in _MORE_IS_BETTER and config.greater_is_better is False:
        remedy = "The checkpoint with the lowest would be the best: remove it."
        yield InputError("greater_is_better", f"False with {configured}", "True", remedy)
    if config.lr_scheduler_type in _BY_METRIC:
        options: Any = config.lr_scheduler_kwargs or {}  # a mapping by now
        mode = options.get("mode")
        # What is neither is a misspelling, which the schedule's own constructor refuses.
        if mode in ("min", "max") and mode != _mode(config):
            got = f"{mode!r} with greater_is_better={config.greater_is_better}"
            remedy = "The learning rate would fall while the metric gets better: remove it."
            yield InputError("lr_scheduler_kwargs: mode", got, repr(_mode(config)), remedy)


def check_best_metric(
    args: "DrGRPOConfig",
    reward_names: Sequence[str],
    step_reward_names: Sequence[str] = (),
    datasets: Collection[str] = (),
) -> None:
    """Refuse a metric that is misspelled, or that says nothing, before a model loads.

    Args:
        args ([`DrGRPOConfig`]): `metric_for_best_model` may be left out, and goes with or without `eval_`.
        reward_names, step_reward_names (`Sequence[str]`): The reward functions, and the step reward functions.
        datasets (`Collection[str]`, *optional*): Names of the evaluation sets, where there are several. The metrics of
            each are `eval_<name>_<metric>`; `eval_<metric>` is the last one's.

    Raises:
        `InputError`: Names the metric that was probably meant.
    """
    if args.metric_for_best_model is None:
        return
    metric = args.metric_for_best_model.removeprefix(PREFIX)
    # Several evaluation sets have a metric each.
    rewards = [f"{PREFIX}{dataset}_reward" for dataset in datasets]
    for dataset in datasets:
        if metric == f"{dataset}_loss":
            remedy = _NO_LOSS.format(" or ".join(rewards))
            raise InputError("metric_for_best_model", args.metric_for_best_model, "a metric of the answers", remedy)
    if len(rewards) > 1 and metric in _MORE_IS_BETTER:
        got = f"{args.metric_for_best_model}, which is that of the last of {len(rewards)} evaluation sets"
        raise InputError("metric_for_best_model", got, f"one of {', '.join(rewards)}", "Name the set to compare by.")
    # Names that evaluations have: of any run, of each reward, and all of them once more for each set.
    metrics = list(_EVERY_RUN)
    groups = [f"rewards/{name}" for name in reward_names]
    groups += [f"process_rewards/{name}" for name in step_reward_names]
    for group in groups:
        metrics += [f"{group}/{statistic}" for statistic in _EVERY_REWARD]
    of_any_set = tuple(metrics)
    for dataset in datasets:
        metrics += [f"{dataset}_{name}" for name in of_any_set]
    if metric in metrics:
        return
    # A name that is near none of them may be one that a reward function logs itself.
    near = get_close_matches(metric, metrics, n=1, cutoff=_MISSPELLED)
    if f"{metric}/mean" in metrics:  # a reward's name alone
        near = [f"{metric}/mean"]
    if near:
        remedy = f"Did you mean {PREFIX}{near[0]}?"
        raise InputError("metric_for_best_model", args.metric_for_best_model, "a metric of the evaluations", remedy)


def with_best_metric(args: "GRPOConfig", metrics: Metrics) -> Metrics:
    """Return the metrics of an evaluation in training, with a value for `metric_for_best_model`.

    Args:
        args ([`DrGRPOConfig`]): As above.
        metrics (`dict`): Metrics of the evaluation. `None`, where no completion had a reward, becomes the
            worst value there is: no checkpoint is the best by it.

    Raises:
        `InputError`: The evaluation has no such metric; names the nearest ones.
    """
    if args.metric_for_best_model is None:
        return metrics
    name = PREFIX + args.metric_for_best_model.removeprefix(PREFIX)
    if name not in metrics:
        near = get_close_matches(name, metrics, n=3, cutoff=0.0)
        remedy = "Resume from the newest checkpoint with a metric that the evaluations have."
        expected = f"a metric of the evaluations, such as {', '.join(near)}"
        raise InputError("metric_for_best_model", args.metric_for_best_model, expected, remedy)
    if metrics[name] is None:
        worst = -math.inf if args.greater_is_better else math.inf
        return {**metrics, name: worst}
    return metrics


def metrics_by_set(metrics: Metrics, prefix: str) -> Metrics:
    """Return the metrics of one of several evaluation sets; those that TRL logs without its name have it as well.

    Args:
        metrics (`dict[str, Any]`): Metrics that an evaluation returned.
        prefix (`str`): `eval_` and the set's name.

    Example:

    ```python
    >>> metrics_by_set({"eval_hard_loss": 0.0, "eval_reward": 0.5}, "eval_hard")
    {'eval_hard_loss': 0.0, 'eval_reward': 0.5, 'eval_hard_reward': 0.5}

    ```
    """
    with_name = {}
    for key, value in metrics.items():
        if key.startswith(PREFIX) and not key.startswith(f"{prefix}_"):
            with_name[f"{prefix}_{key.removeprefix(PREFIX)}"] = value
    return {**metrics, **with_name}
