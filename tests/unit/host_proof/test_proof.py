"""The proof of the host libraries: it passes here, and sees what a host may change without a word."""

import math

import pytest
from peft.tuners.lora.layer import Linear
from tiny import tiny_model

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path.decoding import decoder, forwards
from trl_drgrpo.features.fast_path.fast_path import FastPath
from trl_drgrpo.features.fast_path.speed import GENERATION, Speed, SpeedPart
from trl_drgrpo.host_proof import proof as module
from trl_drgrpo.host_proof.comparison import AS_TRL, TOLERANCE, ModelResult, parts_in_use
from trl_drgrpo.host_proof.proof import MERGED, HostProof, prove
from trl_drgrpo.upstream import kv_cache

PARTS = dict.fromkeys(SpeedPart, "yes")
USED = set(SpeedPart) - {SpeedPart.RECORDED_STEPS, SpeedPart.JOINED_ADAPTERS}  # no GPU, no adapters
ON_A_CPU = USED.intersection(GENERATION)


def test_the_proof_passes_on_the_installed_libraries():
    proof = prove(DrGRPOTrainer, {"trl": "1.16.0"})
    assert proof.errors == proof.wrong == proof.off == {}
    assert max(proof.differences.values()) < TOLERANCE / 10
    assert proof.equal_tokens == 1
    assert {part for part, reason in proof.parts.items() if reason == "yes"} == USED


@pytest.fixture
def fast_path_alone(monkeypatch):
    """Leave out what does not generate on the fast path."""
    monkeypatch.setattr(module, "_off_policy_difference", lambda *args, **settings: 0.0)
    monkeypatch.setattr(module, "_merged_difference", lambda: 0.0)


@pytest.mark.usefixtures("fast_path_alone")
def test_a_cache_under_a_name_that_is_not_known_makes_generation_slow_and_is_found(monkeypatch):
    [unknown] = set(kv_cache.CACHE_NAMES) - {kv_cache.CACHE}  # as if the name of the installed version were not known
    for place in (kv_cache, forwards):
        monkeypatch.setattr(place, "CACHE", unknown)
    proof = prove(DrGRPOTrainer, {})
    assert proof.wrong == {}
    assert proof.equal_tokens == 1  # results are equal: only what was used tells
    assert proof.off == dict.fromkeys(ON_A_CPU, "it makes its cache itself")


@pytest.mark.usefixtures("fast_path_alone")
def test_tokens_that_transformers_would_not_sample_switch_generation_off(monkeypatch):
    monkeypatch.setattr(decoder, "_sampled", lambda scores, live, rows: scores.argmin(dim=-1))
    proof = prove(DrGRPOTrainer, {})
    assert proof.wrong == {}
    assert proof.equal_tokens < 1
    assert set(proof.off) >= ON_A_CPU
    assert "not those of transformers' own loop" in proof.off[SpeedPart.GROUP_CACHE]


@pytest.mark.usefixtures("fast_path_alone")
def test_a_fast_path_that_ends_in_an_error_is_wrong(monkeypatch):
    def failing(self, micro_batches):
        raise TypeError("an argument that TRL no longer takes")

    monkeypatch.setattr(FastPath, "_planned", failing)
    proof = prove(DrGRPOTrainer, {})
    assert proof.differences["exact"] == math.inf
    assert "ends in TypeError: an argument that TRL no longer takes" in proof.wrong["exact"]
    assert set(proof.wrong) == {"exact"}


@pytest.mark.usefixtures("fast_path_alone")
def test_a_full_disk_proves_nothing(monkeypatch):
    def full(self, micro_batches):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FastPath, "_planned", full)
    with pytest.raises(OSError, match="No space left"):
        prove(DrGRPOTrainer, {})


class UnreadConstants(DrGRPOTrainer):
    """Changes a constant, as if TRL's loss no longer read it where this package puts it."""

    unread = "max_completion_length"

    def loss_constants(self, inputs):
        constants = super().loss_constants(inputs)
        return constants | {self.unread: getattr(self, self.unread)}


class UnreadWeight(UnreadConstants):
    unread = "beta"


@pytest.mark.parametrize("trainer_class", [UnreadConstants, UnreadWeight])
def test_a_loss_that_does_not_read_the_objectives_constants_is_seen(trainer_class, tokenizer):
    assert module._off_policy_difference(trainer_class, tiny_model(tokenizer), **AS_TRL) > 100 * TOLERANCE


@pytest.mark.parametrize("path", ["the merged folder", "what vLLM is sent"])
def test_a_wrong_merge_is_seen(path, monkeypatch):
    merge = Linear.merge

    def wrong(self, safe_merge=False, adapter_names=None):
        merge(self, safe_merge, adapter_names)
        if safe_merge == (path == "the merged folder"):
            self.get_base_layer().weight.data *= 1.1

    monkeypatch.setattr(Linear, "merge", wrong)
    monkeypatch.setattr(module, "compare_with_trl", lambda *args: ModelResult("", PARTS, 0.0, 1.0))
    monkeypatch.setattr(module, "_off_policy_difference", lambda *args, **settings: 0.0)
    assert set(prove(DrGRPOTrainer, {}).wrong) == {MERGED}


def test_a_part_that_never_saved_work_is_not_on():
    speed = Speed()
    speed.on(SpeedPart.GROUP_CACHE, SpeedPart.SHARED_PROMPTS)
    speed.uses[SpeedPart.SHARED_PROMPTS] += 3
    assert parts_in_use(speed) == {"group cache": "it was never used", "shared prompts": "yes"}


def test_a_difference_that_is_not_a_number_is_wrong():
    proof = HostProof({}, {}, 1.0, {"exact": math.nan, "upstream": 0.0, MERGED: 0.0})
    assert set(proof.wrong) == {"exact"}
