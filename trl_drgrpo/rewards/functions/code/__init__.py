"""Code that is run: unit tests as a reward, in a sandbox that the tested code cannot talk its way out of.

[`CodeReward`] is the reward, [`Sandbox`] how untrusted code is run. `problems` reads the tests of the usual datasets,
`session` conducts them; `candidate` and `examiner` are the programs inside two sandboxes, which speak `wire`;
`entries` finds the tests in a text, `names` what they ask of the completion, `checks` counts what they check; `remote`
stands for the completion's objects; `running`, `confine` and `seccomp` start a process and take its rights away.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.rewards.functions.code.reward import CodeReward as CodeReward
    from trl_drgrpo.rewards.functions.code.reward import code_reward as code_reward
    from trl_drgrpo.rewards.functions.code.sandbox import Sandbox as Sandbox

attach(__name__)
