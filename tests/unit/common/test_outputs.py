"""Files and folders that are not ours: what is written to, what is replaced, and what is refused."""

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from runs import write_lines

from trl_drgrpo.cli.main import main, parse
from trl_drgrpo.common.disk import check_file, is_stream, write_whole
from trl_drgrpo.common.errors import DiskFullError, InputError
from trl_drgrpo.common.output_folders import check_output_folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2", "solution": "2"}])
    return tmp_path


# Files


def test_a_file_is_replaced_whole_with_its_permissions(here):
    path = here / "out.jsonl"
    path.write_text("old")
    path.chmod(0o600)
    write_whole(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    path.chmod(0o640)
    write_whole(path, b"newer")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"newer", 0o640)
    assert sorted(os.listdir(here)) == ["out.jsonl", "rows.jsonl"]


def test_a_link_in_place_of_the_partial_file_is_not_followed(here):
    (here / "victim").write_text("mine")
    part = here / f"_out.{os.getpid()}-{threading.get_native_id()}"
    part.symlink_to("victim")
    write_whole(here / "out", "new")
    assert ((here / "out").read_text(), (here / "victim").read_text()) == ("new", "mine")


@pytest.mark.parametrize("target", ["victim.txt", "nowhere", "link.jsonl"])
def test_a_link_is_refused_and_what_it_leads_to_stays(here, target):
    (here / "victim.txt").write_text("mine")
    (here / "link.jsonl").symlink_to(target)
    with pytest.raises(InputError, match=f"^output: got link.jsonl, a link to {target}; .*not written through"):
        check_file("output", "link.jsonl", ["rows.jsonl"])
    with pytest.raises(OSError, match="a link to"):
        write_whole(here / "link.jsonl", "new")
    assert (here / "victim.txt").read_text() == "mine"
    assert (here / "link.jsonl").is_symlink()
    assert not (here / "nowhere").exists()


def test_pipes_and_devices_get_the_text_and_stay_what_they_are(here):
    pipe = here / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    check_file("output", str(pipe))
    write_whole(pipe, "through the pipe")
    reader.join(timeout=10)
    assert received == ["through the pipe"]
    assert pipe.is_fifo()
    # A terminal, as nothing could take its place if this failed. The machine's own devices are asked for, not written.
    terminal, end = os.openpty()
    device = os.ttyname(end)
    check_file("output", device)
    write_whole(Path(device), "text")
    assert os.read(terminal, 4) == b"text"
    assert stat.S_ISCHR(os.stat(device).st_mode)
    os.close(terminal)
    os.close(end)
    for name in ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/fd/1"):
        assert is_stream(Path(name))
    for name in (str(pipe), "/dev/null", "/dev/stdout"):
        with pytest.raises(InputError, match="a pipe or a device; expected a regular file"):
            check_file("output", name, streams=False)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(InputError, match="a device or a socket"):
            check_file("output", "socket")


def test_stdout_is_written_to_where_it_stands(here):
    code = "import sys\nfrom pathlib import Path\nfrom trl_drgrpo.common.disk import write_whole\n"
    code += "print('before')\nwrite_whole(Path(sys.argv[1]), 'text\\n')\nprint('behind')"
    for name in ("/dev/fd/1", "/proc/self/fd/1"):
        with open("captured", "w") as file:
            subprocess.run([sys.executable, "-c", code, name], stdout=file, check=True, timeout=60)
        assert Path("captured").read_text() == "before\ntext\nbehind\n"


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "config.json", "adapter_config.json", "training_args.bin", "README.md", "mine.py"),
        *("tokenizer.json", "trainer_state.json", "model.safetensors.index.json", "data.parquet", "_drgrpo/run.json"),
        "recipe.yaml",
    ],
)
def test_a_file_of_another_kind_is_not_replaced(here, name):
    path = here / "x" / name
    path.parent.mkdir(parents=True)
    check_file("output", str(path))  # not there: nothing is lost
    path.write_text("mine")
    with pytest.raises(InputError, match="^output: got .*, which exists and is a file of a model"):
        check_file("output", str(path))


def test_an_input_is_not_replaced(here):
    (here / "data").mkdir()
    (here / "data" / "train.csv").write_text("a\n")
    os.link(here / "rows.jsonl", here / "hard.jsonl")
    for name, other in [("rows.jsonl", "rows.jsonl"), ("./data/train.csv", "data"), ("hard.jsonl", "rows.jsonl")]:
        with pytest.raises(InputError, match="which is also an input"):
            check_file("output", name, [other])
    check_file("output", "data/new.csv", ["data"])


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("score --data rows.jsonl --reward_funcs math_reward --output {}", "output"),
        ("score --data rows.jsonl --reward_funcs math_reward --pass_rates {}", "pass_rates"),
        ("eval --model {model} --dataset_name rows.jsonl --reward_funcs math_reward --pass_rates {}", "pass_rates"),
        (
            "search --model {model} --dataset_name rows.jsonl --strategy best_of_n --budget_tokens 600 --reward_funcs"
            " math_reward --output {}",
            "output",
        ),
        ("label-steps --model {model} --data rows.jsonl --reward math_reward --output {}", "output"),
        ("report run --output {}", "output"),
        ("report run --format md --output {}", "output"),
    ],
)
def test_every_command_refuses_to_overwrite_foreign_files(command, field, here, saved_model, capfd):
    (here / "victim").write_text("mine")
    (here / "link.md").symlink_to("victim")
    (here / "config.json").write_text("mine")
    for name in ("link.md", "config.json", "-", "rows.jsonl/x"):
        assert main(command.format(name, model=saved_model).split()) == 2
        assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {field}: got {name.partition('/')[0]}")
    assert (here / "victim").read_text() == (here / "config.json").read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        "score --data=~/rows.jsonl --output=~/x",
        "score --data rows.jsonl --plot=~/x",
        "score --data rows.jsonl --pass_rates=~/x",
        "eval --pass_rates=~/x",
        "search --model m --dataset_name d --strategy puct --budget_tokens 9 --output=~/x --sft_output=~/y",
        "label-steps --output=~/x",
        "report run --output=~/x",
        "train-prm --model m --data d --output_dir=~/x",
        "demo --output_dir=~/x",
    ],
)
def test_home_is_known_where_the_shell_does_not_expand_it(command, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    values = [str(value) for value in vars(parse(command.split())).values()]
    assert str(here / "x") in values
    assert not any(value.startswith("~") for value in values)


def test_a_report_streams(here, capfd):
    (here / "run").mkdir()
    (here / "run" / "trainer_state.json").write_text('{"log_history": [{"step": 1, "reward": 0.5}]}')
    assert main(["report", "run", "--format", "json", "--output", "/dev/fd/1"]) == 0
    assert json.loads(capfd.readouterr().out)  # nothing else is there
    (here / "page.png").write_text("mine")
    (here / "page.png").rename("victim")
    (here / "page.png").symlink_to("victim")
    assert main(["report", "run", "--format", "md", "--output", "page.md"]) == 2  # its picture stands beside it


# Folders


def test_folders_that_no_training_writes_to(here, saved_model):
    def refused(name, message, **inputs):
        with pytest.raises(InputError, match=f"^output_dir: got .*{message}"):
            check_output_folder("output_dir", name, inputs)

    (here / "base").mkdir()
    (here / "base" / "config.json").touch()
    (here / "link").symlink_to("base")
    for name in ("base", "base/", "./base", str(here / "base"), "link", "base/../base", "link/."):
        for model in ("base", "link", str(here / "base") + "/"):
            refused(name, "the folder of model", model=model)
        refused(name, "config.json that no run has written")
    for name in (".", "./", "", "..", "/", str(here), "base/.."):
        refused(name, "the current directory or above it")
    refused("hub/models--a--b/snapshots/1", "the cache of the Hub")
    (here / "card").mkdir()
    (here / "card" / "README.md").touch()
    refused("card", "README.md that no run has written")
    (here / "runs/a/checkpoint-5").mkdir(parents=True)
    refused("runs/a", "the run that holds model", model="runs/a/checkpoint-5")
    for name in ("runs/a", "runs", "new", "base/grpo", "runs/a/checkpoint-5/next"):
        check_output_folder("output_dir", name, {"model": "base", "reward": "some/model", "data": "rows.jsonl"})
    (here / "card" / "training_args.bin").touch()  # a run's: what may be done with it is said elsewhere
    check_output_folder("output_dir", "card", {})


TRAIN = "train --dataset_name rows.jsonl --reward_funcs math_reward --use_cpu --bf16 false --dry_run"


@pytest.mark.parametrize("command", [TRAIN, "train-prm --data rows.jsonl", f"{TRAIN} --overwrite_output_dir true"])
def test_the_commands_refuse_them_before_a_model_loads(command, here, tokenizer, capfd):
    from tiny import save_tiny

    save_tiny(here / "base", tokenizer)
    if command.startswith("train-prm"):
        write_lines(here / "rows.jsonl", [{"prompt": "1", "steps": ["2", "2"], "labels": [True, False]}])
    before = {path.name: path.stat().st_mtime_ns for path in (here / "base").iterdir()}
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(here / "base")}
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (here / "elsewhere" / "checkpoint-1").mkdir(parents=True)
    (here / "elsewhere" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    resuming = () if "overwrite" in command else ("true", "elsewhere/checkpoint-1")
    refused = [("base", "the folder of model", ()), (".", "the current directory", ())]
    refused += [("base", "the folder of model", ("--resume_from_checkpoint", resume)) for resume in resuming]
    for output, message, more in refused:
        assert main([*command.split(), "--model_name_or_path", "base", "--output_dir", output, *more]) == 2
        assert f"error: output_dir: got {output}, " in (said := capfd.readouterr().err)
        assert message in said
    assert {path.name: path.stat().st_mtime_ns for path in (here / "base").iterdir()} == before


def test_a_trainer_refuses_the_folder_of_its_model(build, here, tokenizer):
    from peft import LoraConfig
    from tiny import save_tiny

    base = str(save_tiny(here / "base", tokenizer))
    for options in ({}, {"peft_config": LoraConfig(task_type="CAUSAL_LM")}, {"overwrite_output_dir": True}):
        with pytest.raises(InputError, match="^output_dir: got base, the folder of the model"):
            build(model=base, output_dir="base", **options).train()
    with pytest.raises(InputError, match="the current directory"):
        build(output_dir=".").train()


# Checkpoints while the clock is put back


def clock_back():
    """A callback after which all checkpoints so far look newer than the next one."""
    from transformers import TrainerCallback

    class ClockBack(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            for path in Path(args.output_dir).glob("checkpoint-*"):
                os.utime(path, (4 * 10**9,) * 2)

    return ClockBack()


def test_a_run_keeps_its_newest_checkpoints(build, here):
    (here / "out" / "checkpoint-notes").mkdir(parents=True)
    (here / "out" / "checkpoint-best-7").mkdir()
    limits = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    build(output_dir="out", callbacks=[clock_back()], **limits).train()
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-best-7",
        "checkpoint-notes",
    ]


def test_a_full_disk_names_the_newest_checkpoint(build, here):
    trainer = build(output_dir="out", callbacks=[clock_back()], save_strategy="steps", save_steps=1, max_steps=3)
    trainer.train()
    with pytest.raises(DiskFullError, match="The run up to .*/checkpoint-3 is saved"):  # noqa: SIM117
        with trainer.resume.writing(here):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_training_of_a_process_reward_model_does_too(here, saved_model, monkeypatch):
    from trl_drgrpo.process_rewards import train_prm, training

    folders_of = training.checkpoint_folders
    rows = [{"prompt": "1", "steps": ["2", "3"], "labels": [True, False]}] * 8
    (here / "prm" / "checkpoint-notes").mkdir(parents=True)
    limits = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}

    def folders(output_dir):
        found = folders_of(output_dir)
        os.utime(found[0], (4 * 10**9,) * 2)
        return found

    monkeypatch.setattr(training, "checkpoint_folders", folders)
    train_prm(saved_model, rows, "prm", arguments={**limits, "per_device_train_batch_size": 2})
    assert sorted(path.name for path in Path("prm").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-notes"]


def test_files_beside_an_output_are_not_replaced(here, saved_model, capfd):
    (here / "found.search.json").write_text('{"mine": 1}')
    argv = ["search", "--model", saved_model, "--dataset_name", "rows.jsonl", "--strategy", "best_of_n"]
    argv += ["--reward_funcs", "math_reward", "--budget_tokens", "4", "--max_completion_length", "2"]
    assert main([*argv, "--output", "found.jsonl"]) == 2
    assert "beside which found.search.json was not written by this command" in capfd.readouterr().err
    assert (here / "found.search.json").read_text() == '{"mine": 1}'
    assert main([*argv, "--output", "other.jsonl"]) == 0
