"""`trl-drgrpo score`, on files as users and TRL write them, and on files that are broken."""

import csv
import json
import shlex
from pathlib import Path

import pyarrow
import pytest
from case_tables import DATA, cases
from pyarrow import parquet
from runs import train, write_lines

from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.sampling.pass_rates import read_pass_rates
from trl_drgrpo.rewards.scoring import read_rows, score_rows
from trl_drgrpo.rewards.texts import prompt_key

ROWS = [
    {"prompt": "2+2=", "completion": "4", "answer": "4"},
    {"prompt": "2+3=", "completion": "6", "answer": "5"},
    {"prompt": "1+1=", "completion": "2", "answer": "2"},
    {"prompt": "0/0=", "completion": "0", "answer": None},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with completions and with rewards to score them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((DATA / "score_rewards.txt").read_text())
    write_lines("rows.jsonl", ROWS)
    return tmp_path


def score(*argv):
    return main(["score", *argv])


@pytest.fixture
def report(here, capsys):
    """Scores with rewards of `mine.py`, or others; exit code and the JSON that was printed."""

    def call(rewards, *argv, data="rows.jsonl"):
        specs = [name if not name.isidentifier() or "_" in name else f"mine.py:{name}" for name in rewards.split("|")]
        code = score("--rewards", *specs, "--data", data, "--json", *argv)
        out, err = capsys.readouterr()
        assert code < 2, err
        return code, json.loads(out)

    return call


def test_two_graders_are_held_against_each_other(report, capsys):
    code, found = report("exact|lenient|later")
    assert code == 0
    exact = found["rewards"]["exact"]
    # 1, 0, 1, None: mean 2/3; population variance 2/3 - 4/9 = 2/9
    assert (exact["mean"], exact["std"]) == (pytest.approx(2 / 3), pytest.approx((2 / 9) ** 0.5))
    assert (exact["rows"], exact["none_frac"], exact["failed"]) == (4, 0.25, 0)
    assert (exact["min"], exact["max"]) == (0.0, 1.0)
    assert found["disagreements"][0] == {"first": "exact", "second": "lenient", "count": 1, "rows": [2]}
    assert [pair["count"] for pair in found["disagreements"]] == [1, 4, 4]
    assert score("--rewards", "mine.py:exact", "mine.py:lenient", "--data", "rows.jsonl") == 0
    out = capsys.readouterr().out
    assert out.startswith("reward   rows    mean     std   None  failed  ms/row  slowest\nexact       4  0.6667  ")
    assert "exact and lenient differ on 1 of 4 rows\n  row 2: 0 and 1: 6\n" in out


def test_a_failure_costs_its_row_and_is_exit_code_1(report, capsys):
    code, found = report("broken|text|exits")
    assert code == 1
    broken, text, exits = found["rewards"].values()
    assert broken["mean"] == pytest.approx((1 / 4 + 1 / 6 + 1 / 2) / 3)
    assert broken["failures"] == [{"row": 4, "reason": "ZeroDivisionError: float division by zero"}]
    assert broken["metrics"] == {"rewards/broken/seen": 1.0}
    assert (text["failed"], text["mean"], exits["failed"]) == (4, None, 4)
    assert "got str '1.0'; expected a list of 1 numbers" in text["failures"][0]["reason"]
    assert score("--rewards", "mine.py:broken", "--data", "rows.jsonl") == 1
    out, err = capsys.readouterr()
    assert "broken failed on 1 rows\n  row 4: ZeroDivisionError" in out
    assert "return [1.0 / int(c) for c in completions]" in err  # where it failed
    assert "Traceback" not in out
    assert score("--rewards", "mine.py:text", "--data", "rows.jsonl", "--show", "1") == 1
    out, err = capsys.readouterr()
    assert "row 1: RewardError: reward function 'text': got str '1.0'; expected a list" in out
    assert "Traceback" not in err  # a broken contract is one line


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_golds_that_cannot_be_read_are_named(report, capsys, batch_size):
    answers = ["4", "x", "1 and " * 50, None]
    write_lines("golds.jsonl", [{**row, "answer": gold} for row, gold in zip(ROWS, answers, strict=True)])
    _, found = report("numeric_reward|exact", "--batch_size", batch_size, data="golds.jsonl")
    unscored = found["rewards"]["numeric_reward"]["unscored"]
    assert [one["row"] for one in unscored] == [2, 3, 4]
    assert unscored[0]["columns"] == {"answer": "x"}
    assert unscored[0]["reason"] == "column 'answer' holds 'x', which is not one number"
    assert (unscored[2]["columns"], unscored[2]["reason"]) == ({"answer": "None"}, None)
    assert len(unscored[1]["columns"]["answer"]) == 80
    # A function without a method to ask: the columns that it names.
    assert found["rewards"]["exact"]["unscored"] == [{"row": 4, "reason": None, "columns": {"answer": "None"}}]
    score("--rewards", "numeric_reward", "--data", "golds.jsonl", "--show", "1")
    out = capsys.readouterr().out
    assert "numeric_reward gave None to 3 of 4 rows, with these gold values:\n  row 2: answer x (column" in out
    assert "row 3: answer" not in out
    rows = [{"prompt": "q", "completion": "#### 4", "solution": gold} for gold in ("4", "x +")]
    write_lines("golds.jsonl", rows)
    (one,) = report("math_reward", data="golds.jsonl")[1]["rewards"]["math_reward"]["unscored"]
    assert (one["row"], one["columns"]) == (2, {"solution": "x +"})
    assert one["reason"]


@pytest.mark.parametrize(("batch_size", "failures"), [("1", [2]), ("4", [])])
def test_rows_that_a_reward_counts_as_failed_are_failed(report, batch_size, failures):
    code, found = report("counting", "--batch_size", batch_size)
    assert (code, found["rewards"]["counting"]["failed"]) == (1, 1)
    assert [failure["row"] for failure in found["rewards"]["counting"]["failures"]] == failures


def test_calls_are_timed_are_of_a_batch_and_print_nothing(report):
    _, found = report("slow|size", "--output", "timed.jsonl")
    assert [row["seconds"]["slow"] >= 0.3 for row in read_rows("timed.jsonl")] == [False, True, False, False]
    assert found["rewards"]["slow"]["seconds_max"] >= 0.3
    size = report("size", "--batch_size", "3")[1]["rewards"]["size"]
    assert (size["mean"], size["min"]) == (2.5, 1.0)  # 3, 3, 3, 1


def test_rows_are_written_with_their_scores_and_can_be_scored_again(here, report):
    code, _ = report("exact|broken", "--output", "out/scored.jsonl")
    assert code == 1
    written = read_rows("out/scored.jsonl")
    assert [row["scores"]["exact"] for row in written] == [1.0, 0.0, 1.0, None]
    assert [row["answer"] for row in written] == ["4", "5", "2", None]
    assert ["failures" in row for row in written] == [False, False, False, True]
    code, found = report("exact", "--limit", "2", data="out/scored.jsonl")
    assert (code, found["rewards"]["exact"]["rows"]) == (0, 2)


def test_names_options_conversations_and_renamed_columns(here, report, capsys):
    prompt = [{"role": "user", "content": "2+2="}]
    texts = [f"<think>hm</think>\\boxed{{{given}}}" for given in (4, 5)]
    rows = [{"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "truth": "4"} for text in texts]
    write_lines("chat.jsonl", rows)
    code, found = report("accuracy_reward|think_format_reward", "--columns", "truth=solution", data="chat.jsonl")
    assert code == 0
    assert [each["mean"] for each in found["rewards"].values()] == [0.5, 1.0]
    spec = "{weighted_sum: {parts: {exact_match_reward: 1.0, numeric_reward: -0.5}, name: total}}"
    code, found = report(f"{spec}|exact", "--limit", "3")
    assert (code, found["rewards"]["total"]["mean"]) == (0, pytest.approx(1 / 3))  # 0.5, 0, 0.5
    assert found["rewards"]["total"]["metrics"]["rewards/total/numeric_reward"] == pytest.approx(2 / 3)
    (here / "copy.py").write_text((here / "mine.py").read_text())
    _, found = report("exact|copy.py:exact")
    assert list(found["rewards"]) == ["exact", "copy.py:exact"]  # two of one name are told apart
    assert found["disagreements"][0]["count"] == 0


def test_token_ids_come_from_a_tokenizer(report, capsys, saved_model):
    assert score("--rewards", "mine.py:lengths", "--data", "rows.jsonl") == 2
    message = "reward lengths: got completions without token ids; expected a column completion_ids"
    assert message in capsys.readouterr().err
    _, found = report("lengths", "--tokenizer", saved_model)
    assert found["rewards"]["lengths"]["mean"] == 1.0  # a byte-level tokenizer: one digit, one token


# Step rewards --------------------------------------------------------------------------------------------------------

LABELED = [
    {"prompt": "p", "steps": ["ab\n", "abcdef\n"], "labels": [False, True], "correct": False},
    {"prompt": "p", "steps": ["abcdefg", "ab", "a" * 20], "labels": [1, None, True], "correct": True},
    {"prompt": "q", "steps": ["abcdef", "abc"], "labels": [True, False], "correct": None},
]


def test_step_rewards_are_compared_with_labels_and_outcomes(here, report, capsys):
    write_lines("labeled.jsonl", LABELED)
    argv = ("--step_reward_funcs", "mine.py:step_lengths", "--data", "labeled.jsonl", "--step_separator", r"\n")
    assert score(*argv, "--json", "--output", "scored.jsonl", "--plot", "plots/calibration.png") == 0
    found = json.loads(capsys.readouterr().out)["step_rewards"]["step_lengths"]
    scores = [row["scores"]["step_lengths"] for row in read_rows("scored.jsonl")]
    assert scores == [[0.3, 0.7], [0.8, 0.3, None], [0.7, 0.3]]  # with the separator that ends a step
    assert (found["rows"], found["none_frac"]) == (3, pytest.approx(1 / 7))
    against = found["against"]
    assert {name: each["count"] for name, each in against.items()} == {"labels": 5, "min": 2, "product": 2, "last": 2}
    assert (against["labels"]["auc"], against["last"]["auc"]) == (1.0, 0.0)  # good 0.7, 0.8, 0.7; bad 0.3
    assert found["first_error"] == {
        "threshold": 0.5,
        "incorrect": 2,
        "incorrect_accuracy": 1.0,  # steps 1 and 2
        "correct": 0,
        "correct_accuracy": None,
        "f1": None,  # a step without label: nobody knows
    }
    assert (here / "plots/calibration.png").read_bytes().startswith(b"\x89PNG")
    assert score(*argv, "--show", "1") == 0
    out = capsys.readouterr().out
    assert "step_lengths     3  0.5167" in out
    assert "labels 5 60.0% 1.000 [1.000, 1.000]" in " ".join(out.split())
    assert "first error (a score below 0.5): 1.000 of 2 incorrect, - of 0 correct completions; F1 -" in out
    assert out.endswith("row 3, step 1: 0.700, labeled good: abcdef\n")
    # An outcome reward in the place of the column, read from the steps joined.
    rule = "def long(completions, **kwargs):\n    return [float(len(c) > 10) for c in completions]\n"
    (here / "long.py").write_text(rule)
    found = report("long.py:long", *argv[:2], data="labeled.jsonl")[1]
    assert found["step_rewards"]["step_lengths"]["against"]["min"]["true_frac"] == pytest.approx(1 / 3)


def test_step_rewards_of_plain_completions_and_of_a_recipe(here, capsys):
    rows = [{"prompt": "p", "completion": "ab\n\ncd\n\n \n"}, {"prompt": "q", "completion": ""}]
    write_lines("plain.jsonl", rows)
    argv = ("--step_reward_funcs", "mine.py:step_lengths", "mine.py:step_outcome", "--data", "plain.jsonl")
    assert score(*argv, "--output", "scored.jsonl") == 1  # numbers in the place of lists
    out = capsys.readouterr().out
    assert "step_outcome failed on 2 rows\n  row 1: RewardError: step reward function 'step_outcome': got float" in out
    assert "step_lengths: no labels, and no reward or column `correct`, to compare it with" in out
    assert [row["steps"] for row in read_rows("scored.jsonl")] == [["ab\n\n", "cd\n\n"], []]
    assert [row["scores"]["step_outcome"] for row in read_rows("scored.jsonl")] == [[None, None], []]
    assert score(*argv[:2], *argv[3:], "--step_separator", r"\n", "--output", "scored.jsonl") == 0
    assert read_rows("scored.jsonl")[0]["steps"] == ["ab\n", "\ncd\n"]
    (here / "recipe.yaml").write_text('step_reward_funcs: [mine.py:step_lengths]\nstep_separator: ["re:c"]\n')
    assert score("--config", "recipe.yaml", "--data", "plain.jsonl", "--output", "scored.jsonl") == 0
    assert read_rows("scored.jsonl")[0]["steps"] == ["ab\n\nc", "d\n\n \n"]


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet", "json"])
def test_csv_parquet_and_json_give_the_same_report(report, ending):
    rows = ROWS[:3]
    if ending == "csv":
        with open("rows.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    else:
        write_lines("rows.json", rows)
    assert read_rows(f"rows.{ending}") == rows
    code, found = report("exact", data=f"rows.{ending}")
    assert (code, found["rewards"]["exact"]["mean"]) == (0, pytest.approx(2 / 3))


def test_logged_completions_are_scored_again(here, report, capsys, tokenizer, settings):
    """TRL's own files: the rewards in them, and their columns from the dataset; then the samples of an evaluation."""
    from datasets import Dataset

    from trl_drgrpo import DrGRPOTrainer

    def early(completions, log_extra, **kwargs):
        log_extra("size", [len(completion) for completion in completions])
        return [float(completion[0]["content"][:1] < "m") for completion in completions]

    prompts = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i)} for i in range(4)]
    settings |= {"max_steps": 2, "log_completions": True, "num_completions_to_print": 0}
    train(DrGRPOTrainer, settings, Dataset.from_list(prompts), tokenizer, early)
    capsys.readouterr()
    write_lines("dataset.jsonl", prompts)
    # The same rule, and one that finds the last rows wrong.
    (here / "again.py").write_text(
        "def early(completions, answer, size, **kwargs):\n"
        "    return [float(c[0]['content'][:1] < 'm') for c in completions]\n"
    )
    (here / "other.py").write_text("def early(completions, **kwargs):\n    return [7.0] * len(completions)\n")
    run = Path(settings["output_dir"])
    code, found = report("again.py:early", "--dataset", "dataset.jsonl", data=str(run / "completions"))
    assert (code, found["rewards"]["early"]["rows"]) == (0, 16)  # 2 steps of 8
    assert found["disagreements"] == [{"first": "early", "second": "logged early", "count": 0, "rows": []}]
    for folder in (run / "completions", run):  # the run's folder will do
        assert report("other.py:early", data=str(folder))[1]["disagreements"][0]["count"] == 16
    (run / "completions").rename(run / "_drgrpo" / "elsewhere")
    # The groups that the run log recorded: prompts as texts, special tokens in the completions.
    (here / "plain.py").write_text(
        "def early(completions, answer, **kwargs):\n"
        "    return [float(c[0]['content'][:1] < 'm') for c in completions]\n"
    )
    arguments = ("--dataset", "dataset.jsonl", "--output", "scored.jsonl")
    code, found = report("plain.py:early", *arguments, data=str(run))
    assert (code, found["rewards"]["early"]["rows"]) == (0, 16)
    assert found["disagreements"] == [{"first": "early", "second": "logged early", "count": 0, "rows": []}]
    rows = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    assert all(row["prompt"] in [each["prompt"] for each in prompts] for row in rows)
    assert not any(mark in row["completion"][0]["content"] for row in rows for mark in tokenizer.all_special_tokens)
    assert report("other.py:early", data=str(run))[1]["disagreements"][0]["count"] == 16  # without the dataset
    (run / "_drgrpo" / "run.json").write_text("{")
    assert report("other.py:early", data=str(run))[1]["rewards"]["early"]["rows"] == 16
    (run / "_drgrpo" / "completions.jsonl").unlink()
    assert score("--rewards", "other.py:early", "--data", str(run)) == 2
    assert "a run that recorded no completions; expected completions. Train with record_" in capsys.readouterr().err
    samples = run / "_drgrpo" / "evaluations" / "samples"
    samples.mkdir(parents=True)
    for name in ("a", "b"):
        write_lines(samples / f"{name}.jsonl", ROWS)
    for folder in (samples, run):
        assert report("exact", data=str(folder))[1]["rewards"]["exact"]["rows"] == 8


def test_a_baseline_and_the_model_of_an_evaluation_are_scored_apart(here, report, capsys):
    evaluations = here / "runs" / "x" / "_drgrpo" / "evaluations"
    samples = evaluations / "samples"
    samples.mkdir(parents=True)
    # By name the baseline would be the last one.
    for name, rows in (("runs/x", ROWS[:3]), ("z-base", ROWS[3:])):
        file = samples / f"{name[-6:].replace('/', '-')}-1.jsonl"
        write_lines(file, rows)
        file.with_suffix(".eval.json").write_text(json.dumps({"model": name, "weights": name[-1]}))
    models = [
        {"role": role, "name": name, "weights": name[-1]}
        for role, name in (("baseline", "z-base"), ("model", "runs/x"))
    ]
    (evaluations / "test.json").write_text(json.dumps({"format": 1, "models": models, "dataset": {"name": "d"}}))
    for folder in (here / "runs" / "x", samples):
        code, found = report("exact", "--output", "scored.jsonl", "--pass_rates", "rates.jsonl", data=str(folder))
        assert (code, found["data"], found["rewards"]["exact"]["rows"]) == (0, "model: runs/x", 3)
        (other,) = found["others"]
        assert (other["data"], other["rewards"]["exact"]["rows"]) == ("baseline: z-base", len(ROWS) - 3)
    scored = [json.loads(line)["data"] for line in Path("scored.jsonl").read_text().splitlines()]
    assert scored == ["baseline: z-base"] * (len(ROWS) - 3) + ["model: runs/x"] * 3
    rated = [json.loads(line) for line in Path("rates.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rated} == {row["prompt"] for row in ROWS[:3]}
    capsys.readouterr()
    assert score("--rewards", "mine.py:exact", "--data", str(samples)) == 0
    tables = capsys.readouterr().out
    assert tables.index("baseline: z-base") < tables.index("model: runs/x")


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("_", "name", "content", "message"), cases("cli.tsv", "files"))
def test_bad_files_are_one_line_and_exit_code_2(here, capsys, _, name, content, message):
    (here / "rows.jsonl").unlink()
    if content is not None:
        (here / name).write_text(content * (100_000 if name == "deep.jsonl" else 1), encoding="latin-1")
    assert score("--rewards", "mine.py:exact", "--data", name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


CALL = "--rewards mine.py:exact --data rows.jsonl"
STEPS = "--step_reward_funcs mine.py:step_lengths --data rows.jsonl"


@pytest.mark.parametrize(("_", "argv", "message"), cases("cli.tsv", "score"))
def test_bad_flags_are_one_line_and_exit_code_2(here, capsys, _, argv, message):
    (here / "linked.jsonl").hardlink_to(here / "rows.jsonl")
    (here / "exits.py").write_text("import sys; sys.exit(3)")
    for name, more in (("cut", {"labels": [True, False]}), ("soft", {"labels": [0.75]}), ("steps", {"steps": "a"})):
        write_lines(f"{name}.jsonl", [{"prompt": "p", "steps": ["a"], **more}])
    (here / "ends.py").write_text("def by_token(steps, step_ends, **kwargs): return step_ends")
    (here / "raises.py").write_text("class E(Exception): pass\nraise E('own')")
    before = (here / "rows.jsonl").read_text()
    assert score(*shlex.split(argv.replace("CALL", CALL).replace("STEPS", STEPS))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert (here / "rows.jsonl").read_text() == before


def test_bad_configuration_of_a_reward_is_no_failure_of_a_row():
    def unset(completions, **kwargs):
        raise InputError("api_key_env", "KEY, which is not set", "a variable", "Export it.")

    with pytest.raises(InputError, match="api_key_env"):
        score_rows(unset, ROWS, "unset")


def test_pass_rates_by_the_first_reward(here, capsys):
    rows = [*ROWS, {"prompt": "2+2=", "completion": "5", "answer": "4"}]
    write_lines("rows.jsonl", rows)
    argv = ("--data", "rows.jsonl", "--pass_rates", "out/rates.jsonl", "--rewards")
    assert score(*argv, "mine.py:exact", "mine.py:lenient") == 0
    assert read_pass_rates(here / "out/rates.jsonl") == {
        prompt_key("2+2="): (0.5, 2.0),
        prompt_key("2+3="): (0.0, 1.0),
        prompt_key("1+1="): (1.0, 1.0),
    }
    said = "Pass rates of 3 prompts by exact: out/rates.jsonl; 1 without a score are left out"
    assert said in capsys.readouterr().err
    # What passes has to be said of other rewards than 0 and 1.
    assert score(*argv, "mine.py:later") == 2
    out, err = capsys.readouterr()
    assert "pass_rates: got rewards of later other than 0 and 1; expected pass or fail. Set the lowest" in err
    assert "later" in out  # the table is there all the same
    assert score(*argv, "mine.py:later", "--correct_threshold", "4") == 0
    assert {rate for rate, _ in read_pass_rates(here / "out/rates.jsonl").values()} == {1.0}


def test_prompts_are_the_same_in_a_table_and_in_the_data():
    plain = [{"role": "user", "content": "1+1?"}]
    table = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1?"}], "tool_calls": None}]
    assert prompt_key(plain) == prompt_key(table) != prompt_key("1+1?")
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "a": None}}]}]
    assert prompt_key(call) != prompt_key([{"role": "assistant", "content": None}])
    assert prompt_key(call) == prompt_key([{**call[0], "tool_calls": [{"function": {"name": "f"}}], "content": ""}])
