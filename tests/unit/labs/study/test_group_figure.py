"""The drawing of example groups, and the one with sliders, without a front end."""

import pytest

from trl_drgrpo.labs.study.group import ExampleGroup
from trl_drgrpo.labs.study.group_figure import draw_groups, show_group_widget

pytest.importorskip("matplotlib")


def test_the_drawing_shows_the_numbers():
    group = ExampleGroup(right=1, length_right=20, length_wrong=60)
    lengths, weights, pulls = draw_groups([group], ["grpo"]).axes
    assert [bar.get_height() for bar in lengths.patches] == group.lengths.tolist()
    assert weights.collections[1].get_offsets()[:, 1].tolist() == pytest.approx(group.token_weights("grpo").tolist())
    assert pulls.collections[1].get_offsets()[:, 1].tolist() == pytest.approx(group.pulls("grpo").tolist())


def test_the_sliders_are_shown_below_a_cell(monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []
    monkeypatch.setattr(display, "display", shown.append)
    show_group_widget([1, 0], [10, 30])
    assert "mountGroupWidget" in shown[0]._repr_html_()
