"""Runs that have step rewards and no outcome reward, which TRL asks for."""

from typing import Any

PROCESS_ONLY = "rewards/process_only/mean"  # logged by a run without an outcome reward: its `reward` is always 0


def process_only(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 0 for every row, as the outcome reward of a run that has step rewards only: TRL asks for one."""
    return [0.0] * len(completions)
