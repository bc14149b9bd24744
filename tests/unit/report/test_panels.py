"""Panels and their lines."""

from trl_drgrpo.report.panels import other_metrics, panels_for


def test_weights_of_a_correction_are_drawn_by_length_and_by_correctness():
    names = [f"sampling/weight_{of}_mean" for of in ("q1", "q2", "q3", "q4", "correct", "incorrect")]
    by_length, by_correctness = panels_for(set(names))
    assert [line.metrics[0] for line in (*by_length.lines, *by_correctness.lines)] == names
    assert [line.role for line in by_correctness.lines] == ["correct", "incorrect"]


def test_forks_are_drawn_where_they_were_logged():
    names = {f"forks/{name}" for name in ("cut_frac", "cut_position", "sampled_token_frac", "live_frac")}
    panels = panels_for(names)
    assert [panel.title for panel in panels] == ["Forks", "First fork", "Sampled tokens"]
    assert all(panel.share for panel in panels)
    assert other_metrics(names, panels) == []
    assert not any("ork" in panel.title for panel in panels_for({"reward"}))


def test_sampling_is_drawn_where_it_was_logged():
    names = {"sampling/draws", "sampling/groups_live", "sampling/keep_probability/0-25", "sampling/capped_frac"}
    panels = panels_for(names)
    assert [(panel.title, [line.label for line in panel.lines]) for panel in panels] == [
        ("Sampled prompts", ["drawn", "live"])
    ]
    assert other_metrics(names, panels) == ["sampling/capped_frac"]
    assert not any("ampl" in panel.title for panel in panels_for({"reward"}))


def test_steps_and_outcome_of_one_environment_have_two_titles():
    panels = panels_for({"rewards/Walk/mean", "rewards/f/mean", "process_rewards/Walk/mean"})
    assert [(panel.title, panel.unit) for panel in panels] == [
        ("Walk, steps", "mean step reward"),
        ("Walk", "mean reward"),
        ("f", "mean reward"),
    ]
