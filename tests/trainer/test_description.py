"""What describes a run never ends it: each part is broken on purpose, in one run."""

import logging
from pathlib import Path

import pytest
import runs
import torch
from runs import logged, parity_reward, short_run
from tiny import tiny_model
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_drgrpo import ProgressCallback
from trl_drgrpo.features.resume.checkpoints import newest_complete_checkpoint
from trl_drgrpo.report.run_folders import read_run
from trl_drgrpo.single_gpu.memory.warning import MemoryWatch
from trl_drgrpo.upstream.description import METRIC, DescribingCallback, DescriptionGuard

ROOMS = "trl_drgrpo.features.diagnostics"
# What is broken -> the place that says so.
BROKEN = {
    "trl_drgrpo.features.model_card.card.write_card": "The model card",
    f"{ROOMS}.run_log.RunLog.start": "The start of the run log",
    f"{ROOMS}.run_log.RunLog.metrics": "The run log's metrics",
    f"{ROOMS}.run_log.RunLog.completions": "The run log's completions",
    f"{ROOMS}.run_log.RunLog.warning": "The run log's warnings",
    f"{ROOMS}.run_log.RunLog.end": "The end of the run log",
    f"{ROOMS}.diagnostics.start_facts": "The facts of the start",
    f"{ROOMS}.diagnostics.run_facts": "The facts of the run",
    f"{ROOMS}.diagnostics.batch_statistics": "The statistics of a batch",
    f"{ROOMS}.run_warnings.RunWarnings.observe": "The watch for warnings",
    f"{ROOMS}.run_warnings.RunWarnings.state_dict": "The diagnostics of a checkpoint",
    f"{ROOMS}.diagnostics.PhaseClock.phase": "The clock of the phases",
    f"{ROOMS}.diagnostics.PhaseClock.step_ends": "Diagnostics.on_step_end",
    f"{ROOMS}.progress.status_line": "ProgressCallback.on_log",
    "trl_drgrpo.single_gpu.memory.warning.device_memory": "MemoryWatch.on_train_begin",
    f"{ROOMS}.movement._sample": "MovementWatch.on_train_begin",
    f"{ROOMS}.movement.MovementWatch.add_to_log": "The numbers of a step",
    "trl_drgrpo.features.fast_path.window.WindowMetrics.add": "The metrics of the loss",
    "trl_drgrpo.features.fast_path.fast_path.FastPath._plan_metrics": "The metrics of the plan",
    f"{ROOMS}.diagnostics.step_statistics": "The statistics of the steps",
    "pandas.DataFrame.to_parquet": "The table of completions",
}


def step_reward(step_ends, **kwargs):
    return [[1.0 for _ in ends] for ends in step_ends]


def breaks(*args, **kwargs):
    raise RuntimeError("broken on purpose")


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def build(folder, prompts, tokenizer, **given):
    fields = {**short_run(folder), "save_strategy": "steps", "save_steps": 2, "step_separator": ["tokens:3"]}
    return runs.sharing(runs.build, fields, prompts, tokenizer, parity_reward)(**given)


@pytest.fixture(scope="module")
def broken(tmp_path_factory, prompts, tokenizer):
    """A finished and saved run in which everything that describes it failed, and what was said of that."""
    said = Said()
    logger = logging.getLogger("trl_drgrpo.upstream.description")
    logger.addHandler(said)
    given = {
        "callbacks": [ProgressCallback(), MemoryWatch()],
        "step_reward_funcs": step_reward,
        "log_completions": True,
    }
    trainer = build(tmp_path_factory.mktemp("run"), prompts, tokenizer, **given)
    with pytest.MonkeyPatch.context() as patch:
        for target in BROKEN:
            patch.setattr(target, breaks)
        trainer.train()
        trainer.save_model()
    logger.removeHandler(said)
    return trainer, said.records


@pytest.mark.parametrize("place", BROKEN.values())
def test_a_failure_is_logged_once_with_its_traceback(broken, place):
    about = [record for record in broken[1] if record.getMessage().startswith(f"{place} failed: the run goes on")]
    assert len(about) == 1
    assert str(about[0].exc_info[1]) == "broken on purpose"


def test_the_run_is_trained_and_saved_all_the_same(broken, tokenizer):
    trainer, records = broken
    assert trainer.state.global_step == 3
    assert len(records) == len(BROKEN)  # nothing else failed
    folder = Path(trainer.args.output_dir)
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    start = tiny_model(tokenizer).state_dict()
    assert any(not torch.equal(saved[name], start[name]) for name in start)
    assert newest_complete_checkpoint(folder) == folder / "checkpoint-3"
    counts = logged(trainer, METRIC)
    assert counts == sorted(counts)
    assert 0 < counts[-1] < trainer.describing.failures.total()
    assert all("loss" in entry for entry in trainer.state.log_history[:3])


def test_the_checkpoint_of_such_a_run_resumes(broken, prompts, tokenizer):
    trainer, _ = broken
    given = {"step_reward_funcs": step_reward, "max_steps": 4, "save_strategy": "no"}
    again = build(trainer.args.output_dir, prompts, tokenizer, **given)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert again.describing.failures == {}


def test_a_rank_that_cannot_look_at_its_rows_takes_part_in_every_exchange(tmp_path, prompts, tokenizer, monkeypatch):
    trainer = build(tmp_path, prompts, tokenizer, max_steps=4, save_strategy="no")
    assert trainer.fast_path.plans  # the self-test of the model takes one exchange, in the first step
    exchanges, original = [], trainer.gathered
    elsewhere = {3: [None]}  # in the third step another rank has nothing to say

    def gathered(values):
        if not trainer.is_in_train:
            return original(values)
        exchanges.append(trainer.state.global_step + 1)
        is_about_rows = isinstance(values[0], tuple | None) and (
            values[0] is None or "gradient_weights" in values[0][0]
        )
        return original(values) + (elsewhere.get(exchanges[-1], []) if is_about_rows else [])

    def fails_in_step_2(*args):
        return breaks() if trainer.state.global_step == 1 else look(*args)

    look = trainer.diagnostics._look_at
    monkeypatch.setattr(trainer, "gathered", gathered)
    monkeypatch.setattr(trainer.diagnostics, "_look_at", fails_in_step_2)
    trainer.train()
    counts = [exchanges.count(step) for step in (1, 2, 3, 4)]
    assert len(set(counts)) == 1
    assert trainer.describing.failures == {"The statistics of a batch": 2}
    described = ["completions/unique_frac" in entry for entry in trainer.state.log_history[:4]]
    assert described == [True, False, False, True]
    run = read_run(trainer.args.output_dir)
    assert [warning.cause for warning in run.warnings] == ["description"]


def test_a_callback_of_the_user_may_end_the_run_when_logging(tmp_path, prompts, tokenizer):
    class Enough(Exception):
        pass

    class Stops(TrainerCallback):
        def on_log(self, *args, **kwargs):
            raise Enough

    with pytest.raises(Enough):
        build(tmp_path, prompts, tokenizer, max_steps=1, save_strategy="no", callbacks=[Stops()]).train()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_the_guard(error):
    guard = DescriptionGuard()
    with pytest.raises(error), guard("Anything"):
        raise error
    assert guard.failures == {}


def test_around_a_block_guards_its_ends_and_hides_no_error_in_it():
    class Manager:
        def __enter__(self):
            breaks()

        def __exit__(self, *error):
            raise AssertionError("it was never entered")

    guard = DescriptionGuard()
    with pytest.raises(ValueError, match="of the block"), guard.around("The clock", Manager):
        raise ValueError("of the block")
    assert guard.failures == {"The clock": 1}


def test_a_subclass_of_a_describing_callback_is_guarded_too():
    class Watch(DescribingCallback):
        def on_step_end(self, *args, **kwargs):
            breaks()

    watch = Watch()
    assert watch.on_step_end(None, None, None) is None
    assert watch.describing.failures == {"Watch.on_step_end": 1}
