import math

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.objective.advantages import RunningRewardScale, combine_rewards, group_advantages

NAN = float("nan")
baselines = st.sampled_from(["group_mean", "leave_one_out"])
# Multiples of 1/8: sums are exact in float64, so ties are ties for the oracle too.
rewards_values = st.one_of(st.none(), st.integers(-16, 16).map(lambda n: n / 8))


@st.composite
def groups(draw, values=rewards_values):
    num_generations = draw(st.integers(1, 6))
    num_prompts = draw(st.integers(1, 4))
    size = num_generations * num_prompts
    return draw(st.lists(values, min_size=size, max_size=size)), num_generations


def in_double(rewards):
    return torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_groups_without_signal_are_exactly_zero(baseline):
    # 0.7 is not a binary fraction: eight of them minus their float32 mean leave 6e-8 each
    equal = torch.tensor([0.7] * 8)
    assert (equal - equal.mean()).abs().max() > 0, "the trap this test is about is gone"
    for rewards, size in ((equal, 8), ([1.0, None, None], 3), ([None, None], 2), ([5.0], 1)):
        assert group_advantages(rewards, size, baseline).tolist() == [0.0] * len(rewards)


@given(groups(), baselines)
def test_agrees_with_the_loop_oracle(case, baseline):
    rewards, num_generations = case
    got = group_advantages(in_double(rewards), num_generations, baseline).tolist()
    assert got == pytest.approx(oracles.group_advantages(rewards, num_generations, baseline), abs=1e-12)


def test_keeps_dtype_and_takes_integers():
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2).dtype == torch.float64
    assert group_advantages(torch.tensor([1, 0]), 2).tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("rewards", "num_generations", "baseline", "field"),
    [
        ([1.0, 0.0, 1.0], 2, "group_mean", "num_generations: got 2 for 3 rewards"),
        ([1.0], 0, "group_mean", "num_generations: got 0"),
        ([1.0, math.inf], 2, "group_mean", "rewards: got an infinite value in row 1"),
        ([1.0, 0.0], 2, "median", "baseline: got 'median'"),
        (torch.zeros(2, 2), 2, "group_mean", "rewards: got shape"),
    ],
)
def test_bad_input_is_named(rewards, num_generations, baseline, field):
    with pytest.raises(ValueError, match="^" + field.replace("(", r"\(")):
        group_advantages(rewards, num_generations, baseline)


def test_weighted_sum_over_the_functions_that_applied():
    # row 0: 1 * 2 + 0.5 * 4 = 4; row 1: only the first applies; row 2: none does
    combined = combine_rewards(torch.tensor([[2.0, 4.0], [3.0, NAN], [NAN, NAN]]), torch.tensor([1.0, 0.5]))
    assert combined[:2].tolist() == [4.0, 3.0]
    assert combined[2].isnan()


@given(st.lists(st.lists(rewards_values, min_size=1, max_size=9), min_size=1, max_size=5))
def test_running_scale_is_the_std_of_everything_seen(batches):
    scale = RunningRewardScale()
    for batch in batches:
        scale.update(in_double(batch))
    seen = [r for batch in batches for r in batch if r is not None]
    if len(seen) < 2 or min(seen) == max(seen):
        assert scale.std == 1.0
    else:
        assert scale.std == pytest.approx(torch.tensor(seen, dtype=torch.float64).std().item())


def test_running_scale_survives_a_round_trip():
    scale, restored = RunningRewardScale(), RunningRewardScale()
    scale.update(torch.tensor([0.0, 1.0, 5.0]))
    restored.load_state_dict(scale.state_dict())
    for each in (scale, restored):
        each.update(torch.tensor([2.0, NAN]))
    assert restored.std == scale.std
