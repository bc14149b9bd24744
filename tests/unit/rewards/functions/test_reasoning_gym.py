"""The reward of reasoning-gym's tasks: finding the answer, scoring it."""

import pytest

from trl_drgrpo.rewards.functions.reasoning_gym import extract_answer, make_splits, reasoning_gym_reward


def test_extract_a_grid():
    assert extract_answer("so:\n1 2\n\n3 4\n", last_lines=3) == "1 2\n\n3 4"


@pytest.mark.parametrize(
    "task",
    [
        "chain_sum",
        pytest.param("arc_agi", marks=pytest.mark.slow),
        "futoshiki",
        "prime_factorization",
        "spell_backward",
    ],
)
def test_reasoning_gym_reward_scores_as_the_task(task):
    gym = pytest.importorskip("reasoning_gym")
    rows = make_splits(task, {"size": "2", "test_size": "0"})["train"]
    original = gym.create_dataset(task, size=2, seed=0)
    for row, entry in zip(rows, original, strict=True):
        texts = [row["answer"], f"It is <answer>{row['answer']}</answer>", "<answer>abc</answer>", ""]
        scores = reasoning_gym_reward([[{"role": "assistant", "content": t}] for t in texts], [row["entry"]] * 4)
        assert scores[0] == scores[1] == original.score_answer(entry["answer"], entry) == 1.0
        assert scores[2] < 1
        assert scores[3] == 0
        assert reasoning_gym_reward(texts, [row["entry"]] * 4) == scores  # plain text completions


def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_counted():
    pytest.importorskip("reasoning_gym")
    row = make_splits("prime_factorization", {"size": "1", "test_size": "0"})["train"][0]
    logged = {}
    scores = reasoning_gym_reward(["abc", row["answer"]], [row["entry"]] * 2, log_metric=logged.__setitem__)
    assert scores == [0.0, 1.0]
    assert logged == {"rewards/reasoning_gym/scorer_error_frac": 0.5}
