"""Advantages of forked groups: completions that continue a common prefix.

A group is a set of trees: G / b^D parents, each forked D times into b branches, G leaves. A *node* is a run of tokens
between two cuts; its leaves are the rows that pass it. A node `c` is compared with its siblings alone:

    A(c) = mean over the leaves of c  -  mean over the leaves of its siblings

and every token of the node carries A(c), in each of its leaves. Siblings begin in the same state and were sampled
independently, so the mean of one is a baseline that does not depend on the tokens of the other. The gradient is
unbiased if a cut is determined by the tokens before it. The mean over all leaves is not such a baseline: in a 2 x 2
tree it leaves a half of the gradient of the first node and three quarters of the second's. `trl-drgrpo check
--credit` shows both by enumeration.

Sources: SPO (arXiv 2505.23564), TreeRPO (2506.05183), VinePPO (2410.01679), which scale or select in other ways.

Pure tensors. Shapes: `B = P * G` rows, `D` levels of forks, `K_i` steps of row i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.advantages import without_signal
from trl_drgrpo.objective.step_advantages import Ragged, broadcast_to_tokens, padded_groups, step_values


@dataclass(frozen=True)
class Forks:
    """Forks of a batch's rows.

    Args:
        branches (`int`): b. At its d-th fork a row is one of `b ** (D - d + 1)` consecutive rows that are the same up
            to there.
        cuts (`B` lists of `D` ints): Tokens of each row before its first, second, ... fork, not decreasing. A row that
            could not be cut has all its tokens before, and stands there for each of its leaves.
    """

    branches: int
    cuts: Sequence[Sequence[int]]

    @property
    def depth(self) -> int:
        """D, forks on the way from a prompt to a leaf."""
        return len(self.cuts[0]) if self.cuts else 0

    def copies(self, lengths: Sequence[int]) -> list[bool]:
        """Return which rows were not sampled because they repeat a row without a cut. `lengths`: tokens of each."""
        copies = []
        for i, (cuts, length) in enumerate(zip(self.cuts, lengths, strict=True)):
            is_copy = False
            for level, cut in enumerate(cuts):
                # With b = 2 and D = 2, rows 0 to 3 take the branches 0, 0, 1, 1 at the first fork and 0, 1, 0, 1 at
                # the second. Branch 0 is the parent itself.
                leaves_of_branch = self.branches ** (self.depth - level - 1)
                branch = i // leaves_of_branch % self.branches
                if branch > 0 and cut >= length:  # nothing was left to continue
                    is_copy = True
            copies.append(is_copy)
        return copies

    def check(self, num_generations: int) -> None:
        """Check that groups are made of such trees.

        Raises:
            `InputError`: G has no room for two parents, or rows that do not fit.
        """
        leaves = self.branches**self.depth
        # The nodes before the first fork are siblings of each other, so one tree alone would have no baseline.
        if self.branches < 2 or num_generations % leaves or num_generations // leaves < 2:
            got = f"{self.branches} at {self.depth} levels with {num_generations} completions per prompt"
            remedy = "Set num_generations to two or more times branches ** depth."
            raise InputError("forks", got, "at least 2, and two or more whole trees per prompt", remedy)
        depths = {len(row_cuts) for row_cuts in self.cuts}
        if len(self.cuts) % num_generations or len(depths) > 1:
            got = f"cuts of {len(self.cuts)} rows"
            raise InputError("forks", got, f"{self.depth} per row, for complete groups", "Pass one list per row.")


def node_advantages(
    values: torch.Tensor,
    num_generations: int,
    branches: int,
    depth: int,
) -> torch.Tensor:
    """Compute the advantage of the node that each row passes at each level.

    Args:
        values (`torch.Tensor` of shape `(B, K)`): Values of the leaves at K places; NaN = unscorable.
        num_generations (`int`): G; the leaves of a prompt are consecutive, and so are those of every node.
        branches, depth (`int`): b and D.

    Returns:
        `torch.Tensor` of shape `(D + 1, B, K)`: `mean(leaves of c) - mean(leaves of its siblings)`; 0 everywhere in a
        group with an unscorable leaf. To leave out that leaf alone would scale the levels differently.

    Example: two parents, each forked once. The first parent's branches earn 1 and 0, the second's 0 and 0.

    ```python
    >>> node_advantages(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), 4, branches=2, depth=1)[..., 0]
    tensor([[ 0.5000,  0.5000, -0.5000, -0.5000],
            [ 1.0000, -1.0000,  0.0000,  0.0000]])

    ```
    """
    rows, places = values.shape
    groups = values.view(-1, num_generations, places)
    unscorable = groups.isnan().any(dim=1, keepdim=True)  # (P, 1, K)
    groups = groups.masked_fill(unscorable, 0.0)  # equal leaves in the whole group: advantage 0
    levels = []
    for level in range(depth + 1):
        leaves = branches ** (depth - level)
        siblings = branches
        if level == 0:
            siblings = num_generations // leaves  # all trees of a prompt begin in the same state
        nodes = groups.view(-1, siblings, leaves, places).mean(dim=2)  # (families, siblings, K)
        sum_of_others = nodes.sum(dim=1, keepdim=True) - nodes
        advantages = nodes - sum_of_others / (siblings - 1)
        # Decided on values, not on rounded differences: equal siblings say nothing.
        advantages = advantages.masked_fill(without_signal(nodes, dim=1), 0.0)
        # Every leaf carries the advantage of the node that it passes.
        of_leaves = advantages.unsqueeze(2).expand(-1, -1, leaves, -1)
        levels.append(of_leaves.reshape(rows, places))
    return torch.stack(levels)


def fork_token_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    forks: Forks,
    completion_mask: torch.Tensor,
    rows: slice = slice(None),
) -> torch.Tensor:
    """Compute the token advantages of forked groups from outcome rewards.

    Args:
        rewards (`torch.Tensor` of shape `(B,)`): One per leaf, NaN = unscorable.
        num_generations (`int`): G.
        forks ([`Forks`]): Of the `B` rows.
        completion_mask (`torch.Tensor` of shape `(b, T)`): 1 on tokens that are trained on, of the rows that are asked
            for.
        rows (`slice`, *optional*): The rows that are asked for; all by default.

    Returns:
        `torch.Tensor` of shape `(b, T)`: The advantage of the node that a token is part of.

    Raises:
        `InputError`: Groups that are not made of such trees.

    Example:

    ```python
    >>> forks = Forks(2, [[1], [1], [2], [2]])  # tokens before the fork
    >>> fork_token_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, forks, torch.ones(4, 3))
    tensor([[ 0.5000,  1.0000,  1.0000],
            [ 0.5000, -1.0000, -1.0000],
            [-0.5000, -0.5000,  0.0000],
            [-0.5000, -0.5000,  0.0000]])

    ```
    """
    forks.check(num_generations)
    leaf_values = rewards.double().unsqueeze(1)  # (B, 1): an outcome is the same at every place
    nodes = node_advantages(leaf_values, num_generations, forks.branches, forks.depth)[..., 0]
    nodes_of_rows = nodes.T[rows].tolist()  # (b, D + 1)
    width = completion_mask.size(1)
    values = []
    ends = []
    for row_nodes, cuts in zip(nodes_of_rows, forks.cuts[rows], strict=True):
        # A node of a row is treated as a step: its tokens end at the next cut, those of the last node with the row.
        advantage_at_end: dict[int, float] = {}
        for advantage, end in zip(row_nodes, [*cuts, width], strict=True):
            # Of several nodes that end at one token, the first alone has tokens. A node before token 0 has none.
            if end > 0:
                advantage_at_end.setdefault(end, advantage)
        ends.append([end - 1 for end in advantage_at_end])  # inclusive
        values.append(list(advantage_at_end.values()))
    return broadcast_to_tokens(values, ends, completion_mask)


def fork_step_advantages(
    step_rewards: Ragged,
    step_ends: Sequence[Sequence[int]],
    num_generations: int,
    forks: Forks,
    credit: str = "return_to_go",
    unscorable: torch.Tensor | None = None,
) -> list[list[float]]:
    """Compute the advantage of every step in forked groups: `to_go`, among siblings.

    The credit of a step is the mean, over the leaves of its node, of their rewards from that step on. Its baseline is
    the same mean over the leaves of the sibling nodes.

    Args:
        step_rewards (`B` lists of `K_i` floats), step_ends (`B` lists of `K_i` ints), num_generations (`int`):
            As in [`step_token_advantages`]. A fork lies between two steps.
        forks ([`Forks`]): Of the rows.
        credit (`str`, *optional*, defaults to `"return_to_go"`):
            `"return_to_go"`, `"immediate"` or `"min_increments"`, see [`step_advantages`].
        unscorable (`torch.Tensor` of shape `(B,)`, bool, *optional*): Rows that cannot be judged.

    Returns:
        `list[list[float]]`: `B` lists of `K_i` numbers; 0 in a group with an unscorable row.

    Raises:
        `InputError`: Groups that are not made of such trees; infinite rewards.
    """
    forks.check(num_generations)
    if not any(len(row) for row in step_rewards):
        return [[] for _ in step_rewards]
    rewards = padded_groups(step_rewards, num_generations)  # (P, G, K)
    values = step_values(rewards, credit).flatten(0, 1)  # (B, K), 0 once ended
    if unscorable is not None:
        values = values.masked_fill(unscorable.cpu().unsqueeze(1), torch.nan)
    nodes = node_advantages(values, num_generations, forks.branches, forks.depth).tolist()
    advantages = []
    for i, (ends, cuts) in enumerate(zip(step_ends, forks.cuts, strict=True)):
        # A cut counts the tokens before a fork, an end is inclusive: the step that ends at token 3 lies before the
        # cut 4. The cuts up to a step's end are the level of its node.
        levels = np.searchsorted(cuts, ends, side="right")
        advantages.append([nodes[level][i][k] for k, level in enumerate(levels)])
    return advantages
