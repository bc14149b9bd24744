"""A tiny model, a tokenizer and a configuration that trains in a second; no network for anybody.

What is heavy is imported where it is used: the process that hands the tests to the workers has no need of it.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COSTLY = Path(__file__).with_name("costly.txt")

# Machines are noisy, so no deadlines; and what CI judges is the change, so the same examples every time.
settings.register_profile(
    "quick",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    max_examples=30,
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The matrices are tiny: more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def kept_from_run_to_run():
    import kept

    kept.imports_are_not_collected()
    kept.metadata_is_read_once()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `make test` leaves out: `make costly` has measured it."""
    costly = set(COSTLY.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in costly:
            item.add_marker(pytest.mark.costly)


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs_program"):
        if mark.kwargs["missing"]:
            pytest.skip(f"needs {mark.args[0]}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """One line behind everything else: what was skipped, and how to get it."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        parts = (f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {'; '.join(parts)}")


@pytest.fixture(scope="session")
def tokenizer():
    from tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    from tiny import tiny_model

    return tiny_model(tokenizer)


@pytest.fixture(scope="session")
def saved_model(tokenizer, tmp_path_factory):
    """A folder that `from_pretrained` loads."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny-model"), tokenizer)


@pytest.fixture(scope="session")
def prompts():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(16)], "answer": [str(i) for i in range(16)]})


@pytest.fixture(name="settings")
def run_settings(tmp_path):
    """Fields of a configuration for a run of a second, see `short_run`."""
    from runs import short_run

    return short_run(tmp_path / "run")


@pytest.fixture(scope="session")
def reward():
    from runs import length_reward

    return length_reward


@pytest.fixture
def build(settings, prompts, tokenizer, reward):
    """Builds a trainer of the tiny model, see `sharing`."""
    from runs import build, sharing

    return sharing(build, settings, prompts, tokenizer, reward)


@pytest.fixture
def train(settings, prompts, tokenizer, reward):
    """The same, trained."""
    from runs import sharing, train

    return sharing(train, settings, prompts, tokenizer, reward)


@pytest.fixture
def output(settings):
    """Where such a run writes to."""
    return Path(settings["output_dir"])


@pytest.fixture
def ran(capfd):
    """What a command prints, to standard output and error; it ends with this code."""
    from trl_drgrpo.cli.main import main

    def ran(argv, code=0):
        assert main(argv) == code
        return capfd.readouterr()

    return ran
