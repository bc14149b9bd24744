r"""The study behind `recipes/process_rewards.md`: process rewards on the demo task, arm by arm, at equal steps.

Every arm trains the demo's model on the demo's problems with the demo's settings; only the reward differs. The
accuracies are sampled on the demo's held-out problems, the curves come from the training logs. Results are written
after every run, and runs that are in the output file already are not repeated.

Run: `python tests/benchmarks/process_rewards.py --output recipes/results/process_rewards.json` (three quarters of an
hour on one core), `--table` prints the table of the page from that file.
"""

import argparse
import functools
import json
import os
import random
import tempfile
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.simplefilter("ignore")

import torch
import transformers
from datasets.utils import disable_progress_bars
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.demo.build import MODEL_DIR
from trl_drgrpo.demo.evaluate import evaluate
from trl_drgrpo.demo.process import line_reward, step_numbers
from trl_drgrpo.demo.progress import ProgressCallback, logged_list_sum_reward
from trl_drgrpo.demo.report import library_versions
from trl_drgrpo.demo.run import training_arguments
from trl_drgrpo.demo.task import check_steps, demonstrate, make_dataset, make_problems, prompt_of
from trl_drgrpo.process_rewards import TokenClassificationScorer, train_prm

PROMPTS_PER_STEP, WINDOW = 8, 10

RULE, PRM = "rule", "prm"
# Arm -> (step reward or None, credit, baseline, outcome weight).
ARMS = {
    "outcome": (None, "return_to_go", "pooled", 1.0),
    "outcome+return_to_go": (RULE, "return_to_go", "pooled", 1.0),
    "outcome+immediate": (RULE, "immediate", "pooled", 1.0),
    "outcome+min_to_go": (RULE, "min_to_go", "pooled", 1.0),
    "steps_return_to_go": (RULE, "return_to_go", "pooled", 0.0),
    "steps_immediate": (RULE, "immediate", "pooled", 0.0),
    "steps_min_to_go": (RULE, "min_to_go", "pooled", 0.0),
    "outcome+return_to_go/none": (RULE, "return_to_go", "none", 1.0),
    "steps_return_to_go/none": (RULE, "return_to_go", "none", 0.0),
    "outcome+prm_return_to_go": (PRM, "return_to_go", "pooled", 1.0),
    "outcome+prm_min_to_go": (PRM, "min_to_go", "pooled", 1.0),
    "prm_return_to_go": (PRM, "return_to_go", "pooled", 0.0),
    "prm_min_to_go": (PRM, "min_to_go", "pooled", 0.0),
}


def labelled_demonstrations(size, split, seed):
    """Rows of `train_prm`: what the demonstrator writes, mistakes included, each line labelled by `check_steps`."""
    rng = random.Random(f"prm/{split}/{seed}")
    rows = []
    for numbers in make_problems(size, split, seed):
        text = demonstrate(numbers, rng)
        rows.append(
            {"prompt": prm_prompt(prompt_of(numbers)), "steps": text.split("\n"), "labels": check_steps(numbers, text)}
        )
    return rows


def prm_prompt(prompt):
    """The sum on a line of its own: without a chat template it would run into the first step."""
    return (prompt if isinstance(prompt, str) else prompt[-1]["content"]) + "\n"


@functools.cache
def small_prm(seed):
    """A token-classification PRM on the demo model's own weights, with its accuracy on held-out demonstrations."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "learning_rate": 1e-3,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 32,
            "per_device_eval_batch_size": 64,
            "seed": seed,
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
        quality = train_prm(
            str(MODEL_DIR),
            labelled_demonstrations(4000, "train", seed),
            folder,
            eval_rows=labelled_demonstrations(1000, "held_out", seed),
            arguments=arguments,
        )
        return TokenClassificationScorer(folder, batch_size=64, name="small_prm", prompt_text=prm_prompt), quality


def train(arm, seed, steps, scorer):
    """One run: the trained model with its tokenizer, and its curves."""
    reward, credit, baseline, outcome_weight = ARMS[arm]
    fields = {"step_separator": ["\n"], "step_credit": credit, "step_baseline": baseline}
    fields = {**fields, "outcome_weight": outcome_weight} if reward else {}
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    progress = ProgressCallback(Console(stderr=True), steps, process=reward is not None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DrGRPOTrainer(
            model=model,
            reward_funcs=logged_list_sum_reward,
            args=training_arguments(Path(folder), seed, steps, **fields),
            train_dataset=make_dataset(PROMPTS_PER_STEP * steps, "train", seed),
            processing_class=tokenizer,
            callbacks=[progress],
            step_reward_funcs={None: None, RULE: line_reward, PRM: scorer}[reward],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model, AutoTokenizer.from_pretrained(MODEL_DIR), progress.curves


def measure(model, tokenizer, problems, seed, scorer=None):
    """Sampled numbers on the held-out problems; with a PRM also what it thinks of the same lines."""
    measured = evaluate(model, tokenizer, problems, sample=True, seed=seed)
    numbers = {"accuracy": measured.accuracy, "length_mean": measured.length_mean}
    numbers |= step_numbers(problems, measured.texts)
    if scorer is not None:
        steps = [text.splitlines(keepends=True) for text in measured.texts]
        scores = scorer(prompts=[prompt_of(numbers) for numbers in problems], steps=steps)
        numbers["prm_reward"] = mean([score for row in scores for score in row if score is not None])
    return numbers


def at_steps(curve, steps):
    """Mean of the last `WINDOW` values of a curve, at every `WINDOW`th step."""
    return {str(step): mean(curve[step - WINDOW : step]) for step in range(WINDOW, steps + 1, WINDOW)}


def mean(values):
    return sum(values) / len(values) if values else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="what to compare")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="training steps of every run")
    parser.add_argument("--eval_size", type=int, default=512, help="held-out problems")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; runs it holds already are not repeated")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table of the file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.output.read_text(encoding="utf-8"))))
        return
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    torch.set_num_threads(1)
    study(options)
    print(table(json.loads(options.output.read_text(encoding="utf-8"))))


def study(options):
    """Run what the file lacks, and write it after every run."""
    settings = {"steps": options.steps, "eval_size": options.eval_size}
    results = {"settings": settings, "versions": library_versions(), "runs": []}
    if options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))
        if results["settings"] != settings:
            raise SystemExit(f"{options.output} holds runs with {results['settings']}, not {settings}")
    done = {(run["arm"], run["seed"]) for run in results["runs"]}
    problems = make_problems(options.eval_size, "held_out")
    before = {}
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, seed) in done:
                continue
            scorer = None
            if ARMS[arm][0] == PRM:
                scorer, quality = small_prm(seed)
                results.setdefault("prm", {})[str(seed)] = rounded(quality)
            if (seed, scorer) not in before:
                shipped = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
                tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
                before[seed, scorer] = measure(shipped, tokenizer, problems, seed, scorer)
            start = time.process_time()
            model, tokenizer, curves = train(arm, seed, options.steps, scorer)
            run = {
                "arm": arm,
                "seed": seed,
                "before": before[seed, scorer],
                "after": measure(model, tokenizer, problems, seed, scorer),
                **{
                    f"{name}_at": at_steps(curves[name], options.steps)
                    for name in ("pass_rate", "length_mean", "steps_mean", "process_reward")
                    if name in curves
                },
                "cpu_seconds": time.process_time() - start,
            }
            results["runs"].append(rounded(run))
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(arm, seed, run["after"], f"{run['cpu_seconds']:.0f} s", flush=True)


def rounded(value):
    """Four digits are more than the noise allows."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def table(results):
    """The table of the page: mean over seeds, and the range, after training."""
    lines = [str(sorted({run["arm"] for run in results["runs"]}))]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
