"""Which completions a small report shows of a large run; a group as JSON, as a tree, and under sliders."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import forked_line, group_line

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.groups import (
    TEXT_LIMITS,
    fork_tree,
    group_json,
    group_widget_html,
    sample_groups,
    shortened,
    spread,
)
from trl_drgrpo.report.page import embedded
from trl_drgrpo.report.records import group_of


class InMemory(list):
    """Completions that need no file."""

    load = list.__getitem__

    def looked_at(self):
        return reversed(list(enumerate(self)))


def groups_of(count, text_length=100):
    rng = random.Random(0)
    return [group_of(group_line(rng, step, 0, g=2, text_length=text_length)) for step in range(count)]


def size(groups):
    return len(embedded([group_json(group) for group in groups]).encode())


def test_everything_is_shown_where_it_fits_and_at_most_max_groups():
    assert steps_of(groups_of(10), 10_000_000) == list(range(10))
    assert steps_of(groups_of(50), 10_000_000, max_groups=1) == [49]
    assert steps_of(groups_of(50), 10_000_000, max_groups=0) == []
    assert sample_groups(None, 1000)[0] == []


def steps_of(groups, *limits, **more):
    return [group.step for group in sample_groups(InMemory(groups), *limits, **more)[0]]


def test_the_newest_the_spread_and_the_extremes():
    groups = groups_of(500)
    groups[137].rows[0].spans[0].advantage = -50.0
    groups[211].rows[1].reward = None
    groups[288].rows[0].length = 9999
    budget = sum(len(embedded(group_json(group))) for group in groups) // 5
    sample, _ = sample_groups(InMemory(groups), budget)
    steps = [group.step for group in sample]
    assert size(sample) <= budget * 1.01  # the commas between the groups
    assert {497, 498, 499} <= set(steps)
    assert {137, 211, 288} <= set(steps)
    assert all(any(start <= step < start + 50 for step in steps) for start in range(0, 500, 50))
    assert steps == sorted(steps)


def test_long_texts_lose_their_middle_when_too_few_groups_fit():
    sample, limit = sample_groups(InMemory(groups_of(70, text_length=6_000)), budget=500_000)
    assert limit < TEXT_LIMITS[0]
    assert len(sample) >= 40
    assert all(row.cut > 0 and len(row.text) <= limit + 10 for g in sample for row in g.rows)
    assert size(sample) <= 505_000


def test_one_enormous_completion_does_not_push_the_others_out():
    groups = groups_of(30)
    groups[29].rows[0].spans[0].text = "x" * 5_000_000
    sample, _ = sample_groups(InMemory(groups), budget=400_000)
    assert len(sample) == 30
    assert sample[29].rows[0].cut > 4_900_000


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.integers(4, 60))
def test_shortening_keeps_start_and_end(texts, limit):
    spans = [{"text": text, "advantage": float(i)} for i, text in enumerate(texts)]
    group = group_of({"step": 1, "prompt": "p", "rows": [{"spans": spans, "reward": 1.0}]})
    before = group.rows[0].text
    row = shortened(group, limit).rows[0]
    assert group.rows[0].text == before  # not changed in place
    if len(before) <= limit:
        assert row.text == before
        return
    head = limit * 3 // 4
    assert row.text == before[:head] + " [...] " + before[len(before) - (limit - head) :]
    assert row.cut == len(before) - limit
    kept = [span for span in row.spans if not span.masked]
    assert all(span.text in texts[int(span.advantage)] for span in kept)  # every part keeps its own advantage


@given(st.integers(0, 200), st.integers(4, 20))
def test_the_spread_is_a_permutation_of_which_every_prefix_is_even(count, taken):
    assert sorted(spread(range(count))) == list(range(count))
    chosen = sorted(spread(range(count))[:taken])
    gaps = [b - a for a, b in zip([0, *chosen], [*chosen, count], strict=True)]
    assert max(gaps) <= 4 * count / taken + 1


def outline(nodes):
    """Rows, reward and advantages of each node, and its branches."""
    return [(tuple(n["rows"]), n["reward"], n["advantages"], outline(n["branches"])) for n in nodes]


def test_every_stretch_is_in_the_tree_once():
    group = group_of(forked_line(3))
    first, second = outline(fork_tree(group))
    leaf = [((0, 1), 1.0, [1.0, 1.0], []), ((1, 2), 0.0, [-1.0, -1.0], [])]
    assert first[:3] == ((0, 4), 0.75, [0.5, 0.5])
    assert first[3][0] == ((0, 2), 0.5, [-0.5, -0.5], leaf)
    assert [node[0] for node in first[3][1][3]] == [(2, 3), (3, 4)]
    not_cut, cut = second[3]
    assert not_cut == ((4, 6), 0.0, [-0.5, -0.5], [])
    assert [node[0] for node in cut[3]] == [(6, 7), (7, 8)]


def changed(first, end, change):
    """The forked line with some of its rows changed."""
    line = forked_line(3)
    for row in line["rows"][first:end]:
        change(row)
    return fork_tree(group_of(line))


def test_steps_masks_and_failures_in_a_tree():
    step = {"text": "0+", "advantage": -0.25, "level": 0}
    assert changed(0, 4, lambda row: row["spans"].insert(0, step))[0]["advantages"] == [-0.25, 0.5]
    # Cut off at the limit and masked: the text is of a row that is trained on.
    parent = changed(0, 1, lambda row: [span.update(masked=True, advantage=0.0) for span in row["spans"]])[0]
    assert (parent["shown"], parent["advantages"]) == (1, [0.5, 0.5])
    assert parent["branches"][0]["branches"][0]["advantages"] == []
    # Rewards that failed are left out of the mean.
    parent = changed(1, 4, lambda row: row.update(reward=None))[0]
    assert (parent["reward"], parent["branches"][1]["reward"]) == (1.0, None)
    # A parent that was never cut stands there once.
    uncut = {"text": "10", "advantage": -0.75, "level": 0}
    assert outline(changed(4, 8, lambda row: row.update(spans=[uncut])))[1] == ((4, 8), 0.25, [-0.75, -0.75], [])


def test_a_long_branch_keeps_its_place_in_the_tree():
    group = group_of(forked_line(3, text="x" * 500))
    assert outline(fork_tree(shortened(group, 40))) == outline(fork_tree(group))
    left_out = shortened(group, 40).rows[7].spans
    assert [span.level for span in left_out if span.text == " [...] "] == [2]


@pytest.mark.parametrize("forks", [None, 2, [], [2, 1], [2, "2"], [True, 2], [3], [2, 2, 2, 2]])
def test_groups_without_a_tree_are_shown_flat(forks):
    line = copy.deepcopy(forked_line(3, forks=forks))
    if forks is None:
        del line["forks"]  # as runs of 0.1 and 0.2 have it
    assert "tree" not in group_json(group_of(line))
    assert len(group_json(group_of(line))["rows"]) == 8


def test_defaults_of_spans_are_left_out():
    group = group_of({"step": 1, "rows": [{"spans": [{"text": "a", "advantage": 1 / 3, "masked": False}]}]})
    assert group_json(group)["rows"][0]["spans"] == [{"text": "a", "advantage": 0.333333}]


def test_the_snippet_holds_all_it_needs():
    html = group_widget_html([1, 0, 0.5], [10, 300, 20])
    assert html.count("<script>") == html.count("</script>") == 1
    assert "{&quot;rewards&quot;: [1.0, 0.0, 0.5], &quot;lengths&quot;: [10, 300, 20]}" in html
    assert "src=" not in html
    assert "@import" not in html


@pytest.mark.parametrize(("rewards", "lengths"), [([1, 0], None), ([1], [3]), ([1, 0], [3, 0]), ([1, 0], [1, 2, 3])])
def test_half_a_group(rewards, lengths):
    with pytest.raises(InputError, match=r"rewards, lengths: got \d rewards and \d lengths"):
        group_widget_html(rewards, lengths)
