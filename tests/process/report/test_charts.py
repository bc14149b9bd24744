"""The charts: true values, smoothing, runs and axes, downloads."""

import json
from itertools import pairwise

import chromium
import pytest

pytestmark = pytest.mark.needs_program(chromium.NEEDED, missing=not chromium.is_installed())


PANEL = "charts.find(({ panel }) => panel.title === arguments[0])"


def chosen(script, **values):
    change = "const f = $(arguments[0]); f[f.type === 'checkbox' ? 'checked' : 'value'] = arguments[1];"
    for name, value in values.items():
        script(change + "f.dispatchEvent(new Event('input'))", name, value)


@pytest.mark.parametrize(("name", "first", "last"), [("short", "24.0%", "84.8%"), ("collapsed", "46.0%", "0.9%")])
def test_a_curve_ends_at_its_true_value(opened, texts, name, first, last):
    script = opened(name)
    assert texts(".tile .big")[0].split() == [first, "→", last]
    assert texts("#hero .now b") == [last]
    assert f"last, step {script('return RUNS[0].last_step')}" in texts("#hero .now")[0]
    assert last in script("return document.querySelector('#hero .plot').ariaLabel")
    script("charts[0].chart.setCursor({ left: charts[0].chart.valToPos(4, 'x'), top: 5 })")
    assert texts("#hero .now b") == ["60.0%" if name == "short" else "46.0%"]  # as logged
    assert "at step 4" in texts("#hero .now")[0]


def test_smoothing_is_debiased_grows_with_the_points_and_is_off_below_30(opened):
    script = opened("one")
    smoothed = "return smoothed(arguments[0])"
    assert script(smoothed, [1, 5, 2] * 9 + [1, 9]) == [1, 5, 2] * 9 + [1, 9]  # 29 points
    chosen(script, smoothing=20)
    assert script(smoothed, [1, 5, 2] * 9 + [1, 9]) == [1, 5, 2] * 9 + [1, 9]  # whatever the window
    assert script(smoothed, [1, 5, 2] * 10)[1] != 5
    chosen(script, smoothing=3)
    assert script(smoothed, [3.0] * 100) == pytest.approx([3.0] * 100)
    values = [float(i % 7) for i in range(100)]
    decay, total, expected = 1 - 2 / 4, 0.0, []  # 3% of 100 points
    for n, value in enumerate(values, 1):
        total = decay * total + (1 - decay) * value
        expected.append(total / (1 - decay**n))
    assert script(smoothed, values) == pytest.approx(expected)
    longer = script(smoothed, [values[0], None, *values[1:], *values])
    assert longer[1] is None
    assert abs(longer[3] - values[2]) > abs(expected[2] - values[2]) + 0.1  # 6% of the points


def test_curves_are_drawn_smoothed_and_compared(opened, texts):
    script = opened("two")
    assert script("return charts.length") >= 15
    assert texts("#legend bdi") == ["first", "second"]
    lengths = f"return {PANEL}.chart.data.length"
    assert script(lengths, "Completion length") == 1 + 2 * 4  # correct and incorrect of two runs, raw and smoothed
    chosen(script, smoothing=20)
    reward = "const d = charts[0].chart.data; return [d[1], d[2]]"
    raw, smooth = script(reward)
    roughness = [sum(abs(b - a) for a, b in pairwise(values)) for values in (raw, smooth)]
    assert roughness[1] < roughness[0] / 1.5
    chosen(script, smoothing=0)
    raw, smooth = script(reward)
    assert smooth == pytest.approx(raw)
    pixels = "charts[0].chart.ctx.getImageData(0, 0, 300, 190).data"
    assert script(f"return new Set({pixels}).size") > 10  # something is drawn


def test_a_stack_has_fills_and_no_lines(opened):
    script = opened("one")
    widths = f"return {PANEL}.chart.series.slice(1).map(s => s.width)"
    assert script(widths, "Time per phase") == [0, 0, 0]
    parts, tops = script(f"const p = {PANEL}; return [p.raw.slice(1), p.chart.data.slice(1)]", "Time per phase")
    assert tops[2][0] == pytest.approx(sum(part[0] for part in parts))
    colored = """const { chart } = charts.find(({ panel }) => panel.title === arguments[0]);
        const at = (y) => chart.ctx.getImageData(chart.valToPos(20, 'x', true), chart.valToPos(y, 'y', true), 1, 1);
        return [1, 10, 30].map((y) => String(at(y).data));"""
    generate, train, nothing = script(colored, "Time per phase")
    assert len({generate, train, nothing}) == 3  # both are filled down to the one below


def test_a_run_is_switched_off_in_the_legend_and_the_link_keeps_it(opened, texts, browser):
    script = opened("three")
    shown = "return charts[0].traces.map(({ run }) => RUNS.indexOf(run))"
    assert set(script(shown)) == {0, 1, 2}
    script("document.querySelectorAll('#legend button')[1].click()")
    assert set(script(shown)) == {0, 2}
    pressed = "return [...document.querySelectorAll('#legend button')].map(b => b.ariaPressed)"
    assert script(pressed) == ["true", "false", "true"]
    chosen(script, x="time", log=True)
    script("document.querySelectorAll('#legend button')[2].click()")
    link = script("return location.hash")
    assert link == "#x=time&y=log&hide=1,2"
    browser.refresh()
    script = opened("three", link)
    assert set(script(shown)) == {0}
    assert script("return [$('x').value, $('log').checked]") == ["time", True]
    assert script(f"return {PANEL}.chart.scales.y.distr", "Gradient norm") == 3
    script("document.querySelectorAll('#legend button')[0].click()")  # none is left
    assert script("return charts[0].traces") == []
    assert "no run is shown" in texts("#hero .now")[0]
    assert browser.get_log("browser") == []


def test_the_axis_of_tokens_and_of_time(opened, texts):
    script = opened("one")
    chosen(script, x="tokens")
    assert script("return charts[0].raw[0].slice(0, 2)") == [1e5, 2e5]
    assert "last, 4M tokens" in texts("#hero .now")[0]
    chosen(script, x="time")
    assert script("return charts[0].raw[0].slice(0, 2)") == [0, 20]
    assert "last, 13 min" in texts("#hero .now")[0]
    script = opened("short", "#x=tokens")
    assert script("return [...$('x').options].map(o => o.disabled)") == [False, True, False]
    assert "no run is shown" in texts("#hero .now")[0]


def test_a_chart_downloads_as_csv_and_picture(opened, browser, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    script = opened("two")
    assert script("return csvOf({ title: 'x', lines: [{ label: '=1+1', metrics: ['loss'] }] })").splitlines()[1].split(
        ","
    )[:4] == ["first", "'=1+1", "training", "1"]
    script("document.querySelectorAll('#hero .save').forEach(b => b.click())")
    files = [tmp_path / "reward.csv", tmp_path / "reward.png"]
    WebDriverWait(browser, 30).until(lambda _: all(file.is_file() and file.stat().st_size for file in files))
    rows = [line.split(",") for line in files[0].read_text().splitlines()]
    assert rows[0] == ["run", "line", "from", "step", "tokens", "seconds", "value"]
    logged = dict(zip(*script("return RUNS[0].curves.reward"), strict=True))
    assert {int(r[3]): float(r[6]) for r in rows[1:] if r[:3] == ["first", "Reward", "training"]} == logged
    assert rows[2][4:6] == ["200000", "20"]
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_chart_is_read_with_the_keyboard(opened, press, texts):
    from selenium.webdriver.common.keys import Keys

    script = opened("one")
    assert script(
        "return [...document.querySelectorAll('.plot, .heat-run svg:has(.heat)')].every(e => e.tabIndex === 0)"
    )
    script("document.querySelector('#hero .plot').focus()")
    press(Keys.ARROW_RIGHT * 2)
    assert "at step 2" in texts("#hero .now")[0]
    press(Keys.END)
    assert "at step 40" in texts("#hero .now")[0]
    assert script("return document.activeElement.ariaLabel").startswith("Reward over steps: 0.")
    script(
        "document.querySelector('#difficulty details').open = true; document.querySelector('.heat-run svg').focus()"
    )
    press(Keys.ARROW_LEFT)
    assert texts(".heat-read")[0].startswith("step 39: ")


def test_difficulty_and_differences(opened):
    script = opened("two")
    assert script("return document.querySelectorAll('.heat-run').length") == 2
    assert script("return document.querySelectorAll('rect.heat').length") == 2 * 6 * 40
    script("document.getElementById('only-differences').click()")
    assert (
        script("return [...document.querySelectorAll('#settings-table tbody tr')].filter(r => r.offsetHeight).length")
        == 0
    )


def test_gradient_weight_of_groups_that_are_all_incorrect_is_shown_where_there_is_any(opened):
    script = opened("one")
    names = "return [...gradientWeightBars(%s).querySelectorAll('text:not(.ink)')].map((text) => text.textContent)"
    weight = {"0": 0.75, "0-25": 0.25, "25-50": 0, "50-75": 0, "75-100": 0, "100": 0}
    middle = ["0–25%", "25–50%", "50–75%", "75–100%"]
    assert script(names % json.dumps({"gradient_weight_frac": weight})) == ["none correct", *middle]
    assert script(names % json.dumps({"gradient_weight_frac": {**weight, "0": 0}})) == middle
