"""What a model's `generation_config` says, as anybody may have edited it."""

from types import SimpleNamespace

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.generation import refuse_bad_ends


def model_with(ends):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


@pytest.mark.parametrize("ends", ["x", 1.5, ["x"], [[1]], {"a": 1}])
def test_ends_that_are_no_ids_are_refused(ends):
    with pytest.raises(InputError, match="^model: got name, whose generation_config.json has the eos_token_id"):
        refuse_bad_ends("model", "name", model_with(ends))


@pytest.mark.parametrize("ends", [None, 2, -1, [2, 3], []])
def test_ids_pass(ends):
    refuse_bad_ends("model", "name", model_with(ends))


def test_commands_and_training_ask(saved_model, tmp_path, build):
    import json
    import shutil

    from trl_drgrpo.evaluation.models import Loading, load_model

    folder = shutil.copytree(saved_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ["x"]}))
    with pytest.raises(InputError, match="eos_token_id"):
        load_model(str(folder), Loading())
    with pytest.raises(InputError, match="eos_token_id"):
        build(model=str(folder))
