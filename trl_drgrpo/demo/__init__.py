"""The embedded demo: a machine-checkable task, a tiny model that half masters it, and a run that teaches it the rest.

Reading order: `task.py` -> `build.py` -> `result.py` -> `run.py`. `trl-drgrpo demo` runs it.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "list_sum_model"  # the tiny model that comes with the package
