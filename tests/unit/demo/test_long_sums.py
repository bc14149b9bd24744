"""Long list sums: a demonstrator with gaps in the addition table, and what the rule says of it."""

import random

from trl_drgrpo.demo.build import (
    MAX_COMPLETION,
    TERMS,
    add_with_gaps,
    demonstrate_with_gaps,
    make_long_dataset,
    make_long_problems,
)
from trl_drgrpo.demo.task import build_tokenizer, check_steps, list_sum_reward

PROBLEMS = make_long_problems(2000)


def test_problems_are_long_and_the_splits_disjoint():
    assert {len(numbers) for numbers in PROBLEMS} == {8, 9, 10} == set(range(TERMS[0], TERMS[1] + 1))
    held_out = {tuple(sorted(numbers)) for numbers in make_long_problems(300, "held_out")}
    assert not held_out & {tuple(sorted(numbers)) for numbers in PROBLEMS}
    assert make_long_dataset(3)[0]["answer"] == str(sum(PROBLEMS[0]))


def test_half_of_the_table_is_known_and_the_other_half_wrong_in_one_way():
    written = {
        (units, term): {add_with_gaps(10 + units, term, random.Random(seed)) - 10 - units - term for seed in range(40)}
        for units in range(10)
        for term in range(1, 10)
    }
    gaps = [wrong for wrong in written.values() if wrong != {0}]
    assert 0.35 < len(gaps) / len(written) < 0.65
    assert all(0 in wrong and len(wrong) == 2 for wrong in gaps)  # now and then it is right
    assert all(min(wrong) == 0 for wrong in gaps)  # too much, never too little: two mistakes do not cancel


def test_a_wrong_line_is_a_wrong_answer():
    rng = random.Random(0)
    texts = [demonstrate_with_gaps(numbers, rng) for numbers in PROBLEMS]
    verdicts = [check_steps(numbers, text) for numbers, text in zip(PROBLEMS, texts, strict=True)]
    right = list_sum_reward(texts, [sum(numbers) for numbers in PROBLEMS])
    assert [all(lines) for lines in verdicts] == [reward == 1.0 for reward in right]
    assert 0.05 < sum(right) / len(right) < 0.15
    assert 0.7 < sum(map(sum, verdicts)) / sum(map(len, verdicts)) < 0.85
    tokenizer = build_tokenizer()
    assert max(len(tokenizer(text)["input_ids"]) for text in texts) < MAX_COMPLETION
