"""Decide if completions may share a prompt in a model, and estimate the cost of its attention.

Packing completions behind their prompt and other prefixes hands the model a block mask and restarted positions. Models
that ignore either compute something else in silence: state-space layers, for example, have no mask at all. A mask from
outside is taken as it is, so a sliding window must be part of it ([`MaskForm`]), and eager attention adds it to its
scores. So sharing is used only after a numerical self-test on the model itself: rows alone against rows packed, some
of them forks, with a control (the same pack without its block mask) that must differ. For the test a sliding window is
made so short that a mask without it would differ, too.

Models with running states share prompts in another way (`branches.py`), with a self-test of its own.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from trl_drgrpo.features.fast_path.micro_batch_planner import Costs, MicroBatch
from trl_drgrpo.features.fast_path.noise import without_noise
from trl_drgrpo.features.fast_path.pack_layout import MaskForm, Packed, pack_rows
from trl_drgrpo.features.fast_path.tree_mask import attends_apart
from trl_drgrpo.upstream.batches import TokenBatch
from trl_drgrpo.upstream.kv_cache import has_running_states

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Device:
    """Speeds of a type of device, for the planner.

    Args:
        attention (`float`): Time of a query-key pair in attention, over that of as many multiplications in a matrix
            product.
        forward (`float`): Cost of one more forward and backward, in tokens. It decides between nearly equal plans.
        free_width (`int`): As in [`Costs`].
    """

    attention: float
    forward: float
    free_width: int = 0


# On a CPU: 8 heads of 64 in float32; 33 million weights; one thread (2026-11-22). Elsewhere: an H100 at the shape of
# Qwen2.5-1.5B with LoRA (2026-11-27). There a pair takes 5.7 ns and a token 49 us, checkpointing included: a factor of
# 1.75. To launch the kernels of a forward and backward takes 0.3 s, as much as 6,000 tokens there, fewer on a larger
# model or a slower GPU. A mask of 2,048 columns takes 6 kB of a token; the layer that is run anew keeps far more.
DEVICES = {"cpu": Device(attention=1.3, forward=32.0)}
ELSEWHERE = Device(attention=1.75, forward=2048.0, free_width=2048)
# Errors that models raise for inputs that they do not serve.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
# Largest difference of packed rows from rows alone, as a share of the control's difference.
AGREEMENT = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
# The rows of the self-test: row 3 branches off row 0, and row 4 off row 3, behind so many tokens of the completion.
# Long enough that branches attend apart where they may.
PROMPT_TOKENS = 12
COMPLETION_TOKENS = (36, 48, 40, 50, 44)
FORKS = {3: (0, 20), 4: (3, 30)}
# Windows that layers cut by place in the row, whatever mask they get (GPT-Neo): in a pack a branch would not see its
# prompt. They are longer than the rows of the self-test and made when the model is, so it cannot see them.
_WINDOWS_BY_PLACE = ("window_size", "attention_window_size", "attention_window", "local_attention_window_len")
TESTED_WINDOW = 17  # tokens: shorter than the rows, and it begins within prompts as well as within completions


def costs_of(
    config: "PreTrainedConfig",
    device: str,
    share_prompts: bool,
    multiple: int = 1,
) -> Costs:
    """Return the cost model for the plans of a model on a type of device (`"cpu"`, `"cuda"`)."""
    speeds = DEVICES.get(device, ELSEWHERE)
    pair = speeds.attention * relative_pair_cost(config)
    chunk = 0
    if share_prompts and starts_from_states(config):
        from trl_drgrpo.features.fast_path.branch_planner import state_chunk

        chunk = state_chunk(config)
    return Costs(pair, speeds.forward, share_prompts, multiple, attends_apart(device), speeds.free_width, chunk)


def starts_from_states(config: "PreTrainedConfig") -> bool:
    """Tell whether completions share a prompt by its states, if at all, and not by a block mask."""
    return isinstance(mask_form(config), str) and has_running_states(config)


def relative_pair_cost(config: "PreTrainedConfig") -> float:
    """Estimate the operations of one query-key pair in attention, in units of those of a token in everything else.

    Per layer a pair takes `4 * heads * head_dim` operations forward, a token 2 for each weight of the layer. At width
    512 that is 1/4100. Where the configuration says nothing about widths, a layer counts as 1,024 wide.
    """
    try:
        text = config.get_text_config()
        width = text.hidden_size
        heads = getattr(text, "num_attention_heads", None) or 1
        head_width = getattr(text, "head_dim", None) or width // heads
        key_value_heads = getattr(text, "num_key_value_heads", None) or heads
        attention = heads * head_width
        key_value = key_value_heads * head_width
        inner = getattr(text, "intermediate_size", None) or 4 * width
        # Weights of the four projections of attention, and of a gated feed-forward layer.
        weights = 2 * width * (attention + key_value) + 3 * width * inner
        return 2 * attention / weights
    except Exception:  # configurations refuse in many ways, some per layer; an estimate is not worth a run
        return 1 / (8 * 1024)


def mask_form(config: "PreTrainedConfig") -> MaskForm | str:
    """Return the form of the block mask that a model takes, by its configuration; else the reason why it takes none.

    Models whose layers differ in kind take a mapping from the kind to its mask, those of one kind a single mask. The
    self-test verifies it on the model.
    """
    try:
        text = config.get_text_config()
        kinds = tuple(dict.fromkeys(getattr(text, "layer_types", None) or ()))
        window = getattr(text, "sliding_window", None) or None
        chunk = getattr(text, "attention_chunk_size", None)
    except Exception as error:  # configurations refuse in many ways, some per layer
        return f"its configuration does not tell the kind of its attention ({type(error).__name__})"
    for name in _WINDOWS_BY_PLACE:
        if getattr(text, name, None):
            return f"its layers hold a window of their own ({name}={getattr(text, name)})"
    unknown_kinds = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown_kinds:
        return f"its layers are not all attention to every token or a window ({', '.join(unknown_kinds)})"
    if chunk:
        return "its attention is chunked"
    if "sliding_attention" in kinds and window is None:
        return "its configuration does not tell its window"
    implementation = getattr(config, "_attn_implementation", None) or "sdpa"
    if implementation not in ("sdpa", "eager"):
        return f"its attention is {implementation!r}; a block mask needs 'sdpa' or 'eager'"
    is_additive = implementation == "eager"
    if "sliding_attention" in kinds:
        return MaskForm(window, kinds, is_additive)
    if kinds:  # a configuration may hold a window that none of its layers has
        return MaskForm(additive=is_additive)
    return MaskForm(window, additive=is_additive)


def why_not_shared(
    model: "PreTrainedModel",
    log_probs: Callable[[Packed], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return the reason why completions cannot share a prompt in this model; `None` when they can.

    Args:
        model ([`~transformers.PreTrainedModel`] or its PEFT wrapper): The policy. Left as it was.
        log_probs (`Callable`): `(1, n)` log-probabilities of a pack's targets under this model.
        dtype (`torch.dtype`, *optional*): Dtype that it computes in, if not that of its weights (autocast).

    Returns:
        `str` or `None`.
    """
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a plan of memory does not load

    form = mask_form(model.config)
    if isinstance(form, str):
        return form
    text = model.config.get_text_config()
    shorter_window = nullcontext()
    if form.window is not None:
        # Models read their window in every forward, to make the mask of the rows alone.
        shorter_window = swapped(text, sliding_window=TESTED_WINDOW)
        form = replace(form, window=TESTED_WINDOW)
    with torch.no_grad(), without_noise(model), shorter_window:
        try:
            difference, control = _self_test(text.vocab_size, model.device, log_probs, form)
        except FAILURES as error:
            return f"it fails with a block mask ({type(error).__name__}: {error})"
    # Written so that NaN on either side refuses as well.
    if not difference <= agreement(model, dtype) * control:
        return f"packed and single rows differ by {difference:.1e} (without a block mask: by {control:.1e})"
    return None


def agreement(model: torch.nn.Module, dtype: torch.dtype | None) -> float:
    """Return the share of a control's difference that is allowed in a model that computes in `dtype`, or in the dtype
    of its weights."""
    if dtype is None:
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return AGREEMENT.get(dtype, 0.1)  # 0.1 for one with fewer bits than those of the table


def _self_test(
    vocabulary: int,
    device: torch.device,
    log_probs: Callable[[Packed], torch.Tensor],
    form: MaskForm,
) -> tuple[float, float]:
    """Return the largest difference of packed rows from rows alone, and that of the control."""
    rows = len(COMPLETION_TOKENS)
    width = max(COMPLETION_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, PROMPT_TOKENS + width), generator=generator)
    ids[:, :PROMPT_TOKENS] = ids[0, :PROMPT_TOKENS]
    for row, (parent, tokens) in FORKS.items():
        fork = PROMPT_TOKENS + tokens
        ids[row, :fork] = ids[parent, :fork]
    ends = PROMPT_TOKENS + torch.tensor(COMPLETION_TOKENS)
    mask = (torch.arange(ids.size(1)) < ends[:, None]).long()

    def scores(batch: MicroBatch, control: bool = False) -> torch.Tensor:
        packed = pack_rows(TokenBatch(ids.to(device), mask.to(device), width), batch, form=form)
        if control:  # plain causal attention: later branches see earlier ones
            ones = torch.ones_like(packed.input_ids)
            packed = replace(packed, attention_mask=ones)
        return packed.unpack(log_probs(packed))

    alone = scores([(i,) for i in range(rows)])
    together = [tuple(range(rows))]
    difference = (scores(together) - alone).abs().max().item()
    # A model that ignores masks passes any comparison of equals: without the mask the scores must differ.
    difference_of_control = (scores(together, control=True) - alone).abs().max().item()
    return difference, difference_of_control


def rope_depends_on_width(config: "PreTrainedConfig") -> bool:
    """Tell if rotary angles change with the longest row of a batch (dynamic NTK, longrope): then regrouping would
    change the scores of a row."""
    text = config.get_text_config()
    # One mapping for all layers, or one per kind of layer: the text of either holds the name of the type.
    parameters = repr([getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")])
    return "'dynamic'" in parameters or "'longrope'" in parameters
