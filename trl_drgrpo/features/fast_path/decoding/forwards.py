"""The model's side of generation: prompts that run once, and decoding steps over the fastest cache that serves."""

import copy
import logging
import os
from collections.abc import MutableMapping, MutableSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from trl_drgrpo.features.fast_path.decoding.fused_function import AGREEMENT, AGREEMENT_BELOW
from trl_drgrpo.features.fast_path.decoding.fused_layers import FusedLayers, has_adapters
from trl_drgrpo.features.fast_path.decoding.group_cache import (
    NOT_SERVED,
    GroupCache,
    PrefilledCache,
    Refused,
    group_attention_in,
)
from trl_drgrpo.features.fast_path.decoding.model_inputs import (
    ROW_INPUTS,
    one_token_on,
    plain_step,
    select_inputs,
    select_values,
)
from trl_drgrpo.features.fast_path.noise import random_state, without_noise
from trl_drgrpo.features.fast_path.speed import GENERATION, Speed, SpeedPart
from trl_drgrpo.upstream.kv_cache import (
    CACHE,
    cache_of,
    is_plain,
    select_rows,
    why_no_groups,
    why_no_selection,
    why_states_elsewhere,
)

if TYPE_CHECKING:
    from trl_drgrpo.features.fast_path.decoding.model_inputs import DecodingModel

logger = logging.getLogger(__name__)


AGREEMENT_REPLAYED = 1e-2  # of the same kernels over the same shapes, whatever the numbers
Reasons = MutableMapping[nn.Module, str | None]  # by model
# Of models that were tested: why rows of their cache are not selected, why they have no group cache, why their layers
# are as they were, and why their steps are not replayed.
_why_not_selected: Reasons = WeakKeyDictionary()
_why_not: Reasons = WeakKeyDictionary()
_why_not_fused: Reasons = WeakKeyDictionary()
# Models whose adapters added nothing yet when they were tested: they are tested again in the next generation.
_tested_without_adapters: MutableSet[nn.Module] = WeakSet()
_why_not_replayed: Reasons = WeakKeyDictionary()


class Forwards:
    """Forwards of a model in a decoding loop, and what it has come to.

    Args:
        model ([`~transformers.PreTrainedModel`]): Decoder-only.
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Prompts, padded left. Equal rows are run once.
        model_kwargs (`dict`): `attention_mask` of shape `(B, L)`, `position_ids` of that or `(axes, B, L)` (M-RoPE),
            the cache and the like.
        most (`int`): Tokens that a row may write at most.
        speed ([`Speed`]): Is told what is used, and why not.

    Attributes:
        logits (`torch.Tensor` of shape `(B, V)`): What comes next behind the prompts.
        can_drop (`bool`): Whether rows may leave.
    """

    def __init__(
        self,
        model: "DecodingModel",
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        most: int,
        speed: Speed,
    ):
        self._model = model
        self._kwargs = model_kwargs
        self._most = most
        self._speed = speed
        self._group_attention = ExitStack()
        self._groups: Any = None  # a `GroupCache`, from the first step on
        self._replay: Any = None  # a `Replay`, once steps are recorded
        self._prefilled: Any = None  # of each prompt once, until the first step has passed
        reason = _why_no_selection(model_kwargs) or self._run_once(input_ids)
        self.can_drop = reason is None
        if reason:
            speed.off(reason, *GENERATION)
            self.logits = self._run_prompts(input_ids, model_kwargs)
        else:
            speed.on(SpeedPart.PROMPTS_ONCE)

    def _run_prompts(self, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        # As in transformers' loop, which asks the model for the inputs of its first forward.
        inputs = self._model.prepare_inputs_for_generation(ids, is_first_iteration=True, **model_kwargs)
        outputs = self._model(**inputs, return_dict=True)
        cache = cache_of(outputs)
        if cache is not None:  # some models fill the one they got, and do not return it
            self._kwargs[CACHE] = cache
        return outputs.logits[:, -1].clone()  # those of whole prompts may go

    def _run_once(self, input_ids: torch.Tensor) -> str | None:
        """Run each prompt once, padded as all of them are: what padding does to a state it does in transformers' loop,
        too. Returns why the rows of its cache cannot be selected, with an empty cache again."""
        model = self._model
        cache = self._kwargs[CACHE]
        is_tested = model in _why_not_selected
        reason = _why_not_selected.get(model)
        if reason:
            return reason
        holds_states = not is_plain(cache)
        # A model that fails the test runs all of its prompts, over a cache that is empty again.
        empty = None
        if not is_tested:
            empty = copy.deepcopy(cache)
        first, copies = equal_rows(input_ids, self._kwargs.get("attention_mask"))
        ids = select_values(input_ids, first)
        prompts = select_inputs(self._kwargs, first)
        logits = self._run_prompts(ids, prompts)
        self._prefilled = self._kwargs[CACHE]
        self._mask = prompts.get("attention_mask")
        self._prompts = copies
        if not is_tested:
            reason = why_states_elsewhere(self._prefilled)
            # Only a comparison tells whether a layer's `reorder_cache` selects all of its states.
            if holds_states and not reason:
                reason = self._why_wrong_rows(ids, prompts | {CACHE: self._prefilled}, logits)
            _why_not_selected[model] = reason
        if reason:
            self._kwargs[CACHE] = empty
            self._prefilled = None
            return reason
        self.logits = select_values(logits, copies)
        self._speed.uses[SpeedPart.PROMPTS_ONCE] += len(copies) - len(first)
        return None

    def _why_wrong_rows(self, ids: torch.Tensor, prompts: dict[str, Any], logits: torch.Tensor) -> str | None:
        """Return how selected rows of a cache differ from rows that ran alone; `None` where they do not."""
        from trl_drgrpo.features.fast_path.decoding.copied_rows import selected_and_alone

        try:
            with without_noise(self._model):
                selected, alone = selected_and_alone(self._model, ids, prompts, logits)
        except torch.OutOfMemoryError:
            raise
        except NOT_SERVED as error:
            return f"rows of its cache cannot be selected ({type(error).__name__}: {error})"
        return differs(selected, alone, self._agreement(logits.dtype))

    def __enter__(self) -> "Forwards":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._group_attention.close()
        if self._replay is None:
            return
        # A recording refers to this object, and a fixed step to the cache: without them both go at once.
        self._replay = None
        self._groups.free_steps()
        torch.cuda.empty_cache()  # training cannot take memory from a recording's

    @property
    def replays(self) -> bool:
        """Tell whether steps are recorded and replayed: a row less saves nothing then, and costs a new recording."""
        return self._replay is not None

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows of the batch."""
        # Before the first step the rows are copies of prompts, and only their numbers are selected.
        self._kwargs = select_inputs(self._kwargs, rows)
        if self._prefilled is not None:
            self._prompts = self._prompts[rows]
        elif self._groups is not None:
            self._groups.keep(rows)
        else:
            select_rows(self._kwargs[CACHE], rows)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the last token of each row. Returns `(n, V)`: what comes next."""
        self._kwargs = one_token_on(self._kwargs, with_mask=self._groups is None)
        if self._prefilled is not None:
            return self._first_step(ids)
        if self._groups is None:
            return plain_step(self._model, ids, self._kwargs)
        self._speed.uses[SpeedPart.GROUP_CACHE] += 1
        return self._group_step(ids)

    def _group_step(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = ids[:, -1:]
        positions = self._kwargs["position_ids"][..., -1:]
        if self._replay is not None:
            try:
                logits = self._replay(tokens, positions)
                self._speed.uses[SpeedPart.RECORDED_STEPS] += 1
                return logits
            except Refused as refusal:
                # Nothing of the step has been counted, so it runs below as all later ones do.
                _why_not_replayed[self._model] = str(refusal)
                self._speed.off(str(refusal), SpeedPart.RECORDED_STEPS)
                self._replay = None
                self._groups.free_steps()
        return self._over_groups(tokens, positions)

    def _over_groups(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        outputs = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{CACHE: self._groups},
        )
        return outputs.logits[:, -1]

    def _first_step(self, ids: torch.Tensor) -> torch.Tensor:
        """Take the step that decides on the cache."""
        # Where a group cache is refused, transformers' own goes on from this one: nothing has written into it.
        prefilled = self._prefilled
        self._prefilled = None
        reason = self._speed.barred.get(SpeedPart.GROUP_CACHE) or _why_not.get(self._model)
        if reason is None:
            rewind = random_state(ids.device)
            try:
                logits = self._first_group_step(ids, prefilled)
                self._speed.on(SpeedPart.GROUP_CACHE)
                self._speed.uses[SpeedPart.GROUP_CACHE] += 1
                return logits
            except Refused as refusal:
                rewind()  # a resumed run tries anew, and dropout has drawn before attention refused
                reason = str(refusal)
                _why_not[self._model] = reason
                self._group_attention.close()
                self._groups = None
        self._speed.off(reason, SpeedPart.GROUP_CACHE, SpeedPart.RECORDED_STEPS)
        select_rows(prefilled, self._prompts)
        return plain_step(self._model, ids, self._kwargs)

    def _first_group_step(self, ids: torch.Tensor, prefilled: PrefilledCache) -> torch.Tensor:
        is_tested = self._model in _why_not and self._model not in _tested_without_adapters
        text = self._model.config.get_text_config(decoder=True)
        if getattr(text, "attention_chunk_size", None):  # held like a window, but its beginning jumps
            raise Refused("its attention is chunked")
        reason = why_no_groups(prefilled)
        if reason:
            raise Refused(reason)
        # Without them a model counts positions by the length of the cache, padding included.
        if self._kwargs.get("position_ids") is None:
            raise Refused("it gets no position_ids")
        if not is_tested:
            self._refuse_other_logits(ids, prefilled)
            _why_not[self._model] = None
        self._group_attention.enter_context(group_attention_in(self._model))
        fused = self._fused_layers(prefilled)
        if fused is not None:
            self._group_attention.enter_context(fused.in_place())
        self._groups = GroupCache(prefilled, self._prompts.tolist(), self._mask, self._most)
        logits = self._group_step(ids)
        if fused is not None:
            fused.after_first_step()
        prefilled.layers = []  # `generate` holds on to the cache itself
        self._record_steps(ids.device)
        return logits

    def _fused_layers(self, prefilled: PrefilledCache) -> FusedLayers | None:
        reason = self._speed.barred.get(SpeedPart.FUSED_LAYERS) or _why_not_fused.get(self._model)
        if reason is None:
            return FusedLayers(self._model, self._speed, not is_plain(prefilled))
        parts = [SpeedPart.FUSED_LAYERS]
        if has_adapters(self._model):
            parts.append(SpeedPart.JOINED_ADAPTERS)
        self._speed.off(reason, *parts)
        return None

    def _record_steps(self, device: torch.device) -> None:
        reason = why_not_recorded(self._model, device) or _why_not_replayed.get(self._model)
        if reason:
            self._speed.off(reason, SpeedPart.RECORDED_STEPS, expected=device.type != "cuda")
            return
        from trl_drgrpo.features.fast_path.decoding.replay import Replay

        compared = self._compared
        if self._model in _why_not_replayed:  # an earlier generation has compared its steps
            compared = None
        self._replay = Replay(self._over_groups, self._groups, compared)
        self._speed.on(SpeedPart.RECORDED_STEPS)

    def _refuse_other_logits(self, ids: torch.Tensor, prefilled: PrefilledCache) -> None:
        """Compare a step over a group cache with transformers' own: in fewer operations, and where that gives other
        logits with the layers as they are."""
        with without_noise(self._model):
            rows, expected = self._tested_rows(ids, prefilled)
            reason = None
            # Fused layers first. If their logits differ, the same test with the model's own tells whose fault it is.
            for is_fused in (True, False):
                try:
                    logits = self._tested_step(ids, prefilled, is_fused)
                    dtypes = [layer.keys.dtype for layer in self._groups.groups]
                    reason = differs(logits[rows], expected, self._agreement(*dtypes))
                except (torch.OutOfMemoryError, Refused):
                    raise
                except NOT_SERVED as error:
                    reason = f"{type(error).__name__}: {error}"
                finally:
                    self._groups = None
                if is_fused:
                    _why_not_fused[self._model] = reason
                if reason is None:
                    return
        raise Refused(reason)

    def _tested_step(self, ids: torch.Tensor, prefilled: PrefilledCache, is_fused: bool) -> torch.Tensor:
        """Take the step over a group cache that is thrown away. Returns its logits."""

        def step() -> torch.Tensor:
            self._groups = GroupCache(prefilled, self._prompts.tolist(), self._mask, self._most)
            return self._group_step(ids)

        with group_attention_in(self._model):
            if not is_fused:
                return step()
            fused = FusedLayers(self._model, Speed(logger.debug), not is_plain(prefilled))
            _tested_without_adapters.discard(self._model)
            if not fused.proves_adapters():
                _tested_without_adapters.add(self._model)
            with fused.in_place():
                # The first step compares functions, and notes which adapters read the same input. All later ones run
                # as the second does.
                step()
                fused.after_first_step()
                return step()

    def _compared(self, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
        difference = differs(logits, expected.float(), AGREEMENT_REPLAYED)
        if difference is None:
            _why_not_replayed[self._model] = None
        return difference

    def _tested_rows(self, ids: torch.Tensor, prefilled: PrefilledCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row of each prompt, and its logits over transformers' cache."""
        row_of: dict[int, int] = {}
        for row, prompt in enumerate(self._prompts.tolist()):
            row_of.setdefault(prompt, row)
        rows = torch.tensor(list(row_of.values()), device=ids.device)
        past = copy.deepcopy(prefilled)
        select_rows(past, self._prompts[rows])
        model_kwargs = select_inputs(self._kwargs, rows) | {CACHE: past}
        logits = plain_step(self._model, ids[rows], model_kwargs)
        return rows, logits.float()

    def _agreement(self, *dtypes: torch.dtype) -> float:
        if getattr(self._model, "is_quantized", False):
            return AGREEMENT_BELOW
        return max(AGREEMENT.get(dtype, AGREEMENT_BELOW) for dtype in dtypes)


def differs(logits: torch.Tensor, expected: torch.Tensor, agreement: float) -> str | None:
    """Return how logits `(n, V)` differ; `None` where they are as close to the expected ones as this share of their
    scale."""
    # The scale is how far logits lie from their mean: what all of them have in common changes no probability.
    difference = (logits.float() - expected.float()).abs().max().item()
    scale = (expected - expected.mean(dim=1, keepdim=True)).abs().max().item()
    if difference <= agreement * scale:  # not when one of them is NaN
        return None
    return f"its logits differ by {difference:.1e} (scale {scale:.1e})"


def equal_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(U,)`, the first of each set of equal rows, and `(B,)`, which of them each row is a copy of."""
    compared = input_ids
    if attention_mask is not None:  # a token that is padding in one row may be text in another
        compared = torch.cat([input_ids, attention_mask], dim=1)
    # Rows a, a, b are copies of 0, 0, 1, and the first of them are 0 and 2.
    first = []
    copies = []
    number_of: dict[tuple[int, ...], int] = {}
    for number, row in enumerate(map(tuple, compared.tolist())):
        if row not in number_of:
            number_of[row] = len(first)
            first.append(number)
        copies.append(number_of[row])
    device = input_ids.device
    return torch.tensor(first, device=device), torch.tensor(copies, device=device)


def _why_no_selection(model_kwargs: dict[str, Any]) -> str | None:
    """Return why rows cannot leave a batch or be copies of one another; `None` where they can."""
    tensors = [name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)]
    unknown_tensors = [name for name in tensors if name not in ROW_INPUTS]
    if unknown_tensors:
        return f"its forward takes {', '.join(unknown_tensors)}"
    return why_no_selection(model_kwargs.get(CACHE))


# Set to debug: each launch waits, or no memory is kept, and a capture fails.
_NOT_CAPTURED = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def why_not_recorded(model: nn.Module, device: torch.device) -> str | None:
    """Return why steps are not worth recording or cannot be; `None` on one GPU, where launches take longer than
    kernels."""
    if device.type != "cuda":
        return f"steps are recorded on a GPU, this device is {device.type}"
    device_map = getattr(model, "hf_device_map", None) or {}
    if len(set(device_map.values())) > 1:
        return "the model is on several devices"
    variables = [name for name in _NOT_CAPTURED if os.environ.get(name, "0") != "0"]
    if variables:
        return f"{' and '.join(variables)} is set"
    return None
