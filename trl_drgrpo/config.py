"""`DrGRPOConfig`: TRL's `GRPOConfig` with the switches of Dr. GRPO set, and whatever would undo them refused.

Deltas from `GRPOConfig`:

- `loss_type="dr_grpo"` and `scale_rewards="none"`: the objective needs *both* (TRL's `loss_type="dr_grpo"` alone still
  divides advantages by the group's std);
- `use_bias_correction_kl=False`: the KL term is k3 as published, not k3 times the importance ratio (no effect at the
  default `beta=0.0`);
- a few new fields, all of them off or equal to TRL's behaviour by default;
- contradictions are errors here, before a model loads;
- on a machine without an accelerator it selects CPU and float32 by itself, where TRL raises.
"""

import copy
import dataclasses
import logging
import os
from dataclasses import MISSING, dataclass, field
from typing import Any

from trl_drgrpo.advantages import ADVANTAGE_BASELINES
from trl_drgrpo.errors import InputError
from trl_drgrpo.step_credit import STEP_BASELINES, STEP_CREDITS, check_choices
from trl_drgrpo.steps import step_segmenter
from trl_drgrpo.versions import require_supported_trl

require_supported_trl()

import torch  # noqa: E402  # the version is judged before anything heavy loads
from trl import GRPOConfig  # noqa: E402

logger = logging.getLogger(__name__)

REWARD_ERROR_POLICIES = ("raise", "unscorable")

# What each other loss of TRL would bring back, in the words of the error message.
_BIAS_OF_LOSS = {
    "grpo": "It divides each completion's loss by its own length: a long wrong answer is punished less per token than "
    "a short one, so wrong answers grow (length bias).",
    "bnpo": "It divides by the tokens of a micro-batch: the weight of a token depends on which rows share it.",
    "dapo": "It divides by the tokens of the batch: the weight of a row depends on how long the others are.",
}
_ANOTHER_OBJECTIVE = "It is another objective than Dr. GRPO."


@dataclass
class DrGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`DrGRPOTrainer`]: every field of [`trl.GRPOConfig`], plus the following.

    Parameters:
        loss_normalizer (`int`, *optional*):
            `L`, the constant in tokens that the summed token losses are divided by (together with the number of
            rows). Defaults to `max_completion_length`. Stored in every checkpoint and kept on resume, also when
            `max_completion_length` has changed meanwhile.
        advantage_baseline (`str`, *optional*, defaults to `"group_mean"`):
            `"group_mean"` (the paper) or `"leave_one_out"`, see [`group_advantages`].
        scale_by_running_std (`bool`, *optional*, defaults to `False`):
            Divide advantages by the standard deviation of all rewards seen so far, over all prompts: one number for
            the whole batch, never a group's own std, so it does not bring back the difficulty bias.
        beta_warmup_steps (`int`, *optional*, defaults to `0`):
            Raise the KL weight linearly over this many optimizer steps: `beta * min(1, (step + 1) / steps)`.
        on_reward_error (`str`, *optional*, defaults to `"raise"`):
            What a reward function that raises, or returns something else than one finite number or `None` per
            completion, does to the run. `"raise"`: the run saves a checkpoint and stops with one clear error.
            `"unscorable"`: the call's completions count as unscorable (advantage 0), the first traceback is logged,
            and `rewards/<name>/failed_frac` counts. NaN and `None` always mean unscorable.

        > Process rewards, in effect when the trainer has `step_reward_funcs`

        step_separator (`list[str]`, *optional*, defaults to `["\n\n"]`):
            What ends a step: one or several separators, or a single `re:<pattern>`, `tokens:<n>` or `turn`; see
            [`~trl_drgrpo.steps.step_segmenter`].
        step_credit (`str`, *optional*, defaults to `"return_to_go"`):
            Which steps a token answers for: `"return_to_go"` (the paper; pays for every further good step),
            `"immediate"` or `"min_to_go"` (bounded); see [`step_advantages`].
        step_baseline (`str`, *optional*, defaults to `"pooled"`):
            What a step reward is compared with: `"pooled"` (the paper; weighs rows by their number of steps),
            `"per_completion"`, `"leave_one_out"`, `"same_index"` or `"none"`.
        outcome_weight, process_weight (`float`, *optional*, default to `1.0`):
            `A_it = outcome_weight * A_i + process_weight * A_it(process)`.
        step_reward_weights (`list[float]`, *optional*):
            One weight per step reward function; all 1 by default.
        deepseekmath_step_std (`bool`, *optional*, defaults to `False`):
            Divide step advantages by the group's standard deviation, as arXiv 2402.03300 does. It brings the
            difficulty bias back.

    Defaults that differ from [`trl.GRPOConfig`]:
        - `loss_type`: `"dr_grpo"` instead of `"dapo"`.
        - `scale_rewards`: `"none"` instead of `"group"`.
        - `use_bias_correction_kl`: `False` instead of `True`.
        - `use_cpu` and `bf16`: without an accelerator, CPU and float32 instead of an error.

    Raises:
        `InputError` (a `ValueError`): A value that would make the run something else than Dr. GRPO, or that
            contradicts another one.
    """

    loss_type: str = field(
        default="dr_grpo",
        metadata={"help": "Always 'dr_grpo': token losses summed, divided by a constant. Others are refused."},
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Always 'none' (or False): no division by a standard deviation. Others are refused."},
    )
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={
            "help": "Whether to multiply the KL term by the importance ratio (DeepSeek-V3.2). False: k3 as published."
        },
    )
    loss_normalizer: int | None = field(
        default=None,
        metadata={
            "help": "L, the constant in tokens by which the summed token losses are divided. Defaults to "
            "max_completion_length; stored with the checkpoint and kept on resume."
        },
    )
    advantage_baseline: str = field(
        default="group_mean",
        metadata={
            "help": "Baseline subtracted from the rewards of a group: 'group_mean' or 'leave_one_out'.",
            "choices": list(ADVANTAGE_BASELINES),
        },
    )
    scale_by_running_std: bool = field(
        default=False,
        metadata={
            "help": "Divide advantages by the std of all rewards seen so far, over all prompts (not per group)."
        },
    )
    beta_warmup_steps: int = field(
        default=0,
        metadata={"help": "Optimizer steps over which the KL weight rises linearly to beta. 0: beta from the start."},
    )
    on_reward_error: str = field(
        default="raise",
        metadata={
            "help": "When a reward function fails: 'raise' (save a checkpoint and stop) or 'unscorable' (leave the "
            "call's completions out, count them in rewards/<name>/failed_frac, go on).",
            "choices": list(REWARD_ERROR_POLICIES),
        },
    )

    step_separator: list[str] = field(
        default_factory=lambda: ["\n\n"],
        metadata={
            "help": "What ends a step: one or several separators, or a single 're:<pattern>', 'tokens:<n>' or 'turn'."
        },
    )
    step_credit: str = field(
        default="return_to_go",
        metadata={
            "help": "Which steps a token answers for: 'return_to_go', 'immediate' or 'min_to_go'.",
            "choices": list(STEP_CREDITS),
        },
    )
    step_baseline: str = field(
        default="pooled",
        metadata={"help": "What a step reward is compared with in its group.", "choices": list(STEP_BASELINES)},
    )
    outcome_weight: float = field(
        default=1.0, metadata={"help": "Weight of the outcome advantage when there are step rewards."}
    )
    process_weight: float = field(
        default=1.0, metadata={"help": "Weight of the process advantage when there are step rewards."}
    )
    step_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per step reward function. Defaults to 1 for each."}
    )
    deepseekmath_step_std: bool = field(
        default=False,
        metadata={
            "help": "Divide step advantages by the group's std, as the DeepSeekMath paper does (difficulty bias)."
        },
    )

    def __post_init__(self):
        self._refuse_other_objectives()
        self._refuse_contradictions()
        self._refuse_contradictory_credit()
        self._refuse_partial_groups()
        self._fall_back_to_cpu()
        super().__post_init__()

    @classmethod
    def from_grpo_config(cls, config: GRPOConfig) -> "DrGRPOConfig":
        """A plain `GRPOConfig` read as a Dr. GRPO run: what was left at TRL's default takes ours, the rest stays.

        Args:
            config ([`trl.GRPOConfig`]): The configuration of an existing script.

        Returns:
            [`DrGRPOConfig`].

        Raises:
            `InputError`: A value that is not TRL's default contradicts Dr. GRPO, as in the constructor.
        """
        # The values went through __post_init__ already (batch geometry, devices), so they are taken over as they are.
        converted = object.__new__(cls)
        converted.__dict__.update(copy.copy(config.__dict__))
        trl_default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
        for own in dataclasses.fields(cls):
            if own.name not in trl_default:
                setattr(converted, own.name, own.default if own.default_factory is MISSING else own.default_factory())
            elif (
                own.name in ("loss_type", "scale_rewards", "use_bias_correction_kl")
                and getattr(config, own.name) == trl_default[own.name]
            ):
                setattr(converted, own.name, own.default)
        converted._refuse_other_objectives()
        converted._refuse_contradictions()
        return converted

    def _refuse_other_objectives(self) -> None:
        """Values under which the run would not be Dr. GRPO any more."""
        if self.loss_type != "dr_grpo":
            bias = _BIAS_OF_LOSS.get(self.loss_type, _ANOTHER_OBJECTIVE)
            raise InputError(
                "loss_type", repr(self.loss_type), "'dr_grpo'", f"{bias} Use trl.GRPOTrainer for that objective."
            )
        scaling: Any = self.scale_rewards  # a bool when a script says False, as TRL allows
        self.scale_rewards = str(
            {True: "group", False: "none", "False": "none", "false": "none"}.get(scaling, scaling)
        )
        if self.scale_rewards != "none":
            raise InputError(
                "scale_rewards",
                repr(scaling),
                "'none' (or False)",
                "Dividing by the standard deviation makes very easy and very hard prompts weigh more than the others "
                "(difficulty bias). Use trl.GRPOTrainer for that, or scale_by_running_std=True for one scale over all "
                "prompts.",
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise InputError(
                "multi_objective_aggregation",
                repr(self.multi_objective_aggregation),
                "'sum_then_normalize' (here: a weighted sum, nothing is normalised)",
                "Normalising each reward divides by a group's standard deviation (difficulty bias). Use "
                "trl.GRPOTrainer for that (GDPO).",
            )
        if self.sync_ref_model:
            raise InputError(
                "sync_ref_model",
                "True",
                "False",
                "Moving the reference towards the policy makes the KL term measure recent drift only: nothing holds "
                "the run to the model it started from. Use trl.GRPOTrainer for that (TR-DPO).",
            )

    def _refuse_contradictions(self) -> None:
        """Our own fields, and values that do not fit each other."""
        choices = {
            "advantage_baseline": ADVANTAGE_BASELINES,
            "on_reward_error": REWARD_ERROR_POLICIES,
            "step_credit": STEP_CREDITS,
            "step_baseline": STEP_BASELINES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(name, repr(getattr(self, name)), f"one of {', '.join(allowed)}", "Pick one of them.")
        for name in ("loss_normalizer", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(name, repr(value), "a positive number of tokens", "Leave it out for the default.")
        if self.max_completion_length is None and self.loss_normalizer is None:
            raise InputError(
                "loss_normalizer",
                "None together with max_completion_length=None",
                "a positive number of tokens",
                "Without a length limit there is no natural constant to divide by: set loss_normalizer, say to "
                "the length you expect at most.",
            )
        if self.num_generations is None or self.num_generations < 2:
            raise InputError(
                "num_generations",
                repr(self.num_generations),
                "at least 2",
                "A group of one has no baseline, so its advantage is always 0. 8 is the usual size.",
            )
        if self.beta < 0:
            raise InputError("beta", repr(self.beta), "0 or more", "A negative weight would reward drifting away.")
        if self.beta_warmup_steps < 0 or (self.beta_warmup_steps > 0 and self.beta == 0):
            raise InputError(
                "beta_warmup_steps",
                f"{self.beta_warmup_steps} with beta={self.beta}",
                "0, or a positive number of steps with beta > 0",
                "There is nothing to warm up without a KL term: set beta, or leave beta_warmup_steps out.",
            )

    def _refuse_contradictory_credit(self) -> None:
        """Process rewards: the choices must fit each other, and the separator must be one."""
        if isinstance(self.step_separator, str):
            self.step_separator = [self.step_separator]
        step_segmenter(self.step_spec)
        check_choices(self.step_credit, self.step_baseline, self.deepseekmath_step_std, prefix="step_")

    @property
    def step_spec(self) -> Any:
        """`step_separator` as [`~trl_drgrpo.steps.step_segmenter`] takes it: a list of one is that one."""
        return self.step_separator[0] if len(self.step_separator) == 1 else self.step_separator

    def _refuse_partial_groups(self) -> None:
        """A generation batch that would cut a prompt's group in two."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        rows = self.generation_batch_size or self.per_device_train_batch_size * world_size * steps
        if rows % (self.num_generations or 1) != 0:
            raise InputError(
                "num_generations",
                f"{self.num_generations} for a generation batch of {rows} rows (generation_batch_size, or "
                f"per_device_train_batch_size {self.per_device_train_batch_size} x {world_size} processes x {steps})",
                "a divisor of the generation batch",
                "Every prompt needs all its completions in the batch: change gradient_accumulation_steps or "
                "per_device_train_batch_size so that the product is a multiple of num_generations.",
            )

    def _fall_back_to_cpu(self) -> None:
        """Without an accelerator: CPU and float32, so that a script written for a GPU starts on a laptop."""
        if not self.use_cpu and not torch.accelerator.is_available():
            logger.warning("No accelerator found: training on the CPU in float32.")
            self.use_cpu = True
            self.bf16 = self.fp16 = False
        elif self.use_cpu and self.bf16 is None:
            self.bf16 = False
