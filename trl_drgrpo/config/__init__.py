"""The configuration and its checks: `config.py`, `rules.py` (values), `preflight.py` (inputs of a trainer)."""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig as DrGRPOConfig

attach(__name__)
