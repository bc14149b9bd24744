"""Everything that only a GPU can say, in one command: no network, under ten minutes.

Each part runs in a process of its own with a time limit: one that fails, or takes too long, is recorded as such and
the next one runs. A line is written as soon as it is known, so that a part that is stopped keeps what it has measured.
Results go to `recipes/results/gpu.json`, and are printed as the evidence page shows them.

Run: `make gpu` on a machine with CUDA. `--small` runs every part with tiny shapes on a CPU: it shows that the script
works and says nothing about a GPU.
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
from pathlib import Path

import torch
from bench import command_line, quietly
from fast_path import Case, build_model, build_trainer
from generation import seconds as generate
from model_runs import GROUP, Size, model_of, run, vllm_trainer
from transformers import TrainerCallback

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
    arms = ("ours", "TRL, dr_grpo, no std")
    runs = [(shape, method, arm) for shape, method in (("1.5B", "lora"), ("7B", "qlora")) for arm in arms]
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


# In the order of their weight, with seconds that each may take on a GPU.
PARTS = {hardware: 30, parity: 60, training: 330, generation: 90, vllm: 110}


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
            error = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        lines = json.loads(output.read_text()) if output.exists() else []
        result = {"seconds": round(time.monotonic() - start, 1), "lines": lines}
        return result if error is None else {**result, "error": error}


def table(results):
    """Markdown of what matters to a reader: seconds and memory by arm, then generation by itself."""
    head = ("model", "method", "trainer", "step, s", "generation, s", "rest, s", "tokens/s", "peak, GB", "planned, GB")
    rows = [head, ("---",) * len(head)]
    for line in results["parts"]["training"]["lines"]:
        cells = [line["shape"], line["method"], line["arm"]]
        if "stopped_by" in line:
            rows.append((*cells, line["stopped_by"], *[""] * 5))
            continue
        seconds = [f"{line[name]:.2f}" for name in ("step_s", "generation_s", "rest_s")]
        memory = [f"{line[name] / 1e9:.2f}" if name in line else "" for name in ("measured_bytes", "planned_bytes")]
        rows.append((*cells, *seconds, f"{line['tokens_per_s']:.0f}", *memory))
    for line in results["parts"]["generation"]["lines"]:
        name = f"generation alone, {line['backend']}"
        rows.append((line["shape"], "none", name, "", "", "", f"{line['tokens_per_s']:.0f}", "", ""))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    parser = command_line(__doc__, pairs=0)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: recipes/results/gpu.json)")
    parser.add_argument("--part", choices=[part.__name__ for part in PARTS], help=argparse.SUPPRESS)
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
    parts = {}
    for part, seconds in PARTS.items():
        found = parts[part.__name__] = run_part(part.__name__, seconds, arguments.small)
        print(f"{part.__name__:12}{found['seconds']:>7.1f} s  {found.get('error', '')}", flush=True)
        for values in found["lines"]:
            print("   ", json.dumps(values), flush=True)
        if part is hardware and "error" in found:
            sys.exit("gpu: got no CUDA device; expected one. --small runs everything with tiny shapes on the CPU.")
    facts = parts.pop("hardware")["lines"][0]
    about = {"hardware": facts, **provenance("make gpu"), "versions": installed_versions(PACKAGES)}
    output = arguments.output or ROOT / "recipes" / "results" / "gpu.json"
    output.write_text(json.dumps({**about, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    print(table({**about, "parts": parts}))
    return any("error" in found for found in parts.values())


if __name__ == "__main__":
    sys.exit(main())
