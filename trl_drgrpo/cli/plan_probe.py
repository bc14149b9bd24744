"""`trl-drgrpo plan --probe`: two real optimizer steps at full size, and the most memory that they took.

Two, because the optimizer's state is there from the second one on. Every prompt and every completion is as long as the
plan says: stop tokens are never drawn. It runs in a process of its own, so that a device or a host without memory ends
that process and not the plan, and nothing else counts. A folder with `config.json` alone gets random weights, written
to a temporary folder.
"""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trl_drgrpo.cli.console import stdout_to_stderr
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu.memory.memory_settings import readable

# What a run was doing -> what to lower when memory runs out there, in this order.
LOWER = {
    "loading the model": ("dtype: bfloat16", "preset: qlora"),
    "generation": ("steps_per_generation", "per_device_train_batch_size", "max_completion_length"),
    "training": ("per_device_train_batch_size", "max_completion_length"),
}


@dataclass(frozen=True)
class Probe:
    """What a run took. Bytes.

    Args:
        device (`str`): Its name.
        weights (`str`): `"real"` or `"random"`.
        ended_in (`str`, *optional*): A key of `LOWER` where memory ran out; `None`: it went through.
        seconds (`float`): From loading to the end.
        took (`dict[str, int]`): Most bytes, by who counts: on a GPU PyTorch, what was allocated and reserved; on a CPU
            the system, what the whole process had resident, and had before the model was loaded.
    """

    device: str
    weights: str
    ended_in: str | None = None
    seconds: float = 0.0
    took: Mapping[str, int] = field(default_factory=dict)

    def sentence(self, recipe: Mapping[str, Any], estimate: Any) -> str:
        """The measurement beside the closed form's number; where memory ran out, what to lower."""
        run = f"Probe on {self.device}, {self.weights} weights"
        if self.ended_in:
            lower = [f"{key} ({recipe[key]})" if key in recipe else key for key in LOWER[self.ended_in]]
            return f"{run}: out of memory in {self.ended_in}. Lower {', then '.join(lower)}."
        took = ", ".join(f"{readable(size)} {what}" for what, size in self.took.items())
        planned = f"{readable(estimate.tensors)} in tensors, {readable(estimate.total)} in all"
        return f"{run}, two steps in {self.seconds:.0f} s: {took}; planned: {planned}."


def run_probe(path: str, recipe: Mapping[str, Any], device: str, prompt: int) -> Probe:
    """Runs two steps of a recipe.

    Args:
        path (`str`): Folder or Hub id of the model.
        recipe (`dict[str, Any]`): Keys of `trl-drgrpo train` that decide the memory.
        device (`str`): `"cuda"` or `"cpu"`: what this machine must have.
        prompt (`int`): Tokens of every prompt.

    Raises:
        [`InputError`]: vLLM generates, or the machine has no such device.
    """
    if recipe.get("use_vllm"):
        remedy = "vLLM takes the share that vllm_gpu_memory_utilization says; leave --probe out."
        raise InputError("--probe", "use_vllm", "generation by transformers", remedy)
    bare = Path(path).is_dir() and not any(file.suffix in (".safetensors", ".bin") for file in Path(path).iterdir())
    weights, name = "random" if bare else "real", "this CPU" if device == "cpu" else "this GPU"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        remedy = "Add --device cpu, or run it where the card is."
        raise InputError("--probe", "a plan for a GPU on a machine without one", "its own device", remedy)
    with TemporaryDirectory() as folder:
        try:
            if bare:
                path = _alone(_with_random_weights, path, f"{folder}/model", recipe.get("dtype"))
            return Probe(name, weights, *_alone(_measure, path, dict(recipe), device, prompt, folder))
        except BrokenProcessPool:  # the system killed it, which says no word
            stage = Path(folder, "stage")
            return Probe(name, weights, stage.read_text() if stage.exists() else "loading the model")


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _with_random_weights(path: str, folder: str, dtype: Any) -> str:
    """A model like that of `path`, saved to a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from trl_drgrpo.check.tiny import tiny_tokenizer

    config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
    AutoModelForCausalLM.from_config(config, dtype=dtype or "float32").save_pretrained(folder)
    has_tokenizer = any(Path(path).glob("tokenizer*"))
    (AutoTokenizer.from_pretrained(path) if has_tokenizer else tiny_tokenizer()).save_pretrained(folder)
    return folder


def _measure(path: str, recipe: dict[str, Any], device: str, prompt: int, folder: str) -> tuple[Any, ...]:
    """The fields of a `Probe` from `ended_in` on; what it does is in a file as well, to be read after a kill."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ |= {"HF_DATASETS_CACHE": folder, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import torch
    import transformers

    import trl_drgrpo.trainer  # noqa: F401  # counts as there before
    from trl_drgrpo.cli import job

    stage = Path(folder, "stage")
    stage.write_text("loading the model")

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        stage.write_text("training")
        return [float(row % 2) for row in range(len(completions))]

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            stage.write_text("generation")

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompts = [json.dumps({"prompt": _prompt(tokenizer, number, prompt)}) for number in range(64)]
    Path(folder, "prompts.jsonl").write_text("\n".join(prompts))
    settings = {"bf16": False} if device == "cpu" else {}
    settings |= {**recipe, "model_name_or_path": path, "dataset_name": f"{folder}/prompts.jsonl"}
    settings |= {"output_dir": f"{folder}/run", "max_steps": 2, "use_cpu": device == "cpu", "report_to": "none"}
    before, start = _resident(), time.perf_counter()
    try:
        with stdout_to_stderr():
            prepared = job.prepare({**settings, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True})
            prepared.reward_funcs = [rewards]
            trainer = job.build_trainer(prepared)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.generation_config.suppress_tokens = sorted(trainer.stop_token_ids)
            trainer.add_callback(Steps())
            trainer.train()
    except (MemoryError, RuntimeError) as error:
        said = any(words in str(error) for words in ("allocate memory", "ALLOC_FAILED"))
        if not said and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        return (stage.read_text(),)
    seconds = time.perf_counter() - start
    if device == "cpu":
        return None, seconds, {"resident, the whole process": _resident(), "of them before the model": before}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return None, seconds, {"allocated by PyTorch": allocated, "reserved by PyTorch": reserved}


def _prompt(tokenizer: Any, number: int, tokens: int) -> str:
    """Text of so many tokens, or a word less, different for every number."""
    words = [f"{number + 10} "] * tokens
    fitting = bisect_right(range(1, tokens + 1), tokens, key=lambda n: len(tokenizer("".join(words[:n])).input_ids))
    return "".join(words[: max(fitting, 1)])


def _resident() -> int:
    """Most bytes that this process had resident."""
    try:
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
