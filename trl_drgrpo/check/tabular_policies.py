"""Expected gradients of small policies, by enumeration: no sampling, no error but rounding.

A [`SmallPolicy`] lists every trajectory that it and its environment can produce. The exact gradient is autograd's, of
the expected objective. An estimator's expected gradient runs over every batch of rows, weighted by its probability:
the two agree or they do not, to rounding.

Then the small policies of `trl-drgrpo check --credit`, each with one thing in which step credit goes wrong; and credit
as it is published or commonly built, for controls: a rule that takes the rows of one group and gives an advantage per
step. Those are not part of the package's objective.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence


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
        """Return the same row, its EOS paid together with the step before it; nobody reads it again."""
        if not self.closing or len(self.step_ends) == 1:
            return self
        # Step ends (1, 3, 4) become (1, 4).
        ends = (*self.step_ends[:-2], self.step_ends[-1])
        # Without a text: a trainer would cut it into steps again, and the EOS would be a step of its own.
        return replace(
            self,
            step_ends=ends,
            step_rewards=self.step_rewards[:-1],
            text=None,
            closing=False,
        )


Rows = Sequence[Trajectory]
Objective = Callable[[Trajectory], float]
Credit = Callable[[Rows, int], torch.Tensor]  # rows in groups, G -> advantages (B, T)
Gradients = tuple[torch.Tensor, torch.Tensor]  # an estimator's on average, and the exact one
GROUP_SIZES = (2, 3)


def total(row: Trajectory) -> float:
    """Objective: the sum of the step rewards."""
    return sum(row.step_rewards)


def lowest(row: Trajectory) -> float:
    """Objective: the worst step, a closing EOS left out; 0 without steps."""
    rewards = row.step_rewards
    if row.closing:
        rewards = rewards[:-1]
    return min(rewards, default=0.0)


def outcome(row: Trajectory) -> float:
    """Objective: the reward of the whole row."""
    return row.outcome


def if_scorable(objective: Objective) -> Objective:
    """Return the objective, 0 for an unscorable row."""
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
        """Return the same policy, each row unscorable with a probability that does not depend on what is written."""
        rows = []
        for row in self.rows:
            # Each row splits into a scorable and an unscorable one, which share its probability.
            scorable = row.chance * (1 - chance)
            unscorable = row.chance * chance
            rows.append(replace(row, chance=scorable))
            rows.append(replace(row, chance=unscorable, outcome=math.nan))
        return replace(self, rows=tuple(rows))

    def map(self, change: Callable[[Trajectory], Trajectory]) -> "SmallPolicy":
        """Return the same policy with every trajectory changed: its rewards, or where its steps end."""
        return replace(self, rows=tuple(map(change, self.rows)))

    def probabilities(self) -> torch.Tensor:
        """Probability of each trajectory, differentiable, `(N,)`."""
        probabilities = []
        for row in self.rows:
            written = row.log_probs.sum().exp()
            probabilities.append(row.chance * written)
        return torch.stack(probabilities)

    def gradient(self, objective: Objective) -> torch.Tensor:
        """Return the exact gradient of the expected objective, in the logits."""
        worth = torch.tensor(list(map(objective, self.rows)), dtype=torch.float64)
        expectation = (self.probabilities() * worth).sum()
        return self._derivative(expectation)

    def expected_gradient(
        self,
        batches: Sequence[tuple[int, ...]],
        advantages: torch.Tensor,
        probabilities: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient that an estimator gives on average, in the logits.

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
        log_probs = pad_sequence([row.log_probs for row in self.rows], batch_first=True)  # (N, T)
        credited = advantages.double() * log_probs[drawn]  # (M, R, T)
        # Detached: the estimator differentiates its surrogate only, the batch is already drawn.
        surrogates = probabilities.detach() * credited.sum(dim=(1, 2))  # (M,)
        return self._derivative(surrogates.sum() / drawn.size(1))

    def _derivative(self, value: torch.Tensor) -> torch.Tensor:
        # The rows keep their graph, since one policy serves several estimators.
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]


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
            batch_size = group_size * (prompts or 1)
            # Twice in the same order: by index, and as rows.
            indices = range(len(policy.rows))
            batches = list(product(indices, repeat=batch_size))
            batches_of_rows = product(policy.rows, repeat=batch_size)
            if prompts is None:
                # One call for all groups: the credit of a group does not depend on the others.
                advantages = credit(list(chain(*batches_of_rows)), group_size)
                advantages = advantages.view(len(batches), group_size, -1)
            else:
                # A batch's advantages (R, T) are as wide as its own longest row. `pad_sequence` pads the first axis,
                # so they are transposed before and after.
                columns = [credit(batch, group_size).T for batch in batches_of_rows]
                advantages = pad_sequence(columns, batch_first=True).mT
            expected = policy.expected_gradient(batches, advantages)
            yield expected / share(group_size), exact


# Policies ------------------------------------------------------------------------------------------------------------

GOOD = "+"
BAD = "-"
SEPARATOR = "\n"


def stop_or_go(good: float, at_once: bool = False, max_steps: int = 3) -> SmallPolicy:
    """Build a policy that decides after each step whether to write another one; the reward is the number of good
    steps.

    Rows end with EOS behind a separator, a step of its own, or are cut after the last step.

    Args:
        good (`float`): Probability that a step is good; its logit is the second parameter, that of another step the
            first.
        at_once (`bool`, *optional*, defaults to `False`): The first step is a decision too: a row may be EOS alone.
        max_steps (`int`, *optional*, defaults to `3`): Steps at most.
    """
    logits = _logits(0.5, good)
    policy = _written(logits, lambda marks: logits[1], max_steps, at_once)
    # Step rewards are all that is paid here, and trainers add outcomes to them.
    return policy.map(lambda row: replace(row, outcome=0.0))


def reasoning(max_steps: int = 3) -> SmallPolicy:
    """Stop or go, with an outcome: 1 when the last step is good. A good step follows a good one more often.

    The parameters are the logits of another step, of a good step after a good one, and of one after a bad one.
    """
    logits = _logits(0.5, 0.75, 0.3)

    def good_after(marks: str) -> torch.Tensor:
        if marks.endswith(BAD):
            return logits[2]
        return logits[1]

    return _written(logits, good_after, max_steps)


def until_a_mistake() -> SmallPolicy:
    """Reasoning that ends with its first bad step, as a third one is for certain: few enough rows to be cut twice.

    The parameters are the logits of another step, of a good first step, and of a good second one.
    """
    logits = _logits(0.5, 0.75, 0.3)
    # By the steps so far, which are all good: a bad one ends the row.
    good = {
        "": logits[1],
        GOOD: logits[2],
        GOOD + GOOD: None,
    }
    return _written(
        logits,
        good.__getitem__,
        max_steps=3,
        ends=lambda marks: marks.endswith(BAD),
    )


def two_turns() -> SmallPolicy:
    """Two turns of an environment that answers by chance, and may end the episode after the first.

    The parameters are the logits of action 1: in the first turn, and in either state of the second.
    """
    logits = _logits(0.4, 0.7, 0.2)
    # Probability of the episode's end and of either state, after action 0 and after action 1.
    chances = ((0.5, 0.25, 0.25), (0.2, 0.2, 0.6))
    rows = []
    for action in (0, 1):
        first = _choice(logits[0], action)
        first_reward = 0.5 * action
        end, *states = chances[action]
        ended = Trajectory(first[None], (0,), (first_reward,), chance=end)
        rows.append(ended)
        for state, chance in enumerate(states):
            # The environment's answer lowers the first reward too: what follows an action is part of its worth.
            lowered = first_reward - 0.25 * state
            for reaction in (0, 1):
                second = _choice(logits[1 + state], reaction)
                log_probs = torch.stack([first, second])
                worth = -0.5
                if reaction == state:
                    worth = 1.0
                # A part of the reward is luck, whatever the policy does.
                for luck, odds in ((0.0, 0.75), (2.0, 0.25)):
                    rewards = (lowered, luck + worth)
                    row = Trajectory(log_probs, (0, 1), rewards, chance=chance * odds)
                    rows.append(row)
    return SmallPolicy(logits, tuple(rows))


def shared_states() -> SmallPolicy:
    """Up to three turns between two rooms, each entered several times and by several rows; leaving pays.

    The parameters are the logits of staying in the first room and in the second; each room has its own exit.
    """
    logits = _logits(0.6, 0.35)
    rooms = ("hall", "cellar")
    rewards = ((1.0, 0.0), (3.0, 0.25))  # of each room, for leaving and for staying
    rows = []
    # 1 is staying. A walk ends by leaving, or is cut after its third turn.
    walks = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
    for actions in walks:
        # A stay leads to either room, by the toss of a coin. Every walk begins in the hall.
        for later_rooms in product((0, 1), repeat=len(actions) - 1):
            log_probs = []
            step_rewards = []
            state_keys = []
            for room, action in zip((0, *later_rooms), actions, strict=True):
                log_probs.append(_choice(logits[room], action))
                step_rewards.append(rewards[room][action])
                state_keys.append(rooms[room])
            row = Trajectory(
                torch.stack(log_probs),
                tuple(range(len(actions))),
                tuple(step_rewards),
                chance=0.5 ** len(later_rooms),
                state_keys=tuple(state_keys),
            )
            rows.append(row)
    return SmallPolicy(logits, tuple(rows))


def _written(
    logits: torch.Tensor,
    good_after: Callable[[str], torch.Tensor | None],
    max_steps: int,
    at_once: bool = False,
    ends: Callable[[str], bool] = lambda marks: False,
) -> SmallPolicy:
    """Build the policy of all texts of at most `max_steps` lines: a mark and a separator each, then EOS unless cut.

    The first logit is that of another step. `good_after`: the logit of a good step; `None`: it is bad. `ends`: whether
    nothing but EOS can follow.
    """
    certain = torch.zeros((), dtype=torch.float64)
    rows = []

    def end(marks: str, log_probs: list[torch.Tensor], closing: bool) -> None:
        step_ends = []
        rewards = []
        text = ""
        for mark in marks:
            text += mark + SEPARATOR
            step_ends.append(len(text) - 1)  # at the separator: a character is a token
            rewards.append(float(mark == GOOD))
        if closing:
            step_ends.append(len(text))
            rewards.append(0.0)
        row = Trajectory(
            torch.stack(log_probs),
            tuple(step_ends),
            tuple(rewards),
            outcome=float(marks.endswith(GOOD)),
            text=text,
            closing=closing,
        )
        rows.append(row)

    def write(marks: str, log_probs: list[torch.Tensor]) -> None:
        if len(marks) == max_steps:
            end(marks, log_probs, closing=False)
            return
        if ends(marks):
            end(marks, [*log_probs, certain], closing=True)
            return
        # Unless a row may be EOS alone, the first step is no decision.
        goes_on = certain
        if at_once or marks:
            stops = _choice(logits[0], 0)
            goes_on = _choice(logits[0], 1)
            end(marks, [*log_probs, stops], closing=True)
        good = good_after(marks)
        if good is None:
            write(marks + BAD, [*log_probs, goes_on, certain])
            return
        # A mark is one token: it says that the row goes on, and how. Its separator is certain.
        for mark, action in ((GOOD, 1), (BAD, 0)):
            log_prob = goes_on + _choice(good, action)
            write(marks + mark, [*log_probs, log_prob, certain])

    write("", [])
    return SmallPolicy(logits, tuple(rows))


def _logits(*probabilities: float) -> torch.Tensor:
    chances = torch.tensor(probabilities, dtype=torch.float64)
    return torch.logit(chances).requires_grad_()


def _choice(logit: torch.Tensor, action: int) -> torch.Tensor:
    """Return the log-probability of action 1, whose logit is given, or of action 0."""
    sign = 2 * action - 1  # 1 - sigmoid(z) = sigmoid(-z)
    return logsigmoid(sign * logit)


# Credit as published -------------------------------------------------------------------------------------------------


def published_credit(
    of_group: Callable[[Rows], list[list[float]]],
    rows: Rows,
    num_generations: int,
) -> torch.Tensor:
    """Advantages `(B, T)` of rows in groups, by a rule for the steps of one group."""
    token_advantages = []
    for start in range(0, len(rows), num_generations):
        group = rows[start : start + num_generations]
        for row, advantages in zip(group, of_group(group), strict=True):
            # Inclusive ends (1, 3, 4) are steps of 2, 2 and 1 tokens.
            tokens_of_steps = torch.tensor([-1, *row.step_ends]).diff()
            advantages = torch.tensor(advantages, dtype=torch.float64)
            token_advantages.append(advantages.repeat_interleave(tokens_of_steps))
    return pad_sequence(token_advantages, batch_first=True)


def worst_to_go(group: Rows) -> list[list[float]]:
    """PURE's value of a step (arXiv 2504.15275), the worst reward from it on, minus the rows' mean worst one."""
    mean = sum(min(row.step_rewards) for row in group) / len(group)
    advantages = []
    for row in group:
        worst_rewards = list(accumulate(reversed(row.step_rewards), min))
        advantages.append([worst - mean for worst in reversed(worst_rewards)])
    return advantages


def same_turn_z_score(group: Rows) -> list[list[float]]:
    """Return to go, minus its mean and divided by its std (n - 1) over the rows that reached the same turn."""
    turns = [range(len(row.step_rewards)) for row in group]
    return _among_peers(group, turns, _standardized)


def state_mean(group: Rows) -> list[list[float]]:
    """GiGPO's step advantage (arXiv 2505.10978), undiscounted: all visits of a state are peers, one's own included."""

    def deviation(value: float, peers: list[float]) -> float:
        return value - sum(peers) / len(peers)

    return _among_peers(group, [row.state_keys for row in group], deviation)


def state_z_score(group: Rows) -> list[list[float]]:
    """The same, divided by the std (n - 1) of the visits."""
    return _among_peers(group, [row.state_keys for row in group], _standardized)


def _among_peers(
    group: Rows,
    keys: Sequence[Sequence[Hashable]],
    compared: Callable[[float, list[float]], float],
) -> list[list[float]]:
    """Compare each step's return to go with those of all steps that have the same key."""
    peers = defaultdict(list)
    returns_of_rows = []
    for row, row_keys in zip(group, keys, strict=True):
        returns = []
        for k, key in enumerate(row_keys):
            returns.append(sum(row.step_rewards[k:]))
            peers[key].append(returns[k])
        returns_of_rows.append(returns)
    # A second pass: the last row of a group is a peer of the first.
    advantages = []
    for returns, row_keys in zip(returns_of_rows, keys, strict=True):
        row_peers = [peers[key] for key in row_keys]
        advantages.append(list(map(compared, returns, row_peers)))
    return advantages


def _standardized(value: float, peers: list[float]) -> float:
    """Return `(x - mean) / std`; 0 where the peers are one, or all equal."""
    if min(peers) == max(peers):
        return 0.0
    mean = sum(peers) / len(peers)
    squares = [(peer - mean) ** 2 for peer in peers]
    variance = sum(squares) / (len(squares) - 1)
    return (value - mean) / math.sqrt(variance)
