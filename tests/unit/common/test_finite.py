"""Weights that are NaN or infinite, found whatever their place, type and sign."""

import math

import pytest
import torch

from trl_drgrpo.common.finite import first_not_finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 9_999])
def test_a_value_that_is_not_finite_is_found_by_the_name_of_its_tensor(value, dtype, place):
    broken = torch.ones(10_000, dtype=dtype)
    broken[place] = value
    tensors = [("whole", torch.ones(3)), ("broken", broken), ("broken too", broken), ("whole", torch.ones(3))]
    assert first_not_finite(tensors) == "broken"


def test_large_values_and_what_has_none_are_passed_over():
    largest = torch.full((100,), torch.finfo(torch.float32).max)  # whose sum, or Euclidean norm, overflows
    tensors = [("largest", largest), ("none", torch.ones(0)), ("meta", torch.ones(3, device="meta"))]
    assert first_not_finite([*tensors, ("quantized", torch.ones(3, dtype=torch.uint8))]) is None
    assert first_not_finite([]) is None
