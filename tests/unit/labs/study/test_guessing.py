"""Rung b: the game, the warm-started model, and arms that differ in nothing but the objective."""

import dataclasses
import random
import statistics

import pytest

from trl_drgrpo.labs.study.guessing import (
    MAX_COMMENT,
    RIGHT_PROBABILITY,
    START_LENGTH,
    _demonstrated_comment,
    guessing_rollout,
    make_prompts,
    verdict_reward,
    warm_start,
)
from trl_drgrpo.labs.study.rungs import GUESSING
from trl_drgrpo.labs.study.trajectories import ARMS, RunSettings, run_arm

SMALL = RunSettings(steps=3, prompts=4, num_generations=4, learning_rate=3e-2)
RUNG = dataclasses.replace(GUESSING, settings=SMALL)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_start(tmp_path_factory.mktemp("guessing"), steps=12, batch_size=16)  # plays badly, but plays


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    return {arm: run_arm(RUNG, arm, 0, model_dir, tmp_path_factory.mktemp(arm)) for arm in ARMS}


class Player:
    """What a rollout needs of a trainer."""

    def __init__(self, model_dir):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model_dir)
        self.processing_class = AutoTokenizer.from_pretrained(model_dir)


def test_a_roll_out_is_prompt_guess_verdict_comment(model_dir):
    player = Player(model_dir)
    prompts = make_prompts(40, seed=0)["prompt"]
    rolled = guessing_rollout(3)(prompts, player)
    decode = player.processing_class.decode
    for prompt, prompt_ids, ids, mask, right in zip(
        prompts,
        rolled["prompt_ids"],
        rolled["completion_ids"],
        rolled["env_mask"],
        rolled["verdict"],
        strict=True,
    ):
        assert decode(prompt_ids) == prompt
        environment = [token for token, kept in zip(ids, mask, strict=True) if not kept]
        assert decode(environment) == ("\nok\n" if right else "\nno\n")
        assert mask[:5] == [1, 0, 0, 0, 0]
        assert len(ids) == len(mask) <= 5 + MAX_COMMENT
        assert player.processing_class.eos_token_id not in ids[5:-1]
    assert verdict_reward(rolled["completion_ids"], rolled["verdict"]) == [float(v) for v in rolled["verdict"]]


def test_verdicts_are_chance_and_follow_the_seed(model_dir):
    player, prompts = Player(model_dir), ["10 20 30="] * 8
    verdicts = [guessing_rollout(seed)(prompts, player)["verdict"] for seed in (1, 1, 2)]
    assert verdicts[0] == verdicts[1] != verdicts[2]
    rng = random.Random(5)
    drawn = [rng.random() < RIGHT_PROBABILITY for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(0.4, abs=0.03)


def test_demonstrated_comments_are_equally_long_in_both_cases(model_dir):
    tokenizer, rng = Player(model_dir).processing_class, random.Random(0)
    for right, letter in ((True, "k"), (False, "x")):
        comments = [_demonstrated_comment(tokenizer, right, rng) for _ in range(4000)]
        assert statistics.fmean(map(len, comments)) == pytest.approx(START_LENGTH, abs=0.4)
        written = {token for comment in comments for token in comment} - {tokenizer.eos_token_id}
        assert tokenizer.decode(list(written)) == letter


@pytest.mark.slow
def test_arms_share_everything_but_the_objective(trained):
    first = [(t.pass_rate[0], t.length_right[0], t.length_wrong[0]) for t in trained.values()]
    assert len(set(first)) == 1  # the same model, prompts, verdicts and samples before the first update
    assert all(len(t.length_wrong) == len(t.entropy) == 3 for t in trained.values())
    assert len({t.pass_rate[2] for t in trained.values()}) == 1  # the verdicts go on alike
    assert len({t.length_wrong[2] for t in trained.values()} | {t.length_right[2] for t in trained.values()}) > 2


def test_tokens_are_those_that_the_model_wrote(trained):
    trajectory = trained["grpo"]
    rows = SMALL.prompts * SMALL.num_generations
    by_hand = 0.0
    for right, wrong, rate in zip(trajectory.length_right, trajectory.length_wrong, trajectory.pass_rate, strict=True):
        parts = [length * share for length, share in ((right, rate), (wrong, 1 - rate)) if share]
        by_hand += rows * (1 + sum(parts))
    assert trajectory.tokens == sum(trajectory.tokens_by_step) == pytest.approx(by_hand)


def test_the_objectives_are_what_they_are_called():
    arguments = {arm: fields for arm, (_, _, fields) in ARMS.items()}
    assert arguments["grpo"] == {"loss_type": "grpo", "scale_rewards": "group"}
    assert "scale_rewards" not in arguments["dr_grpo_with_std"]  # TRL's default stays: that is the point
    assert ARMS["dr_grpo"][0].__name__ == "DrGRPOTrainer"
