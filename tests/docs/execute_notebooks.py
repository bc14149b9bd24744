"""Run the notebooks from the first cell to the last. `make notebooks` does it by this file and keeps the outputs."""

import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# Run behind the last cell of a notebook, in its kernel, and left out of the file.
_CHECK = """
import sys
sys.path.insert(0, {folder!r})
from notebook_checks import CHECKS
CHECKS[{stem!r}](globals())
"""


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder; an error in a cell or in its check is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_CHECK.format(folder=str(Path(__file__).parent), stem=path.stem)))
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,  # timestamps would make every run a change of every cell
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # the temporary folders of the notebook
        client.execute(env={**os.environ, "TMPDIR": scratch})
    notebook.cells.pop()
    notebook.metadata.pop("widgets", None)
    return notebook


def main() -> None:
    """Execute all and write them back."""
    import nbformat

    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
