"""`trl-drgrpo check` is green here, and turns red when the objective is broken on purpose."""

import dataclasses
import json

import pytest

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.check.credit import credit_cases
from trl_drgrpo.check.parity import CONTROL_FLOOR, TOLERANCE, Case, cases, run_case
from trl_drgrpo.check.small import read_config
from trl_drgrpo.common.errors import DivergedError, InputError
from trl_drgrpo.features.fast_path.speed import SpeedPart

# Settings that another case has too, together with more.
CONTAINED = (
    *("one batch", "accumulation", "two steps per generation", "two of both", "KL", "KL, off-policy", "LoRA"),
    *("L set on its own", "clip-higher", "shared prompts"),
)
CASES = [
    pytest.param(case, id=f"{case.name} [{i}]", marks=[pytest.mark.slow] * (case.name in CONTAINED))
    for i, case in enumerate(cases())
]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_agree_with_the_specification(case):
    result = run_case(case)
    assert result.steps >= 3
    if case.control:
        assert result.gradient_difference > result.residual > CONTROL_FLOOR
    else:
        assert result.gradient_difference <= case.tolerance
        assert result.loss_difference <= case.tolerance
    assert result.passed


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(full=True)[:48])
def test_every_combination_of_settings_passes(case):
    assert run_case(case).gradient_difference <= TOLERANCE


class WrongWeight(DrGRPOTrainer):
    """L off by one token."""

    def loss_constants(self, inputs):
        constants = super().loss_constants(inputs)
        return {**constants, "max_completion_length": constants["max_completion_length"] + 1}


class StdLeftOn(DrGRPOTrainer):
    """The other half of the trap: the right loss on advantages divided by a standard deviation."""

    def on_rollouts(self, batch, rollouts):
        rollouts = super().on_rollouts(batch, rollouts)
        rollouts["advantages"] = rollouts["advantages"] / rollouts["advantages"].std()
        return rollouts


class WidthAsNormalizer(DrGRPOTrainer):
    """The commonest wrong denominator: the padded width of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.width = inputs["completion_ids"].size(1)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def loss_constants(self, inputs):
        return {**super().loss_constants(inputs), "max_completion_length": self.width}


class ForgottenAccumulation(DrGRPOTrainer):
    """Micro-batch losses summed instead of averaged."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * self.current_gradient_accumulation_steps


class NaNInTheEnd(DrGRPOTrainer):
    """Right, but for the last optimizer step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * float("nan") if self.state.global_step == self.args.max_steps - 1 else loss


BROKEN = Case("broken", 4, 2, 4, settings=(("max_completion_length", 40),))


def test_the_case_that_is_broken_below_passes():
    assert run_case(BROKEN).passed


@pytest.mark.parametrize("broken", [WrongWeight, StdLeftOn, WidthAsNormalizer, ForgottenAccumulation])
def test_a_broken_objective_turns_the_check_red(broken):
    result = run_case(BROKEN, trainer_class=broken)
    assert not result.passed
    assert result.gradient_difference > 1e-3


def test_a_loss_that_is_nan_ends_the_check():
    with pytest.raises(DivergedError, match="the norm of the gradient is nan"):
        run_case(BROKEN, trainer_class=NaNInTheEnd)


def test_a_run_without_gradient_proves_nothing(monkeypatch):
    monkeypatch.setattr(
        "trl_drgrpo.host_proof.recording.completion_reward", lambda completion_ids: [1.0] * len(completion_ids)
    )
    assert not run_case(Case("constant reward")).passed


@pytest.fixture
def short_matrix(monkeypatch):
    short = [cases()[0], cases()[-1]]
    monkeypatch.setattr("trl_drgrpo.check.parity.cases", lambda full=False: short)
    credit = [case for case in credit_cases() if case.environment == "shared states"][:2]
    monkeypatch.setattr("trl_drgrpo.check.credit.credit_cases", lambda: credit)


def test_the_command_prints_a_table_and_exits_0(short_matrix, ran):
    out = ran(["check", "-v"]).out
    assert "4 of 4 cases passed: the trainer computes Dr. GRPO here." in out
    assert "own row counted (must differ" in out
    assert "_compute_loss" in out
    summary = ran(["check"]).out
    assert "own row counted" not in summary
    assert "_compute_loss" not in summary
    assert summary.count("1 of 1 agree, largest difference") == summary.count("1 of 1 controls differ") == 2
    assert "fast path: prompts run once, group cache, dropped rows, planned micro-batches" in summary
    assert len(summary.splitlines()) < 16


def test_the_command_speaks_json(short_matrix, ran):
    report = json.loads(ran(["check", "--json"]).out)
    assert report["passed"] is True
    assert report["seams"]["_compute_loss"] == "ok"
    for part in ("cases", "credit"):
        assert [case["passed"] for case in report[part]] == [True, True]


def test_the_command_exits_1_when_the_loss_weight_is_broken(short_matrix, monkeypatch, ran):
    right = DrGRPOTrainer.loss_constants
    wrong = {"max_completion_length": 13}
    monkeypatch.setattr(DrGRPOTrainer, "loss_constants", lambda self, inputs: {**right(self, inputs), **wrong})
    out = ran(["check"], 1).out
    assert "1 of 4 cases FAILED: do not trust runs in this environment" in out
    assert out.count("\n  FAIL ") == 1


def test_the_command_exits_1_when_a_part_of_the_fast_path_is_lost(short_matrix, monkeypatch, ran):
    from trl_drgrpo.upstream import kv_cache

    taken = kv_cache.DECODING_SEAMS | {"GenerationMixin.generate": ("a_new_name",)}
    monkeypatch.setattr(kv_cache, "DECODING_SEAMS", taken)
    out = ran(["check"], 1).out
    assert "GenerationMixin.generate (generation in transformers): no longer takes a_new_name" in out
    without = "without prompts run once, group cache, recorded steps, dropped rows: transformers has changed"
    assert f"fast path: planned micro-batches, skipped rows, shared prompts; {without}" in out
    assert "slower here than it need be" in out


# A model of the user's


@pytest.fixture
def folder(tmp_path):
    """A folder with nothing but a configuration, of a model that is not tiny."""

    def folder(model_type, architecture, **fields):
        config = {"model_type": model_type, "architectures": [architecture], "vocab_size": 151936, **fields}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path)

    return folder


LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "reasons"),
    [
        ("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 8, "head_dim": 128}, {}),
        ("mistral", "MistralForCausalLM", {"sliding_window": 4096}, {}),
        (
            "bamba",
            "BambaForCausalLM",
            {"attn_layer_indices": [9, 18, 27], "num_key_value_heads": 8},
            # Its completions are so short here that rows alone cost less.
            {"prompts run once": "yes", "group cache": "yes", "shared prompts": "it was never used"},
        ),
        (
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            {},
            {
                "planned micro-batches": "its attention selects tokens",
                "group cache": "DynamicIndexedLayer",
            },
        ),
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM",
            {"num_key_value_heads": 1, "lru_width": 4096},
            {"planned micro-batches": "what a row computes depends on its padding", "group cache": "outside of"},
        ),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", {"text_config": {**LARGE, "head_dim": 128}}, {}),
    ],
    ids=["qwen3", "window", "state", "index", "padding reaches a state", "three axes of positions"],
)
def test_a_models_folder_says_what_it_gets_of_the_fast_path(model_type, architecture, fields, reasons, folder, ran):
    report = json.loads(ran(["check", "--model", folder(model_type, architecture, **LARGE, **fields), "--json"]).out)
    assert report["passed"]
    assert report["architecture"] == architecture
    assert report["equal_tokens"] == 1
    assert report["gradient_difference"] < 1e-4
    assert report["plan"] == "yes"
    assert report["parameters"] > 1e9
    assert len(report["parts"]) == (8 if report["parts"]["group cache"] == "yes" else 7)  # fused layers
    for part, reason in report["parts"].items():
        if part in reasons:
            assert reasons[part] in reason
        elif not reasons and part != "recorded steps":
            assert reason == "yes"


def test_code_in_a_models_folder_is_not_run(folder, tmp_path, ran):
    path = folder("strange", "StrangeForCausalLM", auto_map={"AutoConfig": "strange.StrangeConfig"})
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    assert "--model" in ran(["check", "--model", path], 2).err
    assert not (tmp_path / "ran").exists()


class HalfWeight(DrGRPOTrainer):
    """Halves the weight of rows in planned micro-batches."""

    def loss_constants(self, inputs):
        constants = super().loss_constants(inputs)
        factor = 2 if self.args.micro_batching == "exact" else 1
        return {name: value * factor for name, value in constants.items()}


def test_a_wrong_gradient_of_a_model_is_seen(monkeypatch, ran):
    monkeypatch.setattr("trl_drgrpo.check.model.DrGRPOTrainer", HalfWeight)
    out = ran(["check", "--model", "trl_drgrpo:demo"], 1).out
    assert "gradient 5.0e-01 from that of TRL's micro-batches" in out
    assert "100% of the completions are those of transformers' own loop" in out


def test_the_command_exits_1_when_a_seam_moved(monkeypatch, ran):
    from trl_drgrpo.upstream import seams

    monkeypatch.setattr(seams, "SEAMS", {"__init__": ("model, another",)})
    assert "nothing further was run" in ran(["check"], 1).out


# The proof of the host libraries


@pytest.fixture
def proof(monkeypatch, tmp_path):
    """Call it with fields of the proof that is made here."""
    from trl_drgrpo.host_proof import keeping, proof

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def given(**fields):
        parts = dict.fromkeys(map(str, SpeedPart), "yes")
        made = proof.HostProof(keeping.hosts(), parts, 1.0, dict.fromkeys(proof.COMPARED, 1e-6), {}, 9.5)
        made = dataclasses.replace(made, **fields)
        monkeypatch.setattr(proof, "prove", lambda trainer_class, hosts: made)
        return made

    return given


def test_the_command_makes_a_proof_on_demand_and_shows_the_kept_one(proof, short_matrix, ran):
    made = proof()
    summary = ran(["check", "--proof"]).out
    assert "Proof of these versions on a tiny model (10 s)" in summary
    assert "Gradients and merged adapters are right here." in summary
    assert "cases passed" not in summary
    proof(seconds=99.0)
    assert json.loads(ran(["check", "--json"]).out)["proof"]["seconds"] == made.seconds


def test_the_command_says_that_a_proof_cannot_be_kept(proof, short_matrix, ran, monkeypatch):
    proof()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert "The proof cannot be kept: set XDG_CACHE_HOME" in ran(["check", "--proof"]).out


@pytest.mark.parametrize("name", ["a" * 5000, ""], ids=["too long", "empty"])
def test_a_name_that_no_model_can_have_is_one_error(name):
    with pytest.raises(InputError, match="^--model: got "):
        read_config(name)


def test_a_damaged_configuration_is_refused_with_the_reason_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": "64"}))
    with pytest.raises(InputError, match="^--model: .*'hidden_size': TypeError: .*'64'"):
        read_config(str(tmp_path))


def test_versions_that_were_not_tested_are_proven_anew(proof, short_matrix, ran, monkeypatch):
    from trl_drgrpo.upstream import versions

    proof()
    ran(["check", "--proof"])
    monkeypatch.setitem(versions.TESTED, "peft", ("0.1.0",))
    proof(differences={"exact": 0.5, "upstream": 0.0, "merged adapters": 0.0})
    out = ran(["check"], 1).out
    assert "FAIL a gradient of the fast path that is 5.0e-01 from TRL's" in out
    assert "training refuses to start" in out


def test_a_part_that_is_off_fails_the_proof(proof, ran):
    proof(parts=dict.fromkeys(map(str, SpeedPart), "yes") | {"group cache": "its cache has another name"})
    out = ran(["check", "--proof"], 1).out
    assert "without group cache: its cache has another name" in out
    assert "slower here than it need be" in out


def test_a_vanished_source_text_is_left_to_the_proof(proof, short_matrix, ran, monkeypatch):
    from trl_drgrpo.upstream import seams

    monkeypatch.setitem(seams.SEAMS, "_compute_loss", (*seams.SEAMS["_compute_loss"], "self.rows_of_a_batch"))
    proof()
    out = ran(["check"]).out
    assert "_compute_loss: no longer contains 'self.rows_of_a_batch' (a proof decides)" in out
    assert "Proof of these versions" in out
