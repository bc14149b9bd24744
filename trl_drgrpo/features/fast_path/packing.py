"""Padded rows -> the packs that run, and the log-probabilities back into the padded layout. Tensors only.

TRL pads prompts on the left and completions on the right, to the widest of the whole generation batch. Here each pack
starts at position 0 and ends with its own last token:

- a row alone: `prompt, completion`. It needs no mask: in a causal model what follows a token cannot change it;
- completions behind one prompt: `prompt[:-1], (prompt[-1], completion) of each`. A block mask lets a token see the
  shared part and its own completion up to itself; positions restart behind the shared part. The last prompt token
  stands in front of every completion, so that each first token is predicted at a place of its own.

Either way a token's log-probability is the same function of the weights as in its padded row (math.md, section 4).

Only the positions that predict a completion token go through the head: `scored_only` cuts the backbone's output down
to them. (TRL's head does so by itself on GPUs; elsewhere it scores prompts and padding too.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_drgrpo.features.fast_path.planner import MicroBatch

IGNORED = -100  # the label that TRL's head leaves out


@dataclass(frozen=True)
class Packed:
    """The inputs of one forward, and where each row's log-probabilities come out.

    Args:
        input_ids (`torch.Tensor` of shape `(N, W)`, int64): Tokens of N packs, padded on the right.
        attention_mask (`torch.Tensor`): `(N, W)` of ones, or `(N, 1, W, W)` bool where completions share a prompt.
        position_ids (`torch.Tensor` of shape `(N, W)`, int64, *optional*): Only where completions share a prompt.
        predictors (`torch.Tensor` of shape `(n,)`, int64): Flat positions in `(N, W)` whose output predicts a token.
        targets (`torch.Tensor` of shape `(1, n)`, int64): The token each predicts; -100: none.
        sources (`torch.Tensor` of shape `(B, T)`, int64): For each token of the padded layout, its place among the n;
            0 where there is none.
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

    lines = [_Line.of(pack, prompts, completions) for pack in batch] or [_Line(ids[0, -2:], [], torch.arange(2), [])]
    width = -(-max(len(line.ids) for line in lines) // multiple) * multiple
    packed_ids = torch.full((len(lines), width), pad_token_id, dtype=torch.long)
    predictors, targets, count = [], [], 0
    for n, line in enumerate(lines):
        packed_ids[n, : len(line.ids)] = line.ids
        for row, start in line.starts:
            length = len(completions[row])
            predictors.append(n * width + start - 1 + torch.arange(length))  # the one before predicts a token
            targets.append(completions[row])
            sources[row, columns[row]] = count + torch.arange(length)
            scored[row, columns[row]] = True
            count += length
    if not count:
        predictors, targets = [torch.zeros(1, dtype=torch.long)], [torch.full((1,), IGNORED)]
    shares = any(len(line.starts) > 1 for line in lines)
    if shares:
        packed_mask = torch.stack([line.mask(width) for line in lines]).unsqueeze(1)  # (N, 1, W, W)
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
        torch.cat(predictors).to(device),
        torch.cat(targets).unsqueeze(0).to(device),
        sources.to(device),
        scored.to(device),
    )


@dataclass(frozen=True)
class _Line:
    """One pack laid out: its tokens, where each row's completion starts, its positions, and its blocks' lengths."""

    ids: torch.Tensor
    starts: list[tuple[int, int]]
    positions: torch.Tensor
    blocks: list[int]  # tokens of each completion's block; empty where the pack is one row

    @classmethod
    def of(cls, pack: tuple[int, ...], prompts: list[torch.Tensor], completions: list[torch.Tensor]) -> "_Line":
        prompt = prompts[pack[0]]
        if len(pack) == 1:
            ids = torch.cat([prompt, completions[pack[0]]])
            return cls(ids, [(pack[0], len(prompt))], torch.arange(len(ids)), [])
        shared, last = prompt[:-1], prompt[-1:]
        parts, positions, starts, blocks, end = [shared], [torch.arange(len(shared))], [], [], len(shared)
        for row in pack:
            parts += [last, completions[row]]
            starts.append((row, end + 1))
            blocks.append(1 + len(completions[row]))
            positions.append(torch.arange(len(shared), len(shared) + blocks[-1]))
            end += blocks[-1]
        return cls(torch.cat(parts), starts, torch.cat(positions), blocks)

    def mask(self, width: int) -> torch.Tensor:
        """(W, W) bool: row q sees column k. Causal within the shared part and within a block; a block sees both."""
        block = torch.zeros(width, dtype=torch.long)  # 0: the shared part, seen by all
        shared = len(self.ids) - sum(self.blocks)
        ends = shared + torch.tensor(self.blocks).cumsum(0) if self.blocks else torch.tensor([len(self.ids)])
        for number, (end, length) in enumerate(zip(ends.tolist(), self.blocks, strict=False), start=1):
            block[end - length : end] = number
        block[len(self.ids) :] = -1  # padding sees itself and the shared part: a softmax needs something
        sees = (block[:, None] == block[None, :]) | (block[None, :] == 0)
        return sees.tril()
