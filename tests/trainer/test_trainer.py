from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from runs import STOCK, assert_same_weights, failing, logged, weights
from tiny import tiny_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from walk import Walk, with_tools

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.upstream.private_state import PrivateState


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"steps_per_generation": 4, "num_iterations": 2},
        {"beta": 0.1, "use_bias_correction_kl": True},
        pytest.param({"mask_truncated_completions": True, "epsilon_high": 0.28}, marks=pytest.mark.slow),
        pytest.param({"importance_sampling_level": "sequence", "steps_per_generation": 4}, marks=pytest.mark.slow),
        pytest.param({"entropy_coef": 0.01, "top_entropy_quantile": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_swapping_the_class_changes_no_bit(extra, train, saved_model):
    # The reward takes values 0, 1, 2 in groups of 4: means are exact, so TRL has no rounding residue to remove.
    def policy():
        return AutoModelForCausalLM.from_pretrained(saved_model)

    start = dict(policy().named_parameters())
    stock = weights(train(trainer_class=GRPOTrainer, model=policy(), **extra, **STOCK))
    ours = weights(train(model=policy(), **extra, micro_batching="upstream"))
    assert_same_weights(ours, stock)
    assert any(not torch.equal(ours[name], start[name]) for name in ours), "nothing was trained"
    # With planned micro-batches the same tokens are sampled, and the weights agree to float32's rounding.
    planned = weights(train(model=policy(), **extra))
    moved = sum((stock[name] - start[name]).square().sum() for name in stock) ** 0.5
    apart = sum((planned[name] - stock[name]).square().sum() for name in stock) ** 0.5
    assert apart <= 1e-3 * moved  # Adam divides by tiny gradients too: 1e-7 in a gradient is more in a step


def test_rewards_changed_by_a_subclass_are_trained_on(train):
    class Shaped(DrGRPOTrainer):
        def _calculate_rewards(self, *args):
            return super()._calculate_rewards(*args) * 2

    def first(trainer):
        return next(entry for entry in trainer.state.log_history if "grad_norm" in entry)

    plain = first(train(max_steps=1, max_grad_norm=0.0))
    shaped = first(train(trainer_class=Shaped, max_steps=1, max_grad_norm=0.0))
    assert shaped["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-4)
    assert shaped["reward"] == pytest.approx(2 * plain["reward"])


def test_equal_rewards_leave_the_weights_alone_where_trl_moves_them(train, tokenizer):
    # 0.7 is no binary fraction: TRL's advantages are 6e-8 instead of 0, and AdamW makes full-sized steps of them
    def constant(completions, **kwargs):
        return [0.7] * len(completions)

    start = dict(tiny_model(tokenizer).named_parameters())
    fields = {"num_generations": 8, "weight_decay": 0.0}
    stock = weights(train(constant, trainer_class=GRPOTrainer, **fields, **STOCK))
    ours = weights(train(constant, **fields))
    assert_same_weights(ours, start)
    assert any(not torch.equal(stock[name], start[name]) for name in start), "TRL no longer has the residue"


def test_the_quick_start_script_runs_with_the_class_swapped(saved_model, tmp_path, monkeypatch):
    # TRL's own quick start, with the import and the class changed and a local model; no args at all
    monkeypatch.chdir(tmp_path)
    dataset = Dataset.from_dict({"prompt": [f"count to {i}" for i in range(8)]})

    def reward_num_unique_chars(completions, **kwargs):
        return [len(set(c)) for c in completions]

    trainer = DrGRPOTrainer(model=saved_model, reward_funcs=reward_num_unique_chars, train_dataset=dataset)
    assert trainer.args.output_dir.endswith("-DrGRPO")
    assert trainer.loss_normalizer == trainer.args.max_completion_length
    trainer.args.max_steps = 1
    trainer.generation_config.max_new_tokens = 8
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_plain_grpo_config_is_read_as_dr_grpo_and_what_is_assigned_to_it_later_is_refused(
    settings, prompts, tokenizer, reward
):
    plain = GRPOConfig(**settings, use_cpu=True, bf16=False)
    trainer = DrGRPOTrainer(tiny_model(tokenizer), reward, plain, prompts, processing_class=tokenizer)
    assert isinstance(trainer.args, DrGRPOConfig)
    assert (trainer.loss_type, trainer.scale_rewards) == ("dr_grpo", "none")
    before = plain.max_steps
    plain.max_steps = 7
    for start in (trainer.train, lambda: trainer.evaluate(prompts)):
        with pytest.raises(InputError, match="^max_steps: got 7, assigned to the GRPOConfig; .* to trainer.args"):
            start()
    plain.max_steps = before
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


def test_assignments_after_the_constructor_are_checked_once(build, monkeypatch):
    checks = []
    check = DrGRPOConfig.check
    monkeypatch.setattr(DrGRPOConfig, "check", lambda self: (checks.append(self), check(self)))
    trainer = build(max_steps=1)
    trainer.train()
    assert checks == [trainer.args]  # where the trainer took them
    trainer.args.max_steps, trainer.args.overwrite_output_dir = 2, True
    trainer.train()
    assert checks == 2 * [trainer.args]
    assert trainer.state.global_step == 2
    trainer.args.lr_scheduler_type = "linaer"
    with pytest.raises(InputError, match="^lr_scheduler_type: got 'linaer'"):
        trainer.train()
    trainer.args.lr_scheduler_type = trainer.built_with["lr_scheduler_type"]
    trainer.args.generation_kwargs = {"do_sample": False}
    with pytest.raises(InputError, match="^generation_kwargs: do_sample: got False"):
        trainer.train()


def test_a_mapping_that_is_changed_in_place_is_refused_too(build):
    trainer = build(generation_kwargs={"top_p": 0.9})
    trainer.args.generation_kwargs["top_p"] = 0.8
    with pytest.raises(InputError, match="^generation_kwargs: got .*0.8.*, assigned after the trainer was built"):
        trainer.train()


def test_evaluation_works_also_with_groups_of_one(train, prompts):
    trainer = train(num_generations_eval=1, per_device_eval_batch_size=4, eval_dataset=prompts)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == 0.0  # a group of one has no signal
    assert "eval_reward" in metrics


def test_without_a_length_limit_generation_fills_the_context(train):
    trainer = train(max_completion_length=None, loss_normalizer=64, max_steps=1)
    assert trainer.generation_config.max_length == trainer.model.config.max_position_embeddings
    assert trainer.loss_normalizer == 64
    assert trainer.max_completion_length is None


@pytest.mark.parametrize("launcher", [False, True])
def test_sharding_on_cpus_is_refused(launcher, settings, prompts, reward, monkeypatch):
    from trl_drgrpo.config.preflight import prepare

    args = DrGRPOConfig(**settings)
    monkeypatch.setattr(args.distributed_state, "distributed_type", DistributedType.MULTI_CPU)
    prepare(args, None, [reward], prompts)  # whole copies: that is what it says
    if launcher:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    else:
        args.fsdp = True
    with pytest.raises(InputError, match="^fsdp: got .* on CPUs; expected GPUs to shard a model on"):
        prepare(args, None, [reward], prompts)


@pytest.mark.parametrize(
    ("kind", "in_lockstep", "counts"),
    [("MULTI_CPU", False, False), ("FSDP", True, False), ("DEEPSPEED", True, True), ("MEGATRON_LM", True, True)],
)
def test_engines_that_need_every_rank_or_every_slot(kind, in_lockstep, counts):
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    trainer = SimpleNamespace(accelerator=accelerator)
    trainer.in_lockstep = PrivateState.in_lockstep.fget(trainer)
    assert (trainer.in_lockstep, PrivateState.counts_forwards.fget(trainer)) == (in_lockstep, counts)


class Env:
    """An environment that owns its prompt and its reward."""

    reward = 1.0

    def reset(self, **kwargs):
        return "count"

    def get_reward(self):
        return self.reward


def test_an_environment_needs_no_prompt_column(settings, reward):
    from trl_drgrpo.config.preflight import prepare

    dataset = Dataset.from_dict({"environment": ["a"] * 8})
    prepare(DrGRPOConfig(**settings), None, [reward], dataset, environment_factory={"a": Env})
    with pytest.raises(InputError, match="^train_dataset: got columns"):
        prepare(DrGRPOConfig(**settings), None, [reward], dataset)


def test_an_infinite_reward_saves_what_was_computed(train, output):
    calls = []

    def overflows(completion_ids, **kwargs):
        calls.append(1)
        return [1e39 if len(calls) == 3 else float(sum(ids) % 3) for ids in completion_ids]

    with pytest.raises(RewardError, match="reward function 'overflows': got inf in float32 for row 0") as error:
        train(overflows)
    # One of them is that of the trainer: the training loop's frames say nothing about the reward.
    assert [frame.name for frame in error.traceback][1:] == ["call", "train", "train"]
    assert error.value.__cause__ is None
    assert (output / "checkpoint-2").exists()


def test_a_reward_that_fails_in_the_first_step_leaves_nothing_saved(train, output):
    with pytest.raises(RewardError):
        train(failing(1))
    assert not list(output.glob("checkpoint-*"))


def test_a_reward_that_fails_costs_one_call_when_the_user_opted_in(train):
    trainer = train(failing(2), on_reward_error="unscorable")
    assert logged(trainer, "rewards/fails/failed_frac")[:3] == [0.0, 1.0, 0.0]


def test_asynchronous_rewards_work(train):
    async def judged(completion_ids, **kwargs):
        return [float(sum(ids) % 3) for ids in completion_ids]

    trainer = train(judged, max_steps=1)
    assert "rewards/judged/mean" in trainer.state.log_history[0]


def test_assignments_after_the_constructor_are_refused_when_training_starts(build):
    trainer = build()
    late = {
        "loss_type": ("grpo", "^loss_type: got 'grpo'; expected 'dr_grpo'"),
        "scale_rewards": ("batch", "^scale_rewards: got 'batch'; expected 'none'"),
        "beta": (0.1, "^beta: got 0.1, assigned after the trainer was built; expected 0.0, as when it was built"),
        "epsilon": (
            0.3,
            "^epsilon: got 0.3, assigned after the trainer was built; expected 0.2, as when it was built",
        ),
        "epsilon_high": (0.3, "^epsilon_high: got 0.3, assigned after"),
        "max_completion_length": (8, "^max_completion_length: got 8, assigned after"),
        "loss_normalizer": (8, "^loss_normalizer: got 8, assigned after"),
        "num_generations": (2, "^num_generations: got 2, assigned after"),
        "reward_weights": ([2.0], "^reward_weights: got .2.0., assigned after"),
        "run_log": (False, "^run_log: got False, assigned after"),
    }
    for name, (value, message) in late.items():
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        with pytest.raises(InputError, match=message):
            trainer.train()
        setattr(trainer.args, name, before)
    trainer.args.learning_rat = 0.5
    with pytest.raises(InputError, match="^learning_rat: got 0.5, assigned to a field that .* mean learning_rate?"):
        trainer.train()
    del trainer.args.learning_rat
    trainer.args.of_another_library = 1
    # What TRL reads when it is needed, and what agrees with the copy, is no contradiction.
    trainer.args.max_steps, trainer.args.delta, trainer.args.reward_weights = 1, 3.0, [1.0]
    trainer.args.temperature = trainer.temperature = 0.9
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("field", ["train_dataset", "eval_dataset['a']", None])
def test_a_prompt_behind_which_nothing_fits_ends_the_run_before_it_starts(field, settings, prompts, tokenizer, reward):
    """`None`: it just fits, or positions have no end."""
    rows = [*prompts["prompt"][:5], "1+2=" * 400, "1+2=" * 300, *prompts["prompt"][:9]]
    most, longer = len(tokenizer(rows[5])["input_ids"]), Dataset.from_dict({"prompt": rows})
    train, evaluation = (longer, prompts) if field == "train_dataset" else (prompts, longer)
    model = tiny_model(tokenizer)
    model.config.max_position_embeddings = most + (11 if field else 12)

    def build(model):
        config = DrGRPOConfig(**settings)
        return DrGRPOTrainer(model, reward, config, train, {"a": evaluation}, processing_class=tokenizer)

    if field is None:
        build(model)
        model.config.max_position_embeddings, model.config.alibi = most, True
        build(model)
        return
    with pytest.raises(InputError) as error:
        build(model)
    assert str(error.value) == (
        f"max_completion_length: got 12 after a prompt of {most} tokens, row 5 (from 0) of {field}; expected at most "
        f"{most + 11} tokens together, the model's context. Lower it, or drop such prompts."
    )


def test_the_description_of_tools_is_a_part_of_the_prompt(settings, prompts, reward):
    model, tokenizer = with_tools()
    data = prompts.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    model.config.max_position_embeddings = 128
    given = {"args": DrGRPOConfig(**settings), "train_dataset": data, "processing_class": tokenizer}
    DrGRPOTrainer(model, reward, **given)
    given["train_dataset"] = data.add_column("environment", ["walk"] * len(data))
    for brings in ({"tools": [Walk().go]}, {"environment_factory": Walk}, {"environment_factory": {"walk": Walk}}):
        with pytest.raises(InputError, match=r"^max_completion_length: got 12 after a prompt of \d{3} tokens, row "):
            DrGRPOTrainer(model, reward, **given, **brings)
