"""Sampling with a stub in the place of the backend: which rows are asked for, and what is made of them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.forks import ForkedRollouts, boundaries, drawn_places, first_above, step_means
from trl_drgrpo.objective.fork_advantages import Forks

PROMPTS = [[100] * 2, [101] * 3]
LOG_PROB = 0.125


class Backend:
    """Writes completions of given lengths in turn: tokens are counted on, so that every one is another one."""

    def __init__(self, lengths, exceeds=0):
        self.lengths, self.exceeds, self.calls, self.written = list(lengths), exceeds, [], 0

    def __call__(self, prompt_ids, num_generations, limits=None):
        self.calls.append(([list(ids) for ids in prompt_ids], num_generations, limits))
        rows = []
        for i in range(len(prompt_ids)):
            length = self.lengths.pop(0) if self.lengths else 5
            length = min(length, limits[i]) if limits and not self.exceeds else length
            rows.append([1000 + self.written + t for t in range(length)])
            self.written += length
        return rows, [[LOG_PROB * token for token in row] for row in rows]


class PairsOfTokens:
    """Steps of two tokens; the last may be one."""

    def __call__(self, ids, tokenizer):
        return SimpleNamespace(ends=sorted({*range(1, len(ids), 2), len(ids) - 1} - {-1}))

    def warn_of_looking_ahead(self, biased, completions, tokenizer):
        pass


def feature(ranks=1, rank=0, others=(), scores=None, entropies=None, **fields):
    """`others`: what the other ranks say, call by call."""
    args = {"forks": 2, "fork_depth": 1, "fork_at": "drawn", "fork_threshold": None, "seed": 0}
    others, metrics = list(others), {}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**{**args, "max_completion_length": 12, "should_save": True, **fields}),
        accelerator=SimpleNamespace(num_processes=ranks, process_index=rank),
        text_tokenizer=SimpleNamespace(
            batch_decode=lambda rows, **_: [" ".join(map(str, row)) for row in rows],
        ),
        gathered=lambda own: own + (others.pop(0) if others else []),
        model=SimpleNamespace(training=True),
        scoring=nullcontext,
        state=None,
        step_scorer=scores,
        completion_entropies=entropies,
        log_batch=lambda values, columns: metrics.update(values),
    )
    return ForkedRollouts(trainer, PairsOfTokens()), metrics


def rows_of(prompts, size):
    return [prompt for prompt in prompts for _ in range(size)]


def test_parents_first_then_the_branches_of_their_cuts():
    backend = Backend([6, 5, 4, 3])
    forks, _ = feature()
    completions, log_probs = forks.completing(rows_of(PROMPTS, 4), 4, backend)
    (parents, of_each, limits), (starts, more, left) = backend.calls
    assert (parents, of_each, limits) == (rows_of(PROMPTS, 2), 2, None)
    # the first batch knows no length: behind the first step of two tokens
    assert forks.newest == Forks(2, [[2]] * 8)
    assert starts == [prompt + row[:2] for prompt, row in zip(parents, completions[::2], strict=True)]
    assert (more, left) == (1, [10] * 4)
    assert [len(row) for row in completions] == [6, 7, 5, 7, 4, 7, 3, 7]
    for parent, branch in zip(completions[::2], completions[1::2], strict=True):
        assert parent[:2] == branch[:2]
        assert parent[2] != branch[2]
    assert log_probs == [[LOG_PROB * token for token in row] for row in completions]


def test_a_row_that_cannot_be_cut_stands_there_for_its_leaves():
    backend = Backend([2, 6, 1, 0])
    forks, _ = feature()
    completions, _ = forks.completing(rows_of(PROMPTS, 4), 4, backend)
    assert len(backend.calls[1][0]) == 1
    assert [len(row) for row in completions] == [2, 2, 6, 7, 1, 1, 0, 0]
    assert forks.newest.cuts == [[2], [2], [2], [2], [1], [1], [0], [0]]
    assert forks.newest.copies([len(row) for row in completions]) == [False, True, False, False] + [False, True] * 2


def test_a_backend_that_writes_too_much_is_cut_off_and_one_without_log_probs_is_taken():
    forks, _ = feature(max_completion_length=7)
    completions, log_probs = forks.completing(rows_of(PROMPTS, 4), 4, Backend([7, 6, 5, 3, 9, 9, 9, 9], exceeds=True))
    assert [len(row) for row in completions[1::2]] == [7] * 4
    assert [len(row) for row in log_probs] == [len(row) for row in completions]
    forks, _ = feature(max_completion_length=None)

    def generate(prompt_ids, num_generations, limits=None):
        assert limits is None
        return [[1, 2, 3, 4] for _ in prompt_ids], None

    completions, log_probs = forks.completing(rows_of(PROMPTS, 4), 4, generate)
    assert log_probs is None
    assert completions[1] == [1, 2, 1, 2, 3, 4]


@given(
    st.sampled_from([(2, 1), (2, 2), (3, 1), (2, 3)]),
    st.lists(st.integers(0, 12), min_size=64, max_size=64),
    st.floats(0, 12),
)
def test_leaves_are_trees(shape, lengths, mean_length):
    branches, depth = shape
    leaves = branches**depth
    forks, _ = feature(forks=branches, fork_depth=depth)
    forks.mean_length = mean_length
    completions, log_probs = forks.completing(rows_of(PROMPTS, 2 * leaves), 2 * leaves, Backend(lengths))
    assert len(completions) == 4 * leaves
    assert [len(row) for row in log_probs] == [len(row) for row in completions]
    assert max(map(len, completions)) <= 12
    forks.newest.check(2 * leaves)
    copies = forks.newest.copies([len(row) for row in completions])
    for i, (row, cuts) in enumerate(zip(completions, forks.newest.cuts, strict=True)):
        assert cuts == sorted(cuts)
        for level, cut in enumerate(cuts):
            size = branches ** (depth - level)  # rows that are the same up to this cut
            first = i - i % size
            assert all(other[:cut] == row[:cut] for other in completions[first : first + size])
            assert all(other[: level + 1] == cuts[: level + 1] for other in forks.newest.cuts[first : first + size])
            assert cut == len(row) or (cut % 2 == 0 and 0 < cut < len(row))
            if level and cuts[level - 1] < len(row):
                assert cut > cuts[level - 1]
    sampled = [tuple(row) for row, is_copy in zip(completions, copies, strict=True) if not is_copy and row]
    assert len(set(sampled)) == len(sampled)  # the stub never writes a token twice


def test_all_leaves_of_a_parent_share_its_drawn_places():
    forks, _ = feature(fork_depth=2, max_completion_length=40)
    forks.mean_length = 20.0
    forks.completing(rows_of(PROMPTS, 8), 8, Backend([40] * 16))
    for start in range(0, 16, 4):
        assert len({tuple(cuts) for cuts in forks.newest.cuts[start : start + 4]}) == 1
    assert len({tuple(cuts) for cuts in forks.newest.cuts}) > 1


def test_the_next_batch_draws_other_places_within_the_mean_length():
    forks, _ = feature(max_completion_length=400)
    seen = set()
    for _ in range(6):
        with forks.making_batch():
            forks.completing(rows_of(PROMPTS, 4), 4, Backend([100] * 8))
        seen |= {cut for (cut,) in forks.newest.cuts}
    assert forks.mean_length == pytest.approx(100.0)
    with forks.making_batch():  # the rounds of a batch draw within one length
        forks.completing(rows_of(PROMPTS, 4), 4, Backend([10] * 8))
        assert forks.mean_length == pytest.approx(100.0)
    assert forks.mean_length < 100.0
    assert len(seen) > 10
    assert max(seen) <= 102  # the step that the place lies in ends behind it


def test_processes_ask_for_as_many_branches():
    few, most = Backend([6, 1]), Backend([2, 1])
    forks, _ = feature(ranks=2, others=[[2], [9, 9]])
    with forks.making_batch():
        completions, _ = forks.completing(rows_of(PROMPTS[:1], 4), 4, few)
    starts, _, limits = few.calls[1]
    assert len(starts) == len(limits) == 2  # one of which nobody takes
    assert [len(row) for row in completions] == [6, 7, 1, 1]
    assert forks.mean_length == pytest.approx((6 + 1 + 9 + 9) / 4)
    forks, _ = feature(ranks=2, others=[[1]])
    completions, _ = forks.completing(rows_of(PROMPTS[:1], 4), 4, most)
    starts, _, limits = most.calls[1]
    assert (starts, limits) == ([PROMPTS[0] + completions[0][:1]], [11])  # the least to do
    assert [len(row) for row in completions] == [2, 2, 1, 1]


def test_entropy_cuts_behind_the_first_step_above_the_threshold():
    def entropies(prompts, completions):
        assert prompts == rows_of(PROMPTS, 2)
        return [[0.1, 0.1, 0.8, 0.4, 2.0, 2.0][: len(ids)] for ids in completions]

    forks, _ = feature(fork_at="entropy", fork_threshold=0.5, entropies=entropies)
    forks.completing(rows_of(PROMPTS, 4), 4, Backend([6, 4, 5, 2]))
    # the second step's mean is .6; of the row of four tokens it is the last one, and the last row has but one step
    assert forks.newest.cuts == [[4], [4], [4], [4], [4], [4], [2], [2]]
    assert forks.newest.copies([6, 9, 4, 4, 5, 9, 2, 2]) == [False, False, False, True, False, False, False, True]


@pytest.mark.parametrize("conversational", [False, True])
def test_doubt_cuts_behind_the_first_step_that_scores_low(conversational):
    seen = []

    class Scorer:
        def score_batch(self, batch, tool_mask, tokenizer, state):
            seen.append(batch)
            counts = [(len(ids) + 1) // 2 for ids in batch.completion_ids]
            rewards = [[0.9, None, 0.2, 0.1, 0.1][:count] for count in counts]
            return SimpleNamespace(rewards=rewards), {"m": [1.0]}, {"steps": []}

    forks, _ = feature(fork_at="doubt", fork_threshold=0.5, scores=Scorer())
    prompts = [[{"role": "user", "content": c}] if conversational else c for c in "pq"]
    forks.on_rows([{"prompt": p, "answer": i} for i, p in enumerate(prompts) for _ in range(4)])
    completions, _ = forks.completing(rows_of(PROMPTS, 4), 4, Backend([9, 9, 9, 5]))
    assert forks.newest.cuts == [[6]] * 6 + [[5]] * 2
    (batch,) = seen
    assert [row["answer"] for row in batch.inputs] == [0, 0, 1, 1]
    assert batch.completion_ids == [completions[0], completions[2], completions[4], completions[6]]
    text = " ".join(map(str, completions[0]))
    assert batch.completions[0] == ([{"role": "assistant", "content": text}] if conversational else text)


def credited(forks, completions, advantages):
    return SimpleNamespace(
        forks=forks.newest,
        own_rows=slice(0, len(completions)),
        token_advantages=advantages,
        scored=SimpleNamespace(completion_ids=completions),
    )


def test_forks_log_their_share_and_the_weight_behind_cuts():
    forks, metrics = feature()
    completions, _ = forks.completing(rows_of(PROMPTS, 4), 4, Backend([4, 2, 8, 1, 2, 6]))
    assert [len(row) for row in completions] == [4, 4, 2, 2, 8, 8, 1, 1]
    advantages = torch.zeros(8, 8)
    advantages[0, 3] = advantages[4, 0] = 1.0  # behind the cut, and before it
    forks.on_credit(credited(forks, completions, advantages))
    assert metrics["forks/cut_frac"] == [0.5]
    assert metrics["forks/cut_position"] == [pytest.approx((0.5 + 0.5 + 0.25 + 0.25) / 4)]
    assert metrics["forks/sampled_token_frac"] == [(4 + 2 + 8 + 1 + 2 + 6) / 30]
    assert metrics["forks/live_frac"] == [0.25]
    metrics.clear()
    forks.on_credit(credited(forks, completions, advantages))  # an evaluation, say: nothing new
    assert metrics == {}


rows = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(
    lambda lengths: [sum(lengths[: k + 1]) - 1 for k in range(len(lengths))]
)


@given(rows, st.integers(0, 3))
def test_a_boundary_has_tokens_on_both_sides(ends, behind):
    length = ends[-1] + 1 + behind  # an EOS, say, that is in no step
    places = boundaries(ends, length)
    assert places == [end + 1 for end in ends if end != length - 1]
    assert all(0 < place < length for place in places)


@given(st.integers(1, 4), st.floats(0, 100), st.text(max_size=5))
def test_places_are_drawn_in_order_and_the_same_again(depth, length, seed):
    places = drawn_places(seed, depth, length)
    assert places == sorted(places) == drawn_places(seed, depth, length)
    assert len(places) == depth
    assert all(0 <= place <= length for place in places)


def test_places_are_uniform():
    places = [drawn_places(f"{i}", 1, 10.0)[0] for i in range(2000)]
    assert sum(places) / 2000 == pytest.approx(5.0, abs=0.3)
    assert sum(place < 1 for place in places) / 2000 == pytest.approx(0.1, abs=0.03)


@given(rows, st.floats(0, 30), st.integers(0, 20), st.booleans(), st.data())
def test_a_cut_is_decided_by_what_is_before_it(ends, threshold, after, is_drawn, data):
    """Whatever is written behind a cut, it stays where it is, or comes to lie at the row's end and is none."""

    def rule(ends, measures):
        places = boundaries(ends, ends[-1] + 1)
        return first_above(places, places if is_drawn else measures, threshold, after)

    measures = data.draw(st.lists(st.floats(0, 40), min_size=len(ends), max_size=len(ends)))
    cut = rule(ends, measures)
    if cut is None:
        return
    assert cut > after
    known = sum(end < cut for end in ends)
    other_ends = ends[:known] + [cut + k for k in range(data.draw(st.integers(1, 4)))]
    assert rule(other_ends, measures[:known] + [100.0] * (len(other_ends) - known)) == cut


def test_a_step_that_cannot_be_scored_does_not_speak():
    assert first_above([4, 8], [None, 0.9], 0.5, 0) == 8
    assert first_above([4], [float("nan")], 0.5, 0) is None
    assert first_above([4, 8], [0.5, 0.5], 0.5, 0) is None  # more than the threshold, not as much


def test_step_means_leave_out_what_is_behind_the_last_step():
    assert step_means([1.0, 3.0, 5.0, 9.0], [1, 2]) == [2.0, 5.0]
    assert step_means([], []) == []
