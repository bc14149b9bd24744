"""Log histories of trainers as one figure."""

import pytest

from trl_drgrpo.report.figure import draw_histories

pytest.importorskip("matplotlib")


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
