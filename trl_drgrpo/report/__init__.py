"""The run report: what a run logged, as one self-contained page, Markdown, JSON or a figure.

Data's way: a folder is read (`reading.py`: a run log, or what stock TRL leaves behind) into a `Run` with its
completions (`records.py`, which checks every value); `groups.py` picks the completions that fit,
`curves.py` thins the metrics, `contents.py` puts it all together; `page.py` only draws; `write.py` writes what it
drew, or serves the page.
Nothing here imports torch or trl.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.report.write import write_report as write_report

attach(__name__)
