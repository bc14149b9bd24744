"""`trl-drgrpo score`, on files as users and TRL write them, and on files that are broken."""

import csv
import json
import textwrap

import pyarrow
import pytest
from pyarrow import parquet

from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.sampling.pass_rates import read_pass_rates
from trl_drgrpo.rewards.sample import prompt_key
from trl_drgrpo.rewards.scoring import read_rows, score_rows

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
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import time

            def exact(completions, answer, **kwargs):
                return [None if a is None else float(a == c) for c, a in zip(completions, answer)]

            def lenient(completions, answer, **kwargs):
                return [None if a is None else float(abs(int(a) - int(c)) <= 1) for c, a in zip(completions, answer)]

            def broken(completions, log_metric, **kwargs):
                log_metric("rewards/broken/seen", 1.0)
                return [1.0 / int(c) for c in completions]

            def slow(completions, **kwargs):
                time.sleep(0.3 if "6" in completions else 0)
                return [0.0] * len(completions)

            def counting(completions, log_metric, **kwargs):
                failed = [c == "6" for c in completions]
                log_metric("rewards/counting/failed_frac", sum(failed) / len(failed))
                return [None if f else 1.0 for f in failed]

            async def later(prompts, completions, trainer_state, log_extra, **kwargs):
                log_extra("x", [1] * len(completions))
                return [float(len(p)) for p in prompts]

            def text(completions, **kwargs):
                return "1.0"

            def lengths(completion_ids, **kwargs):
                return [float(len(ids)) for ids in completion_ids]

            def size(completions, **kwargs):
                return [float(len(completions))] * len(completions)
            """
        )
    )
    write_json_lines("rows.jsonl", ROWS)
    return tmp_path


def write_json_lines(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def score(*argv):
    return main(["score", *argv])


def report(capsys, *argv):
    """Exit code and the JSON that was printed."""
    code = score(*argv, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_the_numbers(here, capsys):
    code, found = report(capsys, "--rewards", "mine.py:exact", "--data", "rows.jsonl")
    assert code == 0
    exact = found["rewards"]["exact"]
    # 1, 0, 1, None: mean 2/3; population variance 2/3 - 4/9 = 2/9
    assert exact["mean"] == pytest.approx(2 / 3)
    assert exact["std"] == pytest.approx((2 / 9) ** 0.5)
    assert (exact["rows"], exact["none_frac"], exact["failed"]) == (4, 0.25, 0)
    assert (exact["min"], exact["max"]) == (0.0, 1.0)
    assert found["disagreements"] == []


def test_two_graders_are_held_against_each_other(here, capsys):
    argv = ("--rewards", "mine.py:exact", "mine.py:lenient", "mine.py:later", "--data", "rows.jsonl")
    code, found = report(capsys, *argv)
    assert code == 0
    assert found["disagreements"][0] == {"first": "exact", "second": "lenient", "count": 1, "rows": [2]}
    assert [pair["count"] for pair in found["disagreements"]] == [1, 4, 4]
    assert score(*argv) == 0
    assert "exact and lenient differ on 1 of 4 rows\n  row 2: 0 and 1: 6\n" in capsys.readouterr().out


def test_a_failure_costs_its_row_and_is_exit_code_1(here, capsys):
    code, found = report(capsys, "--rewards", "mine.py:broken", "mine.py:text", "--data", "rows.jsonl")
    assert code == 1
    broken, text = found["rewards"]["broken"], found["rewards"]["text"]
    assert broken["mean"] == pytest.approx((1 / 4 + 1 / 6 + 1 / 2) / 3)
    assert broken["failures"] == [{"row": 4, "reason": "ZeroDivisionError: float division by zero"}]
    assert broken["metrics"] == {"rewards/broken/seen": 1.0}
    assert text["failed"] == 4
    assert text["mean"] is None
    assert "got str '1.0'; expected a list of 1 numbers" in text["failures"][0]["reason"]
    assert score("--rewards", "mine.py:broken", "--data", "rows.jsonl") == 1
    out, err = capsys.readouterr()
    assert "broken failed on 1 rows\n  row 4: ZeroDivisionError" in out
    assert "return [1.0 / int(c) for c in completions]" in err  # where it failed
    assert "Traceback" not in out


def test_a_broken_contract_is_one_line_and_no_traceback(here, capsys):
    assert score("--rewards", "mine.py:text", "--data", "rows.jsonl", "--show", "1") == 1
    out, err = capsys.readouterr()
    assert "row 1: RewardError: reward function 'text': got str '1.0'; expected a list" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_golds_that_cannot_be_read_are_named(here, capsys, batch_size):
    long = "1 and " * 50
    answers = ["4", "x", long, None]
    write_json_lines("golds.jsonl", [{**row, "answer": gold} for row, gold in zip(ROWS, answers, strict=True)])
    argv = ("--rewards", "numeric_reward", "mine.py:exact", "--data", "golds.jsonl", "--batch_size", batch_size)
    _, found = report(capsys, *argv)
    unscored = found["rewards"]["numeric_reward"]["unscored"]
    assert [one["row"] for one in unscored] == [2, 3, 4]
    assert unscored[0]["columns"] == {"answer": "x"}
    assert unscored[0]["reason"] == "column 'answer' holds 'x', which is not one number"
    assert (unscored[2]["columns"], unscored[2]["reason"]) == ({"answer": "None"}, None)
    assert len(unscored[1]["columns"]["answer"]) == 80
    # A function without a method to ask: the columns that it names.
    assert found["rewards"]["exact"]["unscored"] == [{"row": 4, "reason": None, "columns": {"answer": "None"}}]
    score(*argv, "--show", "1")
    out = capsys.readouterr().out
    assert "numeric_reward gave None to 3 of 4 rows, with these gold values:\n  row 2: answer x (column" in out
    assert "row 3: answer" not in out


def test_a_gold_that_math_cannot_read_is_named(here, capsys):
    rows = [{"prompt": "q", "completion": "#### 4", "solution": gold} for gold in ("4", "x +")]
    write_json_lines("golds.jsonl", rows)
    _, found = report(capsys, "--rewards", "math_reward", "--data", "golds.jsonl")
    (one,) = found["rewards"]["math_reward"]["unscored"]
    assert (one["row"], one["columns"]) == (2, {"solution": "x +"})
    assert one["reason"]


@pytest.mark.parametrize(("batch_size", "failures"), [("1", [2]), ("4", [])])
def test_what_a_reward_counts_as_failed_is_failed(here, capsys, batch_size, failures):
    argv = ("--rewards", "mine.py:counting", "--data", "rows.jsonl", "--batch_size", batch_size)
    code, found = report(capsys, *argv)
    assert code == 1
    assert found["rewards"]["counting"]["failed"] == 1
    assert [failure["row"] for failure in found["rewards"]["counting"]["failures"]] == failures


def test_the_slowest_row_is_named(here, capsys):
    _, found = report(capsys, "--rewards", "mine.py:slow", "--data", "rows.jsonl", "--show", "1")
    [slowest] = found["rewards"]["slow"]["slowest"]
    assert slowest["row"] == 2
    assert slowest["seconds"] >= 0.3


def test_a_batch_is_one_call(here, capsys):
    _, found = report(capsys, "--rewards", "mine.py:size", "--data", "rows.jsonl", "--batch_size", "3")
    assert (found["rewards"]["size"]["mean"], found["rewards"]["size"]["min"]) == (2.5, 1.0)  # 3, 3, 3, 1


def test_rows_are_written_with_their_scores(here, capsys):
    argv = ("--rewards", "mine.py:exact", "mine.py:broken", "--data", "rows.jsonl")
    assert score(*argv, "--output", "out/scored.jsonl") == 1
    written = [json.loads(line) for line in (here / "out" / "scored.jsonl").read_text().splitlines()]
    assert [row["scores"]["exact"] for row in written] == [1.0, 0.0, 1.0, None]
    assert [row["answer"] for row in written] == ["4", "5", "2", None]
    assert ["failures" in row for row in written] == [False, False, False, True]
    capsys.readouterr()
    code, found = report(capsys, "--rewards", "mine.py:exact", "--data", "out/scored.jsonl", "--limit", "2")
    assert (code, found["rewards"]["exact"]["rows"]) == (0, 2)  # what was written can be scored again


def test_registered_names_conversations_and_renamed_columns(here, capsys):
    rows = [
        {
            "prompt": [{"role": "user", "content": "2+2="}],
            "completion": [{"role": "assistant", "content": f"<think>hm</think>\\boxed{{{given}}}"}],
            "truth": "4",
        }
        for given in (4, 5)
    ]
    write_json_lines("chat.jsonl", rows)
    argv = (
        "--rewards",
        "accuracy_reward",
        "think_format_reward",
        "--data",
        "chat.jsonl",
        "--columns",
        "truth=solution",
    )
    code, found = report(capsys, *argv)
    assert code == 0
    assert found["rewards"]["accuracy_reward"]["mean"] == 0.5
    assert found["rewards"]["think_format_reward"]["mean"] == 1.0


def test_rewards_with_options(here, capsys):
    spec = "{weighted_sum: {parts: {exact_match_reward: 1.0, numeric_reward: -0.5}, name: total}}"
    code, found = report(capsys, "--rewards", spec, "mine.py:exact", "--data", "rows.jsonl", "--limit", "3")
    assert code == 0
    assert found["rewards"]["total"]["mean"] == pytest.approx(1 / 3)  # 0.5, 0, 0.5
    assert found["rewards"]["total"]["metrics"]["rewards/total/numeric_reward"] == pytest.approx(2 / 3)
    assert score("--rewards", "{weighted_sums: {}}", "--data", "rows.jsonl") == 2
    assert "Did you mean weighted_sum" in capsys.readouterr().err


def test_token_ids_come_from_a_tokenizer(here, capsys, saved_model):
    assert score("--rewards", "mine.py:lengths", "--data", "rows.jsonl") == 2
    assert (
        "reward lengths: got completions without token ids; expected a column completion_ids"
        in capsys.readouterr().err
    )
    _, found = report(capsys, "--rewards", "mine.py:lengths", "--data", "rows.jsonl", "--tokenizer", saved_model)
    assert found["rewards"]["lengths"]["mean"] == 1.0  # a byte-level tokenizer: one digit, one token


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet", "json"])
def test_other_files_hold_the_same(here, capsys, ending):
    rows = ROWS[:3]
    if ending == "csv":
        with open("rows.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    else:
        write_json_lines("rows.json", rows)
    assert read_rows(f"rows.{ending}") == rows
    code, found = report(capsys, "--rewards", "mine.py:exact", "--data", f"rows.{ending}")
    assert (code, found["rewards"]["exact"]["mean"]) == (0, pytest.approx(2 / 3))


def test_what_a_run_has_logged_is_scored_again(here, capsys, model, tokenizer, settings):
    """TRL's own files: the rewards in them, and their columns from the dataset."""
    from datasets import Dataset

    from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

    def early(completions, log_extra, **kwargs):
        log_extra("size", [len(completion) for completion in completions])
        return [float(completion[0]["content"][:1] < "m") for completion in completions]

    prompts = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i)} for i in range(4)]
    trainer = DrGRPOTrainer(
        model=model,
        reward_funcs=[early],
        args=DrGRPOConfig(**{**settings, "max_steps": 2, "log_completions": True, "num_completions_to_print": 0}),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    trainer.train()
    capsys.readouterr()
    write_json_lines("dataset.jsonl", prompts)
    # The same rule, and one that finds the last rows wrong.
    (here / "again.py").write_text(
        "def early(completions, answer, size, **kwargs):\n"
        "    return [float(c[0]['content'][:1] < 'm') for c in completions]\n"
    )
    (here / "other.py").write_text("def early(completions, **kwargs):\n    return [7.0] * len(completions)\n")
    folder = f"{settings['output_dir']}/completions"
    code, found = report(capsys, "--rewards", "again.py:early", "--data", folder, "--dataset", "dataset.jsonl")
    assert code == 0
    assert found["rewards"]["early"]["rows"] == 16  # 2 steps of 8
    assert found["disagreements"] == [{"first": "early", "second": "logged early", "count": 0, "rows": []}]
    code, found = report(capsys, "--rewards", "other.py:early", "--data", folder)
    assert found["disagreements"][0]["count"] == 16


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "data: got 'gone.jsonl', which is not a file"),
        ("empty.jsonl", b"\n \n", "data: got 'empty.jsonl' without rows"),
        (
            "cut.jsonl",
            b'{"prompt": "p", "completion": "c"}\n{"prompt": "p", "comp',
            "cut.jsonl, line 2: got invalid JSON",
        ),
        ("list.jsonl", b"[1]\n", "list.jsonl, line 1: got list; expected a JSON object"),
        ("deep.jsonl", b"[" * 100_000, "deep.jsonl, line 1: got invalid JSON"),
        ("latin.jsonl", '{"prompt": "é"}'.encode("latin-1"), "data: got 'latin.jsonl' ('utf-8' codec"),
        ("rows.txt", b"x", "expected a file that ends in .jsonl, .json, .csv, .parquet"),
        ("rows.parquet", b"PAR1 not really", "data: got 'rows.parquet' ("),
        ("short.csv", b"prompt,completion\np\n", "short.csv, line 2: got fewer fields"),
        ("long.csv", b"prompt,completion\np,c,x\n", "long.csv, line 2: got more fields"),
        ("quote.csv", b'prompt,completion\np,"c\n', "quote.csv, line 2: got invalid CSV (unexpected end of data)"),
        ("named.jsonl", b'{"prompt": "p", "response": "c"}\n', "data, row 1: got the columns prompt, response"),
        ("number.jsonl", b'{"prompt": "p", "completion": 4}\n', "data, row 1: got a completion of type int: 4"),
        ("null.jsonl", b'{"prompt": "p", "completion": null}\n', "data, row 1: got a completion of type NoneType"),
        ("strings.jsonl", b'{"prompt": "p", "completion": ["a"]}\n', "data, row 1: got a completion of type list"),
        ("content.jsonl", b'{"prompt": "p", "completion": [{"content": 4}]}\n', "data, row 1: got a completion of"),
        (
            "column.jsonl",
            b'{"prompt": "p", "completion": "c"}\n',
            "reward exact: got a dataset with the columns prompt",
        ),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(here, capsys, name, content, message):
    if content is not None:
        (here / name).write_bytes(content)
    assert score("--rewards", "mine.py:exact", "--data", name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


CALL = ("--rewards", "mine.py:exact", "--data", "rows.jsonl")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rewards", "mine.py:exact"], "--data: got nothing; expected a value"),
        (["--data", "rows.jsonl"], "--reward_funcs: got nothing; expected a value"),
        (["--rewards", "acuracy_reward", "--data", "rows.jsonl"], "Did you mean accuracy_reward"),
        (
            ["--rewards", "mine.py:exact", "mine.py:exact", "--data", "rows.jsonl"],
            "reward_funcs: got mine.py:exact mine.py",
        ),
        ([*CALL, "--batch_size", "0"], "batch_size: got 0"),
        ([*CALL, "--limit", "0"], "limit: got 0"),
        ([*CALL, "--tolerance", "nan"], "tolerance: got nan"),
        ([*CALL, "--columns", "answer"], "columns: got 'answer'"),
        ([*CALL, "--columns", "x=y"], "one of the columns answer, comp"),
        ([*CALL, "--columns", "answer=prompt"], "there is a column prompt"),
        ([*CALL, "--output", "rows.jsonl/x"], "output: got rows.jsonl, but"),
        ([*CALL, "--dataset", "gone.csv"], "dataset: got 'gone.csv'"),
        ([*CALL, "--output", ""], "output: got ''"),
        ([*CALL, "--output", "./rows.jsonl"], "which is also an input"),
        (["--rewards", "{exact_match_reward: {column: 5}}", "--data", "rows.jsonl"], "column: got 5"),
        (["--rewards", "{weighted_sum: {parts: 5}}", "--data", "rows.jsonl"], "weighted_sum.parts: got 5"),
        (["--rewards", "{openrlhf: mine.py:exact}", "--data", "rows.jsonl"], "openrlhf.function: got exact("),
        ([*CALL, "--batchsize", "2"], "Did you mean --batch_size?"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(here, capsys, argv, message):
    assert score(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_two_rewards_of_one_name_are_told_apart(here, capsys):
    (here / "copy.py").write_text((here / "mine.py").read_text())
    _, found = report(capsys, "--rewards", "mine.py:exact", "copy.py:exact", "--data", "rows.jsonl")
    assert list(found["rewards"]) == ["exact", "copy.py:exact"]
    assert found["disagreements"][0]["count"] == 0


def test_bad_configuration_of_a_reward_is_no_failure_of_a_row():
    def unset(completions, **kwargs):
        raise InputError("api_key_env", "KEY, which is not set", "a variable", "Export it.")

    with pytest.raises(InputError, match="api_key_env"):
        score_rows(unset, ROWS, "unset")


def test_what_is_read_is_never_written_over(here, capsys):
    (here / "other.jsonl").hardlink_to(here / "rows.jsonl")
    before = (here / "rows.jsonl").read_text()
    argv = CALL
    assert score(*argv, "--output", "other.jsonl") == 2
    write_json_lines("dataset.jsonl", ROWS[:1])
    assert score(*argv, "--dataset", "dataset.jsonl", "--output", "dataset.jsonl") == 2
    assert capsys.readouterr().err.count("which is also an input or another output; expected a file of its own") == 2
    assert (here / "rows.jsonl").read_text() == before


def test_sys_exit_in_a_reward_is_a_failure_of_its_rows(here, capsys):
    (here / "exits.py").write_text("import sys\n\ndef reward(completions, **kwargs):\n    sys.exit(0)\n")
    code, found = report(capsys, "--rewards", "exits.py:reward", "--data", "rows.jsonl")
    assert code == 1
    assert found["rewards"]["reward"]["failed"] == 4


@pytest.mark.parametrize("body", ["import sys; sys.exit(3)", "class E(Exception): pass\nraise E('own')"])
def test_a_module_that_ends_with_an_error_of_its_own(here, capsys, body):
    (here / "ends.py").write_text(body)
    assert score("--rewards", "ends.py:reward", "--data", "rows.jsonl") == 2
    assert score("--rewards", "ends.reward", "--data", "rows.jsonl") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("importing ends") == err.count("\n") == 2


def test_what_a_reward_prints_is_no_result(here, capsys):
    body = "def reward(completions, **kwargs):\n    print('HELLO')\n    return [1.0] * len(completions)\n"
    (here / "prints.py").write_text("print('LOADED')\n\n" + body)
    assert score("--rewards", "prints.py:reward", "--data", "rows.jsonl", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rewards"]["reward"]["mean"] == 1.0
    assert "LOADED" in err
    assert "HELLO" in err


def test_pass_rates_by_the_first_reward(here, capsys):
    rows = [*ROWS, {"prompt": "2+2=", "completion": "5", "answer": "4"}]
    write_json_lines("rows.jsonl", rows)
    argv = ("--rewards", "mine.py:exact", "mine.py:lenient", "--data", "rows.jsonl", "--pass_rates", "out/rates.jsonl")
    assert score(*argv) == 0
    assert read_pass_rates(here / "out/rates.jsonl") == {
        prompt_key("2+2="): (0.5, 2.0),
        prompt_key("2+3="): (0.0, 1.0),
        prompt_key("1+1="): (1.0, 1.0),
    }
    said = "Pass rates of 3 prompts by exact: out/rates.jsonl; 1 without a score are left out"
    assert said in capsys.readouterr().err


def test_what_passes_has_to_be_said_of_other_rewards(here, capsys):
    argv = ("--rewards", "mine.py:later", "--data", "rows.jsonl", "--pass_rates", "rates.jsonl")
    assert score(*argv) == 2
    out, err = capsys.readouterr()
    assert "pass_rates: got rewards of later other than 0 and 1; expected pass or fail. Set the lowest" in err
    assert "later" in out  # the table is there all the same
    assert score(*argv, "--correct_threshold", "4") == 0
    assert {rate for rate, _ in read_pass_rates(here / "rates.jsonl").values()} == {1.0}
    assert score(*CALL, "--correct_threshold", "1") == 2
    assert "correct_threshold: got 1.0; expected none without --pass_rates." in capsys.readouterr().err
    assert score(*CALL, "--pass_rates", "rows.jsonl") == 2
    assert "pass_rates: got rows.jsonl, which is also an input" in capsys.readouterr().err


def test_prompts_are_the_same_in_a_table_and_in_the_data():
    plain = [{"role": "user", "content": "1+1?"}]
    table = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1?"}], "tool_calls": None}]
    assert prompt_key(plain) == prompt_key(table) != prompt_key("1+1?")
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "a": None}}]}]
    assert prompt_key(call) != prompt_key([{"role": "assistant", "content": None}])
    assert prompt_key(call) == prompt_key([{**call[0], "tool_calls": [{"function": {"name": "f"}}], "content": ""}])
