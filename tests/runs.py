"""Short training runs that several test files compare."""

import torch

from trl_drgrpo.check.tiny import tiny_model


def length_reward(completion_ids, **kwargs):
    """A reward that varies within every group."""
    return [float(sum(ids) % 3) for ids in completion_ids]


def train(trainer_class, config_class, settings, prompts, tokenizer, reward, model=None, **trainer_arguments):
    trainer = trainer_class(
        model=model or tiny_model(tokenizer),
        reward_funcs=reward,
        args=config_class(**settings),
        train_dataset=prompts,
        processing_class=tokenizer,
        **trainer_arguments,
    )
    trainer.train()
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []
