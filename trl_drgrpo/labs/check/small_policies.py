"""The small policies of `trl-drgrpo check --credit`: each has one thing in which step credit goes wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn.functional import logsigmoid

from trl_drgrpo.labs.check.enumeration import SmallPolicy, Trajectory

GOOD, BAD, SEPARATOR = "+", "-", "\n"


def stop_or_go(good: float, at_once: bool = False, max_steps: int = 3) -> SmallPolicy:
    """After each step the policy decides whether to write another one; the reward is the number of good steps.

    Rows end with EOS behind a separator, a step of its own, or are cut after the last step.

    Args:
        good (`float`): Probability that a step is good; its logit is the second parameter, that of another step the
            first.
        at_once (`bool`, *optional*, defaults to `False`): The first step is a decision too: a row may be EOS alone.
        max_steps (`int`, *optional*, defaults to `3`): Steps at most.
    """
    logits = _logits(0.5, good)
    rows = _written(logits[0], lambda marks: logits[1], max_steps, at_once)
    return SmallPolicy(logits, tuple(replace(row, outcome=0.0) for row in rows))


def reasoning(max_steps: int = 3) -> SmallPolicy:
    """Stop or go, with an outcome: 1 when the last step is good. A good step follows a good one more often.

    The parameters are the logits of another step, of a good step after a good one, and of one after a bad one.
    """
    logits = _logits(0.5, 0.75, 0.3)
    rows = _written(logits[0], lambda marks: logits[2 if marks.endswith(BAD) else 1], max_steps, at_once=False)
    return SmallPolicy(logits, tuple(rows))


def until_a_mistake() -> SmallPolicy:
    """Reasoning that ends with its first bad step, as a third one is for certain: few enough rows to be cut twice.

    The parameters are the logits of another step, of a good first step, and of a good second one.
    """
    logits = _logits(0.5, 0.75, 0.3)
    good = {"": logits[1], GOOD: logits[2], GOOD + GOOD: None}
    rows = _written(logits[0], good.__getitem__, 3, at_once=False, ends=lambda marks: marks.endswith(BAD))
    return SmallPolicy(logits, tuple(rows))


def two_turns() -> SmallPolicy:
    """Two turns of an environment that answers by chance, and may end the episode after the first.

    The parameters are the logits of action 1: in the first turn, and in either state of the second.
    """
    logits = _logits(0.4, 0.7, 0.2)
    rows = []
    for action in (0, 1):
        first = _choice(logits[0], action)
        for state, chance in ((None, (0.5, 0.2)[action]), (0, (0.25, 0.2)[action]), (1, (0.25, 0.6)[action])):
            paid = 0.5 * action - (0.25 if state == 1 else 0.0)
            if state is None:
                rows.append(Trajectory(first[None], (0,), (paid,), chance=chance))
                continue
            for reaction in (0, 1):
                log_probs = torch.stack([first, _choice(logits[1 + state], reaction)])
                for luck, odds in ((0.0, 0.75), (2.0, 0.25)):
                    reward = luck + (1.0 if reaction == state else -0.5)
                    rows.append(Trajectory(log_probs, (0, 1), (paid, reward), chance=chance * odds))
    return SmallPolicy(logits, tuple(rows))


def shared_states() -> SmallPolicy:
    """Up to three turns between two rooms, each entered several times and by several rows; leaving pays.

    The parameters are the logits of staying in the first room and in the second; each room has its own exit.
    """
    logits = _logits(0.6, 0.35)
    rows = list(_walks(logits, "hall", torch.zeros(0, dtype=torch.float64), (), (), 1.0))
    return SmallPolicy(logits, tuple(rows))


_ROOMS = {"hall": (0.0, 1.0), "cellar": (0.25, 3.0)}  # reward for staying, and for leaving
_NEXT = {"hall": "cellar", "cellar": "hall"}


def _walks(
    logits: torch.Tensor,
    room: str,
    log_probs: torch.Tensor,
    rewards: tuple[float, ...],
    rooms: tuple[str, ...],
    chance: float,
) -> Iterator[Trajectory]:
    """All walks from here on: every second stay leads to the other room."""
    staying, leaving = _ROOMS[room]
    decided = [torch.cat([log_probs, _choice(logits[list(_ROOMS).index(room)], stays)[None]]) for stays in (0, 1)]
    rooms = (*rooms, room)
    ends = tuple(range(len(rooms)))
    yield Trajectory(decided[0], ends, (*rewards, leaving), chance=chance, state_keys=rooms)
    if len(rooms) == 3:
        yield Trajectory(decided[1], ends, (*rewards, staying), chance=chance, state_keys=rooms)
        return
    for following in (room, _NEXT[room]):
        yield from _walks(logits, following, decided[1], (*rewards, staying), rooms, chance / 2)


def _written(
    go: torch.Tensor,
    good_after: Callable[[str], torch.Tensor | None],
    max_steps: int,
    at_once: bool,
    ends: Callable[[str], bool] = lambda marks: False,
) -> Iterator[Trajectory]:
    """All texts of at most `max_steps` lines: a mark and a separator each, then EOS unless the text was cut.

    `good_after`: the logit of a good step; `None`: it is bad. `ends`: whether nothing but EOS can follow.
    """
    certain = torch.zeros((), dtype=torch.float64)

    def continued(marks: str, log_probs: list[torch.Tensor]) -> Iterator[Trajectory]:
        if len(marks) == max_steps:
            yield _row(marks, log_probs, closing=False)
            return
        if ends(marks):
            yield _row(marks, [*log_probs, certain], closing=True)
            return
        may_stop = at_once or marks != ""
        if may_stop:
            yield _row(marks, [*log_probs, _choice(go, 0)], closing=True)
        good = good_after(marks)
        for mark in (GOOD, BAD) if good is not None else (BAD,):
            written = certain if good is None else _choice(good, int(mark == GOOD))
            written = written + (_choice(go, 1) if may_stop else certain)
            yield from continued(marks + mark, [*log_probs, written, certain])

    return continued("", [])


def _row(marks: str, log_probs: list[torch.Tensor], closing: bool) -> Trajectory:
    ends = [2 * k + 1 for k in range(len(marks))]
    rewards = [float(mark == GOOD) for mark in marks]
    if closing:
        ends, rewards = [*ends, 2 * len(marks)], [*rewards, 0.0]
    return Trajectory(
        torch.stack(log_probs),
        tuple(ends),
        tuple(rewards),
        outcome=float(marks.endswith(GOOD)),
        text="".join(mark + SEPARATOR for mark in marks),
        closing=closing,
    )


def _logits(*probabilities: float) -> torch.Tensor:
    return torch.logit(torch.tensor(probabilities, dtype=torch.float64)).requires_grad_()


def _choice(logit: torch.Tensor, taken: int) -> torch.Tensor:
    return logsigmoid(logit if taken else -logit)
