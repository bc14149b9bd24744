"""Steps of a generation batch with their rewards, as advantages are computed from them."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.step_scorer import RaggedRewards, StepScores


@dataclass(frozen=True, kw_only=True)
class StepFields:
    """Steps of a batch; all fields are `None` where the run has no step rewards.

    Args:
        steps ([`StepScores`], *optional*): This rank's steps and their rewards.
        step_rewards (`B` lists of `K_i` floats, *optional*): Reward of each step, over all ranks; `None` = unscorable.
        step_ends (`B` lists of ints, *optional*):
            Inclusive last token of each step, over all ranks. One more than there are rewards where a closing follows:
            the tokens behind the last separator, EOS as a rule.
        state_keys (`B` lists of hashables, *optional*):
            The state of the environment that each turn begins in, over all ranks; `None` = unknown.
    """

    steps: "StepScores | None" = None
    step_rewards: "RaggedRewards | None" = None
    step_ends: list[list[int]] | None = None
    state_keys: list[list[Hashable | None]] | None = None
