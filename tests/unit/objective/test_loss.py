import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.objective.advantages import group_advantages
from trl_drgrpo.objective.loss import dr_grpo_loss, k3_divergence

LENGTHS = torch.tensor([2, 4, 3, 6])
MASK = torch.arange(6) < LENGTHS.unsqueeze(1)


def batch(seed, rows=4, width=6, token_advantages=False):
    """Log-probabilities with ratios on both sides of the clip range, and a ragged mask."""
    generator = torch.Generator().manual_seed(seed)
    logps = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = logps + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    ref = logps + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    shape = (rows, width) if token_advantages else (rows,)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    return logps.requires_grad_(), old, ref, advantages, mask


def loss_and_gradient(logps, *arguments, **keywords):
    loss = dr_grpo_loss(logps, *arguments, **keywords)
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def test_worked_example():
    # token sum 0.5*2 - 0.5*4 - 0.5*3 + 0.5*6 = 0.5; loss = -0.5 / (4 * 8)
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0], 4)
    logps = torch.full((4, 6), -1.5)
    assert dr_grpo_loss(logps, logps, advantages, MASK, 8).item() == -0.015625
    assert dr_grpo_loss(logps, None, advantages, MASK, 8).item() == -0.015625


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([None, 0.28]))
def test_loss_and_gradient_agree_with_the_loop_oracle(seed, token_advantages, beta, epsilon_high):
    logps, old, ref, advantages, mask = batch(seed, token_advantages=token_advantages)
    loss, gradient = loss_and_gradient(
        logps, old, advantages, mask, 11, epsilon_high=epsilon_high, beta=beta, ref_per_token_logps=ref
    )
    nested = [t.tolist() for t in (logps.detach(), old, advantages, mask)]
    expected, slopes = oracles.dr_grpo(*nested, 11, 0.2, epsilon_high or 0.2, beta, ref.tolist())
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_the_clip_is_reached_in_these_batches():
    # without it the oracle comparison would say nothing about clipping
    logps, old, _, advantages, mask = batch(0)
    clipped, _ = loss_and_gradient(logps, old, advantages, mask, 11)
    unclipped, _ = loss_and_gradient(logps, old, advantages, mask, 11, epsilon_low=0.99, epsilon_high=99.0)
    assert abs(clipped - unclipped) > 1e-3


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_padding_and_garbage_in_masked_slots_change_nothing(seed, columns):
    logps, old, ref, advantages, mask = batch(seed)
    before, gradient = loss_and_gradient(logps, old, advantages, mask, 11, beta=0.3, ref_per_token_logps=ref)

    def spoiled(tensor):
        poisoned = tensor.detach().masked_fill(~mask, torch.nan)
        return torch.nn.functional.pad(poisoned, (0, columns), value=torch.nan)

    wide_logps = spoiled(logps).requires_grad_()
    wide_mask = torch.nn.functional.pad(mask, (0, columns))
    after, wide_gradient = loss_and_gradient(
        wide_logps, spoiled(old), advantages, wide_mask, 11, beta=0.3, ref_per_token_logps=spoiled(ref)
    )
    assert after == pytest.approx(before, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(wide_gradient[:, : logps.size(1)], gradient, rtol=1e-12, atol=1e-15)
    assert wide_gradient.isfinite().all()


def test_k3_is_zero_at_the_reference_and_positive_elsewhere():
    logps = torch.tensor([[-1.0, -2.0]])
    assert k3_divergence(logps, logps).tolist() == [[0.0, 0.0]]
    # log ratio ref - logp = 1: e - 1 - 1; the other sign would give 1/e + 1 - 1
    assert k3_divergence(logps, logps + 1)[0, 0].item() == pytest.approx(0.7182818)


def test_a_batch_without_tokens_has_loss_zero_and_a_gradient():
    logps, old, _, advantages, mask = batch(0)
    loss, gradient = loss_and_gradient(logps, old, advantages, torch.zeros_like(mask), 11)
    assert loss == 0.0
    assert gradient.abs().max() == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"old_per_token_logps": torch.zeros(4, 5)}, "old_per_token_logps"),
        ({"completion_mask": torch.ones(4, 1)}, "completion_mask"),
        ({"advantages": torch.zeros(6)}, "advantages"),
        ({"loss_normalizer": 0}, "loss_normalizer"),
        ({"beta": -0.1}, "beta"),
        ({"beta": 0.1}, "beta"),
        (
            {"per_token_logps": torch.zeros(4), "old_per_token_logps": None, "completion_mask": torch.zeros(4)},
            "per_tok",
        ),
    ],
)
def test_bad_input_is_named(changes, field):
    good = {
        "per_token_logps": torch.zeros(4, 6),
        "old_per_token_logps": torch.zeros(4, 6),
        "advantages": torch.zeros(4),
        "completion_mask": MASK,
        "loss_normalizer": 8,
    }
    with pytest.raises(ValueError, match=f"^{field}"):
        dr_grpo_loss(**{**good, **changes})
