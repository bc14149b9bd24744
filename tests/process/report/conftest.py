"""One browser for all tests of the report's page, and the pages that they open."""

import chromium
import pytest
from report_runs import write_curve, write_forked, write_hostile, write_run_log
from runs import write_lines

from trl_drgrpo.report import write_report


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    if not chromium.is_installed():
        pytest.skip(f"needs {chromium.NEEDED}")
    pytest.importorskip("selenium.webdriver", reason="needs selenium (the extra dev)")
    driver = chromium.start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="package")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = write_run_log(folder / "first", steps=40, groups_per_step=2)
    second = write_run_log(folder / "second", steps=40, seed=1, growth=1.0)
    third = write_run_log(folder / f"third_{'with_a_long_name_' * 4}", steps=30, seed=2, ended=None)
    found = {
        "one": write_report(first),
        "two": write_report([first, second], folder / "two.html"),
        "three": write_report([first, second, third], folder / "three.html"),
        "hostile": write_report(write_hostile(folder / "hostile")),
        "forked": write_report(write_forked(folder / "forked", "x" * 5000)),
        "short": write_report(write_curve(folder / "short", [0.24, *[0.6] * 20, 0.7, 0.848])),
        "collapsed": write_report(write_curve(folder / "collapsed", [*[0.46] * 195, 0.4, 0.2, 0.1, 0.05, 0.009])),
    }
    return found | {name: write_report(run) for name, run in _odd_runs(folder).items()}


def _odd_runs(folder):
    """Runs that have little: each must have its page."""
    empty, no_log = (
        write_run_log(folder / "empty", steps=1, every=5),
        write_run_log(folder / "no_log", steps=5, every=5),
    )
    (empty / "_drgrpo" / "metrics.jsonl").write_text("")
    (no_log / "_drgrpo" / "run.json").unlink()
    (no_log / "_drgrpo" / "metrics.jsonl").unlink()
    plain = folder / "plain"
    history = [{"step": 1, "loss": 0.1}, {"step": 5, "reward": None, "kl": 0.0}, {"step": 5, "eval_reward": 0.5}]
    write_lines(plain / "trainer_state.json", [{"global_step": 5, "max_steps": 9, "log_history": history}])
    once = write_curve(folder / "once", [0.5])
    return {"empty": empty, "no_log": no_log, "plain": plain, "once": once}


@pytest.fixture
def opened(browser, pages):
    """`opened(name, link="")` opens a page, and is what runs scripts in it."""

    def open_page(name, link=""):
        chromium.open_report(browser, pages[name].as_uri() + link)
        return browser.execute_script

    return open_page


@pytest.fixture
def press(browser):
    from selenium.webdriver import ActionChains

    return lambda keys: ActionChains(browser).send_keys(keys).perform()


@pytest.fixture
def texts(browser):
    every = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return lambda selector: browser.execute_script(every, selector)
