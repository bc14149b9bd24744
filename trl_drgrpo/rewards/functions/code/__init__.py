"""Code that is run: unit tests as a reward, in a sandbox that the tested code cannot talk its way out of.

[`CodeReward`] is the reward, [`Sandbox`] how untrusted code is run. `problems` reads the tests of the usual datasets,
`session` conducts them; `candidate` and `examiner` are the programs inside two sandboxes, which speak `wire`;
`test_forms` finds the tests in a text, says what they ask of the completion and counts what they check; `confine` and
`seccomp` take a started process its rights away.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.code.reward import CodeReward as CodeReward
    from trl_drgrpo.rewards.functions.code.reward import code_reward as code_reward
    from trl_drgrpo.rewards.functions.code.sandbox import Sandbox as Sandbox

attach(__name__)
