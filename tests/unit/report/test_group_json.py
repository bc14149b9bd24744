"""A group as JSON, and a forked one as a tree."""

import copy

import pytest
from report_runs import forked_line

from trl_drgrpo.report.completions import group_of
from trl_drgrpo.report.groups import fork_tree, group_json, shortened


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


def test_a_parent_that_was_never_cut_stands_there_once():
    line = forked_line(3)
    for row in line["rows"][4:]:
        row["spans"] = [{"text": "10", "advantage": -0.75, "level": 0}]
    assert outline(fork_tree(group_of(line)))[1] == ((4, 8), 0.25, [-0.75, -0.75], [])


def test_steps_have_advantages_of_their_own():
    line = forked_line(3)
    for row in line["rows"][:4]:
        row["spans"].insert(0, {"text": "0+", "advantage": -0.25, "level": 0})
    assert fork_tree(group_of(line))[0]["advantages"] == [-0.25, 0.5]


def test_the_text_is_of_a_row_that_is_trained_on():
    line = forked_line(3)
    for span in line["rows"][0]["spans"]:  # cut off at the limit and masked
        span |= {"masked": True, "advantage": 0.0}
    parent = fork_tree(group_of(line))[0]
    assert (parent["shown"], parent["advantages"]) == (1, [0.5, 0.5])
    assert parent["branches"][0]["branches"][0]["advantages"] == []


def test_rewards_that_failed_are_left_out_of_the_mean():
    line = forked_line(3)
    for row in line["rows"][1:4]:
        row["reward"] = None
    parent, _ = fork_tree(group_of(line))
    assert parent["reward"] == 1.0
    assert parent["branches"][1]["reward"] is None


def test_a_long_branch_keeps_its_place_in_the_tree():
    group = group_of(forked_line(3, text="x" * 500))
    assert outline(fork_tree(shortened(group, 40))) == outline(fork_tree(group))
    left_out = shortened(group, 40).rows[7].spans
    assert [span.level for span in left_out if span.text == " [...] "] == [2]


@pytest.mark.parametrize("forks", [None, 2, [], [2, 1], [2, "2"], [True, 2], [3], [2, 2, 2, 2]])
def test_what_says_no_tree_is_shown_flat(forks):
    line = copy.deepcopy(forked_line(3, forks=forks))
    if forks is None:
        del line["forks"]  # as runs of 0.1 and 0.2 have it
    assert "tree" not in group_json(group_of(line))
    assert len(group_json(group_of(line))["rows"]) == 8


def test_defaults_of_spans_are_left_out():
    group = group_of({"step": 1, "rows": [{"spans": [{"text": "a", "advantage": 1 / 3, "masked": False}]}]})
    assert group_json(group)["rows"][0]["spans"] == [{"text": "a", "advantage": 0.333333}]
