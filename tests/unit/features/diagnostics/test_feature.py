"""What goes wrong while a run is described; `tests/trainer/test_diagnostics.py` runs the rest."""

import errno
import json

import pytest

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.check.tiny import tiny_model
from trl_drgrpo.common.errors import DiskFullError


@pytest.fixture
def trainer(settings, prompts, tokenizer, reward):
    return DrGRPOTrainer(tiny_model(tokenizer), reward, DrGRPOConfig(**settings), prompts, processing_class=tokenizer)


def test_a_full_disk_is_said_once_and_without_lines_of_code(trainer, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    begin = trainer.diagnostics.on_train_begin, (trainer.args, trainer.state, None)
    begin[0](*begin[1])
    monkeypatch.setattr("trl_drgrpo.features.diagnostics.run_log._replace", full)
    with pytest.raises(DiskFullError), trainer.diagnostics.around_train():
        raise DiskFullError("disk full: a checkpoint could not be written.")
    assert caplog.text == ""
    begin[0](*begin[1])
    assert "The start of the run log failed (" in caplog.text
    assert "No space left on device): the run log ends here" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_damaged_state_costs_no_run(trainer, caplog):
    state = json.loads(json.dumps(trainer.diagnostics.state_dict()))
    for known in (None, state):
        trainer.diagnostics.load_state_dict(known)
    assert trainer.describing.failures == {}
    for damaged in ({}, [], {**state, "warnings": []}):
        trainer.diagnostics.load_state_dict(damaged)
    assert trainer.describing.total == 3
    assert "(warnings may be repeated)" in caplog.text
