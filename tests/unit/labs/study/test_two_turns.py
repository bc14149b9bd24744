"""Two turns: the rollout with the environment between them, the judges, and demonstrations."""

import pytest

from trl_drgrpo.labs.demo.tokenizer import build_tokenizer
from trl_drgrpo.labs.study import two_turns
from trl_drgrpo.labs.study.two_turns import (
    MAX_COMPLETION,
    labeled_rows,
    last_number_reward,
    make_prompts,
    rollout,
    second_term,
    turn_reward,
    warm_start,
)
from trl_drgrpo.process_rewards.steps import step_segmenter


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Player:
        """What a rollout needs of a trainer."""

        folder = warm_start(tmp_path_factory.mktemp("two_turns"), steps=3, batch_size=16)
        model = AutoModelForCausalLM.from_pretrained(folder)
        processing_class = AutoTokenizer.from_pretrained(folder)

    return Player()


def test_the_environment_speaks_between_the_turns(player):
    prompts = make_prompts(24, seed=0)["prompt"]
    rolled = rollout(0)(prompts, player)
    decode = player.processing_class.decode
    for prompt, prompt_ids, ids, mask in zip(
        prompts, rolled["prompt_ids"], rolled["completion_ids"], rolled["env_mask"], strict=True
    ):
        assert decode(prompt_ids) == prompt
        said = decode([token for token, kept in zip(ids, mask, strict=True) if not kept])
        assert said == f"+{second_term(prompt)}="
        assert mask[0] == mask[-1] == 1
        assert len(ids) == len(mask) <= MAX_COMPLETION
        steps = step_segmenter("turn")(ids, player.processing_class, mask)
        assert len(steps.ends) == 2
        assert steps.texts[0].endswith(said)


def test_judges():
    prompt, term = "27+8=", second_term("27+8=")
    right, slip = f"35\n+{term}=", f"36\n+{term}="
    cases = [
        ([right, f"{35 + term}<|im_end|>"], [1.0, 1.0], 1.0),
        ([slip, f"{36 + term}"], [0.0, 1.0], 0.0),  # charged to the turn that makes it
        ([slip, f"{35 + term}"], [0.0, 0.0], 1.0),  # the outcome looks at the last number only
        ([right, "?"], [1.0, 0.0], 0.0),
        ([f"x\n+{term}=", "35"], [0.0, 0.0], 0.0),
    ]
    for turns, verdicts, outcome in cases:
        assert turn_reward(prompts=[prompt], steps=[turns]) == [verdicts]
        completion = "".join(turns).replace("<|im_end|>", "")
        assert last_number_reward([completion], [35 + term]) == [outcome]


def test_demonstrations_are_labeled_as_the_rule_judges():
    rows = labeled_rows(400, seed=0)
    assert all(len(row["steps"]) == len(row["labels"]) == 2 for row in rows)
    labels = [label for row in rows for label in row["labels"]]
    assert 0.4 < sum(labels) / len(labels) < 0.7
    tokenizer = build_tokenizer()
    (batch,) = two_turns._demonstrations(tokenizer, 1, 4, seed=0)
    learned = tokenizer.decode([token for token in batch["labels"][0].tolist() if token >= 0])
    assert learned.count("\n") == 1
    assert learned.endswith("<|im_end|>")
    assert "=" not in learned  # neither the prompt nor what the environment says
