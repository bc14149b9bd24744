"""The notebooks run from the first cell to the last, offline, and what is committed is such a run.

Each ends with a cell of assertions about the numbers it teaches, so a run without an error is a statement about them.
`make notebooks` runs them and keeps the outputs.
"""

import re

import pytest
from execute_notebooks import NOTEBOOKS, execute

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    execute(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_a_whole_run(path):
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "assert " in cells[-1].source
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # A path of the author's machine tells a reader nothing, and a huge file cannot be shown or compared.
    assert re.findall(r"/(?:home|root|Users|work|tmp)/[^\s\"']*", str(outputs)) == []
    assert path.stat().st_size < 1_500_000
