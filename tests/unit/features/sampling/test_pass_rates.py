"""Estimates of pass rates, and files of them."""

import json

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.sampling.pass_rates import PassRates, read_pass_rates, write_pass_rates
from trl_drgrpo.rewards.texts import prompt_key


def test_an_estimate_is_shrunk_to_the_mean_and_forgets():
    rates = PassRates(memory=0.5, shrinkage=2.0)
    assert rates.estimate("a") == 0.5  # nothing is known
    rates.update("a", correct=0, scored=4)
    mean = 0.999**4 * 1 / (0.999**4 * 2 + 4)
    assert rates.mean == pytest.approx(mean)
    assert rates.estimate("a") == pytest.approx(2 * mean / (4 + 2))
    rates.update("a", correct=4, scored=4)  # 4 of 4 and half of 0 of 4
    assert rates.counts["a"] == (4.0, 6.0)
    assert rates.estimate("never seen") == rates.mean


def test_a_prior_is_a_visit_of_so_many_completions():
    rates = PassRates()
    rates.take_prior({"a": (0.25, 8.0)})
    assert rates.counts == {"a": (2.0, 8.0)}
    assert rates.mean == pytest.approx((1 + 2) / (2 + 8))
    again = PassRates()
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert (again.counts, again.mean) == (rates.counts, rates.mean)


def test_written_pass_rates_are_read_back(tmp_path):
    path = tmp_path / "rates.jsonl"
    messages = [{"role": "user", "content": "2+2?\n" * 100}]
    prompts = ["1+1?", messages, "1+1?", "unscorable", "\ud800 lone"]
    assert write_pass_rates(path, prompts, [True, False, False, None, True]) == (3, 1)
    assert read_pass_rates(path) == {
        prompt_key("1+1?"): (0.5, 2.0),
        prompt_key(messages): (0.0, 1.0),
        prompt_key("\ud800 lone"): (1.0, 1.0),
    }
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["prompt"] == "1+1?"
    assert len(json.loads(lines[1])["prompt"]) == 120
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "line 1: '{}' .KeyError"),
        ("\n[1]\n", "line 1: .*TypeError"),
        ("not json\n", "line 1: .not json."),
        ('{"key": "a", "pass_rate": NaN}', "out of range"),
        ('{"key": "a", "pass_rate": 1, "completions": 0}', "out of range"),
        ("\n", "which is empty"),
    ],
)
def test_a_file_that_is_none(text, message, tmp_path):
    (tmp_path / "rates.jsonl").write_text(text)
    with pytest.raises(InputError, match=f"^prior_pass_rates: got .*{message}"):
        read_pass_rates(tmp_path / "rates.jsonl")


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="^prior_pass_rates: got .*FileNotFoundError"):
        read_pass_rates(tmp_path / "gone.jsonl")
