"""Server mode over the loopback: vLLM's own routes and wire format, a real model behind them, a queue for NCCL.

What it proves: which requests TRL makes through this trainer, in which order, what arrives, and that the gradient of
regrouped rows stays exact under sampling correction. What it cannot: anything about NCCL, CUDA or vLLM's kernels.
"""

import copy

import pytest
import torch
import vllm_stub
from gradient_runs import EXACT, Watching, difference, gradients
from peft import LoraConfig
from runs import STOCK, logged, step_reward, weights
from tiny import tiny_model
from trl import GRPOTrainer
from vllm_server import MODEL_ID, Server
from vllm_stub import Engine

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.host_proof.recording import build_policy
from trl_drgrpo.process_rewards import MonteCarloScorer, TrainerRollouts

GAP = "sampling/sampling_logp_difference/max"
RATIO = "sampling/importance_sampling_ratio"
SYNC = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]


@pytest.fixture(autouse=True, scope="module")
def vllm():
    with vllm_stub.installed():
        yield


@pytest.fixture
def run(train, tokenizer):
    """Trains against a server that starts from other weights than the trainer's."""

    def run(trainer_class=DrGRPOTrainer, **changes):
        of_stock = STOCK if trainer_class is GRPOTrainer else {"use_cpu": True, "bf16": False}
        with Server(Engine(tiny_model(tokenizer, seed=7))) as server:
            trainer = train(trainer_class=trainer_class, **{**of_stock, **server.settings, **changes})
        return trainer, server

    return run


# Weights arrive


def test_the_server_generates_from_the_weights_that_are_trained(run, tokenizer):
    start = weights(type("Untrained", (), {"model": tiny_model(tokenizer)}))
    trainer, server = run()
    assert max(logged(trainer, GAP)) < 1e-4
    assert server.routes == [
        *("/health", "/v1/models", "/server_info", "/get_world_size", "/init_weight_transfer_engine", "/server_info"),
        *[*SYNC, "/v1/completions"] * 3,
    ]
    assert all(body["n"] == 4 and len(body["prompt"]) == 2 for body in server.completions)
    assert {body["model"] for body in server.completions} == {MODEL_ID}
    assert max((weights(trainer)[name] - start[name]).abs().max() for name in start) > 1e-2


def test_a_batch_is_filled_in_several_rounds_after_one_update_of_the_weights(run):
    calls = []

    def first_round_is_dead(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return [float(len(calls) > 1 and sum(ids) % 2) for ids in completion_ids]

    trainer, server = run(
        dynamic_sampling=True, max_sampling_rounds=2, max_steps=2, reward=first_round_is_dead, run_log=False
    )
    assert max(logged(trainer, GAP)) < 1e-4
    assert logged(trainer, "sampling/rounds")[0] == 2
    assert server.routes.count("/v1/completions") == len(calls) > 2
    assert server.routes.count("/update_weights") == 2
    assert logged(trainer, "grad_norm")[0] > 0


ADAPTERS = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head in full": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
}


def adapter(**options):
    return LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_arrive_merged_and_the_base_stays_as_it_was(options, run, tokenizer):
    trainer, server = run(peft_config=adapter(**options), max_steps=2)
    assert max(logged(trainer, GAP)) < 1e-4
    base = dict(tiny_model(tokenizer).named_parameters())
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): param
        for name, param in trainer.model.named_parameters()
        if "lora_" not in name and "modules_to_save" not in name
    }
    assert kept.keys() == base.keys()
    assert all(torch.equal(kept[name], base[name]) for name in base)
    assert server.engine.loads == len(base) * 2


def test_adapters_arrive_over_several_buffers(run, monkeypatch):
    monkeypatch.setattr(vllm_stub, "BUFFER_SIZE", 20_000)
    trainer, _ = run(peft_config=adapter(**ADAPTERS["lora"]), max_steps=2)
    assert max(logged(trainer, GAP)) < 1e-4


def test_control_without_our_sync_the_last_buffer_arrives_without_adapters(run):
    # When a newer TRL or vLLM makes this fail, weight_sync.py has one reason less.
    trainer, _ = run(GRPOTrainer, peft_config=adapter(**ADAPTERS["lora"]), max_steps=2)
    assert min(logged(trainer, GAP)) > 0.05


def test_evaluation_generates_on_the_server_too(run, prompts):
    trainer, server = run(eval_dataset=prompts.select(range(2)), eval_strategy="steps", eval_steps=1, max_steps=2)
    assert max(logged(trainer, f"eval_{GAP}")) < 1e-4
    assert len(server.completions) > 2


def test_a_resumed_run_syncs_before_it_generates(run, settings):
    run(save_strategy="steps", save_steps=1, max_steps=1)

    class Resuming(DrGRPOTrainer):
        def train(self, **kwargs):
            return super().train(resume_from_checkpoint=f"{settings['output_dir']}/checkpoint-1")

    trainer, server = run(Resuming, max_steps=2)
    assert len(server.completions) == 1
    assert logged(trainer, GAP)[-1] < 1e-4


def test_monte_carlo_roll_outs_are_sampled_by_the_server(run, tokenizer):
    def odd_length(completion_ids, **kwargs):
        return [float(len(ids) % 2) for ids in completion_ids]

    class Sampling(DrGRPOTrainer):
        def train(self):
            rollouts.trainer = self
            return super().train()

    rollouts = TrainerRollouts()
    scorer = MonteCarloScorer(rollouts, odd_length, k=2, tokenizer=tokenizer)
    trainer, server = run(Sampling, step_reward_funcs=[scorer], step_separator=["tokens:4"], max_steps=1)
    assert len(server.completions) >= 2
    assert {body["n"] for body in server.completions} == {4, 2}
    assert logged(trainer, "grad_norm")[-1] > 0


def test_branches_begin_with_the_tokens_of_their_parent(run, settings):
    class Noting(DrGRPOTrainer):
        noted = ()

        def on_rollouts(self, batch, rollouts):
            forks = self.forks.newest
            self.noted = (*self.noted, (forks, batch, rollouts["sampling_per_token_logps"].clone()))
            return super().on_rollouts(batch, rollouts)

    trainer, server = run(Noting, forks=2, step_separator=["tokens:1"])
    assert max(logged(trainer, GAP)) < 1e-4  # of prefixes, too
    assert trainer.vllm_generation.max_completion_length == settings["max_completion_length"] == 12
    parents, branches = server.completions[::2], server.completions[1::2]
    assert len(parents) == len(branches) == len(trainer.noted) == 3
    for asked, more, (forks, batch, log_probs) in zip(parents, branches, trainer.noted, strict=True):
        assert (asked["n"], more["n"]) == (2, 1)
        assert asked["max_tokens"] == 12
        begun = [
            [*trainer.processing_class.encode(batch.prompts[i]), *batch.completion_ids[i][:cut]]
            for i, (cut,) in enumerate(forks.cuts)
            if i % 2 and cut < len(batch.completion_ids[i])
        ]
        assert more["prompt"] == begun
        cuts = [cut for (cut,), ids in zip(forks.cuts, batch.completion_ids, strict=True) if cut < len(ids)]
        assert more["max_tokens"] == 12 - min(cuts)
        for i in range(0, 8, 2):
            cut = forks.cuts[i][0]
            assert torch.equal(log_probs[i][:cut], log_probs[i + 1][:cut])


def test_log_probs_before_temperature_are_warned_about(train, tokenizer, caplog):
    with Server(Engine(tiny_model(tokenizer)), logprobs_mode="raw_logprobs") as server:
        train(**server.settings, max_steps=1)
    assert "--logprobs-mode raw_logprobs" in caplog.text


# The same gradient under sampling correction, when rows are left out, regrouped and packed


def measured(micro_batching, *, lora=False, trainer_arguments=None, **settings):
    """Per optimizer step, in float64; the engine samples from other probabilities than the policy's."""
    seen = []

    class Noting(Watching):
        def log(self, logs, start_time=None):
            super().log(logs, start_time)
            seen.append(logs)

    model, _ = build_policy(lora=False)
    logging = {"logging_strategy": "steps", "logging_steps": 1, "run_log": False}  # all metrics are logged then
    with Server(Engine(copy.deepcopy(model), distortion=0.6)) as server:
        fields = {**logging, **server.settings, "micro_batching": micro_batching, **settings}
        found = gradients(Noting, fields, lora=lora, trainer_arguments=trainer_arguments)
    return found, [logs for logs in seen if f"{RATIO}/max" in logs]


STEPS = {
    "trainer_arguments": {"step_reward_funcs": step_reward},
    "step_separator": ["tokens:2"],
    "steps_per_generation": 4,
}
CORRECTIONS = {
    "sequence_mask": {"vllm_importance_sampling_mode": "sequence_mask"},
    "sequence_truncate": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "token_mask": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2},
    "token_truncate": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.8,
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "steps_per_generation": 4},
    "iterations": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8},
    "KL": {"beta": 0.1},
    "sequence ratios": {"importance_sampling_level": "sequence", "steps_per_generation": 4},
    "truncated rows masked": {"mask_truncated_completions": True},
    "process rewards": {**STEPS, "vllm_importance_sampling_mode": "token_truncate"},
    "process rewards, rows masked": {**STEPS, "vllm_importance_sampling_mode": "sequence_mask"},
    "process rewards on adapters": {**STEPS, "vllm_importance_sampling_mode": "sequence_mask", "lora": True},
    # old log-probabilities wait for the plan
    "no correction": {"vllm_importance_sampling_correction": False, "steps_per_generation": 4},
}


@pytest.fixture(autouse=True)
def watching():
    Watching.plans_seen = []


RARE = ("sequence_truncate", "token_mask", "iterations", "KL", "sequence ratios", "truncated rows masked")
RARE += ("process rewards",)


@pytest.mark.parametrize(
    "settings", [pytest.param(CORRECTIONS[n], id=n, marks=[pytest.mark.slow] * (n in RARE)) for n in CORRECTIONS]
)
def test_gradients_are_those_of_upstream_micro_batches(settings):
    ours, metrics = measured("exact", **settings)
    assert all(Watching.plans_seen)
    upstream, upstream_metrics = measured("upstream", **settings)
    assert difference(ours, upstream) <= EXACT
    assert len(metrics) == len(upstream_metrics)
    if not settings.get("vllm_importance_sampling_correction", True):
        assert not metrics  # nothing to log
        return
    for name in (f"{RATIO}/min", f"{RATIO}/mean", f"{RATIO}/max", GAP):
        a, b = ([logs[name] for logs in run] for run in (metrics, upstream_metrics))
        assert a == pytest.approx(b, rel=1e-6), name
    assert max(logs[f"{RATIO}/max"] for logs in metrics) > 1.05  # there was something to correct
    assert any(name.startswith("sampling/weight_q") for logs in metrics for name in logs)
    if not {"beta", "trainer_arguments"} & settings.keys():
        assert max(logs["drgrpo/rows_skipped_frac"] for logs in metrics) > 0


def test_control_the_correction_matters():
    corrected, _ = measured("exact", **CORRECTIONS["token_truncate"])
    plain, _ = measured("exact", vllm_importance_sampling_correction=False)
    assert difference(corrected[:2], plain[:2]) > 1e-2
