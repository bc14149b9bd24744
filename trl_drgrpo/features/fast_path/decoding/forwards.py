"""The model's side of generation: prompts that run once in this package's loop (`Forwards`), and an error that says
what to change when a generation does not fit.
"""

import copy
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch

from trl_drgrpo.features.fast_path.decoding.group_cache import NOT_SERVED, GroupCache, Refused, group_attention_in
from trl_drgrpo.features.fast_path.decoding.replay import Replay, why_not_recorded
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


def does_not_fit(error: Exception, input_ids: torch.Tensor, new: int, shares: bool) -> Exception:
    """
    The error to raise in place of torch's, of the same type. Whatever takes most of the cache is named first.

    Args:
        error (`torch.OutOfMemoryError`): What torch raised.
        input_ids (`torch.Tensor` of shape `(B, L)`): Prompts of the completions that were made at once.
        new (`int`): Tokens of a completion at most.
        shares (`bool`): Whether keys and values of a prompt were held once, not once per completion.

    Returns:
        `torch.OutOfMemoryError`.

    Example:

    ```python
    >>> prompts = torch.arange(8).repeat_interleave(8)[:, None].expand(64, 512)
    >>> print(does_not_fit(torch.OutOfMemoryError("Tried to allocate 2 GiB"), prompts, 128, shares=False))
    generation: got 64 completions of up to 128 tokens for 8 prompts of up to 512 that do not fit into memory; expected fewer or shorter ones. Set fast_generation=True and micro_batching="exact" (each prompt is held 8 times: 80% of the cache), set generation_rows below 64 (rounds of fewer rows cost time alone), or lower max_completion_length (128 tokens: 20% of the cache). (Tried to allocate 2 GiB)

    ```
    """  # noqa: E501
    rows, columns = input_ids.shape
    prompts = len({tuple(row) for row in input_ids.tolist()})
    of_prompts, of_completions = (prompts if shares else rows) * columns, rows * new
    share = round(100 * of_completions / max(1, of_prompts + of_completions))
    shorter = f"lower max_completion_length ({new:,} tokens: {share}% of the cache)"
    fewer = f"set generation_rows below {rows:,} (rounds of fewer rows cost time alone)"
    remedies = [shorter, fewer] if share >= 50 else [fewer, shorter]
    if not shares and prompts < rows:
        sharing = (
            'set fast_generation=True and micro_batching="exact" '
            f"(each prompt is held {rows / prompts:.3g} times: {100 - share}% of the cache)"
        )
        remedies.insert(0 if share < 50 else 2, sharing)
    remedy = ", ".join(remedies[:-1]) + f", or {remedies[-1]}"
    return torch.OutOfMemoryError(
        f"generation: got {rows:,} completions of up to {new:,} tokens for {prompts:,} prompts of up to {columns:,}"
        " that do not fit into memory; expected fewer or shorter ones. "
        f"{remedy[0].upper()}{remedy[1:]}. ({error})"
    )


# How far logits of the first step may be apart, as a share of the largest (from their mean).
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3}
AGREEMENT_BELOW = 0.1  # of numbers with fewer bits
AGREEMENT_REPLAYED = 1e-2  # of the same kernels over the same shapes, whatever the numbers
# Of models that were tested: why rows of their cache are not selected, why they have no group cache, and why their
# steps are not replayed.
_why_not_selected: MutableMapping[Any, str | None] = WeakKeyDictionary()
_why_not: MutableMapping[Any, str | None] = WeakKeyDictionary()
_why_not_replayed: MutableMapping[Any, str | None] = WeakKeyDictionary()


class Forwards:
    """The model in a decoding loop, and what it has come to.

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

    def __init__(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], most: int, speed: Speed):
        self._model, self._kwargs, self._most, self._speed = model, model_kwargs, most, speed
        self._group_attention = ExitStack()
        self._groups: Any = None  # a `GroupCache`, from the first step on
        self._replay: Replay | None = None
        self._prefilled: Any = None  # of each prompt once, until the first step has passed
        reason = _why_no_selection(model_kwargs) or self._run_once(input_ids)
        self.can_drop = reason is None
        if reason:
            speed.off(reason, *GENERATION)
            self.logits = self._run_prompts(input_ids, model_kwargs)
        else:
            speed.on(SpeedPart.PROMPTS_ONCE)

    def _run_prompts(self, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        inputs = self._model.prepare_inputs_for_generation(ids, is_first_iteration=True, **model_kwargs)
        outputs = self._model(**inputs, return_dict=True)
        if (cache := cache_of(outputs)) is not None:  # some models fill the one they got, and do not return it
            self._kwargs[CACHE] = cache
        return outputs.logits[:, -1].clone()  # those of whole prompts may go

    def _run_once(self, input_ids: torch.Tensor) -> str | None:
        """Runs each prompt once, padded as all of them are: what padding does to a state it does in transformers'
        loop, too. Returns why the rows of its cache cannot be selected, with an empty cache again."""
        model, cache = self._model, self._kwargs[CACHE]
        is_tested = model in _why_not_selected
        if reason := _why_not_selected.get(model):
            return reason
        holds_states = not is_plain(cache)
        empty = None if is_tested else copy.deepcopy(cache)
        first, copies = equal_rows(input_ids, self._kwargs.get("attention_mask"))
        ids, prompts = _select(input_ids, first), _select_rows(self._kwargs, first)
        logits = self._run_prompts(ids, prompts)
        self._prefilled, self._mask, self._prompts = self._kwargs[CACHE], prompts.get("attention_mask"), copies
        if not is_tested:
            reason = why_states_elsewhere(self._prefilled)
            if holds_states and not reason:
                reason = self._why_wrong_rows(ids, prompts | {CACHE: self._prefilled}, logits)
            _why_not_selected[model] = reason
        if reason:
            self._kwargs[CACHE], self._prefilled = empty, None
            return reason
        self.logits = _select(logits, copies)
        self._speed.uses[SpeedPart.PROMPTS_ONCE] += len(copies) - len(first)
        return None

    def _why_wrong_rows(self, ids: torch.Tensor, prompts: dict[str, Any], logits: torch.Tensor) -> str | None:
        """Return how selected rows of a cache differ from rows that ran alone; `None` where they do not.

        Three copies of each prompt go on with a token each. One of them leaves; the others take a second step.
        """
        tokens = logits.topk(3).indices
        copies = torch.arange(tokens.numel(), device=ids.device).view_as(tokens)
        staying = [0, 2]
        try:
            with without_noise(self._model):
                expected = [self._alone(ids, prompts, tokens[:, copy_number]) for copy_number in staying]
                group = _CopiedRows(self._model, ids, prompts)
                group.select(torch.arange(len(ids), device=ids.device).repeat_interleave(3))
                group.step(tokens.flatten())
                group.select(copies[:, staying].flatten())
                selected = group.step(tokens[:, staying].flatten())
        except torch.OutOfMemoryError:
            raise
        except NOT_SERVED as error:
            return f"rows of its cache cannot be selected ({type(error).__name__}: {error})"
        return differs(selected, torch.stack(expected, dim=1).flatten(0, 1), self._agreement(logits.dtype))

    def _alone(self, ids: torch.Tensor, prompts: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
        """Logits after each prompt has gone on with a token twice; no row of the cache is selected."""
        rows = _CopiedRows(self._model, ids, prompts)
        rows.step(tokens)
        return rows.step(tokens)

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
        """Only these rows of the batch go on."""
        self._kwargs = _select_rows(self._kwargs, rows)
        if self._prefilled is not None:
            self._prompts = self._prompts[rows]
        elif self._groups is not None:
            self._groups.keep(rows)
        else:
            select_rows(self._kwargs[CACHE], rows)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Runs the last token of each row. Returns `(n, V)`: what comes next."""
        self._kwargs = _one_token_on(self._kwargs, with_mask=self._groups is None)
        if self._prefilled is not None:
            return self._first_step(ids)
        if self._groups is None:
            return _plain_step(self._model, ids, self._kwargs)
        self._speed.uses[SpeedPart.GROUP_CACHE] += 1
        return self._group_step(ids)

    def _group_step(self, ids: torch.Tensor) -> torch.Tensor:
        inputs = ids[:, -1:], self._kwargs["position_ids"][..., -1:]
        if self._replay is not None:
            try:
                logits = self._replay(*inputs)
                self._speed.uses[SpeedPart.RECORDED_STEPS] += 1
                return logits
            except Refused as refusal:
                _why_not_replayed[self._model] = str(refusal)
                self._speed.off(str(refusal), SpeedPart.RECORDED_STEPS)
                self._replay = None
                self._groups.free_steps()
        return self._over_groups(*inputs)

    def _over_groups(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{CACHE: self._groups},
        ).logits[:, -1]

    def _first_step(self, ids: torch.Tensor) -> torch.Tensor:
        """The step that decides on the cache."""
        prefilled, self._prefilled = self._prefilled, None
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
                reason = _why_not[self._model] = str(refusal)
                self._group_attention.close()
                self._groups = None
        self._speed.off(reason, SpeedPart.GROUP_CACHE, SpeedPart.RECORDED_STEPS)
        select_rows(prefilled, self._prompts)
        return _plain_step(self._model, ids, self._kwargs)

    def _first_group_step(self, ids: torch.Tensor, prefilled: Any) -> torch.Tensor:
        tested = self._model in _why_not
        text = self._model.config.get_text_config(decoder=True)
        if getattr(text, "attention_chunk_size", None):  # held like a window, but its beginning jumps
            raise Refused("its attention is chunked")
        if reason := why_no_groups(prefilled):
            raise Refused(reason)
        if self._kwargs.get("position_ids") is None:
            raise Refused("it gets no position_ids")
        if not tested:
            self._refuse_other_logits(ids, prefilled)
            _why_not[self._model] = None
        self._group_attention.enter_context(group_attention_in(self._model))
        self._groups = GroupCache(prefilled, self._prompts.tolist(), self._mask, self._most)
        logits = self._group_step(ids)
        prefilled.layers = []  # `generate` holds on to the cache itself
        self._record_steps(ids.device)
        return logits

    def _record_steps(self, device: torch.device) -> None:
        reason = why_not_recorded(self._model, device) or _why_not_replayed.get(self._model)
        if reason is None and self._groups.states:  # a step runs twice where it is recorded or compared
            reason = "its steps change running states"
        if reason:
            self._speed.off(reason, SpeedPart.RECORDED_STEPS, expected=device.type != "cuda")
            return
        compared = None if self._model in _why_not_replayed else self._compared
        self._replay = Replay(self._over_groups, self._groups, compared)
        self._speed.on(SpeedPart.RECORDED_STEPS)

    def _refuse_other_logits(self, ids: torch.Tensor, prefilled: Any) -> None:
        """Take the step over a group cache that is thrown away, and over transformers' cache."""
        with without_noise(self._model):
            rows, expected = self._tested_rows(ids, prefilled)
            try:
                with group_attention_in(self._model):
                    self._groups = GroupCache(prefilled, self._prompts.tolist(), self._mask, self._most)
                    logits = self._group_step(ids)
            except torch.OutOfMemoryError:
                raise
            except NOT_SERVED as error:
                if isinstance(error, Refused):
                    raise
                raise Refused(f"{type(error).__name__}: {error}") from error
        wrong = differs(logits[rows], expected, self._agreement(*(layer.computes_in for layer in self._groups.groups)))
        self._groups = None
        if wrong:
            raise Refused(wrong)

    def _compared(self, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
        wrong = differs(logits, expected.float(), AGREEMENT_REPLAYED)
        if wrong is None:
            _why_not_replayed[self._model] = None
        return wrong

    def _tested_rows(self, ids: torch.Tensor, prefilled: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """A row of each prompt, and its logits over transformers' cache."""
        row_of = {prompt: row for row, prompt in reversed(list(enumerate(self._prompts.tolist())))}
        rows = torch.tensor(list(row_of.values()), device=ids.device)
        past = copy.deepcopy(prefilled)
        select_rows(past, self._prompts[rows])
        model_kwargs = _select_rows(self._kwargs, rows) | {CACHE: past}
        return rows, _plain_step(self._model, ids[rows], model_kwargs).float()

    def _agreement(self, *dtypes: torch.dtype) -> float:
        if getattr(self._model, "is_quantized", False):
            return AGREEMENT_BELOW
        return max(AGREEMENT.get(dtype, AGREEMENT_BELOW) for dtype in dtypes)


class _CopiedRows:
    """Rows that are decoded over a copy of transformers' cache.

    Args:
        model ([`~transformers.PreTrainedModel`]): Decoder-only.
        ids (`torch.Tensor` of shape `(n, L)`, int64): Prompts.
        model_kwargs (`dict`): As of [`Forwards`], with the cache after the prompts.
    """

    def __init__(self, model: Any, ids: torch.Tensor, model_kwargs: dict[str, Any]):
        self._model, self._ids = model, ids
        self._kwargs = model_kwargs | {CACHE: copy.deepcopy(model_kwargs[CACHE])}

    def select(self, rows: torch.Tensor) -> None:
        """Make these rows the batch."""
        self._ids, self._kwargs = self._ids[rows], _select_rows(self._kwargs, rows)
        select_rows(self._kwargs[CACHE], rows)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one more token `(n,)` of each row. Returns `(n, V)`: what comes next."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._kwargs = _one_token_on(self._kwargs, with_mask=True)
        return _plain_step(self._model, self._ids, self._kwargs)


def _plain_step(model: Any, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
    return model(**inputs, return_dict=True).logits[:, -1]


def differs(logits: torch.Tensor, expected: torch.Tensor, agreement: float) -> str | None:
    """What is wrong with logits `(n, V)` that are further from the expected ones than this share of their scale."""
    apart = (logits.float() - expected.float()).abs().max().item()
    scale = (expected - expected.mean(dim=1, keepdim=True)).abs().max().item()
    # Also when one of them is NaN.
    return None if apart <= agreement * scale else f"its logits differ by {apart:.1e} (scale {scale:.1e})"


def equal_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(U,) the first of each set of equal rows, and (B,) which of them each row is a copy of."""
    both = input_ids if attention_mask is None else torch.cat([input_ids, attention_mask], dim=1)
    number: dict[tuple[int, ...], int] = {}
    copies = [number.setdefault(tuple(row), len(number)) for row in both.tolist()]
    first = [copies.index(each) for each in range(len(number))]
    return torch.tensor(first, device=input_ids.device), torch.tensor(copies, device=input_ids.device)


def _one_token_on(model_kwargs: dict[str, Any], with_mask: bool) -> dict[str, Any]:
    """The mask and the positions, one token longer."""
    longer = dict(model_kwargs)
    if with_mask and (mask := model_kwargs.get("attention_mask")) is not None:
        longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if (positions := model_kwargs.get("position_ids")) is not None:
        longer["position_ids"] = positions[..., -1:] + 1
    return longer


_OF_ROWS = ("attention_mask", "position_ids")


def _why_no_selection(model_kwargs: dict[str, Any]) -> str | None:
    """Return why rows cannot leave a batch or be copies of one another; `None` where they can."""
    others = [key for key, value in model_kwargs.items() if isinstance(value, torch.Tensor) and key not in _OF_ROWS]
    if others:
        return f"its forward takes {', '.join(others)}"
    return why_no_selection(model_kwargs.get(CACHE))


def _select(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return these rows of `(B, L)`, or of `(axes, B, L)`: positions along several axes (M-RoPE)."""
    return values if rows is None else values.index_select(-2, rows)


def _select_rows(model_kwargs: dict[str, Any], rows: torch.Tensor | None) -> dict[str, Any]:
    return {
        key: _select(value, rows) if key in _OF_ROWS and value is not None else value
        for key, value in model_kwargs.items()
    }
