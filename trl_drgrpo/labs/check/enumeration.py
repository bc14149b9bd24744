"""Expected gradients of small policies, by enumeration: no sampling, no error but rounding.

A [`SmallPolicy`] lists every trajectory that it and its environment can produce. The exact gradient is autograd's, of
the expected objective. An estimator's expected gradient runs over every batch of rows, weighted by its probability:
the two agree or they do not, to rounding.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch


@dataclass(frozen=True, eq=False)  # a row is itself: it is looked up by identity
class Trajectory:
    """One row that a policy can write.

    Args:
        log_probs (`torch.Tensor` of shape `(T,)`, float64): Of each token, differentiable in the policy's logits; 0
            for a token that is certain or not the policy's.
        step_ends (`tuple[int, ...]` of length `S`): Inclusive last token of each step.
        step_rewards (`tuple[float, ...]` of length `S`): Reward, or value, of each step.
        outcome (`float`, *optional*, defaults to `0.0`): Reward of the whole row; NaN = unscorable.
        chance (`float`, *optional*, defaults to `1.0`): Probability of the environment's decisions on the way.
        state_keys (`tuple`, *optional*, of length `S`): The state in which each step was decided.
        text (`str`, *optional*): The written text, without EOS; `None`: tokens only.
        closing (`bool`, *optional*, defaults to `False`): The last step is an EOS alone, paid 0.
    """

    log_probs: torch.Tensor
    step_ends: tuple[int, ...]
    step_rewards: tuple[float, ...]
    outcome: float = 0.0
    chance: float = 1.0
    state_keys: tuple[Hashable, ...] = ()
    text: str | None = None
    closing: bool = False

    def with_eos_in_last_step(self) -> "Trajectory":
        """The same row, its EOS paid together with the step before it; nobody reads it again."""
        if not self.closing or len(self.step_ends) == 1:
            return self
        ends = (*self.step_ends[:-2], self.step_ends[-1])
        return replace(self, step_ends=ends, step_rewards=self.step_rewards[:-1], text=None, closing=False)


Objective = Callable[[Trajectory], float]
Credit = Callable[[Sequence[Trajectory], int], torch.Tensor]  # rows in groups, G -> advantages (B, T)
Gradients = tuple[torch.Tensor, torch.Tensor]  # an estimator's on average, and the exact one
GROUP_SIZES = (2, 3)


def total(row: Trajectory) -> float:
    """Objective: the sum of the step rewards."""
    return sum(row.step_rewards)


def lowest(row: Trajectory) -> float:
    """Objective: the worst step, a closing EOS left out; 0 without steps."""
    return min(row.step_rewards[: len(row.step_rewards) - row.closing], default=0.0)


def outcome(row: Trajectory) -> float:
    """Objective: the reward of the whole row."""
    return row.outcome


def if_scorable(objective: Objective) -> Objective:
    """The objective, 0 for an unscorable row."""
    return lambda row: 0.0 if math.isnan(row.outcome) else objective(row)


@dataclass(frozen=True)
class SmallPolicy:
    """A policy of a few numbers and everything that it can do.

    Args:
        logits (`torch.Tensor`, float64, with gradient): Its parameters.
        rows (`tuple[Trajectory, ...]` of length `N`): All trajectories; their probabilities sum to 1.
    """

    logits: torch.Tensor
    rows: tuple[Trajectory, ...]

    def at_times_unscorable(self, chance: float) -> "SmallPolicy":
        """The same policy, each row unscorable with a probability that does not depend on what is written."""
        fates = [(row, odds, told) for row in self.rows for odds, told in ((1 - chance, True), (chance, False))]
        return replace(
            self,
            rows=tuple(
                replace(row, chance=row.chance * odds, outcome=row.outcome if told else math.nan)
                for row, odds, told in fates
            ),
        )

    def map(self, change: Callable[[Trajectory], Trajectory]) -> "SmallPolicy":
        """The same policy with every trajectory changed: its rewards, or where its steps end."""
        return replace(self, rows=tuple(change(row) for row in self.rows))

    def probabilities(self) -> torch.Tensor:
        """Probability of each trajectory, differentiable, `(N,)`."""
        return torch.stack([row.chance * row.log_probs.sum().exp() for row in self.rows])

    def gradient(self, objective: Objective) -> torch.Tensor:
        """The exact gradient of the expected objective, in the logits."""
        worth = torch.tensor([objective(row) for row in self.rows], dtype=torch.float64)
        return torch.autograd.grad((self.probabilities() * worth).sum(), self.logits, retain_graph=True)[0]

    def batches(self, rows: int) -> list[tuple[int, ...]]:
        """All batches of so many independent rows, in order: `N ** rows` tuples of indices into `rows`."""
        return list(product(range(len(self.rows)), repeat=rows))

    def expected_gradient(
        self, batches: Sequence[tuple[int, ...]], advantages: torch.Tensor, probabilities: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient that an estimator gives on average, in the logits.

        Args:
            batches (`M` tuples of `R` ints): The rows of every batch that can be drawn.
            advantages (`torch.Tensor` of shape `(M, R, T)`): The estimator's advantage of each token of them.
            probabilities (`torch.Tensor` of shape `(M,)`, *optional*): Of each batch; by default rows are independent.

        Returns:
            `torch.Tensor`: `sum_batch p(batch) * 1/R * sum_i sum_t A_it * grad log pi_it`.
        """
        drawn = torch.tensor(batches)  # (M, R)
        if probabilities is None:
            probabilities = self.probabilities()[drawn].prod(dim=1)  # (M,)
        padded = torch.nn.utils.rnn.pad_sequence([row.log_probs for row in self.rows], batch_first=True)  # (N, T)
        credited = (advantages.double()[..., : padded.size(1)] * padded[drawn]).sum(dim=(1, 2))  # (M,)
        surrogate = (probabilities.detach() * credited).sum() / drawn.size(1)
        return torch.autograd.grad(surrogate, self.logits, retain_graph=True)[0]


def compare(
    policies: Iterable[SmallPolicy],
    credit: Credit,
    objective: Objective = total,
    *,
    group_sizes: Iterable[int] = GROUP_SIZES,
    share: Callable[[int], float] = lambda group_size: 1.0,
    prompts: int | None = None,
) -> Iterator[Gradients]:
    """Enumerate the groups of some policies under one credit.

    Args:
        policies (iterable of [`SmallPolicy`]): The policies to enumerate.
        credit (`Callable`): Advantages `(B, T)` of rows in groups.
        objective (`Callable`, *optional*): Its gradient is the exact one; the sum of the step rewards by default.
        group_sizes (iterable of `int`, *optional*): G.
        share (`Callable`, *optional*): From G to the factor by which the expected gradient is a multiple of the exact
            one: a learning rate. (G - 1) / G where the group's mean counts the own row.
        prompts (`int`, *optional*): Groups per generation batch, for credit that looks at a whole batch: `credit` is
            called for each batch, and all batches are enumerated. By default it is called once for all groups.

    Returns:
        Iterator over pairs: the expected gradient, and the exact one.
    """
    for policy in policies:
        exact = policy.gradient(objective)
        for group_size in group_sizes:
            batches = policy.batches(group_size * (prompts or 1))
            rows = [[policy.rows[i] for i in batch] for batch in batches]
            if prompts is None:
                advantages = credit([row for batch in rows for row in batch], group_size)
                advantages = advantages.view(len(batches), group_size, -1)
            else:
                width = max(len(row.log_probs) for row in policy.rows)
                credited = [credit(batch, group_size) for batch in rows]
                advantages = torch.stack([torch.nn.functional.pad(a, (0, width - a.size(1))) for a in credited])
            gradient = policy.expected_gradient(batches, advantages)
            yield gradient / share(group_size), exact
