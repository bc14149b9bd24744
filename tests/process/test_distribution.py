"""What is uploaded: the sdist holds everything, the wheel comes from it, and the package index accepts both."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from trl_drgrpo import __version__

pytest.importorskip("build")
pytest.importorskip("twine")

ROOT = Path(__file__).parents[2]
SOURCES = ("trl_drgrpo", "recipes", "tests", "notebooks")
pytestmark = pytest.mark.slow  # a build makes an environment of its own


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with both files; without `--sdist` or `--wheel` the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    with zipfile.ZipFile(dist / f"trl_drgrpo-{__version__}-py3-none-any.whl") as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"trl_drgrpo-{__version__}.dist-info/METADATA"))


def sources():
    """Files of the checkout that belong into the sdist."""
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts):
                yield path.relative_to(ROOT).as_posix()


def test_the_package_index_would_take_both(dist):
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2


def test_the_sdist_holds_what_the_checkout_does(dist):
    with tarfile.open(dist / f"trl_drgrpo-{__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    top = ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt")
    files = [*sources(), *top]
    assert len(files) > 200
    assert sorted(set(files) - held) == []


def test_the_wheel_holds_the_package_and_its_licences(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"trl_drgrpo", f"trl_drgrpo-{__version__}.dist-info"}
    assert "trl_drgrpo/py.typed" in names
    licences = f"trl_drgrpo-{__version__}.dist-info/licenses"
    assert {f"{licences}/LICENSE", f"{licences}/trl_drgrpo/report/assets/uplot/LICENSE"} <= set(names)
    assert sum(info.compress_size for info in wheel.infolist()) < 3_000_000


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    """In an environment of its own that sees the installed libraries but not the checkout."""

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    environment = tmp_path / "env"
    assert run(sys.executable, "-m", "venv", "--without-pip", str(environment)).returncode == 0
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"{next(p for p in sys.path if p.endswith('site-packages'))}\n")
    wheel.extractall(site)
    python = str(environment / "bin" / "python")
    where = run(python, "-c", "import trl_drgrpo; print(trl_drgrpo.__file__)")
    assert str(site) in where.stdout, where.stderr
    demo = [python, "-m", "trl_drgrpo.cli.main", "demo", "--steps", "2", "--output_dir", str(tmp_path / "demo")]
    done = run(*demo)
    assert done.returncode == 1, done.stderr[-2000:]  # two steps cannot have learned it, and the demo says so
    assert (tmp_path / "demo" / "results.json").exists()


def test_the_metadata_say_what_the_package_is(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("trl-drgrpo", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier")
    for python in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {python}" in classifiers
    extras = {"math", "json", "tasks", "report", "qlora", "vllm"}
    assert extras <= set(metadata.get_all("Provides-Extra"))


def test_the_page_on_the_index_has_no_link_that_leads_nowhere(metadata):
    page = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert re.search(r"<(?:img|picture)\b", page) is None
    assert re.search(r"`recipes/guides/\w+\.md`", page)  # the path is still named
