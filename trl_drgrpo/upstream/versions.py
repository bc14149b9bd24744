"""Supported TRL versions and installed packages. Light to import: the check comes before TRL is loaded."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from trl_drgrpo.common.errors import UpstreamError

TRL_SUPPORTED = ("1.16", "2")  # from, up to but not including: the range that pyproject.toml declares
TRL_TESTED = ("1.16.0",)
LIBRARIES = ("trl-drgrpo", "trl", "transformers", "torch")  # what any number of a run depends on


def installed_versions(packages: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Versions of those packages that are installed; this one's also from a checkout without metadata."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            if package == "trl-drgrpo":
                from trl_drgrpo.common.version import __version__

                versions[package] = __version__
    return versions


def require_supported_trl(installed: str | None = None) -> None:
    """Refuse a TRL (the installed one) outside the supported range."""
    installed = version("trl") if installed is None else installed
    lowest, too_high = TRL_SUPPORTED
    if not Version(lowest) <= Version(installed) < Version(too_high):
        raise UpstreamError(
            f"trl: got {installed}; expected >={lowest},<{too_high}. Install a supported one: "
            f"pip install 'trl>={lowest},<{too_high}'."
        )
