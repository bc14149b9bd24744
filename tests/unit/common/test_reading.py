"""Errors of Python and libraries about the user's files, in one line; a bug keeps its traceback."""

import errno
import io
import sys
from pathlib import Path

import pytest

from trl_drgrpo.cli import main as command_line
from trl_drgrpo.common.disk import working_directory_kept, write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import problem_of, reading, user_path
from trl_drgrpo.rewards.contract import log_column, log_number


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), RecursionError("deep"), ValueError(""), type("PanicException", (BaseException,), {})("Rust")],
)
def test_whatever_a_library_raises_is_one_error(error):
    message = r"^--data: got a\.csv, which cannot be read; expected rows\. "
    with pytest.raises(InputError, match=message) as caught, reading("--data", "a.csv", "rows", "Write it again."):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), InputError("a", "b", "c", "d")])
def test_errors_that_are_not_of_the_input_pass(error):
    with pytest.raises(type(error)) as caught, reading("--data", "a.csv", "rows"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 1, "disk full: /a/b could not be written"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "disk full: the output could not be written"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "file: got /a/b: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2, "File name too long"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "a"), 2, "symbolic links"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 2, "file or current directory: got No such"),
        (UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid"), 2, "expected UTF-8 text"),
        (RecursionError("deep"), 2, "nested less deeply"),
        (MemoryError(), 2, "fit into memory"),
    ],
)
def test_the_last_resort_is_one_line(error, code, words, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr(command_line, "command", lambda name: (lambda parser: None, run, ""))
    assert command_line.main(["demo"]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert "x" * 250 not in err


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("b"), ConnectionError("c"), AttributeError("d")])
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    def run(args):
        raise error

    monkeypatch.setattr(command_line, "command", lambda name: (lambda parser: None, run, ""))
    with pytest.raises(type(error)):
        command_line.main(["demo"])


def test_an_error_below_a_librarys_reader_names_what_was_read(tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text('{"model_type": []}')
    with pytest.raises(TypeError) as caught:
        AutoConfig.from_pretrained(str(tmp_path))
    assert str(tmp_path) in str(problem_of(caught.value))


def test_an_error_of_our_own_below_a_librarys_reader_is_a_bug():
    from datasets import Dataset

    from trl_drgrpo.cli.data import as_prompted

    with pytest.raises(KeyError) as caught:
        Dataset.from_list([{"a": 1}]).map(as_prompted, fn_kwargs={"prompt_template": None, "system_prompt": None})
    assert problem_of(caught.value) is None


def test_a_full_standard_output_is_one_line(monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command_line, "command", lambda name: (lambda parser: None, lambda args: 0, ""))
    monkeypatch.setattr(sys, "stdout", Full())
    assert command_line.main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("error: disk full")


def test_arguments_that_are_no_unicode(capsys):
    assert command_line.main(["score", "--data", "\udcff.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: command line: got '\\udcff.jsonl'; expected UTF-8 text")


def test_the_home_of_nobody_stays_as_it_is():
    assert str(user_path("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"
    assert user_path("~/x").is_absolute()


def test_half_a_file_does_not_stay(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text("old")

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(file), "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert file.read_text() == "old"


@pytest.mark.parametrize("value", [None, "0.5", [1], 10**400, object(), b"1"])
def test_a_metric_that_is_no_number_is_left_out(value, caplog):
    logged = []
    for _ in range(2):
        log_number(lambda name, number: logged.append((name, number)), f"m{type(value).__name__}", value)
    assert logged == []
    assert len(caplog.records) == 1  # said once
    log_number(lambda name, number: logged.append((name, number)), "ok", True)
    assert logged == [("ok", 1.0)]


@pytest.mark.parametrize("values", [None, 3, "ab", [1], [1, 2, 3]])
def test_a_column_without_a_value_per_row_is_left_out(values, caplog):
    logged = []
    log_column(lambda name, column: logged.append(column), 2, f"c{values}", values)
    assert logged == []
    assert "2 values, one per completion" in caplog.text
    log_column(lambda name, column: logged.append(column), 2, "ok", (1, 2))
    assert logged == [[1, 2]]


def test_the_working_directory_is_put_back(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    with working_directory_kept("reward f"):
        monkeypatch.chdir(tmp_path / "inner")
    assert Path.cwd() == tmp_path
    assert "reward f changed the working directory" in caplog.text


def test_an_unreadable_torch_file_is_one_error(tmp_path):
    import torch

    (tmp_path / "optimizer.pt").write_bytes(b"junk" * 100)
    with pytest.raises(Exception) as caught:
        torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert str(problem_of(caught.value)).startswith(f"file: got {tmp_path}/optimizer.pt, which cannot be read")
