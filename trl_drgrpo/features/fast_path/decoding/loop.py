"""Sampling G completions of a prompt: run the prompt once, and do not go on with rows that have finished.

transformers' loop runs the same prompt through the model G times, and carries rows that ended long ago until the last
one ends. This loop is handed to `generate` as its `custom_generate`, so that everything before it (logits processors,
stopping criteria, cache, padding) is transformers' own.

The same seed gives the same tokens as transformers' loop, up to rounding in the logits: for every row, also a finished
one, as many random numbers are drawn as there, and a token is chosen by the rule of `torch.multinomial`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from trl_drgrpo.features.fast_path.decoding.exponential import exponential
from trl_drgrpo.features.fast_path.decoding.forwards import Forwards

# A row less saves its share of a step; leaving moves masks and positions, and with some caches keys and values.
DROP_WHEN_ENDED = 1 / 8
# Each looks at a row and its scores alone. Others (a repetition penalty) hold something per row of the first batch.
_ROW_BY_ROW = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.MinPLogitsWarper,
    processors.NoRepeatNGramLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
)


def sample(
    forwards: Forwards,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Callable[..., torch.Tensor],
    generation_config: Any,
    limits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Writes tokens until every row has ended.

    Args:
        forwards ([`Forwards`]): The model, after the prompts.
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Prompts, padded left.
        logits_processor, stopping_criteria, generation_config: As transformers prepared them.
        limits (`Sequence[int]` of length `B`, *optional*): Tokens that each row may write.

    Returns:
        `torch.Tensor` of shape `(B, L + T)`, int64: Prompts and what was sampled, padded behind a row's end.
    """
    rows, device = input_ids.size(0), input_ids.device
    pad_token_id = generation_config.pad_token_id or 0
    drops = forwards.can_drop and all(type(processor) in _ROW_BY_ROW for processor in logits_processor)

    logits = forwards.logits
    sampled: list[torch.Tensor] = []  # one column of all rows per step
    live = torch.arange(rows, device=device)  # rows that are still in the batch
    most = None if limits is None else torch.tensor(limits, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device) if most is None else most <= 0  # of those in the batch
    ids: Any = input_ids
    while True:
        scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32, device=device))
        tokens = _sampled(scores, live, rows) if generation_config.do_sample else scores.argmax(dim=-1)
        tokens = tokens.masked_fill(ended, pad_token_id)
        sampled.append(torch.full((rows,), pad_token_id, device=device).index_put((live,), tokens))
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        ended = ended | stopping_criteria(ids, None)
        if most is not None:
            ended = ended | (most[live] <= len(sampled))
        going_on = (~ended).nonzero().squeeze(1)
        if not len(going_on):
            forwards.end(ids)
            return torch.cat([input_ids, torch.stack(sampled, dim=1)], dim=1)
        if drops and len(going_on) <= (1 - DROP_WHEN_ENDED) * len(live):
            forwards.keep(going_on, ids)
            ids, live, ended = ids[going_on], live[going_on], ended[going_on]
        logits = forwards.step(ids)


def _sampled(scores: torch.Tensor, live: torch.Tensor, rows: int) -> torch.Tensor:
    """One token per row in the batch, by the rule and with the random numbers of `torch.multinomial` over all rows. As
    there, scores that are not finite are a `RuntimeError`: the policy has diverged."""
    probabilities = scores.softmax(dim=-1)
    if not probabilities.sum().isfinite():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    return (probabilities / exponential(live, rows, probabilities)).argmax(dim=-1)
