"""Adapters, and weights in this process, to vLLM: stubs of engine and server around a real model that answer cached
prefixes as vLLM does; sleeping at level 2 fills the model with NaN, as a GPU would forget it."""

import gc
import os
from pathlib import Path

import pytest
import vllm_stub
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from runs import logged
from tiny import save_tiny, tiny_model
from tiny_multimodal import save_multimodal
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vllm_server import Server
from vllm_stub import BLOCK, LLM, Engine

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream import vllm_adapters

GAP = "sampling/sampling_logp_difference/max"


@pytest.fixture(autouse=True)
def vllm():
    with vllm_stub.installed():
        yield
    LLM.instances.clear()


@pytest.fixture(scope="module")
def long_prompts(tokenizer):
    """Of several blocks, the same ones in every batch."""
    rows = Dataset.from_dict({"prompt": [f"{i}+" * 30 for i in range(2)] * 8})
    assert len(tokenizer.encode(rows[0]["prompt"])) > 3 * BLOCK
    return rows


@pytest.fixture
def run(train, build, long_prompts, saved_model):
    """Trains adapters that move, or all weights; gives the trainer."""

    def run(trained=True, model=saved_model, adapter=None, lora=True, auto_class=AutoModelForCausalLM, **changes):
        options = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **(adapter or {})}
        given = {"data": long_prompts, "peft_config": LoraConfig(**options) if lora else None}
        given |= {"max_steps": 2, "learning_rate": 0.1, "max_completion_length": 8, "use_vllm": True}
        given |= {"vllm_max_model_length": 128, "model": auto_class.from_pretrained(model), **changes}
        before = dict(os.environ)
        try:
            return (train if trained else build)(**given)
        finally:  # TRL sets the variables of a process group, which the next trainer would join
            os.environ.clear()
            os.environ.update(before)

    return run


def server(tokenizer, saved_model, **options):
    engine = Engine(AutoModelForCausalLM.from_pretrained(saved_model))
    return Server(engine, **{"max_lora_rank": 8, "transfers": False, "serves": saved_model, **options})


# Adapters arrive


@pytest.mark.parametrize("rule", [{}, {"use_rslora": True}], ids=["plain", "rank-stabilized"])
def test_a_colocated_engine_generates_with_each_version(run, rule):
    trainer = run(adapter=rule)
    [engine] = LLM.instances
    assert max(logged(trainer, GAP)) < 1e-4
    assert engine.kwargs | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} == engine.kwargs
    assert engine.calls == ["reset_prefix_cache", "add_lora", "generate"] * 2
    folder = trainer.vllm_generation.path
    assert [path.name for path in folder.iterdir()] == ["2"]  # one version at a time
    size = sum(path.stat().st_size for path in folder.glob("2/*"))
    assert logged(trainer, "sampling/sync_bytes") == pytest.approx([size] * 2, rel=0.01)
    assert all(seconds > 0 for seconds in logged(trainer, "sampling/sync_seconds"))
    del trainer
    gc.collect()
    assert not folder.exists()
    assert not Path(f"{folder}.lock").exists()


def test_a_server_gets_each_version_under_a_name_of_its_own(run, tokenizer, saved_model):
    with server(tokenizer, saved_model) as served:
        trainer = run(**served.settings)
        names = [body["model"] for body in served.completions]
        assert max(logged(trainer, GAP)) < 1e-4
        assert len(set(names)) == 2
        assert [*served.adapters] == names[-1:]
        del trainer
        gc.collect()
        assert not served.adapters
    steps = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/v1/completions"]
    assert served.routes[:5] == ["/health", "/v1/models", "/server_info", "/v1/load_lora_adapter", "/server_info"]
    assert served.routes[5:-1] == steps * 2


def test_an_engine_that_sleeps_keeps_the_base(run, long_prompts):
    trainer = run(vllm_enable_sleep_mode=True)
    [engine] = LLM.instances
    awake = ["wake_up weights", "reset_prefix_cache", "add_lora", "wake_up kv_cache", "generate", "sleep at level 1"]
    assert engine.calls[0] == "sleep at level 1"
    assert engine.calls[1:7] == awake
    assert max(logged(trainer, GAP)) < 1e-4


def test_merged_weights_train_as_adapters_do(run):
    """The same completions, and the same gradients."""
    first, second = run(), run(vllm_lora="merged")
    assert logged(first, "grad_norm") == pytest.approx(logged(second, "grad_norm"), rel=1e-4)
    assert "add_lora" not in LLM.instances[1].calls
    assert "enable_lora" not in LLM.instances[1].kwargs
    assert logged(second, "sampling/sync_bytes")[0] > 2 * logged(first, "sampling/sync_bytes")[0]


# Weights: what TRL asks of the engine, in which order

SYNC = ["load_weights", "reset_prefix_cache"]
WEIGHTS = {"full": {"lora": False, "learning_rate": 1e-2}, "lora": {"vllm_lora": "merged"}}
of_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)


@of_weights
def test_the_engine_generates_from_the_weights_that_are_trained(weights, run):
    gaps = logged(run(**weights), GAP)
    [engine] = LLM.instances
    assert engine.calls == [*SYNC, "generate", *SYNC, "generate"]
    assert engine.kwargs["logprobs_mode"] == "processed_logprobs"
    assert engine.kwargs["quantization"] is None
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


@of_weights
def test_an_engine_that_sleeps_is_woken_and_given_its_weights_before_it_generates(weights, run, long_prompts):
    evaluation = {"eval_dataset": long_prompts.select(range(2)), "eval_strategy": "steps", "eval_steps": 1}
    trainer = run(vllm_enable_sleep_mode=True, **evaluation, **weights)
    [engine] = LLM.instances
    awake = ["wake_up weights", *SYNC, "wake_up kv_cache", "generate", "sleep"]
    # Training and evaluation at each step: the latter generates again although the weights are those of the step.
    assert engine.calls == ["sleep", *awake * (len(engine.calls) // len(awake))]
    assert engine.calls.count("generate") >= 4
    for mode in ("", "eval_"):
        assert max(logged(trainer, f"{mode}{GAP}")) < 1e-4


# Lost and stale ones are seen


def test_control_updates_that_are_dropped_are_warned_of(run, monkeypatch, caplog):
    first_only = LLM._add_lora

    def add_lora(self, request):
        return first_only(self, request) if not self.loaded else True

    monkeypatch.setattr(LLM, "_add_lora", add_lora)
    trainer = run(max_steps=4)
    assert min(logged(trainer, GAP)[1:]) > 0.3
    assert "it does not generate with the trained weights" in caplog.text
    assert caplog.text.count("nats per token") == 1


def test_no_warning_where_updates_arrive(run, caplog):
    run(max_steps=4)
    assert "nats per token" not in caplog.text


def without_a_reset(monkeypatch):
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda self: self.calls.append("reset_prefix_cache"))


def under_one_name(monkeypatch):
    """As with an adapter that is loaded in place."""
    generate = LLM.generate

    def renamed(self, *args, lora_request=None, **options):
        lora_request.lora_name = lora_request.lora_path = "policy"
        return generate(self, *args, lora_request=lora_request, **options)

    monkeypatch.setattr(LLM, "generate", renamed)


@pytest.mark.parametrize("safeguard", [without_a_reset, under_one_name], ids=["names alone", "reset alone"])
def test_either_safeguard_keeps_stale_prefixes_away(safeguard, run, monkeypatch):
    safeguard(monkeypatch)
    assert max(logged(run(), GAP)) < 1e-4


def test_control_without_both_the_engine_answers_with_stale_prefixes(run, monkeypatch):
    without_a_reset(monkeypatch)
    under_one_name(monkeypatch)
    gaps = logged(run(), GAP)
    assert gaps[0] < 1e-4 < 0.05 < min(gaps[1:])


# Multimodal checkpoints


@pytest.mark.parametrize("vllm_lora", ["adapter", "merged"])
@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        ("qwen3_5", AutoModelForImageTextToText),
        ("qwen3_5", AutoModelForCausalLM),  # whose layers have other names than in the file
        ("gemma3", AutoModelForImageTextToText),  # an older file
    ],
    ids=["whole", "language model", "older names"],
)
def test_names_are_those_of_the_checkpoint_that_vllm_serves(
    model_type, auto_class, vllm_lora, run, tokenizer, tmp_path
):
    folder = save_multimodal(tmp_path / model_type, tokenizer, model_type)
    only_text = {"exclude_modules": r".*(visual|vision_tower|multi_modal_projector).*"}
    trainer = run(model=folder, auto_class=auto_class, adapter=only_text, vllm_lora=vllm_lora)
    [engine] = LLM.instances
    assert max(logged(trainer, GAP)) < 1e-4
    assert ("add_lora" in engine.calls) == (vllm_lora == "adapter")


def test_an_adapter_on_the_vision_tower_is_merged(run, tokenizer, tmp_path, caplog):
    folder = save_multimodal(tmp_path / "gemma3", tokenizer, "gemma3")
    trainer = run(model=folder, auto_class=AutoModelForImageTextToText, max_steps=1)
    assert "it has an adapter outside of the language model (model.vision_tower." in caplog.text
    assert max(logged(trainer, GAP)) < 1e-4


# What cannot travel


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern={'q_proj': 2}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base's weights"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "it has an adapter on a layer of type Embedding"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_kinds_are_merged_and_the_log_says_why(adapter, reason, run, caplog):
    trainer = run(adapter=adapter, max_steps=1)
    assert max(logged(trainer, GAP)) < 1e-4
    assert "add_lora" not in LLM.instances[0].calls
    assert f"vLLM gets merged weights in the place of the adapter: {reason}." in caplog.text
    with pytest.raises(InputError, match="vllm_lora: got 'adapter', but"):
        run(trained=False, adapter=adapter, vllm_lora="adapter", output_dir="unused")


def test_adapter_without_an_adapter_is_refused(run):
    with pytest.raises(InputError, match="vllm_lora: got 'adapter', but all weights are trained"):
        run(trained=False, lora=False, vllm_lora="adapter")


SERVERS = {
    "no --enable-lora": ({"max_lora_rank": None}, "it runs without --enable-lora"),
    "rank": ({"max_lora_rank": 2}, "its --max-lora-rank is 2, the adapter has 4"),
    "base": ({"serves": "/models/another"}, "it serves /models/another, the adapter is one of "),
    "updates": ({"updates": False}, "it has no /v1/load_lora_adapter: VLLM_ALLOW_RUNTIME_LORA_UPDATING is not set"),
    "host": ({"sees": False}, "it does not see /"),
}


@pytest.mark.parametrize(("options", "said"), SERVERS.values(), ids=SERVERS)
def test_a_server_without_adapters_is_refused_with_the_command_in_one_line(options, said, run, tokenizer, saved_model):
    with server(tokenizer, saved_model, **options) as served, pytest.raises(InputError) as error:
        run(trained=False, **served.settings)
    message = str(error.value)
    assert f"vllm_server_base_url: got {served.url}, to which no adapter can be sent: {said}" in message
    command = f"vllm serve {saved_model} --enable-lora --max-lora-rank 8 --logprobs-mode processed_logprobs"
    assert f"Start it with: VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True {command}" in message
    assert "\n" not in message


@pytest.mark.parametrize(("options", "said"), SERVERS.values(), ids=SERVERS)
def test_a_server_that_takes_weights_gets_merged_ones(options, said, run, tokenizer, saved_model, caplog):
    with server(tokenizer, saved_model, transfers=True, **options) as served:
        trainer = run(**served.settings)
        assert max(logged(trainer, GAP)) < 1e-4
        assert served.routes.count("/update_weights") == 2
        assert f"vLLM gets merged weights in the place of the adapter: {said}" in caplog.text
        with pytest.raises(InputError, match="to which no adapter can be sent"):
            run(trained=False, vllm_lora="adapter", **served.settings)


# The folder


def test_adapters_of_crashed_runs_are_removed_and_those_of_live_runs_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_adapters.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(vllm_adapters.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 0}))
    living = vllm_adapters.AdapterFolder(1)
    dead = vllm_adapters.AdapterFolder(1)
    left = Path(f"{dead.path}x")
    left.mkdir()
    Path(f"{left}.lock").touch()
    (tmp_path / "trl-drgrpo-of-somebody-else.lock").touch()
    after = vllm_adapters.AdapterFolder(1)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        each.path.name for each in (living, dead, after)
    }
    assert (tmp_path / "trl-drgrpo-of-somebody-else.lock").exists()
    path = living.path
    del living
    gc.collect()
    assert not path.exists()


def test_the_newest_assignment_of_the_field_is_refused(run):
    trainer = run(trained=False)
    trainer.args.vllm_lora = "merged"
    with pytest.raises(InputError, match="vllm_lora: got 'merged', assigned after the trainer was built"):
        trainer.train()


def test_the_server_of_a_model_with_another_name(run, tokenizer, tmp_path):
    """The last part of a path decides, as a server may see the model elsewhere."""
    folder = save_tiny(tmp_path / "policy", tokenizer, tiny_model(tokenizer))
    with server(tokenizer, folder, serves="/elsewhere/policy") as served:
        trainer = run(model=folder, max_steps=1, **served.settings)
    assert max(logged(trainer, GAP)) < 1e-4


# Commands that sample with a server


class Sampling(Server):
    """Answers as `search/sampling.py` asks."""

    def post_v1_completions(self, body):
        self.completions.append(dict(body))
        adapter = body["model"], self.adapters[body["model"]]
        [[(ids, _)]] = self.engine.generate([body["prompt"]], n=1, max_tokens=body["max_tokens"], adapter=adapter)
        return {"choices": [{"token_ids": ids, "finish_reason": "length", "stop_reason": None}]}


@pytest.fixture
def adapter(saved_model, tokenizer, tmp_path, monkeypatch):
    """Its folder, in the working directory with data and a reward."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(saved_model), LoraConfig(r=4, target_modules="all-linear")
    )
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    (tmp_path / "mine.py").write_text("def any(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    return "adapter"


DATA = ["--dataset_name", "data.jsonl", "--reward_funcs", "mine.py:any"]
COMMANDS = {
    "eval": [*DATA, "--baseline", "none"],
    "generate": ["1+1="],
    "search": [*DATA, "--strategy", "best_of_n", "--budget_tokens", "32", "--output", "found.jsonl"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_adapters_folder_is_loaded_by_the_server_and_unloaded(command, adapter, saved_model, ran):
    flags = ["--model", adapter, *COMMANDS[command], "--max_completion_length", "8"]
    with Sampling(Engine(AutoModelForCausalLM.from_pretrained(saved_model)), max_lora_rank=8) as served:
        ran([command, *flags, "--vllm_server_base_url", served.url])
        gc.collect()
        assert {body["model"].partition("-")[0] for body in served.completions} == {"adapter"}
        assert served.routes[0] == "/v1/load_lora_adapter"
        assert not served.adapters


def test_a_server_that_does_not_load_it_is_one_line_with_the_command(adapter, saved_model, ran):
    flags = ["--model", adapter, "1+1=", "--max_completion_length", "8", "--vllm_server_base_url"]
    with Sampling(Engine(AutoModelForCausalLM.from_pretrained(saved_model)), updates=False) as served:
        said = ran(["generate", *flags, served.url], 2).err
    assert f"vllm_server_base_url: got {served.url}, which does not load the adapter" in said
    assert f"vllm serve {saved_model} --enable-lora --max-lora-rank 8" in said
    said = ran(["generate", *flags, "http://127.0.0.1:9"], 2).err  # nobody is there
    assert "which does not load the adapter" in said
