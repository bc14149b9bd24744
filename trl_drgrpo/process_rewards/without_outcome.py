"""Runs that have step rewards and no outcome reward, which TRL asks for."""

from typing import Any

PROCESS_ONLY = "rewards/process_only/mean"  # logged by a run without an outcome reward: its `reward` is always 0


def process_only(completions: list[Any], **kwargs: Any) -> list[float]:
    """The outcome reward of a run that has step rewards only: TRL asks for one, and 0 for every row says nothing."""
    return [0.0] * len(completions)
