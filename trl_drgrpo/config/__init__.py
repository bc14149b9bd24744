"""The configuration and its checks. Each check has one place and one time:

- `field_kinds.py` and `rules.py` look at a configuration alone: in its constructor, and once more when a trainer takes
  it, as fields may have been assigned to in between;
- `preflight.py` looks at configuration, functions, data and model together: in the trainer's constructor, or in
  `train --dry_run`, before a model loads;
- `train()` looks at fields that were assigned to since: those that were copied are refused, the others are checked as
  in the constructor.

The command line adds what needs no import, before anything heavy loads (`cli/recipe.py`, `cli/job.py`).
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig as DrGRPOConfig

attach(__name__)
