"""The random numbers that `torch.multinomial` draws for a batch, as far as its live rows need them.

`Tensor.exponential_` of a CPU draws a uniform float64 per number and takes its logarithm, one number at a time: at
2048 tokens in the vocabulary that is a tenth of a decoding step. Here the uniform numbers are drawn for all rows, so
that the generator ends where it would, and the logarithm, vectorized, is taken for live rows alone. Where torch draws
otherwise (on a GPU, or as a test of this build finds), `exponential_` itself is called.
"""

from functools import cache

import torch

BLOCK = 2**16  # numbers at a time: half a megabyte


def exponential(live: torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
    """
    Rows `live` of `like.new_empty(rows, V).exponential_(1)`, with the generator left as after that.

    Args:
        live (`torch.Tensor` of shape `(n,)`, int64): Rows wanted, ascending.
        rows (`int`): Rows drawn.
        like (`torch.Tensor` of shape `(n, V)`, float32): Of what type, and where.
    """
    columns = like.size(1)
    if like.device.type != "cpu" or like.dtype != torch.float32 or not _draws_uniform():
        return like.new_empty(rows, columns).exponential_(1)[live]
    drawn = torch.empty_like(like)
    uniform = torch.empty(max(1, BLOCK // columns), columns, dtype=torch.float64)
    done = 0
    for first in range(0, rows, len(uniform)):
        block = uniform[: rows - first].uniform_()
        within = live[(live >= first) & (live < first + len(block))] - first
        if len(within) < len(block):
            block = block[within]
        drawn[done : done + len(within)] = _of_uniform(block)
        done += len(within)
    return drawn


def _of_uniform(uniform: torch.Tensor) -> torch.Tensor:
    return uniform.neg_().log1p_().neg_()


@cache
def _draws_uniform() -> bool:
    """Whether this torch makes exponential numbers from uniform float64, and from nothing else."""
    own, theirs = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    made = _of_uniform(torch.empty(4096, dtype=torch.float64).uniform_(generator=own)).float()
    expected = torch.empty(4096).exponential_(1, generator=theirs)
    return torch.allclose(made, expected, rtol=1e-6, atol=0) and torch.equal(own.get_state(), theirs.get_state())
