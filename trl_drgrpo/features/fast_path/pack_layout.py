"""Lay padded rows out as packs, and put the log-probabilities of packs back into the padded layout. Tensors only.

TRL pads prompts on the left and completions on the right, to the widest of the whole generation batch. Here each pack
starts at position 0 and ends with its own last token:

- a row alone: `prompt, completion`. It needs no mask: in a causal model later tokens cannot change earlier ones;
- rows of one prompt: a tree of tokens, depth first: the prompt, prefixes that several completions have in common, then
  the remaining tokens of each row. A tree mask lets a token see its ancestors and itself; positions restart at each
  branch.
  A sliding window is one more condition: an ancestor's position must be less than a window away.

Where layers hold a running state, a later branch would go on from the state of an earlier one. There, prompts run by
themselves and each completion is a row that starts from the states of its prompt (`branches.py`).

The last token of a completion predicts nothing and does not run, unless every token counts in a loss of its own
(`router_balance.py`). One position may predict several tokens, where a branch follows. A token that several rows share
is scored once, and their gradients add up there.

Either way a token's log-probability is the same function of the weights as in its padded row (math.md, section 4).

Only the positions that predict a completion token go through the head: `scored_only` cuts the backbone's output down
to them. (TRL's head does so by itself on GPUs; elsewhere it scores prompts and padding too.)
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from trl_drgrpo.features.fast_path.micro_batch_planner import MicroBatch, Row, shared_length
from trl_drgrpo.features.fast_path.tree_mask import TreeMask, attends_apart
from trl_drgrpo.upstream.batches import TokenBatch

if TYPE_CHECKING:
    from trl_drgrpo.features.fast_path.branches import Prompts

IGNORED = -100  # the label that TRL's head leaves out


@dataclass(frozen=True)
class MaskForm:
    """Form in which a model takes a block mask from outside.

    Args:
        window (`int`, *optional*): Tokens that a layer with a sliding window sees, the token itself included.
        kinds (`tuple[str, ...]`): Kinds of layers, each of which gets its own mask in a mapping; empty: one mask
            serves all layers, windowed where there is a window.
        additive (`bool`): Whether the mask is added to scores (0, or the lowest number); else it is boolean.
    """

    window: int | None = None
    kinds: tuple[str, ...] = ()
    additive: bool = False

    def masks(self, tree: torch.Tensor, positions: torch.Tensor, ends: Sequence[Sequence[int]]) -> Any:
        """Put the mask of packs into this form.

        Args:
            tree (`torch.Tensor` of shape `(N, 1, W, W)`, bool): Each row sees its ancestors and itself.
            positions (`torch.Tensor` of shape `(N, W)`, int64): Depths in the tree.
            ends (`Sequence[Sequence[int]]`): As in [`cut_into_blocks`].

        Returns:
            `torch.Tensor` of the same shape, or `dict[str, torch.Tensor]` of one per kind.
        """
        windowed = None
        if self.window is not None:
            # Depths, not columns: on the way to a token stand the tokens of other branches, which it does not see.
            distance = positions[:, None, :, None] - positions[:, None, None, :]
            windowed = self._finished(tree & (distance < self.window), ends, is_windowed=True)
            if not self.kinds:
                return windowed
        full = self._finished(tree, ends)
        if not self.kinds:
            return full
        return {kind: windowed if kind == "sliding_attention" else full for kind in self.kinds}

    def _finished(
        self,
        mask: torch.Tensor,
        ends: Sequence[Sequence[int]],
        is_windowed: bool = False,
    ) -> torch.Tensor:
        if self.additive:
            # The lowest number and not -inf, as in transformers' own eager masks.
            lowest = torch.finfo(torch.float32).min
            return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, lowest)
        if attends_apart(mask.device.type):
            return TreeMask.of(mask, ends, is_windowed)
        return mask


@dataclass(frozen=True)
class Packed:
    """The inputs of one forward, and where each row's log-probabilities come out.

    Args:
        input_ids (`torch.Tensor` of shape `(N, W)`, int64): Tokens of N packs, padded on the right.
        attention_mask (`torch.Tensor` or `dict`): `(N, W)` of ones, or, where a pack has branches, `(N, 1, W, W)` in
            the model's [`MaskForm`]; a [`TreeMask`] where branches attend apart; `(N, L + W)` behind `prompts`.
        position_ids (`torch.Tensor` of shape `(N, W)`, int64, *optional*): Only where rows share a prompt.
        predictors (`torch.Tensor` of shape `(n,)`, int64): Flat positions in `(N, W)` whose output predicts a token,
            ascending; as often as different tokens follow.
        targets (`torch.Tensor` of shape `(1, n)`, int64): The token each predicts; -100: none.
        sources (`torch.Tensor` of shape `(B, T)`, int64): For each token of the padded layout, its place among the n,
            the same one for rows that share it; 0 where there is none.
        scored (`torch.Tensor` of shape `(B, T)`, bool): Tokens that have a place.
        row_counts (`torch.Tensor` of shape `(N, W)`, int64, *optional*): Rows that contain each token; 0 for padding.
            Only where whole rows run.
        prompts ([`Prompts`], *optional*): Where rows are completions alone. The last positions of the P prompts then
            come before those of `(N, W)`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | dict[str, torch.Tensor]
    position_ids: torch.Tensor | None
    predictors: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor
    scored: torch.Tensor
    row_counts: torch.Tensor | None = None
    prompts: "Prompts | None" = None

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Put per-token values `(1, n)` into the padded layout `(B, T)`: 0 where nothing was scored. Keeps the
        gradient."""
        return values.reshape(-1)[self.sources].masked_fill(~self.scored, 0.0)


class BackboneOutput(Protocol):
    """Output of a model without its head."""

    last_hidden_state: torch.Tensor  # (N, W, hidden)


@contextmanager
def scored_only(backbone: torch.nn.Module, packed: Packed) -> Iterator[None]:
    """Make the backbone return only the positions that predict a token, `(1, n, hidden)` instead of `(N, W, hidden)`,
    inside the block."""

    def cut(
        module: torch.nn.Module,
        arguments: tuple[object, ...],
        output: BackboneOutput,
    ) -> BackboneOutput:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[packed.predictors].unsqueeze(0)
        return output

    with backbone.register_forward_hook(cut):  # a handle that removes the hook at the end of the block
        yield


def rows_of(tokens: TokenBatch, live: Sequence[bool] | None = None, whole: bool = False) -> list[Row]:
    """Return the planner's rows for tensors in TRL's layout, all of them live by default. Of `whole` rows every token
    runs.

    The key of a prompt is its tokens: rows with equal prompts may share one, whatever dataset row they come from.
    """
    prompt_width = tokens.input_ids.size(1) - tokens.completion_width
    ids_of_rows = tokens.input_ids.tolist()
    masks = tokens.attention_mask.tolist()
    rows = []
    for number, (ids, mask) in enumerate(zip(ids_of_rows, masks, strict=True)):
        prompt = tuple(itertools.compress(ids[:prompt_width], mask))
        completion = tuple(itertools.compress(ids[prompt_width:], mask[prompt_width:]))
        is_live = live is None or live[number]
        rows.append(Row(prompt, len(prompt), len(completion), is_live, completion, whole))
    return rows


def pack_rows(
    tokens: TokenBatch,
    batch: MicroBatch,
    pad_token_id: int = 0,
    multiple: int = 1,
    form: MaskForm = MaskForm(),  # frozen
    whole: bool = False,
) -> Packed:
    """Lay out the packs of a micro-batch.

    Args:
        tokens ([`TokenBatch`]): Prompts padded on the left, completions on the right.
        batch ([`MicroBatch`]): The packs, as tuples of rows. Rows in no pack are not run and get 0. Without any pack,
            two tokens of the first row run unscored, so that the forward has a gradient, of zeros.
        pad_token_id (`int`, *optional*, defaults to `0`): Fills the rest of a pack.
        multiple (`int`, *optional*, defaults to `1`): The width is padded to a multiple of this.
        form ([`MaskForm`], *optional*): Form of block masks that the model takes.
        whole (`bool`, *optional*, defaults to `False`): Run every token of the rows, and count the rows of each.

    Returns:
        [`Packed`].
    """
    device = tokens.input_ids.device
    # The layout is made of small Python loops over packs: on the CPU, where they do not wait for an accelerator.
    rows = rows_of(tokens, whole=whole)
    if batch:
        lines = [Line(pack, rows) for pack in batch]
    else:
        lines = [Line((0,), [Row(tuple(tokens.input_ids[0, -2:].tolist()), 2, 0)])]
    widest = max(len(line.ids) for line in lines)
    width = -(-widest // multiple) * multiple

    places_of_row = {}
    if batch:
        for number, line in enumerate(lines):
            for row, places in line.predictors.items():
                places_of_row[row] = [number * width + place for place in places]  # in `(N, W)` read as one line

    packed_ids = torch.tensor([line.ids + [pad_token_id] * (width - len(line.ids)) for line in lines])
    # Ones for padding, too: it stands behind all tokens, where causal attention does not look. Without a zero in the
    # mask, transformers makes none, and attention keeps its fast kernel.
    packed_mask: Any = torch.ones_like(packed_ids, device=device)
    positions = None
    if any(line.branches for line in lines):
        tree = torch.stack([line.mask(width) for line in lines]).unsqueeze(1).to(device)  # (N, 1, W, W)
        positions = torch.tensor([line.positions + [0] * (width - len(line.ids)) for line in lines]).to(device)
        packed_mask = form.masks(tree, positions, [line.ends for line in lines])
    row_counts = None
    if whole:
        row_counts = torch.zeros_like(packed_ids)
        if batch:  # the two tokens that run otherwise belong to no row
            row_counts = torch.stack([line.row_counts(width) for line in lines])
        row_counts = row_counts.to(device)
    return packed_with_scores(
        tokens,
        rows,
        places_of_row,
        input_ids=packed_ids.to(device),
        attention_mask=packed_mask,
        position_ids=positions,
        row_counts=row_counts,
    )


def packed_with_scores(
    tokens: TokenBatch,
    rows: Sequence[Row],
    places_of_row: Mapping[int, Sequence[int]],
    **inputs: Any,
) -> Packed:
    """Return the inputs of a forward with where the log-probabilities come out.

    Args:
        tokens ([`TokenBatch`]), rows (`Sequence[Row]`): The padded layout, and its rows.
        places_of_row (`Mapping[int, Sequence[int]]`): The positions that predict the completion of each row that runs.
        inputs: The other fields of [`Packed`].
    """
    # A score is the position that predicts and the token that it predicts. Rows that share both share the score.
    scores_of_row = {}
    for row, places in places_of_row.items():
        scores_of_row[row] = list(zip(places, rows[row].completion, strict=True))
    scores = sorted(set(itertools.chain.from_iterable(scores_of_row.values())))
    place_of_score = {score: place for place, score in enumerate(scores)}

    # The t-th token of a completion need not stand in column t: a mask may have holes.
    is_token = tokens.attention_mask[:, -tokens.completion_width :].cpu().bool()
    sources = torch.zeros(is_token.shape, dtype=torch.long)
    scored = torch.zeros_like(is_token)
    for row, row_scores in scores_of_row.items():
        places = [place_of_score[score] for score in row_scores]
        sources[row, is_token[row]] = torch.tensor(places, dtype=torch.long)
        scored[row] = is_token[row]
    # With nothing to score, one position predicts no token: the forward still has a gradient, of zeros.
    predictors, targets = torch.tensor(scores or [(0, IGNORED)]).T
    device = tokens.input_ids.device
    return Packed(
        predictors=predictors.to(device),
        targets=targets.unsqueeze(0).to(device),
        sources=sources.to(device),
        scored=scored.to(device),
        **inputs,
    )


class Line:
    """One pack laid out, depth first.

    Attributes:
        ids, positions (`list[int]`): Tokens, and their depths.
        ends (`list[int]`): For each token, the end of the tokens that follow it, on any branch.
        predictors (`dict[int, list[int]]`): For each row, the places that predict its completion's tokens.
        last_places (`list[int]`): The place of the last token of each row.
    """

    def __init__(self, pack: Sequence[int], rows: Sequence[Row]):
        prompt_length = rows[pack[0]].prompt_length
        self.ids: list[int] = list(cast(tuple[int, ...], rows[pack[0]].prompt))  # rows that are packed have tokens
        self.positions = list(range(prompt_length))
        self.ends = [0] * prompt_length
        self.predictors: dict[int, list[int]] = {}
        self.last_places: list[int] = []
        path = list(range(prompt_length))  # places of the tokens of the row, from the root
        previous = ()
        # In the order of their tokens each row shares the most with the row before it, so one path is enough. Prompt
        # p q with the completions 5 6 7 and 5 8 9 becomes p q 5 6 8 (the last tokens do not run), with the depths
        # 0 1 2 3 3 and the ends 5 5 5 4 5.
        for row in sorted(pack, key=lambda row: rows[row].inputs):
            inputs = rows[row].inputs
            shared = shared_length(previous, inputs)
            branch_start = prompt_length + shared
            self._end(path[branch_start:])  # nothing follows there any more
            branch = inputs[shared:]
            path = path[:branch_start] + list(range(len(self.ids), len(self.ids) + len(branch)))
            self.ids += branch
            self.positions += range(branch_start, branch_start + len(branch))
            self.ends += [0] * len(branch)
            # The last token of the prompt predicts the first of the completion.
            self.predictors[row] = path[prompt_length - 1 :][: rows[row].completion_length]
            self.last_places.append(path[-1])
            previous = inputs
        self._end(path)

    def _end(self, places: Sequence[int]) -> None:
        for place in places:
            self.ends[place] = len(self.ids)

    @property
    def branches(self) -> bool:
        """Tell whether it is more than one chain of tokens; a chain needs no mask."""
        return self.positions[-1] + 1 < len(self.ids)

    def row_counts(self, width: int) -> torch.Tensor:
        """Count the rows that contain each token `(W,)`: depth first, those whose last token is before its end."""
        rows_at_place = torch.bincount(torch.tensor(self.last_places), minlength=width)
        rows_before_place = torch.nn.functional.pad(rows_at_place.cumsum(dim=0), (1, 0))
        counts = rows_before_place[self.ends] - rows_before_place[: len(self.ends)]
        return torch.nn.functional.pad(counts, (0, width - len(self.ends)))

    def mask(self, width: int) -> torch.Tensor:
        """Return the mask `(W, W)`: True where row q sees column k, its ancestor or itself.

        Depth first, the descendants of k are the places from k to its end. Padding sees itself: a softmax over nothing
        is NaN.
        """
        places = torch.arange(width)
        ends = torch.tensor([*self.ends, *range(len(self.ends) + 1, width + 1)])
        return (places <= places[:, None]) & (places[:, None] < ends)
