"""Secrets in settings, command lines and addresses: no file of a run has them, and no message."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from runs import write_lines

from trl_drgrpo.cli.batch import completed_rows
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.secrets import redacted_command, scrubbed, without_credentials

CANARY = "cAnArY7531"


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{CANARY}@host:8000/v1",
        f"http://user:{CANARY}/half@host",
        f"http://user:{CANARY}@half@host",
        f"https://{CANARY}@github.com/org/name",
        f"HTTPS://:{CANARY}@host",
        f"postgresql+psycopg2://user:{CANARY}@host/table",
        f"https://host/file?X-Amz-Credential={CANARY}&X-Amz-Signature={CANARY}&X-Amz-Security-Token={CANARY}",
        f"https://host/?sv=1&sig={CANARY}",
        f"hf://data?token={CANARY}",
        f"https://host/?size=1&api_key={CANARY}#access_token={CANARY}",
        f"https://host/?jwt={CANARY}&session_id={CANARY}",
        f"user:{CANARY}@host:8000",
        f"//user:{CANARY}@host:8000/v1",
        f"first http://a:{CANARY}@b then http://c:{CANARY}@d",
        f"Authorization: Bearer {CANARY}",
        f"hf_{CANARY}{CANARY}",
        f'{{"judge_reward": {{"api_key": "{CANARY}", "base_url": "http://u:{CANARY}@h"}}}}',
        f"{{judge_reward: {{password: {CANARY}, model: m}}}}",
    ],
)
def test_credentials_in_texts_are_scrubbed(text):
    assert CANARY not in without_credentials(text)
    assert CANARY not in scrubbed({"a": [{"b": (text,)}]})["a"][0]["b"][0]
    assert CANARY not in redacted_command(["eval", "--x", text, f"--y={text}"])
    assert CANARY not in str(InputError("url", repr(text), "another", "Look."))


@pytest.mark.parametrize(
    "text",
    [
        *("http://localhost:8000/v1?size=3", "reasoning_gym:chain_sum?min_tokens=3&token=x", "org/name", "a@b.c"),
        *("https://host/@user/page", "Basic arithmetic questions", "sk-learn-like-names-of-models", "key: value"),
        *("mine.py:score", "at 10:30 mail a@b.c", "{isolate: mine.py:score}"),
    ],
)
def test_text_without_a_secret_stays(text):
    assert without_credentials(text) == text


def test_values_with_a_secret_name_are_scrubbed():
    values = {"aws_secret_access_key": CANARY, "password": 7531, "cookie": [CANARY], "client-secret": CANARY}
    values |= {"PGPASSWORD": CANARY, "api_keys": {"openai": CANARY}, "passwd": CANARY.encode(), "auth": ("u", CANARY)}
    assert set(scrubbed(values).values()) == {None}
    assert scrubbed({"proxies": {"http": f"u:{CANARY}@proxy:80"}}) == {"proxies": {"http": "<secret>@proxy:80"}}
    assert scrubbed({f"http://u:{CANARY}@host": 1}) == {"http://<secret>@host": 1}
    assert scrubbed({"vllm_server_host": f"user:{CANARY}@host"}) == {"vllm_server_host": "<secret>@host"}
    kept = {
        "eos_token": "</s>",
        "max_tokens": 3,
        "tokens": 9,
        "token": True,
        "system_prompt": "ftp://a:b@c is an address",
    }
    assert scrubbed(kept) == kept


def test_command_lines():
    argv = ["--hub_token", CANARY, f"--wandb-api-key={CANARY}", "--vllm_server_base_url", f"user:{CANARY}@host"]
    shown = shlex.split(redacted_command(["eval", *argv, "--seed", "1", "two words"]))
    assert CANARY not in " ".join(shown)
    assert (shown[0], shown[-3:]) == ("eval", ["--seed", "1", "two words"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "completion": "2", "solution": "2"} for i in range(8)]
    write_lines(tmp_path / "rows.jsonl", rows)
    return tmp_path


def leaks(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


@pytest.fixture
def recipe(here, saved_model):
    address = f"http://user:{CANARY}@host:1/v1?token={CANARY}"
    values = {
        "model_name_or_path": saved_model,
        "dataset_name": "rows.jsonl",
        "reward_funcs": ["math_reward"],
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "save_steps": 1,
        "save_strategy": "steps",
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "report_to": "none",
        "output_dir": "out",
        "vllm_server_base_url": address,
        "vllm_server_host": f"user:{CANARY}@host",
        "hub_token": CANARY,
        "hub_model_id": "me/name",
        "run_name": address,
        "project": address,
        "trackio_space_id": f"hf_{CANARY}{CANARY}",
        "model_init_kwargs": {"token": CANARY},
        "chat_template_kwargs": {"api_key": CANARY, "place": address},
        "env": {"TRL_DRGRPO_TEST_API_KEY": CANARY},
    }
    (here / "recipe.yaml").write_text(yaml.safe_dump(values))
    return ["--config", "recipe.yaml"]


def test_no_file_of_a_run_has_them_and_it_resumes(here, recipe, monkeypatch, capfd):
    monkeypatch.setattr("os.environ", {**__import__("os").environ})
    assert main(["train", *recipe, "--dry_run"]) == 0
    assert main(["train", *recipe]) == 0
    assert leaks(here / "out") == []
    arguments = torch.load("out/training_args.bin", weights_only=False)
    assert arguments.vllm_server_base_url == "http://<secret>@host:1/v1?token=<secret>"
    assert main(["train", *recipe, "--resume_from_checkpoint", "true", "--max_steps", "3"]) == 0
    assert leaks(here / "out") == []
    assert main(["report", "out", "--output", "page.html"]) == 0
    printed = capfd.readouterr()
    assert CANARY not in printed.out + printed.err
    assert "chat_template_kwargs" not in printed.err  # the same secrets are no difference
    argv = ["eval", "--model", "out", "--vllm_server_base_url", f"http://user:{CANARY}@127.0.0.1:9"]
    assert main(argv) == 2  # nobody is there
    assert CANARY not in capfd.readouterr().err
    argv = ["eval", "--model", "out", "--limit", "2", "--baseline", "none", "--output_dir", f"{here}/evaluations"]
    monkeypatch.setattr(sys, "argv", ["trl-drgrpo", *argv, "--base", f"https://user:{CANARY}@host/base"])
    assert main(argv) == 0
    [result] = Path("evaluations").glob("*.json")
    assert "https://<secret>@host/base" in json.loads(result.read_text())["command"]
    found = leaks(here)
    assert found == [str(here / "recipe.yaml")]  # the user's own


def test_rows_do_not_depend_on_a_secret(here):
    facts = {"vllm_server_base_url": f"http://user:{CANARY}@host", "reward_funcs": f"{{judge: {{token: {CANARY}}}}}"}

    def rows(password):
        given = json.loads(json.dumps(facts).replace(CANARY, password))
        return completed_rows(
            "x.jsonl", "search", given, 1, 1, "rows", lambda first: [(1, [{"a": 1}])], lambda new: ""
        )

    assert rows(CANARY) == rows(CANARY + "2") == [{"a": 1}]  # another password is no other command
    assert leaks(here) == []
