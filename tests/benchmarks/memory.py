"""Planned against measured memory, and tokens per second, of DrGRPOTrainer and stock GRPOTrainer on one GPU.

Models of real shapes with random weights are built from configurations, so nothing is downloaded. Every completion is
forced to its limit. Each line is a run of two optimizer steps; peaks are those of `torch.cuda`'s caching allocator,
which do not hold the CUDA context. On a CPU `--tiny` runs a small model instead and reads the allocator through the
profiler: it shows that the script works and says nothing about a GPU.

Run: this file on a machine with a GPU; `--models 0.5B 1.5B`, `--methods lora qlora full`, `--trainers drgrpo stock`,
`--completion 1024`, `--batch 4`; `--tiny` on a CPU.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from datasets import Dataset
from memory_runs import measure, varied
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.labs.check.tiny import tiny_tokenizer
from trl_drgrpo.single_gpu.memory import Planner
from trl_drgrpo.single_gpu.memory.setup import from_keys

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied: those of Qwen2.5
    "tiny": (64, 256, 4, 4, 2, 2000, False),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
GROUP, ROWS = 8, 16


def config_of(size):
    hidden, inner, layers, heads, shared, vocabulary, tied = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def keys_of(method, options):
    keys = {
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": max(1, ROWS // options.batch),
        "num_generations": GROUP,
        "max_completion_length": options.completion,
        "dtype": "float32" if method == "full" or options.tiny else "bfloat16",
    }
    if method != "full":
        keys |= {"use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    if method == "qlora":
        keys |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
    return keys


def one_run(size, method, kind, options, device):
    """One trainer, two steps: planned and measured bytes, tokens per second."""
    config, keys = config_of(size), keys_of(method, options)
    dtype = getattr(torch, keys["dtype"])
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        gc.collect()
        quantized = None
        if method == "qlora":
            quantized = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, quantization_config=quantized
        )
        model.generation_config.eos_token_id = None
        known = ("per_device", "gradient", "num_gen", "max_comp")
        settings = {key: value for key, value in keys.items() if key.startswith(known)}
        common = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
        stock = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_cpu": device == "cpu", "bf16": device != "cpu"}
        args = (
            DrGRPOConfig(output_dir=folder, **settings, **common)
            if kind == "drgrpo"
            else GRPOConfig(output_dir=folder, **settings, **common, **stock)
        )
        lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0) if method != "full" else None
        trainer = (DrGRPOTrainer if kind == "drgrpo" else GRPOTrainer)(
            model=model,
            reward_funcs=varied,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [chr(97 + i % 26) * options.prompt for i in range(64)]}),
            processing_class=tokenizer,
            peft_config=lora,
        )
        setup = from_keys(keys, options.prompt, device)
        if kind == "stock":
            setup = replace(setup, exact=False)
        plan = Planner(config, setup).estimate(setup)
        start = time.perf_counter()
        if device == "cpu":
            measured = reserved = measure(trainer).total
        else:
            torch.cuda.reset_peak_memory_stats()
            trainer.train()
            torch.cuda.synchronize()
            measured, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        seconds = time.perf_counter() - start
    return plan.tensors, plan.total, measured, reserved, 2 * ROWS * options.completion / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["1.5B", "7B"])
    parser.add_argument("--methods", nargs="+", choices=["lora", "qlora", "full"], default=["lora", "qlora"])
    parser.add_argument("--trainers", nargs="+", choices=["drgrpo", "stock"], default=["drgrpo", "stock"])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    if options.tiny:
        options.models, options.prompt, options.completion, options.batch = ["tiny"], 64, 8, 4
    elif device == "cpu":
        parser.error("no GPU here; --tiny runs on a CPU")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, G = {GROUP}, {ROWS} rows per step, {options.completion} new tokens")
    print(
        f"{'model':6}{'method':8}{'trainer':9}{'planned MB':>11}{'measured':>10}{'ratio':>7}{'reserved':>10}"
        f"{'tok/s':>8}"
    )
    for size in options.models:
        for method in options.methods:
            for kind in options.trainers:
                tensors, _, measured, reserved, speed = one_run(size, method, kind, options, device)
                cells = f"{tensors / 2**20:>11.1f}{measured / 2**20:>10.1f}{tensors / measured:>7.3f}"
                print(f"{size:6}{method:8}{kind:9}{cells}{reserved / 2**20:>10.1f}{speed:>8.0f}", flush=True)
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
