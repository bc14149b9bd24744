"""Rows are cut out of batches of different widths and joined without a trace of either."""

import pytest
import torch

from trl_drgrpo.upstream.batches import joined_rows, row_of, unknown_keys

PAD = 9


def batch(prompts, completions, **more):
    """A batch in TRL's layout; texts are lists of token ids."""
    wide, long = max(map(len, prompts)), max(map(len, completions))
    found = {
        "prompt_ids": torch.tensor([[PAD] * (wide - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [PAD] * (long - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (long - len(c)) for c in completions]),
    }
    return found | more


def test_rows_of_two_batches_become_one():
    one = batch([[1, 2], [3]], [[4], [5, 6]], advantages=torch.tensor([0.5, -0.5]), num_items_in_batch=torch.tensor(3))
    two = batch([[7]], [[8, 8, 8]], advantages=torch.tensor([0.25]), num_items_in_batch=torch.tensor(1))
    joined = joined_rows([row_of(one, 1), row_of(two, 0), row_of(one, 0)], PAD, torch.device("cpu"))
    expected = batch([[3], [7], [1, 2]], [[5, 6], [8, 8, 8], [4]], advantages=torch.tensor([-0.5, 0.25, 0.5]))
    assert joined.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(joined[key], value), key


def test_tensors_with_a_value_per_token_keep_it():
    more = {"advantages": torch.tensor([[0.1, 0.2]]), "importance_sampling_ratio": torch.tensor([[1.5]])}
    row = row_of(batch([[1]], [[2, 3]], old_per_token_logps=torch.tensor([[-1.0, -2.0]]), **more), 0)
    other = row_of(batch([[1]], [[2, 3]], old_per_token_logps=torch.zeros(1, 2), **more), 0)
    joined = joined_rows([row, other], 0, None)
    assert torch.equal(joined["advantages"], torch.tensor([[0.1, 0.2]] * 2))
    assert torch.equal(joined["importance_sampling_ratio"], torch.tensor([[1.5], [1.5]]))
    assert torch.equal(joined["old_per_token_logps"][0], torch.tensor([-1.0, -2.0]))


def test_a_tensor_that_cannot_be_cut_into_rows_is_named():
    images = batch([[1]], [[2]], pixel_values=torch.zeros(3, 4), image_grid=None)
    assert unknown_keys(images) == ["pixel_values"]
    with pytest.raises(ValueError, match="advantages: a row of"):
        row_of(batch([[1]], [[2]], advantages=torch.zeros(1, 7)), 0)
