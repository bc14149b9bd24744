"""A run that is stopped and resumed ends with the weights of one that was not, bit for bit."""

import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
import runs
import torch
from peft import LoraConfig
from runs import assert_same_weights, failing, length_reward, logged, short_run, weights
from tiny import save_tiny, tiny_model

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.features.resume.checkpoints import (
    STATE_FILE,
    begin_checkpoint,
    finish_checkpoint,
    newest_complete_checkpoint,
    read_state,
)

EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


GEOMETRIES = {
    "one generation per step": {},
    "two steps per generation": {"steps_per_generation": 4},
    "two iterations": {"num_iterations": 2},
    "misaligned": {"steps_per_generation": 3, "num_generations": 6},
    "into the second epoch": {"gradient_accumulation_steps": 4},  # 16 prompts, 4 per step
    "with running scale": {"scale_by_running_std": True, "steps_per_generation": 4},
    "with noise": {"neftune_noise_alpha": 5.0},  # which every test of the model would draw anew
}


RARE = ("one generation per step", "two iterations", "with running scale")


@pytest.mark.parametrize(
    "extra", [pytest.param(GEOMETRIES[n], id=n, marks=[pytest.mark.slow] * (n in RARE)) for n in GEOMETRIES]
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(extra, train, output):
    extra = {**extra, "max_steps": 7}
    whole = train(**EACH_STEP, **extra)
    for stop_at in (3, 5):
        resumed = train(**extra, resume=output / f"checkpoint-{stop_at}")
        assert resumed.state.global_step == 7
        assert_same_weights(weights(resumed), weights(whole))
        assert resumed.earlier.reward_scale.state_dict() == whole.earlier.reward_scale.state_dict()


def test_a_finished_run_is_finished(train, output):
    # a constant rate, and the middle of an epoch: transformers would train, and save, a fourth step
    whole = train(**EACH_STEP, lr_scheduler_type="constant")
    resumed = train(**EACH_STEP, lr_scheduler_type="constant", resume=True)
    assert resumed.state.global_step == 3
    assert_same_weights(weights(resumed), weights(whole))
    assert not (output / "checkpoint-4").exists()


@pytest.mark.parametrize("switch", [("exact", "upstream"), ("upstream", "exact")], ids=" to ".join)
def test_micro_batching_may_change_in_the_middle_of_a_generation_batch(switch, train, output):
    # the pending micro-batches are as the first setting made them, and the second one takes them as they are
    fields = {**EACH_STEP, "max_steps": 4, "steps_per_generation": 8}
    whole = train(**fields, micro_batching=switch[0])
    resumed = train(**fields, micro_batching=switch[1], resume=output / "checkpoint-1")
    for name, weight in resumed.model.named_parameters():
        torch.testing.assert_close(weight, whole.model.get_parameter(name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="per step"),
        pytest.param({"steps_per_generation": 1}, id="two generations per step"),
        pytest.param({"steps_per_generation": 4}, id="two steps per generation", marks=pytest.mark.slow),
        pytest.param({"steps_per_generation": 3, "num_generations": 6}, id="misaligned", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("call", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_whose_reward_failed_is_resumed_as_if_it_had_not(extra, call, train):
    extra = {"max_steps": 5, **extra}
    if call == 2 and extra.get("steps_per_generation") == 1:
        call = 4  # the second micro-batch of the second step: the step is repeated from its beginning
    whole = train(**extra)
    with pytest.raises(RewardError):
        train(failing(call), **extra)
    resumed = train(**extra, resume=True)
    assert_same_weights(weights(resumed), weights(whole))


@pytest.mark.parametrize("step", [2, pytest.param(4, id="the last of an epoch")])
@pytest.mark.parametrize("how", ["SIGTERM", "a reward that fails"])
def test_a_run_that_is_ended_between_two_steps_is_resumed_as_if_it_had_not(how, step, train, reward, output):
    fields = {"max_steps": 5, "gradient_accumulation_steps": 4}  # 16 prompts, 4 per step
    whole = train(**fields)

    def ends(completion_ids, trainer_state, **kwargs):
        if how == "SIGTERM" and trainer_state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif how != "SIGTERM" and trainer_state.global_step == step:
            raise RuntimeError("judge is down")
        return reward(completion_ids)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((RewardError, SystemExit)) as ended:
        train(ends, **fields)
    assert getattr(ended.value, "code", 143) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = train(**fields, resume=output / f"checkpoint-{step}")
    assert_same_weights(weights(resumed), weights(whole))


def test_rollouts_newer_than_the_checkpoint_are_not_saved_with_it(train, output):
    # Steps of 5 micro-batches, generations of 2: the second step begins inside the third generation (micro-batch 5)
    # and fails at the fifth (8). At hand is the fourth, which is not what micro-batch 5 was to train on.
    with pytest.raises(RewardError):
        train(failing(5), gradient_accumulation_steps=5, steps_per_generation=2)
    state = read_state(output / "checkpoint-1")
    assert (state["micro_step"], state["has_rollouts"]) == (5, False)


def test_a_reward_that_fails_in_an_evaluation_does_not_shift_the_run(train, prompts, output):
    def fails_on_evaluation(prompts, completion_ids, **kwargs):
        if prompts[0].startswith("eval"):
            raise RuntimeError("judge is down")
        return length_reward(completion_ids)

    evaluation = prompts.map(lambda row: {"prompt": "eval " + row["prompt"]})
    fields = {"steps_per_generation": 4, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 3}
    with pytest.raises(RewardError):
        train(fails_on_evaluation, eval_dataset=evaluation, **fields)
    assert read_state(output / "checkpoint-3")["micro_step"] == 6
    assert (output / "checkpoint-3" / "drgrpo_rollouts_0.pt").exists()


def test_a_checkpoint_is_written_over_an_older_runs_and_never_over_the_resumed_one(train, output, caplog):
    stale = output / "checkpoint-2"
    stale.mkdir(parents=True)
    (stale / "drgrpo_rollouts_0.pt").write_text("of another run")
    with pytest.raises(RewardError):
        train(failing(3))
    assert read_state(stale)["micro_step"] == 4
    assert not (stale / "drgrpo_rollouts_0.pt").exists()
    assert f"resume from {stale}" in caplog.text
    # written again, it would be gone for good if the run died in the middle
    before = (stale / STATE_FILE).stat().st_mtime_ns
    with pytest.raises(RewardError, match="judge is down"):
        train(failing(1), resume=os.path.relpath(stale))  # the same folder by another name
    assert (stale / STATE_FILE).stat().st_mtime_ns == before


# What a resumed run takes of a checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prompts, tokenizer, reward):
    """Trains once with these fields, and puts a copy of what the run has left where it is wanted."""
    left = {}

    def copy(output, **fields):
        key = json.dumps(fields, sort_keys=True)
        if key not in left:
            left[key] = tmp_path_factory.mktemp("finished")
            given = {**short_run(left[key]), **EACH_STEP, **fields}
            left[key, "run"] = runs.train(DrGRPOTrainer, given, prompts, tokenizer, reward)
        shutil.copytree(left[key], output)
        return output / "checkpoint-1", left[key, "run"]

    return copy


@pytest.fixture
def half_way(settings, finished, output):
    """A checkpoint between two generations, with pending rollouts, and the run that left it."""
    settings |= {"max_steps": 4, "steps_per_generation": 4, **EACH_STEP}
    return finished(output, max_steps=4, steps_per_generation=4)


@pytest.fixture
def checkpoint(settings, finished, output):
    settings |= {"max_steps": 2, **EACH_STEP}
    return finished(output, max_steps=2)[0]


def own_words(caplog) -> str:
    """The log without the lines of other libraries, whose wording changes."""
    return "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("trl_drgrpo"))


def cut(file):
    file.write_bytes(file.read_bytes()[:100])


def without_optimizer(folder):
    """As save_only_model leaves it."""
    (folder / "optimizer.pt").unlink()
    content = read_state(folder)
    del content["files"]["optimizer.pt"]
    finish_checkpoint(folder, content)


ROLLOUTS = "drgrpo_rollouts_0.pt"


@pytest.mark.parametrize(
    ("change", "fields", "said"),
    [
        (None, {"steps_per_generation": 8}, "Batch sizes changed (steps_per_generation 4 -> 8): completions"),
        (None, {"per_device_train_batch_size": 8}, "Batch sizes changed (per_device_train_batch_size 4 -> 8"),
        (None, {"num_generations": 2}, "Batch sizes changed (num_generations 4 -> 2)"),
        (lambda folder: (folder / ROLLOUTS).unlink(), {}, "not bit for bit"),
        (lambda folder: (folder / ROLLOUTS).write_bytes(b""), {}, "not bit for bit"),
        (lambda folder: cut(folder / ROLLOUTS), {}, "not bit for bit"),
        (without_optimizer, {}, "checkpoint-1 holds no optimizer state (save_only_model)"),
    ],
)
def test_a_changed_part_is_made_anew_with_a_warning(change, fields, said, half_way, train, caplog):
    folder, whole = half_way
    if change:
        change(folder)
    resumed = train(**fields, resume=folder)
    assert resumed.state.global_step == 4
    assert said in caplog.text
    with pytest.raises(AssertionError):  # negative control: what TRL alone restores is not enough here
        assert_same_weights(weights(resumed), weights(whole))


def test_a_kl_term_that_is_new_needs_new_completions(half_way, train, caplog, saved_model):
    # those at hand have no reference log-probabilities
    trainer = train(beta=0.1, model=saved_model, resume=half_way[0])
    assert trainer.state.global_step == 4
    assert "lack ref_per_token_logps, which the run now needs: they are generated again" in caplog.text


def test_rollouts_are_saved_only_when_some_are_pending_and_half_a_checkpoint_is_skipped(half_way, output, caplog):
    # 4 micro-batches per generation, 2 per step: after step 1 half of them are left, after step 2 none
    assert [(output / f"checkpoint-{step}" / ROLLOUTS).exists() for step in (1, 2)] == [True, False]
    begin_checkpoint(output / "checkpoint-4")
    assert newest_complete_checkpoint(output) == output / "checkpoint-3"
    assert f"{output / 'checkpoint-4'} is skipped: it is incomplete" in caplog.text


def test_resuming_without_a_checkpoint_starts_anew_and_says_so(train, output, caplog):
    assert train(max_steps=1, resume=True).state.global_step == 1
    assert f"No checkpoint in {output} to resume from: starting from scratch." in caplog.text


def test_L_stays_what_it_was(checkpoint, build, caplog):
    trainer = build(max_completion_length=20)
    assert trainer.loss_normalizer == 20
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.loss_normalizer == 12
    assert trainer.loss_constants({})["max_completion_length"] == 12
    assert "Keeping L = 12 of the resumed run" in caplog.text


def test_another_objective_is_said_in_one_warning(checkpoint, train, reward, caplog):
    def another_reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    changed = {"advantage_baseline": "leave_one_out", "epsilon_high": 0.3, "temperature": 0.9}
    trainer = train([reward, another_reward], **changed, reward_weights=[1, 2], resume=checkpoint)
    assert trainer.state.global_step == 2
    said = [record.message for record in caplog.records if "objective" in record.message]
    assert said == [
        f"The objective differs from that of {checkpoint}: advantage_baseline group_mean -> leave_one_out; "
        "epsilon_high None -> 0.3; rewards 1 * length_reward -> 1 * length_reward + 2 * another_reward; "
        "temperature 1.0 -> 0.9. The run continues with the new one."
    ]


def test_every_changed_setting_is_logged(checkpoint, train, prompts, caplog):
    changed = {
        "generation_kwargs": {"top_k": 5},
        "learning_rate": 1e-9,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "seed": 1,
    }
    prompted = prompts.map(lambda row: {"prompt": "Add. " + row["prompt"]})  # as a system prompt does
    trainer = train(data=prompted, **changed, resume=checkpoint)
    anew = (
        "lr_scheduler_type 'linear' -> 'constant'; max_grad_norm 1.0 -> 0.5; seed 42 -> 1; "
        "generation_kwargs None -> {'top_k': 5}; "
        r"train_dataset '16 rows of answer, prompt \(\w+\)' -> '16 rows of answer, prompt \(\w+\)'\. The run"
    )
    assert re.search(f"Settings differ from those of {checkpoint}: {anew}", caplog.text)
    kept = "learning_rate 0.01, not 1e-09; weight_decay 0.0, not 0.1."
    assert f"Kept from the optimizer's state in {checkpoint}: {kept}" in caplog.text
    rates = logged(trainer, "learning_rate")
    assert rates == [0.01, 0.005]  # the second as the checkpoint's schedule has set it
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}


def test_options_of_rewards_and_the_form_of_the_model_are_said(output, train, saved_model, caplog):
    def scaled(completion_ids, by=1.0, **kwargs):
        return [by * number for number in length_reward(completion_ids)]

    train(partial(scaled, by=1.0), **EACH_STEP, max_steps=2, model=saved_model)
    caplog.clear()
    changed = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "bfloat16"}, "ignore_data_skip": True}
    folder = output / "checkpoint-1"
    train(partial(scaled, by=2.0), **changed, max_steps=2, model=saved_model, resume=folder)
    assert (
        f"Settings differ from those of {folder}: save_strategy 'steps' -> 'no'; save_steps 1 -> 500; "
        "ignore_data_skip False -> True; dtype 'float32' -> 'bfloat16'; attn_implementation 'sdpa' -> 'eager'; "
        "reward_options: scaled.by 1.0 -> 2.0. The run continues with the new ones."
    ) in caplog.text


def test_the_first_log_is_that_of_the_unbroken_run(train, output):
    fields = {**EACH_STEP, "logging_steps": 3, "max_steps": 6}
    whole = train(**fields)
    for step in (1, 2, 3, 4):
        resumed = train(**fields, resume=output / f"checkpoint-{step}")
        for entry, expected in zip(resumed.state.log_history[:2], whole.state.log_history[:2], strict=True):
            timed = {name for name in expected if "time" in name}
            assert {name: entry[name] for name in expected.keys() - timed} == {
                name: expected[name] for name in expected.keys() - timed
            }


def test_the_first_log_is_that_of_the_unbroken_run_after_a_failure(train, output):
    fields = {"logging_steps": 3, "max_steps": 3, "steps_per_generation": 1}  # two generations per step
    whole = train(**fields)
    with pytest.raises(RewardError):
        train(failing(6), **fields)  # in the middle of the third step
    resumed = train(**fields, resume=output / "checkpoint-2")
    for name in ("loss", "reward", "entropy", "completions/mean_length"):
        assert logged(resumed, name) == logged(whole, name)


def test_other_intervals_count_at_once(checkpoint, train, caplog):
    resumed = train(**{**EACH_STEP, "max_steps": 5, "logging_steps": 2, "save_steps": 3}, resume=checkpoint)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 4]
    assert sorted(path.name for path in checkpoint.parent.glob("checkpoint-*"))[-2:] == [
        "checkpoint-3",
        "checkpoint-5",
    ]
    assert "logging_steps 1 -> 2; save_steps 1 -> 3" in caplog.text


# What the weights of a checkpoint fit


@pytest.fixture(scope="module")
def other_model(tokenizer, tmp_path_factory):
    model = tiny_model(tokenizer)
    for weight in model.parameters():
        weight.data *= 1.1
    return save_tiny(tmp_path_factory.mktemp("other"), tokenizer, model)


def lora(r=4, **changes):
    return LoraConfig(r=r, **{"target_modules": "all-linear", **changes})


def test_an_adapter_goes_on_where_it_fits(train, output, saved_model, other_model, caplog):
    fields = {**EACH_STEP, "max_steps": 2, "model": saved_model}
    whole = train(**fields, peft_config=lora(lora_dropout=0.1))
    folder = output / "checkpoint-1"
    misfits = [
        ({}, "^peft_config: got none; expected that of the adapter in "),
        (
            {"peft_config": lora(r=8)},
            r"^peft_config: got LORA with r=8: .*lora_A.weight has shape \(8, 32\), not \(4, ",
        ),
        ({"peft_config": lora(target_modules=["q_proj"])}, "lora_A.weight has no place in the model"),
        ({"peft_config": lora(modules_to_save=["lm_head"])}, "lm_head.weight is not in the checkpoint"),
        (
            {"peft_config": lora(), "model": other_model},
            f"^model: got the base {other_model}, .*; expected {saved_model}",
        ),
    ]
    for changes, message in misfits:
        with pytest.raises(InputError, match=message) as raised:
            train(**{**fields, **changes}, resume=folder)
        assert "\n" not in str(raised.value)
    resumed = train(**fields, peft_config=lora(lora_dropout=0.1), resume=folder)
    assert_same_weights(weights(resumed), weights(whole))
    caplog.clear()
    half = {"model_init_kwargs": {"dtype": "bfloat16"}}
    train(**fields, **half, peft_config=lora(lora_alpha=4), resume=folder)
    assert (
        "dtype 'float32' -> 'bfloat16'; adapter: lora_alpha 8 -> 4; adapter: lora_dropout 0.1 -> 0.0." in caplog.text
    )


def test_a_whole_model_is_no_adapter_and_of_one_size(checkpoint, train, tokenizer):
    with pytest.raises(InputError, match=r"^peft_config: got LORA with r=4, but .*checkpoint-1 holds a whole model"):
        train(peft_config=lora(), resume=checkpoint)
    wider = tiny_model(tokenizer)
    wider.resize_token_embeddings(len(tokenizer) + 8)
    with pytest.raises(InputError, match=r"^model: got Qwen2ForCausalLM: model.embed_tokens.weight has shape "):
        train(model=wider, resume=checkpoint)


def test_the_reference_is_that_of_the_run(train, output, saved_model, other_model):
    fields = {**EACH_STEP, "max_steps": 2, "beta": 0.1}
    whole = train(**fields, model=saved_model)
    folder = output / "checkpoint-1"
    for model in (other_model, str(folder)):
        with pytest.raises(InputError, match=f"^model: got the reference of the KL term .*{model}, .*{saved_model}, "):
            train(**fields, model=model, resume=folder)
    assert_same_weights(weights(train(**fields, model=saved_model, resume=folder)), weights(whole))


def test_a_run_keeps_its_id_and_says_nothing_of_settings_that_are_the_same(checkpoint, train, caplog):
    first = read_state(checkpoint)
    trainer = train(optim="adamw_torch", resume=checkpoint)  # the default, adamw_torch_fused, has the same state
    second = read_state(checkpoint.with_name("checkpoint-2"))
    assert first["run_id"] == second["run_id"] == trainer.run_id
    log = json.loads((checkpoint.parent / "_drgrpo" / "run.json").read_text())
    assert [start["run_id"] for start in log["starts"]] == [first["run_id"]] * 2
    assert not re.search("objective|differ|Kept", own_words(caplog))


@pytest.mark.parametrize(
    ("fields", "state", "message"),
    [
        ({"optim": "sgd"}, {}, "^optim: got sgd; expected adamw_torch, whose state is in .*checkpoint-1"),
        ({"loss_normalizer": 20}, {}, "^loss_normalizer: got 20; expected 12, with which the run in"),
        (
            {},
            {"format": 99},
            "drgrpo_state.json: got format 99; expected format 3. Resume with the trl-drgrpo version",
        ),
    ],
)
def test_a_checkpoint_that_cannot_go_on_is_refused(fields, state, message, checkpoint, train):
    finish_checkpoint(checkpoint, {**read_state(checkpoint), **state})
    with pytest.raises(InputError, match=message):
        train(**fields, resume=checkpoint)


def test_a_checkpoint_of_plain_trl_is_taken_with_a_word(checkpoint, train, caplog):
    (checkpoint / STATE_FILE).unlink()
    assert train(resume=checkpoint).state.global_step == 2
    assert "holds no Dr. GRPO state: continuing with L = 12" in caplog.text
    assert "Other checkpoints" not in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_of_plain_trl_is_one_line(name, checkpoint, train):
    (checkpoint / STATE_FILE).unlink()  # which would tell
    (checkpoint / name).write_bytes(b"junk" * 100)
    with pytest.raises(InputError, match=f"^resume_from_checkpoint: got .*{name}, which cannot be read"):
        train(resume=checkpoint)


def test_a_run_of_ours_that_plain_trl_continued_names_its_L(checkpoint, train, caplog):
    continued = checkpoint.with_name("checkpoint-2")
    (continued / STATE_FILE).unlink()  # TRL writes none
    longer = {"max_completion_length": 20, "max_steps": 3}
    assert train(**longer, resume=continued).loss_normalizer == 20
    assert "were trained with L = 12. Set loss_normalizer=12 to keep it." in caplog.text
    caplog.clear()
    train(**longer, resume=continued)  # of checkpoint-3: the newest, not the first
    assert "were trained with" not in caplog.text
