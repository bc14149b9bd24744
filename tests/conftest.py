"""A tiny model, a tokenizer and a configuration that trains in a second; no network for anybody."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, settings
from runs import length_reward, short_run

from trl_drgrpo.labs.check.tiny import tiny_model, tiny_tokenizer

# Machines are noisy, so no deadlines; and what CI judges is the change, so the same examples every time.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The matrices are tiny: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer)


@pytest.fixture(scope="session")
def saved_model(tokenizer, tmp_path_factory):
    """A folder that `from_pretrained` loads."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def prompts():
    return Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(16)], "answer": [str(i) for i in range(16)]})


@pytest.fixture(name="settings")
def run_settings(tmp_path):
    """Fields of a configuration for a run of a second, see `short_run`."""
    return short_run(tmp_path / "run")


@pytest.fixture(scope="session")
def reward():
    return length_reward
