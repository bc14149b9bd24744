"""Two runs of three rewards to report on, and a faster way to draw them."""

import pytest
from report_runs import write_run_log

from trl_drgrpo.report.panels import PANELS


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    objective = {"beta": 0.0, "loss_normalizer": 512}
    return [
        write_run_log(folder / "first", steps=40),
        write_run_log(folder / "second", steps=40, seed=1, growth=1.0, objective=objective, ended=None),
    ]


@pytest.fixture
def few_panels(monkeypatch):
    """Drawing eighteen panels takes seconds, and shows no more than three."""
    monkeypatch.setattr("trl_drgrpo.report.panels.PANELS", PANELS[1:4])
