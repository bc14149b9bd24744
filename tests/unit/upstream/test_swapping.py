"""Attributes that a block swaps come back."""

import pytest

from trl_drgrpo.upstream.private_state import swapped


def test_swapped_restores_also_after_an_error():
    class Owner:
        beta = 0.0

    owner = Owner()
    with pytest.raises(RuntimeError), swapped(owner, beta=1.0):  # noqa: PT012
        assert owner.beta == 1.0
        raise RuntimeError
    assert owner.beta == 0.0
    assert vars(owner) == {}  # a bound method left here would keep its owner, a whole trainer, alive
    owner.beta = 2.0
    with swapped(owner, beta=1.0):
        pass
    assert owner.beta == 2.0
