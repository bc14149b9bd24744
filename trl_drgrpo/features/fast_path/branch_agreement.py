"""Decide if completions may start from the states of their prompt in a model (`branches.py`).

A cache may leave out a state, cut it off from the graph, or never reach the layers. So sharing is used only after a
numerical self-test on the model itself: rows alone against rows that start from states, by their log-probabilities and
by their gradient. The control, in which prompts are exchanged, must differ: it is the scale of what is allowed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trl_drgrpo.features.fast_path.branches import branch_rows
from trl_drgrpo.features.fast_path.micro_batch_planner import MicroBatch
from trl_drgrpo.features.fast_path.noise import without_noise
from trl_drgrpo.features.fast_path.pack_layout import Packed, pack_rows
from trl_drgrpo.features.fast_path.sharing import FAILURES, TESTED_WINDOW, agreement
from trl_drgrpo.upstream.batches import TokenBatch
from trl_drgrpo.upstream.prompt_cache import checkpointed_layers, why_no_branches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

# The rows of the self-test, by prompt: completions of one token, shorter than a convolution, and of equal lengths.
PROMPT_TOKENS = (19, 12, 14)
COMPLETION_TOKENS = ((36, 1, 3), (48, 2), (20, 20))
# Prompts of unequal length beside each other, then a forward without any padding.
TOGETHER: Sequence[MicroBatch] = ([(0, 1, 2), (3, 4)], [(5, 6)])
ALONE: Sequence[MicroBatch] = [[(row,)] for row in range(7)]
Outcome = tuple[torch.Tensor, torch.Tensor]  # log-probabilities (B, T), and a gradient


def why_not_branched(
    trainer: "TrainerProtocol",
    model: "PreTrainedModel",
    log_probs: Callable[[Packed], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return the reason why completions cannot start from the states of their prompt; `None` when they can.

    Args:
        trainer ([`TrainerProtocol`]): The trainer.
        model ([`~transformers.PreTrainedModel`] or its PEFT wrapper): The policy. Left as it was.
        log_probs (`Callable`): `(1, n)` log-probabilities of a pack's targets under this model.
        dtype (`torch.dtype`, *optional*): Dtype that it computes in, if not that of its weights (autocast).

    Returns:
        `str` or `None`.
    """
    from trl_drgrpo.upstream.private_state import swapped  # TRL, which a plan of memory does not load

    text = model.config.get_text_config()
    reason = why_no_branches(model)
    if getattr(text, "attention_chunk_size", None):  # longer than the rows of the self-test
        reason = "its attention is chunked"
    if trainer.in_lockstep:
        reason = "ranks with a part of the model run one forward at a time"
    if trainer.router_balance is not None:
        reason = "the load-balancing loss reads the router in one forward"
    if reason:
        return reason
    shorter_window = nullcontext()
    if getattr(text, "sliding_window", None):
        shorter_window = swapped(text, sliding_window=TESTED_WINDOW)
    tokens = _tokens(text.vocab_size, model.device)
    with without_noise(model), _as_checkpointed_in_training(model), shorter_window:
        try:
            alone = _outcome(model, log_probs, [pack_rows(tokens, batch) for batch in ALONE])
            branches = [branch_rows(tokens, batch) for batch in TOGETHER]
            together = _outcome(model, log_probs, branches)
            control = _outcome(model, log_probs, [_with_prompts_exchanged(packed) for packed in branches])
        except FAILURES as error:
            first_line = str(error).partition("\n")[0]
            return f"it fails from the states of a prompt ({type(error).__name__}: {first_line})"
    names = ("log-probabilities", "gradients")
    for name, expected, actual, exchanged in zip(names, alone, together, control, strict=True):
        difference = (actual - expected).abs().max().item()
        scale = (exchanged - expected).abs().max().item()
        # Written so that NaN on either side refuses as well.
        if not difference <= agreement(model, dtype) * scale:
            return (
                f"{name} from the states of a prompt and of rows alone differ by {difference:.1e}"
                f" (with prompts exchanged: by {scale:.1e})"
            )
    return None


def _tokens(vocabulary: int, device: torch.device) -> TokenBatch:
    """Return random rows in TRL's layout."""
    prompt_width = max(PROMPT_TOKENS)
    width = max(max(lengths) for lengths in COMPLETION_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = []
    masks = []
    for prompt_length, completion_lengths in zip(PROMPT_TOKENS, COMPLETION_TOKENS, strict=True):
        prompt = torch.randint(vocabulary, (prompt_width,), generator=generator)
        is_prompt = torch.arange(prompt_width) >= prompt_width - prompt_length  # padded on the left
        for length in completion_lengths:
            completion = torch.randint(vocabulary, (width,), generator=generator)
            is_completion = torch.arange(width) < length
            ids.append(torch.cat([prompt, completion]))
            masks.append(torch.cat([is_prompt, is_completion]).long())
    return TokenBatch(torch.stack(ids).to(device), torch.stack(masks).to(device), width)


def _with_prompts_exchanged(packed: Packed) -> Packed:
    """Return the same forward, with each row behind the prompt after its own."""
    prompts = packed.prompts
    if prompts is None:
        return packed
    next_prompts = (prompts.of_row + 1) % len(prompts.input_ids)
    return replace(packed, prompts=replace(prompts, of_row=next_prompts))


def _outcome(
    model: "PreTrainedModel",
    log_probs: Callable[[Packed], torch.Tensor],
    layouts: Sequence[Packed],
) -> Outcome:
    """Return the log-probabilities of all rows, and the gradient of their weighted sum.

    The gradient is that of one vector which is added to the embedding of every token. It passes through each state on
    its way to the prompts, and needs no memory for gradients of weights.
    """
    shifts: list[torch.Tensor] = []

    def shifted(
        module: torch.nn.Module,
        arguments: tuple[object, ...],
        output: torch.Tensor,
    ) -> torch.Tensor:
        if not shifts:
            shifts.append(torch.zeros(output.size(-1), device=output.device, requires_grad=True))
        return output + shifts[0].to(output.dtype)

    all_values = []
    gradients = []
    with model.get_input_embeddings().register_forward_hook(shifted):
        for packed in layouts:  # one at a time: each graph is freed before the next
            with torch.enable_grad():
                values = packed.unpack(log_probs(packed))
                # Unequal weights, of both signs: errors in several rows do not cancel.
                weights = torch.linspace(-1.0, 2.0, values.numel(), device=values.device).view(values.shape)
                weighted_sum = (values * weights).sum()
                (gradient,) = torch.autograd.grad(weighted_sum, shifts)
            all_values.append(values.detach())
            gradients.append(gradient)
    # A row that a layout does not run has zeros there.
    return torch.stack(all_values).sum(dim=0), torch.stack(gradients).sum(dim=0)


@contextmanager
def _as_checkpointed_in_training(model: "PreTrainedModel") -> Iterator[None]:
    """Inside the block, checkpointed layers run as in training, the layers within them as in evaluation."""
    from trl_drgrpo.upstream.private_state import swapped

    with ExitStack() as stack:
        for layer in checkpointed_layers(model):
            stack.enter_context(swapped(layer, training=True))
        yield
