import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.forks import boundaries, cut_behind, drawn_places, first_above, step_means

rows = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(
    lambda lengths: [sum(lengths[: k + 1]) - 1 for k in range(len(lengths))]
)


@given(rows, st.integers(0, 3))
def test_a_boundary_has_tokens_on_both_sides(ends, behind):
    length = ends[-1] + 1 + behind  # an EOS, say, that is in no step
    places = boundaries(ends, length)
    assert places == [end + 1 for end in ends if end != length - 1]
    assert all(0 < place < length for place in places)


def test_a_row_without_steps_has_no_boundary():
    assert boundaries([], 0) == boundaries([2], 3) == []


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


@given(rows, st.floats(0, 30), st.integers(0, 20), st.data())
def test_a_cut_is_decided_by_what_is_before_it(ends, at, after, data):
    """Whatever is written behind a cut, it stays where it is, or comes to lie at the row's end and is none."""
    measures = data.draw(st.lists(st.floats(0, 1), min_size=len(ends), max_size=len(ends)))
    for rule in (
        lambda places, measures: cut_behind(places, at, after),
        lambda places, measures: first_above(places, measures[: len(places)], 0.5, after),
    ):
        cut = rule(boundaries(ends, ends[-1] + 1), measures)
        if cut is None:
            continue
        assert cut > after
        known = sum(end < cut for end in ends)
        other_ends = ends[:known] + [cut + k for k in range(data.draw(st.integers(1, 4)))]
        other_measures = measures[:known] + [1.0] * (len(other_ends) - known)
        assert rule(boundaries(other_ends, other_ends[-1] + 1), other_measures) == cut


def test_a_step_that_cannot_be_scored_does_not_speak():
    assert first_above([4, 8], [None, 0.9], 0.5, 0) == 8
    assert first_above([4], [float("nan")], 0.5, 0) is None
    assert first_above([4, 8], [0.5, 0.5], 0.5, 0) is None  # more than the threshold, not as much


def test_step_means_leave_out_what_is_behind_the_last_step():
    assert step_means([1.0, 3.0, 5.0, 9.0], [1, 2]) == [2.0, 5.0]
    assert step_means([], []) == []
