"""One reason in one line for everything that the Hub may answer, or not answer."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, check_weights, hub_errors, quiet_retries


def answered(kind, status):
    return kind("no", response=SimpleNamespace(status_code=status, headers={}, request=None))


def fail(cause, kind):
    """As transformers does: with a text of its own over several lines, from the cause."""
    try:
        raise cause
    except Exception as reason:
        raise kind("a/b is not a local folder\nIf this is a private repository, ...") from reason


def raised(cause, kind=OSError):
    with pytest.raises(InputError) as error, hub_errors("model", "a/b", "a model"):
        fail(cause, kind)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (
            errors.RepositoryNotFoundError,
            401,
            "a/b, which does not exist on the Hub, or is private; expected a",
        ),
        (errors.GatedRepoError, 403, "a/b, which is gated; .*Ask for access"),
        (errors.RevisionNotFoundError, 404, "a/b, which has no such revision"),
        (errors.RemoteEntryNotFoundError, 404, "a/b, a repository that lacks a required file"),
        (errors.HfHubHTTPError, 503, "a/b, for which the Hub answered with status 503"),
    ],
)
def test_every_refusal_of_the_hub_has_its_message(kind, status, message):
    assert re.search(message, raised(answered(kind, status)))


def test_no_answer_and_offline_mode(monkeypatch):
    lost = errors.LocalEntryNotFoundError("not found")
    lost.__cause__ = OSError("[Errno -2] Name or service not known")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    message = raised(lost)
    assert "cannot be reached ([Errno -2] Name or service not known)" in message
    assert "Check the network" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "not in the local cache (offline mode, HF_HUB_OFFLINE=1)" in raised(lost)


def test_another_failure_keeps_its_first_line():
    assert raised(RuntimeError("x"), ValueError).endswith("expected a model. ValueError: a/b is not a local folder.")


def test_retries_are_not_logged_and_the_level_comes_back(caplog):
    logger = logging.getLogger("huggingface_hub.utils._http")
    before = logger.level
    with quiet_retries():
        logger.warning("Retrying in 1s [Retry 1/5].")
    assert caplog.records == []
    assert logger.level == before


def test_local_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    check_local("model", "some/name")
    for name, message in {
        "": "an empty text; ",
        "file": "file, a file; ",
        "bare": "bare, a folder without config.json; ",
        "adapter": "It holds an adapter",
        "./gone": "./gone, which does not exist; ",
        "a/b/c": "a/b/c, which does not exist; ",
    }.items():
        with pytest.raises(InputError, match=f"^model: got .*{message}"):
            check_local("model", name)


def test_weights_that_were_cut_off_are_refused(tmp_path):
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    check_local("model", str(tmp_path))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for kept, message in (
        (-10, "incomplete metadata, file not fully covered.; expected a whole"),
        (20, "model.safetensors of 20 bytes .*invalid header length"),
        (3, "header too small"),
    ):
        (tmp_path / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(InputError, match=message):
            check_local("model", str(tmp_path))


def test_a_name_that_is_too_long_for_a_path_is_a_name():
    check_local("model", "m" * 5000)
    check_weights("model", Path("m" * 5000))
    with pytest.raises(InputError, match="expected a model's folder or Hub id") as error:
        check_local("model", "/" + "m" * 5000)
    assert len(str(error.value)) < 700
