"""The page in headless Chromium: no script of a completion runs, nothing is fetched, and everybody can read it."""

import json

import chromium
import pytest
from report_runs import HOSTILE, append_lines, following, write_run_log

pytestmark = pytest.mark.needs_program(chromium.NEEDED, missing=not chromium.is_installed())


ALL = ("one", "three", "hostile", "forked", "short", "empty", "no_log", "plain", "once")


@pytest.mark.parametrize("name", ALL)
def test_no_errors_and_no_requests(browser, pages, opened, name):
    script = opened(name)
    script("document.querySelectorAll('details').forEach(d => { d.open = true; })")  # what is folded is drawn, too
    for axis in ("tokens", "time"):
        script("$('x').value = arguments[0]; $('x').dispatchEvent(new Event('input'))", axis)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert pages[name].as_uri() in urls  # else the log says nothing
    assert {url for url in urls if not url.startswith("data:")} == {pages[name].as_uri()}


def test_hostile_completions_are_text(opened, texts):
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
    assert texts("#completion-text .unseen") == ["U+2028", "U+2029", "U+0000", "U+0007", "U+001B", "U+001B"]
    script("select(3)")
    assert {"U+202E", "U+2066", "U+D800", "U+DFFF"} <= set(texts("#completion-text .unseen"))
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


def test_light_and_dark(opened, press):
    script = opened("one")
    theme = "return [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
    before = script(theme)
    press("t")
    after = script(theme)
    assert {before[0], after[0]} == {"light", "dark"}
    assert before[1] != after[1]
    script("document.getElementById('theme').click()")
    assert script(theme) == before


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["one", "three", "forked", "plain"])
def test_nothing_is_wider_than_the_window(browser, opened, name, width):
    chromium.resize(browser, width, 900)
    script = opened(name)
    script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert script("return innerWidth") == width
    assert script("return document.documentElement.scrollWidth") <= width
    # What is wider than its place can be scrolled there, by keyboard, too.
    cut_off = """return [...document.querySelectorAll('main *')].filter((e) => {
        const { overflowX } = getComputedStyle(e), isScrolled = e.tabIndex >= 0 && overflowX === 'auto';
        return e.clientWidth && e.scrollWidth > e.clientWidth + 1 && overflowX !== 'visible' && !isScrolled
            && !e.closest('.item, .now, .sr, svg');
    }).map((e) => e.outerHTML.slice(0, 100))"""
    assert script(cut_off) == []
    chromium.resize(browser, 1280, 900)


# Every visible text against what lies behind it, composited; WCAG 2.2's relative luminance.
CONTRASTS = """
const parse = (text) => {
  const v = text.match(/[\\d.]+(?:e-?\\d+)?/g).map(Number), s = text.startsWith('color') ? 255 : 1;
  return [v[0] * s, v[1] * s, v[2] * s, v[3] ?? 1];
};
const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
const behind = (e) => {
  const own = parse(getComputedStyle(e).backgroundColor);
  return over(own, own[3] === 1 || !e.parentElement ? [255, 255, 255] : behind(e.parentElement));
};
const linear = (v) => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
const light = (c) => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
const ratio = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05);
};
const found = [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()
  && !e.closest('.skip, .sr, script, option') && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
return found.map((e) => {
  const back = behind(e), style = getComputedStyle(e);
  const ink = e.closest('svg') ? style.fill : style.color;
  return [ratio(over(parse(ink), back), back), e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40)];
});
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["one", "three", "forked"])
def test_every_text_has_enough_contrast(browser, opened, name, dark):
    chromium.resize(browser, 1280, 900, dark=dark)
    script = opened(name)
    script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert script("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
    found = script(CONTRASTS)
    chromium.resize(browser, 1280, 900)
    assert len(found) > 100
    assert [text for contrast, text in found if contrast < 4.5] == []


def test_the_first_screen(browser, opened, texts):
    chromium.resize(browser, 1200, 800)
    script = opened("one")
    assert texts(".tile dt") == ["Pass rate", "Mean length", "Live groups", "Speed", "Warnings"]
    bottom = (
        "return Math.max(...[...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect().bottom))"
    )
    assert script(bottom, ".tile") < 400
    assert script(bottom, "#hero .u-wrap") < 800
    assert script(bottom, "#warnings li") < 800
    assert script("return [...document.querySelectorAll('.folds details')].map(d => d.open)") == [False, False]
    assert script("return document.querySelector('.formula').checkVisibility()") is False
    script("document.querySelector('nav a[href=\"#settings\"]').click()")
    assert script("return document.getElementById('settings-table').checkVisibility()")  # a link unfolds its section
    chromium.resize(browser, 1280, 900)


# A page that follows a run


def test_the_page_grows_with_its_run_and_keeps_its_state(browser, tmp_path, press, texts):
    folder = write_run_log(tmp_path / "run", steps=30, ended=None)
    with following(folder) as server:
        chromium.open_report(browser, server.url + "#x=time&search=carry")
        script = browser.execute_script
        script("document.documentElement.style.overflowAnchor = 'none'")  # which not every browser has
        browser.execute_async_script("askServer().then(arguments[0])")
        assert texts("#live") == ["Live"]  # nothing is new
        press("jj")
        script("document.getElementById('fold-numbers').open = true; document.querySelector('#hero .plot').focus()")
        script("document.querySelector('#completions').scrollIntoView()")
        before = script("return [location.hash, shownEntries[selected].i, scrollY]")
        title = texts("#completion-title")
        line = {"step": 31, "time": None, "mode": "train", "logs": {"drgrpo/pass_rate": 0.123, "reward": 7.5}}
        append_lines(folder / "_drgrpo" / "metrics.jsonl", line)
        browser.execute_async_script("askServer().then(arguments[0])")
        assert texts(".tile .big")[0].endswith("12.3%")
        assert texts("#hero .now b") == ["7.5"]
        assert texts("#live")[0].startswith("Live, as of ")
        assert script("return [location.hash, shownEntries[selected].i, scrollY]") == pytest.approx(before)
        assert texts("#completion-title") == title
        assert script("return document.getElementById('fold-numbers').open")
        assert script("return document.activeElement.dataset.key") == "plot-Reward"
        assert script("return fields.search.value") == "carry"
        assert browser.get_log("browser") == []
        folder.rename(tmp_path / "elsewhere")
        browser.execute_async_script("askServer().then(arguments[0])")
        assert "got nothing there" in texts("#live")[0]
    browser.execute_async_script("askServer().then(arguments[0])")
    assert texts("#live") == ["The server does not answer. What stands here stays."]
    assert texts("#hero .now b") == ["7.5"]
    browser.get("about:blank")  # or it goes on asking
