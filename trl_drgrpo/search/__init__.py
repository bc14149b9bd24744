"""Search: trajectories of a model, found with a verifier or a process reward model, as data for supervised training.

Three strategies (`best_of_n`, `beam`, `puct`) grow a tree of steps per problem within a budget of sampled tokens.
Values decide which steps are continued, so the result is a biased sample of the policy: it belongs into a supervised
data set, never into a group of a policy gradient.

Names resolve on first use: importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.search.collecting import collect as collect

attach(__name__)
