"""Reward functions of the neighbouring stacks as TRL's, and the other way round, in one call each.

| stack | in | out |
|---|---|---|
| TRL, open-r1 | [`from_trl`] | |
| verl | [`from_verl`] | [`to_verl`] |
| OpenRLHF | [`from_openrlhf`] | [`to_openrlhf`] |
| ms-swift | [`from_swift`] | [`to_swift`] |
| verifiers | [`from_verifiers`] | [`to_verifiers`] |
| reasoning-gym | [`from_reasoning_gym`] | |
| understand-r1-zero, oat | [`from_r1_zero`] | |

None of these stacks needs to be installed: an adapter knows how the other side calls, not the other side's code.
"""

from trl_drgrpo.rewards.adapters.openrlhf import from_openrlhf, to_openrlhf
from trl_drgrpo.rewards.adapters.r1_zero import from_r1_zero
from trl_drgrpo.rewards.adapters.reasoning_gym import from_reasoning_gym
from trl_drgrpo.rewards.adapters.swift import from_swift, to_swift
from trl_drgrpo.rewards.adapters.trl import from_trl
from trl_drgrpo.rewards.adapters.verifiers import from_verifiers, to_verifiers
from trl_drgrpo.rewards.adapters.verl import from_verl, to_verl

__all__ = [
    "from_openrlhf",
    "from_r1_zero",
    "from_reasoning_gym",
    "from_swift",
    "from_trl",
    "from_verifiers",
    "from_verl",
    "to_openrlhf",
    "to_swift",
    "to_verifiers",
    "to_verl",
]
