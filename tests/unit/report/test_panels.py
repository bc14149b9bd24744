"""Panels and their lines."""

from trl_drgrpo.report.panels import other_metrics, panels_for


def test_entropies_over_different_rows_are_different_lines():
    assert [line.label for line in panels_for({"entropy", "entropy/with_signal"})[0].lines] == [
        "all rows",
        "rows with a signal",
    ]


def test_sampling_is_drawn_where_it_was_logged():
    names = {"sampling/draws", "sampling/groups_live", "sampling/keep_probability/0-25", "sampling/capped_frac"}
    panels = panels_for(names)
    assert [(panel.title, [line.label for line in panel.lines]) for panel in panels] == [
        ("Sampled prompts", ["drawn", "live"])
    ]
    assert other_metrics(names, panels) == ["sampling/capped_frac"]
    assert not any("ampl" in panel.title for panel in panels_for({"reward"}))
