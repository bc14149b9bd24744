import asyncio
import logging
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.step_scorer import StepScorer, validate_step_rewards
from trl_drgrpo.process_rewards.steps import Steps, step_segmenter

TWO = [Steps(("a\n\n", "b"), (2, 3)), Steps(("c",), (0,))]


def score(funcs, tokenizer, texts=("a\n\nb", "c"), weights=None, on_error="raise", metrics=None, **call):
    scorer = StepScorer(funcs, step_segmenter("\n\n"), weights, on_error)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    log = (metrics if metrics is not None else []).append
    call = {"prompts": ["p"] * len(texts), "completions": list(texts), **call}
    return scorer.score(ids, [None] * len(texts), tokenizer, lambda name, value: log((name, value)), **call)


def lengths(steps, **kwargs):
    return [[float(len(step)) for step in each] for each in steps]


def test_functions_get_steps_ends_columns_and_the_rest(tokenizer):
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return lengths(**kwargs)

    scores = score([spy], tokenizer, answer=["1", "2"], trainer_state="state", log_extra=None)
    assert seen["steps"] == [("a\n\n", "b"), ("c",)]
    assert seen["step_ends"] == [(2, 3), (0,)]
    assert seen["completion_ids"] == [tokenizer("a\n\nb")["input_ids"], tokenizer("c")["input_ids"]]
    assert (seen["answer"], seen["prompts"], seen["trainer_state"]) == (["1", "2"], ["p", "p"], "state")
    assert {"completions", "log_metric", "log_extra"} <= set(seen)
    assert scores.rewards == [[3.0, 1.0], [1.0]]


def test_several_functions_are_summed_with_weights_over_those_that_applied(tokenizer):
    def half(steps, **kwargs):
        return [[None, 1.0], [None]]

    assert score([lengths, half], tokenizer, weights=[1.0, 10.0]).rewards == [[3.0, 11.0], [1.0]]
    assert score([half], tokenizer).rewards == [[None, 1.0], [None]]


@pytest.mark.parametrize("loop_is_running", [False, True])
def test_asynchronous_functions_also_inside_a_running_loop(tokenizer, loop_is_running):
    async def later(steps, **kwargs):
        await asyncio.sleep(0)
        return lengths(steps)

    async def notebook():
        return score([later, lengths], tokenizer)

    scores = asyncio.run(notebook()) if loop_is_running else score([later, lengths], tokenizer)
    assert scores.rewards == [[6.0, 2.0], [2.0]]


@pytest.mark.parametrize(
    "row",
    [
        *[(1, None), torch.tensor([1.0, float("nan")]), [True, float("nan")]],
        *[torch.tensor([[1.0], [float("nan")]]), np.array([[1.0], [np.nan]]), [Decimal(1), Decimal("nan")]],
    ],
)
def test_every_container_of_numbers_is_accepted(row):
    assert validate_step_rewards([row, [0]], TWO, "f", "s") == [[1.0, None], [0.0]]


def test_a_last_axis_of_one_is_left_out():
    two_steps_each = [TWO[0], TWO[0]]
    assert validate_step_rewards(torch.ones(2, 2, 1), two_steps_each, "f", "s") == [[1.0, 1.0]] * 2
    assert validate_step_rewards(torch.ones(2, 1), [TWO[1], TWO[1]], "f", "s") == [[1.0]] * 2


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([[1.0, 1.0]], "got 1 rows; expected 2 lists"),
        ([[1.0], [1.0]], r"got 1 rewards for completion 0; expected 2 rewards, one per step of sep"),
        ([[1.0, 1.0], 1.0], "got float for completion 1"),
        ([torch.zeros(2, 2), [1.0]], "got list .* for step 0 of completion 0"),
        (torch.zeros(2, 1), "got 1 rewards for completion 0"),
        ([[1.0, float("inf")], [1.0]], "got inf for step 1 of completion 0"),
    ],
)
def test_nonsense_names_row_counts_and_segmenter(output, message):
    with pytest.raises(RewardError, match=f"^step reward function 'f': {message}"):
        validate_step_rewards(output, TWO, "f", "sep")


def test_a_function_that_raises_is_named_or_counted(tokenizer, caplog):
    def broken(steps, **kwargs):
        raise KeyError("score")

    with pytest.raises(RewardError, match="step reward function 'broken': got KeyError: 'score'"):
        score([broken], tokenizer)
    metrics = []
    scores = score([broken, lengths], tokenizer, on_error="unscorable", metrics=metrics)
    assert scores.rewards == [[3.0, 1.0], [1.0]]
    assert metrics == [("process_rewards/broken/failed_frac", 1.0), ("process_rewards/lengths/failed_frac", 0.0)]
    assert "KeyError" in caplog.text
    assert caplog.text.count("failing costs the policy nothing") == 1


def test_a_separator_that_never_occurs_is_said_once(tokenizer, caplog):
    scorer = StepScorer([lengths], step_segmenter("\n\n"))
    ids = [tokenizer("abc")["input_ids"]]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            scorer.score(ids, [None], tokenizer, lambda *_: None, prompts=["p"], completions=["abc"])
    assert caplog.text.count("only one step in 100% of the completions") == 1


def test_a_function_that_never_scores_is_said_once(tokenizer, caplog):
    def silent(steps, **kwargs):
        return [[None] * len(row) for row in steps]

    scorer = StepScorer([silent, lengths], step_segmenter("\n\n"))
    ids = [tokenizer("a\n\nb")["input_ids"]]
    batch = SimpleNamespace(
        inputs=[{"prompt": "p"}], prompts=["p"], completions=["ab"], completion_ids=ids, environments=None
    )
    for count in range(12):
        scorer.score_batch(batch, None, tokenizer, None)
        said = "'silent' gave None for every step of 5 batches in a row"
        assert caplog.text.count(said) == int(count >= 4)
    assert "'lengths' gave None" not in caplog.text


def test_bad_set_up_is_named():
    with pytest.raises(InputError, match="^step_reward_weights: got 2 weights; expected 1"):
        StepScorer([lengths], step_segmenter("\n\n"), [1.0, 2.0])
    with pytest.raises(InputError, match="^step_reward_funcs: got float at position 0"):
        StepScorer([1.0], step_segmenter("\n\n"))
