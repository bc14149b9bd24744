"""Panels and their lines."""

from trl_drgrpo.report.panels import panels_for


def test_entropies_over_different_rows_are_different_lines():
    assert [line.label for line in panels_for({"entropy", "entropy/with_signal"})[0].lines] == [
        "all rows",
        "rows with a signal",
    ]
