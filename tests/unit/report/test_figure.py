"""The report as a picture, and log histories of trainers as one."""

import pytest

from trl_drgrpo import write_report
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.figure import smoothed


def test_without_matplotlib(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.figure.find_spec", lambda name: None)
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
