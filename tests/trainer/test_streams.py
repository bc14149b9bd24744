"""Streams: too short for the run, with rows that nobody has looked at before, resumed, and in evaluations."""

import pytest
from datasets import Dataset, IterableDataset
from runs import assert_same_weights, weights

from trl_drgrpo.common.errors import InputError

PROMPTS = [{"prompt": f"{i}+{i}="} for i in range(8)]


def stream_of(rows):
    """A stream that can be read again."""
    return IterableDataset.from_generator(lambda: iter(rows))


def one_shot(rows):
    """A stream that can be read once, so that no check reads it."""
    source = iter(rows)
    return IterableDataset.from_generator(lambda: source)


def ends(caplog):
    return [record.getMessage() for record in caplog.records if "the stream ended" in record.getMessage()]


def test_a_stream_that_ends_early_is_read_again_and_said_once(train, caplog):
    trainer = train(data=stream_of(PROMPTS[:4]), max_steps=6)  # two prompts per step
    assert trainer.state.global_step == 6
    (said,) = ends(caplog)
    assert "ended at optimizer step 2 of 6: it is read again" in said


def test_a_stream_that_cannot_be_read_again_ends_the_training_and_is_said(train, caplog):
    trainer = train(data=one_shot(PROMPTS[:4]), max_steps=6)
    assert trainer.state.global_step == 2
    assert "at optimizer step 2 of 6: it gave no further 2 prompts" in ends(caplog)[-1]


def test_a_stream_that_suffices_is_no_word(train, caplog):
    train(data=stream_of(PROMPTS), max_steps=3)
    assert not ends(caplog)


@pytest.mark.parametrize("rows", [PROMPTS[:1], []])
def test_a_stream_without_one_generation_batch_is_refused(rows, build, train, caplog):
    with pytest.raises(InputError, match=f"train_dataset: got {len(rows)} prompts; expected at least 2"):
        build(data=stream_of(rows), max_steps=1)
    trainer = train(data=one_shot(rows), max_steps=1)  # not read before
    assert trainer.state.global_step == 0
    assert "at optimizer step 0 of 1: it gave no further 2 prompts" in ends(caplog)[-1]


def test_a_generator_is_checked_before_the_model_loads(build):
    rows = [*PROMPTS[:3], {"prompt": None}]
    with pytest.raises(InputError, match=r"train_dataset, column prompt: got null as the prompt in row 3"):
        build(data=stream_of(rows), max_steps=1)
    with pytest.raises(InputError, match=r"eval_dataset, column prompt: got null as the prompt in row 3"):
        build(eval_dataset=stream_of(rows), eval_strategy="steps", eval_steps=1, max_steps=1)


@pytest.mark.parametrize("sampling", [{}, {"dynamic_sampling": True, "max_sampling_rounds": 2}])
@pytest.mark.parametrize(("prompt", "problem"), [("", "an empty text"), (None, "null"), (7, "int 7")])
def test_a_later_row_that_does_not_fit_is_one_clear_error(prompt, problem, sampling, train):
    with pytest.raises(InputError, match=f"train_dataset: got {problem} as the prompt in row"):
        train(data=one_shot([*PROMPTS[:3], {"prompt": prompt}]), max_steps=2, **sampling)


def test_a_shuffled_stream_goes_on_bit_by_bit(train, output, tmp_path):
    fields = {"data": stream_of(PROMPTS).shuffle(seed=3), "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = train(**fields)
    resumed = train(**fields, resume=output / "checkpoint-3")
    assert_same_weights(weights(resumed), weights(whole))


def test_streams_and_datasets_train_the_same_prompts(train):
    fields = {"max_steps": 2, "shuffle_dataset": False}
    streamed = train(data=stream_of(PROMPTS), **fields)
    stored = train(data=Dataset.from_list(PROMPTS), **fields)
    assert_same_weights(weights(streamed), weights(stored))
