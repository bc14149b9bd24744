"""Let completions start from the states of their prompt: for models whose layers hold a running state.

A state at some place of a pack has gone through all tokens before it, whatever a mask says. So rows never share one:
prompts run first, each once, in a forward of their own. Then each completion is a row that starts from a copy of its
prompt's keys, values and states, and backward adds up the gradients of the copies. Both forwards run inside of one
call of the model ([`Prompts.run_first`]), so what calls it sees the scores of a pack.

Prompts are padded on the left: their states are those behind the last token, and models keep padding out of them. A
model in which padding reaches a state is not planned at all (`rebatching.py`).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from trl_drgrpo.features.fast_path.micro_batch_planner import MicroBatch
from trl_drgrpo.features.fast_path.pack_layout import BackboneOutput, Packed, packed_with_scores, rows_of
from trl_drgrpo.upstream.batches import TokenBatch
from trl_drgrpo.upstream.kv_cache import CACHE
from trl_drgrpo.upstream.prompt_cache import cache_of_branches, cache_of_prompts, caches_while_checkpointing

# A forward of one token over a cache is a decoding step, whose kernels write states in place.
FEWEST_COLUMNS = 2


@dataclass(frozen=True)
class Prompts:
    """Prompts that run before the rows of a forward, and hand them their states.

    Args:
        input_ids, attention_mask, position_ids (`torch.Tensor` of shape `(P, L)`, int64): Padded on the left, so that
            states and hidden states at the last position are those of whole prompts.
        of_row (`torch.Tensor` of shape `(N,)`, int64): The place of each row's prompt among them.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    of_row: torch.Tensor

    @contextmanager
    def run_first(self, backbone: torch.nn.Module) -> Iterator[None]:
        """Inside the block, the backbone runs the prompts before its rows, and returns the hidden states of their
        last positions with those of the rows, `(1, P + N * W, hidden)`."""
        last_hidden_states: list[torch.Tensor] = []

        # It runs within the forward of the whole model, so that autocast and other wrappers hold for prompts, too.
        def run_prompts(module: Any, arguments: tuple[object, ...], inputs: dict[str, Any]) -> Any:
            cache = cache_of_prompts(module.config)
            prompt_inputs = inputs | {
                "input_ids": self.input_ids,
                "attention_mask": self.attention_mask,
                "position_ids": self.position_ids,
                CACHE: cache,
            }
            # Not a call, which would come here again.
            output: BackboneOutput = module.forward(**prompt_inputs)
            last_hidden_states.append(output.last_hidden_state[:, -1])
            return arguments, inputs | {CACHE: cache_of_branches(cache, self.of_row)}

        def join(module: torch.nn.Module, arguments: tuple[object, ...], output: BackboneOutput) -> BackboneOutput:
            hidden_states = output.last_hidden_state.flatten(0, 1)
            output.last_hidden_state = torch.cat([last_hidden_states.pop(), hidden_states]).unsqueeze(0)
            return output

        before = backbone.register_forward_pre_hook(run_prompts, with_kwargs=True)
        after = backbone.register_forward_hook(join)
        with before, after, caches_while_checkpointing(backbone):
            yield


def branch_rows(
    tokens: TokenBatch,
    batch: MicroBatch,
    pad_token_id: int = 0,
    multiple: int = 1,
) -> Packed:
    """Lay out the prompts of a micro-batch, and its completions as rows of their own.

    Args:
        tokens ([`TokenBatch`]): Prompts padded on the left, completions on the right.
        batch ([`MicroBatch`]): The packs, as tuples of rows. At least one. Rows in no pack are not run and get 0.
        pad_token_id (`int`, *optional*, defaults to `0`): Fills the rest of a row.
        multiple (`int`, *optional*, defaults to `1`): Widths are padded to a multiple of this.

    Returns:
        [`Packed`].
    """
    rows = rows_of(tokens)
    prompts = [list(cast(tuple[int, ...], rows[pack[0]].prompt)) for pack in batch]
    run = list(itertools.chain.from_iterable(batch))
    inputs = [list(rows[row].inputs) for row in run]
    prompt_width = _width(prompts, 1, multiple)
    width = _width(inputs, FEWEST_COLUMNS, multiple)
    prompt_of_row = torch.tensor([number for number, pack in enumerate(batch) for _ in pack])

    prompt_lengths = torch.tensor([len(ids) for ids in prompts])
    row_lengths = torch.tensor([len(ids) for ids in inputs])
    prompt_mask = torch.arange(prompt_width) >= prompt_width - prompt_lengths[:, None]
    row_mask = torch.arange(width) < row_lengths[:, None]
    prompt_ids = [[pad_token_id] * (prompt_width - len(ids)) + ids for ids in prompts]
    row_ids = [ids + [pad_token_id] * (width - len(ids)) for ids in inputs]

    # Hidden states come out in this order: the last one of each of the P prompts, then those of the rows, W of each.
    # The last token of a prompt predicts the first one of each completion.
    places_of_row = {}
    for number, row in enumerate(run):
        first_place = len(prompts) + number * width
        places = [int(prompt_of_row[number]), *range(first_place, first_place + len(inputs[number]))]
        places_of_row[row] = places[: rows[row].completion_length]

    device = tokens.input_ids.device
    return packed_with_scores(
        tokens,
        rows,
        places_of_row,
        input_ids=torch.tensor(row_ids).to(device),
        # Rows go on behind the keys of their prompt: its padding must stay hidden, and positions count its tokens.
        attention_mask=torch.cat([prompt_mask[prompt_of_row], row_mask], dim=1).long().to(device),
        position_ids=(prompt_lengths[prompt_of_row, None] + torch.arange(width)).to(device),
        prompts=Prompts(
            input_ids=torch.tensor(prompt_ids).to(device),
            attention_mask=prompt_mask.long().to(device),
            position_ids=(prompt_mask.cumsum(dim=1) - 1).clamp(min=0).to(device),
            of_row=prompt_of_row.to(device),
        ),
    )


def _width(ids_of_rows: Sequence[Sequence[int]], fewest: int, multiple: int) -> int:
    widest = max(fewest, *(len(ids) for ids in ids_of_rows))
    return -(-widest // multiple) * multiple
