"""Rung d: the task, its two rewards, and a warm-started model that judges itself."""

import dataclasses
import random
import statistics

import numpy as np
import pytest

from trl_drgrpo.labs.study import verifying
from trl_drgrpo.labs.study.rungs import VERIFY
from trl_drgrpo.labs.study.trajectories import RunSettings, run_arm

NUMBERS = "0123456789x"


def by_hand(digits, guess):
    """The check in other words: residues by repeated multiplication."""
    number = NUMBERS.index(guess)
    written = ""
    for digit in digits:
        total = (number + int(digit)) % 11
        number = total * total * total % 11
        written += NUMBERS[number]
    return written + ("y" if number in (0, 1, 2, 3) else "n")


@pytest.mark.parametrize("digits", ["0000", "4819", "9999", "1030"])
def test_the_check_permutes_the_guesses(digits):
    checks = [verifying.check(digits, guess) for guess in NUMBERS]
    assert checks == [by_hand(digits, guess) for guess in NUMBERS]
    assert sorted(each[-2] for each in checks) == sorted(NUMBERS)  # so no guess is better than another
    assert sum(each[-1] == "y" for each in checks) == verifying.PASSING


def test_a_true_verdict_is_paid_whatever_the_outcome():
    passing, failing = "7" + by_hand("4819", "7"), "0" + by_hand("4819", "0")
    assert (passing[-1], failing[-1]) == ("y", "n")
    lies = passing[:-1] + "n", failing[:-1] + "y"
    texts, digits = [passing, failing, *lies], ["4819"] * 4
    assert verifying.passes(texts, digits) == [1.0, 0.0, 1.0, 0.0]  # saying so does not make it so
    assert verifying.true_verdict(texts, digits) == [1.0, 1.0, 0.0, 0.0]


def test_malformed_completions_earn_nothing():
    texts = ["", "7", "y", "70620", "yyyyyy", "n0620n"]
    digits = ["4819"] * len(texts)
    assert verifying.passes(texts, digits) == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]  # a guess alone can pass
    assert verifying.true_verdict(texts, digits) == [0.0] * len(texts)


@pytest.mark.parametrize("reward", VERIFY.rewards)
def test_no_reward_depends_on_what_follows_the_first_verdict(reward):
    for guess in NUMBERS:
        first = guess + verifying.check("4819", guess)
        lies = first[1:-1] + ("n" if first[-1] == "y" else "y")
        longer = [first, first + first[1:], first + first[1:] * 8, first + lies * 3, first + "9"]
        assert len(set(reward(longer, ["4819"] * len(longer)))) == 1


def test_demonstrations_stop_alike_whatever_the_verdict():
    rng, counts = random.Random(0), {"y": [], "n": []}
    for _ in range(4000):
        text = verifying.demonstrate("4819", rng)
        assert len(text) <= verifying.MAX_COMPLETION
        counts[text[5]].append(len(text))
    gap = statistics.fmean(counts["y"]) - statistics.fmean(counts["n"])
    assert abs(gap) < 4 * statistics.stdev(counts["y"] + counts["n"]) / 1000**0.5


def test_decisions_are_those_behind_each_check():
    ends = np.array([True, True, False])
    lengths = np.array([6 + 1, 6 + 3 * 5 + 1, verifying.MAX_COMPLETION])  # at once, after three more, cut
    assert verifying.decisions(lengths, ends).tolist() == [1, 4, 8]


@pytest.mark.slow
def test_arms_start_alike_and_record_the_verdicts(tmp_path):
    model = verifying.warm_start(tmp_path / "model", steps=12, batch_size=16)  # plays badly, but plays
    sizes = RunSettings(steps=2, prompts=4, num_generations=4, learning_rate=3e-2)
    rung = dataclasses.replace(VERIFY, settings=sizes)
    runs = [run_arm(rung, arm, 0, model, tmp_path / arm) for arm in ("dapo", "dr_grpo")]
    for run in runs:
        assert len(run.verdicts) == len(run.pass_rate) == 2
    first = [(run.tokens_by_step[0], run.length_wrong[0], run.verdicts[0]) for run in runs]
    assert first[0] == first[1]


@pytest.mark.slow
def test_the_warm_start_judges_itself_without_mistakes(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Player:
        pass

    folder, player = verifying.warm_start(tmp_path), Player()
    player.model = AutoModelForCausalLM.from_pretrained(folder)
    player.processing_class = tokenizer = AutoTokenizer.from_pretrained(folder)
    data = verifying.make_prompts(4096, seed=10**6)
    ids = verifying.sampling_rollout(0)(data["prompt"], player)["completion_ids"]
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    assert statistics.fmean(verifying.true_verdict(texts, data["digits"])) > 0.999
    passed = verifying.passes(texts, data["digits"])
    assert statistics.fmean(passed) == pytest.approx(4 / 11, abs=0.03)
