"""The kept proof: made once per set of versions, apart from this process, and never the reason that a run ends."""

import json
import logging
import os
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from datasets import Dataset
from runs import short_run
from tiny import tiny_model

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.features.fast_path.speed import SpeedPart
from trl_drgrpo.host_proof import keeping
from trl_drgrpo.host_proof.proof import MERGED, HostProof
from trl_drgrpo.upstream import seams, versions

RIGHT = {"exact": 1e-6, "upstream": 0.0, MERGED: 1e-6}
WITHOUT = {"tools": None, "rollout_func": None, "use_vllm": False}
PARTS = {str(part): "yes" for part in SpeedPart}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def proof():
    return HostProof(keeping.hosts(), PARTS, 1.0, RIGHT, {}, 9.5)


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "transformers", ("5.0.0",))


@pytest.fixture
def proven(monkeypatch, proof, untested):
    """Call it with fields that the proof of this host is to have: they stand for the process that makes it."""
    made = []

    def proven(**fields):
        def prove_apart(trainer_class):
            made.append(trainer_class)
            return replace(proof, **fields), ""

        monkeypatch.setattr(keeping, "prove_apart", prove_apart)
        return made

    return proven


@pytest.fixture
def trainer(tmp_path, tokenizer):
    """Build a trainer of the tiny model with these settings."""

    def trainer(**settings):
        arguments = {name: settings.pop(name) for name in ("tools", "rollout_func") if name in settings}
        return DrGRPOTrainer(
            tiny_model(tokenizer),
            lambda completion_ids, **columns: [float(sum(ids) % 3) for ids in completion_ids],
            DrGRPOConfig(**{**short_run(tmp_path / "run"), **settings}),
            Dataset.from_dict({"prompt": [f"What is {i} plus {i}? Think about it step by step: " for i in range(8)]}),
            processing_class=tokenizer,
            **arguments,
        )

    return trainer


# Kept


def test_a_proof_is_kept_for_these_versions_and_no_others(proof, monkeypatch):
    assert keeping.kept_proof() is None
    keeping.keep(proof)
    assert keeping.kept_proof() == proof
    monkeypatch.setattr(keeping, "commit", lambda: "another")  # of this package
    assert keeping.kept_proof() is None


DAMAGED = {
    "empty": "",
    "cut": '{"hosts": {"trl": "1.1',
    "a list": "[]",
    "nested": "[" * 100_000,
    "no text": b"\xff\xfe",
    "other fields": '{"seconds": 1.0}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_no_proof(content, proof):
    keeping.keep(proof)
    data = content if isinstance(content, bytes) else content.encode()
    keeping.file_of(proof.hosts).write_bytes(data)
    assert keeping.kept_proof() is None
    keeping.keep(proof)
    assert keeping.kept_proof() == proof


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("differences", {"exact": "1e-6", "upstream": 0.0, MERGED: 0.0}),
        ("differences", [1.0]),
        ("differences", {"exact": 1e-6}),
        ("parts", {"group cache": "yes"}),
        ("parts", dict.fromkeys(PARTS)),
        ("parts", None),
        ("errors", [1]),
        ("hosts", {"trl": "1.16.0"}),
        ("equal_tokens", None),
        ("seconds", "9"),
    ],
)
def test_a_file_of_another_form_is_no_proof(field, value, proof):
    file = keeping.file_of(proof.hosts)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(asdict(proof) | {field: value}))
    assert keeping.kept_proof() is None


def test_a_cache_that_cannot_be_written_or_read_ends_nothing(proof, cache, monkeypatch, caplog):
    cache.write_text("a file")
    keeping.keep(proof)
    assert "every run makes it again. Set XDG_CACHE_HOME" in caplog.text
    assert keeping.kept_proof() is None
    cache.unlink()
    keeping.file_of(proof.hosts).mkdir(parents=True)
    keeping.keep(proof)
    assert keeping.kept_proof() is None

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(keeping.Path, "home", nobody)
    keeping.keep(proof)
    assert keeping.kept_proof() is None


# Made


def test_the_process_that_proves_has_no_gpu_and_no_launcher(proof, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_FSDP", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    calls, unchanged = [], subprocess.run

    def run(command, env=None, **options):
        if "-P" not in command:  # git, for the commit
            return unchanged(command, env=env, **options)
        calls.append((command, env))
        return subprocess.CompletedProcess(command, 0, f"a line of a library\n{json.dumps(asdict(proof))}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert keeping.prove_apart(DrGRPOTrainer) == (proof, "")
    [(command, environment)] = calls
    assert "trl_drgrpo.trainer:DrGRPOTrainer" in command
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not any(name.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE", "OMPI")) for name in environment)
    assert environment["PATH"] == os.environ["PATH"]
    assert keeping.kept_proof() == proof


def failing(*args, **options):
    raise PermissionError("no new processes")


def late(command, **options):
    raise subprocess.TimeoutExpired(command, 600)


def killed(command, **options):
    return subprocess.CompletedProcess(command, -9, "", "")


def silent(command, **options):
    return subprocess.CompletedProcess(command, 0, "", "")


@pytest.mark.parametrize("run", [failing, late, killed, silent])
def test_a_proof_that_cannot_be_made_is_said_and_ends_no_run(run, monkeypatch, untested, trainer, caplog):
    monkeypatch.setattr(subprocess, "run", run)
    assert trainer().fast_path.speed.barred == {}
    assert caplog.text.count("No proof of the host libraries: ") == 1
    assert keeping.kept_proof() is None


def test_the_other_ranks_get_the_proof_of_the_first(proven, monkeypatch, proof):
    made = proven(parts=PARTS | {"group cache": "a reason"})
    sent = []

    def broadcast(objects, src):
        if rank == 0:
            sent[:] = objects
        else:
            objects[:] = sent

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    results = []
    for rank in (0, 1):
        args = type("Args", (), {"world_size": 2, "process_index": rank, "micro_batching": "exact"})
        results.append(keeping.require_proof(DrGRPOTrainer, args, {}, WITHOUT))
    assert results[0] == results[1]
    assert set(results[0]) == {SpeedPart.GROUP_CACHE}
    assert len(made) == 1


# What a run does with it


def test_tested_versions_ask_for_no_proof(trainer, monkeypatch):
    monkeypatch.setattr(keeping, "require_proof", lambda *args: pytest.fail("was asked for"))
    assert versions.untested_versions() != {} or trainer()


def test_a_run_takes_the_kept_proof(proof, untested, trainer, monkeypatch):
    keeping.keep(proof)
    monkeypatch.setattr(keeping, "prove_apart", lambda trainer_class: pytest.fail("was made again"))
    assert trainer().fast_path.speed.barred == {}


def test_a_wrong_gradient_refuses_and_says_what_to_do(proven, trainer):
    proven(differences=RIGHT | {"exact": 0.5})
    with pytest.raises(UpstreamError) as error:
        trainer()
    for text in ("transformers ", "peft ", "5.0e-01 from TRL's", "pip install transformers==5.0.0", "'upstream'"):
        assert text in str(error.value)
    assert trainer(micro_batching="upstream").fast_path.speed.barred == {}


@pytest.mark.parametrize("name", ["upstream", MERGED])
def test_a_fault_that_no_setting_avoids_is_refused_with_every_setting(name, proven, trainer):
    proven(differences=RIGHT | {name: 0.5, "exact": 0.5})
    for micro_batching in ("exact", "upstream"):
        with pytest.raises(UpstreamError, match="on a tiny model; expected at most 1e-03"):
            trainer(micro_batching=micro_batching)


def test_parts_that_are_off_on_a_host_are_off_in_a_run_and_said(proven, trainer, caplog):
    proven()
    fast = trainer()
    fast.train()
    assert min(fast.fast_path.speed.uses[part] for part in (SpeedPart.GROUP_CACHE, SpeedPart.SHARED_PROMPTS)) > 0
    parts = (SpeedPart.GROUP_CACHE, SpeedPart.DROPPED_ROWS, SpeedPart.SKIPPED_ROWS, SpeedPart.SHARED_PROMPTS)
    proven(parts=PARTS | {str(part): "of a name that has moved" for part in parts})
    with caplog.at_level(logging.WARNING):
        slow = trainer(overwrite_output_dir=True)
        slow.train()
    facts = slow.fast_path.speed.facts()
    for part in parts:
        assert slow.fast_path.speed.uses[part] == 0
        assert "found that of a name that has moved" in facts[part]
        assert f"Fast path without {part}: " in caplog.text
    assert facts[SpeedPart.PROMPTS_ONCE] == facts[SpeedPart.PLANNED] == "yes"


@pytest.mark.parametrize("part", [SpeedPart.PROMPTS_ONCE, SpeedPart.PLANNED])
def test_without_its_first_part_a_phase_is_left_to_the_host(part, proven, trainer):
    proven(parts=PARTS | {str(part): "of a name that has moved"})
    run = trainer(max_steps=1)
    run.train()
    uses = {used for used, times in run.fast_path.speed.uses.items() if times}
    first_of_training = part == SpeedPart.PLANNED
    assert (SpeedPart.PROMPTS_ONCE in uses) is first_of_training
    assert (SpeedPart.PLANNED in uses) is not first_of_training


# Source texts that have vanished


@pytest.fixture
def vanished(monkeypatch):
    """Let a seam look for a text that TRL does not contain."""

    def vanished(name, text):
        monkeypatch.setitem(seams.SEAMS, name, (*seams.SEAMS[name], text))

    return vanished


def test_a_vanished_source_text_asks_for_the_proof(vanished, proven, trainer, caplog):
    vanished("_compute_loss", "self.rows_of_a_batch")
    made = proven(hosts=keeping.hosts())
    assert "self.rows_of_a_batch" in str(keeping.hosts())
    trainer()
    assert made == [DrGRPOTrainer]
    assert "_compute_loss no longer contains 'self.rows_of_a_batch'" in caplog.text


def test_a_vanished_source_text_without_a_proof_is_refused(vanished, monkeypatch, trainer):
    vanished("_compute_loss", "self.rows_of_a_batch")
    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(UpstreamError, match=r"no longer contains 'self\.rows_of_a_batch'; proof .*no new processes"):
        trainer()


def test_a_text_that_only_tools_need_refuses_only_their_runs(vanished, monkeypatch, proven, trainer):
    vanished("_generate", "rollout_func(everything)")
    monkeypatch.setitem(keeping._UNDER, "rollout_func", ("rollout_func(everything)",))
    proven()
    trainer()
    with pytest.raises(UpstreamError, match="_generate: no longer contains"):
        trainer(rollout_func=lambda prompts, trainer: {})


@pytest.mark.slow
def test_a_process_of_its_own_proves_these_versions():
    proof, failure = keeping.prove_apart(DrGRPOTrainer)
    assert failure == ""
    assert proof.wrong == proof.off == {}
    assert keeping.kept_proof() == proof
