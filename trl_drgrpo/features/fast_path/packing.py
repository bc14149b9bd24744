"""Padded rows -> the packs that run, and the log-probabilities back into the padded layout. Tensors only.

TRL pads prompts on the left and completions on the right, to the widest of the whole generation batch. Here each pack
starts at position 0 and ends with its own last token:

- a row alone: `prompt, completion`. It needs no mask: in a causal model what follows a token cannot change it;
- rows of one prompt: a tree of tokens, depth first: the prompt, prefixes that several completions have in common, then
  what each row has alone. A tree mask lets a token see its ancestors and itself; positions restart at each branch.

The last token of a completion predicts nothing and does not run. One position may predict several tokens, where a
branch follows. A token that several rows share is scored once, and their gradients add up there.

Either way a token's log-probability is the same function of the weights as in its padded row (math.md, section 4).

Only the positions that predict a completion token go through the head: `scored_only` cuts the backbone's output down
to them. (TRL's head does so by itself on GPUs; elsewhere it scores prompts and padding too.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_drgrpo.features.fast_path.planner import MicroBatch, shared_length
from trl_drgrpo.features.fast_path.tree_mask import TreeMask, attends_apart

IGNORED = -100  # the label that TRL's head leaves out


@dataclass(frozen=True)
class Packed:
    """The inputs of one forward, and where each row's log-probabilities come out.

    Args:
        input_ids (`torch.Tensor` of shape `(N, W)`, int64): Tokens of N packs, padded on the right.
        attention_mask (`torch.Tensor`): `(N, W)` of ones, or `(N, 1, W, W)` bool where a pack has branches; a
            [`TreeMask`] where branches attend apart.
        position_ids (`torch.Tensor` of shape `(N, W)`, int64, *optional*): Only where a pack has branches.
        predictors (`torch.Tensor` of shape `(n,)`, int64): Flat positions in `(N, W)` whose output predicts a token,
            ascending; as often as different tokens follow.
        targets (`torch.Tensor` of shape `(1, n)`, int64): The token each predicts; -100: none.
        sources (`torch.Tensor` of shape `(B, T)`, int64): For each token of the padded layout, its place among the n,
            the same one for rows that share it; 0 where there is none.
        scored (`torch.Tensor` of shape `(B, T)`, bool): Tokens that have a place.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor | None
    predictors: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor
    scored: torch.Tensor

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Per-token values `(1, n)`, one per target, in the padded layout `(B, T)`: 0 where nothing was scored. Keeps
        the gradient."""
        return values.reshape(-1)[self.sources].masked_fill(~self.scored, 0.0)


@contextmanager
def scored_only(backbone: torch.nn.Module, packed: Packed) -> Iterator[None]:
    """Inside the block, the backbone gives `(1, n, hidden)`: the positions that predict a token, and no others.
    Outside, its output has `last_hidden_state` of `(N, W, hidden)`."""

    def cut(module: Any, arguments: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[packed.predictors].unsqueeze(0)
        return output

    hook = backbone.register_forward_hook(cut)
    try:
        yield
    finally:
        hook.remove()


def pack_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    batch: MicroBatch,
    pad_token_id: int = 0,
    multiple: int = 1,
) -> Packed:
    """Lay out the packs of a micro-batch.

    Args:
        input_ids (`torch.Tensor` of shape `(B, P + T)`, int64): Prompts padded on the left, completions on the right.
        attention_mask (`torch.Tensor` of shape `(B, P + T)`): 1 for tokens, 0 for padding.
        completion_width (`int`): T.
        batch ([`MicroBatch`]): The packs, as tuples of rows. Rows in no pack are not run and
            get 0. Without any pack, two tokens of the first row run unscored, so that a gradient of zeros comes out.
        pad_token_id (`int`, *optional*, defaults to `0`): Fills the rest of a pack.
        multiple (`int`, *optional*, defaults to `1`): The width is padded to a multiple of this.

    Returns:
        [`Packed`].
    """
    device = input_ids.device
    prompt_width = input_ids.size(1) - completion_width
    # The layout is made of small Python loops over packs: on the CPU, where they do not wait for an accelerator.
    ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
    prompts = [row[:prompt_width][m[:prompt_width]] for row, m in zip(ids, mask, strict=True)]
    completions = [row[prompt_width:][m[prompt_width:]] for row, m in zip(ids, mask, strict=True)]
    sources = torch.zeros(ids.size(0), completion_width, dtype=torch.long)
    scored = torch.zeros(ids.size(0), completion_width, dtype=torch.bool)
    # The t-th token of a completion need not stand in column t: a mask may have holes.
    columns = [m[prompt_width:].nonzero().squeeze(1) for m in mask]

    lines = [_Line.of(pack, prompts, completions) for pack in batch] or [_Line.of((0,), [ids[0, -2:]], [ids[0, :0]])]
    width = -(-max(len(line.ids) for line in lines) // multiple) * multiple
    packed_ids = torch.full((len(lines), width), pad_token_id, dtype=torch.long)
    order, predictors = [], []
    for n, line in enumerate(lines):
        packed_ids[n, : len(line.ids)] = line.ids
        for row, places in line.predictors.items() if batch else ():
            order.append(row)
            predictors.append(n * width + places)
    following = torch.cat([completions[row] for row in order]) if order else ids[0, :0]
    if len(following):
        # A token has one place for all rows that share it: those where it follows the same position.
        span = int(following.max()) + 1
        scores, where = torch.unique(torch.cat(predictors) * span + following, return_inverse=True)
        flat, targets = scores // span, scores % span
        for row, place in zip(order, where.split([len(completions[row]) for row in order]), strict=True):
            sources[row, columns[row]] = place
            scored[row, columns[row]] = True
    else:
        flat, targets = torch.zeros(1, dtype=torch.long), torch.full((1,), IGNORED)
    if any(line.branches for line in lines):
        packed_mask = torch.stack([line.mask(width) for line in lines]).unsqueeze(1).to(device)  # (N, 1, W, W)
        if attends_apart(device.type):
            packed_mask = TreeMask.of(packed_mask, [line.ends.tolist() for line in lines])
        positions = torch.stack(
            [torch.nn.functional.pad(line.positions, (0, width - len(line.ids))) for line in lines]
        )
    else:
        packed_mask = torch.ones(len(lines), width, dtype=torch.long)
        positions = None
    return Packed(
        packed_ids.to(device),
        packed_mask.to(device),
        None if positions is None else positions.to(device),
        flat.to(device),
        targets.unsqueeze(0).to(device),
        sources.to(device),
        scored.to(device),
    )


@dataclass(frozen=True)
class _Line:
    """One pack laid out, depth first.

    Args:
        ids (`torch.Tensor` of shape `(w,)`), positions (`torch.Tensor` of shape `(w,)`): Tokens, and their depths.
        ends (`torch.Tensor` of shape `(w,)`): Where the tokens that follow each one, on any branch, end.
        predictors (`dict[int, torch.Tensor]`): For each row, the places that predict its completion's tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    predictors: dict[int, torch.Tensor]

    @classmethod
    def of(
        cls, pack: tuple[int, ...], prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor]
    ) -> "_Line":
        prompt = prompts[pack[0]]
        inputs = {row: completions[row][:-1].tolist() for row in pack}
        tokens, positions, predictors = [prompt], [torch.arange(len(prompt))], {}
        path, previous, size = torch.arange(len(prompt)), [], len(prompt)  # path: places of the row's tokens so far
        ends = torch.empty(size + sum(len(each) for each in inputs.values()), dtype=torch.long)
        for row in sorted(pack, key=lambda row: inputs[row]):
            depth = len(prompt) + shared_length(previous, inputs[row])
            ends[path[depth:]] = size
            own = completions[row][depth - len(prompt) : len(inputs[row])]
            path = torch.cat([path[:depth], size + torch.arange(len(own))])
            tokens.append(own)
            positions.append(depth + torch.arange(len(own)))
            predictors[row] = path[len(prompt) - 1 :][: len(completions[row])]
            previous, size = inputs[row], size + len(own)
        ends[path] = size
        return cls(torch.cat(tokens), torch.cat(positions), ends[:size], predictors)

    @property
    def branches(self) -> bool:
        """Whether it is more than one chain of tokens; a chain needs no mask."""
        return int(self.positions[-1]) + 1 < len(self.ids)

    def mask(self, width: int) -> torch.Tensor:
        """(W, W) bool: row q sees column k, its ancestor or itself; padding sees itself: a softmax needs something."""
        places = torch.arange(width)
        ends = torch.cat([self.ends, places[len(self.ids) :] + 1])
        return (places <= places[:, None]) & (places[:, None] < ends)
