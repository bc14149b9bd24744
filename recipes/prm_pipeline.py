"""A process reward model, end to end, on a CPU and offline: `python recipes/prm_pipeline.py`.

The model that the demo ships adds lists of digits. Each stage is a command, printed before it runs:

    search        completions of training problems
    label-steps   rollouts from the end of each of their steps, and of held-out ones
    train-prm     on these labels
    score         the process reward model against the labels of held-out steps
    search        completions of held-out problems; the process reward model selects one
    train         by the outcome alone (the control), and with the scores of the PRM paid or subtracted
    eval          on held-out problems, prompt by prompt against the control of the same seed

The table says what came out: a 95% interval that holds 0 is no difference.
"""

import argparse
import contextlib
import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.short_commands import stay_offline_and_quiet
from trl_drgrpo.upstream.versions import provenance

POLICY, OUTCOME, LINES = "trl_drgrpo:demo", "--reward_funcs list_sum_reward", r"--step_separator '\n'"
SIZES = {"problems": 128, "rollouts": 8, "prm_epochs": 6, "held_out": 256, "steps": 40}
QUICK = {"problems": 8, "rollouts": 2, "prm_epochs": 1, "held_out": 8, "steps": 2}
ARMS = {  # what a policy is trained by, and the flags of `train`
    "outcome alone": "",
    "PRM paid, summed": "--process_role reward",
    "PRM paid, worst step": "--process_role reward --step_credit min_increments",
    "PRM as baseline": "--process_role baseline",
}
CONTROL = next(iter(ARMS))


class Pipeline:
    """Stages in a folder, and the seconds that each took."""

    def __init__(self, folder: Path, sizes: dict[str, int]):
        self.folder, self.sizes, self.seconds = shlex.quote(str(folder)), sizes, {}
        self.test = f"trl_drgrpo:list_sum?size=8&test_size={sizes['held_out']}"

    def run(self, stage: str, command: str) -> str:
        """What a command of `trl-drgrpo` prints on stdout; the script ends where one fails."""
        print(f"\n$ trl-drgrpo {command}", file=sys.stderr, flush=True)
        sys.argv = ["trl-drgrpo", *shlex.split(command)]
        began, printed = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(sys.argv[1:])
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - began, 1)
        return sys.exit(code) if code else printed.getvalue()

    def make_prm(self) -> dict[str, Any]:
        """Trains `prm` in the folder: how well it tells good steps from bad ones, and what it selects."""
        sizes, folder, model = self.sizes, self.folder, f"--model {POLICY} --dataset_name"
        sampled = f"{OUTCOME} {LINES} --strategy best_of_n --budget_tokens 300 --max_completion_length 64"
        rolled = f"{OUTCOME} {LINES} --rollouts {sizes['rollouts']} --max_new_tokens 64 --batch_size 128"
        problems, test = f"'trl_drgrpo:list_sum?size={sizes['problems']}&seed=1'", "--dataset_train_split test"
        self.run("search", f"search {model} {problems} {sampled} --output {folder}/found.jsonl")
        self.run("label-steps", f"label-steps {model} {folder}/found.jsonl {rolled} --output {folder}/steps.jsonl")
        self.run("label-steps", f"label-steps {model} '{self.test}' {test} {rolled} --output {folder}/held_out.jsonl")
        fit = f"--learning_rate 1e-3 --num_train_epochs {sizes['prm_epochs']} --output_dir {folder}/prm"
        data = f"--data {folder}/steps.jsonl --eval_data {folder}/held_out.jsonl"
        self.run("train-prm", f"train-prm --model {POLICY} {data} {LINES} {fit}")
        scored = f"--data {folder}/held_out.jsonl --output {folder}/scores.jsonl --json"
        printed = self.run("score", f"score --step_reward_funcs {folder}/prm {scored}")
        (inspected,) = json.loads(printed)["step_rewards"].values()
        guided = f"--prm {folder}/prm --output {folder}/selected.jsonl"
        lines = self.run("search with the PRM", f"search {model} '{self.test}' {test} {sampled} {guided}").splitlines()
        return {"inspected": inspected, "search": {k: float(v) for k, v in map(str.split, lines[:-1])}}

    def train(self, arm: str, seed: int) -> dict[str, Any]:
        """Trains the policy and evaluates it: the control against the start, the others against the control."""
        output = f"{self.folder}/{arm.replace(',', '').replace(' ', '_')}_{seed}"
        steps = f"--step_reward_funcs {self.folder}/prm {LINES} {ARMS[arm]}" if ARMS[arm] else ""
        data = f"--dataset_name 'trl_drgrpo:list_sum?size=2000&seed={seed}' {OUTCOME}"
        fit = f"--max_steps {self.sizes['steps']} --learning_rate 3e-4 --lr_scheduler_type constant --seed {seed}"
        small = "--per_device_train_batch_size 64 --max_completion_length 64 --gradient_checkpointing false"
        kept = f"--save_strategy no --report_to none --output_dir {output}"
        self.run(f"train: {arm}", f"train --model_name_or_path {POLICY} {data} {steps} {fit} {small} {kept}")
        other = f"{self.folder}/{CONTROL.replace(' ', '_')}_{seed}" if ARMS[arm] else POLICY
        test = f"--dataset_name '{self.test}' --split test --baseline {other} --json"
        found = json.loads(self.run("eval", f"eval --model {output} {test}"))
        before, after = (each["pass_at"]["1"]["value"] for each in found["models"])
        return {"arm": arm, "seed": seed, "other": before, "correct": after, "difference": found["difference"]["1"]}


def table(numbers: dict[str, Any]) -> str:
    """The results as Markdown."""
    prm, search = numbers["inspected"]["against"]["labels"], numbers["search"]
    auc, low, high, brier, ece = (f"{prm[key]:.3f}" for key in ("auc", "auc_low", "auc_high", "brier", "ece"))
    first = f"first error F1 {numbers['inspected']['first_error']['f1'] or 0:.3f}"
    lines = [f"PRM on {prm['count']} held-out steps, {prm['true_frac']:.1%} of them good:"]
    lines.append(f"AUC {auc} [{low}, {high}], Brier {brier}, ECE {ece}, {first}.")
    each = search["completions"] / search["problems"]
    selected = f"{search['pass_rate_selected']:.1%} correct; any of them {search['pass_rate_any']:.1%}"
    lines += [f"The PRM selects one of {each:.1f} completions: {selected}.", ""]
    lines += ["| seed | trained by | correct | minus | points [95%] | |", "|---|---|---|---|---|---|"]
    for run in numbers["runs"]:
        mean, low, high = (100 * (run["difference"][key] or 0) for key in ("value", "low", "high"))
        verdict = "better" if low > 0 else "worse" if high < 0 else "not told apart"
        other = f"{CONTROL if ARMS[run['arm']] else 'untrained'}, {run['other']:.1%}"
        points = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
        lines.append(f"| {run['seed']} | {run['arm']} | {run['correct']:.1%} | {other} | {points} | {verdict} |")
    seconds = "; ".join(f"{stage} {took:.0f}" for stage, took in numbers["seconds"].items())
    return "\n".join([*lines, "", f"Seconds: {seconds}; in all {sum(numbers['seconds'].values()):.0f}."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/prm_pipeline"), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see that it runs")
    options = parser.parse_args()
    if options.output_dir.exists():
        parser.error(f"--output_dir: {options.output_dir} exists; expected a new folder")
    stay_offline_and_quiet()
    given = provenance(shlex.join(["python", "recipes/prm_pipeline.py", *sys.argv[1:]]))
    options.output_dir.mkdir(parents=True)
    pipeline = Pipeline(options.output_dir, QUICK if options.quick else SIZES)
    result: dict[str, Any] = {**given, "settings": pipeline.sizes, **pipeline.make_prm()}
    result["runs"] = [pipeline.train(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    result["seconds"] = pipeline.seconds
    output = options.output_dir / "results.json"
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    print(f"numbers: {output}", file=sys.stderr)
