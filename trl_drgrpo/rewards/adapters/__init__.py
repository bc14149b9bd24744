"""Reward functions of the neighboring stacks as TRL's, in one call each.

| stack | adapter |
|---|---|
| TRL, open-r1 | [`from_trl`] |
| verl | [`from_verl`] |
| OpenRLHF | [`from_openrlhf`] |
| ms-swift | [`from_swift`] |
| verifiers | [`from_verifiers`] |
| reasoning-gym | [`from_reasoning_gym`] |
| understand-r1-zero, oat | [`from_r1_zero`] |

None of these stacks needs to be installed: an adapter knows how the other side calls, not the other side's code.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.adapters.stacks import from_openrlhf as from_openrlhf
    from trl_drgrpo.rewards.adapters.stacks import from_r1_zero as from_r1_zero
    from trl_drgrpo.rewards.adapters.stacks import from_reasoning_gym as from_reasoning_gym
    from trl_drgrpo.rewards.adapters.stacks import from_swift as from_swift
    from trl_drgrpo.rewards.adapters.stacks import from_trl as from_trl
    from trl_drgrpo.rewards.adapters.stacks import from_verifiers as from_verifiers
    from trl_drgrpo.rewards.adapters.stacks import from_verl as from_verl

attach(__name__)
