"""The notebooks run from the first cell to the last, offline, and what is committed is such a run.

`notebook_checks.py` asserts the numbers that they teach, behind the last cell of a run. `make notebooks` runs them and
keeps the outputs.
"""

import re

import pytest
from execute_notebooks import FOLDER, NOTEBOOKS, execute
from notebook_checks import CHECKS

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    execute(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_a_whole_run(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    # A path of the author's machine tells a reader nothing, and a huge file cannot be shown or compared.
    assert re.findall(r"/(?:home|root|Users|work|tmp)/[^\s\"']*", str(outputs)) == []
    assert path.stat().st_size < 500_000


def test_every_notebook_has_a_check():
    assert sorted(CHECKS) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_starts_by_itself_and_ends_in_one_picture_and_one_sentence(path):
    cells = read(path).cells
    install, setup = code_cells(read(path))[:2]
    assert 'find_spec("trl_drgrpo") is None:\n    %pip install -q "trl-drgrpo[' in install.source
    for cell in (install, setup):
        assert len([line for line in cell.source.splitlines() if line.strip()]) < 10
    picture, sentence = cells[-2:]
    assert ["image/png" in output.get("data", {}) for output in picture.outputs] == [True]
    assert re.fullmatch(r"\*\*[^*]*\.\*\*", sentence.source)
    assert not re.search(r"[.!?]\s+[A-Z]", sentence.source.replace("Dr. GRPO", ""))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_leave_plotting_and_assertions_to_others(path):
    notebook = read(path)
    source = "\n".join(cell.source for cell in code_cells(notebook))
    assert not re.search(r"\bassert\b|pyplot|\.subplots\(|\.plot\(", source)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"\b(?:right|wrong) (?:answer|completion|one)|\bstock\b", f"{prose}\n{source}", re.IGNORECASE)
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
        assert (path.parent / link).is_file(), link


def test_the_group_widget_needs_no_kernel():
    [widget] = [
        cell for cell in code_cells(read(FOLDER / "02_why_dr_grpo.ipynb")) if "group_widget_html()" in cell.source
    ]
    html = "".join(output.data["text/html"] for output in widget.outputs)
    assert "mountGroupWidget" in html
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", html)
    assert "widget-view" not in str(widget.outputs)
