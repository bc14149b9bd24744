"""The configuration and its checks: `config.py`, `validation.py` (values), `preflight.py` (inputs of a trainer)."""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import lazy_names

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig as DrGRPOConfig

__getattr__, __dir__ = lazy_names(__name__, {"DrGRPOConfig": "config"})

__all__ = ["DrGRPOConfig"]
