"""Differences between runs, as one dictionary."""

from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.reading import read_runs


def test_differences_of_settings_and_numbers(runs):
    contents = report_contents(read_runs(runs))
    rows = {row["name"]: row for row in contents["settings_table"]}
    assert rows["beta"] == {"name": "beta", "part": "objective", "values": [0.001, 0.0], "differs": True}
    assert not rows["loss_normalizer"]["differs"]
    assert rows["epsilon"]["values"] == [0.2, None]
    assert not rows["epsilon"]["differs"]  # not recorded is not another value
    final = {row["name"]: row for row in contents["final_table"]}
    first, second = final["Completion length, incorrect"]["last"]
    assert second > first + 100
