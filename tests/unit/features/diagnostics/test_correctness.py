import logging
import math

import pytest

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.correctness import CorrectnessRule

NAN = math.nan


def test_a_threshold_is_inclusive_and_an_unscorable_row_is_neither():
    assert CorrectnessRule(["a"], threshold=0.5).judge([0.5, 0.49, NAN, -1.0]) == [True, False, None, False]


def test_the_named_reward_is_asked():
    rule = CorrectnessRule(["format", "answer"], reward="answer")
    assert (rule.name, rule.index) == ("answer", 1)
    assert CorrectnessRule(["format", "answer"]).index == 0


def test_a_reward_that_is_not_binary_is_never_guessed(caplog):
    rule = CorrectnessRule(["score"])
    with caplog.at_level(logging.INFO):
        assert rule.judge([0.0, 1.0, NAN]) == [False, True, None]
        assert rule.judge([0.0, 0.5]) is None
        assert rule.judge([0.0, 1.0]) is None  # for good: a curve must not change its meaning
    [record] = caplog.records
    assert record.levelno == logging.INFO  # nothing is wrong with such a reward
    assert "0.5" in record.getMessage()
    assert "correct_threshold" in record.getMessage()


def test_an_unknown_name_is_refused_before_a_model_loads(prompts, settings):
    args = DrGRPOConfig(**settings, correct_reward="acuracy")
    with pytest.raises(InputError, match="correct_reward: got 'acuracy'; expected one of length_reward"):
        DrGRPOTrainer("no/such-model", length_reward, args, prompts)


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
