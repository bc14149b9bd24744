"""Order, identity and end of the prompts beyond the dataloader's."""

from collections import Counter
from itertools import islice

import pytest
from datasets import Dataset

from trl_drgrpo.features.sampling.prompt_stream import Draw, PromptStream, cap_warning, sampling_metrics
from trl_drgrpo.objective.advantages import Selection

DATA = Dataset.from_dict({"prompt": list("abcdef"), "answer": [1, 2, 3, 4, 5, 6]})


def prompts(stream, number, first="ab"):
    return "".join(example["prompt"] for example in islice(stream.batch(number, [{"prompt": p} for p in first]), 6))


def test_a_batch_begins_with_those_of_a_pass_and_has_every_row_once():
    stream = PromptStream(DATA, 0, True)
    seen = [prompts(stream, number) for number in range(9)]
    assert all(sorted(each) == list("abcdef") for each in seen)
    passes = ["".join(each[:2] for each in seen[start : start + 3]) for start in (0, 3, 6)]
    assert all(sorted(each) == list("abcdef") for each in passes)
    assert len(set(passes)) == 3
    assert len({each[2:] for each in seen}) > 6  # not the rest of a pass
    assert seen == [prompts(PromptStream(DATA, 0, True), number) for number in range(9)]
    assert seen != [prompts(PromptStream(DATA, 1, True), number) for number in range(9)]


def test_without_shuffling_rows_come_in_order():
    assert [prompts(PromptStream(DATA, 0, False), n) for n in range(4)] == ["abcdef", "cdefab", "efabcd", "abcdef"]


def test_a_pass_leaves_out_what_is_less_than_a_batch():
    assert [prompts(PromptStream(DATA, 0, False), n, "abcd")[:4] for n in range(2)] == ["abcd", "abcd"]


def test_the_rows_of_a_batch_may_be_in_any_order():
    """2,000 batches at each place of a pass: every order of three rows as often as the others."""
    data = Dataset.from_dict({"prompt": ["a", "a", "b"], "answer": [1, 2, 3]})  # two rows with one prompt
    stream = PromptStream(data, 0, True)
    for place in range(3):
        orders = Counter(tuple(r["answer"] for r in stream.batch(3 * n + place, [{}])) for n in range(2000))
        assert len(orders) == 6
        assert max(abs(count - 2000 / 6) for count in orders.values()) < 4 * (2000 / 6) ** 0.5


@pytest.mark.parametrize("position", [0, 4, 6, 9])
def test_a_position_of_a_stream_is_gone_on_from(position):
    def rest(stream, count):
        return "".join(example["prompt"] for example in islice(stream.batch(0, [{"prompt": "-"}]), count + 1))

    whole = rest(PromptStream(DATA.to_iterable_dataset(), 0, True), 15)
    assert whole[0] == "-"
    assert sorted(whole[1:7]) == sorted(whole[7:13]) == list("abcdef")
    assert whole[1:7] != whole[7:13]
    stream = PromptStream(DATA.to_iterable_dataset(), 0, True)
    rest(stream, 1)
    stream.position = position
    assert rest(stream, 15 - position)[1:] == whole[1 + position :]
    assert stream.position == 15


def test_an_empty_stream_ends():
    assert prompts(PromptStream(DATA.to_iterable_dataset().filter(lambda row: False), 0, True), 0) == "ab"


def test_rows_of_an_environment_differ_by_any_column():
    data = Dataset.from_dict({"prompt": ["play"] * 3, "secret": ["x", "y", "x"]})
    for whole_rows, different in ((False, 1), (True, 2)):
        assert len({PromptStream(data, 0, True, whole_rows).key(row) for row in data}) == different
    without = data.remove_columns("prompt")
    assert len({PromptStream(without, 0, True, whole_rows=True).key(row) for row in without}) == 2


def test_known_prompts_are_counted(monkeypatch):
    monkeypatch.setattr(PromptStream, "key", lambda self, example: example["prompt"])
    stream = PromptStream(DATA, 0, True)
    assert (stream.count_known({"b"}), stream.count_known({"z"})) == (1, 0)
    assert PromptStream(DATA.to_iterable_dataset(), 0, True).count_known({"a"}) is None


def draw(place=None, live=False, reward=float("nan"), **fields):
    return Draw({}, "", place=place, live=live, reward=reward, **fields)


def test_the_metrics():
    drawn = [
        draw((0, 0), live=True, reward=0.5, estimate=0.5, probability=1.0),
        draw(estimate=0.1, probability=0.5),
        draw((0, 1), reward=0.0, estimate=0.2, probability=0.75),
        draw((0, 2), live=True, reward=0.5, estimate=0.6, probability=0.5),
        draw((1, 0), live=True, reward=0.5, estimate=0.4, probability=1.0),
    ]
    found = sampling_metrics(drawn, Selection([0, 3], [0.5, 1.0], 4, False), rounds=2, tokens=90)
    assert found == {
        "sampling/draws": 5,
        "sampling/groups_generated": 4,
        "sampling/groups_live": 3,
        "sampling/groups_trained": 2,
        "sampling/groups_dropped": 1,
        "sampling/rounds": 2,
        "sampling/capped_frac": 0.0,
        "sampling/tokens_per_live_group": 30.0,
        "sampling/weight_mean": 0.75,
        "sampling/weight_max": 1.0,
        "sampling/effective_groups": pytest.approx(1.5**2 / 1.25),
        "sampling/keep_probability": 0.75,
        "sampling/keep_probability/0-25": 0.625,
        "sampling/keep_probability/25-50": 1.0,
        "sampling/keep_probability/50-75": 0.5,
    }


def test_a_batch_without_a_signal_has_no_weights():
    found = sampling_metrics([draw((0, 0), reward=1.0)], Selection([], [], 1, True), rounds=1, tokens=5, dapo=True)
    assert found["sampling/capped_frac"] == 1.0
    assert not {"sampling/weight_mean", "sampling/tokens_per_live_group", "sampling/dapo_factor"} & set(found)
    assert "sampling/keep_probability" not in found


def test_the_warning_says_which_side_the_rewards_are_on():
    drawn = [draw((0, 0), live=True, reward=0.5), draw((0, 1), reward=0.0), draw((0, 2), reward=1.0), draw()]
    said = cap_warning(drawn, num_groups=2, rounds=2)
    assert "1 of 2 groups were live after the 4 prompts that max_sampling_rounds=2 allows" in said
    assert "rewards from 0 to 1, 50% of them at the highest." in said
    assert "Groups without" not in cap_warning([draw()], 2, 2)
