"""Two looks at the first optimizer steps: do the weights that get a gradient move at all, and is the first loss as it
should be?

In bfloat16 an update of 1e-6 next to a weight of 0.01 rounds to nothing: loss, rewards and gradient norm look as
ever, and the model does not learn. `MovementWatch` compares sampled elements with copies from the start of training;
`nothing_moves` in `warning_causes.py` warns. Only elements that had a gradient count, and only steps with a learning
rate behind its warm-up and a gradient that is not 0, so dead batches, a warm-up and unused experts do not trigger it.

`first_loss_remarks` explains what looks like a fault in the first logged loss, or has no effect.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trl_drgrpo.upstream.description import DescribingFeature

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


@dataclass
class _Sample:
    """Some elements of one parameter: where they are, their values at the start, and whether they had a gradient."""

    parameter: torch.nn.Parameter
    group: str
    index: torch.Tensor  # (n,)
    start: torch.Tensor  # (n,)
    touched: torch.Tensor  # (n,) bool

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1)[self.index]


class MovementWatch(DescribingFeature):
    """
    Measures once, in the first optimizer steps, how many of the parameters with a gradient move.

    Args:
        trainer ([`DrGRPOTrainer`], *optional*): The trainer it belongs to.
        steps (`int`, *optional*, defaults to `10`): Optimizer steps with a live group after which it looks.
        elements (`int`, *optional*, defaults to `100_000`): Elements that are sampled, over all parameters.

    Attributes:
        shares (`dict[str, float]`): Of the sampled elements that had a gradient, those that have changed, 0 to 1, by
            group: `LoRA-A`, `LoRA-B`, `norms and biases`, `weights`. Empty until it is known.
    """

    def __init__(self, trainer: "TrainerProtocol | None" = None, steps: int = 10, elements: int = 100_000):
        super().__init__(trainer)
        self.steps = steps
        self.elements = elements
        self.shares: dict[str, float] = {}
        self._samples: list[_Sample] = []
        self._signal_steps = 0
        self._is_logged = False

    def add_to_log(self, logs: dict[str, float]) -> None:
        """Adds `drgrpo/moved_frac`, the smallest share over the groups, the first time that it is known."""
        if self.shares and not self._is_logged and self.trainer.model.training:
            self._is_logged = True
            logs["drgrpo/moved_frac"] = min(self.shares.values())

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        self._samples = []
        self._signal_steps = 0
        if model is not None and not self.shares:  # known once is known for good
            self._samples = _sample(model, self.elements)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Note which elements have a gradient in a step that is about to be taken."""
        if not self._samples or optimizer is None:
            return
        # A warm-up takes steps on purpose too small to show: they would count as steps that moved nothing.
        highest_rate = max(float(group["lr"]) for group in optimizer.param_groups)
        if highest_rate <= 0 or state.global_step < args.get_warmup_steps(state.max_steps):
            return
        # A step over dead groups alone has gradients of 0, and proves nothing.
        had_signal = False
        for sample in self._samples:
            if sample.parameter.grad is not None:
                touched = sample.of(sample.parameter.grad) != 0
                had_signal |= bool(touched.any())
                sample.touched |= touched
        self._signal_steps += had_signal

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self._samples or self._signal_steps < self.steps:
            return
        touched: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for sample in self._samples:
            now = sample.of(sample.parameter.detach())
            has_moved = (now != sample.start) & sample.touched
            touched[sample.group] += int(sample.touched.sum())
            moved[sample.group] += int(has_moved.sum())
        self.shares = {group: moved[group] / count for group, count in touched.items() if count}
        self._samples = []


def _sample(model: torch.nn.Module, elements: int) -> list[_Sample]:
    """Sample about `elements` elements of the trainable parameters, the same number of each, evenly spread."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    # By parameter: one embedding would take nearly all.
    per_parameter = max(1, elements // max(1, len(trained)))
    samples = []
    for name, parameter in trained:
        count = min(parameter.numel(), per_parameter)
        distance = parameter.numel() // count
        index = torch.arange(count, device=parameter.device) * distance
        start = parameter.detach().reshape(-1)[index].clone()  # the optimizer steps in place
        untouched = torch.zeros_like(start, dtype=torch.bool)
        samples.append(_Sample(parameter, _group(name, parameter), index, start, untouched))
    return samples


def _group(name: str, parameter: torch.nn.Parameter) -> str:
    """Name the group of a parameter: values of one group are of one size."""
    # LoRA-B starts at 0, where every update counts; a norm is about 1, where the same update may round to nothing.
    lora = re.search(r"\.lora_(?:embedding_)?([AB])\.", name)
    if lora:
        return f"LoRA-{lora[1]}"
    return "norms and biases" if parameter.dim() < 2 else "weights"


def is_first_loss(logs: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a log has the first loss of a run, also of a resumed one; that of dead groups is none.

    Args:
        logs (`Mapping[str, Any]`): The newest log.
        history (`Sequence[Mapping]`): All logs of the run, the newest included.
    """
    return _has_loss(logs) and sum(map(_has_loss, history)) == 1


def _has_loss(logs: Mapping[str, Any]) -> bool:
    return "loss" in logs and logs.get("drgrpo/dead_groups_frac", 0) < 1


_BOUNDS = ("epsilon", "delta", "epsilon_high")  # of the ratio of the policy to the one that sampled


def first_loss_remarks(trainer: "TrainerProtocol", loss: float) -> list[str]:
    """Return remarks on a loss of about 0 and on clipping without effect.

    Args:
        trainer ([`DrGRPOTrainer`]): In training.
        loss (`float`): The first that was logged.

    Returns:
        `list[str]`: The first remark where every optimizer step holds whole groups whose advantages sum to 0, and
        nothing else is in the loss; the second where bounds of the ratio were set and each generation batch serves one
        optimizer step.
    """
    args = trainer.args
    remarks = []
    # An optimizer step over a part of a generation batch may hold a part of a group, and its sum is not 0.
    whole_groups = args.gradient_accumulation_steps % args.steps_per_generation == 0
    sum_to_zero = trainer.step_scorer is None and trainer.own_advantages is None
    nothing_else = not (args.beta or args.entropy_coef or args.use_adaptive_entropy or trainer.own_losses)
    if whole_groups and sum_to_zero and nothing_else:
        remarks.append(
            f"The loss is {loss:.2g}, and stays near 0: every importance ratio is 1 and the advantages of a group sum "
            "to 0, so only differences in length remain. Its gradient does train the model. Watch the reward instead."
        )
    if args.gradient_accumulation_steps % trainer.generate_every == 0:
        # A bound at its default was not asked for: to say that it has no effect would be noise.
        fields = type(args).__dataclass_fields__
        bounds = [name for name in _BOUNDS if getattr(args, name) != fields[name].default]
        if bounds:
            remarks.append(
                f"{', '.join(bounds)}: no effect with one optimizer step per generation batch, where every ratio is 1 "
                "and nothing is clipped. Raise num_iterations or steps_per_generation if you want clipping."
            )
    return remarks
