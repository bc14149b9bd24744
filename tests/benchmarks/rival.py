"""Four trainers side by side on one card: ours, Unsloth's defaults, stock TRL, and stock TRL with continuous batching.

Shapes of Qwen3 (Unsloth has no recorded decoding for Qwen2.5) with random weights that are saved once, LoRA of rank 16
on all linear layers, beta 0, the objective of Dr. GRPO in every arm, 8 prompts of 512 tokens with 8 completions of 256
each, three of the eight groups without signal. Every arm runs in a process of its own:

- `gradient`: one step over the same fixed completions, against a float32 gradient written out in plain PyTorch;
- `speed`: four steps; seconds of the first, medians of the others, tokens per second, peak of memory;
- `memory`: one step over two fixed completions of 8,192, 16,384 and 32,256 tokens: seconds and peak.

Run on a machine with CUDA, each call under ten minutes: `make rival MODEL="Qwen3 1.7B"`, `make rival MODEL="Qwen3 4B"`
(in 4 bits), `make rival MODEL="Qwen3 4B" TASKS=memory`. Results go to `recipes/results/rival.json`; a call adds to it.

For a machine without a network, `--collect FOLDER` downloads here what the arms need there besides torch and
transformers, into FOLDER/unsloth and FOLDER/trl, 64 MiB at most. There `--packages FOLDER` finds it. Unsloth gets a
folder of its own because it needs an older TRL. `--small` runs everything with tiny shapes on a CPU.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARMS = ("ours", "unsloth", "stock", "stock, continuous batching")
TASKS = ("gradient", "speed")
GROUP = 8
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IN_FOUR_BITS = ("Qwen3 4B",)
LONG = (8192, 16384, 32256)
CALL_SECONDS = 570  # of ten minutes
SPEED_STEPS = 4  # the first of which warms up
TASK_SECONDS = {"prepare": 120, "gradient": 60, "speed": 180, "memory": 150}  # 90 s were too few for Unsloth (H100)

# What the card's machine lacks: Python 3.12 with torch, transformers, accelerate and peft.
PYTHON = "3.12"
PACKAGES = {
    "unsloth": (
        *("unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "trl==1.15.0", "datasets==4.8.5", "huggingface_hub==1.33.0"),
        *("peft==0.21.0", "torchao==0.18.0", "msgspec==0.22.0", "tyro==1.0.17", "docstring_parser==0.18.0"),
        *("shtab==1.13.0", "typeguard==4.6.1", "nest_asyncio==1.6.0", "cut_cross_entropy==25.1.1"),
    ),
    "trl": (
        *("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),
        "bitsandbytes==0.50.2",
    ),
}
LIBRARY = "libbitsandbytes_cuda130.so"  # of torch 2.11 with CUDA 13.0
MOST_BYTES = 64 * 2**20  # that can be carried at once


@dataclass(frozen=True)
class Sizes:
    """Tokens and rows of a step."""

    prompt: int = 512
    completion: int = 256
    prompts: int = 8
    batch: int = 8


SMALL = Sizes(16, 8, 8, 8)


# Packages for a machine without a network ---------------------------------------------------------------------------


def collect(folder):
    """Download the packages of each process, without what a run does not read."""
    total = 0
    for name, requirements in PACKAGES.items():
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        platforms = [f"--platform=manylinux_2_{version}_x86_64" for version in (17, 24, 28)]
        place = ["--target", str(target), "--python-version", PYTHON, "--platform=manylinux2014_x86_64", *platforms]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--no-deps",
            "--only-binary=:all:",
            *place,
        ]
        subprocess.run([*command, *requirements], check=True)
        for library in (target / "bitsandbytes").glob("libbitsandbytes_*"):
            if library.name != LIBRARY:
                library.unlink()
        for unread in (target / "studio", target / "bin", target / "unsloth" / "studio", target / "unsloth_cli"):
            shutil.rmtree(unread, ignore_errors=True)
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        print(f"{target}: {size / 2**20:.1f} MiB", flush=True)
        total += size
    if total > MOST_BYTES:
        sys.exit(f"rival: {folder} has {total / 2**20:.1f} MiB; expected at most 64. Remove what no arm reads.")


# The same run in every arm ------------------------------------------------------------------------------------------


def is_dead(prompt):
    return ord(prompt[0]) % 10 < 3


def reward(prompts, completion_ids, **kwargs):
    """A row's reward depends on its tokens alone, so that every arm gives the same ones."""
    rows = zip(prompts, completion_ids, strict=True)
    return [1.0 if is_dead(prompt) else float(sum(ids) % 4) for prompt, ids in rows]


def prompts_of(sizes):
    return [chr(ord("a") + number) * sizes.prompt for number in range(sizes.prompts)]


def fixed_completions(prompt, length, group):
    """Completions of a prompt: the same in every arm, of ids below 200."""
    seed = ord(prompt[0])
    return [[(seed * 31 + row * 17 + place * 7) % 190 + 5 for place in range(length)] for row in range(group)]


def rollouts(length, group):
    """A `rollout_func` that gives fixed completions."""

    def roll_out(prompts, trainer):
        completions = []
        for prompt, rows in itertools.groupby(prompts):
            number = len(list(rows))
            completions += fixed_completions(prompt, length, group)[:number]
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return roll_out


def load(folder, bits, device):
    """The saved model, with 4-bit linear layers or as it is."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    quantization = {}
    if bits:
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        quantization = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device}, **quantization)


def adapter_config():
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")


def adapter_parameters(model):
    """Parameters of the adapters, by a name that is the same in every arm."""
    names = {name[name.index("layers.") :]: p for name, p in model.named_parameters() if "lora_" in name}
    return {name.replace(".default", ""): parameter for name, parameter in names.items()}


def set_adapters(model, folder):
    """Every arm starts from the saved adapters, whose B is not zero: else the gradient of A would be."""
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/start.safetensors")
    parameters = adapter_parameters(model)
    assert parameters.keys() == saved.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(saved[name])


def build_trainer(arm, folder, sizes, bits, device, output, steps, group=GROUP, rollout_func=None):
    """A trainer of one arm, with the settings that all arms share."""
    fields = {
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": sizes.batch,
        "gradient_accumulation_steps": sizes.prompts * group // sizes.batch,
        "num_generations": group,
        "max_completion_length": sizes.completion,
        "beta": 0.0,
        "learning_rate": 1e-5,
        "max_grad_norm": 0.0,  # gradients are compared as they are
        "gradient_checkpointing": True,
        "bf16": device != "cpu",
        "use_cpu": device == "cpu",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    if arm == "unsloth":
        from unsloth import FastLanguageModel  # first: it patches TRL

        longest = sizes.prompt + sizes.completion
        options = {"load_in_4bit": bool(bits), "full_finetuning": False, "fast_inference": False}
        model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=longest, **options)
        adapters = {"r": 16, "lora_alpha": 16, "lora_dropout": 0, "target_modules": LINEARS, "bias": "none"}
        model = FastLanguageModel.get_peft_model(model, **adapters, use_gradient_checkpointing="unsloth")
    else:
        model = load(folder, bits, device)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer_class, config_class = GRPOTrainer, GRPOConfig
    arguments = {}
    if arm == "ours":
        from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

        trainer_class, config_class = DrGRPOTrainer, DrGRPOConfig
    else:
        fields |= {"loss_type": "dr_grpo", "scale_rewards": "none"}
    if arm == "stock, continuous batching":
        fields["use_transformers_continuous_batching"] = True
    if arm != "unsloth":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        arguments["peft_config"] = adapter_config()
    if rollout_func is not None:
        arguments["rollout_func"] = rollout_func
    model.generation_config.eos_token_id = None
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(**fields),
        train_dataset=Dataset.from_dict({"prompt": prompts_of(sizes)}),
        processing_class=tokenizer,
        **arguments,
    )
    set_adapters(trainer.model, folder)
    return trainer


# The specification --------------------------------------------------------------------------------------------------


def prepare(shape, folder, sizes, bits, device):
    """Save random weights, a tokenizer and adapters, and the gradient of the first step in float32."""
    import torch
    from model_runs import config_of
    from peft import get_peft_model
    from safetensors.torch import save_file
    from tiny import tiny_tokenizer
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype="float32" if device == "cpu" else "bfloat16")
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    if bits:
        del model
        model = in_full_precision(load(folder, bits, device))
    model = get_peft_model(model.float(), adapter_config())
    start = {}
    for name, parameter in adapter_parameters(model).items():
        parameter.data = torch.randn_like(parameter) * 0.02
        start[name] = parameter.data.to(torch.bfloat16).float()  # some arms hold adapters in bfloat16
        parameter.data.copy_(start[name])
    save_file({name: value.cpu() for name, value in start.items()}, f"{folder}/start.safetensors")
    rows = sizes.prompts * GROUP
    for prompt in prompts_of(sizes):
        completions = fixed_completions(prompt, sizes.completion, GROUP)
        rewards = reward([prompt] * GROUP, completions)
        mean = sum(rewards) / GROUP
        prompt_ids = tokenizer(prompt)["input_ids"]
        for completion, value in zip(completions, rewards, strict=True):
            if value == mean:
                continue
            ids = torch.tensor([prompt_ids + completion], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt_ids) - 1 : -1]
            log_probs = logits.log_softmax(dim=-1).gather(-1, ids[:, len(prompt_ids) :, None])
            # Dr. GRPO on policy: advantages without a standard deviation, over a constant.
            loss = -(value - mean) * (log_probs - log_probs.detach()).exp().sum() / (rows * sizes.completion)
            loss.backward()
    gradients = {name: p.grad.float().cpu() for name, p in adapter_parameters(model).items()}
    save_file(gradients, f"{folder}/gradient.safetensors")
    norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    return {"norm": norm, "device": "CPU" if device == "cpu" else torch.cuda.get_device_name()}


def in_full_precision(model):
    """The model whose 4-bit layers hold the weights that they stand for, in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
    for owner in (model, model.config):
        vars(owner).pop("quantization_config", None)
    model.is_quantized = model.is_loaded_in_4bit = False
    return model


# What each process does ---------------------------------------------------------------------------------------------


class Watch:
    """Seconds of steps and generations, and gradients: a callback for any TRL."""

    @staticmethod
    def of(trainer, device, note=lambda watch: None):
        import torch
        from transformers import TrainerCallback

        def now():
            if device != "cpu":
                torch.cuda.synchronize()
            return time.perf_counter()

        class Callback(TrainerCallback):
            def __init__(self):
                self.times, self.generations, self.gradients = [], [], {}

            def on_train_begin(self, *args, **kwargs):
                self.times.append(now())

            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                parameters = adapter_parameters(model)
                if state.global_step == 0:
                    self.gradients = {name: p.grad.detach().float().cpu() for name, p in parameters.items()}

            def on_step_end(self, *args, **kwargs):
                self.times.append(now())
                if len(self.generations) > 1:
                    note(self)

        watch = Callback()
        generate = trainer._generate

        def timed(*args, **kwargs):
            begin = now()
            result = generate(*args, **kwargs)
            watch.generations.append(now() - begin)
            return result

        trainer._generate = timed
        trainer.add_callback(watch)
        return watch


def peak(device):
    import torch

    return {} if device == "cpu" else {"peak_bytes": torch.cuda.max_memory_allocated()}


def gradient(arm, folder, sizes, bits, device, output):
    """How far the gradient of the first step is from the specification."""
    from safetensors.torch import load_file

    given = rollouts(sizes.completion, GROUP)
    trainer = build_trainer(arm, folder, sizes, bits, device, output, 1, rollout_func=given)
    watch = Watch.of(trainer, device)
    trainer.train()
    expected = load_file(f"{folder}/gradient.safetensors")
    apart = sum((watch.gradients[name] - value).square().sum().item() for name, value in expected.items()) ** 0.5
    norms = [sum(g.square().sum().item() for g in each.values()) ** 0.5 for each in (watch.gradients, expected)]
    product = sum((watch.gradients[name] * value).sum().item() for name, value in expected.items())
    return {"difference": apart / norms[1], "cosine": product / (norms[0] * norms[1]), "norm": norms[0]}


def speed(arm, folder, sizes, bits, device, output):
    """Seconds by phase, tokens per second and the peak of memory; written after each step, in case that time ends."""
    trainer = build_trainer(arm, folder, sizes, bits, device, output, SPEED_STEPS)

    def write(watch):
        write_result(Path(output).parent, _seconds(watch, sizes, trainer, device))

    watch = Watch.of(trainer, device, write)
    trainer.train()
    return _seconds(watch, sizes, trainer, device)


def _seconds(watch, sizes, trainer, device):
    """Medians of all steps but the first."""
    steps = [end - begin for begin, end in itertools.pairwise(watch.times)]
    step, generation = statistics.median(steps[1:]), statistics.median(watch.generations[1:])
    tokens = sizes.prompts * GROUP * sizes.completion
    seconds = {"first_step_s": steps[0], "step_s": step, "generation_s": generation, "rest_s": step - generation}
    rates = {"steps": len(steps), "tokens_per_s": tokens / step, "generated_per_s": tokens / generation}
    used = {"speed": trainer.fast_path.speed.facts()} if hasattr(trainer, "fast_path") else {}
    return {**seconds, **rates, **peak(device), **used}


def memory(arm, folder, sizes, bits, device, output):
    """Peak of memory and seconds of a step over two long rows."""
    import torch

    results = []
    for completion in LONG if device != "cpu" else (32,):
        long = Sizes(sizes.prompt, completion, prompts=1, batch=1)
        result = {"completion": completion}
        try:
            given = rollouts(completion, 2)
            trainer = build_trainer(arm, folder, long, bits, device, output, 1, group=2, rollout_func=given)
            watch = Watch.of(trainer, device)
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            trainer.train()
            result |= {"step_s": watch.times[-1] - watch.times[0], **peak(device)}
            del trainer
        except torch.OutOfMemoryError as error:
            result["stopped_by"] = f"out of memory: {str(error).splitlines()[0]}"
        results.append(result)
        if device != "cpu":
            torch.cuda.empty_cache()
    return {"rows": results}


# One call -----------------------------------------------------------------------------------------------------------


def environment(arm, packages, scratch):
    """The environment of an arm's process: its packages come before those that are installed."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "benchmarks")]
    if packages is not None:
        # Unsloth's TRL hides the newer one, whose folder has what both need.
        names = ("unsloth", "trl") if arm == "unsloth" else ("trl",)
        paths = [*(str(packages / name) for name in names), *paths]
    quiet = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    quiet |= {"UNSLOTH_COMPILE_LOCATION": f"{scratch}/unsloth", "TMPDIR": scratch, "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}


def run_alone(task, arm, arguments, work, seconds):
    """The result of a task in a fresh process, or why there is none."""
    result = Path(work, "result.json")
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--task", task, "--arm", arm, "--model", arguments.model, "--work", work]
    begun = time.monotonic()
    try:
        process = subprocess.run(
            [*command, *(["--small"] if arguments.small else [])],
            env=environment(arm, arguments.packages, work),
            cwd=work,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        lines = process.stderr.strip().splitlines() or ["no message"]
        error = None if process.returncode == 0 else lines[-1]
        if error:
            print("\n".join(lines[-25:]), file=sys.stderr, flush=True)
    except subprocess.TimeoutExpired:
        error = f"stopped after {seconds:.0f} s"
    values = json.loads(result.read_text()) if result.exists() else {}
    return {"task": task, "arm": arm, "seconds": round(time.monotonic() - begun, 1), **values} | (
        {"error": error} if error else {}
    )


def run_task(arguments):
    """Run one arm in a fresh process, and write its result to a file."""
    device = "cpu" if arguments.small else "cuda"
    sizes = SMALL if arguments.small else Sizes()
    bits = 4 if arguments.model in IN_FOUR_BITS else 0
    folder = f"{arguments.work}/model"
    if arguments.task == "prepare":
        values = prepare(arguments.model, folder, sizes, bits, device)
    else:
        task = {"gradient": gradient, "speed": speed, "memory": memory}[arguments.task]
        values = task(arguments.arm, folder, sizes, bits, device, f"{arguments.work}/out")
    write_result(arguments.work, values)


def write_result(work, values):
    Path(work, "result.json").write_text(json.dumps(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3 1.7B", help="Qwen3 1.7B, or Qwen3 4B in 4 bits")
    parser.add_argument("--tasks", nargs="+", choices=("gradient", "speed", "memory"), default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--packages", type=Path, help="folder that --collect has filled")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="download the packages, and end")
    parser.add_argument("--output", type=Path, help="JSON file (default: recipes/results/rival.json)")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    for name in ("task", "arm", "work"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collect:
        return collect(arguments.collect)
    if arguments.small:
        arguments.model = "tiny Qwen3"
    if arguments.task:
        return run_task(arguments)
    if arguments.small and arguments.output is None:
        parser.error("--small: got no --output; expected a file. Its numbers do not belong among the results.")
    if arguments.packages is not None:
        arguments.packages = arguments.packages.resolve()
    end = time.monotonic() + CALL_SECONDS
    lines = []
    with tempfile.TemporaryDirectory() as work:
        tasks = [("prepare", "specification"), *itertools.product(arguments.tasks, arguments.arms)]
        for task, arm in tasks:
            seconds = None if arguments.small else min(TASK_SECONDS[task], end - time.monotonic())
            if seconds is not None and seconds < 10:
                lines.append({"task": task, "arm": arm, "error": "the time of this call was over"})
            else:
                lines.append(run_alone(task, arm, arguments, work, seconds))
            print(json.dumps(lines[-1]), flush=True)
    sys.path.insert(0, str(ROOT))
    from trl_drgrpo.upstream.versions import installed_versions, provenance

    sizes = asdict(SMALL if arguments.small else Sizes())
    about = {**provenance("make rival"), "versions": installed_versions(), "packages": PACKAGES["unsloth"]}
    output = arguments.output or ROOT / "recipes" / "results" / "rival.json"
    earlier = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"calls": []}
    call = {"model": arguments.model, "sizes": sizes, **about, "lines": lines}
    output.write_text(json.dumps({"calls": [*earlier["calls"], call]}, indent=1) + "\n", encoding="utf-8")
    return any("error" in line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
