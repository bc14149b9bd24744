import math

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.objective.step_advantages import (
    broadcast_to_tokens,
    step_advantages,
    step_token_advantages,
    with_closings,
)
from trl_drgrpo.objective.step_choices import STEP_BASELINES, STEP_CREDITS


def fits(credit, baseline):
    return credit != "min_increments" or baseline in ("to_go", "none")


CHOICES = [(c, b) for c in STEP_CREDITS for b in STEP_BASELINES if fits(c, b)]
PUBLISHED = [(c, b) for c, b in CHOICES if b not in ("none", "to_go")]
# Multiples of 1/8: sums are exact, so ties are ties for the oracle too.
rewards_values = st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 8))


@st.composite
def batches(draw, values=rewards_values):
    """Ragged step rewards with ends, and a mask with trailing padding and holes."""
    num_generations, num_prompts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rewards, ends = [], []
    for _ in range(num_generations * num_prompts):
        lengths = draw(st.lists(st.integers(1, 4), max_size=4))
        ends.append([sum(lengths[: k + 1]) - 1 for k in range(len(lengths))])
        rewards.append(draw(st.lists(values, min_size=len(lengths), max_size=len(lengths))))
    width = 1 + max((e[-1] for e in ends if e), default=0) + draw(st.integers(0, 2))
    holes = draw(st.sets(st.integers(0, width - 1), max_size=2))
    mask = [[int(bool(e) and t <= e[-1] and t not in holes) for t in range(width)] for e in ends]
    return rewards, ends, mask, num_generations


@given(batches(), st.sampled_from(CHOICES))
def test_agrees_with_the_definition_token_by_token(batch, choice):
    rewards, ends, mask, num_generations = batch
    got = step_token_advantages(rewards, ends, torch.tensor(mask), num_generations, *choice)
    expected = oracles.step_token_advantages(rewards, ends, mask, num_generations, *choice)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=0)


def test_each_baseline_on_one_uneven_group():
    # row 0 has two steps (1, 0), row 1 one step (1), row 2 none that can be scored
    group = [[1.0, 0.0], [1.0], [None]]
    immediate = {b: step_advantages(group, 3, "immediate", b) for b in STEP_BASELINES}
    assert immediate["deepseekmath"] == [[pytest.approx(1 / 3), pytest.approx(-2 / 3)], [pytest.approx(1 / 3)], [0.0]]
    assert immediate["per_completion"] == [[0.25, -0.75], [0.25], [0.0]]  # mean of .5 and 1
    assert immediate["pooled_others"] == [[0.0, -1.0], [0.5], [0.0]]
    assert immediate["same_index"] == [[0.0, 0.0], [0.0], [0.0]]  # step 2 has only itself to compare with
    assert immediate["none"] == [[1.0, 0.0], [1.0], [0.0]]
    assert immediate["to_go"] == [[0.5, 0.0], [0.5], [-1.0]]  # row 1 ended: 0 against 0


def test_the_worked_example_of_the_paper_by_hand():
    # DeepSeekMath, section 4.1.3, process supervision: R = {{1, 0, 1}, {0, 1}}, index(j) = ends.
    # mean(R) = 3/5; normalized without std: (.4, -.6, .4) and (-.6, .4); A_t = sum of those with index(j) >= t:
    # row 0: tokens of step 1: .4 - .6 + .4 = .2; of step 2: -.2; of step 3: .4. Row 1: -.2, then .4.
    given = [[1, 0, 1], [0, 1]], [[1, 2, 4], [0, 2]], torch.ones(2, 5), 2
    advantages = step_token_advantages(*given, baseline="deepseekmath")
    expected = [[0.2, 0.2, -0.2, 0.4, 0.4], [-0.2, 0.4, 0.4, 0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_the_papers_std_is_there_when_asked_for_by_name():
    # R = {1, 0, 1, 0, 1}: mean 3/5, std (n - 1) = sqrt((3 * .16 + 2 * .36) / 4) = sqrt(.3)
    plain = step_advantages([[1, 0, 1], [0, 1]], 2, baseline="deepseekmath")
    scaled = step_advantages([[1, 0, 1], [0, 1]], 2, baseline="deepseekmath", deepseekmath_std=True)
    for before, after in zip(plain, scaled, strict=True):
        assert after == pytest.approx([value / math.sqrt(0.3) for value in before])


@pytest.mark.parametrize(("credit", "baseline"), PUBLISHED)
def test_equal_step_rewards_are_exactly_zero(credit, baseline):
    rewards = [[0.7] * 3, [0.7], [0.7, None, 0.7]]
    assert step_advantages(rewards, 3, credit, baseline) == [[0.0] * 3, [0.0], [0.0] * 3]
    assert step_advantages([[0.1, 0.7, 0.3]] * 3, 3) == [[0.0] * 3] * 3  # what all rows share
    assert step_advantages([[0.1, 0.2]], 1) == [[0.0, 0.0]]  # nobody to compare with


def test_min_increments_cannot_be_raised_by_more_steps():
    few, many = [[0.2, 0.9], [0.4]], [[0.2, *[0.9] * 50], [0.4]]
    first = step_advantages(few, 2, "min_increments")[0][0]
    assert step_advantages(many, 2, "min_increments")[0][0] == pytest.approx(first) == pytest.approx(0.2 - 0.4)
    # the hazard it avoids: return-to-go pays for the extra steps
    assert step_advantages(many, 2)[0][0] > step_advantages(few, 2)[0][0]


def test_a_policy_that_stops_is_compared_with_what_the_others_earn_later():
    # step 2 of row 0 earns 1 where row 1 had ended: its decision to go on is worth 1, row 1's to stop -1
    rewards, _ = with_closings([[1.0, 1.0], [1.0]], [[0, 1, 2], [0, 1]], apart=True)
    assert step_advantages(rewards, 2) == [[1.0, 1.0, 0.0], [-1.0, -1.0]]
    assert step_advantages(rewards, 2, baseline="deepseekmath") == [[0.0, 0.0, 0.0], [0.0, 0.0]]  # nothing to learn


@pytest.mark.parametrize("baseline", STEP_BASELINES)
def test_an_unscorable_row_is_in_nobodys_mean_and_gets_nothing(baseline):
    rows, out = [[1.0, 0.5], [8.0, 8.0, 8.0], [0.0], [0.25, 0.5]], torch.tensor([False, True, False, False])
    got = step_advantages(rows, 4, baseline=baseline, unscorable=out)
    assert got.pop(1) == [0.0] * 3
    assert got == step_advantages([rows[0], *rows[2:]], 3, baseline=baseline)


@pytest.mark.parametrize("group_size", range(2, 12))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3])
def test_states_that_are_worth_the_same_in_all_rows_get_exactly_0(group_size, reward):
    """The mean of equal numbers may round to another one, which Adam would turn into a full step."""
    keys = [["start", "same"]] * group_size
    advantages = step_advantages([[reward, 0.0]] * group_size, group_size, state_keys=keys)
    assert advantages == [[0.0, 0.0]] * group_size


def test_a_state_is_not_compared_with_an_unscorable_row():
    rows, keys = [[1.0], [8.0], [0.0]], [["a"], ["a"], ["b"]]
    got = step_advantages(rows, 3, state_keys=keys, unscorable=torch.tensor([False, True, False]))
    assert got == [[1.0], [0.0], [-1.0]]  # with nobody else in the state: with the other row
    only_one = torch.tensor([False, True, True])
    assert step_advantages(rows, 3, state_keys=keys, unscorable=only_one) == [[0.0]] * 3


def test_states_are_compared_over_the_other_rows_only():
    rewards, keys = [[1.0, 0.0], [0.0, 4.0], [2.0, 2.0]], [["a", "b"], ["a", "a"], ["c", None]]
    got = step_advantages(rewards, 3, state_keys=keys)
    # row 0, "a": earned 1; row 1 passed it twice and earned 4 and 4: mean 4. "b": nobody else: step 2 of the others
    assert got[0] == [pytest.approx(1 - 4), pytest.approx(0 - (4 + 2) / 2)]
    assert got[1] == [pytest.approx(4 - 1), pytest.approx(4 - 1)]
    assert got[2] == [pytest.approx(4 - (1 + 4) / 2), pytest.approx(2 - (0 + 4) / 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_advantages([[1.0]], 2), "num_generations: got 2 for 1 rows"),
        (lambda: step_advantages([[math.inf]], 1), "step_rewards: got inf for step 0 of row 0"),
        (lambda: step_advantages([[1.0]], 1, "later"), "credit: got 'later'"),
        (lambda: step_advantages([[1.0]], 1, baseline="mean"), "baseline: got 'mean'"),
        (
            lambda: step_advantages([[1.0]], 1, "min_increments", "deepseekmath"),
            "baseline: got 'deepseekmath' with credit",
        ),
        (
            lambda: step_advantages([[1.0]], 1, deepseekmath_std=True),
            "deepseekmath_std: got True with baseline 'to_go'",
        ),
        (lambda: step_advantages([[1.0, 2.0]], 1, state_keys=[["a"]]), "state_keys: got 1 keys for 2 steps in row 0"),
        (lambda: broadcast_to_tokens([[1.0]], [[0, 1]], torch.ones(1, 3)), "step_ends: got 2 ends for 1 step rewards"),
        (lambda: broadcast_to_tokens([[1.0, 1.0]], [[1, 1]], torch.ones(1, 3)), r"step_ends: got \[1, 1\] in row 0"),
        (lambda: broadcast_to_tokens([[1.0]], [[3]], torch.ones(1, 3)), r"step_ends: got \[3\] in row 0"),
        (lambda: broadcast_to_tokens([[1.0]], [[0], [0]], torch.ones(1, 3)), "step_ends: got 1 rows of values"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
