"""The site of the guides: every page is in the navigation; where mkdocs is installed it builds strictly, offline."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from reference_page import page as reference

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without mkdocs: its `!!python/` tags name functions of Markdown extensions."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation(entry=None):
    """The pages that the navigation names."""
    if entry is None:
        entry = yaml.load((RECIPES / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    if isinstance(entry, str):
        return [entry]
    return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in navigation(each)]


def generated():
    """The pages that the hooks make of other files."""
    yield from (f"api/{package}.md" for package in re.findall(r"^## `([\w.]+)`", reference(), re.MULTILINE))
    yield from (f"studies/{path.name}" for path in (RECIPES / "studies").glob("*.md"))
    yield from (f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb"))
    yield from ("reference.md", "benchmarks.md", "changelog.md")


def test_every_page_is_in_the_navigation_once():
    guides = [path.relative_to(RECIPES / "guides").as_posix() for path in (RECIPES / "guides").rglob("*.md")]
    assert len(guides) > 20
    assert sorted(navigation()) == sorted([*guides, *generated()])


class Addresses(HTMLParser):
    """The addresses that a page links to, and those that it loads by itself."""

    def __init__(self, page):
        super().__init__()
        self.linked, self.loaded = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "a" and values.get("href"):
            self.linked.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])
        elif values.get("src"):
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if find_spec("mkdocs") is None:
        pytest.skip('mkdocs is not installed: pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(RECIPES / "mkdocs.yml")]
    # A proxy that nobody listens at: what needs a network fails.
    environment = {**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_address_on_the_site_is_there_and_nothing_comes_from_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert {f"{page.removesuffix('.md')}.html" for page in navigation()} <= {
        page.relative_to(site).as_posix() for page in pages
    }
    for page in pages:
        if page.name == "404.html":
            continue  # its addresses begin at the root of a server
        found = Addresses(page.read_text(encoding="utf-8"))
        assert [address for address in found.loaded if "//" in address] == [], page
        for address in found.loaded + found.linked:
            if not re.match(r"https://|#", address):
                target = (page.parent / unquote(address.partition("#")[0])).resolve()
                assert target.exists(), (page.name, address)
                assert target.is_relative_to(site.resolve())
    widget = ROOT / "trl_drgrpo" / "report" / "assets" / "group_widget.js"
    assert ("mountGroupWidget(" in (site / "index.html").read_text(encoding="utf-8")) == widget.exists()
    assert "Dr. GRPO" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_api_pages_read_the_docstrings(site):
    page = (site / "api" / "trl_drgrpo.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "loss_normalizer" in text
    assert "Log-probabilities of the policy, in nats; carries gradient." in text
    # The marks of TRL's style, had they been left as they are.
    assert [mark for mark in ("*optional*", "Args:", "[`", "(`") if mark in text] == []
