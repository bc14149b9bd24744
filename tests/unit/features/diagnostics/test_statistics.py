import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.diagnostics.statistics import (
    BUCKETS,
    QUARTERS,
    BatchRows,
    batch_statistics,
    step_statistics,
    weight_statistics,
)

NAN = math.nan


def batch(rewards, lengths, size, correct="binary", advantages=None, truncated=None, texts=None):
    """Rows with outcome advantages unless others are given: `r - mean` over the group's scorable rows."""
    advantages = advantages or centered(rewards, size)
    return BatchRows(
        num_generations=size,
        rewards=rewards,
        lengths=lengths,
        trained=lengths,
        gradient_weights=[abs(a) * n for a, n in zip(advantages, lengths, strict=True)],
        truncated=truncated or [False] * len(rewards),
        texts=texts or list(range(len(rewards))),
        correct=[None if math.isnan(r) else r >= 1 for r in rewards] if correct == "binary" else correct,
    )


def centered(rewards, size):
    result = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        known = [r for r in group if r == r]
        dead = len(set(known)) < 2
        result += [0.0 if dead or r != r else r - sum(known) / len(known) for r in group]
    return result


# Three groups of four: the shared example (p = 1/2), one of four correct (p = 1/4), all correct.
#   rewards    1 0 0 1 | 1 0 0 0 | 1 1 1 1
#   lengths    2 4 3 6 | 5 1 1 2 | 7 8 9 4
#   |A|        .5 x 4  | .75 .25 .25 .25 | 0
#   weight     1 2 1.5 3 = 7.5 | 3.75 .25 .25 .5 = 4.75 | 0
#   std (n-1)  sqrt(1/3) = .57735 | sqrt(.75 / 3) = .5
#   sum |z|    4 x .5 / .57745 = 3.4635 | 1.5 / .5001 = 2.9994
GOLDEN = batch([1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], [2, 4, 3, 6, 5, 1, 1, 2, 7, 8, 9, 4], 4)


def test_statistics_of_a_batch_match_numbers_by_hand():
    odd = {"truncated": [True] + [False] * 10 + [True], "texts": [1, 1, 1, 1, 1, 2, 3, 4, 1, 1, 2, 2]}
    stats = batch_statistics(replace(GOLDEN, **odd))
    expected = {
        "completions/length_correct_mean": (2 + 6 + 5 + 7 + 8 + 9 + 4) / 7,
        "completions/length_incorrect_mean": (4 + 3 + 1 + 1 + 2) / 5,
        "completions/length_gap_mean": 11 / 5 - 41 / 7,
        "completions/truncated_correct_frac": 2 / 7,
        "completions/truncated_incorrect_frac": 0.0,
        "completions/unique_frac": (0.25 + 1 + 0.5) / 3,
        "drgrpo/pass_rate": 7 / 12,
        "drgrpo/reward_min": 0.0,
        "drgrpo/dead_groups_frac": 1 / 3,
        "drgrpo/all_correct_frac": 1 / 3,
        "drgrpo/all_incorrect_frac": 0.0,
        "drgrpo/effective_group_size": 3.5,  # 4 p (1 - p) G: 4 at p = 1/2, 3 at p = 1/4
    }
    shares = {
        "groups_frac": [0, 1 / 3, 1 / 3, 0, 0, 1 / 3],
        "gradient_weight_frac": [0, 4.75 / 12.25, 7.5 / 12.25, 0, 0, 0],
        "gradient_weight_frac_grpo": [0, 2.9994 / 6.4629, 3.4635 / 6.4629, 0, 0, 0],
    }
    for kind, values in shares.items():
        expected |= {f"difficulty/{kind}/{bucket}": value for bucket, value in zip(BUCKETS, values, strict=True)}
    assert stats == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("texts", "copies", "expected"),
    [
        ([1, 1, 2, 2], [False, True, False, True], 1.0),  # two parents that could not be forked, and differ
        ([1, 1, 1, 1], [False, True, False, True], 0.25),  # and that do not: 1 / G, as without forks
        ([1, 1, 2, 1], [False, True, False, False], 0.25 + 0.75 * 0.5),  # one of two further completions differs
        ([1, 1, 2, 2], None, 0.5),
    ],
)
def test_rows_that_repeat_others_say_nothing_of_collapse(texts, copies, expected):
    rows = replace(batch([1.0, 1.0, 0.0, 0.0], [1] * 4, 4, texts=texts), copies=copies)
    assert batch_statistics(rows)["completions/unique_frac"] == pytest.approx(expected)


MASKED = replace(batch([1.0, 0.0, 0.0, 0.0], [2] * 4, 4), trained=[2, 0, 2, 2], gradient_weights=[1.5, 0.0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A dead group that is neither all correct nor all incorrect: shares of nothing are left out.
        (
            batch([0.5, 0.5], [1, 1], 2, correct=[True, False]),
            {"dead_groups_frac": 1.0, "all_correct_frac": 0.0, "all_incorrect_frac": 0.0}
            | {"effective_group_size": None, "gradient_weight_frac/0": None},
        ),
        # A second reward can leave a group alive that is all correct.
        (
            batch([1.1, 1.0], [1, 1], 2),
            {"dead_groups_frac": 0.0, "all_correct_frac": 0.0, "gradient_weight_frac/100": 1.0},
        ),
        # Unscorable rows are neither correct nor incorrect, and a group of them is in no bucket.
        (
            batch([1.0, NAN, 0.0, NAN, NAN, NAN], [1, 50, 2, 60, 70, 80], 3),
            {"pass_rate": 0.5, "length_correct_mean": 1, "length_incorrect_mean": 2}
            | {"groups_frac/25-50": 1.0, "dead_groups_frac": 0.5},
        ),
        # Masked rows have no gradient weight.
        (MASKED, {"effective_group_size": (0.75 + 0.25 + 0.25) ** 2 / (0.5625 + 2 * 0.0625)}),
        (batch([NAN, -1.0, 2.0, 3.0], [1] * 4, 2), {"reward_min": -1.0}),
        (batch([NAN] * 4, [1] * 4, 2), {"reward_min": None}),
    ],
)
def test_batches_at_the_edge(rows, expected):
    stats = {name.partition("/")[2]: value for name, value in batch_statistics(rows).items()}
    assert {name: stats.get(name) for name in expected} == pytest.approx(expected)


def test_without_knowing_what_is_correct_nothing_is_said_about_it():
    stats = batch_statistics(replace(GOLDEN, correct=None))
    assert set(stats) == {
        "completions/unique_frac",
        "drgrpo/dead_groups_frac",
        "drgrpo/effective_group_size",
        "drgrpo/reward_min",
    }


def test_an_evaluation_says_nothing_about_the_gradient():
    stats = batch_statistics(GOLDEN, trains=False)
    assert {name.split("/")[1] for name in stats if name.startswith("difficulty/")} == {"groups_frac"}
    assert "drgrpo/dead_groups_frac" not in stats
    one_each = batch_statistics(replace(GOLDEN, num_generations=1), trains=False)
    names = {"drgrpo/pass_rate", "drgrpo/reward_min"}
    assert set(one_each) == {n for n in stats if "length" in n or "truncated" in n} | names


def oracle(rewards, lengths, size):
    """Groups and gradient weight by bucket, ours and GRPO's, token by token in plain loops."""
    groups, ours, grpo = (dict.fromkeys(BUCKETS, 0.0) for _ in range(3))
    for start in range(0, len(rewards), size):
        group, rate = rewards[start : start + size], sum(rewards[start : start + size]) / size
        name = {0.0: "0", 1.0: "100"}.get(rate)
        for low, high, label in ((0, 0.25, "0-25"), (0.25, 0.5, "25-50"), (0.5, 0.75, "50-75"), (0.75, 1, "75-100")):
            if name is None and low < rate <= high:
                name = label
        groups[name] += 1
        mean = sum(group) / size
        std = (sum((r - mean) ** 2 for r in group) / (size - 1)) ** 0.5
        for i, reward in enumerate(group):
            for _ in range(lengths[start + i]):
                ours[name] += abs(reward - mean)
                grpo[name] += abs(reward - mean) / (std + 1e-4) / lengths[start + i]
    return {"groups_frac": groups, "gradient_weight_frac": ours, "gradient_weight_frac_grpo": grpo}


@st.composite
def binary_batches(draw):
    size, groups = draw(st.integers(2, 9)), draw(st.integers(1, 6))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size * groups, max_size=size * groups))
    return rewards, draw(st.lists(st.integers(1, 40), min_size=len(rewards), max_size=len(rewards))), size


@given(binary_batches())
def test_shares_agree_with_loops_over_tokens(drawn):
    stats = batch_statistics(batch(*drawn))
    for kind, amounts in oracle(*drawn).items():
        total = sum(amounts.values())
        shares = {b: stats.get(f"difficulty/{kind}/{b}") for b in BUCKETS}
        expected = {b: amounts[b] / total if total else None for b in BUCKETS}
        assert shares == {b: pytest.approx(value) for b, value in expected.items()}


@given(binary_batches(), st.randoms(use_true_random=False))
def test_statistics_of_any_batch_keep_their_invariants(drawn, random):
    rewards, lengths, size = drawn
    stats = batch_statistics(batch(*drawn))
    assert all(0 <= value <= 1 for name, value in stats.items() if "_frac" in name)
    # The closed form of the effective group size for 0/1 rewards.
    rates = [sum(rewards[s : s + size]) / size for s in range(0, len(rewards), size)]
    live = [4 * p * (1 - p) * size for p in rates if 0 < p < 1]
    assert stats.get("drgrpo/effective_group_size") == (pytest.approx(sum(live) / len(live)) if live else None)
    assert stats["drgrpo/dead_groups_frac"] == pytest.approx(1 - len(live) / len(rates))
    assert stats["drgrpo/all_correct_frac"] + stats["drgrpo/all_incorrect_frac"] == pytest.approx(
        stats["drgrpo/dead_groups_frac"]
    )
    # The order of rows in a group, and of groups, does not matter.
    order = [list(range(s, s + size)) for s in range(0, len(rewards), size)]
    random.shuffle(order)
    rows = [i for group in order for i in random.sample(group, size)]
    shuffled = batch_statistics(batch([rewards[i] for i in rows], [lengths[i] for i in rows], size))
    assert shuffled == pytest.approx(stats)
    # Twice the reward is no other difficulty: neither share changes (GRPO's but for the 1e-4).
    double = batch([2 * r for r in rewards], lengths, size)
    lowest = {"drgrpo/reward_min": 2 * min(rewards)}
    assert batch_statistics(double) == pytest.approx(stats | lowest, abs=1e-3)


def test_golden_weights():
    # In the order of length: 1.0 and 0.8, 0.6 and 0.4, 0.5 and 0.3, 0.2 and 0.0; one row is not trained on.
    weights = [0.5, 0.2, 1.0, 0.8, math.nan, 0.3, 0.6, 0.0, 0.4]
    lengths = [50, 70, 10, 20, 90, 60, 30, 80, 40]
    correct = [True, False, True, None, True, False, False, False, True]
    assert weight_statistics(weights, lengths, correct) == pytest.approx(
        {
            "sampling/weight_q1_mean": 0.9,
            "sampling/weight_q2_mean": 0.5,
            "sampling/weight_q3_mean": 0.4,
            "sampling/weight_q4_mean": 0.1,
            "sampling/weight_correct_mean": (0.5 + 1.0 + 0.4) / 3,
            "sampling/weight_incorrect_mean": (0.2 + 0.3 + 0.6 + 0.0) / 4,
        }
    )


def test_rows_of_one_length_are_in_one_quarter_whatever_their_order():
    weights, lengths = [1.0, 0.0, 1.0, 0.0, 0.5], [9, 9, 9, 9, 3]
    # Mean ranks: (0 + 1) / 2 and (1 + 5) / 2 of 5.
    assert weight_statistics(weights, lengths) == {QUARTERS[0]: 0.5, QUARTERS[2]: 0.5}
    assert weight_statistics(weights[::-1], lengths[::-1]) == {QUARTERS[0]: 0.5, QUARTERS[2]: 0.5}


def test_statistics_without_trained_tokens_are_left_out():
    assert weight_statistics([math.nan] * 4, [1, 2, 3, 4], [True] * 4) == {}
    assert weight_statistics([], []) == {}


def test_golden_statistics():
    # rows: (1, 0), (1, None), () with outcomes 0, 1, 1
    stats = step_statistics([[1.0, 0.0], [1.0, None], []], [0.0, 1.0, 1.0])
    assert {name.removeprefix("process/"): value for name, value in stats.items()} == pytest.approx(
        {"steps_mean": 2.0, "unscorable_frac": 0.25, "reward_mean": 2 / 3}  # 4 steps in 2 completions that have any
        # Two steps: middles at 1/4 and 3/4 of the completion, so quarters 2 and 4. Row means .5 and 1 with outcomes 0
        # and 1: perfectly correlated.
        | {"reward_quarter_2": 1.0, "reward_quarter_4": 0.0, "outcome_correlation": 1.0}
    )


def test_undefined_statistics_are_left_out():
    for outcomes in ([1.0, 1.0], [None, 1.0], [math.nan, 0.0]):
        assert "process/outcome_correlation" not in step_statistics([[0.0], [1.0]], outcomes)
    assert step_statistics([[], []], [0.0, 1.0]) == {}
    assert step_statistics([[None]], [0.0]) == {"process/steps_mean": 1.0, "process/unscorable_frac": 1.0}


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=9), min_size=1, max_size=6))
def test_every_scored_step_is_in_one_quarter(rewards):
    stats = step_statistics(rewards, [0.0] * len(rewards))
    quarters = [stats[key] for key in stats if "quarter" in key]
    scored = [s for row in rewards for s in row if s is not None]
    assert bool(quarters) == bool(scored)
    assert all(min(scored) - 1e-9 <= q <= max(scored) + 1e-9 for q in quarters)
