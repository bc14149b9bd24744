"""A page that follows a run takes over what is new and keeps its place."""

import chromium
import pytest
from report_runs import append_lines, following, write_run_log

pytestmark = pytest.mark.needs_program(chromium.NEEDED, missing=not chromium.is_installed())


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
