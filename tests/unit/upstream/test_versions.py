"""The supported range of TRL."""

import pytest

from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.upstream.versions import TRL_SUPPORTED, require_supported_trl


@pytest.mark.parametrize("version", ["1.15.9", "2.0.0", "0.26.0"])
def test_a_trl_outside_the_range_is_refused(version):
    with pytest.raises(UpstreamError, match=f"^trl: got {version}; expected >=1.16,<2"):
        require_supported_trl(version)


def test_the_range_is_the_one_pyproject_declares():
    tomllib = pytest.importorskip("tomllib")
    with open("pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert f"trl>={TRL_SUPPORTED[0]},<{TRL_SUPPORTED[1]}" in dependencies
