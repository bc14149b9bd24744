"""The worker's side: calls a reward function or a score, and makes its result plain before it travels.

Rewards are checked and converted here, so that neither tensors nor nonsense have to pickle, and what a reward function
logs is collected, to be logged again in the trainer's process.
"""

import asyncio
import inspect
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.rewards.contract import reward_number, validate_rewards


class SampleScorer:
    """Calls a score of one completion.

    Args:
        score: Synchronous or asynchronous; in the trainer's process the form in which it is sent.
        name (`str`): Name of the reward, for messages.
    """

    def __init__(self, score: Any, name: str):
        self.score = score
        self.name = name

    def warm_up(self) -> None:
        """The reward's own `warm_up`, where it has one."""
        _warm_up(self.score)

    def __call__(self, /, *args: Any, **kwargs: Any) -> float | None:
        return reward_number(_awaited(self.score(*args, **kwargs)), f"reward function '{self.name}'")


@dataclass
class Scored:
    """Result of one call of a reward function: rewards and logged values."""

    rewards: list[float | None]
    metrics: list[tuple[str, float]]
    extras: list[tuple[str, list[Any]]]


class RewardCaller:
    """Calls a reward function of TRL's form.

    Args:
        reward: Synchronous or asynchronous; in the trainer's process the form in which it is sent.
        name (`str`): Name of the reward, for messages.
        loggers (`tuple[str, ...]`): Which of `log_metric` and `log_extra` it is given, as collectors.
    """

    def __init__(self, reward: Any, name: str, loggers: tuple[str, ...]):
        self.reward = reward
        self.name = name
        self.loggers = loggers

    def warm_up(self) -> None:
        """The reward's own `warm_up`, where it has one."""
        _warm_up(self.reward)

    def __call__(self, kwargs: dict[str, Any]) -> Scored:
        scored = Scored([], [], [])
        collectors = {
            "log_metric": lambda name, value: scored.metrics.append((name, float(value))),
            "log_extra": lambda column, values: scored.extras.append((column, list(values))),
        }
        rewards = _awaited(self.reward(**kwargs, **{key: collectors[key] for key in self.loggers}))
        count = len(kwargs["completions"])
        if count == 1 and isinstance(rewards, (list, tuple)) and len(rewards) == 1:
            scored.rewards = [reward_number(rewards[0], f"reward function '{self.name}'")]
        else:
            scored.rewards = validate_rewards(rewards, count, self.name)
        return scored


def _warm_up(function: Any) -> None:
    warm_up = getattr(getattr(function, "__self__", function), "warm_up", None)
    if callable(warm_up):
        warm_up()


def _awaited(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value
