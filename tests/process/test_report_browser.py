"""The page in headless Chromium: no script of a completion runs, nothing is fetched, keys and filters work."""

import json
import shutil
from itertools import pairwise

import pytest
from report_runs import HOSTILE, write_forked, write_hostile, write_run_log

from trl_drgrpo.report import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.needs_program(
    "chromium and chromedriver (Debian: apt-get install chromium-driver)", missing=not (CHROMIUM and DRIVER)
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium (the extra dev)")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_run_log(folder / "first", steps=40, groups_per_step=2)
    second = write_run_log(folder / "second", steps=40, seed=1, growth=1.0)
    return {
        "one": write_report(first),
        "two": write_report([first, second], folder / "two.html"),
        "hostile": write_report(write_hostile(folder / "hostile")),
        "forked": write_report(write_forked(folder / "forked", "x" * 5000)),
    }


@pytest.fixture
def opened(browser, pages):
    from selenium.webdriver.support.ui import WebDriverWait

    def open_page(name):
        browser.get("about:blank")  # what the browser's own start page loads is not ours
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(pages[name].as_uri())
        ready = "return document.documentElement.dataset.ready"
        WebDriverWait(browser, 30).until(lambda _: script(ready) == "yes")  # a loaded machine takes its time
        return script

    script = browser.execute_script
    return open_page


def press(browser, keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(keys).perform()


def texts(script, selector):
    return script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)


@pytest.mark.parametrize("name", ["one", "two", "hostile", "forked"])
def test_no_errors_and_no_requests(browser, pages, opened, name):
    opened(name)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert pages[name].as_uri() in urls  # else the log says nothing
    assert {url for url in urls if not url.startswith("data:")} == {pages[name].as_uri()}


def test_hostile_completions_are_text(browser, opened):
    script = opened("hostile")
    for position, hostile in enumerate(HOSTILE):
        script("select(arguments[0])", position)
        shown = script("return document.getElementById('completion-text').textContent")
        assert hostile.split("\u2028")[0].split("\u202e")[0][:60] in shown
    assert script("return window.__hacked") is None
    assert (
        script("return document.images.length + document.querySelectorAll('iframe, object, main script').length") == 0
    )
    script("select(2)")
    assert texts(script, "#completion-text .unseen") == ["U+2028", "U+2029", "U+0000", "U+0007", "U+001B", "U+001B"]
    script("select(3)")
    assert {"U+202E", "U+2066", "U+D800", "U+DFFF"} <= set(texts(script, "#completion-text .unseen"))
    assert "\u202e" not in script(
        "return document.body.textContent.replace(document.getElementById('data').textContent, '')"
    )


def test_scripts_that_get_in_do_not_run(opened):
    script = opened("one")
    script(
        "const s = document.createElement('script'); s.textContent = 'window.__hacked = 1'; document.body.append(s)"
    )
    script("const d = document.createElement('div'); d.innerHTML = '<img src=x onerror=\"window.__hacked=2\">';"
           "document.body.append(d)")  # fmt: skip
    assert script("return window.__hacked") is None


def test_an_enormous_completion_is_folded(opened):
    script = opened("hostile")
    script("select(4)")
    height = "return document.getElementById('completion-text').clientHeight"
    folded = script(height)
    assert folded < 400
    assert "characters of the middle are left out" in script("return document.getElementById('detail').textContent")
    script("document.querySelector('#detail button[aria-expanded]').click()")
    assert script(height) > 3 * folded


def test_the_keys(browser, opened):
    script = opened("one")
    item = "return document.querySelector('.item[aria-selected=true]').getAttribute('aria-posinset')"
    assert script(item) == "1"
    press(browser, "jjj")
    assert script(item) == "4"
    assert texts(script, "#completion-title")[0].startswith("Completion 4 of 8")
    press(browser, "k")
    assert script(item) == "3"
    press(browser, "n")
    assert script(item) == "9"
    press(browser, "p")
    assert script(item) == "1"
    press(browser, "k")
    assert script(item) == "1"  # there is none before the first
    press(browser, "/")
    press(browser, "jt")  # typed into the search, not taken as keys
    assert script("return document.getElementById('search').value") == "jt"


def test_light_and_dark(browser, opened):
    script = opened("one")
    theme = "return [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
    before = script(theme)
    press(browser, "t")
    after = script(theme)
    assert {before[0], after[0]} == {"light", "dark"}
    assert before[1] != after[1]
    script("document.getElementById('theme').click()")
    assert script(theme) == before


def test_the_filters(opened, pages):
    script = opened("one")
    count = "return document.getElementById('shown-count').textContent"
    assert script(count) == "64 of 64 completions"
    choose = "const f = fields[arguments[0]]; f.value = arguments[1]; f.dispatchEvent(new Event('input'))"
    rows = [row for group in script("return DATA.runs[0].groups") for row in group["rows"]]
    script(choose, "verdict", "true")
    assert script(count) == f"{sum(row['right'] for row in rows)} of 64 completions"
    script(choose, "verdict", "")
    script(choose, "from", "20")
    script(choose, "to", "30")
    assert script(count) == "32 of 64 completions"
    script(choose, "from", "")
    script(choose, "to", "")
    wanted = rows[5]["spans"][1]["text"].strip()
    matching = sum(wanted in "".join(span["text"] for span in row["spans"]) for row in rows)
    script(choose, "search", wanted.upper())
    assert script(count) == f"{matching} of 64 completions"
    assert 0 < matching < 64
    assert script("return CSS.highlights.get('found') !== undefined")
    script(choose, "search", "no completion says this")
    assert "No completion matches" in script("return document.getElementById('detail').textContent")


def test_the_group_view_shows_the_recorded_numbers(opened):
    script = opened("one")
    group = script("return entries[0].group")
    shown = {name: texts(script, f"[data-is={name}]") for name in ("reward", "advantage", "zscore")}
    for row, reward, advantage, zscore in zip(group["rows"], *shown.values(), strict=True):
        assert float(reward) == pytest.approx(row["reward"], rel=1e-2)
        assert float(advantage.replace("−", "-")) == pytest.approx(row["advantage"], rel=1e-2)
        assert float(zscore.replace("−", "-")) == pytest.approx(row["zscore"], rel=1e-2)
    assert f"group mean {group['baseline']:.3g}" in texts(script, ".group thead")[0]
    script("document.querySelectorAll('.group tbody tr')[5].click()")
    assert texts(script, "#completion-title")[0].startswith("Completion 6 of 8")


def test_steps_are_marked_and_tokens_colored(opened):
    script = opened("one")
    row = script("return entries[selected].row")
    marks = texts(script, ".stepmark")
    assert len(marks) == len(row["spans"])
    assert marks[0] == f"1 · {row['spans'][0]['step_reward']:g}"
    signs = script("return [...document.querySelectorAll('.tok')].map(e => e.classList.contains('pos'))")
    assert signs == [span["advantage"] > 0 for span in row["spans"]]


def test_a_group_without_a_signal_has_no_scale(opened):
    script = opened("one")
    assert len(texts(script, ".detail .scale")) == 1
    script("entries[0].group.rows.forEach((row) => row.spans.forEach((span) => { span.advantage = 0; })); select(0)")
    assert texts(script, ".detail .scale") == []


def test_a_forked_group_is_a_tree(browser, opened):
    script = opened("forked")
    heads = texts(script, ".tree > li > .chips, .tree ul > li > .chips")
    assert [head.split("length")[0] for head in heads[:5]] == [
        "Parent 1mean reward 0.75advantage +0.5",
        "Branch 1.1mean reward 0.5advantage −0.5",
        "Completion 1✓ correctreward 1advantage +1",
        "Completion 2✗ incorrectreward 0advantage −1",
        "Branch 1.2reward 1advantage +0.5",
    ]
    assert len(heads) == 12  # each stretch once, of 8 completions with 20
    assert "Completion 5✗ incorrectnot cut (× 2)reward 0advantage −0.5length 8 tokens" in heads
    assert script("return document.querySelectorAll('.tree > li > ul > li > ul > li').length") == 6
    boxes = texts(script, ".tree .text-box")
    assert [boxes.count(text) for text in ("2+3=5\n", "so 5+4=9\n", "10")] == [1, 1, 2]
    signs = script("return [...document.querySelectorAll('.tree .tok')].slice(0, 4).map(e => e.className)")
    assert signs == ["tok pos", "tok neg", "tok pos", "tok neg"]
    assert texts(script, ".tree button[aria-expanded]") == ["Show all of the stretch"]  # five thousand characters
    assert browser.get_log("browser") == []


def test_a_completion_of_the_tree_is_chosen_with_the_keyboard(browser, opened):
    from selenium.webdriver.common.keys import Keys

    script = opened("forked")
    current = "return [...document.querySelectorAll('.tree [aria-current=true]')].map(e => e.ariaLabel)"
    assert script(current) == ["completion 1 of 8"]
    press(browser, "jj")
    assert script(current) == ["completion 3 of 8"]
    press(browser, "jjj")
    assert script(current) == ["completion 5 of 8"]  # the sixth is the same
    script("document.querySelectorAll('.tree button')[1].focus()")
    press(browser, Keys.ENTER)
    assert script(current) == ["completion 2 of 8"]
    assert script("return document.activeElement.ariaLabel") == "completion 2 of 8"
    assert texts(script, ".tree li.current > .chips > b:first-child") == ["Parent 1", "Branch 1.1"]
    assert script("return document.querySelector('.tree').ariaLabel") == "Completions as a tree"


def test_a_forked_group_is_flat_after_one_click(browser, opened):
    script = opened("forked")
    pressed = "return [...document.querySelectorAll('.views button')].map(e => [e.textContent, e.ariaPressed])"
    assert script(pressed) == [["Tree", "true"], ["Table", "false"]]
    script("const b = document.querySelectorAll('.views button')[1]; b.focus(); b.click()")
    assert script(pressed) == [["Tree", "false"], ["Table", "true"]]
    assert script("return document.activeElement.textContent") == "Table"
    assert texts(script, "#completion-text") == ["2+3=5\nso 5+4=9\n9"]
    assert script("return document.querySelectorAll('.group tbody tr').length") == 8
    press(browser, "n")  # the group before does not fork
    assert not texts(script, ".views, .tree")
    press(browser, "p")
    assert script(pressed)[1] == ["Table", "true"]


def test_curves_are_drawn_smoothed_and_compared(opened):
    script = opened("two")
    assert script("return charts.length") >= 15
    assert texts(script, "#legend bdi") == ["first", "second"]
    lengths = "return charts[2].chart.data.length"
    assert script(lengths) == 1 + 2 * 4  # correct and incorrect of two runs, each raw and smoothed
    reward = "const d = charts[0].chart.data; return [d[1], d[2]]"
    raw, smooth = script(reward)
    roughness = [sum(abs(b - a) for a, b in pairwise(values)) for values in (raw, smooth)]
    assert roughness[1] < roughness[0] / 1.5
    script("const s = document.getElementById('smoothing'); s.value = 0; s.dispatchEvent(new Event('input'))")
    raw, smooth = script(reward)
    assert smooth == pytest.approx(raw)
    pixels = "charts[0].chart.ctx.getImageData(0, 0, 300, 190).data"
    assert script(f"return new Set({pixels}).size") > 10  # something is drawn


def test_gradient_weight_of_groups_that_are_all_incorrect_is_shown_where_there_is_any(opened):
    script = opened("one")
    names = "return [...gradientWeightBars(%s).querySelectorAll('text:not(.ink)')].map((text) => text.textContent)"
    weight = {"0": 0.75, "0-25": 0.25, "25-50": 0, "50-75": 0, "75-100": 0, "100": 0}
    middle = ["0–25%", "25–50%", "50–75%", "75–100%"]
    assert script(names % json.dumps({"gradient_weight_frac": weight})) == ["none correct", *middle]
    assert script(names % json.dumps({"gradient_weight_frac": {**weight, "0": 0}})) == middle


def test_difficulty_and_differences(opened):
    script = opened("two")
    assert script("return document.querySelectorAll('.heat-run').length") == 2
    assert script("return document.querySelectorAll('rect.heat').length") == 2 * 6 * 40
    script("document.getElementById('only-differences').click()")
    assert (
        script("return [...document.querySelectorAll('#settings-table tbody tr')].filter(r => r.offsetHeight).length")
        == 0
    )


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["two", "forked"])
def test_nothing_is_wider_than_the_window(browser, opened, name, width):
    browser.set_window_size(width, 900)
    script = opened(name)
    assert script("return innerWidth") == width
    assert script("return document.documentElement.scrollWidth") <= width
    browser.set_window_size(1280, 900)
