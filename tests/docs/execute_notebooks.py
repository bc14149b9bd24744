"""Run the notebooks from the first cell to the last. `make notebooks` does it by this file and keeps the outputs."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # Timestamps would make every run a change of every cell.
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
    ).execute()
    notebook.metadata.pop("widgets", None)
    return notebook


def main() -> None:
    """Execute all and write them back."""
    import nbformat

    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
