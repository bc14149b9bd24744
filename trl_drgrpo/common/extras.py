"""Packages that only some settings need: their absence is one line before a model loads, not a traceback after.

The extras are those of `pyproject.toml`; their names are what the message tells the user to install.
"""

import importlib.util
from typing import Any

from trl_drgrpo.common.errors import InputError


def require_package(module: str, field: str, got: str, extra: str) -> None:
    """Refuse a setting whose package is not installed.

    Args:
        module (`str`): What would be imported.
        field (`str`): The setting that needs it.
        got (`str`): Its value.
        extra (`str`): The extra of this package that brings it.

    Raises:
        `InputError`: It is not installed.
    """
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        remedy = f'Install it with `pip install "trl-drgrpo[{extra}]"`.'
        raise InputError(field, f"{got}, but {package} is not installed", f"the package {package}", remedy)


def require_for_quantization(config: Any) -> None:
    """Refuse a quantization by bitsandbytes where that is not installed.

    Args:
        config (*optional*): A quantization configuration, as an object or a mapping; others are not looked at.

    Raises:
        `InputError`: It asks for 4 or 8 bits by bitsandbytes, which is missing.
    """
    settings = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
    bits = [n for n in (4, 8) if settings.get(f"load_in_{n}bit") or settings.get(f"_load_in_{n}bit")]
    if bits:
        require_package("bitsandbytes", "quantization_config", f"a base in {bits[0]} bits", "qlora")
