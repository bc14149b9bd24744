"""Rewards made of rewards: weighted sums, gates, bounds, a cache, a note on rewards that are not binary.

`combinations` has the five; `parts` is how one reward calls others, synchronous or not, and what it logs of them.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.composition.combinations import cached as cached
    from trl_drgrpo.rewards.composition.combinations import clipped as clipped
    from trl_drgrpo.rewards.composition.combinations import gated as gated
    from trl_drgrpo.rewards.composition.combinations import noted_if_not_binary as noted_if_not_binary
    from trl_drgrpo.rewards.composition.combinations import weighted_sum as weighted_sum

attach(__name__)
