"""Find weights that are NaN or infinite: those of a run that diverged. Every forward with them is NaN, too."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError

if TYPE_CHECKING:
    import torch

# torch.multinomial and this package's decoder begin like this.
_NOT_FINITE = "probability tensor contains"


def first_not_finite(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> str | None:
    """Return the name of the first tensor with a value that is NaN or infinite; `None`: all are finite.

    One pass over the values, and one synchronization with the device. Integers, quantized weights among them, and
    weights without memory are passed over.

    Args:
        tensors (`Iterable[tuple[str, torch.Tensor]]`): Name and tensor, as `named_parameters()` gives them.

    Example:

    ```python
    >>> import torch
    >>> first_not_finite([("a", torch.ones(2)), ("b", torch.tensor([0.0, float("nan")]))])
    'b'

    ```
    """
    import torch

    # A type of 8 bits is that of quantized weights, which no run changes.
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    local: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        to_local: Any = getattr(tensor, "to_local", None)  # of a tensor in shards: this process's
        values: torch.Tensor = tensor if to_local is None else to_local()
        if values.dtype in dtypes and values.numel() and not values.is_meta:
            local.append((name, values.detach()))
    # The largest absolute value of all is not finite where any value is not; unlike a sum it cannot overflow.
    largest = torch.nn.utils.get_total_norm([values for _, values in local], norm_type=math.inf)
    if largest.isfinite():
        return None
    for name, values in local:
        if not values.isfinite().all():
            return name
    return None


def refuse_not_finite(model: "torch.nn.Module", field: str, name: str) -> None:
    """Refuse a model that was loaded, with weights that are not finite.

    Args:
        model (`torch.nn.Module`): The model, or its adapter's wrapper.
        field (`str`): Input that named it.
        name (`str`): Its folder or Hub id.

    Raises:
        `InputError`: Names the first such weight.
    """
    weight = first_not_finite(model.named_parameters())
    if weight is not None:
        remedy = "The run that saved them had diverged: name an earlier checkpoint."
        raise InputError(field, f"{name}, whose weight {weight} is NaN or infinite", "finite weights", remedy)


def has_no_distribution(error: Exception) -> bool:
    """Tell whether an error is that of sampling from logits that are not finite."""
    return isinstance(error, RuntimeError) and _NOT_FINITE in str(error)
