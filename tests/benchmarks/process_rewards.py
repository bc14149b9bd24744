r"""The study behind `recipes/process_rewards.md`: process rewards on the demo task, arm by arm, at equal steps.

Every arm trains the demo's model on the demo's problems with the demo's settings; only the reward differs. The
accuracies are sampled on the demo's held-out problems, the curves come from the training logs. Results are written
after every run, and runs that are in the output file already are not repeated.

Run: `python tests/benchmarks/process_rewards.py --output recipes/results/process_rewards.json` (half an hour on one
core), `--table` prints the table of the page from that file.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.evaluate import evaluate
from trl_drgrpo.labs.demo.process import line_reward, step_numbers
from trl_drgrpo.labs.demo.run import training_arguments
from trl_drgrpo.labs.demo.task import check_steps, demonstrate, list_sum_reward, make_dataset, make_problems, prompt_of
from trl_drgrpo.process_rewards import TokenClassificationScorer, train_prm
from trl_drgrpo.upstream.versions import installed_versions

WINDOW, SHOWN = 10, (20, 40)
CURVES = {
    "pass_rate": "reward",
    "length_mean": "completions/mean_length",
    "zero_signal": "frac_reward_zero_std",
    "steps_mean": "process/steps_mean",
    "process_reward": "process/reward_mean",
}

RULE, PRM = "rule", "prm"


def arm(reward=None, credit="return_to_go", baseline="pooled", outcome_weight=1.0, **fields):
    """What scores the steps, and what the arm changes in the demo's configuration."""
    if reward is not None:
        fields |= {"step_separator": ["\n"], "step_credit": credit, "step_baseline": baseline}
        fields |= {"outcome_weight": outcome_weight}
    return reward, fields


ARMS = {
    "outcome": arm(),
    "outcome+return_to_go": arm(RULE, "return_to_go"),
    "outcome+immediate": arm(RULE, "immediate"),
    "outcome+min_to_go": arm(RULE, "min_to_go"),
    "steps_return_to_go": arm(RULE, "return_to_go", outcome_weight=0.0),
    "steps_immediate": arm(RULE, "immediate", outcome_weight=0.0),
    "steps_min_to_go": arm(RULE, "min_to_go", outcome_weight=0.0),
    "outcome+return_to_go/none": arm(RULE, "return_to_go", "none"),
    "steps_return_to_go/none": arm(RULE, "return_to_go", "none", outcome_weight=0.0),
    "outcome+prm_min_to_go": arm(PRM, "min_to_go"),
    "prm_return_to_go": arm(PRM, "return_to_go", outcome_weight=0.0),
    "prm_min_to_go": arm(PRM, "min_to_go", outcome_weight=0.0),
    # Groups of 2 in place of 8, the same 64 completions per step: most groups have equal outcomes.
    "outcome, G=2": arm(num_generations=2),
    "outcome+min_to_go, G=2": arm(RULE, "min_to_go", num_generations=2),
}


def labeled_demonstrations(size, split, seed):
    """Rows of `train_prm`: what the demonstrator writes, mistakes included, each line labeled by `check_steps`."""
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
            labeled_demonstrations(4000, "train", seed),
            folder,
            eval_rows=labeled_demonstrations(1000, "held_out", seed),
            arguments=arguments,
        )
        return TokenClassificationScorer(folder, batch_size=64, name="small_prm", prompt_text=prm_prompt), quality


def train(name, seed, steps, scorer):
    """One run: the trained model, and its logs step by step."""
    reward, fields = ARMS[name]
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(Path(folder), seed, steps, **fields)
        prompts_per_step = args.per_device_train_batch_size // args.num_generations
        trainer = DrGRPOTrainer(
            model=model,
            reward_funcs=list_sum_reward,
            args=args,
            train_dataset=make_dataset(prompts_per_step * steps, "train", seed),
            processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
            step_reward_funcs={None: None, RULE: line_reward, PRM: scorer}[reward],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model, [logs for logs in trainer.state.log_history if "reward" in logs]


def measure(model, tokenizer, problems, seed, scorer=None):
    """Sampled numbers on the held-out problems; with a PRM also what it thinks of the same lines."""
    measured = evaluate(model, tokenizer, problems, sample=True, seed=seed)
    numbers = {"accuracy": measured.accuracy, "length_mean": measured.length_mean}
    numbers |= step_numbers(problems, measured.texts)
    if scorer is not None:
        lines = [[line for line in text.split("\n") if line.strip()] for text in measured.texts]
        scores = scorer(prompts=[prompt_of(terms) for terms in problems], steps=lines)
        judged = [check_steps(terms, text) for terms, text in zip(problems, measured.texts, strict=True)]
        pairs = [pair for row in zip(scores, judged, strict=True) for pair in zip(*row, strict=True)]
        numbers["prm_reward"] = mean([score for score, _ in pairs])
        numbers["prm_bad_recall"] = mean([float(score < 0.5) for score, right in pairs if not right])
    if samples := [text for text, right in zip(measured.texts, measured.correct, strict=True) if not right][:2]:
        numbers["wrong_samples"] = samples
    return numbers


def curves(logs):
    """Means over every `WINDOW` steps of training."""
    return {
        f"{name}_at": {
            str(end): mean([entry[key] for entry in logs[end - WINDOW : end]])
            for end in range(WINDOW, len(logs) + 1, WINDOW)
        }
        for name, key in CURVES.items()
        if key in logs[0]
    }


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
    results = {"settings": settings, "versions": installed_versions(), "runs": []}
    if options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))
        if results["settings"] != settings:
            raise SystemExit(f"{options.output} holds runs with {results['settings']}, not {settings}")
    done = {(run["arm"], run["seed"]) for run in results["runs"]}
    problems = make_problems(options.eval_size, "held_out")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    before = {}
    for seed in options.seeds:
        for name in options.arms:
            if (name, seed) in done:
                continue
            scorer = None
            if ARMS[name][0] == PRM:
                scorer, quality = small_prm(seed)
                results.setdefault("prm", {})[str(seed)] = rounded(quality)
            if (seed, scorer) not in before:
                shipped = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
                before[seed, scorer] = measure(shipped, tokenizer, problems, seed, scorer)
            start = time.process_time()
            model, logs = train(name, seed, options.steps, scorer)
            run = {
                "arm": name,
                "seed": seed,
                "before": before[seed, scorer],
                "after": measure(model, tokenizer, problems, seed, scorer),
                **curves(logs),
                "cpu_seconds": time.process_time() - start,
            }
            results["runs"].append(rounded(run))
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(name, seed, run["after"], f"{run['cpu_seconds']:.0f} s", flush=True)


def rounded(value):
    """Four digits are more than the noise allows."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def table(results):
    """The table of the page: mean over seeds, and the range, after training; the first row is before it."""
    runs = results["runs"]
    arms = [name for name in ARMS if any(run["arm"] == name for run in runs)]
    before = {run["seed"]: run["before"] for run in sorted(runs, key=lambda run: len(run["before"]))}
    rows = [("before training", list(before.values()), [])]
    for name in arms:
        of_arm = [run for run in runs if run["arm"] == name]
        rows.append((f"`{name}`", [run["after"] for run in of_arm], of_arm))
    header = ["arm", "held-out accuracy, %", *(f"pass rate, steps {end - 9}-{end}, %" for end in SHOWN)]
    header += [
        "steps per completion",
        "length, tokens",
        "`ok` lines, %",
        "correct lines, %",
        "PRM's score, %",
        "incorrect lines below 1/2, %",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, numbers, of_arm in rows:
        cells = [name, spread([100 * entry["accuracy"] for entry in numbers])]
        cells += [spread([100 * run["pass_rate_at"][str(end)] for run in of_arm]) for end in SHOWN]
        cells += [spread([entry[key] for entry in numbers]) for key in ("steps_mean", "length_mean")]
        cells += [spread([100 * entry[key] for entry in numbers]) for key in ("ok_steps_frac", "process_reward")]
        cells += [
            spread([100 * entry[key] for entry in numbers if key in entry]) for key in ("prm_reward", "prm_bad_recall")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values):
    """`mean (min-max)`."""
    return f"{mean(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else ""


if __name__ == "__main__":
    main()
