import math
from types import SimpleNamespace

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.config import check_best_metric, with_best_metric


def args(metric, greater_is_better=True):
    return SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater_is_better)


@pytest.mark.parametrize(
    "metric",
    [
        None,
        "loss",
        "eval_reward",
        "reward",
        "eval_rewards/accuracy_reward/mean",
        "eval_process_rewards/accuracy_reward/mean",
        "eval_hard_loss",
        "eval_drgrpo/pass_rate",
        "eval_completions/mean_length",
        "eval_accuracy",  # a reward function may log it
    ],
)
def test_what_may_be_there_is_taken(metric):
    check_best_metric(args(metric), ["accuracy_reward"], ["accuracy_reward"], ["easy", "hard"])


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("eval_rewards", "eval_reward"),
        ("rewrad", "eval_reward"),
        ("eval_rewards/acuracy_reward/mean", "eval_rewards/accuracy_reward/mean"),
        ("eval_rewards/accuracy_reward", "eval_rewards/accuracy_reward/mean"),
        ("eval_drgrpo/passrate", "eval_drgrpo/pass_rate"),
        ("eval_hrad_loss", "eval_hard_loss"),
    ],
)
def test_a_misspelling_is_refused(metric, meant):
    with pytest.raises(InputError) as error:
        check_best_metric(args(metric), ["accuracy_reward"], datasets=["easy", "hard"])
    assert (error.value.got, error.value.remedy) == (metric, f"Did you mean {meant}?")


def test_what_an_evaluation_has_is_left_as_it_is():
    metrics = {"eval_reward": 0.5}
    assert with_best_metric(args(None), metrics) is metrics
    assert with_best_metric(args("reward"), metrics) is metrics


@pytest.mark.parametrize(("greater", "worst"), [(True, -math.inf), (False, math.inf)])
def test_no_value_is_the_worst(greater, worst):
    assert with_best_metric(args("eval_reward", greater), {"eval_reward": None}) == {"eval_reward": worst}


def test_what_it_has_not_is_refused_with_what_it_has():
    with pytest.raises(InputError, match="^metric_for_best_model: got acc; .* such as eval_accuracy, "):
        with_best_metric(args("acc"), {"eval_loss": 0.0, "eval_accuracy": 0.5})
