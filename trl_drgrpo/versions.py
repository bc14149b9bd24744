"""Which TRL this package runs on. Light to import: the answer must come before TRL itself is loaded."""

from importlib.metadata import version

from packaging.version import Version

from trl_drgrpo.errors import UpstreamError

TRL_SUPPORTED = ("1.16", "2")  # from, up to but not including: the range that pyproject.toml declares
TRL_TESTED = ("1.16.0",)


def require_supported_trl(installed: str | None = None) -> None:
    """Refuse a TRL outside the supported range.

    Args:
        installed (`str`, *optional*): Version to judge; the installed one by default.

    Raises:
        `UpstreamError`: Outside the range.
    """
    installed = version("trl") if installed is None else installed
    lowest, too_high = TRL_SUPPORTED
    if not Version(lowest) <= Version(installed) < Version(too_high):
        raise UpstreamError(
            f"trl: got {installed}; expected >={lowest},<{too_high}. Install a supported one: "
            f"pip install 'trl>={lowest},<{too_high}'."
        )
