"""`trl-drgrpo train-prm` and `label-steps` end to end, the data they read, and the converters."""

import json
import math
import random
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.task import list_sum_reward, make_problems, prompt_of
from trl_drgrpo.process_rewards import (
    TokenClassificationScorer,
    convert_math_shepherd,
    convert_prm800k,
    label_steps,
    train_prm,
)
from trl_drgrpo.process_rewards.training import _label_loss, checked_rows, labeled_steps, tokenize_rows
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.scoring import read_json_lines

DEMO_MODEL = str(MODEL_DIR)


def separable(size, seed, name="steps"):
    """Good steps end in a small letter, bad ones in a digit; the words before say nothing."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        labels = [rng.random() < 0.5 for _ in range(rng.randint(1, 3))]
        steps = ["".join(rng.choices("ABC", k=3)) + rng.choice("xyz" if good else "123") for good in labels]
        rows.append({"prompt": f"{rng.randint(0, 99)}?", name: steps, "labels": labels})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def command(capsys):
    """The numbers that a command prints, and nothing else; of one that fails the message."""

    def command(line, code=0):
        assert main(shlex.split(line)) == code
        printed = capsys.readouterr()
        return printed.err if code else dict(each.split(" ", 1) for each in printed.out.splitlines())

    return command


# Training ------------------------------------------------------------------------------------------------------------


def test_train_prm_learns_and_its_checkpoint_scores(saved_model, tmp_path, command):
    out, data = tmp_path / "prm", write(tmp_path / "train.jsonl", separable(96, 0, "completions"))
    held_out = write(tmp_path / "eval.jsonl", separable(24, 1))
    fit = r"--learning_rate 1e-2 --max_steps 80 --step_separator '\n\n'"
    printed = command(f"train-prm --model {saved_model} --data {data} --eval_data {held_out} --output_dir {out} {fit}")
    assert printed["rows"] == "96"
    assert float(printed["eval_good_recall"]) > 0.9
    assert float(printed["eval_bad_recall"]) > 0.9
    scorer = TokenClassificationScorer(str(out), device="cpu")
    assert scorer.step_separator == "\n\n"
    assert scorer.model.config.id2label == {0: "bad", 1: "good"}
    rows = separable(24, 2)
    # As a policy writes them, with the separator and an end token; and in a chat.
    steps = [[*(step + "\n\n" for step in row["steps"][:-1]), row["steps"][-1] + "<|im_end|>"] for row in rows]
    scores = scorer([[{"role": "user", "content": row["prompt"]}] for row in rows], steps=steps)
    labels = [label for row in rows for label in row["labels"]]
    flat = [score for row in scores for score in row]
    right = [(score > 0.5) == label for score, label in zip(flat, labels, strict=True)]
    assert sum(right) / len(right) > 0.9


def test_an_adapter_is_merged_checkpointed_evaluated_and_resumed(tmp_path, command):
    out = tmp_path / "prm"
    rows = Dataset.from_list([{**row, "labels": [int(label) for label in row["labels"]]} for row in separable(96, 0)])
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    Dataset.from_list(separable(24, 1)).to_parquet(tmp_path / "data" / "test.parquet")
    call = f"train-prm --model trl_drgrpo:demo --dataset_name {tmp_path / 'data'} --output_dir {out} --max_steps 60"
    call += " --dataset_test_split test --use_peft --lora_r 4 --learning_rate 5e-3 --gradient_checkpointing"
    call += " --eval_strategy steps --eval_steps 20 --save_strategy steps"
    printed = command(f"{call} --save_steps 30")
    assert float(printed["eval_accuracy"]) > 0.8
    assert float(printed["eval_loss"]) < float(printed["eval_chance_loss"])
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-30", "checkpoint-60"}
    state = json.loads((out / "checkpoint-60" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_bad_recall" in entry] == [20, 40, 60]
    scorer = resolve_reward({"prm": str(out)}, "step_reward_funcs")  # without peft, by its architecture
    row = separable(1, 2)[0]
    before = scorer(prompts=[row["prompt"]], steps=[row["steps"]])
    for newest in (out / "checkpoint-30", ""):  # the one that was torn is passed over
        resumed = command(f"{call} --resume_from_checkpoint {newest}")
        assert float(resumed["loss"]) == pytest.approx(float(printed["loss"]), rel=0.01)  # of all steps, not the last
        again = resolve_reward({"prm": str(out)}, "step_reward_funcs")
        assert again(prompts=[row["prompt"]], steps=[row["steps"]])[0] == pytest.approx(before[0], abs=1e-4)
        (out / "checkpoint-60" / "trainer_state.json").write_text("")
    assert "LoRA of rank 4" in (out / "README.md").read_text()


def test_a_torn_checkpoint_is_passed_over(saved_model, tmp_path):
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True}
    options = {"step_separator": "\n", "arguments": arguments}
    train_prm(saved_model, separable(16, 0), tmp_path, **options)
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.write_text("")
    train_prm(saved_model, separable(16, 0), tmp_path, resume_from_checkpoint=True, **options)
    assert json.loads(state.read_text())["global_step"] == 2


def test_soft_labels_are_learned_as_they_are(saved_model, tmp_path, caplog):
    rows = [{**row, "labels": [0.75 if label else 0.25 for label in row["labels"]]} for row in separable(96, 0)]
    arguments = {"max_steps": 80, "learning_rate": 1e-2, "disable_tqdm": True}
    joined = {"step_separator": "\n", "arguments": arguments}
    numbers = train_prm(saved_model, rows, tmp_path, eval_rows=rows[:24], **joined)
    assert numbers["eval_accuracy"] > 0.9
    assert numbers["eval_loss"] == pytest.approx(0.5623, abs=0.03)  # the entropy of 3/4, which no model is below
    row = separable(1, 2)[0]
    [scores] = TokenClassificationScorer(str(tmp_path), device="cpu")([row["prompt"]], steps=[row["steps"]])
    assert scores == pytest.approx([0.75 if label else 0.25 for label in row["labels"]], abs=0.15)
    assert "estimates its label" in (tmp_path / "README.md").read_text()
    assert "does not tell good steps" not in caplog.text
    logits = torch.tensor([[[0.0, 1.0], [2.0, -1.0], [5.0, 5.0]]])
    labels = torch.tensor([[0.25, 1.0, -100.0]])
    first = -(0.25 * math.log(1 / (1 + math.exp(-1))) + 0.75 * math.log(1 / (1 + math.exp(1))))
    second = math.log(1 + math.exp(3))
    assert _label_loss(SimpleNamespace(logits=logits), labels).item() == pytest.approx((first + second) / 2)
    assert _label_loss(SimpleNamespace(logits=logits), labels, 4).item() == pytest.approx((first + second) / 4)


def test_a_loss_at_chance_and_a_folder_without_a_checkpoint_are_said(saved_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    arguments = {"max_steps": 1, "learning_rate": 1e-9, "disable_tqdm": True}
    train_prm(saved_model, separable(16, 0), tmp_path, resume_from_checkpoint=True, arguments=arguments)
    assert "holds no checkpoint, the training begins anew" in caplog.text
    assert "The loss on the training steps ends at" in caplog.text
    card = (tmp_path / "README.md").read_text()
    assert "Not measured." in card
    assert "it may serve as a baseline" in card
    for fields, message in (
        ({"eval_strategy": "steps"}, "^eval_strategy: got 'steps' without data"),
        ({"report_to": "nothing"}, "^arguments: got .*nothing is not supported"),
        ({"report_to": "wandb"}, "^arguments: got .*requires wandb to be installed"),
    ):
        with pytest.raises(InputError, match=message):
            train_prm(saved_model, separable(16, 0), tmp_path, arguments=fields)
    with pytest.raises(InputError, match=r"^resume_from_checkpoint: got .*none, which is no checkpoint"):
        train_prm(saved_model, separable(16, 0), tmp_path, resume_from_checkpoint=str(tmp_path / "none"))


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_weights_that_are_not_finite_are_never_saved(strategy, saved_model, tmp_path, command):
    out, data = tmp_path / "prm", write(tmp_path / "train.jsonl", separable(16, 0))
    save = f"--save_strategy {strategy} --save_steps 1 --max_steps 2 --logging_steps 5"
    said = command(
        f"train-prm --model {saved_model} --data {data} --output_dir {out} --learning_rate 1e39 {save}", code=1
    )
    assert re.search("step [12]: .* is NaN or infinite, so the training ends. Likely cause: learning_rate 1e", said)
    assert not list(out.rglob("*.safetensors"))


def test_the_new_head_is_drawn_with_the_seed(saved_model, tmp_path):
    arguments = {"max_steps": 1, "seed": 3, "disable_tqdm": True}
    losses = [train_prm(saved_model, separable(8, 0), tmp_path, arguments=arguments)["loss"] for _ in range(2)]
    assert losses[0] == losses[1]
    assert train_prm(saved_model, separable(8, 0), tmp_path, arguments={**arguments, "seed": 4})["loss"] != losses[0]


def test_labels_sit_on_the_last_token_of_each_step(tokenizer):
    rows = [{"prompt": "pp", "steps": ["a\n", "bc<|im_end|>", "d", "<|im_end|>"], "labels": [True, None, False, True]}]
    [example], left_out = tokenize_rows(rows, tokenizer, "\n", 512)
    assert tokenizer.decode(example["input_ids"]) == "ppa\nbc\nd\n"
    assert example["labels"] == [-100, -100, -100, 1, -100, -100, -100, -100, 0]
    assert left_out == 0
    assert rows[0]["steps"][0] == "a\n"  # the caller's rows stay
    [cut], _ = tokenize_rows(rows, tokenizer, "\n", 8)  # the prompt loses its left
    assert cut["input_ids"] == example["input_ids"][1:]
    assert cut["labels"] == example["labels"][1:]
    assert tokenize_rows(rows, tokenizer, "\n", 6) == ([], 1)  # steps are never cut


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "steps": ["a"], "labels": [True, False]}], "2 labels for 1 steps"),
        ([{"steps": ["a"], "labels": [True]}], "expected the keys 'prompt', 'steps'"),
        ([{"prompt": "p", "steps": ["a"], "labels": [1.5]}], "the label 1.5"),
        ([{"prompt": "p", "steps": [1], "labels": [True]}], "steps that are not strings"),
        ([{"prompt": "p", "steps": ["a"], "labels": ["+"]}], r"the label '\+'"),
        ([{"prompt": "p", "steps": ["a" * 600, "b"], "labels": [True, False]}], "0 labeled steps"),
    ],
)
def test_data_that_cannot_be_trained_on(rows, message, saved_model, tokenizer, tmp_path):
    with pytest.raises(InputError, match=message):
        train_prm(saved_model, rows, tmp_path, max_length=512)
    with pytest.raises(InputError, match="model: got"):
        train_prm(str(tmp_path / "none"), separable(4, 0), tmp_path, tokenizer=tokenizer)


def test_held_out_steps_that_are_all_left_out_are_refused(saved_model, tmp_path):
    """Without them the steps that were trained on would be measured, and be called held-out."""
    too_long = [{"prompt": "p", "steps": ["a" * 600], "labels": [True]}]
    with pytest.raises(InputError, match="eval_data: got 1 rows, all of them left out"):
        train_prm(saved_model, separable(4, 0), tmp_path, eval_rows=too_long, max_length=512)


def test_the_command_names_the_row_and_exits_with_2(saved_model, tmp_path, command):
    data = write(tmp_path / "bad.jsonl", [*separable(2, 0), {"prompt": "p", "steps": ["a"], "labels": []}])
    calls = {
        data: "bad.jsonl, row 3: got 0 labels for 1 steps",
        str(tmp_path / "none.jsonl"): "which does not exist",
        write(tmp_path / "empty.jsonl", []): "without rows",
    }
    for path, message in calls.items():
        said = command(f"train-prm --model {saved_model} --data {path} --output_dir {tmp_path / 'out'}", 2)
        assert message in said
        assert said.count("\n") == 1


# Converters ----------------------------------------------------------------------------------------------------------


def test_prm800k_gives_a_row_per_alternative_and_one_for_the_path():
    steps = [
        {
            "completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}, {"text": "c", "rating": 0}],
            "chosen_completion": 0,
            "human_completion": None,
        },
        {"completions": [], "chosen_completion": None, "human_completion": {"text": "h"}},
        {"completions": [{"text": "d", "rating": None}], "chosen_completion": None, "human_completion": None},
        {"completions": None, "chosen_completion": None, "human_completion": None},
    ]
    record = {"question": {"problem": "p"}, "label": {"steps": steps}}
    expected = [(["b"], [False]), (["c"], [True]), (["a", "h", "d"], [True, True, None]), (["a", "h"], [True, True])]
    rows = convert_prm800k(record)
    assert [(row["steps"], row["labels"]) for row in rows] == expected
    assert {row["prompt"] for row in rows} == {"p"}
    assert convert_prm800k(record, neutral="bad")[1]["labels"] == [False]
    assert convert_prm800k(record, neutral="ignore")[1]["labels"] == [None]
    assert checked_rows(rows) == rows
    with pytest.raises(InputError, match="PRM800K record: got no 'question'"):
        convert_prm800k({"prompt": "p"})


def test_math_shepherd_steps_and_signs_line_up():
    text = "Who? Step 1: книжки are 3. ки\nStep 2: 3*2=6. ки\nStep 3: The answer is: 7 ки"
    text = text.replace("книжки", "books")
    record = {"input": text, "label": text.replace(" ки", " +", 2).replace(" ки", " -"), "task": "GSM8K"}
    steps = ["Step 1: books are 3.", "Step 2: 3*2=6.", "Step 3: The answer is: 7"]
    assert convert_math_shepherd(record) == [{"prompt": "Who?", "steps": steps, "labels": [True, True, False]}]
    early = {"input": "Mr. ки Who? Step 1: a ки", "label": "Mr. - Who? Step 1: a +"}  # an error of a few records
    assert convert_math_shepherd(early) == [{"prompt": "Mr.  Who?", "steps": ["Step 1: a"], "labels": [True]}]
    for broken, message in (
        ({"input": "a"}, "the texts 'input' and 'label'"),
        ({"input": "a ки", "label": "a +"}, "no 'Step 1:'"),
        ({"input": "Step 1: a ки", "label": "Step 1: a ?"}, r"the labels \['\?'\]"),
    ):
        with pytest.raises(InputError, match=message):
            convert_math_shepherd(broken)


def test_files_are_converted(tmp_path):
    shepherd = {"input": "Who? Step 1: a ки", "label": "Who? Step 1: a +"}
    path = write(tmp_path / "shepherd.jsonl", [shepherd, shepherd])
    records = read_json_lines(path)
    assert labeled_steps(records, path, "math_shepherd") == convert_math_shepherd(shepherd) * 2
    with pytest.raises(InputError, match="row 1: got no 'question'"):
        labeled_steps(records, path, "prm800k")
    with pytest.raises(InputError, match="format: got 'csv'"):
        labeled_steps(records, path, "csv")
    soft = [{"prompt": "p", "steps": ["a"], "labels": [True], "values": [0.25]}]
    assert labeled_steps(soft, "here", labels="values")[0]["labels"] == [0.25]


# Labeling -----------------------------------------------------------------------------------------------------------


def test_label_steps_then_train_prm_on_the_demo_task(tmp_path, command):
    problems = make_problems(8, "train", seed=1)
    rows = [{"prompt": prompt_of(numbers), "answer": str(sum(numbers))} for numbers in problems]
    rows[0]["steps"] = ["1+1=2", "\\boxed{2}"]  # given: labeled as it is
    output = tmp_path / "labels" / "labeled.jsonl"
    data = write(tmp_path / "prompts.jsonl", rows)
    call = f"label-steps --model {DEMO_MODEL} --data {data} --reward list_sum_reward --output {output}"
    call += r" --step_separator '\n'"
    printed = command(f"{call} --rollouts 4 --completions 2 --max_new_tokens 64")
    labeled = [json.loads(line) for line in output.read_text().splitlines()]
    assert printed["rows"] == str(len(labeled)) == "15"
    assert labeled[0]["steps"] == rows[0]["steps"]
    for row in labeled:
        verdict = list_sum_reward(["\n".join(row["steps"])], [row["answer"]])[0]
        assert row["values"][-1] == verdict
        assert row["labels"] == [value > 0 for value in row["values"]]
        assert all(value * 4 == round(value * 4) for value in row["values"])
    assert len({value for row in labeled for value in row["values"]}) > 2
    train = f"train-prm --model {DEMO_MODEL} --data {output} --output_dir {tmp_path / 'prm'} --max_steps"
    command(f"{train} 2")
    saved = tmp_path / "prm" / "model.safetensors"
    weights = saved.read_bytes()
    said = command(f"{train} 1", 2)  # a trained model is not lost
    assert "which holds another run (a saved model, model.safetensors); expected a folder" in said
    assert saved.read_bytes() == weights
    command(f"{train} 1 --overwrite_output_dir")
    assert saved.read_bytes() != weights
    scorer = TokenClassificationScorer(str(tmp_path / "prm"), device="cpu")
    assert [len(row) for row in scorer([rows[1]["prompt"]], steps=[["3+8=11\n", "\\boxed{11}"]])] == [2]


def test_labels_go_on_where_they_stopped_and_are_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.cli.search.GROUP", 2)
    call = f"label-steps --model {DEMO_MODEL} --data 'trl_drgrpo:list_sum?size=5&test_size=0'"
    call = shlex.split(f"{call} --reward list_sum_reward --rollouts 2 --max_new_tokens 32 --output")
    output = tmp_path / "labels.jsonl"
    assert main([*call, str(output)]) == 0
    whole, said = output.read_bytes(), capsys.readouterr().out
    lines = whole.splitlines(keepends=True)
    for kept, done in ((b"".join(lines[:3]) + b'{"prompt', 2), (whole[:-1], 4), (b"", 0), (whole, 5)):
        output.write_bytes(kept)
        assert main([*call, str(output)]) == 0
        assert output.read_bytes() == whole
        printed = capsys.readouterr()
        assert printed.out == said
        assert (f"{done} of 5 prompts are in" in printed.err) == bool(done)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    monkeypatch.setattr("trl_drgrpo.process_rewards.loading.load_model", lambda *a, **k: pytest.fail("too late"))
    for path, more, message in (
        (output, ["--seed", "1"], "written with seed 0, not 1; expected a new file, or one of the same labeling."),
        (other, [], "other.jsonl, which exists and was not written by this command"),
    ):
        before = path.read_bytes()
        assert main([*call, str(path), *more]) == 2
        assert message in capsys.readouterr().err
        assert path.read_bytes() == before


def test_label_steps_takes_any_generator(tokenizer):
    def generate(prefixes, k):
        return [["a\n\nb", "", "c"][:k] for _ in prefixes]

    def verifier(completions, **kwargs):
        return [None if "a" in text else float(text.endswith("c")) for text in completions]

    labeled = list(label_steps([{"prompt": "p"}], generate, verifier, tokenizer, rollouts=3, completions=3))
    assert labeled == [
        {"prompt": "p", "steps": ["a", "b"], "labels": [None, None], "values": [None, None]},
        {"prompt": "p", "steps": ["c"], "labels": [True], "values": [1.0]},  # the empty completion is left out
    ]
    with pytest.raises(InputError, match="separator: got an empty separator"):
        list(label_steps([{"prompt": "p"}], generate, verifier, tokenizer, separator=""))
    with pytest.raises(InputError, match=r"row 0: got the columns \['question'\]"):
        list(label_steps([{"question": "p"}], generate, verifier, tokenizer))


def test_label_steps_refuses_before_a_model_loads(tmp_path, command):
    data, output = write(tmp_path / "prompts.jsonl", [{"prompt": "1+1"}]), tmp_path / "out.jsonl"
    for more, message in (
        ("list_sum_rewards", "Did you mean list_sum_reward"),
        ("list_sum_reward", "a column 'answer'"),
        ("list_sum_reward --rollouts 0", "rollouts: got 0"),
    ):
        said = command(f"label-steps --model none --data {data} --output {output} --reward {more}", 2)
        assert message in said
    assert not output.exists()
