"""The error of a generation that does not fit into memory: it says what to change."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from trl_drgrpo.features.fast_path.decoding.model_inputs import DecodingModel


def does_not_fit(
    error: Exception,
    input_ids: torch.Tensor,
    tokens: int,
    shares: bool,
) -> Exception:
    """
    Return the error to raise in place of torch's, of the same type. What takes most of the cache is named first.

    Args:
        error (`torch.OutOfMemoryError`): What torch raised.
        input_ids (`torch.Tensor` of shape `(B, L)`): Prompts of the completions that were made at once.
        tokens (`int`): Tokens of a completion at most.
        shares (`bool`): Keys and values of a prompt were held once, not once per completion.

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
    # Keys and values are counted in tokens: every token takes the same memory in each layer.
    prompts_held = prompts if shares else rows
    prompt_tokens = prompts_held * columns
    completion_tokens = rows * tokens
    share = round(100 * completion_tokens / max(1, prompt_tokens + completion_tokens))
    shorter = f"lower max_completion_length ({tokens:,} tokens: {share}% of the cache)"
    fewer = f"set generation_rows below {rows:,} (rounds of fewer rows cost time alone)"
    remedies = [fewer, shorter]
    if not shares and prompts < rows:
        sharing = (
            'set fast_generation=True and micro_batching="exact" '
            f"(each prompt is held {rows / prompts:.3g} times: {100 - share}% of the cache)"
        )
        remedies.insert(0, sharing)
    # First against what takes most: the prompts, as listed, or else the completions.
    if share >= 50:
        remedies.reverse()
    remedy = ", ".join(remedies[:-1]) + f", or {remedies[-1]}"
    return torch.OutOfMemoryError(
        f"generation: got {rows:,} completions of up to {tokens:,} tokens for {prompts:,} prompts of up to {columns:,}"
        " that do not fit into memory; expected fewer or shorter ones. "
        f"{remedy[0].upper()}{remedy[1:]}. ({error})"
    )


def new_tokens(model: "DecodingModel", input_ids: torch.Tensor, config: "GenerationConfig | None") -> int:
    """Return how many tokens a completion may have at most."""
    config = config or model.generation_config
    if config.max_new_tokens:
        return config.max_new_tokens
    longest = config.max_length or 0
    return max(0, longest - input_ids.size(1))
