"""Differences between runs, as one dictionary."""

from trl_drgrpo.report.contents import difficulty, report_contents
from trl_drgrpo.report.curves import Curve
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


def test_what_the_curriculum_keeps_is_part_of_the_difficulty():
    curves = {
        "difficulty/groups_frac/0-25": Curve([1, 2], [1.0, 1.0]),
        "sampling/keep_probability/0-25": Curve([1, 2], [0.2, 0.4]),
    }
    kept = difficulty(curves)["keep_probability"]
    assert kept == {"0": None, "0-25": 0.3, "25-50": None, "50-75": None, "75-100": None, "100": None}
    del curves["sampling/keep_probability/0-25"]
    assert difficulty(curves)["keep_probability"] == {}
