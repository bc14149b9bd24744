"""The installed versions: which are supported, which were tested, and which made a measured number. Also notices and
bars of other libraries that no user can act on.

Light to import: all of this is looked at before TRL is loaded.
"""

import logging
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from trl_drgrpo.common import __version__
from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.common.secrets import without_credentials

logger = logging.getLogger(__name__)

TRL_SUPPORTED = ("1.16", "2")  # from, up to but not including: the range that pyproject.toml declares
# Versions that the whole test suite, or its trainer part, was run with. torch counts by its minor release.
TESTED = {
    "trl": ("1.16.0",),
    "transformers": ("5.17.0", "5.23.0", "5.24.0"),
    "torch": ("2.11", "2.13"),
    "peft": ("0.21.0", "0.21.2"),
}
LIBRARIES = ("trl-drgrpo", "trl", "transformers", "torch")  # what any number of a run depends on


def installed_versions(packages: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of those packages that are installed; this one's also from a checkout without metadata."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = __version__ if package == "trl-drgrpo" else version(package)
    return versions


def untested_versions() -> dict[str, str]:
    """Return the installed version of each host library that is none of [`TESTED`]."""
    untested = {}
    for package, installed in installed_versions(tuple(TESTED)).items():
        compared = ".".join(installed.split(".")[:2]) if package == "torch" else installed
        if compared not in TESTED[package]:
            untested[package] = installed
    return untested


@cache
def say_untested() -> None:
    """Say once per process which host libraries were not tested with this package, and what to do."""
    for package, installed in untested_versions().items():
        logger.warning(
            "%s %s was not tested with this package (tested: %s). Before the first training a tiny model proves it, "
            "in seconds; `trl-drgrpo check` shows the result.",
            package,
            installed,
            ", ".join(TESTED[package]),
        )


def require_supported_trl(installed: str | None = None) -> None:
    """Refuse a TRL (the installed one) outside the supported range."""
    installed = version("trl") if installed is None else installed
    lowest, too_high = TRL_SUPPORTED
    if not Version(lowest) <= Version(installed) < Version(too_high):
        raise UpstreamError(
            f"trl: got {installed}; expected >={lowest},<{too_high}. Install a supported one: "
            f"pip install 'trl>={lowest},<{too_high}'."
        )


# Notices and bars, each filtered by its exact source: here, and nowhere else.

# Logger -> how its message begins, and why it says nothing to a user of this package.
_LOG_LINES = {
    # A kernel for inference in 4 bit on CPUs with AVX512-BF16: importing bitsandbytes, as transformers does, tries it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    # What every trainer does where a tokenizer names other special tokens than the model: nothing is left to do.
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config",
}
# Module that warns -> names that TRL 1.16 itself sets and calls in every run, and transformers 5.23 has renamed.
_DEPRECATED = {
    "transformers.training_args": ("gradient_checkpointing",),
    "transformers.modeling_utils": (
        "is_gradient_checkpointing",
        "gradient_checkpointing_enable",
        "gradient_checkpointing_disable",
    ),
}
_BRIEF_SECONDS = 3.0


def drop_notices() -> None:
    """Filter them from now on. Called before TRL is imported; a second call changes nothing."""
    for name, beginning in _LOG_LINES.items():
        logging.getLogger(name).addFilter(_Beginning(beginning))  # equal ones are added once
    for module, names in _DEPRECATED.items():
        for name in names:
            warnings.filterwarnings(
                "ignore", f"`{name}` is deprecated and will be removed in v6", FutureWarning, module
            )


@dataclass(frozen=True)
class _Beginning:
    """Lets through all lines but those that begin like this."""

    beginning: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


@contextmanager
def brief_bars() -> Iterator[None]:
    """Inside, transformers shows its bars (loading weights, writing shards) only where they take some seconds."""
    from transformers.utils import logging as transformers_logging

    def delayed(factory: Callable[..., object], args: tuple, kwargs: dict[str, object]) -> object:
        options = {"delay": _BRIEF_SECONDS, **kwargs}
        if previous is None:
            return factory(*args, **options)
        return previous(factory, args, options)

    previous = transformers_logging.set_tqdm_hook(delayed)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


# Provenance


def provenance(command: str) -> dict[str, Any]:
    """Return the provenance of measured numbers, to be kept in their files.

    Args:
        command (`str`): The command that makes them; see also [`redacted_command`].

    Returns:
        `dict`: `command`, `date` (ISO, local), `commit` (`None` outside a checkout), `host` and `versions`.
    """
    return {
        "command": without_credentials(command),
        "date": date.today().isoformat(),
        "commit": commit(),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": installed_versions(),
    }


def commit() -> str | None:
    """Return the commit of this package's checkout, with a `+` where files differ; `None` for an installed package."""
    # git looks in every folder above: an environment may lie in a checkout of something else.
    if not (Path(__file__).parents[2] / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or one that hangs: the numbers are worth more
        return None
    return done.stdout.strip() or None
