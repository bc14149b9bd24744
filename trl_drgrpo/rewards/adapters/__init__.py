"""Reward functions of the neighboring stacks as TRL's, in one call each.

| stack | adapter |
|---|---|
| TRL, open-r1 | [`from_trl`] |
| verl | [`from_verl`] |
| OpenRLHF | [`from_openrlhf`] |
| ms-swift | [`from_swift`] |
| verifiers | [`from_verifiers`] |
| understand-r1-zero, oat | [`from_r1_zero`] |

None of these stacks needs to be installed: an adapter knows how the other side calls, not the other side's code.
"""
