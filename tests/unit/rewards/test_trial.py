"""Forms of completions that reward functions read, texts or messages, and the warning where one gets the other."""

import pytest
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import (
    checked_reward,
    completion_text,
    exact_match_reward,
    from_trl,
    isolate,
    prompt_text,
    weighted_sum,
)
from trl_drgrpo.rewards.trial import try_rewards

OF_TEXT = {"prompt": "What is 6 times 7?", "answer": "42"}
OF_MESSAGES = {"prompt": [{"role": "user", "content": "What is 6 times 7?"}], "answer": "42"}


def by_length(completions, **kwargs):
    return [1 / len(completion) for completion in completions]


def strips(completions, **kwargs):
    return [float(completion.strip() == "") for completion in completions]


async def strips_later(completions, **kwargs):
    return [float(completion.strip() == "") for completion in completions]


def reads_messages(completions, prompts, **kwargs):
    return [float("42" in completion[-1]["content"] and bool(prompts[0][0]["role"])) for completion in completions]


def reads_both(completions, answer, **kwargs):
    return [float(truth in completion_text(one)) for one, truth in zip(completions, answer, strict=True)]


def always_fails(completions, **kwargs):
    raise KeyError("score")


def looks_at_the_rest(completions, completion_ids, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("mine", trainer_state.global_step)
    log_extra("column", [0] * len(completions))
    return [len(ids) for ids in completion_ids]


MISFITS = [
    (strips, OF_MESSAGES),
    (strips_later, OF_MESSAGES),
    (isolate(strips), OF_MESSAGES),
    (weighted_sum([(strips, 1.0), (exact_match_reward, 1.0)]), OF_MESSAGES),
    (reads_messages, OF_TEXT),
    (think_format_reward, OF_TEXT),
    (isolate(think_format_reward), OF_TEXT),
]
FITTING = [
    *[(strips, OF_TEXT), (strips_later, OF_TEXT), (reads_messages, OF_MESSAGES), (think_format_reward, OF_MESSAGES)],
    *[(reads_both, OF_TEXT), (reads_both, OF_MESSAGES), (by_length, OF_TEXT), (looks_at_the_rest, OF_MESSAGES)],
    *[(get_soft_overlong_punishment(100, 20), OF_TEXT), (get_soft_overlong_punishment(100, 20), OF_MESSAGES)],
    *[(from_trl(think_format_reward, completions_as="messages"), OF_TEXT)],
    *[(from_trl(by_length, completions_as="text"), OF_MESSAGES)],
    *[(exact_match_reward, OF_TEXT), (exact_match_reward, OF_MESSAGES), ("a/model", OF_TEXT)],
]


@pytest.mark.parametrize(("reward_func", "row"), MISFITS)
def test_a_function_for_the_other_form_is_one_error(reward_func, row):
    forms = ("texts", "messages") if row is OF_TEXT else ("messages", "texts")
    with pytest.raises(InputError, match=rf"fails on {forms[0]} .* not on {forms[1]}; .*from_trl") as error:
        try_rewards([reward_func], row)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("reward_func", "row"), FITTING)
def test_a_function_that_reads_its_form_is_silent(reward_func, row, caplog):
    try_rewards([reward_func], row)
    assert not caplog.records


@pytest.mark.parametrize("reward_func", [by_length, isolate(by_length), weighted_sum([(by_length, 2.0)])])
def test_one_value_for_all_messages_is_a_warning(reward_func, caplog):
    try_rewards([reward_func], OF_MESSAGES)
    assert "gives different messages one value" in caplog.text
    assert "completion_text(completion)" in caplog.text


def test_a_function_that_fails_in_both_forms_is_a_warning(caplog):
    try_rewards([always_fails], OF_TEXT)
    assert "reward always_fails fails on a sample completion: KeyError" in caplog.text


@pytest.mark.parametrize("result", [["correct"] * 3, 1.0, [1.0], [{"score": 1.0}] * 3])
@pytest.mark.parametrize("row", [OF_TEXT, OF_MESSAGES])
def test_a_result_that_no_run_accepts_is_an_error(result, row):
    def no_rewards(completions, **kwargs):
        return result

    for reward_func in (no_rewards, isolate(no_rewards)):
        with pytest.raises(RewardError, match="reward function 'no_rewards': got"):
            try_rewards([reward_func], row)


def test_an_error_that_a_function_raises_by_itself_is_a_warning(caplog):
    """The server of a judge may not be up yet when a dry run calls it."""

    def judged(completions, **kwargs):
        raise RewardError("judge", "no answer", "a reply", "Start the server.")

    try_rewards([judged], OF_TEXT)
    assert "reward judged fails on a sample completion: RewardError: judge: got no answer" in caplog.text


# During a run.


def messages(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("around", [lambda f: f, isolate, lambda f: weighted_sum([(f, 1.0)])])
def test_a_run_says_once_that_messages_are_not_read(around, caplog):
    reward = checked_reward(around(by_length))
    for _ in range(2):
        assert reward(completions=messages("ab", "abcd"), prompts=messages("?", "?")) == [1.0, 1.0]
    [record] = caplog.records
    assert "gives all 2 completions of a batch 1.0, and their texts different rewards" in record.getMessage()


def test_a_run_with_equal_rewards_is_silent_otherwise(caplog):
    calls = []

    def counted(completions, **kwargs):
        calls.append(completions)
        return [0.0] * len(completions)

    for completions in (messages("ab", "ab"), ["ab", "abcd"]):  # nothing to tell apart, and no messages
        assert checked_reward(counted)(completions=completions) == [0.0, 0.0]
    assert len(calls) == 2
    for reward in (counted, reads_messages, exact_match_reward):
        row = {"prompts": messages("?", "?"), "answer": ["x", "x"], "log_metric": lambda name, value: None}
        assert checked_reward(reward)(completions=messages("ab", "abcd"), **row) == [0.0, 0.0]
    assert not caplog.records


def test_an_exception_names_the_form():
    with pytest.raises(RewardError, match=r"AttributeError.*completion_text\(completion\)"):
        checked_reward(strips)(completions=messages("ab"))
    with pytest.raises(RewardError, match=r"TypeError.*completions_as='messages'"):
        checked_reward(think_format_reward)(completions=["ab"])


def test_prompts_are_read_in_both_forms():
    assert prompt_text("2+2?") == prompt_text([{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}])
