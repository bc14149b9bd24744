"""A process reward model from a pretrained chat model: does it help the training?

Question: label the steps of a few dozen questions, train a process reward model (PRM) on them, pay its scores in
training. All by the command line, with SmolLM2-135M-Instruct as policy, as labeler and as base of the PRM. Task: two
numbers as JSON, as in `chat_model.py`. A step ends with the comma, so the first step holds the smaller number. A step
is labeled good if at least one of its rollouts ends with the correct answer. Arms: the outcome alone; with the scores
of the PRM paid beside it, summed over later steps or by the worst step. Measure: accuracy on held-out questions, an
arm's minus that of the outcome alone. Rule: that of all studies, for runs of the same seed. In a single run the
interval is a bootstrap over questions.
"""

import contextlib
import io
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from frame import Results, Row, Run, Study, compared, interval, known, main, rows_of, table
from chat_model import TASKS, alone, held_out_questions, is_correct, training_rows

from trl_drgrpo.cli.main import main as trl_drgrpo
from trl_drgrpo.common.drawing import COLORS, new_figure

TASK = "json"
MODEL = "trl_drgrpo:smollm2"
SETTINGS: dict[str, Any] = {
    "labeled": 48,  # questions whose steps train the PRM
    "held_out": 48,  # questions
    "completions": 2,  # of a question whose steps are labeled
    "rollouts": 8,  # of a step
    "longest": 20,  # tokens of an answer
    "epochs": 3,  # of the PRM
    "different_prompts": 1024,
    "steps": 16,  # of the policy, of two questions with eight answers each
    "answers": 4,  # to each held-out question, in an evaluation
}
QUICK = {
    "labeled": 2,
    "held_out": 2,
    "completions": 1,
    "rollouts": 2,
    "epochs": 1,
    "different_prompts": 4,
    "steps": 1,
    "answers": 1,
}
ALONE = "outcome alone"
ARMS = {  # flags of `train`
    ALONE: "",
    "PRM paid, summed": "--process_role reward",
    "PRM paid, worst step": "--process_role reward --step_credit min_increments",
}


def exact_answer(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Outcome reward of the commands: 1 if the whole answer is the expected one."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(is_correct(text, expected)) for text, expected in zip(texts, answer, strict=True)]


OUTCOME = f"--reward_funcs {shlex.quote(f'{Path(__file__)}:{exact_answer.__name__}')}"
COMMA = "--step_separator ,"


# Runs ---------------------------------------------------------------------------------------------------------------


def call(command: str) -> str:
    """Show a command of `trl-drgrpo` on stderr, run it in this process and return what it prints."""
    sys.stderr.write(f"\n$ trl-drgrpo {command}\n")
    sys.argv = ["trl-drgrpo", *shlex.split(command)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = trl_drgrpo(sys.argv[1:])
    if code:
        sys.exit(code)
    return printed.getvalue()


def write_questions(settings: dict[str, Any], folder: Path) -> Path:
    """Write and return a folder with the splits `train` and `test`; beside it, the file `to_label.jsonl`."""
    training = training_rows(TASK, settings, seed=0).to_list()
    labeled = training[: settings["labeled"]]
    held_out = [
        {"prompt": TASKS[TASK].conversation(question), "answer": question.answer}
        for question in held_out_questions(TASK, settings["held_out"])
    ]
    questions = folder / "questions"
    questions.mkdir(exist_ok=True)
    files = {
        folder / "to_label.jsonl": labeled,
        questions / "train.jsonl": [row for row in training if row not in labeled],
        questions / "test.jsonl": held_out,
    }
    for path, rows in files.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return questions


def make_prm(settings: dict[str, Any], folder: Path) -> list[Row]:
    """Label steps, train the PRM on them, and score the steps of held-out questions.

    Returns:
        `list[dict]`: One row, what `score` says.
    """
    questions = write_questions(settings, folder)
    rolled = f"{OUTCOME} {COMMA} --completions {settings['completions']} --rollouts {settings['rollouts']}"
    rolled += f" --max_new_tokens {settings['longest']} --batch_size 48"
    label = f"label-steps --model {MODEL} {rolled}"
    call(f"{label} --data {folder}/to_label.jsonl --output {folder}/labeled.jsonl")
    call(f"{label} --data {questions} --dataset_train_split test --output {folder}/test.jsonl")
    data = f"--data {folder}/labeled.jsonl --eval_data {folder}/test.jsonl {COMMA}"
    fit = f"--use_peft --learning_rate 3e-4 --num_train_epochs {settings['epochs']} --overwrite_output_dir true"
    call(f"train-prm --model {MODEL} {data} {fit} --output_dir {folder}/prm")
    printed = call(f"score --step_reward_funcs {folder}/prm --data {folder}/test.jsonl {COMMA} --json")
    (inspected,) = json.loads(printed)["step_rewards"].values()
    return [inspected]


def train(settings: dict[str, Any], folder: Path, seed: int, arm: str) -> list[Row]:
    """Train an arm by the command line and compare it with the outcome alone; that one with the untrained model.

    Returns:
        `list[dict]`: One row: accuracy of the `other` model and of the arm's (`accuracy`), and their `difference` with
            its interval, as `eval` says it; `by_order`, the arm's accuracy on questions with the smaller number first,
            and on those with the larger one first.
    """
    output = run_folder(folder, seed, arm)
    prm = f"--step_reward_funcs {folder}/prm {COMMA} {ARMS[arm]}" if ARMS[arm] else ""
    fit = f"--preset lora --learning_rate 3e-4 --lr_scheduler_type constant --max_steps {settings['steps']}"
    fit += f" --per_device_train_batch_size 16 --num_generations 8 --max_completion_length {settings['longest']}"
    small = f"--gradient_checkpointing false --logging_steps 1 --save_strategy no --report_to none --seed {seed}"
    data = f"--dataset_name {folder}/questions"
    call(f"train --model_name_or_path {MODEL} {data} {OUTCOME} {prm} {fit} {small} --output_dir {output}")
    other = run_folder(folder, seed, ALONE) if ARMS[arm] else MODEL
    test = f"{data} --split test --num_samples {settings['answers']} --no_card --json"
    evaluation = json.loads(call(f"eval --model {output} --trust_recipe --baseline {other} {test}"))
    before, after = (model["pass_at"]["1"]["value"] for model in evaluation["models"])
    difference = evaluation["difference"]["1"]
    row: Row = {"seed": seed, "arm": arm, "other": before, "accuracy": after, "difference": difference}
    return [row | {"by_order": accuracy_by_order(output)}]


def accuracy_by_order(output: Path) -> list[float]:
    """Accuracy of a run's evaluated answers to questions with the smaller number first, and to the other ones.

    A model that copies the numbers in their order, or in the opposite one, is correct in half of the questions.
    """
    (samples,) = output.glob(f"_drgrpo/evaluations/samples/{output.name.replace('_', '-')}-*.jsonl")
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for line in samples.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        first, second = map(int, row["prompt"][-1]["content"].split(","))
        rewards[first < second].append(row["eval"]["rewards"][exact_answer.__name__])
    return [round(statistics.fmean(rewards[smaller_first]), 4) for smaller_first in (True, False)]


def run_folder(folder: Path, seed: int, arm: str) -> Path:
    return folder / f"{arm.replace(',', '').replace(' ', '_')}_{seed}"


def measure(run: Run) -> None:
    run.once("prm", partial(alone, make_prm, run.settings, run.folder))
    run.each("runs", ("seed", "arm"), product(run.seeds, ARMS), partial(alone, train))


# Tables -------------------------------------------------------------------------------------------------------------


def report(results: Results) -> list[str]:
    (inspected,) = results["prm"]
    against = inspected["against"]["labels"]
    auc, low, high = (known(against[key]) for key in ("auc", "auc_low", "auc_high"))
    quality = f"The PRM on {against['count']} held-out steps, {against['true_frac']:.0%} of them good: "
    quality += f"AUC {auc:.2f} [{low:.2f}, {high:.2f}]."
    rows = []
    for run in results["runs"]:
        mean, low, high = (100 * known(run["difference"][key]) for key in ("value", "low", "high"))
        other = ALONE if ARMS[run["arm"]] else "before training"
        cells = [f"{100 * run['other']:.1f}", f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"]
        cells += [f"{100 * share:.0f}" for share in run["by_order"]]
        rows.append([str(run["seed"]), run["arm"], f"{100 * run['accuracy']:.1f}", other, *cells])
    head = ["seed", "trained by", "accuracy, %", "against", "its accuracy, %", "points, 95% over questions"]
    head += ["smaller number first, %", "larger first, %"]
    return [quality, table(head, rows)]


def conclude(results: Results) -> str:
    differences = {}
    for arm in ARMS:
        points = [100 * known(run["difference"]["value"]) for run in rows_of(results, arm=arm)]
        if arm != ALONE and len(points) > 1:
            differences[arm] = interval(points)
    return compared("Accuracy minus that of the outcome alone, in points", differences) if differences else ""


def draw(results: Results) -> Any:
    """Accuracy of each run, a bar per arm and seed."""
    figure, (axes,) = new_figure(1, 1, 6, 3)
    labels = []
    for place, run in enumerate(results["runs"]):
        axes.barh(place, 100 * run["accuracy"], color=COLORS[list(ARMS).index(run["arm"])])
        labels.append(f"{run['arm']}, seed {run['seed']}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("held-out accuracy, %")
    return figure


STUDY = Study("chat_prm", "chat_model", 2, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
