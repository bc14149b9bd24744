"""Versions of the host libraries that were not tested are said, once, with what to do."""

import logging
import re
from pathlib import Path

import pytest

from trl_drgrpo.upstream import versions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_the_pinned_versions_are_among_the_tested_ones(name):
    pins = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))
    for package, tested in versions.TESTED.items():
        pinned = pins[package].rpartition(".")[0] if package == "torch" else pins[package]
        assert pinned in tested, package


def test_the_readme_names_the_tested_versions():
    readme = (ROOT / "README.md").read_text()
    for package in ("trl", "transformers", "peft"):
        for version in versions.TESTED[package]:
            assert version in readme, (package, version)


def test_versions_that_were_not_tested_are_said_once(monkeypatch, caplog):
    installed = {"trl": "1.16.0", "transformers": "5.99.0", "torch": "2.13.7+cpu", "peft": "0.21.2"}
    monkeypatch.setattr(versions, "installed_versions", lambda packages: installed)
    versions.say_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        versions.say_untested()
        versions.say_untested()
    versions.say_untested.cache_clear()
    [line] = caplog.messages
    assert line.startswith("transformers 5.99.0 was not tested with this package (tested: 5.17.0, 5.23.0, 5.24.0).")
    assert "trl-drgrpo check" in line
