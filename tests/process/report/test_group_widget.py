"""The sliders of a group: their numbers are Python's, in the report and in a snippet."""

import chromium
import numpy as np
import pytest
from figures import relative_token_weights

from trl_drgrpo.check.bias import OBJECTIVES
from trl_drgrpo.report.groups import group_widget_html

pytestmark = pytest.mark.needs_program(chromium.NEEDED, missing=not chromium.is_installed())
COMPARED = ("grpo", "dapo", "dr_grpo")
GROUPS = (
    ([1, 1, 0, 0, 0, 0, 0, 0], [60, 140, 60, 100, 140, 220, 300, 400]),
    ([1, 0], [10, 30]),
    ([0.1, 1.1, 0.6, 1.1, 0.0], [5, 7, 1, 300, 20]),
    ([1, 1, 1], [5, 6, 7]),
)


@pytest.mark.parametrize(("rewards", "lengths"), GROUPS)
def test_the_numbers_are_those_of_the_objectives(opened, rewards, lengths):
    found = opened("one")("return groupWeights(arguments[0], arguments[1])", rewards, lengths)
    rewards, lengths = np.array(rewards, dtype=float), np.array(lengths, dtype=float)
    for name in COMPARED:
        weights = relative_token_weights(name, rewards, lengths)
        assert found[name]["advantages"] == pytest.approx(OBJECTIVES[name].advantages(rewards, len(rewards)))
        assert found[name]["weights"] == pytest.approx(weights)
        assert found[name]["pulls"] == pytest.approx(weights * lengths / lengths.mean())


def test_the_report_sets_the_sliders_to_the_group_that_is_shown(opened, texts):
    script = opened("one")
    assert script("return widget") is None  # nothing is drawn while it is folded
    script("document.querySelector('a[href=\"#widget\"]').click()")
    script("return new Promise((done) => setTimeout(done, 50))")
    group = script("return shownEntries[selected].group")
    shown = [row["length"] for row in group["rows"]]
    assert script("return widget.values().lengths") == shown
    assert texts("#widget-of")[0].startswith(f"Set to step {group['step']}, group 1.")
    script("selectGroup(1)")
    assert script("return widget.values().lengths") != shown
    script("const s = document.querySelector('.gw-length'); s.value = 1; s.dispatchEvent(new Event('input'))")
    assert script("return widget.values().lengths[0]") == 1
    weights = script("return widget.values().grpo.weights")
    assert texts(".gw-number[data-objective=grpo]")[0] == f"{weights[0]:+.2f}".replace("-", "−")
    script("drawCompletions()")  # as news of a run that is followed do
    assert script("return widget.values().lengths[0]") == 1


def test_the_snippet_stands_twice_in_one_page(browser, tmp_path, texts):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><meta charset=utf-8>" + group_widget_html() + group_widget_html([1, 0], [10, 30]))
    browser.get(page.as_uri())
    assert len(texts(".group-widget:first-of-type .gw-row")) == 8
    assert texts(".group-widget:nth-of-type(2) .gw-number") == ["+2.00", "+1.00", "+1.00", "−0.67", "−1.00", "−1.00"]
    script = browser.execute_script
    assert script("return document.querySelector('.gw-bars').ariaLabel").startswith("GRPO +5.12, DAPO")
    script("document.querySelectorAll('.group-widget:nth-of-type(2) button')[2].click()")
    assert texts(".group-widget:nth-of-type(2) .gw-number")[:3] == ["+0.71", "+0.71", "+0.50"]
    last = "const s = document.querySelectorAll('.group-widget:nth-of-type(2) .gw-reward')[1];"
    script(last + "s.value = 1; s.dispatchEvent(new Event('input'))")
    assert "All rewards are equal" in texts(".group-widget:nth-of-type(2) .gw-hint")[0]
    assert texts(".group-widget:nth-of-type(2) .gw-said") == ["correct", "correct"]
