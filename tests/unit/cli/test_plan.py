"""`trl-drgrpo plan`: what it prints, what it refuses, what it imports, and the trainer's warning."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from case_tables import cases
from misbehaving import kill_self
from peft import PromptTuningConfig, get_peft_model
from published import published_fields
from runs import train

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.cli import plan as plans
from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.plan import Probe, run_probe
from trl_drgrpo.cli.recipe import read_recipe
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.single_gpu.memory.warning import MemoryWatch, setup_of

ROOT = Path(__file__).parents[3]
QWEN_7B = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
QWEN_7B |= {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
QWEN_7B |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.fixture
def seven(tmp_path):
    """A folder with nothing but a 7B model's config.json."""
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


def plan(capsys, *arguments):
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_plan_is_a_recipe_and_a_table(seven, tmp_path, capsys):
    code, out, err = plan(capsys, "--model", seven, "--memory", "24GB", "--preset", "qlora")
    assert code == 0
    (tmp_path / "recipe.yaml").write_text(out)
    keys = read_recipe(str(tmp_path / "recipe.yaml")).values
    assert keys["load_in_4bit"] is True
    assert keys["lora_target_modules"] == ["all-linear"]
    rows = keys["per_device_train_batch_size"] * keys["steps_per_generation"]
    assert rows % keys["num_generations"] == 0
    assert keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] == 64
    assert "7.62 billion parameters, 40.4 million trained" in err
    assert "Fits 24.0 GB less a margin of 1.2 GB: the peak is" in err
    assert "CUDA context (estimate)" in err
    assert re.search(r"\non the host +load +save +merge\n", err)
    assert "error" not in err


def test_the_table_adds_up_and_knows_4_bit_weights(seven, capsys):
    code, out, _ = plan(capsys, "--model", seven, "--memory", "24GB", "--preset", "qlora", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"]
    for parts in [*found["phases"].values(), *found["host"].values()]:
        assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    assert found["peak"] == max(parts["total"] for parts in found["phases"].values())
    linear = found["parameters"] - 2 * 152064 * 3584  # half a byte each, and about an eighth of a bit in scales
    assert 0.5 * linear < found["phases"]["train"]["layers"] < 0.53 * linear
    assert found["phases"]["load"]["a weight, not quantized yet"] == 2 * 3584 * 18944
    assert found["host"]["load"]["weights, on their way"] == 2 * 152064 * 3584  # the embeddings, largest of all
    assert found["host"]["merge"]["base in float32"] == 4 * found["parameters"]


def test_a_card_has_fewer_bytes_than_its_name(seven, capsys):
    given = ("--model", seven, "--preset", "qlora", "--json", "--per_device_train_batch_size", "16")
    code, out, _ = plan(capsys, *given, "--device", "l4")
    found = json.loads(out)
    assert (code, found["device"], found["memory"]) == (0, "L4", int(22.03 * 2**30))
    assert found["margin"] == int(0.05 * found["memory"])
    assert found["peak"] <= found["memory"] - found["margin"]
    # What is measured wins over the name; a margin that the peak reaches into is none.
    peak, keys = found["peak"], ("gradient_accumulation_steps", "steps_per_generation", "max_completion_length")
    given += tuple(text for key in keys for text in (f"--{key}", str(found["recipe"][key])))
    # Nor what costs time alone.
    given += ("--generation_rows", "512", "--gradient_checkpointing_kwargs", '{"offload": false}')
    for memory, margin, expected in [(peak, "0", 0), (peak + 2**20, "1MB", 0), (peak + 2**20, "5%", 1)]:
        size = f"{memory // 1024 + 1}KB"
        code, _, _ = plan(capsys, *given, "--device", "L4", "--memory", size, "--margin", margin)
        assert code == expected, (memory, margin)


def test_a_plan_that_does_not_fit_is_commented_out(seven, capsys):
    code, out, err = plan(capsys, "--model", seven, "--memory", "16GB", "--preset", "full")
    assert code == 1
    assert "Does not fit 16.0 GB less a margin of 0.8 GB: the smallest settings tried need" in err
    assert "Most of it in" in err
    assert all(line.startswith("#") for line in out.splitlines())


@pytest.mark.parametrize(
    ("context", "prompt", "given", "longest"),
    [(1024, 512, (), 512), (256, 128, (), 128), (256, 56, ("--max_completion_length", "200"), 200)],
)
def test_no_completion_is_proposed_beyond_the_models_context(tmp_path, capsys, context, prompt, given, longest):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**QWEN_7B, **sizes, "vocab_size": 300, "max_position_embeddings": context}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = plan(capsys, "--model", str(tmp_path), "--memory", "8GB", *given)
    assert code == 0
    assert yaml.safe_load(out)["max_completion_length"] == longest
    assert f"prompts up to {prompt} tokens" in out
    assert (f"leaves at most {longest} for a completion behind prompts of {prompt}" in err) is not bool(given)


SMALL_STEP = ("--max_prompt_length", "40", "--max_completion_length", "16", "--num_generations", "4")
SMALL_STEP += ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--device", "cpu")


def test_a_probe_runs_the_plan_for_real(tmp_path, capfd):
    config = {**QWEN_7B, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))  # and no weights
    code, out, err = plan(capfd, "--model", str(tmp_path), "--memory", "2GB", "--probe", "--json", *SMALL_STEP)
    found = json.loads(out)["probe"]
    assert code == 0, err
    assert (found["weights"], found["ended_in"]) == ("random", None)
    took, before = found["took"].values()
    assert 100 * 2**20 < before < took < before + 2**30
    said = r"Probe on this CPU, random weights, two steps in \d+ s: \S+ [GM]B resident, the whole process"
    assert re.search(said, err)


def test_a_probe_that_runs_out_of_memory_says_what_to_lower(capfd):
    huge = ("--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_r", str(10**11))  # terabytes
    arguments = ("--model", "trl_drgrpo:demo", "--memory", "2GB", "--probe", *SMALL_STEP, *huge)
    code, out, err = plan(capfd, *arguments)
    assert code == 1
    assert "Nothing fits" in out  # the plan is there all the same
    said = "real weights: out of memory in loading the model. Lower dtype: bfloat16, then preset: qlora."
    assert err.splitlines()[-1] == f"Probe on this CPU, {said}"


def test_a_probe_that_the_system_kills_is_out_of_memory_too(monkeypatch):
    monkeypatch.setattr(plans, "_measure", kill_self)  # as the kernel does on a host without memory
    assert run_probe(str(MODEL_DIR), {}, "cpu", 8) == Probe("this CPU", "real", "loading the model")


@pytest.mark.parametrize(
    ("ended_in", "lower"),
    [
        ("generation", "generation_rows, then max_completion_length"),
        ("training", "per_device_train_batch_size (8), then max_completion_length."),
    ],
)
def test_a_probe_names_the_keys_to_lower(ended_in, lower):
    recipe = {"steps_per_generation": 4, "per_device_train_batch_size": 8}
    said = Probe("NVIDIA L4", "real", ended_in).sentence(recipe, None)
    assert said.startswith(f"Probe on NVIDIA L4, real weights: out of memory in {ended_in}. Lower {lower}")


@pytest.mark.parametrize(("_", "arguments", "message"), cases("cli.tsv", "plan"))
def test_bad_input(_, arguments, message, seven, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "alien").mkdir()
    (tmp_path / "alien" / "config.json").write_text('{"model_type": "no-such-thing"}')
    code, out, err = plan(capsys, *shlex.split(arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_7b_plan_imports_no_trainer(seven):
    code = (
        "import sys\nfrom trl_drgrpo.cli.main import main\n"
        f"code = main(['plan', '--model', {seven!r}, '--memory', '24GB', '--preset', 'qlora'])\n"
        "heavy = {'trl', 'peft', 'datasets', 'bitsandbytes', 'sklearn', 'scipy', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else code)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-500:]


ONE_AND_A_HALF = {**QWEN_7B, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
ONE_AND_A_HALF |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960}
QWEN3_2B = {
    **QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN3_4B = {
    **QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
QWEN3_8B = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
LLAMA_3B = {**QWEN3_2B, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
LLAMA_3B |= {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24}
# The memory that a recipe's header names, less what a process reward model of 7B in bfloat16 takes; prompts.
RECIPES = {
    "gsm8k_lora": (QWEN3_2B, "16GB", 512),
    "code": (ONE_AND_A_HALF, "16GB", 512),
    "r1_zero": (ONE_AND_A_HALF, "80GB", 1024),
    "prm_guided": (ONE_AND_A_HALF, "65GB", 512),
    "qlora_8b": (QWEN3_8B, "16GB", 512),
    "vllm_qlora": (QWEN3_8B, "24GB", 512),
    "vllm_colocate": (LLAMA_3B, "24GB", 512),
    "vllm_server": (QWEN3_4B, "24GB", 512),
    "qwen3_5_lora": (published_fields("Qwen/Qwen3.5-4B"), "24GB", 512),
    "gemma4_qlora": (published_fields("google/gemma-4-E4B-it"), "16GB", 512),
    "lfm2_lora": (published_fields("LiquidAI/LFM2-1.2B"), "8GB", 512),
    "gpt_oss_lora": (published_fields("openai/gpt-oss-20b"), "80GB", 512),
}


def test_every_recipe_for_a_gpu_is_planned():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes - {"cpu_quickstart", "smollm2_lora"} == set(RECIPES)


@pytest.mark.parametrize("name", [n if n == "qlora_8b" else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
def test_a_recipe_fits_the_hardware_that_it_names(name, tmp_path, capsys):
    shape, memory, prompt = RECIPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = str(ROOT / "recipes" / f"{name}.yaml")
    given = read_recipe(path).values
    longest = given.get("max_completion_length", DrGRPOConfig.max_completion_length)  # as it runs, not as proposed
    lengths = ("--max_prompt_length", str(prompt), "--max_completion_length", str(longest))
    code, out, _ = plan(capsys, "--config", path, "--model", str(tmp_path), "--memory", memory, *lengths, "--json")
    found = json.loads(out)
    assert code == 0, found["phases"]
    assert found["recipe"].get("load_in_4bit", False) == (given.get("preset") == "qlora")
    assert found["recipe"].get("lora_r") == (16 if "preset" in given else None)
    assert found["recipe"].get("dtype") == ("bfloat16" if "preset" in given else None)
    # As it stands: where it does not say how much one generation serves, that is all of an optimizer step.
    serves = given.get("steps_per_generation", given["gradient_accumulation_steps"])
    assert found["recipe"]["steps_per_generation"] == serves


def test_a_flag_wins_over_the_preset_of_a_recipe(seven, tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(f"model_name_or_path: {seven}\npreset: qlora\nlora_r: 4\n")
    for flags, bits, rank in [(("--preset", "lora"), None, 4), (("--lora_r", "2"), True, 2)]:
        code, out, _ = plan(capsys, "--config", str(tmp_path / "r.yaml"), "--memory", "80", "--json", *flags)
        recipe = json.loads(out)["recipe"]
        assert (code, recipe.get("load_in_4bit"), recipe["lora_r"]) == (0, bits, rank)
    code, _, err = plan(capsys, "--config", str(tmp_path / "r.yaml"), "--memory", "80", "--load_in_4bit", "false")
    assert code == 2
    assert "with the preset 'qlora'" in err


@pytest.mark.parametrize(("memory", "count"), [(2**20, 1), (2**40, 0), (None, 0)])
def test_the_trainer_warns_when_the_plan_does_not_fit(
    settings, prompts, tokenizer, reward, caplog, monkeypatch, memory, count
):
    monkeypatch.setattr("trl_drgrpo.single_gpu.memory.warning.device_memory", lambda device: memory)
    with caplog.at_level(logging.WARNING, logger="trl_drgrpo"):
        watched = {"callbacks": [MemoryWatch()]}  # which a trainer builds where the device is a GPU
        trainer = train(DrGRPOTrainer, {**settings, "max_steps": 1}, prompts, tokenizer, reward, **watched)
    assert setup_of(trainer.args, trainer.model).batch == 4
    warnings = [record.getMessage() for record in caplog.records if "planned peak" in record.getMessage()]
    assert len(warnings) == count
    for warning in warnings:
        assert "more than this device has (1.0 MB)" in warning
        assert "`trl-drgrpo plan`: nothing fits; the smallest tried: per_device_train_batch_size: 1," in warning
        assert len(warning.splitlines()) == 2


def test_a_model_that_cannot_be_planned_never_stops_a_run(caplog, monkeypatch, tmp_path, model):
    monkeypatch.setattr("trl_drgrpo.single_gpu.memory.warning.device_memory", lambda device: 2**20)
    args = DrGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    virtual = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with caplog.at_level(logging.DEBUG, logger="trl_drgrpo"):
        MemoryWatch().on_train_begin(args, None, None, model=virtual)
        MemoryWatch().on_train_begin(args, None, None, model=torch.nn.Linear(2, 2))
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("trl_drgrpo")]
    assert [level for level, _ in said] == ["DEBUG", "WARNING"]
    assert said[0][1].startswith("No memory plan for this run: NotImplementedError")
    assert said[1][1].startswith("MemoryWatch.on_train_begin failed: the run goes on without it.")


def test_a_recipe_is_planned_as_its_run_is(tokenizer, tmp_path, capsys):
    """With its own prompts and TRL's completion length, and an adapter that is trained further."""
    from peft import LoraConfig
    from tiny_bases import load, save_base

    base = save_base(tmp_path / "base", tokenizer, max_position_embeddings=4096)
    get_peft_model(load(base), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(tmp_path / "sft")
    tokenizer.save_pretrained(tmp_path / "sft")
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"prompt": "x" * n}) for n in range(1, 40)))
    recipe = {"model_name_or_path": str(tmp_path / "sft"), "dataset_name": str(tmp_path / "d.jsonl"), "beta": 0.1}
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({**recipe, "num_generations": 2, "per_device_train_batch_size": 2})
    )
    arguments = ("--config", str(tmp_path / "r.yaml"), "--memory", "8GB", "--device", "cpu")
    code, out, _ = plan(capsys, *arguments, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["prompt_tokens"] == 39
    assert content["recipe"]["max_completion_length"] == 512
    assert "use_peft" not in content["recipe"]
    assert content["phases"]["train"]["reference adapter"] > 0
    assert content["phases"]["train"]["Python and libraries (estimate)"] > 500 * 2**20
    _, out, _ = plan(capsys, *arguments)
    assert "prompts up to 39 tokens (measured: --max_prompt_length sets it)" in out
    assert "# max_completion_length: 1024 would fit, too" in out


def test_assumptions_of_a_plan_are_named_with_their_flags(seven, capsys):
    _, out, err = plan(capsys, "--model", seven, "--memory", "1GB")
    assert "prompts of 512 tokens (assumed: --max_prompt_length sets it)" in err
    assert "(assumed: --max_prompt_length sets it)" in out


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_a_broken_adapter_is_one_line(content, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(content)
    code, _, error = plan(capsys, "--model", str(tmp_path), "--memory", "8GB")
    assert code == 2
    assert error.startswith("error: --model: got ")
    assert "adapter_config.json, which cannot be read" in error
