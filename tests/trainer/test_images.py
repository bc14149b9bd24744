"""Images: trained on as by TRL's own trainer, bit for bit; the fast path stands aside for them, not for the model."""

import pytest
import torch
from datasets import Dataset, Image, List, Value
from runs import STOCK, assert_same_weights, length_reward, logged, short_run, train, weights
from tiny_vision import pictures, tiny_processor, tiny_vision_model
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def trained(trainer_class, fields, processor, data, **arguments):
    return train(trainer_class, fields, data, processor, length_reward, tiny_vision_model(processor), **arguments)


def test_a_run_on_images_is_trls_and_resumes_from_the_middle_of_a_generation(processor, tmp_path, caplog):
    data, fields = pictures(8), {**short_run(tmp_path / "ours"), "steps_per_generation": 4, "max_steps": 2}
    stock = trained(GRPOTrainer, {**fields, **STOCK, "output_dir": str(tmp_path)}, processor, data)
    fields |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    arguments = {"eval_dataset": pictures(4)}
    ours = trained(DrGRPOTrainer, fields, processor, data, **arguments)
    assert_same_weights(weights(ours), weights(stock))
    start = dict(tiny_vision_model(processor).named_parameters())
    assert max(float((weights(ours)[name] - start[name]).detach().abs().max()) for name in start) > 1e-3
    assert "image_grid_thw, mm_token_type_ids, num_images, pixel_values are not re-batched." in caplog.text
    assert sum("eval_reward" in entry for entry in ours.state.log_history) == 1
    checkpoint = str(tmp_path / "ours" / "checkpoint-1")
    resumed = trained(DrGRPOTrainer, fields, processor, data, resume=checkpoint, **arguments)
    assert_same_weights(weights(resumed), weights(ours))


@pytest.mark.parametrize(("messages", "reads"), [(True, "processor"), (True, "tokenizer"), (False, "tokenizer")])
def test_without_images_the_same_model_is_trained_on_the_fast_path(processor, tmp_path, messages, reads):
    texts = ["x" * (i % 3) + f"Number {i}?" for i in range(8)]
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": t}] for t in texts] if messages else texts})
    fields = {**short_run(tmp_path), "optim": "sgd"}
    reader = processor if reads == "processor" else processor.tokenizer

    def trained(trainer_class, fields):
        return train(trainer_class, fields, data, reader, length_reward, tiny_vision_model(processor))

    stock = trained(GRPOTrainer, {**fields, **STOCK})
    ours = trained(DrGRPOTrainer, {**fields, "overwrite_output_dir": True})
    if reads == "tokenizer":  # positions along several axes, in generation, too
        facts = ours.fast_path.speed.facts()
        assert all(facts[part] == "yes" for part in facts if part != "recorded steps")
        assert len(facts) == 8  # no adapters that could be joined
    fractions = logged(ours, "drgrpo/upstream_token_frac")
    assert fractions
    assert max(fractions) < 0.8
    start = dict(tiny_vision_model(processor).named_parameters())
    moved = max(float((p - start[name]).detach().abs().max()) for name, p in weights(stock).items())
    apart = max(float((p - weights(stock)[name]).abs().max()) for name, p in weights(ours).items())
    assert moved > 1e-4
    assert apart < 1e-4 * moved
    assert not torch.equal(start["lm_head.weight"], weights(ours)["lm_head.weight"])


def with_images(column, values, feature):
    prompts = pictures(len(values))["prompt"]
    return Dataset.from_dict({"prompt": prompts, column: values}).cast_column(column, feature)


PICTURE = pictures(1)[0]["image"]
REFUSED = {
    "null": (lambda: with_images("image", [PICTURE, None, PICTURE], Image()), "null in row 1"),
    "all null": (lambda: with_images("image", [None] * 3, Image()), "null in row 0"),
    "a list in image": (lambda: with_images("image", [[PICTURE]] * 3, List(Image())), "a list in row 0"),
    "no list in images": (lambda: with_images("images", [PICTURE] * 3, Image()), "which is no list, in row 0"),
    "null in images": (lambda: with_images("images", [[PICTURE], None], List(Image())), "null in row 1"),
    "mixed": (lambda: with_images("images", [[PICTURE], [], [PICTURE]], List(Image())), "no picture, .* in row 1"),
    "a number": (lambda: with_images("image", [1, 2, 3], Value("int64")), "the number 1 in row 0"),
    "no file": (lambda: with_images("image", ["/gone.png"] * 3, Image()), "gone.png', a file that does not exist"),
    "no file, as text": (
        lambda: with_images("image", ["gone.PNG"] * 3, Value("string")),
        "a file that does not exist",
    ),
    "text prompts": (
        lambda: Dataset.from_dict({"prompt": ["a"] * 3, "image": [PICTURE] * 3}).cast_column("image", Image()),
        "beside a prompt of text in row 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_whose_images_cannot_be_read_are_refused_before_a_model_loads(case, processor, tmp_path):
    make, message = REFUSED[case]
    fields = {**short_run(tmp_path), "generation_batch_size": 4}
    with pytest.raises(InputError, match=message):
        trained(DrGRPOTrainer, fields, processor, make())


@pytest.mark.parametrize("images", [[[PICTURE, PICTURE]] * 4, [[]] * 4], ids=["several", "none at all"])
def test_lists_of_images_are_trained_on(images, processor, tmp_path):
    trained(
        DrGRPOTrainer, {**short_run(tmp_path), "max_steps": 1}, processor, with_images("images", images, List(Image()))
    )
