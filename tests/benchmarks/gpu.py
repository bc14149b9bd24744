"""Everything that only a GPU can say, in two calls of under ten minutes each, without a network.

Each part runs in a process of its own with a time limit: one that fails, or takes too long, is recorded as such and
the next one runs. A line is written as soon as it is known, so that a part that is stopped keeps what it has measured.
Results go to `recipes/results/gpu.json`, and are printed as the evidence page shows them. A second call on the same
card and commit adds its parts to those of the first; any other call stands behind it.

Run: `make gpu`, then `make gpu CALL=2`, on a machine with CUDA; or this file with `--parts adapters lengths`.
`--small` runs every part with tiny shapes on a CPU: it shows that the script works and says nothing about a GPU.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from bench import command_line, now, quietly
from fast_path import Case, build_model, build_trainer
from generation import seconds as generate
from model_runs import GROUP, Size, arm_trainer, config_of, keys_of, model_of, run, vllm_trainer
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_drgrpo.features.fast_path.decoding import forwards
from trl_drgrpo.features.fast_path.speed import Speed, SpeedPart
from trl_drgrpo.single_gpu.memory import Planner
from trl_drgrpo.single_gpu.memory.memory_settings import from_keys
from trl_drgrpo.upstream.versions import installed_versions, provenance

ROOT = Path(__file__).parents[2]
PACKAGES = ("trl-drgrpo", "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
SYNC = ("sampling/sync_seconds", "sampling/sync_bytes")
# Of the largest difference that is still rounding: autocast to bfloat16 keeps 8 bits of a number.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


def hardware(device, line):
    if device == "cpu":
        return line({"device": "CPU, tiny shapes"})
    found = torch.cuda.get_device_properties(0)
    facts = {"cuda": torch.version.cuda, "bfloat16": torch.cuda.is_bf16_supported()}
    return line({"device": found.name, "bytes": found.total_memory, **facts})


class Gradients(TrainerCallback):
    """The gradient of every optimizer step, on the CPU."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.steps.append(torch.cat([gradient.float().flatten().cpu() for gradient in gradients]))


def _gradients(kind, dtype, device, **settings):
    case = Case("heavy", 0.3, prompt=(64, 96), completion=96, prompts=4)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(256, 4, 1024, device)
        trainer = build_trainer(kind, case, model, folder, 1, 8, device, bf16=dtype == "bfloat16", **settings)
        seen = Gradients()
        trainer.add_callback(seen)
        trainer.train()
    return seen.steps[-1]


def parity(device, line):
    """The gradient of one step: ours against stock TRL's with both switches; TRL's default as the control."""
    for dtype, tolerance in TOLERANCES.items():
        ours, stock = (_gradients(kind, dtype, device) for kind in ("ours", "stock"))
        control = _gradients("stock", dtype, device, loss_type="dapo", scale_rewards="group")
        difference = ((ours - stock).norm() / stock.norm()).item()
        apart = ((control - stock).norm() / stock.norm()).item()
        passed = difference < tolerance < 0.1 < apart
        line({"dtype": dtype, "difference": difference, "control": apart, "passed": passed})
        if not passed:
            raise SystemExit(f"parity in {dtype}: ours differs by {difference:.1e}, the control by {apart:.1e}")


def training(device, line):
    """Seconds of a step by phase, tokens per second, planned and measured memory: ours and stock TRL's."""
    arms = ("ours", "TRL, dr_grpo, no std")  # ours of both models first: what time is left goes to the others
    runs = [(shape, method, arm) for arm in arms for shape, method in (("1.5B", "lora"), ("7B", "qlora"))]
    runs += [("1.5B", "full", arm) for arm in arms] + [("1.5B", "lora", "TRL, default")]
    size = Size()
    if device == "cpu":
        runs, size = (
            [("tiny", method, arm) for method in ("lora", "full", "qlora") for arm in arms],
            Size(24, 8, 8, 16),
        )
    for shape, method, arm in runs:
        if method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            line({"shape": shape, "method": method, "arm": arm, "stopped_by": "bitsandbytes is not installed"})
        else:
            line(run(shape, method, arm, size, device))


def generation(device, line):
    """Tokens per second of sampling G completions per prompt: transformers' loop and ours."""
    shapes, dtype, (tokens, prompts, width) = ["1.5B", "7B"], torch.bfloat16, (128, 4, 512)
    if device == "cpu":
        shapes, dtype, (tokens, prompts, width) = ["tiny"], torch.float32, (8, 2, 24)
    for shape in shapes:
        model = model_of(shape, dtype=dtype, device=device).eval()
        for backend in ("transformers", "ours"):
            arguments = (model, width, prompts, device, backend == "ours")
            generate(*arguments, max_new_tokens=4)  # warms up
            seconds, _ = generate(*arguments, max_new_tokens=tokens)
            speed = prompts * GROUP * tokens / seconds
            line({"shape": shape, "backend": backend, "prompt": width, "tokens_per_s": speed})
        del model
        if device != "cpu":
            torch.cuda.empty_cache()


def vllm(device, line):
    """A colocated engine of vLLM, which computes in bfloat16: log-probabilities apart, tokens per second, syncs."""
    if importlib.util.find_spec("vllm") is None:
        return line({"stopped_by": "vllm is not installed"})
    shape, size, share = ("1.5B", Size(), 0.3) if device != "cpu" else ("wide heads", Size(24, 8, 8, 16), 0.1)
    name = "sampling/sampling_logp_difference/mean"
    for method, sent in (("lora", "merged"), ("lora", "adapter"), ("qlora", "adapter")):
        with tempfile.TemporaryDirectory() as folder:
            model_of(shape, dtype=torch.bfloat16, device=device).save_pretrained(folder)
            engine = {"use_vllm": True, "vllm_gpu_memory_utilization": share, "vllm_max_model_length": 512}
            trainer = vllm_trainer(folder, method, sent, size, device, **engine)
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if name in entry][1:]  # the first warms up
            means = {key: sum(log[key] for log in logs) / len(logs) for key in (name, *SYNC, "time/tokens_per_s")}
            line({"shape": shape, "method": method, "sent": sent, **means})
            if means[name] > 0.02:
                raise SystemExit(f"{method}, {sent}: log-probabilities are {means[name]:.3f} apart")
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
    return None


def changes(device, line):
    """The tests for GPUs: recordings, the memory that they give back, 4-bit weights, resume."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/trainer/test_gpu.py"]
    done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    line({"tests": done.stdout.strip().splitlines()[-1], "rc": done.returncode})
    if done.returncode:
        raise SystemExit(done.stdout[-2000:])


def _layers_as_they_are(model):
    """Decoding steps of this model run its own layers from here on: neither fused nor with joined adapters."""
    why_not_fused = getattr(forwards, "_why_not_fused", {})
    for tested_model in list(why_not_fused):
        why_not_fused[tested_model] = "the benchmark has switched it off"
    return bool(why_not_fused)


def adapters(device, line):
    """Tokens per second with adapters: fused layers and joined adapters on and off, and without adapters."""
    runs, dtype, (tokens, prompts, width) = [("1.5B", "lora"), ("7B", "qlora")], torch.bfloat16, (128, 4, 256)
    if device == "cpu":
        runs, dtype, (tokens, prompts, width) = [("tiny", "lora"), ("tiny", "qlora")], torch.float32, (8, 2, 24)
    for shape, method in runs:
        base = model_of(shape, method, dtype, device).eval()
        adapted = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)).eval()
        for parameter in adapted.parameters():  # the trainer keeps adapters in float32
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        # Without adapters first: what the next arm switches off stays off.
        arms = {"adapters": nullcontext, "none": adapted.disable_adapter, "adapters, layers as they are": nullcontext}
        for arm, context in arms.items():
            if arm == "adapters, layers as they are" and not _layers_as_they_are(adapted):
                line(
                    {"shape": shape, "method": method, "arm": arm, "stopped_by": "this version has nothing to switch"}
                )
                continue
            speed = Speed(lambda _: None)
            with context(), torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                arguments = (adapted, width, prompts, device, True)
                first, _ = generate(*arguments, max_new_tokens=4)  # warms up
                seconds, _ = generate(*arguments, max_new_tokens=tokens, speed=speed)
            measured = {"tokens_per_s": prompts * GROUP * tokens / seconds, "first_s": first}
            line({"shape": shape, "method": method, "arm": arm, **measured, "speed": speed.facts()})
        del base, adapted
        _empty(device)


def lengths(device, line):
    """Seconds of completions that end anywhere: one token in so many is an end."""
    shape, dtype, (tokens, prompts, width) = "1.5B", torch.bfloat16, (512, 4, 256)
    if device == "cpu":
        shape, dtype, (tokens, prompts, width) = "tiny", torch.float32, (24, 2, 24)
    model = model_of(shape, dtype=dtype, device=device).eval()
    mean_length = tokens // 4
    ends = list(range(1, 1 + model.config.vocab_size // mean_length))
    for backend in ("transformers", "ours"):
        arguments = (model, width, prompts, device, backend == "ours")
        generate(*arguments, max_new_tokens=4)  # warms up
        speed = Speed(lambda _: None)
        seconds, sampled = generate(*arguments, max_new_tokens=tokens, eos_token_id=ends, speed=speed)
        written = (sampled[:, width:] != 0).sum().item()
        dropped = speed.uses[SpeedPart.DROPPED_ROWS]
        measured = {"seconds": seconds, "tokens": written, "longest": sampled.size(1) - width, "dropped_rows": dropped}
        line({"shape": shape, "backend": backend, **measured, "speed": speed.facts()})


def families(device, line):
    """Steps of a hybrid and of a model with sliding windows: ours and stock TRL's."""
    shapes, size = ("hybrid", "windows"), Size(completion=64)
    if device == "cpu":
        shapes, size = ("tiny hybrid", "tiny windows"), Size(24, 8, 8, 16)
    for shape in shapes:
        for arm in ("ours", "TRL, dr_grpo, no std"):
            line(run(shape, "lora", arm, size, device, steps=3))


def _one_row(prompt, completion, device):
    """A micro-batch as TRL hands it to its loss."""
    ids = {"prompt": torch.ones(1, prompt), "completion": torch.ones(1, completion)}
    return {
        **{f"{name}_ids": values.long().to(device) for name, values in ids.items()},
        **{f"{name}_mask": values.long().to(device) for name, values in ids.items()},
        "advantages": torch.ones(1, device=device),
        "num_items_in_batch": torch.tensor(completion, device=device),
    }


def long_rows(device, line):
    """Peak of forward and backward of one long row in 4 bits, with checkpoints on the device and on the host."""
    shape, prompt, completions = ("Qwen3 4B", 512, (8192, 16384, 32256))
    if device == "cpu":
        shape, prompt, completions = "tiny Qwen3", 24, (64, 128)
    size = Size(prompt, completions[-1], batch=1, rows=GROUP)
    keys = keys_of("qlora", size, device)
    setup = from_keys(keys, prompt, device)
    planner = Planner(config_of(shape), setup)
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(shape, "qlora", getattr(torch, keys["dtype"]), device)
        trainer = arm_trainer("ours", model, "qlora", size, folder, 1, device)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        for completion in completions:
            for offload in (False, True) if device != "cpu" else (False,):  # on a CPU there is nowhere to go
                planned = planner.estimate(replace(setup, completion=completion, offload=offload))
                facts = {"shape": shape, "tokens": prompt + completion, "offload": offload}
                elsewhere = ("optimizer state", "roll-outs", "movement watch")  # which only a whole run has
                beside = sum(planned.phases["train"].get(part, 0) for part in elsewhere)
                facts["planned_bytes"] = planned.tensors_of("train") - beside
                trainer.model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
                _empty(device)
                start = now(device)
                try:
                    with trainer.compute_loss_context_manager():
                        loss = trainer.compute_loss(trainer.model, _one_row(prompt, completion, device))
                    loss.backward()
                except torch.OutOfMemoryError as error:
                    facts["stopped_by"] = f"out of memory: {str(error).splitlines()[0]}"
                facts["seconds"] = now(device) - start
                if device != "cpu":
                    facts["measured_bytes"] = torch.cuda.max_memory_allocated()
                trainer.model.zero_grad()
                line(facts)


def _empty(device):
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# Parts of each call, with seconds that each may take on a GPU: first what has changed since an older run.
CALLS = {
    1: {hardware: 20, changes: 130, adapters: 120, lengths: 60, long_rows: 120, families: 100},
    2: {hardware: 20, parity: 60, training: 300, generation: 70, vllm: 110},
}
PARTS = {part: seconds for parts in CALLS.values() for part, seconds in parts.items()}
CALL_SECONDS = 570  # of ten minutes


def run_part(name, seconds, small):
    """The result of a part, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", name, "--output", str(output), *(["--small"] if small else [])]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": folder},  # gigabytes of weights go with it
                capture_output=True,
                text=True,
                timeout=None if small else seconds,
            )
            messages = done.stderr.strip().splitlines() or ["no message"]
            error = None if done.returncode == 0 else messages[-1]
            if error:
                print("\n".join(messages[-25:]), file=sys.stderr, flush=True)
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        lines = json.loads(output.read_text()) if output.exists() else []
        result = {"seconds": round(time.monotonic() - start, 1), "lines": lines}
        return result if error is None else {**result, "error": error}


def table(results):
    """Markdown of what matters to a reader: seconds and memory by arm, then generation by itself."""
    head = ("model", "method", "trainer", "step, s", "generation, s", "rest, s", "tokens/s", "peak, GB", "planned, GB")
    rows = [head, ("---",) * len(head)]
    for line in _lines(results, "training", "families"):
        cells = [line["shape"], line["method"], line["arm"]]
        if "stopped_by" in line:
            rows.append((*cells, line["stopped_by"], *[""] * 5))
            continue
        seconds = [f"{line[name]:.2f}" for name in ("step_s", "generation_s", "rest_s")]
        memory = [f"{line[name] / 1e9:.2f}" if name in line else "" for name in ("measured_bytes", "planned_bytes")]
        rows.append((*cells, *seconds, f"{line['tokens_per_s']:.0f}", *memory))
    for line in _lines(results, "generation"):
        name = f"generation alone, {line['backend']}"
        rows.append((line["shape"], "none", name, "", "", "", f"{line['tokens_per_s']:.0f}", "", ""))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def adapters_table(results):
    """Markdown: decoding with adapters, and what fused layers and joined adapters save."""
    rows = [("model", "method", "adapters", "tokens/s"), ("---",) * 4]
    for line in _lines(results, "adapters"):
        rows.append((line["shape"], line["method"], line["arm"], f"{line['tokens_per_s']:.0f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(calls):
    """The tables of all calls, in their order; those without a line are left out."""
    made = [make(call) for call in calls for make in (table, adapters_table)]
    return [text for text in made if text.count("\n") > 1]


def _lines(results, *parts):
    return [line for part in parts for line in results["parts"].get(part, {}).get("lines", ())]


def main():
    parser = command_line(__doc__, pairs=0)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: recipes/results/gpu.json)")
    names = {part.__name__: seconds for part, seconds in PARTS.items()}
    parser.add_argument("--call", type=int, choices=CALLS, default=1, help="the parts of this call (default: 1)")
    parser.add_argument("--parts", nargs="+", choices=list(names), help="these parts in their place")
    parser.add_argument("--seconds", type=float, help="that each part may take, in the place of its own limit")
    parser.add_argument("--part", choices=list(names), help=argparse.SUPPRESS)
    arguments = quietly(parser)
    if arguments.small and arguments.output is None:
        parser.error("--small: got no --output; expected a file. Its numbers do not belong among the results.")
    if arguments.part:
        torch.backends.cuda.matmul.allow_tf32 = False
        lines = []

        def line(values):
            lines.append(values)
            arguments.output.write_text(json.dumps(lines))

        return globals()[arguments.part]("cpu" if arguments.small else "cuda", line)
    chosen = arguments.parts or [part.__name__ for part in CALLS[arguments.call]]
    end = time.monotonic() + CALL_SECONDS
    parts = {}
    for name in dict.fromkeys(["hardware", *chosen]):
        limit = arguments.seconds or names[name]
        part = parts[name] = run_part(name, min(limit, end - time.monotonic()), arguments.small)
        print(f"{name:12}{part['seconds']:>7.1f} s  {part.get('error', '')}", flush=True)
        for values in part["lines"]:
            print("   ", json.dumps(values), flush=True)
        if name == "hardware" and "error" in part:
            sys.exit("gpu: got no CUDA device; expected one. --small runs everything with tiny shapes on the CPU.")
    facts = parts.pop("hardware")["lines"][0]
    about = {"hardware": facts, **provenance("make gpu"), "versions": installed_versions(PACKAGES)}
    output = arguments.output or ROOT / "recipes" / "results" / "gpu.json"
    calls = json.loads(output.read_text(encoding="utf-8"))["calls"] if output.exists() else []
    if calls and all(calls[-1].get(name) == about[name] for name in ("hardware", "commit", "versions")):
        parts = {**calls.pop()["parts"], **parts}
    calls.append({**about, "parts": parts})
    output.write_text(json.dumps({"calls": calls}, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(tables(calls[-1:])))
    return any("error" in part for part in parts.values())


if __name__ == "__main__":
    sys.exit(main())
