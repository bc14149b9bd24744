"""Colocate mode: what TRL asks of the engine in its process, in which order, and which weights it samples from.

The engine is a stub around a real model; sleeping at level 2 fills its weights with NaN, as a GPU would forget them.
"""

import os

import pytest
import vllm_stub
from peft import LoraConfig
from runs import logged, train
from transformers import AutoModelForCausalLM

from trl_drgrpo import DrGRPOTrainer

GAP = "sampling/sampling_logp_difference/max"
SYNC = ["load_weights", "reset_prefix_cache"]


@pytest.fixture(autouse=True)
def vllm():
    before = dict(os.environ)
    with vllm_stub.installed():
        yield
    vllm_stub.LLM.instances.clear()
    assert dict(os.environ) == before  # TRL sets the variables of a process group, which other tests would join


@pytest.fixture
def run(settings, prompts, tokenizer, reward, saved_model):
    def run(**changes):
        of_the_trainer = ("peft_config", "eval_dataset")
        extra = {name: changes.pop(name) for name in of_the_trainer if name in changes}
        settings_of_vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
        values = {**settings, "max_steps": 2, **settings_of_vllm, **changes}
        model = AutoModelForCausalLM.from_pretrained(saved_model)
        trainer = train(DrGRPOTrainer, values, prompts, tokenizer, reward, model, **extra)
        (engine,) = vllm_stub.LLM.instances
        return engine, logged(trainer, GAP), trainer

    return run


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_engine_generates_from_the_weights_that_are_trained(run, lora):
    adapter = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    engine, gaps, _ = run(vllm_lora="merged" if lora else "auto", **({"peft_config": adapter} if lora else {}))
    assert engine.calls == [*SYNC, "generate", *SYNC, "generate"]
    assert engine.kwargs["logprobs_mode"] == "processed_logprobs"
    assert engine.kwargs["quantization"] is None
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_an_engine_that_sleeps_is_woken_and_given_its_weights_before_it_generates(run, prompts, lora):
    adapter = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    extra = {"peft_config": adapter, "vllm_lora": "merged"} if lora else {}
    evaluation = {"eval_dataset": prompts.select(range(2)), "eval_strategy": "steps", "eval_steps": 1}
    engine, gaps, trainer = run(vllm_enable_sleep_mode=True, **evaluation, **extra)
    awake = ["wake_up weights", *SYNC, "wake_up kv_cache", "generate", "sleep"]
    # Training and evaluation at each step: the latter generates again although the weights are those of the step.
    assert engine.calls == ["sleep", *awake * (len(engine.calls) // len(awake))]
    assert engine.calls.count("generate") >= 4
    assert max(gaps) < 1e-4
    assert max(logged(trainer, f"eval_{GAP}")) < 1e-4
