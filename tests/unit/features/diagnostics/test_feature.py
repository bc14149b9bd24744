"""The feature with a trainer that is a namespace: what it hears, in which order, and what it writes."""

import errno
import json
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_tokenizer

from trl_drgrpo.common.errors import DiskFullError, InputError
from trl_drgrpo.features.diagnostics import diagnostics as room
from trl_drgrpo.features.diagnostics.diagnostics import STATE_FILE, Diagnostics
from trl_drgrpo.features.diagnostics.run_log import COMPLETIONS, METRICS, RUN, WARNINGS
from trl_drgrpo.upstream.batches import CreditedBatch, ScoredBatch
from trl_drgrpo.upstream.description import METRIC, DescribingCallback, DescriptionGuard


def batch(rewards, step_rewards=None):
    """Two rows that end, of three tokens each."""
    per_func, ids = torch.tensor(rewards).unsqueeze(1), [[65, 66, 256], [67, 68, 256]]
    scored = ScoredBatch(per_func, [{"prompt": "p"}] * 2, ["p"] * 2, ["AB", "CD"], ids)
    mask, advantages = torch.ones(2, 3), per_func[:, 0] - per_func.mean()
    return CreditedBatch(
        scored=scored,
        rewards=per_func[:, 0],
        advantages=advantages,
        completion_mask=mask,
        trained_mask=mask,
        num_generations=2,
        own_rows=slice(0, 2),
        step_rewards=step_rewards,
    )


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Built, in training at step 0, with a run log; keeps what is logged of batches."""
    monkeypatch.setattr(room, "start_facts", lambda trainer: {})
    monkeypatch.setattr(room, "run_facts", lambda trainer, rule: {"rewards": rule and rule.name})
    args = SimpleNamespace(
        output_dir=str(tmp_path),
        run_log=True,
        run_warnings=True,
        record_groups=1,
        correct_reward=None,
        correct_threshold=None,
        num_generations=2,
        should_save=True,
        process_role="reward",
    )
    trainer = SimpleNamespace(
        args=args,
        reward_func_names=["accuracy"],
        accelerator=SimpleNamespace(is_main_process=True),
        text_tokenizer=tiny_tokenizer(),
        describing=DescriptionGuard(),
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0, max_steps=2, epoch=0.0, is_world_process_zero=True, log_history=[]),
        callback_handler=SimpleNamespace(callbacks=[]),
        own_rows=slice(0, 2),
        stop_token_ids={256},
        gathered=lambda values: values,
        logged={},
        marked=[],
        step_metrics=dict,
    )
    trainer.log_batch = lambda metrics, columns: trainer.logged.update(metrics)
    trainer.mark_step = lambda: trainer.marked.append("step")
    trainer.diagnostics = Diagnostics(trainer)
    trainer.diagnostics.on_trainer_built()
    return trainer


def lines(trainer, name):
    return [json.loads(line) for line in (trainer.diagnostics.run_log.folder / name).read_text().splitlines()]


def test_a_step_is_heard_in_order_and_logged(trainer):
    hears, events = trainer.diagnostics, (trainer.args, trainer.state, None)
    hears.on_train_begin(*events)
    hears.on_step_begin(*events)
    with hears.rolling_out(), hears.scoring():
        pass
    hears.on_credit(batch([1.0, 0.0]))
    trainer.state.global_step = 1
    hears.on_step_end(*events)
    logs = {"loss": 0.5}
    hears.add_to_log(logs)
    hears.on_log(*events, logs=logs)
    hears.on_train_end(*events)
    assert trainer.marked == ["step"]
    assert trainer.logged["drgrpo/zero_signal_frac"] == [0.0]
    assert logs["time/generate_s"] >= logs["time/score_s"] == 0.0  # a phase inside of another one is that one
    assert logs["time/tokens_per_s"] > 0
    assert METRIC not in logs
    assert lines(trainer, METRICS)[0]["logs"] == logs
    assert [(line["step"], line["mode"]) for line in lines(trainer, COMPLETIONS)] == [(1, "train")]
    run = json.loads((trainer.diagnostics.run_log.folder / RUN).read_text())
    assert (run["rewards"], run["ended"]["step"], run["ended"]["how"]) == ("accuracy", 1, "finished")
    assert trainer.describing.failures == {}


def test_an_evaluation_has_a_mode_and_no_clock(trainer):
    trainer.diagnostics.on_train_begin(trainer.args, trainer.state, None)
    trainer.model.training = False
    trainer.diagnostics.on_credit(batch([1.0, 0.0]))
    trainer.diagnostics.on_credit(batch([1.0, 0.0]))
    groups = lines(trainer, COMPLETIONS)
    assert [(line["step"], line["mode"], line["group"]) for line in groups] == [(0, "eval", 0), (0, "eval", 1)]
    logs = {}
    trainer.diagnostics.add_to_log(logs)
    assert logs == {}


def test_a_failure_is_counted_logged_and_ends_nothing(trainer):
    trainer.diagnostics.on_train_begin(trainer.args, trainer.state, None)
    trainer.stop_token_ids = None  # no batch can be looked at
    trainer.diagnostics.on_credit(batch([1.0, 0.0]))
    logs = {}
    trainer.diagnostics.add_to_log(logs)
    assert (trainer.logged, logs) == ({}, {METRIC: 1})
    assert lines(trainer, WARNINGS)[0]["cause"] == "description"


def test_a_run_that_fails_says_how_and_callbacks_share_one_count(trainer):
    callback = DescribingCallback()
    trainer.callback_handler.callbacks = [callback]
    trainer.diagnostics.on_train_begin(trainer.args, trainer.state, None)
    with pytest.raises(KeyboardInterrupt), trainer.diagnostics.around_train():
        raise KeyboardInterrupt
    assert callback.describing is trainer.describing
    run = json.loads((trainer.diagnostics.run_log.folder / RUN).read_text())
    assert run["ended"]["how"] == "failed: KeyboardInterrupt"


def test_a_full_disk_is_said_once_and_without_lines_of_code(trainer, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.diagnostics.on_train_begin(trainer.args, trainer.state, None)
    monkeypatch.setattr("trl_drgrpo.features.diagnostics.run_log._replace", full)
    with pytest.raises(DiskFullError), trainer.diagnostics.around_train():
        raise DiskFullError("disk full: a checkpoint could not be written.")
    assert caplog.text == ""
    monkeypatch.setattr("trl_drgrpo.features.diagnostics.run_log._append", full)
    trainer.diagnostics.on_train_begin(trainer.args, trainer.state, None)
    assert "The start of the run log failed (" in caplog.text
    assert "No space left on device): the run log ends here" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_was_seen_travels_with_checkpoints(trainer, tmp_path):
    trainer.diagnostics.on_credit(batch([0.5, 0.25]))
    assert not trainer.diagnostics.correctness_rule.is_binary
    trainer.diagnostics.on_checkpoint_saved(tmp_path)
    assert json.loads((tmp_path / STATE_FILE).read_text())["right_is_binary"] is False
    resumed = Diagnostics(trainer)
    resumed.on_trainer_built()
    resumed.on_checkpoint_loaded(tmp_path)
    assert not resumed.correctness_rule.is_binary
    assert resumed.run_warnings.state_dict() == trainer.diagnostics.run_warnings.state_dict()
    (tmp_path / STATE_FILE).write_text("{")
    resumed.on_checkpoint_loaded(tmp_path)  # a damaged one costs no run
    assert trainer.describing.total == 1
    (tmp_path / STATE_FILE).unlink()
    trainer.args.should_save = False
    trainer.diagnostics.on_checkpoint_saved(tmp_path)
    assert not (tmp_path / STATE_FILE).exists()


def test_what_the_run_has_decides_what_is_set_up(trainer):
    trainer.args.run_log, trainer.reward_func_names = False, ["process_only"]
    diagnostics = Diagnostics(trainer)
    diagnostics.on_trainer_built()
    assert (diagnostics.correctness_rule, diagnostics.run_log) == (None, None)
    diagnostics.on_train_begin(trainer.args, trainer.state, None)
    diagnostics.on_train_end(trainer.args, trainer.state, None)
    assert trainer.describing.failures == {}
    trainer.reward_func_names, trainer.args.correct_reward = ["accuracy"], "acuracy"
    with pytest.raises(InputError, match="^correct_reward: got 'acuracy'"):
        Diagnostics(trainer).on_trainer_built()
