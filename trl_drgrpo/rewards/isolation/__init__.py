"""Reward functions in worker processes that can be killed.

[`isolate`] wraps any reward function, [`scored_in_workers`] is what rewards here call themselves, [`Limits`] says what
one completion may take. Behind them: `pool` and `handles` (the trainer's side: deadlines, channels), `nursery` (how a
function gets to the process that forks and kills), `worker` (what runs there).
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.contract import Limits as Limits
    from trl_drgrpo.rewards.isolation.isolated import isolate as isolate
    from trl_drgrpo.rewards.isolation.isolated import scored_in_workers as scored_in_workers
    from trl_drgrpo.rewards.isolation.pool import close_pools as close_pools

attach(__name__)
