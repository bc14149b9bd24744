"""Images: trained on as by TRL's own trainer, bit for bit; the fast path stands aside for them, not for the model."""

import pytest
import torch
from datasets import Dataset
from runs import STOCK, assert_same_weights, length_reward, logged, short_run, train, weights
from tiny_vision import pictures, tiny_processor, tiny_vision_model
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOTrainer


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
        assert len(facts) == 7
    fractions = logged(ours, "drgrpo/upstream_token_frac")
    assert fractions
    assert max(fractions) < 0.8
    start = dict(tiny_vision_model(processor).named_parameters())
    moved = max(float((p - start[name]).detach().abs().max()) for name, p in weights(stock).items())
    apart = max(float((p - weights(stock)[name]).abs().max()) for name, p in weights(ours).items())
    assert moved > 1e-4
    assert apart < 1e-4 * moved
    assert not torch.equal(start["lm_head.weight"], weights(ours)["lm_head.weight"])
