"""A run that is stopped and resumed ends with the weights of one that was not, bit for bit."""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import runs
import torch
from runs import assert_same_weights, logged, short_run, weights

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.features.resume.checkpoints import (
    STATE_FILE,
    begin_checkpoint,
    finish_checkpoint,
    newest_complete_checkpoint,
    read_state,
)
from trl_drgrpo.features.resume.resume_state import RunState, load_rollouts, newest_loss_normalizer, save_rollouts

build = partial(runs.build, DrGRPOTrainer)
train = partial(runs.train, DrGRPOTrainer)


GEOMETRIES = {
    "one generation per step": {},
    "two steps per generation": {"steps_per_generation": 4},
    "two iterations": {"num_iterations": 2},
    "misaligned": {"steps_per_generation": 3, "num_generations": 6},
    "into the second epoch": {"gradient_accumulation_steps": 4},  # 16 prompts, 4 per step
    "with running scale": {"scale_by_running_std": True, "steps_per_generation": 4},
}


RARE = ("one generation per step", "two iterations", "with running scale")


@pytest.mark.parametrize(
    "extra", [pytest.param(GEOMETRIES[n], id=n, marks=[pytest.mark.slow] * (n in RARE)) for n in GEOMETRIES]
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(extra, settings, prompts, tokenizer, reward):
    settings = {**settings, "max_steps": 7, "save_strategy": "steps", "save_steps": 1, **extra}
    whole = train(settings, prompts, tokenizer, reward)
    for stop_at in (3, 5):
        checkpoint = f"{settings['output_dir']}/checkpoint-{stop_at}"
        resumed = train({**settings, "save_strategy": "no"}, prompts, tokenizer, reward, resume=checkpoint)
        assert resumed.state.global_step == 7
        assert_same_weights(weights(resumed), weights(whole))
        assert resumed.reward_scale.state_dict() == whole.reward_scale.state_dict()


def test_a_finished_run_is_finished(settings, prompts, tokenizer, reward):
    # a constant rate, and the middle of an epoch: transformers would train, and save, a fourth step
    settings |= {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    whole = train(settings, prompts, tokenizer, reward)
    resumed = train(settings, prompts, tokenizer, reward, resume=True)
    assert resumed.state.global_step == 3
    assert_same_weights(weights(resumed), weights(whole))
    assert not (Path(settings["output_dir"]) / "checkpoint-4").exists()


@pytest.mark.parametrize("switch", [("exact", "upstream"), ("upstream", "exact")], ids=" to ".join)
def test_micro_batching_may_change_in_the_middle_of_a_generation_batch(switch, settings, prompts, tokenizer, reward):
    # the pending micro-batches are as the first setting made them, and the second one takes them as they are
    settings = {**settings, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 8}
    whole = train({**settings, "micro_batching": switch[0]}, prompts, tokenizer, reward)
    settings |= {"micro_batching": switch[1]}
    resumed = train(settings, prompts, tokenizer, reward, resume=f"{settings['output_dir']}/checkpoint-1")
    for name, weight in resumed.model.named_parameters():
        torch.testing.assert_close(weight, whole.model.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_without_our_state_the_resumed_run_is_another_one(settings, prompts, tokenizer, reward):
    # negative control: what TRL alone restores is not enough in the middle of a generation batch
    settings = {**settings, "max_steps": 5, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    whole = train(settings, prompts, tokenizer, reward)
    checkpoint = Path(settings["output_dir"]) / "checkpoint-3"
    for own in (*checkpoint.glob("drgrpo_rollouts_*"), checkpoint / STATE_FILE):
        own.unlink()
    resumed = train(settings, prompts, tokenizer, reward, resume=checkpoint)
    theirs = weights(whole)
    assert any(not torch.equal(value, theirs[name]) for name, value in weights(resumed).items())


def test_resuming_without_a_checkpoint_starts_anew_and_says_so(settings, prompts, tokenizer, reward, caplog):
    trainer = train({**settings, "max_steps": 1}, prompts, tokenizer, reward, resume=True)
    assert trainer.state.global_step == 1
    assert f"No checkpoint in {settings['output_dir']} to resume from: starting from scratch." in caplog.text


def failing(call):
    """The usual reward, raising once at its n-th call."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("judge is down")
        return [float(sum(ids) % 3) for ids in completion_ids]

    return reward


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
def test_a_run_whose_reward_failed_is_resumed_as_if_it_had_not(extra, call, settings, prompts, tokenizer, reward):
    settings = {**settings, "max_steps": 5, **extra}
    if call == 2 and extra.get("steps_per_generation") == 1:
        call = 4  # the second micro-batch of the second step: the step is repeated from its beginning
    whole = train(settings, prompts, tokenizer, reward)
    with pytest.raises(RewardError):
        train(settings, prompts, tokenizer, failing(call))
    resumed = train(settings, prompts, tokenizer, reward, resume=True)
    assert_same_weights(weights(resumed), weights(whole))


@pytest.mark.parametrize("step", [2, pytest.param(4, id="the last of an epoch")])
@pytest.mark.parametrize("how", ["SIGTERM", "a reward that fails"])
def test_a_run_that_is_ended_between_two_steps_is_resumed_as_if_it_had_not(
    how, step, settings, prompts, tokenizer, reward
):
    settings = {**settings, "max_steps": 5, "gradient_accumulation_steps": 4}  # 16 prompts, 4 per step
    whole = train(settings, prompts, tokenizer, reward)

    def ends(completion_ids, trainer_state, **kwargs):
        if how == "SIGTERM" and trainer_state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif how != "SIGTERM" and trainer_state.global_step == step:
            raise RuntimeError("judge is down")
        return reward(completion_ids)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((RewardError, SystemExit)) as ended:
        train(settings, prompts, tokenizer, ends)
    assert getattr(ended.value, "code", 143) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = train(settings, prompts, tokenizer, reward, resume=f"{settings['output_dir']}/checkpoint-{step}")
    assert_same_weights(weights(resumed), weights(whole))


def test_rollouts_newer_than_the_checkpoint_are_not_saved_with_it(settings, prompts, tokenizer):
    # Steps of 5 micro-batches, generations of 2: the second step begins inside the third generation (micro-batch 5)
    # and fails at the fifth (8). At hand is the fourth, which is not what micro-batch 5 was to train on.
    settings |= {"gradient_accumulation_steps": 5, "steps_per_generation": 2}
    with pytest.raises(RewardError):
        train(settings, prompts, tokenizer, failing(5))
    state = RunState.load(Path(settings["output_dir"]) / "checkpoint-1")
    assert (state.micro_step, state.has_rollouts) == (5, False)


def test_a_reward_that_fails_in_an_evaluation_does_not_shift_the_run(settings, prompts, tokenizer, reward):
    settings |= {"steps_per_generation": 4, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 3}

    def fails_on_evaluation(prompts, completion_ids, **kwargs):
        if prompts[0].startswith("eval"):
            raise RuntimeError("judge is down")
        return [float(sum(ids) % 3) for ids in completion_ids]

    evaluation = prompts.map(lambda row: {"prompt": "eval " + row["prompt"]})
    trainer = build(settings, prompts, tokenizer, fails_on_evaluation, eval_dataset=evaluation)
    with pytest.raises(RewardError):
        trainer.train()
    checkpoint = Path(settings["output_dir"]) / "checkpoint-3"
    assert RunState.load(checkpoint).micro_step == 6
    assert (checkpoint / "drgrpo_rollouts_0.pt").exists()


def test_a_stale_checkpoint_of_an_older_run_is_no_excuse(settings, prompts, tokenizer, reward, caplog):
    stale = Path(settings["output_dir"]) / "checkpoint-2"
    stale.mkdir(parents=True)
    (stale / "drgrpo_rollouts_0.pt").write_text("of another run")
    with pytest.raises(RewardError):
        train(settings, prompts, tokenizer, failing(3))
    assert RunState.load(stale).micro_step == 4
    assert not (stale / "drgrpo_rollouts_0.pt").exists()
    assert f"resume from {stale}" in caplog.text


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prompts, tokenizer, reward):
    """Trains once with these fields, and puts a copy of what the run has left where it is wanted."""
    runs = {}

    def copy(fields, output_dir):
        key = json.dumps(fields, sort_keys=True)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("finished")
            train({**short_run(runs[key]), **fields}, prompts, tokenizer, reward)
        shutil.copytree(runs[key], output_dir)
        return Path(output_dir) / "checkpoint-1"

    return copy


@pytest.fixture
def half_way(settings, finished):
    """A checkpoint between two generations, with pending rollouts."""
    fields = {"steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    settings |= fields
    return finished(fields, settings["output_dir"])


@pytest.mark.parametrize(
    "changed",
    [{"steps_per_generation": 8}, {"per_device_train_batch_size": 8}, {"num_generations": 2}],
)
def test_another_geometry_generates_anew_and_says_so(changed, half_way, settings, prompts, tokenizer, reward, caplog):
    trainer = train({**settings, **changed}, prompts, tokenizer, reward, resume=half_way)
    assert trainer.state.global_step == 4
    name = next(iter(changed))
    assert f"Batch sizes changed ({name} " in caplog.text


def test_a_kl_term_that_is_new_needs_new_completions(
    half_way, settings, prompts, tokenizer, reward, caplog, saved_model
):
    # those at hand have no reference log-probabilities
    trainer = train({**settings, "beta": 0.1}, prompts, tokenizer, reward, model=saved_model, resume=half_way)
    assert trainer.state.global_step == 4
    assert "lack ref_per_token_logps, which the run now needs: they are generated again" in caplog.text


def test_a_checkpoint_without_optimizer_is_taken_with_a_word(half_way, settings, prompts, tokenizer, reward, caplog):
    (half_way / "optimizer.pt").unlink()
    content = read_state(half_way)
    del content["files"]["optimizer.pt"]  # as save_only_model leaves it
    finish_checkpoint(half_way, content)
    trainer = train({**settings, "max_steps": 2}, prompts, tokenizer, reward, resume=half_way)
    assert trainer.state.global_step == 2
    assert f"{half_way} holds no optimizer state (save_only_model)" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "changed"])
def test_rollouts_that_cannot_be_read_are_generated_anew(
    damage, half_way, settings, prompts, tokenizer, reward, caplog
):
    file = half_way / "drgrpo_rollouts_0.pt"
    content = file.read_bytes()
    changed = content.replace(b"PK", b"KP", 1)
    left = {"empty": b"", "truncated": content[:100], "changed": changed}
    file.unlink() if damage == "missing" else file.write_bytes(left[damage])
    trainer = train(settings, prompts, tokenizer, reward, resume=half_way)
    assert trainer.state.global_step == 4
    assert "not bit for bit" in caplog.text


def test_a_checkpoint_half_written_is_skipped(half_way, settings, prompts, tokenizer, reward, caplog):
    newest = half_way.with_name("checkpoint-4")
    begin_checkpoint(newest)
    assert newest_complete_checkpoint(half_way.parent) == half_way.with_name("checkpoint-3")
    assert f"{newest} is skipped: it is incomplete" in caplog.text
    assert newest_complete_checkpoint(half_way.parent / "nowhere") is None


@pytest.fixture
def checkpoint(settings, finished):
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    settings |= fields
    return finished(fields, settings["output_dir"])


def test_L_stays_what_it_was(checkpoint, settings, prompts, tokenizer, reward, caplog):
    trainer = build({**settings, "max_completion_length": 20}, prompts, tokenizer, reward)
    assert trainer.loss_normalizer == 20
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.loss_normalizer == 12
    assert trainer.loss_constants({})["max_completion_length"] == 12
    assert "Keeping L = 12 of the resumed run" in caplog.text


def test_another_objective_is_said_in_one_warning(checkpoint, settings, prompts, tokenizer, reward, caplog):
    def another_reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    changed = {
        "advantage_baseline": "leave_one_out",
        "epsilon_high": 0.3,
        "temperature": 0.9,
        "reward_weights": [1, 2],
    }
    trainer = train({**settings, **changed}, prompts, tokenizer, [reward, another_reward], resume=checkpoint)
    assert trainer.state.global_step == 2
    said = [record.message for record in caplog.records if "objective" in record.message]
    assert said == [
        f"The objective differs from that of {checkpoint}: advantage_baseline group_mean -> leave_one_out; "
        "epsilon_high None -> 0.3; rewards 1 * length_reward -> 1 * length_reward + 2 * another_reward; "
        "temperature 1.0 -> 0.9. The run continues with the new one."
    ]


def test_every_other_setting_is_said(checkpoint, settings, prompts, tokenizer, reward, caplog):
    changed = {
        "generation_kwargs": {"top_k": 5},
        "learning_rate": 1e-9,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "seed": 1,
    }
    prompted = prompts.map(lambda row: {"prompt": "Add. " + row["prompt"]})  # as a system prompt does
    trainer = train({**settings, **changed}, prompted, tokenizer, reward, resume=checkpoint)
    anew = (
        "lr_scheduler_type 'linear' -> 'constant'; max_grad_norm 1.0 -> 0.5; generation_kwargs None -> {'top_k': 5}; "
        r"seed 42 -> 1; dataset '16 rows of answer, prompt \(\w+\)' -> '16 rows of answer, prompt \(\w+\)'\. The run"
    )
    assert re.search(f"Settings differ from those of {checkpoint}: {anew}", caplog.text)
    kept = "learning_rate 0.01, not 1e-09; weight_decay 0.0, not 0.1."
    assert f"Kept from the optimizer's state in {checkpoint}: {kept}" in caplog.text
    rates = logged(trainer, "learning_rate")
    assert rates == [0.01, 0.005]  # the second as the checkpoint's schedule has set it
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}


def own_words(caplog) -> str:
    """The log without the lines of other libraries, whose wording changes."""
    return "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("trl_drgrpo"))


def test_another_optimizer_is_refused_before_training(checkpoint, settings, prompts, tokenizer, reward, caplog):
    trainer = build({**settings, "optim": "sgd"}, prompts, tokenizer, reward)
    with pytest.raises(InputError, match=f"^optim: got sgd; expected adamw_torch, whose state is in {checkpoint}"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    build({**settings, "optim": "adamw_torch"}, prompts, tokenizer, reward).train(resume_from_checkpoint=True)
    assert "differ" not in own_words(caplog)  # the default, adamw_torch_fused, has the same state


def test_a_run_keeps_its_id_and_says_nothing_of_an_objective_that_is_the_same(
    checkpoint, settings, prompts, tokenizer, reward, caplog
):
    first = RunState.load(checkpoint)
    trainer = train(settings, prompts, tokenizer, reward, resume=checkpoint)
    second = RunState.load(checkpoint.with_name("checkpoint-2"))
    assert first.run_id == second.run_id == trainer.run_id
    log = json.loads((checkpoint.parent / "_drgrpo" / "run.json").read_text())
    assert [start["run_id"] for start in log["starts"]] == [first.run_id] * 2
    assert not re.search("objective|differ|Kept", own_words(caplog))


def test_another_L_in_so_many_words_is_refused(checkpoint, settings, prompts, tokenizer, reward):
    trainer = build({**settings, "loss_normalizer": 20}, prompts, tokenizer, reward)
    with pytest.raises(InputError, match="^loss_normalizer: got 20; expected 12, with which the run in"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert checkpoint.exists()


def test_a_checkpoint_of_plain_trl_is_taken_with_a_word(checkpoint, settings, prompts, tokenizer, reward, caplog):
    (checkpoint / STATE_FILE).unlink()
    trainer = train(settings, prompts, tokenizer, reward, resume=checkpoint)
    assert trainer.state.global_step == 2
    assert "holds no Dr. GRPO state: continuing with L = 12" in caplog.text
    assert "Other checkpoints" not in caplog.text


def test_a_run_of_ours_that_plain_trl_continued_names_its_L(checkpoint, settings, prompts, tokenizer, reward, caplog):
    continued = checkpoint.with_name("checkpoint-2")
    (continued / STATE_FILE).unlink()  # TRL writes none
    longer = {**settings, "max_completion_length": 20, "max_steps": 3}
    trainer = train(longer, prompts, tokenizer, reward, resume=continued)
    assert trainer.loss_normalizer == 20
    assert "were trained with L = 12. Set loss_normalizer=12 to keep it." in caplog.text
    assert newest_loss_normalizer(checkpoint.parent) == 20  # of checkpoint-3: the newest, not the first
    (checkpoint / STATE_FILE).write_text("{damaged")
    assert newest_loss_normalizer(checkpoint.parent) == 20
    (checkpoint.with_name("checkpoint-3") / STATE_FILE).write_text("{damaged")
    assert newest_loss_normalizer(checkpoint.parent) is None


def state(**fields):
    facts = {"geometry": {"num_processes": 1}, "run_id": "a", "objective": {}, "settings": {}, "has_rollouts": True}
    scale = {"count": 3, "mean": 0.5, "sum_of_squares": 1.0}
    counted = {"loss_normalizer": 12, "micro_step": 7, "reward_scale": scale}
    return {**facts, **counted, "value_baseline": {"squares": 0.0, "products": 0.0}, **fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_normalizer": None}, "unreadable content [(]TypeError"),
        ({"reward_scale": {}}, "KeyError"),
        ({"unknown": 1}, "unreadable content [(]TypeError"),
        ({"format": 99}, "format 99; expected format 2"),
    ],
)
def test_a_damaged_state_is_one_clear_error(tmp_path, fields, message):
    finish_checkpoint(tmp_path, state(**{"format": 2, **fields}))
    with pytest.raises(InputError, match=message):
        RunState.load(tmp_path)


@pytest.mark.parametrize("content", ["{not json", "[]", "{}"])
def test_a_state_that_is_not_as_it_was_written_is_one_clear_error(tmp_path, content):
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(InputError, match="unreadable content"):
        RunState.load(tmp_path)


def test_state_round_trip(tmp_path):
    assert RunState.load(tmp_path) is None
    RunState(**state()).save(tmp_path)
    assert RunState.load(tmp_path) == RunState(**state())


def test_rollouts_round_trip_per_rank(tmp_path):
    batches = [{"completion_ids": torch.tensor([[1, 2]]), "num_images": [0], "ref": None}]
    save_rollouts(tmp_path, 1, batches)
    assert load_rollouts(tmp_path, 0, torch.device("cpu")) is None
    loaded = load_rollouts(tmp_path, 1, torch.device("cpu"))
    assert loaded is not None
    assert torch.equal(loaded[0]["completion_ids"], batches[0]["completion_ids"])
    assert loaded[0]["num_images"] == [0]


def test_rollouts_are_saved_only_when_some_are_pending(settings, prompts, tokenizer, reward):
    settings = {**settings, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    train(settings, prompts, tokenizer, reward)
    # 4 micro-batches per generation, 2 per step: after step 1 half of them are left, after step 2 none
    files = [len(list(Path(settings["output_dir"]).glob(f"checkpoint-{n}/drgrpo_rollouts_*"))) for n in (1, 2)]
    assert files == [1, 0]
