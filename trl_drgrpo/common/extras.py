"""Packages that only some settings need: their absence is one line before a model loads, not a traceback after.

The extras are those of `pyproject.toml`; their names are what the message tells the user to install.
"""

import importlib.util
from typing import Any

from trl_drgrpo.common.errors import InputError


def require_package(module: str, field: str, got: str, extra: str) -> None:
    """Refuses a setting (`field`, with the value `got`) whose package is not installed; `extra` brings it."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        remedy = f'Install it with `pip install "trl-drgrpo[{extra}]"`.'
        raise InputError(field, f"{got}, but {package} is not installed", f"the package {package}", remedy)


def require_for_quantization(config: Any) -> None:
    """Refuses a quantization configuration (object or mapping) that asks for 4 or 8 bits without bitsandbytes."""
    settings = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
    bits = [n for n in (4, 8) if settings.get(f"load_in_{n}bit") or settings.get(f"_load_in_{n}bit")]
    if bits:
        require_package("bitsandbytes", "quantization_config", f"a base in {bits[0]} bits", "qlora")
