"""Keys and values of completions that share prompts: a prompt's once, a completion's in a buffer that grows in blocks.

The cache takes over from a `DynamicCache` in which each prompt has been run once. Completions sit in a grid of P
prompts and W places, as many as the prompt with most completions needs. A row that ends is dropped from the index, and
nothing is copied; when a quarter of the grid is empty, the others move together. Layers of running states stay
transformers' own beside them, with a state for each row.

`n` rows in the batch, `H` key-value heads of width `D`, `L` columns of the prompts, `T` tokens written since.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.autocast import autocast_dtype, without_autocast
from trl_drgrpo.upstream.kv_cache import (
    AttentionInterface,
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
    PreTrainedModel,
    has_both,
    has_only_states,
    holds_nothing,
)

if TYPE_CHECKING:
    from trl_drgrpo.features.fast_path.decoding.model_inputs import DecodingModel
    from trl_drgrpo.features.fast_path.decoding.replay import FixedStep

LAYER = "trl_drgrpo_layer"  # the attribute by which attention finds the layer of a key
COMPACT_WHEN_EMPTY = 1 / 4  # moving the others copies about as much as one step reads
BLOCK = 64  # columns that a buffer grows by at least


class Grid:
    """The places of the batch's rows.

    Args:
        prompts (`list[int]`), places (`list[int]`): For each row the number of its prompt, and its place there.
        shape (`tuple[int, int]`): P and W.
        device (`torch.device`): Where the cache is.
    """

    def __init__(
        self,
        prompts: list[int],
        places: list[int],
        shape: tuple[int, int],
        device: torch.device,
    ):
        self.prompts = prompts
        self.places = places
        self.shape = shape
        # Slots count the grid row by row: place 1 of prompt 2 in a grid 4 wide is slot 9.
        slots = [prompt * shape[1] + place for prompt, place in zip(prompts, places, strict=True)]
        self.slots = torch.tensor(slots, device=device)
        self.is_full = slots == list(range(self.size))  # row by row, nothing to move
        row_of = {slot: row for row, slot in enumerate(slots)}
        self._rows = torch.tensor([row_of.get(slot, 0) for slot in range(self.size)], device=device)

    @classmethod
    def of(cls, prompts: list[int], number: int, device: torch.device) -> "Grid":
        """Return the smallest grid for rows of so many prompts."""
        # Rows of a prompt take its places in their order; the prompt with most rows decides on the width.
        rows_of = [0] * number
        places = []
        for prompt in prompts:
            places.append(rows_of[prompt])
            rows_of[prompt] += 1
        return cls(prompts, places, (number, max(rows_of)), device)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def of_rows(self, rows: list[int]) -> "Grid":
        """Return the same grid with these rows of the batch alone."""
        prompts = [self.prompts[row] for row in rows]
        places = [self.places[row] for row in rows]
        return Grid(prompts, places, self.shape, self.slots.device)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn `(n, ...)` into `(P, W, ...)`; empty places get the first row."""
        if not self.is_full:
            rows = rows.index_select(0, self._rows)
        return rows.view(*self.shape, *rows.shape[1:])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn `(P, W, ...)` into `(n, ...)`."""
        rows = rows.flatten(0, 1)
        if not self.is_full:
            rows = rows.index_select(0, self.slots)
        return rows


class PrefilledLayer(Protocol):
    """A layer of keys and values of transformers' cache, after the prompts."""

    keys: torch.Tensor  # (P, H, L or fewer, D), as values
    values: torch.Tensor

    def get_seq_length(self) -> int: ...


class PrefilledCache(Protocol):
    """transformers' cache after the prompts. Its layers are of several kinds."""

    layers: list[Any]


@dataclass
class Visible:
    """Keys and values that the newest token of each row sees in a layer.

    Args:
        prompt_keys (`(P * H, D, l)`), prompt_values (`(P * H, l, D)`): Of the prompts, `l <= L` columns.
        own_keys, own_values (`(P * H * W, t, D)`): Of the completions, `t <= T`.
        bias (`(P or 1, 1, l or l + t)`, *optional*): What is added to scores, from the first column on: minus infinity
            at padding. In steps of fixed shapes also at columns that are not written yet, or out of the window.
    """

    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor
    own_keys: torch.Tensor
    own_values: torch.Tensor
    bias: torch.Tensor | None


class GroupLayer(CacheLayerMixin):
    """One layer of a [`GroupCache`].

    Args:
        prefilled ([`~transformers.cache_utils.DynamicLayer`]): The layer after the prompts; left as it is.
        grid ([`Grid`]): Where the rows sit.
        bias (`torch.Tensor` of shape `(P, 1, L)`, *optional*): Minus infinity at padding.
        most (`int`): Tokens that a row may write at most.
    """

    is_sliding = False  # a window is seen to here
    keys: Any  # (P, H, W, capacity, D), as values; `None` before the first token
    values: Any

    def __init__(
        self,
        prefilled: PrefilledLayer,
        grid: Grid,
        bias: torch.Tensor | None,
        most: int,
    ):
        super().__init__()
        self.grid = grid
        self.bias = bias
        self.most = most
        self.window: int | None = getattr(prefilled, "sliding_window", None)
        self.length = prefilled.get_seq_length()  # L; a window may have left fewer columns
        self.heads = prefilled.keys.size(1)
        # Keys are transposed once, (P * H, D, L): every step multiplies queries with all of them.
        self.prompt_keys = prefilled.keys.flatten(0, 1).transpose(1, 2).contiguous()
        self.prompt_values = prefilled.values.flatten(0, 1)
        self.fixed: FixedStep | None = None  # while the step at hand has fixed shapes
        self.tokens = 0  # T
        self.dropped = 0  # columns of the buffers that no window reaches back to
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: it begins with the prompts."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Write a token of each row. Returns its keys and values with a mark by which attention finds this layer."""
        # A grid has one column to write in a step. Several tokens would need a mask among themselves.
        if key_states.size(2) != 1:
            raise ValueError("one token of each row at a time")
        if self.fixed is None:
            self.make_room(key_states, value_states)
        column = self.tokens - self.dropped
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            token = self.grid.spread(states[:, :, 0]).transpose(1, 2)  # (P, H, W, D)
            if self.fixed is None:
                buffer[:, :, :, column] = token
            else:  # a recording would hold on to the number of a column
                buffer.index_copy_(3, self.fixed.column, token.unsqueeze(3).to(buffer.dtype))
            setattr(states, LAYER, self)
        if self.fixed is None:
            self.tokens += 1
        return key_states, value_states

    def make_room(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for one more token of each row, of the width of these `(..., D)`."""
        columns = self.tokens - self.dropped
        if self.keys is not None and columns < self.keys.size(3):
            return
        first = self.dropped  # token that the new buffers begin with
        if self.window:
            first = max(first, self.tokens - self.window + 1)
        copied = self.tokens - first
        # By a half of what is there, so that a long completion is not copied at every block.
        capacity = min(copied + max(BLOCK, copied // 2), max(self.most, copied + 1))
        prompts, width = self.grid.shape
        for name, states in (("keys", key_states), ("values", value_states)):
            dtype = _product_dtype(states)
            larger = states.new_zeros(prompts, self.heads, width, capacity, states.size(-1), dtype=dtype)
            if copied:
                larger[:, :, :, :copied] = getattr(self, name)[:, :, :, first - self.dropped : columns]
            setattr(self, name, larger)
        self.dropped = first
        # Autocast would cast all of them in every step. From the second time on there is nothing to cast.
        self.prompt_keys = self.prompt_keys.to(_product_dtype(key_states))
        self.prompt_values = self.prompt_values.to(_product_dtype(value_states))

    def seen(self, tokens: int) -> tuple[slice, slice]:
        """Return the columns of the prompts, and of the buffers, that a row's last token sees when it has written so
        many. With a window of 4, behind a prompt of 5 tokens, the second token sees the columns 3 and 4 and both own
        ones."""
        first = 0  # column that a window begins with, in the prompt or behind it
        if self.window:
            first = max(0, self.length + tokens - self.window)
        # transformers' layer has dropped columns of the prompt that the window had left behind.
        missing = self.length - self.prompt_values.size(1)
        of_prompt = slice(max(0, first - missing), None)
        of_completion = slice(max(0, first - self.length - self.dropped), tokens - self.dropped)
        return of_prompt, of_completion

    def visible(self) -> Visible:
        """Return keys and values that the newest token sees; in a fixed step all of them, some hidden by the bias."""
        keys = self.keys.flatten(0, 2)
        values = self.values.flatten(0, 2)
        if self.fixed is not None:
            return Visible(self.prompt_keys, self.prompt_values, keys, values, self.fixed.bias)
        of_prompt, of_completion = self.seen(self.tokens)
        bias = self.prompt_bias()
        if bias is not None:
            bias = bias[:, :, of_prompt]
        return Visible(
            prompt_keys=self.prompt_keys[:, :, of_prompt],
            prompt_values=self.prompt_values[:, of_prompt],
            own_keys=keys[:, of_completion],
            own_values=values[:, of_completion],
            bias=bias,
        )

    def prompt_bias(self) -> torch.Tensor | None:
        """Return what is added to scores of the prompts' columns that are held; `None`: nothing."""
        if self.bias is None:
            return None
        missing = self.length - self.prompt_values.size(1)
        return self.bias[:, :, missing:]

    def move(
        self,
        grid: Grid,
        prompts: torch.Tensor,
        places: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Make `grid` the grid: its place `(p, w)` gets what `(prompts[p], places[p, w])` of the old one holds."""
        # Prompts are copied only where some of them have left.
        if len(prompts) < self.grid.shape[0]:
            by_head = self.grid.shape[0], self.heads
            self.prompt_keys = self.prompt_keys.unflatten(0, by_head)[prompts].flatten(0, 1)
            self.prompt_values = self.prompt_values.unflatten(0, by_head)[prompts].flatten(0, 1)
        if self.keys is not None:
            heads = torch.arange(self.heads, device=places.device)
            index = (prompts[:, None, None], heads[None, :, None], places[:, None, :])
            self.keys = self.keys[index]
            self.values = self.values[index]
        self.grid = grid
        self.bias = bias

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.length + self.tokens

    def get_max_length(self) -> int:
        return -1


class GroupLayerWithStates(LinearAttentionLayer, GroupLayer):
    """One layer of a [`GroupCache`] whose rows have running states beside keys and values.

    Args:
        prefilled: The layer after the prompts; left as it is.
        rows (`torch.Tensor` of shape `(n,)`, int64): For each row of the batch the number of its prompt.
        of_group: The grid, the bias and the most tokens of a [`GroupLayer`].
    """

    def __init__(self, prefilled: PrefilledLayer, rows: torch.Tensor, *of_group: Any):
        GroupLayer.__init__(self, prefilled, *of_group)
        # transformers' class has no constructor that takes states: its attributes are copied, those of the prompts.
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, copy.deepcopy(getattr(prefilled, name)))
        self.reorder_cache(rows)


class GroupCache(Cache):
    """Keys and values of rows that share prompts, and the running states of each row.

    Args:
        prefilled ([`~transformers.DynamicCache`]): Of the prompts, each once; left as it is. Of layers that
            `why_no_groups` allows.
        prompts (`list[int]`): For each row of the batch the number of its prompt.
        mask (`torch.Tensor` of shape `(P, L)`, *optional*): 0 at padding.
        most (`int`): Tokens that a row may write at most.

    Attributes:
        grid ([`Grid`]): Where the rows sit.
        groups (`list[GroupLayer]`): Layers of keys and values.
        states (`list`): Layers of running states, of transformers' own kind: a state does not grow, a row has its own.
            A layer of both is in both lists.
    """

    layers: Any

    def __init__(
        self,
        prefilled: PrefilledCache,
        prompts: list[int],
        mask: torch.Tensor | None,
        most: int,
    ):
        # Some layers have no keys: those of running states alone, and those that attend to another layer's.
        first_keys = next(layer.keys for layer in prefilled.layers if getattr(layer, "keys", None) is not None)
        device = first_keys.device
        self.grid = Grid.of(prompts, len(first_keys), device)
        self.bias = None
        # Without padding nothing is added to scores.
        if mask is not None and not mask.all():
            bias = torch.zeros_like(mask, dtype=torch.float32)
            self.bias = bias.masked_fill_(mask == 0, -torch.inf)[:, None]
        rows = torch.tensor(prompts, device=device)
        self.groups: list[GroupLayer] = []
        self.states = []
        layers = []
        # By kind: a layer that shares the keys of another holds nothing, hybrids have states, alone or beside keys.
        for layer in prefilled.layers:
            if holds_nothing(layer):
                layers.append(layer)
                continue
            if has_only_states(layer):
                group = copy.deepcopy(layer)
                group.reorder_cache(rows)
                self.states.append(group)
            elif has_both(layer):
                group = GroupLayerWithStates(layer, rows, self.grid, self.bias, most)
                self.states.append(group)
                self.groups.append(group)
            else:
                group = GroupLayer(layer, self.grid, self.bias, most)
                self.groups.append(group)
            layers.append(group)
        super().__init__(layers=layers)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows of the batch, in this order."""
        for states in self.states:
            states.reorder_cache(rows)
        self.grid = self.grid.of_rows(rows.tolist())
        if len(rows) > (1 - COMPACT_WHEN_EMPTY) * self.grid.size:
            for layer in self.groups:
                layer.grid = self.grid
            return
        # Prompts without a row leave. The rows of the others move to the first places of a narrower grid.
        alive = sorted(set(self.grid.prompts))
        new_numbers = [alive.index(prompt) for prompt in self.grid.prompts]
        grid = Grid.of(new_numbers, len(alive), rows.device)
        places = torch.zeros(grid.shape, dtype=torch.long)  # empty places get what the first one holds
        places[grid.prompts, grid.places] = torch.tensor(self.grid.places)
        prompts = torch.tensor(alive, device=rows.device)
        places = places.to(rows.device)
        if self.bias is not None:
            self.bias = self.bias[prompts]
        for layer in self.groups:
            layer.move(grid, prompts, places, self.bias)
        self.grid = grid

    def free_steps(self) -> None:
        """Let steps look at the columns that are written, and at no others: the end of fixed shapes."""
        for layer in self.groups:
            layer.fixed = None


NAME = "trl_drgrpo_groups"


class Refused(Exception):
    """A model whose attention a group cache cannot serve. The message says why."""


# What a model may raise over a cache that is not made for it. `OutOfMemoryError` is a RuntimeError: decoding
# raises it again before it catches these.
NOT_SERVED = (Refused, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


@contextmanager
def group_attention_in(model: "DecodingModel") -> Iterator[None]:
    """Inside the block the model attends to a [`GroupCache`]. Its own attention is back afterwards in any case."""
    # A model and its parts may have configurations of their own, and each one names an attention.
    configs: list[Any] = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = {config._attn_implementation for config in configs}
    if len(before) != 1:
        raise Refused("its parts use different attention")
    try:
        AttentionInterface.register(NAME, group_attention)  # there is no way back; the name is ours alone
        try:
            model.set_attn_implementation(NAME)
        except (ValueError, KeyError) as error:
            raise Refused(f"its attention cannot be replaced ({error})") from error
        # Some models (Bloom, Falcon, MPT) only warn, and keep their own.
        if any(config._attn_implementation != NAME for config in configs):
            raise Refused("its attention cannot be replaced")
        yield
    finally:
        [attention] = before
        for config in configs:
            config._attn_implementation = attention


def group_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one new token per row over a [`GroupCache`], as transformers calls it: rows that share a prompt are
    one product with its keys.

    Registered with transformers under [`NAME`]. A name without a mask function gets no mask: windows and padding are
    the cache's. It refuses the arguments below that would change scores, and decoding goes on without it. Any other
    keyword is ignored, as transformers' own attention does: the first step is compared with the model's.

    Args:
        module: The layer that attends.
        query (`(n, heads, 1, D)`), key, value (`(n, H, 1, D)`): Of the new tokens; keys and values are in the cache.
        scaling (`float`, *optional*): Of scores; `D ** -0.5` by default.
        softcap (`float`, *optional*): Scores are `softcap * tanh(score / softcap)`.
        s_aux (`(heads,)`, *optional*): Sinks, one more score per head without a value.
        attention_mask, dropout, position_bias: Refused, unless they change nothing.
        sliding_window (`int`, *optional*): Refused, unless it is the cache's.

    Returns:
        `(n, 1, heads, D)`, and no weights.
    """
    # The mark is on the tensor that `update` returned: an operation on keys or values would lose it.
    layer = getattr(key, LAYER, None)
    if layer is None or getattr(value, LAYER, None) is not layer:
        raise Refused("it changes keys or values after the cache")
    if attention_mask is not None or position_bias is not None:
        raise Refused("it adds a mask or bias to attention scores")
    if dropout:
        raise Refused("its attention uses dropout")
    if sliding_window is not None and sliding_window != layer.window:
        raise Refused(f"it attends to a window of {sliding_window}, its cache holds {layer.window or 'everything'}")
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    with without_autocast(query.device.type):  # dtypes are chosen here
        return _attended(layer, query, scale, softcap, s_aux), None


def _attended(
    layer: GroupLayer,
    query: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return `(n, 1, heads, D)`, with one softmax over the prompt's scores and a row's own."""
    grid = layer.grid
    visible = layer.visible()
    prompts, width = grid.shape
    repeated = query.size(1) // layer.heads  # query heads of a key-value head
    query = grid.spread(query[:, :, 0].to(visible.own_keys.dtype))
    # (P, H, W, repeated, D): a view both as rows of a prompt and as rows of a completion
    query = query.unflatten(2, (layer.heads, repeated)).transpose(1, 2).contiguous()
    by_prompt = query.view(prompts * layer.heads, width * repeated, -1)
    by_row = query.view(-1, repeated, query.size(-1))
    scores = _scores(by_prompt, by_row, visible, scaling)  # (P * H * W, repeated, l + t)
    # The order matters: models cap their scores before a mask hides some, and sinks are neither capped nor hidden.
    if softcap is not None or sinks is not None:
        scores = scores.float()
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if visible.bias is not None:
        # Not `+=`, which would also copy the sum onto itself.
        biased = scores.view(prompts, -1, scores.size(2))[..., : visible.bias.size(2)]
        biased.add_(visible.bias)
    if sinks is not None:  # of each query head, for each place
        sinks = sinks.float().view(1, layer.heads, 1, repeated, 1)
        sinks = sinks.expand(prompts, -1, width, -1, -1).reshape(len(by_row), repeated, 1)
        scores = torch.cat([scores, sinks], dim=2)
    # Scores of half precision are summed up in float32 inside the softmax, too.
    weights = scores.softmax(dim=2).to(visible.own_values.dtype)
    columns = visible.prompt_values.size(1)
    over_prompt = weights[..., :columns].view(len(by_prompt), width * repeated, columns)
    over_own = weights[..., columns : columns + visible.own_values.size(1)]
    attended = torch.bmm(over_prompt, visible.prompt_values).view_as(by_row)
    attended.baddbmm_(over_own, visible.own_values)
    # Back from (P, H, W, repeated, D) to a row of all query heads for each place.
    attended = attended.view(prompts, layer.heads, width, repeated, -1).transpose(1, 2).flatten(2, 3)
    return grid.gather(attended)[:, None]


def _scores(
    by_prompt: torch.Tensor,
    by_row: torch.Tensor,
    visible: Visible,
    scaling: float,
) -> torch.Tensor:
    """Return scores `(P * H * W, repeated, l + t)` of queries, as rows of a prompt and as rows of a completion.

    `baddbmm_` scales within the product; with `beta=0` it does not read what it writes to.
    """
    # Prompts first: one product per prompt and head. Then one per row, over what it has written itself.
    columns = visible.prompt_keys.size(2)
    written = visible.own_keys.size(1)
    in_place = writes_into_place(by_row.device)
    scores = by_row.new_empty(*by_row.shape[:2], columns + written)
    if in_place:
        of_prompt = scores.view(*by_prompt.shape[:2], -1)[..., :columns]
        of_completion = scores[..., columns:]
    else:
        of_prompt = by_prompt.new_empty(*by_prompt.shape[:2], columns)
        of_completion = by_row.new_empty(*by_row.shape[:2], written)
    of_prompt.baddbmm_(by_prompt, visible.prompt_keys, beta=0, alpha=scaling)
    of_completion.baddbmm_(by_row, visible.own_keys.transpose(1, 2), beta=0, alpha=scaling)
    if not in_place:
        torch.cat([of_prompt.view(*by_row.shape[:2], columns), of_completion], dim=2, out=scores)
    return scores


def writes_into_place(device: torch.device) -> bool:
    """Return whether both products write into one tensor. On a CPU torch would multiply one prompt after the other
    where the result is not contiguous: 215 instead of 115 microseconds (4 prompts x 8, 2026-11-27)."""
    return device.type != "cpu"


def _product_dtype(states: torch.Tensor) -> torch.dtype:
    """Return the dtype that a product with these states has, which autocast may lower."""
    dtype = autocast_dtype(states.device.type)
    if dtype is not None and states.dtype != torch.float64:
        return dtype
    return states.dtype
