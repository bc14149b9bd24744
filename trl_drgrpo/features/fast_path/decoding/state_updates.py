"""One token more of running states, in place and in few operations: what a decoding step of a hybrid model computes.

Kernels of other packages update a state where it is. Without them, transformers computes the same with plain torch and
makes a tensor of the state's size in nearly every operation. With 8 heads of 64 columns and 32 rows, the delta rule
took 16 times as long as it does here (alone, on a CPU, 2026-11-27).

Functions here take the arguments of the ones that they stand in for, and write the new state into the old one. They
return `None` where the arguments ask for more, and then the model's own function runs.

`n` rows in the batch, `H` heads of `K` columns per key and `V` per value, `C` channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda states: states,
    "silu": functional.silu,
    "swish": functional.silu,
}


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read and update states by the gated delta rule.

    The state decays, and `key` is bound to a share `beta` of what `value` is more than the state says of it:
    `S = exp(g) S`, `S = S + k (beta (v - k S))`, and `query` reads `q S / sqrt(K)`.

    Args:
        query, key (`torch.Tensor` of shape `(n, 1, H or fewer, K)`), value (`(n, 1, H, V)`): Of the new tokens.
        g (`torch.Tensor` of shape `(n, 1, H)` or, of each column of a key, `(n, 1, H, K)`): Logarithms of the decay.
        beta (`torch.Tensor` of shape `(n, 1, H)`): Shares between 0 and 1.
        initial_state (`torch.Tensor` of shape `(n, H, K, V)`, float32): Changed in place.
        output_final_state, use_qk_l2norm_in_kernel (`bool`): As transformers has them.
        cu_seqlens: Refused: these are rows.

    Returns:
        `(n, 1, H, V)`, and the state.
    """
    state = initial_state
    if state is None or state.dtype != torch.float32 or not state.is_contiguous():
        return None
    if query.size(1) != 1 or cu_seqlens is not None or not output_final_state:
        return None
    # As in transformers, the rule is computed in float32, the dtype of states, whatever that of the model.
    rows, heads, columns, _ = state.shape
    dtype = query.dtype
    query = query.float()
    key = key.float()
    length = 1.0
    if use_qk_l2norm_in_kernel:
        # x / sqrt(sum(x ** 2) + eps) is an RMS norm divided by sqrt(K), and products below take a factor for nothing.
        query = functional.rms_norm(query, (columns,), eps=1e-6 / columns)
        key = functional.rms_norm(key, (columns,), eps=1e-6 / columns)
        length = columns**-0.5
    if query.size(2) != heads:  # several heads of values share a key
        query = query.repeat_interleave(heads // query.size(2), dim=2)
        key = key.repeat_interleave(heads // key.size(2), dim=2)
    query = query.reshape(rows * heads, 1, columns)
    key = key.reshape(rows * heads, 1, columns)
    value = value.float().reshape(rows * heads, 1, -1)
    by_head = state.view(rows * heads, columns, -1)
    decay = g.float().exp().reshape(rows, heads, -1, 1)
    state.mul_(decay)
    # beta (v - k S), then S + k of that, where k has the length that was left out of the norm.
    change = torch.baddbmm(value, key, by_head, alpha=-length)
    change.mul_(beta.float().reshape(rows * heads, 1, 1))
    by_head.addcmul_(key.transpose(1, 2), change, value=length)
    # With `beta=0` the first tensor gives its shape alone.
    read = torch.baddbmm(value, query, by_head, beta=0, alpha=length * columns**-0.5)
    return read.view(rows, 1, heads, -1).to(dtype), state


def convolution(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor | None:
    """Move the windows of a causal convolution on by a token, and compute its column alone.

    transformers keeps a column more than a window needs, and computes the column of the token before once more.

    Args:
        hidden_states (`torch.Tensor` of shape `(n, C, 1)`): Of the new tokens.
        conv_state (`torch.Tensor` of shape `(n, C, taps)` or `(n, C, taps - 1)`): Changed in place.
        weight (`torch.Tensor` of shape `(C, taps)`), bias (`torch.Tensor` of shape `(C,)`, *optional*): Per channel.
        activation (`str`, *optional*): `"silu"`.

    Returns:
        `(n, C, 1)`.
    """
    taps = weight.size(1)
    columns = conv_state.size(2)
    if hidden_states.size(2) != 1 or columns not in (taps - 1, taps) or activation not in ACTIVATIONS:
        return None
    if not hidden_states.dtype == conv_state.dtype == weight.dtype:
        return None
    # The newest `taps - 1` columns and the new one. The state keeps as many of them as it had.
    window = torch.cat([conv_state[:, :, columns - taps + 1 :], hidden_states], dim=2)
    conv_state.copy_(window[:, :, taps - columns :])
    # A product per channel: `conv1d` of so few columns takes up to twice as long on a CPU.
    output = torch.bmm(window.transpose(0, 1), weight.unsqueeze(2)).transpose(0, 1)
    if bias is not None:
        output = output + bias.unsqueeze(1)
    return ACTIVATIONS[activation](output)


def selective_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """Read and update states of Mamba 2, whose heads are in groups, or of Mamba.

    `S = exp(dt A) S + (dt x) B`, and the output is `S C + D x`, times `silu(z)` where there is a gate.

    Args:
        state (`torch.Tensor` of shape `(n, H, V, K)`, or `(n, V, K)` in Mamba; float32): Changed in place.
        hidden_states, dt, z (`torch.Tensor` of shape `(n, H, V)` or `(n, V)`): Of the new tokens.
        A (`torch.Tensor` of shape `(H, V, K)` or `(V, K)`), D, dt_bias (`(H, V)` or `(V,)`): Of the layer.
        B, C (`torch.Tensor` of shape `(n, groups, K)` or `(n, K)`): Of the new tokens.
        dt_softplus (`bool`): As transformers has it.

    Returns:
        `(n, H, V)` or `(n, V)`.
    """
    if state.dtype != torch.float32 or not state.is_contiguous():
        return None
    shape = hidden_states.shape
    dtype = hidden_states.dtype
    inputs = hidden_states.float()
    # Bias and softplus in the dtype of the model, as in its own function: float32 would round otherwise.
    step = _once(dt)
    if dt_bias is not None:
        step = step + _once(dt_bias).to(step.dtype)
    if dt_softplus:
        step = functional.softplus(step)
    step = step.float()
    decay = (step.unsqueeze(-1) * _once(A).float()).exp()
    state.mul_(decay)
    rows = state.size(0)
    columns = state.size(-1)
    groups = B[0].numel() // columns
    by_group = state.view(rows, groups, -1, columns)  # heads of a group, and columns of their values, as one
    written = (step * inputs).reshape(rows, groups, -1, 1)
    by_group.addcmul_(written, B.float().reshape(rows, groups, 1, columns))
    read_by = C.float().reshape(rows * groups, columns, 1)
    output = torch.bmm(by_group.flatten(0, 1), read_by).view(shape)
    if D is not None:
        output = torch.addcmul(output, inputs, D.float())
    if z is not None:
        output = output * functional.silu(z)
    return output.to(dtype)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the copies that `expand` has made: Mamba 2 has one step and one decay per head."""
    first = slice(0, 1)
    everything = slice(None)
    return tensor[tuple(first if stride == 0 else everything for stride in tensor.stride())]


# By the package whose kernel does the same.
INSTEAD_OF: dict[str, Callable[..., Any]] = {
    "causal_conv1d": convolution,
    "fla": delta_rule,
    "mamba_ssm": selective_update,
}
