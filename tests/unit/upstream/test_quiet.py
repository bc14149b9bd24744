"""Notices that are dropped, and what stands beside each of them and is not."""

import io
import logging
import warnings
from types import SimpleNamespace

import pytest
import transformers.trainer
from torch.nn.modules.module import _IncompatibleKeys as LoadResult
from transformers.utils import logging as transformers_logging

from trl_drgrpo.upstream import versions
from trl_drgrpo.upstream.checkpoint_weights import without_tied

RENAMED = (
    "`is_gradient_checkpointing` is deprecated and will be removed in v6. Use `is_activation_checkpointing` instead."
)


def test_one_line_of_a_logger_is_dropped_and_no_other(caplog):
    versions.drop_notices()
    versions.drop_notices()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    assert len(logger.filters) == 1
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("Failed to load the library")
    other = "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config. The"
    logging.getLogger("transformers.trainer_utils").warning(other)
    logging.getLogger("bitsandbytes").warning("Failed to load CPU gemm_4bit_forward from kernels-community")
    assert [record.name for record in caplog.records] == ["bitsandbytes.backends.cpu.ops", "bitsandbytes"]


@pytest.mark.parametrize(
    ("message", "category", "module", "shown"),
    [
        (RENAMED, FutureWarning, "transformers.modeling_utils", False),
        (RENAMED, FutureWarning, "my_script", True),
        (RENAMED, UserWarning, "transformers.modeling_utils", True),
        ("`torch_dtype` is deprecated", FutureWarning, "transformers.modeling_utils", True),
    ],
)
def test_one_future_warning_is_dropped_by_message_category_and_module(message, category, module, shown):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.drop_notices()
        warnings.warn_explicit(message, category, "file.py", 1, module)
    assert bool(caught) is shown


def bar(**options):
    transformers_logging.enable_progress_bar()  # another test may have switched it off
    file = io.StringIO()
    for _ in transformers_logging.tqdm(range(3), file=file, **options):
        pass
    return file.getvalue()


def test_a_bar_shows_only_where_it_takes_long(monkeypatch):
    assert "3/3" in bar()
    with versions.brief_bars():
        assert bar() == ""
        assert "3/3" in bar(delay=0)
        monkeypatch.setattr(versions, "_BRIEF_SECONDS", 0)
        assert "3/3" in bar()
    assert "3/3" in bar()


def test_a_hook_of_the_user_stays():
    def hook(factory, args, kwargs):
        seen.append(kwargs)
        return factory(*args, **kwargs)

    seen = []
    before = transformers_logging.set_tqdm_hook(hook)
    try:
        with versions.brief_bars():
            bar()
        assert seen[0]["delay"] == versions._BRIEF_SECONDS
    finally:
        assert transformers_logging.set_tqdm_hook(before) is hook


def test_the_trainer_warns_of_what_is_missing_and_not_of_what_is_tied(monkeypatch):
    from trl_drgrpo.upstream.trl_overrides import HostTrainer

    said = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", said.append)
    trainer = HostTrainer.__new__(HostTrainer)
    trainer.model = SimpleNamespace(all_tied_weights_keys={"head": "embed"}, _keys_to_ignore_on_save=None)
    trainer._issue_warnings_after_load(LoadResult(["head"], []))
    assert said == []
    for lost in (["head", "norm"], ["head", "embed"]):
        trainer._issue_warnings_after_load(LoadResult(lost, []))
    assert ["['norm']" in said[0], "['head', 'embed']" in said[1]] == [True, True]
    assert without_tied(object(), LoadResult(lost, ["x"])) == LoadResult(lost, ["x"])
