"""The watch counts what had a gradient and moved; dead batches, a warm-up and unused elements do not trigger it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.features.diagnostics.movement import MovementWatch, first_loss_remarks, is_first_loss


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.bfloat16, value=0.05, shape=(20, 30)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, value, dtype=dtype))


class Run:
    """Optimizer steps as the trainer takes them."""

    def __init__(self, model, lr=1e-6, watch=None, warmup=0):
        self.model, self.watch = model, watch or MovementWatch(steps=3)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.args = SimpleNamespace(get_warmup_steps=lambda steps: warmup)
        self.state = SimpleNamespace(global_step=0, max_steps=100)
        self.watch.on_train_begin(self.args, self.state, None, model=model)

    def steps(self, count, gradient, lr=None):
        for _ in range(count):
            self.step(gradient, lr)
        return self.watch.shares.get("weights")

    def step(self, gradient, lr=None):
        if lr is not None:
            self.optimizer.param_groups[0]["lr"] = lr
        for parameter in self.model.parameters():
            parameter.grad = (
                None if gradient is None else torch.as_tensor(gradient).to(parameter).expand_as(parameter).clone()
            )
        self.watch.on_pre_optimizer_step(self.args, self.state, None, optimizer=self.optimizer)
        self.optimizer.step()
        self.state.global_step += 1
        self.watch.on_step_end(self.args, self.state, None)
        return self


def test_bfloat16_stands_still_at_a_small_rate_and_float32_does_not():
    run = Run(Model())
    assert run.steps(3, 1.0) == 0.0
    run.watch.trainer = SimpleNamespace(model=run.model)
    first, second = {}, {}
    run.watch.add_to_log(first)
    run.watch.add_to_log(second)
    assert (first, second) == ({"drgrpo/moved_frac": 0.0}, {})
    assert Run(Model(torch.float32)).steps(3, 1.0) == 1.0


def test_dead_batches_and_warm_up_do_not_count():
    run = Run(Model(torch.float32), warmup=4)
    run.steps(4, 1.0, lr=1e-12)  # in the warm-up
    run.steps(5, 0.0, lr=0.0)
    run.steps(5, 0.0, lr=1e-3)  # no signal
    run.steps(5, None)
    assert run.steps(5, 1.0, lr=0.0) is None  # signal, but no rate
    assert run.steps(3, 1.0, lr=1e-3) == 1.0


def test_elements_without_a_gradient_do_not_count():
    gradient = torch.zeros(20, 30)
    gradient[0, :5] = 1.0  # as an embedding of which five entries are used
    run = Run(Model(torch.float32), lr=1e-3)
    run.optimizer.param_groups[0]["weight_decay"] = 0.1  # moves the others, too
    for step in range(3):
        run.step(gradient.roll(step, 0))  # other entries in each step
    assert run.watch.shares == {"weights": 1.0}
    gradient[0], gradient[10:] = 0.0, 1.0
    run = Run(Model(torch.float32), lr=1e-3, watch=MovementWatch(steps=2, elements=60))
    run.step(gradient)
    assert sum(int(each.touched.sum()) for each in run.watch._samples) == 30  # the sample is spread over a parameter


def test_parameters_that_the_optimizer_does_not_hold():
    run = Run(Model(torch.float32), lr=1e-3)
    run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(1))]
    assert run.steps(3, 1.0) == 0.0


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), elements=st.integers(1, 500), seed=st.integers(0, 99)
)
def test_the_sample_is_bounded_and_sees_any_share(shape, elements, seed):
    model = Model(torch.float32, shape=shape)
    size = model.weight.numel()
    run = Run(model, lr=1e-2, watch=MovementWatch(steps=2, elements=elements))
    moves = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    run.step(moves.float())
    touched = sum(int(each.touched.sum()) for each in run.watch._samples)
    if elements >= size:
        assert touched == int(moves.sum())
    assert touched <= max(1, elements)
    run.step(moves.float())
    assert set(run.watch.shares.values()) <= {1.0}


def test_groups_keep_apart_what_starts_at_zero():
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)})
    model.layer.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)})
    model.norm = torch.nn.LayerNorm(4)
    torch.nn.init.constant_(model.layer.lora_A["default"].weight, 0.3)
    torch.nn.init.zeros_(model.layer.lora_B["default"].weight)
    run = Run(model)
    run.steps(3, 1.0)
    assert run.watch.shares == {"LoRA-A": 0.0, "LoRA-B": 1.0, "norms and biases": 1.0}


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
    dead, alive, evaluation = {"loss": 0.0, "drgrpo/dead_groups_frac": 1.0}, {"loss": 0.1}, {"eval_loss": 0.1}
    assert not is_first_loss(dead, [dead])
    assert is_first_loss(alive, [evaluation, dead, alive])
    assert not is_first_loss(evaluation, [alive, evaluation])
    assert not is_first_loss(alive, [alive, dead, alive])  # resumed: the history came with the checkpoint


EXPLAINED, NO_EFFECT = (
    "The loss is -0.0012, and stays near 0",
    "{}: no effect with one optimizer step per generation batch",
)
HIGHER, BOTH = {"epsilon_high": 0.28}, {"epsilon": 0.1, "delta": 2.0}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, [EXPLAINED]),
        ({"num_iterations": 2}, [EXPLAINED]),  # begins at zero, too
        # A loss that is not zero by itself.
        ({"step_scorer": object()}, []),
        ({"own_advantages": "advantage_func 'mine'"}, []),
        ({"own_losses": ["_compute_loss"]}, []),
        ({"beta": 0.1}, []),
        ({"entropy_coef": 0.01}, []),
        ({"steps_per_generation": 8}, []),  # groups are cut in two
        # Clipping that does nothing, and such that does something.
        *(
            ({**bounds, "steps_per_generation": steps}, [EXPLAINED, NO_EFFECT.format(", ".join(bounds))])
            for bounds in (HIGHER, BOTH)
            for steps in (2, 4)
        ),
        ({**HIGHER, "num_iterations": 2}, [EXPLAINED]),
        ({**HIGHER, "steps_per_generation": 8}, []),
    ],
)
def test_messages_about_the_first_loss(run, said):
    assert [remark[: len(start)] for remark, start in zip(remarks(**run), said, strict=True)] == said
