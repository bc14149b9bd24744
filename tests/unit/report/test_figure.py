"""The report as a picture, and log histories of trainers as one."""

import pytest

from trl_drgrpo import write_report
from trl_drgrpo.common.drawing import draw_histories, smoothed
from trl_drgrpo.common.errors import InputError


def test_without_matplotlib(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.page.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"trl-drgrpo\[report\]\""):
        write_report(runs, tmp_path / "x.png", "png")
    assert "![" not in write_report(runs, tmp_path / "x.md", "md").read_text()


def test_smoothing_by_hand():
    # 3% of 100 points: decay 1 - 2/4. 1/2 * 1 / (1/2) = 1; (1/2 * 1/2 + 1/2 * 3) / (1/2 * 1/2 + 1/2) = (7/4) / (3/4)
    values = smoothed([1.0, None, 3.0, *[0.0] * 98])
    assert values[0] == pytest.approx(1.0)
    assert values[1] != values[1]
    assert values[2] == pytest.approx(7 / 3)
    assert smoothed([1.0, 5.0] * 14 + [2.0]) == [1.0, 5.0] * 14 + [2.0]  # 29 points


def test_a_panel_per_metric_and_a_line_per_run_that_logged_it():
    histories = {
        "theirs": [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}, {"step": 2, "train_runtime": 9.0}],
        "ours": [{"step": 1, "reward": 0.25, "drgrpo/upstream_token_frac": 0.5}],
    }
    reward, tokens = draw_histories(histories, ["reward", "drgrpo/upstream_token_frac"]).axes
    assert reward.get_legend_handles_labels()[1] == ["theirs", "ours"]
    assert reward.get_lines()[0].get_xydata().tolist() == [[1, 0.25], [2, 0.5]]
    assert tokens.get_title() == "drgrpo/upstream_token_frac"
    assert tokens.get_legend_handles_labels()[1] == ["ours"]
    assert tokens.get_lines()[0].get_color() == reward.get_lines()[-1].get_color()  # a run keeps its color


def test_a_metric_that_no_run_logged_is_an_empty_panel(recwarn):
    [axes] = draw_histories({"run": [{"step": 1, "loss": 0.0}]}, ["reward"]).axes
    assert not axes.get_lines()
    assert axes.get_legend() is None
    assert not recwarn.list
