"""Plain filtering by pass rates, on datasets and streams."""

import json

import pytest
from datasets import Dataset

from trl_drgrpo.cli.job import check_difficulty, within_range
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.sample import prompt_key

RATES = {"never": 0.0, "seldom": 0.1, "often": 0.9, "always": 1.0}
DATA = Dataset.from_dict({"prompt": [*RATES, "new"], "answer": list("abcde")})


@pytest.fixture
def rates(tmp_path):
    path = tmp_path / "rates.jsonl"
    lines = [json.dumps({"key": prompt_key(name), "pass_rate": rate}) for name, rate in RATES.items()]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_limits_and_what_is_unknown_stay(rates):
    kept, said = within_range(DATA, [0.1, 0.9], rates)
    assert kept["prompt"] == ["seldom", "often", "new"]
    assert kept["answer"] == ["b", "c", "e"]
    assert said.startswith(f"3 of 5 prompts are kept, 1 of them not in {rates}; this changes the objective")
    assert within_range(DATA, [0.0, 1.0], rates)[0]["prompt"] == DATA["prompt"]


def test_a_stream_is_filtered_as_it_is_read(rates):
    kept, said = within_range(DATA.to_iterable_dataset(), [0.1, 0.9], rates)
    assert [row["prompt"] for row in kept] == ["seldom", "often", "new"]
    assert "a stream" in said


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_left(stream, rates):
    data = DATA.select(range(4))
    with pytest.raises(InputError, match=r"^difficulty_range: got \[0.4, 0.6\], which contains none of"):
        within_range(data.to_iterable_dataset() if stream else data, [0.4, 0.6], rates)


def test_a_file_of_other_prompts(rates):
    with pytest.raises(InputError, match="^prior_pass_rates: got .*which has none of the prompts"):
        within_range(DATA.select([4]), [0.1, 0.9], rates)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([0.9, 0.1], "0.9 0.1; expected two pass rates from 0 to 1, the lower one first"),
        ([10.0, 90.0], "10.0 90.0; expected two pass rates"),
        ([0.5], "0.5; expected two"),
        ([], "none; expected two"),
    ],
)
def test_limits_that_are_none(limits, message, rates):
    with pytest.raises(InputError, match=f"^difficulty_range: got {message}"):
        check_difficulty({"difficulty_range": limits, "prior_pass_rates": rates})


def test_limits_without_a_file(rates):
    with pytest.raises(InputError, match=r"^difficulty_range: got \[0.1, 0.9\] without prior_pass_rates"):
        check_difficulty({"difficulty_range": [0.1, 0.9]})
    with pytest.raises(InputError, match="^prior_pass_rates: got gone.jsonl, which is not a file"):
        check_difficulty({"prior_pass_rates": "gone.jsonl"})
    check_difficulty({"difficulty_range": [0.1, 0.9], "prior_pass_rates": rates})
    check_difficulty({})
