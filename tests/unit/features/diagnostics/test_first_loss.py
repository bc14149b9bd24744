"""Both remarks, each where it holds; `tests/trainer/test_best_checkpoint.py` has them in a run."""

from types import SimpleNamespace

import pytest

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.features.diagnostics.movement import first_loss_remarks, is_first_loss


def remarks(step_scorer=None, own_advantages=None, own_losses=(), **fields):
    args = DrGRPOConfig(use_cpu=True, bf16=False, gradient_accumulation_steps=4, **fields)
    every = args.steps_per_generation * args.num_iterations
    trainer = SimpleNamespace(
        args=args,
        generate_every=every,
        step_scorer=step_scorer,
        own_advantages=own_advantages,
        own_losses=list(own_losses),
    )
    return first_loss_remarks(trainer, -0.00123)


def test_the_first_loss_is_that_of_a_step_with_a_signal_of_the_whole_run():
    dead, alive, evaluation = {"loss": 0.0, "drgrpo/zero_signal_frac": 1.0}, {"loss": 0.1}, {"eval_loss": 0.1}
    assert not is_first_loss(dead, [dead])
    assert is_first_loss(alive, [evaluation, dead, alive])
    assert not is_first_loss(evaluation, [alive, evaluation])
    assert not is_first_loss(alive, [alive, dead, alive])  # resumed: the history came with the checkpoint


def test_the_loss_is_explained():
    [remark] = remarks()
    assert remark.startswith("loss -0.0012 is as it should be")


@pytest.mark.parametrize(
    "run",
    [
        {"step_scorer": object()},
        {"own_advantages": "advantage_func 'mine'"},
        {"own_losses": ["_compute_loss"]},
        {"beta": 0.1},
        {"entropy_coef": 0.01},
        {"steps_per_generation": 8},  # groups are cut in two
    ],
)
def test_a_loss_that_is_not_zero_by_itself_is_not_explained(run):
    assert remarks(**run) == []


def test_several_iterations_begin_at_zero_too():
    assert len(remarks(num_iterations=2)) == 1


@pytest.mark.parametrize("bounds", [{"epsilon_high": 0.28}, {"epsilon": 0.1, "delta": 2.0}])
@pytest.mark.parametrize("steps_per_generation", [2, 4])
def test_clipping_that_does_nothing_is_said(bounds, steps_per_generation):
    [_, remark] = remarks(**bounds, steps_per_generation=steps_per_generation)
    assert remark.startswith(f"{', '.join(bounds)}: no effect with one optimizer step per generation batch")


@pytest.mark.parametrize("run", [{"num_iterations": 2}, {"steps_per_generation": 8}])
def test_clipping_that_does_something_is_not(run):
    assert not any("no effect" in remark for remark in remarks(epsilon_high=0.28, **run))
