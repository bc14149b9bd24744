"""`trl-drgrpo plan --model NAME_OR_PATH --device L4 [...]`: will it fit, and what would.

Reads the model's configuration and no weights, and the prompts of a recipe's data where they are on this machine.
stdout has a recipe fragment with settings that fit (its comments say what they were planned for) or, with `--json`,
everything; the table of components goes to stderr. With `--probe` two real steps are run as well. Exit code 1: nothing
fits, or the probe has run out of memory.

Example:

  trl-drgrpo plan --model_name_or_path Qwen/Qwen2.5-7B --device L4 --preset qlora >> recipe.yaml

A folder with nothing but config.json is enough for a model. Settings that are given, here or in --config, stay as they
are; batch sizes and completion length are proposed otherwise.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_drgrpo.cli import console
from trl_drgrpo.cli.flags import add_flag, read_flags
from trl_drgrpo.cli.recipe import dump, read_given
from trl_drgrpo.cli.run_keys import model_path
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import is_adapter
from trl_drgrpo.common.ranges import CHECKPOINT_OPTIONS, refuse_outside, whole
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.single_gpu.lora_presets import PRESETS, preset_values
from trl_drgrpo.single_gpu.memory.memory_settings import (
    FIELD_KEYS,
    find_card,
    from_keys,
    of_adapter,
    parse_margin,
    parse_memory,
    readable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trl_drgrpo.single_gpu.memory import Estimate

Phases = Mapping[str, Mapping[str, int]]  # bytes, by phase and part

# Keys of a recipe that decide its memory; a recipe may hold any other key as well.
KEYS = (
    "use_peft",
    "lora_r",
    "lora_dropout",
    "lora_target_modules",
    "load_in_4bit",
    "load_in_8bit",
    "dtype",
    "bf16",
    "fp16",
    "beta",
    "generation_batch_size",
    "micro_batching",
    "use_vllm",
    "vllm_mode",
    *FIELD_KEYS.values(),
    *CHECKPOINT_OPTIONS,
)
DEFAULT_PROMPT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = (
        f"{parser.prog} --model_name_or_path NAME --memory 24GB [--device L4] [--preset qlora] [--flag value ...]"
    )
    console.add_model(parser, "Folder with config.json, or Hub id. Default: the recipe's.", metavar="MODEL")
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="Memory of one device, such as 24GB; a plain number is GB.")
    add(
        "--margin",
        metavar="SIZE",
        help="Memory to leave free: an amount, or a share such as 5%% (default: 5%% or 0.7 GB, whichever is more).",
    )
    add(
        "--preset",
        choices=("full", *PRESETS),
        dest="planned_preset",
        help="As in `train`; full: train all weights, even if the recipe has a preset.",
    )
    length = (
        f"Longest prompt, in tokens (default: that of the recipe's data where it is local, else {DEFAULT_PROMPT})."
    )
    spellings = ("--max_prompt_length", "--max-prompt-length")
    add(*spellings, type=int, metavar="TOKENS", help=length)
    add(
        "--device",
        default="cuda",
        help="A card, such as T4, which also sets --memory, or cuda or cpu (default: cuda).",
    )
    add(
        "--probe",
        action="store_true",
        help="Run two real steps here at full size, with random weights where there are none, and report their peak.",
    )
    add("--json", action="store_true", help="Print the plan as JSON.")
    add("--config", metavar="YAML", help="A recipe; flags win over it.")
    group = parser.add_argument_group("settings of the run, as in `trl-drgrpo train`")
    flags = read_flags()
    for name in KEYS:
        if name in flags:
            add_flag(group, flags[name])


def run(args: argparse.Namespace) -> int:
    """Plan and print; 1 when nothing fits."""
    # A card that is named knows its memory.
    device = args.device.lower()
    card = memory = None
    if device not in ("cuda", "cpu"):
        card, memory = find_card(args.device)
        device = "cuda"
    if args.memory is not None:
        memory = parse_memory(args.memory)
    if memory is None:
        remedy = "Set the memory of one device, or its name: --device T4."
        raise InputError("--memory", "none", "an amount such as 24GB", remedy)
    margin = parse_margin(args.margin, memory)
    longest = whole(1, optional=True, remedy="Set the longest prompt's length.")
    refuse_outside("--max_prompt_length", args.max_prompt_length, longest)
    values = read_given(args)
    name = args.model or values.get("model_name_or_path")
    if not name:
        remedy = "Set it, or a --config that does."
        raise InputError("--model_name_or_path", "none", "a model's folder or Hub id", remedy)
    preset = args.planned_preset or values.get("preset")
    of_preset = {}
    if preset not in (None, "full"):
        of_preset = preset_values(preset, values, device)
    path = model_path(name)
    goes_on = is_adapter(path)
    of_saved_adapter: dict[str, Any] = {}
    if goes_on:
        path, of_saved_adapter = of_adapter(user_path(path))
    # Judges numbers, and loads nothing heavy.
    setup = from_keys({**of_preset, **of_saved_adapter, **values}, DEFAULT_PROMPT, device)
    # Thousands of modules are imported, none of them garbage, and steps are run on them: without collection it takes a
    # sixth of the first time less, and a third of the second.
    gc.disable()
    try:
        from trl_drgrpo.single_gpu.memory import Planner, propose, read_config
        from trl_drgrpo.single_gpu.vocabulary import context_length

        config = read_config(path)
        measured = None
        if not args.max_prompt_length:
            measured = _measured_prompt(values, name)
        prompt = _longest_prompt(config, args.max_prompt_length or measured, values)
        setup = replace(setup, prompt=prompt, goes_on=goes_on)
        # A recipe that leaves the length out runs with the default: the plan is for that one.
        fixed = dict(values)
        if args.config and "max_completion_length" not in values:
            room = (context_length(config) or math.inf) - prompt
            setup = replace(setup, completion=int(min(setup.completion, max(1, room))))
            fixed["max_completion_length"] = setup.completion
        planner = Planner(config, setup, memory)
        proposal = propose(planner, setup, memory - margin, fixed)
        # Where it fits, say how long completions could be.
        longest_completion = setup.completion
        if fixed != values and proposal.fits:
            with_any_length = propose(planner, setup, memory - margin, values)
            if with_any_length.fits:
                longest_completion = with_any_length.estimate.setup.completion
    finally:
        gc.enable()
    # A saved adapter brings its own settings; they are no keys of a run that goes on from it.
    recipe = {key: value for key, value in of_preset.items() if key not in of_saved_adapter}
    for key in KEYS:
        if key in values:
            recipe[key] = values[key]
    recipe |= proposal.keys
    # TRL takes one of them only.
    if "generation_batch_size" in recipe:
        recipe.pop("steps_per_generation", None)
    probe = None
    if args.probe:
        probe = run_probe(model_path(name), recipe, device, setup.prompt)
    estimate = proposal.estimate
    host = planner.host(estimate.setup)
    if args.json:
        content = {
            "model": name,
            "device": card,
            "memory": memory,
            "margin": margin,
            "fits": proposal.fits,
            "peak": estimate.total,
            "peak_phase": estimate.peak,
            "parameters": estimate.parameters,
            "trained_parameters": estimate.trained,
            "prompt_tokens": estimate.setup.prompt,
            "phases": _with_totals(estimate.phases),
            "host": _with_totals(host),
            "recipe": recipe,
        }
        if probe:
            content["probe"] = probe._asdict()
        print(json.dumps(content, indent=2))
    else:
        room = f"{readable(memory)} less a margin of {readable(margin)}"
        if card:
            room = f"{card}, {room}"
        prompts = f"{setup.prompt} tokens"
        if not args.max_prompt_length:
            origin = "measured" if measured else "assumed"
            prompts += f" ({origin}: --max_prompt_length sets it)"
        verdict = f"Fits {room}: the peak is {readable(estimate.total)}."
        if not proposal.fits:
            missing = estimate.total - (memory - margin)
            verdict = (
                f"Does not fit {room}: the smallest settings tried need {readable(estimate.total)}, "
                f"{readable(missing)} more. They are for prompts of {prompts}."
            )
        _print_tables(name, estimate, host, verdict)
        # Settings that do not fit are comments in the fragment.
        text = (
            f"# {name} on {room}: planned peak {readable(estimate.total)}, prompts up to {prompts}. "
            "An estimate, not a measurement.\n"
        )
        fragment = dump(recipe)
        if longest_completion > setup.completion:
            fragment += f"# max_completion_length: {longest_completion} would fit, too, with other batch sizes\n"
        if not proposal.fits:
            text += "# Nothing fits. The smallest settings tried:\n"
            fragment = "".join(f"# {line}\n" for line in fragment.splitlines())
        print(text + fragment, end="", flush=True)
    if planner.is_part:
        console.log(f"{name} has several parts: steps are planned for text alone.")
    if probe:
        console.log(probe.sentence(recipe, estimate))
    return 0 if proposal.fits and not (probe and probe.ended_in) else 1


def _with_totals(phases: Phases) -> dict[str, dict[str, int]]:
    return {name: {**parts, "total": sum(parts.values())} for name, parts in phases.items()}


def _print_tables(name: str, estimate: "Estimate", host: Phases, verdict: str) -> None:
    """Print the components of a plan on stderr. A star marks the phase with the peak."""
    peak = estimate.peak
    phases = {}
    for phase, parts in estimate.phases.items():
        star = "*" if phase == peak else ""
        phases[f"{phase}{star}"] = parts
    counts = f"{estimate.parameters / 1e9:.2f} billion parameters, {estimate.trained / 1e6:.1f} million trained"
    lines = [f"{name}: {counts}", *_table("on the device", phases)]
    if host:
        lines += _table("on the host", host)
    size, largest = max((size, part) for part, size in estimate.phases[peak].items())
    lines.append(f"{verdict} Most of it in {peak}: {largest}, {readable(size)}.")
    print(*lines, sep="\n", file=sys.stderr)


def _table(title: str, phases: Phases) -> list[str]:
    """Return the lines of a table: components down, phases across."""
    sizes_of_phases = _with_totals(phases).values()
    lines = [[title, *phases]]
    # Parts in the order in which phases name them; a phase may lack one.
    for part in [*dict.fromkeys(chain(*phases.values())), "total"]:
        line = [part]
        for sizes in sizes_of_phases:
            line.append(readable(sizes[part]) if part in sizes else "-")
        lines.append(line)
    return console.aligned(lines)


# Prompts to tokenize: those with the longest texts, as the longest in tokens is likely one of them.
_TOKENIZED = 256


def _measured_prompt(values: Mapping[str, Any], name: str) -> int | None:
    """Return the tokens of the longest prompt of a recipe's data, where data and tokenizer are on this machine; else
    `None`."""
    source = values.get("dataset_name")
    if not source or not Path(model_path(name)).is_dir() or not user_path(source).exists():
        return None
    from transformers import AutoTokenizer

    from trl_drgrpo.cli import data
    from trl_drgrpo.process_rewards.prm_inputs import prompt_ids

    try:
        dataset: Any = data.load_data(source, split=values.get("dataset_train_split") or "train")
        dataset = data.rename_columns(dataset, values.get("rename_columns") or [])
        prompts = data.prompted(dataset, values.get("prompt_template"), values.get("system_prompt"))["prompt"]
        tokenizer = AutoTokenizer.from_pretrained(model_path(name))
        longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-_TOKENIZED:]
        template = values.get("chat_template_kwargs")
        return max(len(prompt_ids(prompt, tokenizer, template)) for prompt in longest)
    # Whatever is wrong with the data, `train` says it: here an assumption is made instead.
    except Exception as error:
        console.log(f"The prompts of {source} could not be measured ({type(error).__name__}).")
        return None


def _longest_prompt(config: "PreTrainedConfig", tokens: int | None, values: Mapping[str, Any]) -> int:
    """Return the tokens of the longest prompt: as given, else 512 or what the model's context leaves. Say where the
    context is too short for the usual completion; refuse a length that was given and is longer."""
    from trl_drgrpo.single_gpu.memory.proposal import LENGTHS
    from trl_drgrpo.single_gpu.vocabulary import context_length

    context = context_length(config)
    completion = values.get("max_completion_length")
    if context is None:
        return tokens or DEFAULT_PROMPT
    # Half of a short context is left to completions of unknown length.
    prompt = tokens or max(1, min(DEFAULT_PROMPT, context - (completion or context // 2)))
    if prompt + (completion or 1) > context:
        field = "--max_prompt_length"
        got = str(prompt)
        if completion:
            field = "max_completion_length"
            got = f"{completion} after a prompt of {prompt} tokens"
        expected = f"at most {context} tokens together, the model's context"
        raise InputError(field, got, expected, "Lower the one or the other.")
    if completion is None and context - prompt < LENGTHS[0]:
        room = f"leaves at most {context - prompt} for a completion behind prompts of {prompt}"
        console.log(f"max_completion_length: the model's context of {context} tokens {room}.")
    return prompt


# Probe ---------------------------------------------------------------------------------------------------------------
#
# Two real optimizer steps at full size, as the optimizer's state is there from the second one on. Every prompt and
# every completion is as long as the plan says: stop tokens are never drawn. They run in a process of their own, so
# that a device or a host without memory ends that process and not the plan, and nothing else counts. A folder with
# `config.json` alone gets random weights, written to a temporary folder.

# Keys to lower, in this order, by what a run was doing when memory ran out.
LOWER = {
    "loading the model": ("dtype: bfloat16", "preset: qlora"),
    "generation": ("generation_rows", "max_completion_length"),
    "training": ("per_device_train_batch_size", "max_completion_length"),
}


class Probe(NamedTuple):
    """Memory that a run took, in bytes.

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
    took: Mapping[str, int] = {}

    def sentence(self, recipe: Mapping[str, Any], estimate: "Estimate") -> str:
        """The measurement beside the closed form's number; where memory ran out, what to lower."""
        run = f"Probe on {self.device}, {self.weights} weights"
        if self.ended_in:
            lower = []
            for key in LOWER[self.ended_in]:
                lower.append(f"{key} ({recipe[key]})" if key in recipe else key)
            return f"{run}: out of memory in {self.ended_in}. Lower {', then '.join(lower)}."
        took = ", ".join(f"{readable(size)} {what}" for what, size in self.took.items())
        planned = f"{readable(estimate.tensors)} in tensors, {readable(estimate.total)} in all"
        return f"{run}, two steps in {self.seconds:.0f} s: {took}; planned: {planned}."


def run_probe(path: str, recipe: Mapping[str, Any], device: str, prompt: int) -> Probe:
    """Run two steps of a recipe.

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
    name = "this CPU" if device == "cpu" else "this GPU"
    weights = "real"
    if Path(path).is_dir():
        suffixes = {file.suffix for file in Path(path).iterdir()}
        if not suffixes & {".safetensors", ".bin"}:
            weights = "random"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        remedy = "Add --device cpu, or run it where the card is."
        raise InputError("--probe", "a plan for a GPU on a machine without one", "its own device", remedy)
    with TemporaryDirectory() as folder:
        try:
            if weights == "random":
                path = _alone(_with_random_weights, path, f"{folder}/model", recipe.get("dtype"))
            return Probe(name, weights, *_alone(_measure, path, dict(recipe), device, prompt, folder))
        # The system has killed the process, which says no word: a file tells where it was.
        except BrokenProcessPool:
            stage = Path(folder, "stage")
            ended_in = stage.read_text() if stage.exists() else "loading the model"
            return Probe(name, weights, ended_in)


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _with_random_weights(path: str, folder: str, dtype: Any) -> str:
    """Save a model like that of `path`, with random weights, to a folder; return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from trl_drgrpo.host_proof.tiny import tiny_tokenizer

    no_code = {"trust_remote_code": False}
    config = AutoConfig.from_pretrained(path, **no_code).get_text_config(decoder=True)
    AutoModelForCausalLM.from_config(config, dtype=dtype or "float32", **no_code).save_pretrained(folder)
    has_tokenizer = any(Path(path).glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(path, **no_code) if has_tokenizer else tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    return folder


def _measure(path: str, recipe: dict[str, Any], device: str, prompt: int, folder: str) -> tuple[Any, ...]:
    """Return the fields of a `Probe` from `ended_in` on; a file says what it is doing, to be read after a kill."""
    # One GPU: with several visible, transformers would spread a batch over them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ |= {"HF_DATASETS_CACHE": folder, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import torch
    import transformers

    # The trainer's module is imported before memory is counted, not with the model.
    import trl_drgrpo.trainer  # noqa: F401
    from trl_drgrpo.cli import job

    stage = Path(folder, "stage")
    stage.write_text("loading the model")

    # Rewards come between generation and training. They differ in every group, so that every row trains.
    def rewards(completions: list[Any], **_: Any) -> list[float]:
        stage.write_text("training")
        return [float(row % 2) for row in range(len(completions))]

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            stage.write_text("generation")

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompts = [json.dumps({"prompt": _prompt(tokenizer, number, prompt)}) for number in range(64)]
    Path(folder, "prompts.jsonl").write_text("\n".join(prompts))
    settings = {
        **recipe,
        "model_name_or_path": path,
        "dataset_name": f"{folder}/prompts.jsonl",
        "output_dir": f"{folder}/run",
        "max_steps": 2,
        "use_cpu": device == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if device == "cpu":
        settings.setdefault("bf16", False)
    before = _resident()
    start = time.perf_counter()
    try:
        with console.stdout_to_stderr():
            prepared = job.prepare(settings)
            prepared.inputs["reward_funcs"] = [rewards]
            trainer = job.build_trainer(prepared)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.generation_config.suppress_tokens = sorted(trainer.stop_token_ids)
            trainer.add_callback(Steps())
            trainer.train()
    except (MemoryError, RuntimeError) as error:
        # torch's CPU allocator and cuBLAS raise plain RuntimeErrors, of which only the text tells.
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if is_out_of_memory or "allocate memory" in str(error) or "ALLOC_FAILED" in str(error):
            return (stage.read_text(),)
        raise
    seconds = time.perf_counter() - start
    if device == "cpu":
        return None, seconds, {"resident, the whole process": _resident(), "of them before the model": before}
    took = {
        "allocated by PyTorch": torch.cuda.max_memory_allocated(),
        "reserved by PyTorch": torch.cuda.max_memory_reserved(),
    }
    return None, seconds, took


def _prompt(tokenizer: Any, number: int, tokens: int) -> str:
    """Return a text of so many tokens, or a word less, different for every number."""
    words = [f"{number + 10} "] * tokens

    def length(count: int) -> int:
        return len(tokenizer("".join(words[:count])).input_ids)

    # A word has at least one token, so that so many words are enough; bisection finds how many fit.
    fitting = bisect_right(range(1, tokens + 1), tokens, key=length)
    return "".join(words[: max(fitting, 1)])


def _resident() -> int:
    """Return the most bytes that this process had resident."""
    try:
        peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
        return int(peak.split()[0]) * 1024
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
