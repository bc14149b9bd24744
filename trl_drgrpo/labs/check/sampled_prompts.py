"""Expected gradients of prompt sampling, by enumeration: every order of the prompts, every group, every choice.

Three prompts, each with a pass rate and a logit of its own; a batch draws them without repetition, up to all three.
They are enumerated for the model as it is and as it is later, when it passes more often: the two gradients stand in
one vector, so a factor that changes as the model learns is no learning rate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import comb, prod

import torch

from trl_drgrpo.labs.check.enumeration import GROUP_SIZES, Gradients
from trl_drgrpo.objective.advantages import group_advantages
from trl_drgrpo.objective.group_selection import keep_probability, select_groups

NOW, LATER = (0.05, 0.3, 0.8), (0.5, 0.6, 0.95)  # pass rates
GROUPS = 2  # of a batch


@dataclass(frozen=True)
class Outcome:
    """One possible result of drawing a prompt.

    Args:
        probability (`float`): Of it.
        selected (`bool`): Whether the group is a candidate for the batch.
        gradient (`float`): Of the prompt's logit; 0 where the group was not generated or carries no signal.
    """

    probability: float
    selected: bool
    gradient: float


@dataclass(frozen=True)
class Sampling:
    """Rule by which batches are filled.

    Args:
        dynamic (`bool`, *optional*, defaults to `True`): Draw until groups carry a signal.
        estimates (`tuple[float, ...]`, *optional*): Pass rates as the curriculum estimates them.
        floor (`float`, *optional*, defaults to `0.2`): `curriculum_q_min`.
        weighted (`bool`, *optional*, defaults to `True`): Whether groups are weighted by their inverse probability.
        mean_over_live (`bool`, *optional*, defaults to `False`): DAPO's weights.
    """

    dynamic: bool = True
    estimates: tuple[float, ...] | None = None
    floor: float = 0.2
    weighted: bool = True
    mean_over_live: bool = False

    def compare(self) -> Iterator[Gradients]:
        """Expected and exact gradient, for each group size."""
        for group_size in GROUP_SIZES:
            expected = [self._expected(rates, group_size) for rates in (NOW, LATER)]
            yield torch.cat(expected), torch.cat([_exact(rates) for rates in (NOW, LATER)])

    def _expected(self, rates: Sequence[float], group_size: int) -> torch.Tensor:
        kept = [1.0] * len(rates)
        if self.estimates is not None:
            kept = [keep_probability(estimate, self.floor) for estimate in self.estimates]
        outcomes = [self._outcomes(rate, q, group_size) for rate, q in zip(rates, kept, strict=True)]
        orders = list(permutations(range(len(rates))))
        total = torch.zeros(len(rates), dtype=torch.float64)
        for order in orders:
            for draws in product(*(outcomes[prompt] for prompt in order)):
                selection = select_groups(
                    [draw.selected for draw in draws],
                    GROUPS,
                    len(draws),
                    [kept[prompt] for prompt in order] if self.weighted else None,
                    mean_over_live=self.mean_over_live,
                )
                probability = prod(draw.probability for draw in draws) / len(orders)
                for i, weight in zip(selection.draws, selection.weights, strict=True):
                    total[order[i]] += probability * weight * draws[i].gradient / GROUPS
        return total

    def _outcomes(self, rate: float, kept: float, group_size: int) -> list[Outcome]:
        generated = [
            Outcome(kept * probability, live or not self.dynamic, gradient)
            for probability, live, gradient in _groups(rate, group_size)
        ]
        return generated if kept == 1 else [Outcome(1 - kept, False, 0.0), *generated]


def retried_until_mixed() -> Iterator[Gradients]:
    """Each prompt sampled again until its rewards differ: hard prompts weigh more."""
    for group_size in GROUP_SIZES:
        gradients = []
        for rate in (*NOW, *LATER):
            live = [(probability, gradient) for probability, is_live, gradient in _groups(rate, group_size) if is_live]
            mean = sum(probability * gradient for probability, gradient in live) / sum(p for p, _ in live)
            gradients.append(mean / len(NOW))
        yield torch.tensor(gradients, dtype=torch.float64), torch.cat([_exact(NOW), _exact(LATER)])


def _groups(rate: float, group_size: int) -> list[tuple[float, bool, float]]:
    """Probability, whether there is a signal, and gradient of the logit, for each number of correct completions."""
    groups = []
    for correct in range(group_size + 1):
        rewards = torch.tensor([1.0] * correct + [0.0] * (group_size - correct), dtype=torch.float64)
        advantages = group_advantages(rewards, group_size, "leave_one_out")
        probability = comb(group_size, correct) * rate**correct * (1 - rate) ** (group_size - correct)
        gradient = (advantages * (rewards - rate)).mean().item()  # d log p / d logit = (1 or 0) - rate
        groups.append((probability, bool((advantages != 0).any()), gradient))
    return groups


def _exact(rates: Sequence[float]) -> torch.Tensor:
    logits = torch.logit(torch.tensor(rates, dtype=torch.float64)).requires_grad_()
    return torch.autograd.grad(logits.sigmoid().mean(), logits)[0]
