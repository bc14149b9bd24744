"""`DrGRPOConfig`: TRL's `GRPOConfig` with the switches of Dr. GRPO set, and whatever would undo them refused.

Deltas from `GRPOConfig`:

- `loss_type="dr_grpo"` and `scale_rewards="none"`: the objective needs *both* (TRL's `loss_type="dr_grpo"` alone still
  divides advantages by the group's std);
- `use_bias_correction_kl=False`: the KL term is k3 as published, not k3 times the importance ratio (no effect at the
  default `beta=0.0`);
- `vllm_importance_sampling_mode="token_truncate"`: what corrects for vLLM's probabilities weighs long rows like short
  ones (no effect without vLLM);
- a few new fields, all of them off or equal to TRL's behavior by default;
- contradictions are errors here, before a model loads;
- on a machine without an accelerator it selects CPU and float32 by itself, where TRL raises.

Each field is described once, in the docstring of the class, which is the help of its flag as well. What values may be
is in `field_kinds.py` and `rules.py`, what the inputs of a trainer may be in `preflight.py`.
"""

import dataclasses
import functools
import logging
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trl_drgrpo.common.errors import InputError, UnknownNameError, did_you_mean, in_one, shortened
from trl_drgrpo.common.ranges import RANGES, refuse_outside
from trl_drgrpo.common.secrets import is_saving, scrubbed
from trl_drgrpo.config.best_metric import choose_best_metric, needs_best_metric
from trl_drgrpo.config.field_kinds import read_mappings, refused, with_help
from trl_drgrpo.config.rules import validate, validate_batch
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR
from trl_drgrpo.upstream.versions import require_supported_trl

require_supported_trl()

import torch  # noqa: E402  # the version is judged before anything heavy loads
from trl import GRPOConfig  # noqa: E402

if TYPE_CHECKING:
    from trl_drgrpo.upstream.argument_types import Policy

logger = logging.getLogger(__name__)

# Fields of TRL whose default is another one here.
_OWN_DEFAULTS = ("scale_rewards", "loss_type", "vllm_importance_sampling_mode", "use_bias_correction_kl")
_TRL_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
# Other spellings of `scale_rewards`, as TRL reads them.
_SCALE_REWARDS = {"false": "none", "0": "none", "true": "group", "1": "group"}

ConfigClass = TypeVar("ConfigClass", bound=type)


def refuse_unknown_names(config_class: ConfigClass) -> ConfigClass:
    """Make the constructor name every argument that does not exist, and what has become of it, in one error.

    Python's own `TypeError` has the first name alone. What is wrong with the other arguments is in the error as well.
    """
    build = config_class.__init__

    @functools.wraps(build)  # keeps the signature of the fields
    def init(self: Any, *args: Any, **values: Any) -> None:
        fields = config_class.__dataclass_fields__
        unknown_names = [name for name in values if name not in fields]
        if not unknown_names:
            build(self, *args, **values)
            return
        from trl_drgrpo.upstream.former_names import remedy_for_name

        errors = []
        for name in unknown_names:
            del values[name]
            expected = f"a field of {config_class.__name__}"
            errors.append(UnknownNameError(name, "an unknown name", expected, remedy_for_name(name, fields)))
        # The object is never used: this asks only what else is wrong.
        try:
            build(self, *args, **values)
        except InputError as error:
            errors.append(error)
        raise in_one(errors)

    config_class.__init__ = init
    return config_class


@refuse_unknown_names
@with_help
@dataclass
class DrGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`DrGRPOTrainer`]: every field of [`trl.GRPOConfig`], plus the following.

    Parameters:
        loss_normalizer (`int`, *optional*):
            L, the constant in tokens by which the summed token losses are divided, together with the number of rows.
            Defaults to `max_completion_length`. Stored in every checkpoint and kept on resume, also when
            `max_completion_length` has changed meanwhile.
        advantage_baseline (`str`, *optional*, defaults to `"group_mean"`):
            Baseline subtracted from the rewards of a group: its mean (`"group_mean"`, the paper), or for each row the
            mean of the others (`"leave_one_out"`, also called `"rloo"`). See [`group_advantages`].
        scale_by_running_std (`bool`, *optional*, defaults to `False`):
            Divide advantages by the standard deviation of all rewards of earlier batches, over all prompts; the first
            batch by 1. One number for the whole batch, never a group's own std, so it does not bring back the
            difficulty bias.
        beta_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps over which the KL weight rises linearly to beta: `beta * min(1, (step + 1) / steps)`. 0:
            beta from the start.
        on_reward_error (`str`, *optional*, defaults to `"raise"`):
            What a reward function that raises, or returns something else than one finite number or `None` per
            completion, does to the run. `"raise"`: the run saves a checkpoint and stops with one clear error.
            `"unscorable"`: the call's completions get `None`, the first traceback is logged, and
            `rewards/<name>/failed_frac` counts; an environment that fails costs its own row only. `None` and NaN mean
            that a row cannot be judged, whatever was written: it is left out of its group. Where a completion can
            cause the failure, that pays for it: return the lowest reward instead.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Train even if `output_dir` holds another run, which is refused otherwise. When training begins, with model
            and data loaded, the older run's checkpoints and run log are deleted; its saved model stays until this
            run's takes its place.
        adapter_dtype (`str`, *optional*, defaults to `"float32"`):
            Dtype of adapters on a base that bitsandbytes has quantized. `"float32"`: adapters train and are saved
            in float32. `"upstream"`: TRL casts them to bfloat16, in which small updates are rounded away: of the
            elements of LoRA-A 0.4%, 4.4% and 50% changed in 20 steps at learning rate 1e-6, 1e-5 and 1e-4, against
            more than 99.9% in float32 (measured on a small NF4 model on CPU).

        > The exact fast path

        micro_batching (`str`, *optional*, defaults to `"exact"`):
            `"exact"`: within an optimizer step, rows without advantage are skipped, the others are regrouped by length
            and cut to their own extent; the gradient is the same up to rounding. `"upstream"`: micro-batches as TRL
            makes them, bit for bit. TRL's are kept, too, with an entropy bonus, a top-entropy mask, an MoE auxiliary
            loss of scope `"micro_batch"`, or images; with `beta > 0` no row is left out.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Let the completions of a prompt run behind one forward of it, and of longer prefixes that they share, where
            that costs less than repeating them and a numerical self-test of the model agrees (full attention through
            `sdpa`). Only with `micro_batching="exact"`.
        fast_generation (`bool`, *optional*, defaults to `True`):
            Without vLLM: run each prompt once for all its completions, and drop finished rows from the decoding batch.
            The same seed samples the same tokens as without it, up to rounding.
        router_aux_scope (`str`, *optional*, defaults to `"micro_batch"`):
            Batch over which the load-balancing loss of a mixture of experts counts how often each expert is chosen:
            TRL's micro-batch, or the generation batch of all ranks (`"batch"`, arXiv 2501.11873), under which
            micro-batches may be planned. No row is left out then, and a pass without gradient counts the choices
            before the first optimizer step of each generation batch; see `recipes/guides/fast_path.md`.
        generation_rows (`int`, *optional*):
            Without vLLM: rows that are generated at a time, one round after the other, where the keys and values of
            all rows do not fit into memory. All rows by default. With `fast_generation` the same seed samples the
            same tokens in any number of rounds, up to rounding. In transformers' own loop each round draws its random
            numbers behind those of the one before, which makes other samples of the same distribution.

        > Which prompts train

        dynamic_sampling (`bool` or `str`, *optional*, defaults to `False`):
            Draw prompts until a batch is full of live groups, weighted so that the objective stays the same
            (see [`select_groups`]). `"dapo"`: their plain mean (arXiv 2503.14476), which multiplies the gradient by a
            factor that changes as the model learns; it is logged.
        max_sampling_rounds (`int`, *optional*, defaults to `10`):
            Most prompts to draw for a batch, as a multiple of its prompts.
        curriculum (`bool`, *optional*, defaults to `False`):
            Skip prompts at random before generation, easy and hard ones most often, and weight the others by the
            inverse of their probability. It grows with the standard deviation of a prompt's reward, estimated from
            its running pass rate.
        curriculum_q_min (`float`, *optional*, defaults to `0.2`):
            Lowest probability with which the curriculum keeps a prompt; it bounds the weights.
        prior_pass_rates (`str`, *optional*):
            File of pass rates from before the run, as `trl-drgrpo score --pass_rates` writes them.

        > Forks

        forks (`int`, *optional*, defaults to `1`):
            Branches per cut: with `2`, half of a group's `num_generations` are written from the prompt, each is cut
            behind a step, and another one is sampled from there. The branches of a cut are compared with each other,
            which says what the tokens behind it are worth; unbiased, if a cut depends on the tokens before it alone,
            see [`fork_token_advantages`]. A group with an unscorable row trains nothing. It takes the place of
            `advantage_baseline`. `1`: no forks. A vLLM server needs a context of prompt and twice
            `max_completion_length`: one limit holds for all branches of a batch.
        fork_depth (`int`, *optional*, defaults to `1`):
            Cuts per completion, with forks above 1. `num_generations` must be at least twice `forks ** fork_depth`,
            and a multiple of it.
        fork_at (`str`, *optional*, defaults to `"drawn"`):
            Where completions are cut: behind the step that a random place lies in, drawn beforehand (`"drawn"`);
            behind the first step whose mean entropy in nats (`"entropy"`), or whose `1 - score` by the step reward
            functions (`"doubt"`), exceeds `fork_threshold`; a score may depend on the text up to its step, not on
            what follows. Steps are those of `step_separator`.
        fork_threshold (`float`, *optional*):
            Threshold for fork_at `"entropy"` (in nats) and `"doubt"` (1 - score).

        > Turns

        max_turn_length (`int`, *optional*):
            Tokens that the model writes in one turn at most, with `tools` or an `environment_factory`. A turn that
            reaches it ends the completion, cut off. By default a turn may take all that `max_completion_length`
            leaves.

        > Diagnostics

        correct_reward (`str`, *optional*):
            Name of the reward function that says which completions are correct; the first one by default. For pass
            rate, lengths of correct and incorrect completions, and difficulties.
        correct_threshold (`float`, *optional*):
            A completion is correct if `correct_reward` gives at least this. Without it only a reward that gives
            nothing but 0 and 1 is read as incorrect and correct.
        warmup_ratio (`float`, *optional*):
            Former name, in transformers, of a `warmup_steps` below 1: a share of all steps.
        run_log (`bool`, *optional*, defaults to `True`):
            Write metrics, warnings and recorded completions to `<output_dir>/_drgrpo`, for `trl-drgrpo report`.
        record_groups (`int`, *optional*, defaults to `4`):
            Groups of each generation batch whose completions are recorded there. 0: none, -1: all.
        run_warnings (`dict` or `bool`, *optional*, defaults to `True`):
            Warn, once per cause, when the metrics of the optimizer steps go bad, however seldom they are logged.
            `False`: silence. A mapping sets thresholds of causes, or silences one that is mapped to `False`:
            `{"dead_groups": {"share": 0.9, "steps": 50}}`; see `recipes/guides/monitoring.md`.

        > Process rewards, in effect when the trainer has `step_reward_funcs`

        step_separator (`list[str]`, *optional*):
            End of a step: one or several separators, or a single `re:<pattern>`, `tokens:<n>`, `sentence` or `turn`;
            see [`step_segmenter`]. Defaults to `turn` with `tools` or an `environment_factory`, a turn of the
            conversation being a step, and to an empty line (`"\n\n"`) otherwise.
        process_role (`str`, *optional*, defaults to `"reward"`):
            `"reward"`: step rewards are paid, beside the outcome. `"baseline"`: they are subtracted from the outcome,
            as an estimate of how a row stood before each step, times a fitted coefficient; a bad one adds variance and
            is never paid for. The gradient stays unbiased if a step's score reads no further than the end of that
            step: a function says so by its attribute `is_causal`, and one that declares `False` is refused. For all
            conditions see [`ValueBaseline`]. The default suits rules and turns, which are meant to be paid; the
            trainer warns where a model is (`recipes/guides/process_rewards.md`).
        step_credit (`str`, *optional*, defaults to `"return_to_go"`):
            Step rewards credited to a token: `"return_to_go"`, `"immediate"` or `"min_increments"` (the smallest
            reward of the row, so nothing is gained by more steps); see [`step_advantages`].
        step_baseline (`str`, *optional*, defaults to `"to_go"`):
            Baseline of a step in its group: `"to_go"` (what the other rows earn from the same step on) and `"none"`
            are unbiased, if scores and ends of steps do not depend on later text and no row is `None` because of what
            it wrote. `"deepseekmath"`, `"pooled_others"`, `"per_completion"` and `"same_index"` are not.
        outcome_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the outcome advantage when there are step rewards:
            `A_it = outcome_weight * A_i + process_weight * A_it(process)`.
        process_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the process advantage when there are step rewards. `to_go` compares with the *other* rows, so
            its scale is that of `advantage_baseline="leave_one_out"`: G / (G - 1) times the group mean's.
        step_reward_weights (`list[float]`, *optional*):
            One weight per step reward function. Defaults to 1 for each.
        deepseekmath_step_std (`bool`, *optional*, defaults to `False`):
            Divide step advantages by the group's standard deviation, as arXiv 2402.03300 does. It brings the
            difficulty bias back.

        > vLLM

        vllm_lora (`str`, *optional*, defaults to `"auto"`):
            What vLLM gets of a LoRA run: `"adapter"` sends the adapter alone, also over a 4-bit base; `"merged"`
            copies of the whole model with the adapter merged in. `"auto"` sends the adapter where vLLM can take it
            (no DoRA, no modules in full, no sharded model), else merged copies, and says why.

        > Defaults that differ from those of [`trl.GRPOConfig`]

        loss_type (`str`, *optional*, defaults to `"dr_grpo"`):
            Always `"dr_grpo"`: token losses summed, divided by a constant. TRL's default, `"dapo"`, is read as not
            chosen; others are refused.
        scale_rewards (`str`, *optional*, defaults to `"none"`):
            Always `"none"` (or False): no division by a standard deviation. TRL's default, `"group"`, is read as not
            chosen; others are refused.
        use_bias_correction_kl (`bool`, *optional*, defaults to `False`):
            Whether to multiply the KL term by the importance ratio (DeepSeek-V3.2), TRL's default. False: k3 as
            published.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            Bound on the ratio of the policy's probabilities to vLLM's: `"token_truncate"` clips each token's,
            `"token_mask"` sets it to 0 beyond the bounds; `"sequence_truncate"` and `"sequence_mask"` (TRL's default)
            do so with the product over a row, so that long rows weigh less.

    Without an accelerator, `use_cpu` and `bf16` become CPU and float32 instead of an error.

    `mask_truncated_completions` changes the objective: truncated rows stay in their group's mean and get no gradient,
    so the gradient is that of `E[(1 - t) r + t J]`, with t = 1 for a truncated row and J the mean reward as it stands.
    Being cut off is worth the mean reward, whatever the row's own was. Not with `forks` or step rewards.

    Raises:
        `InputError` (a `ValueError`): A value that would make the run something else than Dr. GRPO, or that
            contradicts another one.
    """

    loss_type: str = "dr_grpo"
    scale_rewards: str = "none"
    use_bias_correction_kl: bool = False
    vllm_importance_sampling_mode: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
    ] = "token_truncate"
    loss_normalizer: int | None = None
    advantage_baseline: Literal["group_mean", "leave_one_out", "rloo"] = "group_mean"
    scale_by_running_std: bool = False
    beta_warmup_steps: int = 0
    on_reward_error: Literal["raise", "unscorable"] = "raise"
    overwrite_output_dir: bool = False
    adapter_dtype: Literal["float32", "upstream"] = "float32"
    vllm_lora: Literal["auto", "adapter", "merged"] = "auto"
    micro_batching: Literal["exact", "upstream"] = "exact"
    share_prompts: bool = True
    fast_generation: bool = True
    router_aux_scope: Literal["micro_batch", "batch"] = "micro_batch"
    generation_rows: int | None = None
    dynamic_sampling: bool | str = False
    max_sampling_rounds: int = 10
    curriculum: bool = False
    curriculum_q_min: float = 0.2
    prior_pass_rates: str | None = None
    forks: int = 1
    fork_depth: int = 1
    fork_at: Literal["drawn", "entropy", "doubt"] = "drawn"
    fork_threshold: float | None = None
    max_turn_length: int | None = None
    correct_reward: str | None = None
    correct_threshold: float | None = None
    warmup_ratio: float | None = None
    run_log: bool = True
    record_groups: int = 4
    run_warnings: dict[str, Any] | bool | str = True
    step_separator: list[str] | None = None
    process_role: Literal["reward", "baseline"] = "reward"
    step_credit: Literal["return_to_go", "immediate", "min_increments"] = "return_to_go"
    step_baseline: Literal["to_go", "deepseekmath", "per_completion", "pooled_others", "same_index", "none"] = "to_go"
    outcome_weight: float = 1.0
    process_weight: float = 1.0
    step_reward_weights: list[float] | None = None
    deepseekmath_step_std: bool = False

    if TYPE_CHECKING:  # TRL declares these wider; they are set, and mappings read, once a configuration is built
        output_dir: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
        num_generations: int = 8  # pyright: ignore[reportIncompatibleVariableOverride]
        generation_batch_size: int = 8  # pyright: ignore[reportIncompatibleVariableOverride]
        steps_per_generation: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]
        model_init_kwargs: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        generation_kwargs: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        chat_template_kwargs: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        gradient_checkpointing_kwargs: dict[str, Any] | None = None  # pyright: ignore
        lr_scheduler_kwargs: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        values_before = dict(vars(self))
        # Our rules come first: TRL's constructor looks for devices and fills in batch sizes, and its errors name no
        # field. Without an accelerator it raises unless `use_cpu` is set by then.
        self._spell_out()
        validate(self)
        self._fall_back_to_cpu()
        try:
            super().__post_init__()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise refused(error, vars(self), type(self).__name__) from error
        # Each field that was changed here: its value before, and now. A card tells from it what somebody has set.
        self.derived = {}
        for name, before in values_before.items():
            now = getattr(self, name)
            if now is not before:
                self.derived[name] = (before, now)

    def check(self) -> None:
        """Refuse what the constructor refuses, in a configuration whose fields were assigned to since.

        The trainer calls it when it takes the configuration, and when training starts where a field was assigned to
        in between.

        Raises:
            `InputError`: As in the constructor.
        """
        fields = self.__dataclass_fields__
        # Libraries store values here under names of their own, so only what is nearly a field is refused.
        for name in sorted(vars(self).keys() - fields.keys()):
            nearest = did_you_mean(name, fields, "", cutoff=0.85)
            if nearest:
                got = f"{shortened(vars(self)[name])}, assigned to a field that does not exist"
                raise UnknownNameError(name, got, "a field of DrGRPOConfig", nearest)
        self._spell_out()
        validate(self)
        validate_batch(self)

    @classmethod
    def from_grpo_config(cls, config: GRPOConfig) -> "DrGRPOConfig":
        """Read a plain `GRPOConfig` as a Dr. GRPO run: a value that is TRL's default becomes ours, others stay.

        A default that was written out cannot be told from one that was not: the log says what changes.

        Args:
            config ([`trl.GRPOConfig`]): The configuration of an existing script.

        Returns:
            [`DrGRPOConfig`]: A copy; the original stays as it is.

        Raises:
            `InputError`: A value that is not TRL's default contradicts Dr. GRPO, as in the constructor; or the class
                is derived from `GRPOConfig`, so that a copy would lose its methods.
        """
        if isinstance(config, cls):
            return config
        if type(config) is not GRPOConfig:
            name = type(config).__name__
            remedy = f"A copy would lose its methods: derive {name} from trl_drgrpo.DrGRPOConfig."
            raise InputError("args", f"{name}, derived from GRPOConfig", "a GRPOConfig or a DrGRPOConfig", remedy)
        # The values went through TRL's __post_init__ already, which takes batch sizes and devices once only.
        converted = object.__new__(cls)
        vars(converted).update(vars(config))
        # transformers has written "loss" where nothing was chosen, and a direction with it.
        if needs_best_metric(config) and config.metric_for_best_model == "loss":
            converted.metric_for_best_model = converted.greater_is_better = None
        # Fields that are new here, or in a class derived from this one.
        for field in dataclasses.fields(cls):
            if not hasattr(config, field.name):
                default = field.default if field.default_factory is MISSING else field.default_factory()
                setattr(converted, field.name, default)
        changed = []
        for name in _OWN_DEFAULTS:
            value = getattr(config, name)
            if value == _TRL_DEFAULTS[name]:
                default = getattr(cls, name)
                changed.append(f"{name} {value!r} -> {default!r}")
                setattr(converted, name, default)
        changes = ", ".join(changed) or "nothing to change"
        logger.warning("Got a plain GRPOConfig; using the settings of Dr. GRPO: %s.", changes)
        converted.check()
        return converted

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as TRL does, without the secrets in nested options: trackers log them."""
        return scrubbed(super().to_dict())

    def __getstate__(self) -> dict[str, Any]:
        # A checkpoint holds the pickled configuration and gets no secrets; a copy for another process needs them.
        return scrubbed(self.__dict__) if is_saving() else self.__dict__

    def separators(self, has_turns: bool) -> list[str]:
        """Return `step_separator`, or its default.

        Args:
            has_turns (`bool`): Whether the run has tools or environments.
        """
        return self.step_separator or ["turn" if has_turns else DEFAULT_SEPARATOR]

    def _spell_out(self) -> None:
        """Bring the forms that scripts and command lines may use into the one that the rest reads."""
        read_mappings(self)
        choose_best_metric(self)
        # The checks run again when a trainer takes the configuration: each former form is cleared, not kept beside.
        if self.warmup_ratio is not None:
            refuse_outside("warmup_ratio", self.warmup_ratio, RANGES["warmup_ratio"])
            self.warmup_steps = self.warmup_steps or self.warmup_ratio
            self.warmup_ratio = None
        self.scale_rewards = _SCALE_REWARDS.get(str(self.scale_rewards).lower(), self.scale_rewards)
        for name in ("loss_type", "scale_rewards"):
            default = _TRL_DEFAULTS[name]
            if getattr(self, name) == default:
                value = getattr(DrGRPOConfig, name)
                logger.warning("%s=%r is TRL's default and read as not chosen: %r.", name, default, value)
                setattr(self, name, value)
        if isinstance(self.step_separator, str):
            self.step_separator = [self.step_separator]
        if self.advantage_baseline == "rloo":
            self.advantage_baseline = "leave_one_out"
        # Fields of a boolean or text: a command line cannot tell which is meant.
        for name in ("dynamic_sampling", "run_warnings"):
            text = str(getattr(self, name)).lower()
            if text in ("true", "false"):
                setattr(self, name, text == "true")

    def _fall_back_to_cpu(self) -> None:
        """Choose CPU and float32 without an accelerator, so that a script written for a GPU starts on a laptop."""
        if not self.use_cpu and not torch.accelerator.is_available():
            ignored = ""
            chosen = [f"{name}=True" for name in ("bf16", "fp16", "tf32") if getattr(self, name)]
            if chosen:
                ignored = f" {', '.join(chosen)}: ignored, as only an accelerator can do it."
            logger.warning("No accelerator found: training on the CPU in float32.%s", ignored)
            self.use_cpu = True
            self.bf16 = self.fp16 = False
            self.tf32 = None
        # TRL makes True of None; a CPU trains in float32 here.
        elif self.use_cpu and self.bf16 is None:
            self.bf16 = False


def dr_grpo_config(args: GRPOConfig | None, model: "Policy") -> DrGRPOConfig:
    """Return a trainer's configuration, checked, as a [`DrGRPOConfig`]; for `None` the defaults, with an `output_dir`
    named after the model."""
    if isinstance(args, DrGRPOConfig):
        args.check()
        return args
    if isinstance(args, GRPOConfig):
        return DrGRPOConfig.from_grpo_config(args)
    if args is None:
        # TRL names the folder `<model>-GRPO`.
        path = model if isinstance(model, str) else model.config._name_or_path
        model_name = path.rstrip("/").split("/")[-1]
        return DrGRPOConfig(f"{model_name or 'model'}-DrGRPO")
    raise InputError("args", type(args).__name__, "a DrGRPOConfig", "Build it with trl_drgrpo.DrGRPOConfig(...).")
