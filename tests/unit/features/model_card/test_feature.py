"""The feature with a trainer that is a namespace: cards go where they belong, and no upload costs the model."""

from types import SimpleNamespace

import pytest

from trl_drgrpo.common.errors import InputError, PushError
from trl_drgrpo.features.model_card.model_card import ModelCard
from trl_drgrpo.upstream.description import DescriptionGuard


@pytest.fixture
def trainer(tmp_path):
    """Its own card is one line; it counts what is saved."""
    output_dir = tmp_path / "out put"
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(output_dir), hub_model_id=None),
        hub_model_id="me/model",
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=SimpleNamespace(),
        describing=DescriptionGuard(),
        is_in_train=False,
        is_world_process_zero=lambda: True,
        done=[],
    )

    def create_model_card():
        trainer.done.append("card")
        output_dir.mkdir(exist_ok=True)
        (output_dir / "README.md").write_text("ours")

    def save_model(_internal_call):
        trainer.done.append("model")

    trainer.create_model_card, trainer.save_model = create_model_card, save_model
    trainer.card = ModelCard(trainer)
    return trainer


def test_a_push_that_fails_keeps_the_model_and_says_how_to_push_it_later(trainer):
    with pytest.raises(PushError) as error, trainer.card.pushing():
        raise ConnectionError("no route\nto host")
    assert trainer.done == ["model", "card"]
    folder = trainer.args.output_dir
    assert str(error.value).startswith("push_to_hub: the upload to me/model failed (ConnectionError: no route).")
    assert f"The model is saved in {folder}: push it later with `hf upload me/model '{folder}' --exclude" in str(
        error.value
    )


def test_a_model_that_was_saved_during_the_push_is_not_saved_twice(trainer):
    for _ in range(2):  # what an earlier push saved does not count
        with pytest.raises(PushError), trainer.card.pushing():
            raise ConnectionError
    assert trainer.done == ["model", "card"] * 2

    def push():
        with trainer.card.pushing():
            trainer.card.on_model_saved(None)
            raise ConnectionError

    with pytest.raises(PushError):
        push()
    assert trainer.done == ["model", "card"] * 2


def test_a_push_that_is_interrupted_is_no_push_error(trainer):
    with pytest.raises(KeyboardInterrupt), trainer.card.pushing():
        raise KeyboardInterrupt
    assert trainer.done == []


def test_an_upload_beside_the_training_that_fails_is_one_warning(trainer, caplog):
    trainer.card.on_failed_uploads([ValueError("first"), ValueError("second")])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "failed (ValueError: first)" in caplog.text


def test_a_repository_that_cannot_be_opened_is_an_input_error(trainer):
    message = r"^push_to_hub: got a repository named after output_dir, .*OSError: refused"
    with pytest.raises(InputError, match=message), trainer.card.opening_repository():
        raise OSError("refused.")


def test_a_card_is_brought_up_to_date_at_the_end_if_there_is_one(trainer):
    with trainer.card.around_train():
        pass
    assert trainer.done == []
    trainer.card._arguments = {}
    with trainer.card.around_train():
        assert trainer.done == []
    assert trainer.done == ["card"]
    with pytest.raises(ValueError), trainer.card.around_train():
        raise ValueError
    assert trainer.done == ["card"]


@pytest.mark.parametrize("has_adapter", [True, False])
def test_an_adapter_gets_the_card_in_the_place_of_pefts(has_adapter, trainer, tmp_path):
    if has_adapter:
        trainer.model.peft_config = {}
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "README.md").write_text("PEFT's")
    trainer.card.on_model_saved(folder)
    assert (folder / "README.md").read_text() == ("ours" if has_adapter else "PEFT's")


def test_a_card_that_fails_costs_no_save(trainer, tmp_path):
    def broken():
        raise RuntimeError

    trainer.model.peft_config, trainer.create_model_card = {}, broken
    trainer.card.on_model_saved(tmp_path)
    assert trainer.describing.failures == {"The model card": 1}
