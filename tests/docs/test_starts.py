"""The one-command starts: a script with its dependencies in its head, and a container."""

import json
import re
import tomllib
from pathlib import Path

import datasets
import environment
import pytest
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).parents[2]
SCRIPT, DOCKERFILE = ROOT / "recipes" / "quickstart.py", ROOT / "recipes" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# PEP 723's own expression.
BLOCK = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"


def extras_of(requirement: str) -> set[str]:
    return set(re.search(r"\[(.*)\]", requirement)[1].split(","))


def test_the_address_of_the_repository_is_one():
    address = PROJECT["urls"]["Repository"]
    for name in ("README.md", "CITATION.cff"):
        assert set(re.findall(r"https://github\.com/[\w.-]+/trl-drgrpo", (ROOT / name).read_text())) == {address}


def test_the_script_names_what_it_needs():
    (block,) = re.finditer(BLOCK, SCRIPT.read_text())
    assert block["type"] == "script"
    head = tomllib.loads("".join(re.sub(r"^# ?", "", line) for line in block["content"].splitlines(keepends=True)))
    assert head["requires-python"] == PROJECT["requires-python"]
    (requirement,) = head["dependencies"]
    assert requirement.partition("[")[0] == PROJECT["name"]
    assert extras_of(requirement) <= PROJECT["optional-dependencies"].keys()
    assert (SCRIPT.parent / head["tool"]["uv"]["sources"][PROJECT["name"]]["path"]).resolve() == ROOT


def test_the_script_runs_and_says_little(saved_model, tmp_path, monkeypatch, capsys):
    """As it stands, but for the model, the data and the lengths."""
    text = SCRIPT.read_text()
    for given, stand_in in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(saved_model),
        '"runs/quickstart"': repr(str(tmp_path)),
        "max_steps=200, gradient_accumulation_steps=8": "max_steps=2, max_completion_length=4",
    }.items():
        assert text.count(given) == 1
        text = text.replace(given, stand_in)

    def load_dataset(name, config, split):
        assert (name, config, split) == ("openai/gsm8k", "main", "train")
        return datasets.Dataset.from_list([{"question": "What is 1+1?", "answer": "1+1=2\n#### 2"}] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    transformers_logging.set_verbosity_warning()  # as a script finds it: above, transformers takes it for disable_tqdm
    variables = {"__name__": "__main__"}
    exec(compile(text, str(SCRIPT), "exec"), variables)
    assert variables["trainer"].state.global_step == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 2/2  " in err
    assert not any(noise in err for noise in ("Loading weights", "train_runtime", "it/s", "FutureWarning", "kernels"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_the_dockerfile_parses_and_names_what_exists():
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    instructions = [instruction for instruction, _ in lines]
    assert instructions[0] == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    copied = set()
    for instruction, rest in lines:
        if instruction == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            copied |= set(sources)
        if instruction in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(each, str) for each in json.loads(rest))
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "trl_drgrpo"} <= copied  # for the build
    (pip,) = [rest for instruction, rest in lines if instruction == "RUN" and rest.startswith("pip ")]
    assert extras_of(pip) <= PROJECT["optional-dependencies"].keys()
    assert "-c /src/constraints.txt" in pip
    (entry,) = [json.loads(rest) for instruction, rest in lines if instruction == "ENTRYPOINT"]
    assert entry == list(PROJECT["scripts"])
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


@pytest.mark.slow
def test_the_script_of_an_environment_in_miniature(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "IMITATION", 20)
    (won,) = environment.main(str(tmp_path), steps=1)
    assert 0 <= won <= 1
    group = json.loads((tmp_path / "_drgrpo" / "completions.jsonl").read_text().splitlines()[0])
    assert any(span["step"] is not None for row in group["rows"] for span in row["spans"])
