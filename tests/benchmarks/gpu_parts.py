"""The parts of `gpu.py`, each in a process of its own: `gpu_parts.py NAME --output FILE`. A line is written as soon as
it is known, so that a part that is stopped keeps what it has measured."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench import now
from fast_path import Case, build_model, build_trainer
from generation import seconds as generate
from model_runs import GROUP, Size, config_of, keys_of, limited_to, model_of, run
from transformers import TrainerCallback
from transformers import logging as transformers_logging

from trl_drgrpo.features.fast_path.packing import pack_rows
from trl_drgrpo.features.fast_path.sharing import attention_pair_cost, forward_cost
from trl_drgrpo.single_gpu.memory import Planner
from trl_drgrpo.single_gpu.memory.setup import from_keys
from trl_drgrpo.upstream.batches import TokenBatch

ROOT = Path(__file__).parents[2]
# Of the largest difference that is still rounding: autocast to bfloat16 keeps 8 bits of a number.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


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


def parity(device, small, line):
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


def tests(device, small, line):
    """The tests that are marked gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/trainer/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    line({"summary": summary})
    if done.returncode:
        raise SystemExit(f"pytest: {summary}")


def _has_bitsandbytes():
    return importlib.util.find_spec("bitsandbytes") is not None


def training(device, small, line):
    """Seconds of a step by phase, tokens per second, planned and measured memory: ours and stock TRL's."""
    runs = [("1.5B", "lora"), ("1.5B", "full"), ("7B", "qlora"), ("1.5B", "qlora"), ("7B", "lora")]
    size = Size()
    if small:
        runs, size = [("tiny", method) for method in ("lora", "full", "qlora")], Size(24, 8, 8, 16)
    for shape, method in runs:
        if method == "qlora" and not _has_bitsandbytes():
            line({"shape": shape, "method": method, "arm": "all", "stopped_by": "bitsandbytes is not installed"})
            continue
        for arm in ("ours", "TRL, dr_grpo, no std", "TRL, default"):
            line(run(shape, method, arm, size, device))


def generation(device, small, line):
    """Tokens per second of sampling G completions per prompt: transformers' loop, ours, vLLM."""
    shapes = ["tiny"] if small else ["1.5B", "7B"]
    tokens, prompts, width = (8, 2, 24) if small else (128, 4, 512)
    for shape in shapes:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
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
        if importlib.util.find_spec("vllm") is not None and device != "cpu":
            line({"shape": shape, "backend": "vLLM", "prompt": width, "tokens_per_s": _vllm(shape, prompts, width)})


def _vllm(shape, prompts, width, tokens=128):
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # an extra

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(shape)
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        engine = LLM(folder, skip_tokenizer_init=True, load_format="dummy", gpu_memory_utilization=0.6)
        params = SamplingParams(n=GROUP, max_tokens=tokens, ignore_eos=True, detokenize=False)
        ids = torch.randint(100, 1000, (prompts, width)).tolist()
        asked = [{"prompt_token_ids": row} for row in ids]
        engine.generate(asked, params)
        start = now("cuda")
        engine.generate(asked, params)
        return prompts * GROUP * tokens / (now("cuda") - start)


def limits(device, small, line):
    """Does a run fit where the plan says so? On a card that is limited to 24 and 16 GB."""
    runs = [
        (24, "7B", "qlora", Size(256, 256, 4, 16)),
        (24, "1.5B", "full", Size(256, 256, 4, 16)),
        (16, "1.5B", "lora", Size(256, 256, 8, 16)),
        (16, "1.5B", "full", Size(256, 256, 4, 16)),
    ]
    if small:
        runs = [(1, "tiny", "lora", Size(24, 8, 8, 16))]
    for gigabytes, shape, method, size in runs:
        if method == "qlora" and not _has_bitsandbytes():
            continue
        setup = from_keys(keys := keys_of(method, size, device), size.prompt, device)
        with limited_to(gigabytes, device):
            total = Planner(config_of(shape), setup).estimate(setup).total
        result = run(shape, method, "ours", size, device, steps=2, gigabytes=gigabytes)
        fits = total <= gigabytes * 1e9
        line({"gigabytes": gigabytes, "batch": keys["per_device_train_batch_size"], "plan_fits": fits, **result})


def costs(device, small, line):
    """What one more forward and backward costs, in tokens, and a masked query-key pair: the planner's constants."""
    shape, widths = ("tiny", (16, 32, 64)) if small else ("0.5B", (64, 256, 1024, 2048, 4096))
    model = model_of(shape, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device).train()
    best = {}
    for width in widths:
        ids = torch.randint(10, 500, (2, width), device=device)
        half = width // 2
        tokens = TokenBatch(ids, torch.ones_like(ids), width - half)
        packed = pack_rows(tokens, [(0, 1)])  # one pack of about this many tokens
        count, seen = packed.input_ids.numel(), []
        for _ in range(4):
            start = now(device)
            out = model.base_model(
                input_ids=packed.input_ids, attention_mask=packed.attention_mask, position_ids=packed.position_ids
            )
            out.last_hidden_state.float().pow(2).mean().backward()
            model.zero_grad(set_to_none=True)
            seen.append(now(device) - start)
        best[count] = min(seen)
        line({"tokens": count, "seconds": best[count]})
    tokens = torch.tensor([[1.0, n, n * n] for n in best], dtype=torch.float64)
    seconds = torch.tensor(list(best.values()), dtype=torch.float64).unsqueeze(1)
    fixed, each, pair = torch.linalg.lstsq(tokens / seconds, torch.ones_like(seconds)).solution.squeeze(1).tolist()
    assumed = attention_pair_cost(model.config, device)
    line(
        {
            "forward_cost_tokens": fixed / each,
            "assumed_forward_cost": forward_cost(device),
            "pair_cost_tokens": pair / each,
            "assumed_pair_cost": assumed,
        }
    )


def compile(device, small, line):
    """`torch_compile=True` in the trainer: that it runs, and what a step takes then."""
    shape, size = ("tiny", Size(24, 8, 8, 16)) if small else ("0.5B", Size(256, 128, 8, 16))
    for compiled in (False, True):
        result = run(shape, "full", "ours", size, device, steps=3, torch_compile=compiled)
        line({"torch_compile": compiled, **result})


def nccl(device, small, line):
    """One process under torchrun: DDP and its collectives, the same losses as without."""
    size = Size(24, 8, 8, 16) if small else Size(64, 32, 8, 16)
    alone = run("tiny", "full", "ours", size, device)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "worker.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--master_port=29613"]
        command += [__file__, "nccl_worker", "--output", str(output), *(["--small"] if small else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"torchrun: {done.stderr.strip().splitlines()[-1]}")
        worker = json.loads(output.read_text())[0]
    norms, theirs = alone["grad_norms"], worker["grad_norms"]
    same = any(norms) and all(abs(a - b) <= 1e-3 * a for a, b in zip(norms, theirs, strict=True))
    line({"backend": worker["backend"], "grad_norms": theirs, "alone": norms, "same": same})
    if not same:
        raise SystemExit(f"nccl: gradient norms {theirs} with DDP, {norms} without")


def nccl_worker(device, small, line):
    size = Size(24, 8, 8, 16) if small else Size(64, 32, 8, 16)
    result = run("tiny", "full", "ours", size, device)
    line({**result, "backend": torch.distributed.get_backend()})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    device = "cpu" if arguments.small else "cuda"
    if arguments.small:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.backends.cuda.matmul.allow_tf32 = False
    lines = []

    def line(values):
        lines.append(values)
        arguments.output.write_text(json.dumps(lines))

    parts = (parity, tests, training, generation, limits, costs, compile, nccl, nccl_worker)
    {part.__name__: part for part in parts}[arguments.part](device, arguments.small, line)


if __name__ == "__main__":
    main()
