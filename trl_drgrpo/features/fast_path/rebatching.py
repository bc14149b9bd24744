"""Decide if rows of a model may be re-batched: a row must compute the same, whatever stands beside it and around it.

Planning aligns rows to the left, cuts them to their own extent and puts others beside them. Attention hides padding,
but a state may run through it, and an index that selects the tokens to attend to may select among padding, too. Such
models are found by their cache and by a numerical self-test: rows as TRL pads them against rows as they are planned.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from trl_drgrpo.features.fast_path.noise import without_noise
from trl_drgrpo.features.fast_path.pack_layout import Packed, pack_rows
from trl_drgrpo.features.fast_path.sharing import FAILURES, agreement
from trl_drgrpo.upstream.batches import TokenBatch
from trl_drgrpo.upstream.kv_cache import selects_tokens

# Of the rows of the self-test: padded on both sides, each by another number of tokens.
PROMPT_TOKENS = (12, 5, 9, 2)
COMPLETION_TOKENS = (20, 36, 28, 31)


def why_not_rebatched(
    model: PreTrainedModel,
    planned: Callable[[Packed], torch.Tensor],
    padded: Callable[[TokenBatch, torch.Tensor], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return the reason why rows cannot be re-batched in this model; `None` when they can.

    Args:
        model ([`~transformers.PreTrainedModel`] or its PEFT wrapper): The policy. Left as it was.
        planned (`Callable`): `(1, n)` log-probabilities of the targets of packs.
        padded (`Callable`): `(B, T)` log-probabilities of completions as TRL pads them, at these positions `(B, L)`.
            Absolute positions would count TRL's padding; generation does not.
        dtype (`torch.dtype`, *optional*): Dtype that it computes in, if not that of its weights (autocast).

    Returns:
        `str` or `None`.
    """
    if selects_tokens(model.config):
        return "its attention selects tokens by an index, which depends on the width of a batch"
    tokens = _rows(model.config.get_text_config().vocab_size, model.device)
    rows_alone = [(row,) for row in range(len(PROMPT_TOKENS))]
    packed = pack_rows(tokens, rows_alone)
    positions = (tokens.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad(), without_noise(model):
        try:
            expected = padded(tokens, positions)
            actual = packed.unpack(planned(packed))
        except FAILURES as error:
            return f"it fails on rows of its vocabulary ({type(error).__name__}: {error})"
    expected = expected[packed.scored]
    actual = actual[packed.scored]
    difference = (actual - expected).abs().max().item()
    # The scale of what is allowed: how far the log-probabilities of this model lie apart.
    spread = (expected - expected.mean()).abs().max().item()
    # Written so that NaN on either side refuses as well.
    if not difference <= agreement(model, dtype) * spread:
        return f"what a row computes depends on its padding (log-probabilities differ by {difference:.1e})"
    return None


def _rows(vocabulary: int, device: torch.device) -> TokenBatch:
    """Return random rows in TRL's layout."""
    prompt_lengths = torch.tensor(PROMPT_TOKENS)[:, None]
    completion_lengths = torch.tensor(COMPLETION_TOKENS)[:, None]
    prompt_width = max(PROMPT_TOKENS)
    completion_width = max(COMPLETION_TOKENS)
    # A generator of its own: the test must not move on that of the run.
    generator = torch.Generator().manual_seed(0)
    shape = (len(PROMPT_TOKENS), prompt_width + completion_width)
    ids = torch.randint(vocabulary, shape, generator=generator)
    is_prompt = torch.arange(prompt_width) >= prompt_width - prompt_lengths
    is_completion = torch.arange(completion_width) < completion_lengths
    mask = torch.cat([is_prompt, is_completion], dim=1).long()
    return TokenBatch(ids.to(device), mask.to(device), completion_width)
