"""Short runs of real model shapes with random weights, timed by phase: full, LoRA and QLoRA, ours and stock TRL's.

Shapes are those of Qwen2.5 unless said otherwise, built from configurations, so nothing is downloaded. Every
completion is forced to its limit, and in three of ten groups all rewards are equal.
"""

import gc
import itertools
import statistics
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from bench import StepClock, now, trainer_of
from peft import LoraConfig
from tiny import tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOTrainer, lora_preset
from trl_drgrpo.single_gpu.memory import Planner
from trl_drgrpo.single_gpu.memory.memory_settings import from_keys

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "tiny": (64, 256, 4, 4, 2, 2000, False),
    "wide heads": (128, 256, 4, 4, 2, 2000, False),  # vLLM has no kernels for narrow ones on a CPU
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
QWEN3_SHAPES = {  # the same, with heads of 128
    "tiny Qwen3": (64, 256, 4, 4, 2, 2000, True),
    "Qwen3 1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "Qwen3 4B": (2560, 9728, 36, 32, 8, 151936, True),
}
_TINY = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
_OF_1B = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936}
OTHER_SHAPES = {  # layers of running states between those of attention; layers that see a window alone
    "tiny hybrid": (Qwen3_5TextConfig, {**_TINY, **_LINEAR, "linear_num_value_heads": 4}),
    "hybrid": (
        Qwen3_5TextConfig,
        {**_OF_1B, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
        | {"linear_num_value_heads": 16},
    ),
    "tiny windows": (Gemma3TextConfig, {**_TINY, "sliding_window": 16, "sliding_window_pattern": 2}),
    "windows": (
        Gemma3TextConfig,
        {**_OF_1B, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "sliding_window": 512},
    ),
}
ARMS = {
    "ours": None,
    "TRL, dr_grpo, no std": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "TRL, default": {},
}
GROUP = 8


@dataclass(frozen=True)
class Size:
    """Tokens of prompts and completions, rows per forward and per step."""

    prompt: int = 256
    completion: int = 128
    batch: int = 8
    rows: int = 32


def config_of(shape):
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 40960}
    if shape in OTHER_SHAPES:
        config_class, fields = OTHER_SHAPES[shape]
        return config_class(**fields, **ends)
    is_qwen3 = shape in QWEN3_SHAPES
    numbers = QWEN3_SHAPES[shape] if is_qwen3 else SHAPES[shape]
    hidden, inner, layers, heads, shared, vocabulary, tied = numbers
    config_class = Qwen3Config if is_qwen3 else Qwen2Config
    more = {"head_dim": 128} if is_qwen3 else {"max_position_embeddings": 32768}
    return config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        tie_word_embeddings=tied,
        **{**ends, **more},
    )


def keys_of(method, size, device):
    """The run as a recipe would say it, for the planner."""
    keys = {
        "per_device_train_batch_size": size.batch,
        "gradient_accumulation_steps": max(1, size.rows // size.batch),
        "num_generations": GROUP,
        "max_completion_length": size.completion,
        "dtype": "float32" if method == "full" or device == "cpu" else "bfloat16",
    }
    if method != "full":
        keys |= {"use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    if method == "qlora":
        keys |= {"load_in_4bit": True, "use_bnb_nested_quant": True}
    return keys


@lru_cache(maxsize=1)  # the arms of one shape share it: gigabytes
def weights_in_folder(shape, dtype, device):
    """The path of a new temporary folder with random weights. Whoever started the process removes it."""
    folder = tempfile.mkdtemp()
    model_of(shape, dtype=dtype, device=device).save_pretrained(folder)
    gc.collect()
    return folder


def model_of(shape, method="full", dtype=torch.float32, device="cuda"):
    """Random weights; in 4 bits by way of a folder, as users load them."""
    if method == "qlora":
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        folder = weights_in_folder(shape, dtype, device)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, quantization_config=quantized
        )
    else:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    model.generation_config.eos_token_id = None
    return model


def reward(prompts, completion_ids, **kwargs):
    """Differs within seven of ten groups."""
    return [1.0 if ord(prompt[0]) % 10 < 3 else float(i % 4) for i, prompt in enumerate(prompts)]


def geometry_of(method, size, device):
    """Fields of the configuration."""
    known = ("per_device", "gradient", "num_gen", "max_comp")
    return {key: value for key, value in keys_of(method, size, device).items() if key.startswith(known)}


def arm_trainer(arm, model, method, size, folder, steps, device):
    """A trainer of one arm."""
    fields = {
        **geometry_of(method, size, device),
        "logging_steps": 1,
        "gradient_checkpointing": True,
        **(ARMS[arm] or {}),
    }  # TRL's defaults
    trainer_class = DrGRPOTrainer if ARMS[arm] is None else GRPOTrainer
    lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0) if method != "full" else None
    prompts = [chr(97 + i % 26) * size.prompt for i in range(64)]
    return trainer_of(trainer_class, folder, steps, prompts, reward, model, device, {"peft_config": lora}, **fields)


def vllm_trainer(folder, method, sent, size, device, **engine):
    """A trainer of adapters on the base in a folder, which a colocated engine loads as well."""
    tiny_tokenizer().save_pretrained(folder)
    fields = {
        **geometry_of(method, size, device),
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "vllm_lora": sent,
        **engine,
    }
    fields["model_init_kwargs"] = {"dtype": "bfloat16"}
    prompts, options = [chr(97 + i % 26) * size.prompt for i in range(64)], {"peft_config": lora_preset(method)}
    return trainer_of(DrGRPOTrainer, f"{folder}/out", 4, prompts, reward, folder, device, options, **fields)


class Phases(StepClock):
    """Seconds of generation and of whole steps, the first of which warms up and is left out; on a GPU also the peak of
    memory, in bytes, of generation and of the rest."""

    def __init__(self, trainer, device):
        super().__init__(device)
        self.generation, self.peaks, generate = [], {"generate": 0, "train": 0}, trainer._generate
        self._peak()

        def timed(*args, **kwargs):
            self._peak("train")
            start = now(device)
            result = generate(*args, **kwargs)
            self.generation.append(now(device) - start)
            self._peak("generate")
            return result

        trainer._generate = timed
        trainer.add_callback(self)

    def _peak(self, phase=None):
        """Adds what was the peak up to here, and begins a new one."""
        if self.device == "cpu":
            return
        if phase is not None:
            self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        self._peak("train")

    def seconds(self):
        """Median seconds of a step: whole, generation, the rest."""
        steps = [end - begin for begin, end in itertools.pairwise(self.ends)]
        generations = self.generation[1:]
        rests = [step - generation for step, generation in zip(steps, generations, strict=True)]
        names = {"step_s": steps, "generation_s": generations, "rest_s": rests}
        return {name: statistics.median(each) for name, each in names.items()}


def run(shape, method, arm, size, device, steps=4):
    """One run: seconds by phase, tokens per second, planned and measured peaks in bytes; or what stopped it."""
    keys = keys_of(method, size, device)
    setup = from_keys(keys, size.prompt, device)
    if ARMS[arm] is not None:
        setup = replace(setup, exact=False)
    planned = Planner(config_of(shape), setup).estimate(setup)
    result = {"shape": shape, "method": method, "arm": arm, "planned_bytes": planned.tensors}
    result["planned"] = {name: planned.tensors_of(name) for name in ("generate", "train")}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(shape, method, getattr(torch, keys["dtype"]), device)
            trainer = arm_trainer(arm, model, method, size, folder, steps, device)
            phases = Phases(trainer, device)
            trainer.train()
            result |= phases.seconds()
            result["tokens_per_s"] = size.rows * size.completion / result["step_s"]
            if ARMS[arm] is None:
                result["speed"] = trainer.fast_path.speed.facts()
            if device != "cpu":
                result |= {"measured_bytes": max(phases.peaks.values()), "measured": phases.peaks}
    except torch.OutOfMemoryError as error:
        result["stopped_by"] = f"out of memory: {str(error).splitlines()[0]}"
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return result
