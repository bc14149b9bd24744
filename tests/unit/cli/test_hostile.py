"""Broken files of every kind, through every command: one line on stderr, no traceback, no hang.

`main` runs in this process, so an exception that it does not turn into a line fails the test by itself.
"""

import errno
import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from trl_drgrpo.cli.main import main

JUNK = bytes((i * 7919) % 251 for i in range(3000))
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
ROW = '{"prompt": "1+2=", "answer": 3}\n'

DATA = {
    "empty.jsonl": "",
    "blank.jsonl": " \n \n",
    "junk.jsonl": JUNK,
    "cut.jsonl": ROW + ROW[:-9],
    "latin.jsonl": '{"prompt": "é", "answer": 3}\n'.encode("latin-1"),
    "utf16.jsonl": ROW.encode("utf-16"),
    "nul.jsonl": ROW.encode() + b"\0\0\n",
    "deep.jsonl": '{"prompt": ' + "[" * 3000 + "]" * 3000 + "}\n",
    "digits.jsonl": '{"prompt": "a", "answer": ' + "9" * 5000 + "}\n",
    "list.jsonl": "[1, 2]\n",
    "number.jsonl": "3\n",
    "mixed.jsonl": ROW + '{"prompt": 3}\n',
    "nulls.jsonl": '{"prompt": null, "answer": null}\n',
    "other.jsonl": '{"x": 1}\n',
    "nested.jsonl": '{"prompt": {"a": 1}, "answer": 3}\n',
    "roles.jsonl": '{"prompt": [{"content": "x"}], "answer": 3}\n',
    "parts.jsonl": '{"prompt": [{"role": "user", "content": ["a", 3]}], "answer": 3}\n',
    "cut.json": "[" + ROW + "," + ROW[:-9],
    "junk.csv": JUNK,
    "empty.csv": "",
    "ragged.csv": "prompt,answer\na,3,4\nb\n",
    "quote.csv": 'prompt,answer\n"a,3\n',
    "latin.csv": "prompt,answer\né,3\n".encode("latin-1"),
    "junk.parquet": JUNK,
    "empty.parquet": "",
    "zeros.parquet": b"PAR1" + bytes(100) + b"PAR1",
    "text.txt": "hi",
}
FOLDERS = {
    "disk/dataset_dict.json": "{",
    "splits/dataset_dict.json": '["a"]',
    "state/state.json": "{}",
    "card/README.md": "---\nconfigs: 3\n---\n",
    "parquet/train.parquet": JUNK,
    "none/x.txt": "",
}
PLACES = [
    "",
    "x" * 300,
    "a/" * 2500,
    "~nobody-of-this-name/x",
    "/dev/full",
    "/dev/null",
    "/proc",
    "/",
    "loop",
    "fifo.jsonl",
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a circle of links and a pipe that nobody writes to."""
    monkeypatch.chdir(tmp_path)
    os.symlink("loop2", "loop")
    os.symlink("loop", "loop2")
    os.mkfifo("fifo.jsonl")
    return tmp_path


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(argv: list[str], capsys) -> str:
    """The one line that a command ends with."""
    code = main(argv)
    err = capsys.readouterr().err
    assert code in (1, 2), argv
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert len(lines[0]) < 6000
    return lines[0]


def train(data: str, *more: str) -> list[str]:
    task = ["--model_name_or_path", "trl_drgrpo:demo", "--dataset_name", data, "--reward_funcs", "list_sum_reward"]
    return ["train", *task, "--output_dir", "out", "--dry_run", *more]


@pytest.mark.parametrize("name", DATA)
def test_commands_refuse_hostile_data(name, place, capsys):
    path = str(put(place / name, DATA[name]))
    refused(train(path), capsys)
    refused(train(path, "--dataset_streaming", "true"), capsys)
    refused(["score", "--data", path, "--reward_funcs", "exact_match_reward"], capsys)
    refused(["train-prm", "--model", "trl_drgrpo:demo", "--data", path, "--output_dir", "out"], capsys)
    if name not in ("mixed.jsonl", "nulls.jsonl"):
        rates = ["--prior_pass_rates", path]
        refused([*train("trl_drgrpo:list_sum?size=64&test_size=0"), *rates], capsys)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", FOLDERS)
def test_data_folders(name, place, capsys):
    folder = str(put(place / name, FOLDERS[name]).parent)
    if name.startswith("card"):
        put(place / "card" / "train.jsonl", ROW)
    refused(train(folder), capsys)


@pytest.mark.parametrize("name", PLACES, ids=lambda name: name[:20] or "empty")
def test_places_to_read(name, place, capsys):
    refused(train(name), capsys)
    refused(["score", "--data", name, "--reward_funcs", "exact_match_reward"], capsys)
    refused(["train-prm", "--model", "trl_drgrpo:demo", "--data", name, "--output_dir", "out"], capsys)
    refused(["report", "--", name], capsys)
    refused(["merge", "--output", "out", "--", name], capsys)
    refused(["train", "--config", name], capsys)
    for command in (["generate", "hi"], ["plan", "--memory", "1GB"]):
        refused([*command, "--model", name], capsys)


@pytest.mark.parametrize("name", ["x" * 300, "/dev/full", "/proc/x", "~nobody-of-this-name/x", "loop", "fifo.jsonl/x"])
def test_places_to_write(name, place, capsys):
    put(place / "c.jsonl", '{"prompt": "a", "completion": "b", "answer": "b"}\n')
    before = sorted(place.iterdir())
    refused(train("trl_drgrpo:list_sum?size=64&test_size=0", "--output_dir", name), capsys)
    steps = put(place / "steps.jsonl", '{"prompt": "a", "steps": ["b", "c"], "labels": [true, false]}\n')
    refused(["train-prm", "--model", "trl_drgrpo:demo", "--data", str(steps), "--output_dir", name], capsys)
    steps.unlink()
    refused(["demo", "--output_dir", name], capsys)
    assert sorted(place.iterdir()) == before


def test_a_folder_with_a_pipe_is_not_waited_for(place, capsys):
    folder = put(place / "data" / "train.jsonl", ROW).parent
    os.mkfifo(folder / "test.jsonl")
    assert "a device or a pipe" in refused(train(str(folder)), capsys)


@pytest.mark.parametrize(
    "options", ["size=²", "size=" + "9" * 5000, "size=99999999999", "size=-1", "seed=x", "size", "&="]
)
def test_generated_data(options, place, capsys):
    refused(train(f"trl_drgrpo:list_sum?{options}"), capsys)


def test_a_kernel_package_that_is_missing_is_found_by_the_dry_run(place, monkeypatch, capsys):
    monkeypatch.setattr("trl_drgrpo.config.preflight.is_liger_kernel_available", lambda: False)
    run = train("trl_drgrpo:list_sum?size=64", "--use_liger_kernel", "true")
    assert refused(run, capsys).startswith("error: use_liger_kernel: got ")


def test_numbers_of_a_search_that_somebody_edited(place, capsys):
    data = put(place / "d.jsonl", '{"prompt": "1+2=", "answer": 3}\n')
    search = ["search", "--model", "trl_drgrpo:demo", "--dataset_name", str(data), "--strategy", "best_of_n"]
    search += ["--budget_tokens", "4", "--reward_funcs", "list_sum_reward", "--output", "found.jsonl"]
    put(place / "found.jsonl", "[1]\n3\n")
    for content in ("", "[]", "3", '{"whole_groups": "x"}', '{"whole_groups": [[1]]}', DEEP):
        put(place / "found.search.json", content)
        assert "not written by this command" in refused([*search, "--max_completion_length", "4"], capsys)


def header(content: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, and its data."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors(about: dict, data: bytes) -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text)) + text + data


def broken_models() -> dict[str, tuple[str, str | bytes | None]]:
    texts = {"empty": "", "brace": "{", "list": "[]", "null": "null", "junk": JUNK, "deep": DEEP, "folder": None}
    broken = {f"config {name}": ("config.json", content) for name, content in texts.items()}
    for name, change in {
        "unknown": '{"model_type": "zzz"}',
        "number": '{"model_type": 3}',
        "size": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": "x"}',
        "negative": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": -8}',
        "heads": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 0}',
        "rope": '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_parameters": "x"}',
    }.items():
        broken[f"config {name}"] = ("config.json", change)
    broken |= {f"weights {name}": ("model.safetensors", texts[name]) for name in ("empty", "junk", "folder")}
    broken |= {f"tokenizer {name}": ("tokenizer.json", texts[name]) for name in ("empty", "brace", "junk", "folder")}
    broken |= {f"its config {name}": ("tokenizer_config.json", texts[name]) for name in ("brace", "list", "junk")}
    return broken


@pytest.fixture
def model_copy(place, saved_model):
    shutil.copytree(saved_model, place / "model")
    return place / "model"


BROKEN = broken_models()


@pytest.mark.parametrize("name", [*BROKEN, "weights cut", "weights of another shape", "weights a pipe"])
def test_commands_refuse_broken_models(name, model_copy, capsys):
    file, content = BROKEN.get(name, ("model.safetensors", b""))
    path = model_copy / file
    whole = path.read_bytes()
    path.unlink()
    if name == "weights cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif name == "weights of another shape":
        about, data = header(whole)
        first = next(each for each in about.values() if "shape" in each and len(each["shape"]) == 2)
        first["shape"] = [1, first["shape"][0] * first["shape"][1]]
        path.write_bytes(safetensors(about, data))
    elif name == "weights a pipe":
        os.mkfifo(path)
    elif content is None:
        path.mkdir()
    else:
        put(path, content)
    refused(["generate", "1", "--model", str(model_copy), "--max_completion_length", "1"], capsys)
    run = [
        word.replace("trl_drgrpo:demo", str(model_copy)) for word in train("trl_drgrpo:list_sum?size=64&test_size=0")
    ]
    sizes = ["--max_steps", "1", "--max_completion_length", "4", "--report_to", "none", "--use_cpu", "true"]
    refused([*(word for word in run if word != "--dry_run"), *sizes], capsys)
    if name.startswith("config"):
        refused(["plan", "--memory", "1GB", "--device", "cpu", "--model", str(model_copy)], capsys)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", JUNK, DEEP, '{"peft_type": "ZZ"}', '{"peft_type": 3}']
)
def test_commands_refuse_broken_adapters(content, place, capsys):
    adapter = str(put(place / "adapter" / "adapter_config.json", content).parent)
    refused(["merge", adapter, "--output", "out"], capsys)
    refused(["generate", "1", "--model", adapter], capsys)
    assert not Path("out").exists()


RUN = {"format": 1, "starts": [{"time": 1.0, "step": 0}], "ended": None}
LINE = {"step": 1, "time": 1.0, "mode": "train", "logs": {"reward": 0.5}}
GROUP = {"step": 1, "time": 1.0, "mode": "train", "group": 0, "prompt": "a", "G": 1, "baseline": 0.5, "std": None}
GROUP |= {"rows": [{"reward": 1.0, "rewards": {"f": 1.0}, "advantage": 0.5, "spans": [{"text": "b"}]}], "columns": {}}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", JUNK, DEEP + "\n", "9" * 5000, "\0\0\n", "{}\n"])
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "completions.jsonl", "warnings.jsonl"])
def test_a_report_shows_what_can_be_read(name, content, place, capsys):
    log = place / "run" / "_drgrpo"
    for file, whole in {"run.json": RUN, "metrics.jsonl": LINE, "completions.jsonl": GROUP}.items():
        put(log / file, json.dumps(whole) + "\n")
    put(log / name, content)
    for form in ("json", "html"):
        assert main(["report", str(place / "run"), "--format", form, "--output", f"r.{form}"]) == 0
        assert Path(f"r.{form}").stat().st_size > 100
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_costs_no_result(place, monkeypatch, capsys):
    data = put(place / "c.jsonl", '{"prompt": "a", "completion": "b", "answer": "b"}\n')
    score = ["score", "--data", str(data), "--reward_funcs", "exact_match_reward"]
    before = sorted(place.iterdir())

    open_path = Path.open

    def full(self, mode="r", *arguments, **options):
        if set(mode) & set("wxa"):
            self.touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return open_path(self, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    assert main([*score, "--output", "scores.jsonl"]) == 1
    out, err = capsys.readouterr()
    assert "exact_match_reward" in out
    assert err.splitlines()[-1].startswith("error: disk full: ")
    assert sorted(place.iterdir()) == before
