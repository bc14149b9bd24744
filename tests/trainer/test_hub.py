"""Pushing to and loading from a Hub on the loopback interface, with the real client."""

import io
import pickle
import shlex
import zipfile
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import huggingface_hub.hf_api
import pytest
import torch
import transformers.utils.hub
from hub_server import Hub
from huggingface_hub import ModelCard, constants, snapshot_download
from huggingface_hub.utils import filter_repo_objects
from peft import AutoPeftModelForCausalLM, LoraConfig
from runs import assert_same_weights, weights
from tiny import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_drgrpo.common.errors import InputError, PushError
from trl_drgrpo.features.resume.checkpoints import why_incomplete

TOKEN = "hf_PlantedTokenThatMustNotLeak0123"
PUSHING = {"push_to_hub": True, "hub_model_id": "tester/run"}
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub for this test, and a client that goes there only."""
    hub = Hub(TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("CI", "1")  # TRL's telemetry
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # a client of its own, made at the first use
    yield hub
    hub.close()


@pytest.fixture
def build(build):
    return partial(build, hub_token=TOKEN)


def logits(model):
    return model(input_ids=torch.arange(40, 60).unsqueeze(0)).logits.detach()


def test_a_full_model_is_pushed_and_loaded_back(hub, build):
    trainer = build(push_to_hub=True, hub_model_id="tester/full", hub_private_repo=True)
    trainer.train()
    trainer.push_to_hub(dataset_name="trl-lib/DeepMath-103K")
    assert hub.repos["tester/full"]["private"] is True
    loaded = AutoModelForCausalLM.from_pretrained("tester/full", token=TOKEN)
    assert torch.equal(logits(loaded), logits(trainer.model.eval()))
    with pytest.raises(OSError, match="tester/full"):  # private
        AutoTokenizer.from_pretrained("tester/full", token=False)
    card = ModelCard(hub.files("tester/full")["README.md"].decode())
    assert card.data.datasets == "trl-lib/DeepMath-103K"
    assert "model_id = 'tester/full'" in card.text
    assert hub.files("tester/full")["card/curves.png"].startswith(b"\x89PNG")
    assert not [path for path in hub.files("tester/full") if path.startswith("checkpoint-")]


def test_an_adapter_is_pushed_and_loaded_back(hub, build, saved_model):
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    pushing = {"push_to_hub": True, "hub_model_id": "tester/adapter"}
    trainer = build(model=saved_model, peft_config=peft_config, **pushing)
    trainer.train()
    trainer.push_to_hub()
    files = hub.files("tester/adapter")
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    loaded = AutoPeftModelForCausalLM.from_pretrained("tester/adapter")
    torch.testing.assert_close(logits(loaded.eval()), logits(trainer.model.eval()), rtol=0, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(saved_model)
    assert (logits(base) - logits(loaded)).abs().max() > 1e-4  # the adapter does something
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "peft"
    assert {"dr-grpo", "lora", "trl"} <= set(card.data.tags)
    assert saved_model not in files["README.md"].decode()

    merged = trainer.model.merge_and_unload()
    merged.push_to_hub("tester/merged", token=TOKEN)
    whole = AutoModelForCausalLM.from_pretrained("tester/merged")
    torch.testing.assert_close(logits(whole), logits(loaded), rtol=0, atol=1e-5)


class EachUploadEnds(TrainerCallback):
    """Waits at every save: transformers leaves an upload out while another one is under way."""

    def on_save(self, args, state, control, **kwargs):
        self.trainer.push_in_progress.wait_until_done()


@pytest.mark.parametrize("strategy", ["checkpoint", pytest.param("all_checkpoints", marks=pytest.mark.slow)])
def test_a_checkpoint_on_the_hub_resumes_bit_for_bit(strategy, hub, build, tmp_path, caplog):
    # between two generations, with rollouts pending: what transformers uploads must hold our files, too
    fields = {**EACH_STEP, "max_steps": 3, "steps_per_generation": 4, "seed": 7, "scale_by_running_std": True}
    pushing = {"push_to_hub": True, "hub_model_id": "tester/run", "hub_strategy": strategy}
    waiting = EachUploadEnds()
    whole = build(callbacks=[waiting], **fields, **pushing)
    waiting.trainer = whole
    whole.train()
    assert "upload" not in caplog.text
    messages = hub.messages("tester/run")
    assert "Training in progress, step 1" in messages
    card = hub.files("tester/run")["README.md"].decode()
    assert "**In progress**: written at optimizer step" in card
    assert "Training in progress, step 3, checkpoint" in messages
    folder = snapshot_download("tester/run", local_dir=tmp_path / "back", token=TOKEN)
    if strategy == "checkpoint":  # the newest in the place of those before: take the commit of the first step
        wanted = [
            c for c in hub.repos["tester/run"]["commits"] if c["message"] == "Training in progress, step 1, checkpoint"
        ]
        back = tmp_path / "first" / "checkpoint-1"
        for path, data in wanted[0]["files"].items():
            if path.startswith("last-checkpoint/"):
                target = back / path.removeprefix("last-checkpoint/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    else:
        back = Path(folder) / "checkpoint-1"
    assert why_incomplete(back) == ""
    assert (back / "drgrpo_rollouts_0.pt").exists()
    resumed = build(**fields)
    resumed.train(resume_from_checkpoint=str(back))
    assert_same_weights(weights(resumed), weights(whole))
    assert resumed.earlier.reward_scale.state_dict() == whole.earlier.reward_scale.state_dict()


def test_the_saved_limit_is_kept_and_written_down(hub, build, output):
    trainer = build(max_steps=4, save_total_limit=2, **EACH_STEP)
    trainer.train()
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    arguments = torch.load(output / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert (arguments.save_total_limit, arguments.hub_token) == (2, None)
    assert (trainer.args.save_total_limit, trainer.args.hub_token) == (2, TOKEN)
    assert pickle.loads(pickle.dumps(trainer.args)).hub_token == TOKEN  # on the way to another process


def plaintexts(data):
    """Bytes, and the members of a zip archive: `torch.save` writes one."""
    yield data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield archive.read(name)


def test_no_token_is_left_anywhere(hub, build, output, tokenizer, caplog, capfd, monkeypatch):
    caplog.set_level("DEBUG")
    key = "sk-planted-key-of-a-judge-5678"
    monkeypatch.setenv("JUDGE_API_KEY", key)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fields = {**EACH_STEP, "max_steps": 2, "push_to_hub": True, "hub_model_id": "tester/leaks"}
    fields |= {"hub_strategy": "all_checkpoints", "report_to": "tensorboard" if find_spec("tensorboard") else "none"}
    fields |= {"model_init_kwargs": {"token": TOKEN, "dtype": "float32"}, "run_name": "a run"}
    fields |= {"generation_kwargs": {"bad_words_ids": None}, "logging_strategy": "steps"}
    waiting = EachUploadEnds()  # the last push writes the arguments anew: look at those of the uploads before it
    base = save_tiny(output.parent / "base", tokenizer)
    trainer = waiting.trainer = build(model=base, callbacks=[waiting], **fields)
    trainer.train()
    trainer.push_to_hub()
    out, err = capfd.readouterr()
    found = {"stdout": out.encode(), "stderr": err.encode(), "log": caplog.text.encode()}
    found |= {str(p): p.read_bytes() for p in output.rglob("*") if p.is_file()}
    for number, revision in enumerate(hub.repos["tester/leaks"]["commits"]):
        found |= {f"hub:{number}:{path}": data for path, data in revision["files"].items()}
    assert len(found) > 30
    for name, data in found.items():
        for text in plaintexts(data):
            assert TOKEN.encode() not in text, name
            assert key.encode() not in text, name
    # the same search finds what it looks for
    torch.save({"token": TOKEN}, output / "control.bin")
    assert any(TOKEN.encode() in text for text in plaintexts((output / "control.bin").read_bytes()))


# When the Hub does not answer

UPLOADED = ["model.safetensors", "_drgrpo/completions.jsonl", "checkpoint-1/optimizer.pt"]


@pytest.mark.parametrize("status", [401, 403, pytest.param(500, marks=pytest.mark.slow), None])  # None: not there
def test_a_hub_that_cannot_be_opened_is_one_clear_error(status, hub, build):
    hub.refuse = {"repos/create": status}
    if status is None:
        hub.close()
    said = f"{status}.*hf auth login" if status else "Check the network and HF_ENDPOINT"
    message = rf"^push_to_hub: got tester/run, which cannot be opened at {hub.url} \(.*{said}"
    with pytest.raises(InputError, match=message) as caught:
        build(**PUSHING)
    assert TOKEN not in str(caught.value)
    assert ("auth login" in str(caught.value)) == (status is not None)


@pytest.mark.parametrize("status", [403, pytest.param(500, marks=pytest.mark.slow)])
def test_a_hub_that_refuses_at_the_end_costs_no_model(status, hub, build, output):
    folder = f"{output} of today"
    trainer = build(output_dir=folder, **PUSHING)
    trainer.train()
    hub.refuse = {"/commit/": status}
    with pytest.raises(PushError, match="the upload to .* failed .* push it later with `hf upload tester") as caught:
        trainer.push_to_hub()
    command = shlex.split(str(caught.value).rpartition("with `")[2].removesuffix("`."))
    assert command[:4] == ["hf", "upload", "tester/run", folder]
    excluded = [pattern for flag, pattern in pairwise(command) if flag == "--exclude"]
    assert list(filter_repo_objects(UPLOADED, ignore_patterns=excluded)) == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(trainer.model.eval()))
    hub.refuse = {}
    trainer.push_to_hub()  # later, the same trainer
    assert "model.safetensors" in hub.files("tester/run")


def test_a_hub_that_is_gone_before_the_first_push_costs_no_model(hub, build, output):
    trainer = build(hub_model_id="tester/run")  # push_to_hub is off
    trainer.train()
    hub.close()
    with pytest.raises(PushError, match="The model is saved in"):
        trainer.push_to_hub()
    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert torch.equal(logits(loaded), logits(trainer.model.eval()))
    assert (output / "README.md").exists()


def test_uploads_that_fail_beside_the_training_are_said_once_each(hub, build, caplog):
    trainer = build(max_steps=2, **EACH_STEP, **PUSHING)
    hub.refuse = {"/commit/": 403}
    trainer.train()
    assert trainer.state.global_step == 2
    said = [record.message for record in caplog.records if "An upload during training failed" in record.message]
    assert 1 <= len(said) <= 2  # the second one is left out while the first is under way
    assert "The model is saved in" in said[0]


def test_the_command_says_where_the_model_is_when_the_push_fails(hub, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse = {"/commit/": 500}
    flags = "--model_name_or_path trl_drgrpo:demo --dataset_name trl_drgrpo:list_sum --reward_funcs list_sum_reward "
    flags += (
        "--max_completion_length 8 --max_steps 1 --per_device_train_batch_size 8 --output_dir out --report_to none "
    )
    flags += "--push_to_hub true --hub_model_id tester/run"
    last = ran(["train", *flags.split()], 1).err.strip().splitlines()[-1]
    assert last.startswith(f"error: push_to_hub: the upload to tester/run at {hub.url} failed (")
    assert "The model is saved in out: push it later with `hf upload tester/run out" in last
    assert (tmp_path / "out" / "model.safetensors").exists()
    hub.refuse = {}
    ran(["train", *flags.split(), "--resume_from_checkpoint", "true"])
    assert "README.md" in hub.files("tester/run")
