"""Reward functions in worker processes that can be killed.

[`isolate`] wraps any reward function, [`scored_in_workers`] is what rewards here call themselves, [`Limits`] says what
one completion may take. Behind them: `pool` (deadlines, and who does what), `nursery` (the process that forks and
kills, and the trainer's side of it and of the workers), `worker` (what runs there).
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.contract import Limits as Limits
    from trl_drgrpo.rewards.isolation.isolated import isolate as isolate
    from trl_drgrpo.rewards.isolation.isolated import scored_in_workers as scored_in_workers
    from trl_drgrpo.rewards.isolation.pool import close_pools as close_pools

attach(__name__)
