import dataclasses
import inspect
import math
import warnings
from types import SimpleNamespace

import pytest
from trl import GRPOConfig

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.best_metric import check_best_metric, with_best_metric
from trl_drgrpo.config.preflight import prepare
from trl_drgrpo.upstream.versions import drop_notices


def test_defaults_are_both_switches_of_dr_grpo():
    config = DrGRPOConfig()
    assert (config.loss_type, config.scale_rewards, config.beta) == ("dr_grpo", "none", 0.0)
    assert config.use_bias_correction_kl is False


def test_everything_else_keeps_trls_default():
    ours = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(DrGRPOConfig)}
    changed = {f.name for f in dataclasses.fields(GRPOConfig) if ours[f.name] != (f.default, f.default_factory)}
    assert changed == {"loss_type", "scale_rewards", "use_bias_correction_kl", "vllm_importance_sampling_mode"}


@pytest.mark.parametrize("value", [False, "none", "False", "false"])
def test_scaling_may_be_switched_off_in_trls_ways(value):
    assert DrGRPOConfig(scale_rewards=value).scale_rewards == "none"


@pytest.mark.parametrize(
    ("field", "value", "bias"),
    [
        ("loss_type", "grpo", "length bias"),
        ("loss_type", "bnpo", "which rows share it"),
        ("loss_type", "cispo", "not the objective of Dr. GRPO"),
        ("scale_rewards", "batch", "difficulty bias"),
        ("multi_objective_aggregation", "normalize_then_sum", "difficulty bias"),
        ("sync_ref_model", True, "the model it started from"),
    ],
)
def test_another_objective_is_refused_with_its_bias_and_the_class_to_use(field, value, bias):
    with pytest.raises(ValueError, match=f"^{field}: got") as error:
        DrGRPOConfig(**{field: value})
    assert bias in str(error.value)
    assert "trl.GRPOTrainer" in str(error.value)
    assert ". Remove it: Dr. GRPO sets it. " in str(error.value)


@pytest.mark.parametrize("scale_rewards", ["group", True, "True", "true"])
def test_a_default_of_trl_that_is_written_out_was_not_chosen(scale_rewards, caplog):
    config = DrGRPOConfig(use_cpu=True, loss_type="dapo", scale_rewards=scale_rewards)
    assert (config.loss_type, config.scale_rewards) == ("dr_grpo", "none")
    assert caplog.messages == [
        "loss_type='dapo' is TRL's default and read as not chosen: 'dr_grpo'.",
        "scale_rewards='group' is TRL's default and read as not chosen: 'none'.",
    ]


@pytest.mark.parametrize("way", [DrGRPOConfig, lambda **fields: DrGRPOConfig.from_grpo_config(GRPOConfig(**fields))])
def test_all_contradictions_are_one_error_in_both_ways(way):
    fields = {"loss_type": "grpo", "scale_rewards": "batch", "sync_ref_model": True, "beta": 0.1}
    with pytest.raises(InputError, match=r"^loss_type: .*Also scale_rewards: got 'batch'.*Also sync_ref_model: got"):
        way(use_cpu=True, bf16=False, **fields)
    with pytest.raises(InputError, match="^scale_rewards: got 'batch'"):
        way(use_cpu=True, bf16=False, loss_type="dapo", scale_rewards="batch")


@pytest.mark.parametrize("spelled", ["dr-grpo", "drgrpo", "Dr_GRPO"])
def test_the_losss_name_is_corrected(spelled):
    with pytest.raises(InputError, match=r"Did you mean 'dr_grpo'\?$"):
        DrGRPOConfig(loss_type=spelled)


def test_names_that_are_gone_are_one_error_that_says_what_to_do():
    with pytest.raises(InputError) as error:
        DrGRPOConfig(
            "out", max_prompt_length=5, no_cuda=True, num_generation=3, loss_type="grpo", scale_rewards="batch"
        )
    assert isinstance(error.value, TypeError)  # as which scripts for several versions of TRL catch it
    parts = str(error.value).split(" Also ")
    names = ["max_prompt_length", "no_cuda", "num_generation", "loss_type", "scale_rewards"]
    assert [part.partition(": ")[0] for part in parts] == names
    remedies = ("Filter long ones out of the dataset.", "It is called use_cpu now.", "Did you mean num_generations?")
    assert [part.endswith(remedy) for part, remedy in zip(parts[:3], remedies, strict=True)] == [True] * 3


def test_a_name_that_is_gone_comes_with_whatever_else_is_wrong():
    with pytest.raises(InputError, match="^max_prompt_length: .* Also beta: got -1; expected"):
        DrGRPOConfig(max_prompt_length=5, beta=-1, use_cpu=True)
    assert "advantage_baseline" in inspect.signature(DrGRPOConfig).parameters


def test_fields_of_a_subclass_are_names():
    class Own(DrGRPOConfig):
        def __init__(self, *args, mine=1, **fields):
            super().__init__(*args, **fields)
            self.mine = mine

    assert Own(use_cpu=True, mine=2).mine == 2
    assert (
        dataclasses.make_dataclass("Made", [("mine", int, 1)], bases=(DrGRPOConfig,))(use_cpu=True, mine=2).mine == 2
    )


def test_a_share_of_warmup_steps_keeps_its_former_name():
    assert DrGRPOConfig(use_cpu=True, warmup_ratio=0.1).get_warmup_steps(50) == 5
    assert (
        DrGRPOConfig(use_cpu=True, warmup_ratio=0.1, warmup_steps=3).get_warmup_steps(50) == 3
    )  # as transformers had it
    with pytest.raises(InputError, match="^warmup_ratio: got 10; expected a finite number, at least 0 and below 1"):
        DrGRPOConfig(use_cpu=True, warmup_ratio=10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss_type", "grpo", "loss_type: got 'grpo'"),
        ("beta", -0.1, "beta: got -0.1"),
        ("step_credit", "later", "step_credit: got 'later'"),
        ("num_generations", 3, "num_generations: got 3 for a generation batch of 8 rows"),
        ("per_device_train_batch_size", 4, "generation_batch_size: got 8, computed when"),
        ("steps_per_generation", 2, "generation_batch_size: got 8, computed when"),
    ],
)
def test_later_assignments_are_refused_by_the_trainer(field, value, message):
    config = DrGRPOConfig(use_cpu=True)
    setattr(config, field, value)
    with pytest.raises(InputError) as error:
        DrGRPOTrainer("nobody/no-such-model", len, config)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("field", ["gradient_accumulation_steps", "learning_rate", "max_steps", "temperature"])
def test_a_valid_value_may_be_assigned_later(field):
    config = DrGRPOConfig(use_cpu=True)
    setattr(config, field, 2)
    config.scale_rewards = False
    config.check()
    assert config.scale_rewards == "none"


def test_sampling_that_is_not_the_policys_is_said_in_one_line(settings, prompts, reward, caplog):
    fields = {"top_k": -1, "repetition_penalty": 1.2, "generation_kwargs": {"no_repeat_ngram_size": 3, "top_p": 1.0}}
    for given in (fields | {"top_k": 0}, {}):
        prepare(DrGRPOConfig(**settings, **given), None, [reward], prompts)
    said = [message for message in caplog.messages if "distribution" in message]
    assert [message.partition(": compl")[0] for message in said] == [
        "repetition_penalty=1.2, generation_kwargs: no_repeat_ngram_size=3"
    ]


def test_a_missing_length_limit_needs_an_explicit_normalizer():
    config = DrGRPOConfig(max_completion_length=None, loss_normalizer=1000)
    assert (config.max_completion_length, config.loss_normalizer) == (None, 1000)


@pytest.mark.skipif("__import__('torch').accelerator.is_available()", reason="has an accelerator")
@pytest.mark.parametrize(
    ("fields", "overridden"),
    [
        ({}, ""),
        ({"bf16": False}, ""),
        ({"bf16": True}, " bf16=True: ignored, as only an accelerator can do it."),
        ({"fp16": True, "tf32": True}, " fp16=True, tf32=True: ignored, as only an accelerator can do it."),
    ],
)
def test_a_gpu_script_starts_on_a_laptop_and_says_what_it_overrides(fields, overridden, caplog):
    config = DrGRPOConfig(**fields)
    assert caplog.messages[0] == f"No accelerator found: training on the CPU in float32.{overridden}"
    assert (config.use_cpu, config.bf16, config.fp16) == (True, False, False)
    assert config.device.type == "cpu"


def test_an_explicit_choice_on_the_cpu_is_respected():
    assert DrGRPOConfig(use_cpu=True, bf16=True).bf16 is True
    assert DrGRPOConfig(use_cpu=True).bf16 is False


class TestFromGRPOConfig:
    plain = {"use_cpu": True, "bf16": False}  # noqa: RUF012

    def test_takes_over_what_was_set_and_our_defaults_for_the_rest(self):
        config = DrGRPOConfig.from_grpo_config(GRPOConfig(max_completion_length=77, learning_rate=3e-5, **self.plain))
        assert (config.loss_type, config.scale_rewards) == ("dr_grpo", "none")
        assert (config.max_completion_length, config.learning_rate) == (77, 3e-5)
        assert (config.loss_normalizer, config.advantage_baseline) == (None, "group_mean")

    def test_says_what_changed(self, caplog):
        DrGRPOConfig.from_grpo_config(GRPOConfig(scale_rewards="group", **self.plain))
        assert "scale_rewards 'group' -> 'none'" in caplog.text
        assert "loss_type 'dapo' -> 'dr_grpo'" in caplog.text
        assert "vllm_importance_sampling_mode 'sequence_mask' -> 'token_truncate'" in caplog.text

    def test_a_correction_that_was_chosen_stays(self):
        config = GRPOConfig(vllm_importance_sampling_mode="sequence_truncate", **self.plain)
        assert DrGRPOConfig.from_grpo_config(config).vllm_importance_sampling_mode == "sequence_truncate"

    def test_bounds_that_no_ratio_has_are_refused_under_our_default_too(self):
        # TRL's constructor judges them under its own default, and torch would end the run at its first batch.
        config = GRPOConfig(use_vllm=True, vllm_importance_sampling_clip_max=None, **self.plain)
        with pytest.raises(InputError, match=r"^vllm_importance_sampling_clip_max: got None with .*'token_truncate'"):
            DrGRPOConfig.from_grpo_config(config)

    def test_takes_one_of_ours_as_it_is(self):
        config = DrGRPOConfig(loss_normalizer=77)
        assert DrGRPOConfig.from_grpo_config(config) is config

    def test_a_class_of_ones_own_is_to_be_derived_from_ours(self):
        @dataclasses.dataclass
        class WithMore(GRPOConfig):
            extra: int = 3

        with pytest.raises(InputError, match="^args: got WithMore, derived from GRPOConfig; .* derive WithMore from"):
            DrGRPOConfig.from_grpo_config(WithMore(**self.plain))

    def test_leaves_the_original_alone(self):
        original = GRPOConfig(**self.plain)
        DrGRPOConfig.from_grpo_config(original)
        assert (original.loss_type, original.scale_rewards) == ("dapo", "group")

    def test_choices_against_dr_grpo_are_refused(self):
        with pytest.raises(ValueError, match="^loss_type: got 'grpo'"):
            DrGRPOConfig.from_grpo_config(GRPOConfig(loss_type="grpo", **self.plain))
        with pytest.raises(ValueError, match="^scale_rewards: got 'batch'"):
            DrGRPOConfig.from_grpo_config(GRPOConfig(scale_rewards="batch", **self.plain))

    def test_batch_sizes_that_were_assigned_later_are_refused(self):
        config = GRPOConfig(**self.plain)
        config.per_device_train_batch_size = 4
        with pytest.raises(InputError, match="^generation_batch_size: got 8, computed when"):
            DrGRPOConfig.from_grpo_config(config)

    def test_equals_a_config_built_directly(self):
        fields = {**self.plain, "gradient_accumulation_steps": 4, "num_generations": 4, "output_dir": "somewhere"}
        converted = DrGRPOConfig.from_grpo_config(GRPOConfig(**fields))
        assert converted.to_dict() == DrGRPOConfig(**fields).to_dict()


def test_a_separator_that_was_not_chosen_is_the_turn_where_there_are_turns():
    config = DrGRPOConfig(use_cpu=True)
    assert (config.separators(has_turns=False), config.separators(has_turns=True)) == (["\n\n"], ["turn"])
    config.step_separator = "\n"
    config.check()
    assert config.separators(has_turns=True) == ["\n"]


def test_rloo_is_leave_one_out():
    assert DrGRPOConfig(use_cpu=True, advantage_baseline="rloo").advantage_baseline == "leave_one_out"


def test_values_that_trl_sets_warn_of_no_deprecation():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drop_notices()
        for given in ({}, {"gradient_checkpointing": False}):
            DrGRPOConfig(use_cpu=True, **given)
    assert [str(each.message) for each in caught if issubclass(each.category, FutureWarning)] == []


def args(metric, greater_is_better=True):
    return SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater_is_better)


def test_settings_of_evaluations_are_accepted():
    taken = """eval_reward reward eval_rewards/accuracy_reward/mean eval_process_rewards/accuracy_reward/mean
        eval_drgrpo/pass_rate eval_completions/mean_length eval_accuracy"""
    for metric in (None, *taken.split()):
        check_best_metric(args(metric), ["accuracy_reward"], ["accuracy_reward"])
    for metric in ("eval_hard_reward", "hard_rewards/accuracy_reward/mean", "eval_easy_drgrpo/pass_rate"):
        check_best_metric(args(metric), ["accuracy_reward"], datasets=["easy", "hard"])


def test_several_evaluation_sets_need_the_name_of_one():
    for metric, got in (("reward", "reward, which is that of the last of 2"), ("eval_hard_loss", "eval_hard_loss")):
        with pytest.raises(InputError, match=f"^metric_for_best_model: got {got}.* eval_easy_reward") as error:
            check_best_metric(args(metric), ["accuracy_reward"], datasets=["easy", "hard"])
        assert "eval_hard_reward" in str(error.value)


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    "needs",
    [
        {"load_best_model_at_end": True},
        {"save_strategy": "best"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"lr_scheduler_type": "greedy"},
    ],
)
def test_checkpoints_are_compared_by_the_held_out_reward(needs, caplog):
    config = DrGRPOConfig(use_cpu=True, **{**BEST, **needs})
    assert (config.metric_for_best_model, config.greater_is_better) == ("eval_reward", True)
    assert "metric_for_best_model is not set: checkpoints are compared by eval_reward" in caplog.text
    if "lr_scheduler_type" in needs:
        assert config.lr_scheduler_kwargs == {"mode": "max"}
    plain = GRPOConfig(use_cpu=True, bf16=False, **{**BEST, "metric_for_best_model": None, **needs})
    if plain.metric_for_best_model is not None:  # "loss", which its constructor has set
        converted = DrGRPOConfig.from_grpo_config(plain)
        assert (converted.metric_for_best_model, converted.greater_is_better) == ("eval_reward", True)


@pytest.mark.parametrize(
    ("metric", "is_more_better"),
    [
        ("eval_kl", False),
        ("completions/clipped_ratio", False),
        ("eval_hard_frac_reward_zero_std", False),
        ("rewards/judge/failed_frac", False),
        ("rewards/kl/mean", True),
        ("drgrpo/pass_rate", True),
    ],
)
def test_the_direction_of_a_metric_is_known(metric, is_more_better):
    config = DrGRPOConfig(use_cpu=True, **BEST, metric_for_best_model=metric)
    assert config.greater_is_better is is_more_better


def test_a_metric_is_better_when_it_is_higher_unless_said_otherwise():
    shorter = DrGRPOConfig(
        use_cpu=True, **BEST, metric_for_best_model="completions/mean_length", greater_is_better=False
    )
    assert not shorter.greater_is_better
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "greater_is_better": False}
    config = DrGRPOConfig(use_cpu=True, **BEST, **plateau, metric_for_best_model="completions/mean_length")
    assert config.lr_scheduler_kwargs == {"mode": "min"}


def test_a_misspelling_is_refused():
    meant = {
        "eval_rewards": "eval_reward",
        "rewrad": "eval_reward",
        "eval_rewards/acuracy_reward/mean": "eval_rewards/accuracy_reward/mean",
        "eval_rewards/accuracy_reward": "eval_rewards/accuracy_reward/mean",
        "eval_drgrpo/passrate": "eval_drgrpo/pass_rate",
        "eval_hrad_reward": "eval_hard_reward",
    }
    for metric, name in meant.items():
        with pytest.raises(InputError) as error:
            check_best_metric(args(metric), ["accuracy_reward"], datasets=["easy", "hard"])
        assert (error.value.got, error.value.remedy) == (metric, f"Did you mean {name}?")


def test_an_evaluation_has_the_metric_or_its_worst_value_or_ends_the_run():
    metrics = {"eval_reward": 0.5}
    assert with_best_metric(args(None), metrics) is with_best_metric(args("reward"), metrics) is metrics
    for greater, worst in ((True, -math.inf), (False, math.inf)):
        assert with_best_metric(args("eval_reward", greater), {"eval_reward": None}) == {"eval_reward": worst}
    with pytest.raises(InputError, match="^metric_for_best_model: got acc; .* such as eval_accuracy, "):
        with_best_metric(args("acc"), {"eval_loss": 0.0, "eval_accuracy": 0.5})
