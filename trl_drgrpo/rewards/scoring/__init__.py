"""Saved completions and rewards over them: what `trl-drgrpo score` does, without its command line.

`saved` reads completions from files and joins columns to them, `table` scores rows and finds those on which two
rewards differ.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.scoring.saved import read_rows as read_rows
    from trl_drgrpo.rewards.scoring.table import disagreements as disagreements
    from trl_drgrpo.rewards.scoring.table import score_rows as score_rows
    from trl_drgrpo.rewards.scoring.table import unscored_rows as unscored_rows

attach(__name__)
