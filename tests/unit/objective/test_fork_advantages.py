import math
from itertools import product

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.advantages import group_advantages
from trl_drgrpo.objective.fork_advantages import Forks, fork_step_advantages, fork_token_advantages, node_advantages

CREDITS = ("return_to_go", "immediate", "min_increments")
eighths = st.integers(-8, 8).map(lambda n: n / 8)  # sums are exact, so ties are ties for the oracle too


rewards_values = st.one_of(st.none(), eighths)


@st.composite
def forked(draw, values=rewards_values):
    """Groups of trees: b, D, G, cuts and lengths of rows, one reward each. A place of 2 tokens is a step."""
    branches, depth = draw(st.sampled_from([(2, 1), (2, 2), (3, 1)]))
    parents = draw(st.integers(2, 3))
    rows = []

    def grow(cuts, before):
        if len(cuts) == depth:
            rows.append((cuts, before + draw(st.integers(1, 5))))
            return
        if draw(st.integers(0, 3)) == 0:
            length = before + draw(st.integers(1, 5))
            left = depth - len(cuts)
            rows.extend([((*cuts, *[length] * left), length)] * branches**left)
            return
        cut = before + 2 * draw(st.integers(1, 2))
        for _ in range(branches):
            grow((*cuts, cut), cut)

    for _ in range(parents * draw(st.integers(1, 2))):
        grow((), 0)
    rewards = draw(st.lists(values, min_size=len(rows), max_size=len(rows)))
    return rewards, parents * branches**depth, branches, [list(cuts) for cuts, _ in rows], [n for _, n in rows]


def mask_of(lengths, spare=1):
    width = max(lengths) + spare
    return [[int(t < length) for t in range(width)] for length in lengths]


def tensor(rewards):
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)


@given(forked())
def test_tokens_agree_with_the_definition(batch):
    rewards, size, branches, cuts, lengths = batch
    mask = mask_of(lengths)
    got = fork_token_advantages(tensor(rewards), size, Forks(branches, cuts), torch.tensor(mask))
    expected = oracles.forked_token_advantages(rewards, size, branches, cuts, mask)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=0)


@given(forked(), st.data())
def test_rows_that_are_asked_for_are_those_of_all(batch, data):
    rewards, size, branches, cuts, lengths = batch
    start = data.draw(st.integers(0, len(rewards) - 1))
    rows = slice(start, data.draw(st.integers(start + 1, len(rewards))))
    mask, forks = torch.tensor(mask_of(lengths)), Forks(branches, cuts)
    own = fork_token_advantages(tensor(rewards), size, forks, mask[rows], rows)
    assert torch.equal(own, fork_token_advantages(tensor(rewards), size, forks, mask)[rows])


@given(forked(), st.sampled_from(CREDITS), st.data())
def test_steps_agree_with_the_definition(batch, credit, data):
    _, size, branches, cuts, lengths = batch
    ends = [sorted({*range(1, length, 2), length - 1}) for length in lengths]  # cuts lie behind two tokens or four
    paid = st.one_of(st.none(), eighths)
    rewards = [data.draw(st.lists(paid, min_size=len(row), max_size=len(row))) for row in ends]
    got = fork_step_advantages(rewards, ends, size, Forks(branches, cuts), credit)
    expected = oracles.forked_step_advantages(rewards, ends, size, branches, cuts, credit)
    assert [len(row) for row in got] == [len(row) for row in ends]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_equal_siblings_get_exactly_nothing():
    rewards = tensor([0.1 + 0.2, 0.3 + 0.0, 0.3, 0.1 + 0.2])[[0, 0, 1, 1]]  # apart by rounding: that is a difference
    assert node_advantages(torch.full((6, 1), 0.1, dtype=torch.float64), 6, 2, 1).abs().max() == 0
    assert node_advantages(rewards.unsqueeze(1), 4, 2, 1)[1].abs().max() == 0


def test_an_unscorable_branch_silences_its_group_and_no_other():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0])
    forks = Forks(2, [[1]] * 8)
    got = fork_token_advantages(rewards, 4, forks, torch.ones(8, 2))
    assert got[:4].abs().max() == 0
    assert got[4:].tolist() == [[0.5, 1.0], [0.5, -1.0], [-0.5, 0.0], [-0.5, 0.0]]
    steps, ends = [[float(reward), 0.0] for reward in rewards.nan_to_num()], [[0, 1]] * 8
    credits = fork_step_advantages(steps, ends, 4, forks, unscorable=rewards.isnan())
    assert credits[:4] == [[0.0, 0.0]] * 4
    assert credits[4:] == fork_step_advantages(steps[4:], ends[4:], 4, Forks(2, forks.cuts[4:]))


def test_steps_of_rows_without_any():
    assert fork_step_advantages([[]] * 4, [[]] * 4, 4, Forks(2, [[0]] * 4)) == [[]] * 4
    got = fork_step_advantages([[1.0], [1.0], [], []], [[0], [0], [], []], 4, Forks(2, [[1], [1], [0], [0]]))
    assert got == [[1.0], [1.0], [], []]


@given(forked())
def test_copies_are_the_rows_that_were_not_sampled(batch):
    _, _, branches, cuts, lengths = batch
    leaves = branches ** len(cuts[0])
    copies = Forks(branches, cuts).copies(lengths)
    for start in range(0, len(cuts), leaves):
        rows = range(start, start + leaves)
        forked = [sum(cut < lengths[i] for cut in cuts[i]) for i in rows]  # how often each row was
        # a row that was forked n times of D stands there b ** (D - n) times, of which one was sampled
        assert sum(not copies[i] for i in rows) == sum(branches ** (n - len(cuts[0])) for n in forked)


@pytest.mark.parametrize(
    ("forks", "size", "message"),
    [
        (Forks(1, [[1]] * 4), 4, "forks: got 1 at 1 levels with 4 completions per prompt"),
        (Forks(2, [[1]] * 2), 2, "Set num_generations to two or more times"),
        (Forks(2, [[1]] * 5), 5, "two or more whole trees per prompt"),
        (Forks(3, [[1]] * 4), 4, "forks: got 3 at 1 levels"),
        (Forks(2, [[1, 2]] * 4), 4, "forks: got 2 at 2 levels with 4"),
        (Forks(2, [[1]] * 6), 4, "forks: got cuts of 6 rows"),
        (Forks(2, [[1], [1], [1], [1, 2]]), 4, "forks: got cuts of 4 rows; expected 1 per row"),
    ],
)
def test_groups_that_are_no_such_trees_are_refused(forks, size, message):
    with pytest.raises(InputError, match=message):
        fork_token_advantages(torch.zeros(len(forks.cuts)), size, forks, torch.ones(len(forks.cuts), 3))
    with pytest.raises(InputError, match=message):
        fork_step_advantages([[1.0]] * len(forks.cuts), [[0]] * len(forks.cuts), size, forks)


# A 2 x 2 tree of coins: the first token is 1 with probability p, the second with probability q; any reward of the two.

P, Q = 0.3, 0.6
REWARD = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): 0.7, (1, 1): -0.4}


def expected_gradient(advantages_of):
    """In the logits of both coins, over all trees: `sum p(group) * 1/4 * sum A * score`."""
    trees = [(a, b, c) for a, b, c in product((0, 1), repeat=3)]  # the shared token, and one behind the cut each
    chance = [(P if a else 1 - P) * (Q if b else 1 - Q) * (Q if c else 1 - Q) for a, b, c in trees]
    gradient = [0.0, 0.0]
    for i, j in product(range(len(trees)), repeat=2):
        leaves = [(tree[0], token) for tree in (trees[i], trees[j]) for token in tree[1:]]
        advantages = advantages_of(torch.tensor([REWARD[leaf] for leaf in leaves], dtype=torch.float64))
        for (first, second), row in zip(leaves, advantages.tolist(), strict=True):
            weight = chance[i] * chance[j] / 4
            gradient[0] += weight * row[0] * (first - P)  # d log p / d logit
            gradient[1] += weight * row[1] * (second - Q)
    return gradient


def exact_gradient():
    # d/dp and d/dq of the expected reward, times p (1 - p) and q (1 - q), which a logit moves them by
    by_first = (1 - Q) * (REWARD[1, 0] - REWARD[0, 0]) + Q * (REWARD[1, 1] - REWARD[0, 1])
    by_second = (1 - P) * (REWARD[0, 1] - REWARD[0, 0]) + P * (REWARD[1, 1] - REWARD[1, 0])
    return [P * (1 - P) * by_first, Q * (1 - Q) * by_second]


def test_the_gradient_of_both_segments_is_whole():
    forks = Forks(2, [[1]] * 4)
    got = expected_gradient(lambda rewards: fork_token_advantages(rewards, 4, forks, torch.ones(4, 2)))
    assert got == pytest.approx(exact_gradient(), rel=1e-6)  # of float32 advantages


def test_control_the_mean_over_all_leaves_leaves_a_half_and_three_quarters():
    first, second = exact_gradient()
    got = expected_gradient(lambda rewards: group_advantages(rewards, 4, "group_mean").unsqueeze(1).expand(4, 2))
    assert got == pytest.approx([0.5 * first, 0.75 * second], abs=1e-12)
