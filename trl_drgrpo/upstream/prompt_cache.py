"""A cache of transformers that hands keys, values and running states from prompts to completions, with their gradient.

transformers' own cache copies states in place, which cuts them off the graph. Here, no layer overwrites anything: the
cache of prompts takes notes and shows nothing, and the cache of branches shows copies of the notes and stores nothing.
So a checkpointed layer, which runs again in backward, finds what it found in the forward.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.upstream.kv_cache import (
    CACHE_UTILS,
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    class_named,
    holds_nothing,
    new_layers,
    why_no_cache,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_GradientCheckpointingLayer = class_named("GradientCheckpointingLayer", "transformers.modeling_layers")


@dataclass
class _Notes:
    """Tensors that one layer of the model has computed of the prompts."""

    keys_and_values: tuple[torch.Tensor, torch.Tensor] | None = None
    conv_states: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, torch.Tensor] = field(default_factory=dict)


class _PromptLayer:
    """Layer of a cache that takes notes of prompts and shows none of them.

    A layer that runs again in backward writes again, but then the notes have been handed on. They must not stay here:
    their graph holds checkpointed layers, which hold this cache, and nothing in such a circle is ever freed.
    """

    _layer_type = None  # else transformers takes this class for the one of its kind
    notes: _Notes | None

    # Each update returns what the model goes on with: of prompts that is what it has just computed.

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        if self.notes:
            self.notes.keys_and_values = key_states, value_states
        return key_states, value_states

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        # A convolution over `size` tokens reads the inputs of the last ones: `(B, channels, size)`.
        size = conv_kernel_size or conv_states.size(-1)
        missing = max(0, size - conv_states.size(-1))  # of a prompt shorter than the kernel
        padded = torch.nn.functional.pad(conv_states, (missing, 0))
        if self.notes:
            self.notes.conv_states[state_idx] = padded[..., -size:]
        return padded

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        if self.notes:
            self.notes.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _Copies(dict[int, torch.Tensor]):
    """States of prompts, from which each row gets its own copy when a layer reads them.

    The copy is made by the layer that reads it: a checkpointed layer then holds none between forward and backward.
    """

    def __init__(self, states: dict[int, torch.Tensor], prompt_of_row: torch.Tensor):
        super().__init__(states)
        self._prompt_of_row = prompt_of_row

    def __getitem__(self, state_idx: int) -> Any:  # `None` of a layer without a state of this kind
        states = self.get(state_idx)
        return None if states is None else _rows(states, self._prompt_of_row)


class _BranchLayer:
    """Layer of a cache that shows each row the notes of its prompt and stores nothing."""

    _layer_type = None
    notes: _Notes
    conv_states: _Copies
    prompt_of_row: torch.Tensor

    def _prompt_keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.notes.keys_and_values is None:
            raise LookupError("no keys and values of the prompt")
        return self.notes.keys_and_values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        prompt_keys, prompt_values = self._prompt_keys_and_values()
        # (rows, heads, tokens, head_dim): each row attends to the tokens of its prompt, then to its own.
        keys = torch.cat([_rows(prompt_keys, self.prompt_of_row), key_states], dim=-2)
        values = torch.cat([_rows(prompt_values, self.prompt_of_row), value_states], dim=-2)
        return keys, values

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return torch.cat([self.conv_states[state_idx], conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return recurrent_states

    def get_seq_length(self, *_: Any) -> int:
        return self._prompt_keys_and_values()[0].size(-2)

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        # All keys of the prompt are there, even behind a sliding window: the mask leaves out those before it.
        return self.get_seq_length() + query_length, 0


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


# Layers of a DynamicCache that hold nothing but keys and values of all tokens, or running states, or both.
_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    class_named("LinearAttentionAndFullAttentionLayer", CACHE_UTILS),
    class_named("LinearAttentionAndSlidingWindowAttentionLayer", CACHE_UTILS),
)
_LAYERS_OF_PROMPTS = {kind: type("PromptLayer", (_PromptLayer, kind), {}) for kind in _KINDS}
_LAYERS_OF_BRANCHES = {
    prompts: type("BranchLayer", (_BranchLayer, kind), {}) for kind, prompts in _LAYERS_OF_PROMPTS.items()
}


def why_no_branches(model: "PreTrainedModel") -> str | None:
    """Return why completions cannot start from the states of their prompt; `None` where a comparison may try it."""
    other_kinds = set()
    for layer in new_layers(model.config):
        if type(layer) not in _KINDS and not holds_nothing(layer):
            other_kinds.add(type(layer).__name__)
    if other_kinds:
        return f"its cache has layers of other kinds ({', '.join(sorted(other_kinds))})"
    return why_no_cache(model)


def _as_kind(layer: object, kind: type) -> Any:
    """Return a layer of another kind with the attributes of this one."""
    copied = object.__new__(kind)  # past the constructor, whose arguments differ from kind to kind
    vars(copied).update(vars(layer))
    return copied


def cache_of_prompts(config: "PreTrainedConfig") -> Any:
    """Return a cache that notes what a forward over prompts computes."""
    layers = []
    for layer in new_layers(config):
        if type(layer) in _LAYERS_OF_PROMPTS:
            layer = _as_kind(layer, _LAYERS_OF_PROMPTS[type(layer)])
            layer.notes = _Notes()
        layers.append(layer)  # one that holds nothing stays as it is
    return Cache(layers=layers)


def cache_of_branches(prompts: Any, prompt_of_row: torch.Tensor) -> Any:
    """Return a cache in which rows go on from prompts.

    Args:
        prompts ([`~transformers.Cache`]): A [`cache_of_prompts`], after their forward. It hands its notes on.
        prompt_of_row (`torch.Tensor` of shape `(N,)`, int64): The place of each row's prompt among them.
    """
    layers = []
    for layer in prompts.layers:
        if type(layer) in _LAYERS_OF_BRANCHES:
            prompt_layer = layer
            layer = _as_kind(prompt_layer, _LAYERS_OF_BRANCHES[type(prompt_layer)])
            prompt_layer.notes = None  # the new layer has them, see [`_PromptLayer`]
            layer.prompt_of_row = prompt_of_row
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.conv_states = _Copies(layer.notes.conv_states, prompt_of_row)
                layer.recurrent_states = _Copies(layer.notes.recurrent_states, prompt_of_row)
                # Models ask it whether to go on from a state, or to begin with none.
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        layers.append(layer)
    return Cache(layers=layers)


def checkpointed_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers of a model that run again in backward."""
    layers = [module for module in model.modules() if isinstance(module, _GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


@contextmanager
def caches_while_checkpointing(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, checkpointed layers get the cache that their model gets.

    transformers takes it from them, because a layer that runs again would write again. Layers that only read may keep
    it; these caches allow both.
    """
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a plan of memory does not load

    with ExitStack() as stack:
        for layer in checkpointed_layers(model):
            stack.enter_context(swapped(layer, _can_checkpoint_with_cache=True))
        yield
