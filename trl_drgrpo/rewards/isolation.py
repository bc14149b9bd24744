"""INTERFACE STUB, owner: helper 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    timeout: float = 5.0  # wall-clock seconds per completion
    memory_mb: int | None = 4096
    workers: int | None = None  # None: cores available / local processes
    calls_per_worker: int = 1000  # recycled after that many


def scored_in_workers(
    score: Callable[..., Any],
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    name: str,
    limits: Limits | None,
    on_error: str,
    log_metric: Callable[[str, float], None] | None,
) -> list[float | None]:
    return [score(*args, **kwargs) for args, kwargs in calls]
