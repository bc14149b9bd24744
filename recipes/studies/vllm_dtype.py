"""The dtype of vLLM's engine under a trainer in float32.

Question: how far are the log-probabilities of vLLM from the trainer's while a pretrained model learns, and does its
engine's dtype explain it? Arms: the engine decides (`dtype="auto"`, which computes a checkpoint in float32 in
bfloat16), and an engine in float32. SmolLM2-135M-Instruct with LoRA of rank 16, float32 in the checkpoint and in the
trainer, a colocated engine with adapters, on the larger of two numbers as in `chat_model.py`. Measure: the difference
of the log-probabilities of sampled tokens in each step, its mean and its maximum in nats; held-out accuracy after the
last step.

Run: in the environment of `make test-vllm`, where vLLM is.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before TRL is imported
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    import vllm_cpu

    vllm_cpu.prepare()

from frame import Results, Row, Run, Study, main, table
from chat_model import SETTINGS as CHAT_SETTINGS
from chat_model import accuracy, is_correct, training_rows
from small_models import SMALL_RUN
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer, lora_preset
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.demo.smollm2 import smollm2_folder

TASK = "larger"
GAP = "sampling/sampling_logp_difference"
ENGINES = {"auto": '`dtype="auto"`: bfloat16', "float32": '`dtype="float32"`'}
SHOWN_STEPS = (1, 2, 3, 4, 5, 6, 12)
SETTINGS: dict[str, Any] = {
    "engines": list(ENGINES),
    "steps": 12,
    "learning_rate": 3e-4,
    "num_generations": 8,
    "prompts": 2,
    "different_prompts": CHAT_SETTINGS["different_prompts"],
    "held_out": CHAT_SETTINGS["held_out"],
    "answers": CHAT_SETTINGS["answers"],
    "tasks": {TASK: {"longest": CHAT_SETTINGS["tasks"][TASK]["longest"]}},
}
QUICK = {"steps": 1, "num_generations": 2, "different_prompts": 4, "held_out": 2, "answers": 1}


def reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(is_correct(completion[0]["content"], expected)) for completion, expected in pairs]


def train(settings: dict[str, Any], folder: Path, seed: int, dtype: str) -> list[Row]:
    """Train with an engine of one dtype."""
    import vllm_cpu

    vllm_cpu.ENGINE["dtype"] = dtype
    model_folder = smollm2_folder()
    args = DrGRPOConfig(
        output_dir=str(folder / f"{dtype}-{seed}"),
        overwrite_output_dir=True,
        per_device_train_batch_size=settings["prompts"] * settings["num_generations"],
        num_generations=settings["num_generations"],
        max_steps=settings["steps"],
        max_completion_length=settings["tasks"][TASK]["longest"],
        learning_rate=settings["learning_rate"],
        seed=seed,
        run_log=False,
        run_warnings=False,
        **vllm_cpu.COLOCATE,
        **SMALL_RUN,
    )
    trainer = DrGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
        reward_funcs=reward,
        args=args,
        train_dataset=training_rows(TASK, settings, seed),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        peft_config=lora_preset("lora"),
    )
    trainer.remove_callback(PrinterCallback)
    before = accuracy(trainer.model, TASK, settings)
    begun = time.process_time()
    trainer.train()
    cpu_seconds = time.process_time() - begun
    logs = [log for log in trainer.state.log_history if f"{GAP}/mean" in log]
    row: Row = {"engine": dtype, "seed": seed, "cpu_seconds": round(cpu_seconds, 1)}
    for statistic in ("mean", "max"):
        row[statistic] = [float(f"{log[f'{GAP}/{statistic}']:.3g}") for log in logs]
    row["reward"] = [round(log["reward"], 3) for log in logs]
    row["least_ratio"] = min(log["sampling/importance_sampling_ratio/min"] for log in logs)
    row["sync_bytes"] = logs[-1]["sampling/sync_bytes"]
    row["sync_ms"] = round(1000 * statistics.median(log["sampling/sync_seconds"] for log in logs))
    row["accuracy"] = [before, accuracy(trainer.model, TASK, settings)]
    return [row]


def measure(run: Run) -> None:
    calls = [(seed, dtype) for seed in run.seeds for dtype in run.settings["engines"]]
    run.each("runs", ("seed", "engine"), calls, train)


def report(results: Results) -> list[str]:
    """The differences by step; then what else the runs say."""
    steps = [step for step in SHOWN_STEPS if step <= results["settings"]["steps"]]
    gaps: list[list[str]] = []
    others: list[list[str]] = []
    for row in results["runs"]:
        name = [ENGINES[row["engine"]], str(row["seed"])]
        for statistic in ("mean", "max"):
            gaps.append([*name, statistic, *(f"{row[statistic][step - 1]:.2g}" for step in steps)])
        before, after = (f"{100 * share:.0f}%" for share in row["accuracy"])
        cost = [f"{row['sync_bytes']:,.0f}", f"{row['sync_ms']}", f"{row['cpu_seconds']:.0f}"]
        others.append([*name, f"{before} to {after}", f"{row['least_ratio']:.3f}", *cost])
    measures = ("held-out accuracy", "least ratio of the correction", "bytes a sync", "ms a sync", "CPU s")
    return [
        table(["engine", "seed", "apart, nats", *(f"step {step}" for step in steps)], gaps),
        table(["engine", "seed", *measures], others),
    ]


def draw(results: Results) -> Any:
    """The mean difference over the steps, a line for each run."""
    figure, (axes,) = new_figure(1, 1, 6, 3.2)
    for row in results["runs"]:
        color = COLORS[list(ENGINES).index(row["engine"])]
        label = ENGINES[row["engine"]].replace("`", "") if row["seed"] == 0 else None
        axes.semilogy(range(1, 1 + len(row["mean"])), row["mean"], color=color, label=label)
    axes.set(xlabel="step", ylabel="log-probabilities apart, nats")
    axes.legend(frameon=False)
    return figure


STUDY = Study("vllm_dtype", "vllm", 2, SETTINGS, QUICK, measure, report, draw)

if __name__ == "__main__":
    main(STUDY)
