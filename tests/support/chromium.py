"""Headless Chromium for the tests of pages, and for the pictures of them in the guides."""

import shutil
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = "chromium and chromedriver (Debian: apt-get install chromium-driver)"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


def is_installed() -> bool:
    """Whether both programs are there."""
    return bool(CHROMIUM and DRIVER)


def start(profile: Path) -> Any:
    """A browser with a profile of its own that logs its messages and its requests; `quit()` ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def open_report(browser: Any, url: str) -> None:
    """Opens a report and waits until it is drawn. What the browser logged before is forgotten."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")  # what the browser's own start page loads is not ours
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(url)
    ready = "return document.documentElement.dataset.ready"
    WebDriverWait(browser, 30).until(lambda _: browser.execute_script(ready) == "yes")  # a loaded machine takes time


def resize(browser: Any, width: int, height: int, scale: float = 1, dark: bool = False) -> None:
    """The size of the page in CSS pixels, device pixels per CSS pixel, and the preferred colors."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
