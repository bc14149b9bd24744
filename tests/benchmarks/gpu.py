"""Everything that only a GPU can say, in one command: no network, under ten minutes.

Each part runs in a process of its own with a time limit: one that fails, or takes too long, is recorded as such and
the next one runs. Results go to `recipes/results/gpu.json`; `--table` prints them as
the evidence page shows them.

Run: `make gpu` on a machine with CUDA. `--small` runs every part with tiny shapes on a CPU: it shows that the script
works and says nothing about a GPU. `--parts parity generation` runs some; earlier results of the others stay.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trl_drgrpo.upstream.versions import installed_versions, provenance

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes" / "results" / "gpu.json"
PARTS = {  # in the order of their weight, with seconds that each may take
    "parity": 60,
    "tests": 90,
    "training": 210,
    "generation": 90,
    "limits": 90,
    "costs": 45,
    "compile": 60,
    "nccl": 60,
}
PACKAGES = ("trl-drgrpo", "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "vllm")


def run_part(name, seconds, small):
    """The result of a part, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "part.json"
        script = Path(__file__).with_name("gpu_parts.py")
        command = [sys.executable, str(script), name, "--output", str(output), *(["--small"] if small else [])]
        paths = [str(ROOT), str(ROOT / "tests" / "support"), str(script.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        start = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
            error = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        lines = json.loads(output.read_text()) if output.exists() else []
        result = {"seconds": round(time.monotonic() - start, 1), "lines": lines}
        return result if error is None else {**result, "error": error}


def hardware(small):
    if small:
        return {"device": "CPU, tiny shapes"}
    code = (
        "import torch, json; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'device': p.name, 'bytes': p.total_memory, 'cuda': torch.version.cuda, "
        "'bfloat16': torch.cuda.is_bf16_supported()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit("gpu: got no CUDA device; expected one. --small runs everything with tiny shapes on the CPU.")
    return json.loads(done.stdout)


def table(results):
    """Markdown of what matters to a reader: speed by method and arm, memory, generation."""
    gib = 2**30
    lines = [
        f"Measured on {results['hardware']['device']} on {results['date']}, `{results['command']}`:",
        "",
        "| model | method | trainer | step, s | generation, s | tokens/s | peak GiB | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in results["parts"].get("training", {}).get("lines", []):
        if "stopped_by" in line:
            cells = [line["stopped_by"], "", "", "", ""]
        else:
            peak = f"{line['measured_bytes'] / gib:.1f}" if "measured_bytes" in line else ""
            cells = [
                f"{line['step_s']:.2f}",
                f"{line['generation_s']:.2f}",
                f"{line['tokens_per_s']:.0f}",
                peak,
                f"{line['planned_bytes'] / gib:.1f}",
            ]
        lines.append("| " + " | ".join([line["shape"], line["method"], line["arm"], *cells]) + " |")
    for line in results["parts"].get("generation", {}).get("lines", []):
        lines.append(f"| {line['shape']} | generation | {line['backend']} | | | {line['tokens_per_s']:.0f} | | |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0, help="parts that would begin later are left out")
    parser.add_argument("--small", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--table", action="store_true", help="print the table of earlier results and stop")
    arguments = parser.parse_args()
    output = arguments.output or RESULTS
    if arguments.small and arguments.output is None:
        parser.error("--small: got no --output; expected a file. Its numbers do not belong among the results.")
    if arguments.table:
        print(table(json.loads(output.read_text())))
        return
    results = {
        "hardware": hardware(arguments.small),
        **provenance("make gpu"),
        "versions": installed_versions(PACKAGES),
        "parts": json.loads(output.read_text())["parts"] if output.exists() else {},
    }
    begun = time.monotonic()
    for name in arguments.parts:
        left = arguments.minutes * 60 - (time.monotonic() - begun)
        if left < 10:
            results["parts"][name] = {"seconds": 0, "lines": [], "error": "no time was left"}
        else:
            seconds = left if arguments.small else min(PARTS[name], left)
            results["parts"][name] = run_part(name, seconds, arguments.small)
        part = results["parts"][name]
        print(f"{name:12}{part['seconds']:>7.1f} s  {len(part['lines'])} lines  {part.get('error', '')}", flush=True)
        for line in part["lines"]:
            print("   ", json.dumps(line), flush=True)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    sys.exit(any("error" in results["parts"][name] for name in arguments.parts))


if __name__ == "__main__":
    main()
