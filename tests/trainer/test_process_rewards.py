"""Process reward models and Monte-Carlo values inside the trainer, and rollouts by the trainer's own backend."""

import pytest
import torch
from peft import LoraConfig
from runs import length_reward, logged, train
from tiny_prms import token_classification
from transformers import AutoModelForCausalLM

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.model_card.card_facts import reward_rows
from trl_drgrpo.process_rewards import (
    MonteCarloScorer,
    PolicyLogRatio,
    TrainerRollouts,
    TransformersRollouts,
    step_verifier,
)


def odd_length(completion_ids, **kwargs):
    return [float(len(ids) % 2) for ids in completion_ids]


@pytest.fixture
def run(settings, prompts, tokenizer):
    def run(*step_reward_funcs, trainer_class=DrGRPOTrainer, **changes):
        values = {**settings, "step_separator": ["tokens:4"], "max_steps": 2, **changes}
        arguments = {"step_reward_funcs": list(step_reward_funcs)}
        return train(trainer_class, values, prompts, tokenizer, None, **arguments)

    return run


def test_a_process_reward_model_and_a_rule_drive_training(run):
    scorer = token_classification(name="prm")
    rule = step_verifier(lambda prompt, previous_steps, step: float(len(previous_steps)), name="rule")
    trainer = run(scorer, rule)
    assert logged(trainer, "process_rewards/prm/truncated_frac") == [0.0, 0.0]
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    assert not scorer.model.training


@pytest.mark.parametrize("form", ["path", "mapping"])
def test_a_folder_stands_for_the_model_in_it(form, settings, prompts, tokenizer, tmp_path):
    scorer = token_classification()
    folder = str(tmp_path / "runs" / "my_prm")
    scorer.model.save_pretrained(folder)
    scorer.tokenizer.save_pretrained(folder)
    given = folder if form == "path" else {"prm": {"model": folder, "batch_size": 2}}
    settings |= {"step_separator": ["tokens:4"], "max_steps": 1}
    trainer = train(DrGRPOTrainer, settings, prompts, tokenizer, None, step_reward_funcs=given)
    assert logged(trainer, "process_rewards/prm/mean")[0] > 0
    assert ("prm", "step reward: my_prm, a local model", "1") in reward_rows(trainer)
    scorer.model.config._name_or_path, scorer.model.config._commit_hash = "org/prm", "0123abc"
    trainer.step_scorer.funcs[0]._scorer = scorer
    assert ("prm", "step reward: org/prm at revision 0123abc", "1") in reward_rows(trainer)
    with pytest.raises(InputError, match=r"^step_reward_funcs: prm.model: got runs/other, which is not in the local"):
        train(DrGRPOTrainer, settings, prompts, tokenizer, None, step_reward_funcs="runs/other")


def test_monte_carlo_values_drive_training(run, tokenizer, model):
    rollouts = TransformersRollouts(model, tokenizer, max_new_tokens=6)
    trainer = run(MonteCarloScorer(rollouts, odd_length, k=2, tokenizer=tokenizer))
    assert all(number > 0 for number in logged(trainer, "process_rewards/monte_carlo/rollouts"))
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))


def test_the_trainers_own_policy_rolls_out(settings, prompts, tokenizer):
    rollouts = TrainerRollouts(batch_size=6)  # the trainer introduces itself
    scorer = MonteCarloScorer(rollouts, odd_length, k=4, tokenizer=tokenizer)
    seen = []

    class Watched(DrGRPOTrainer):
        def sample_completions(self, prompt_ids, num_generations):
            sampled = super().sample_completions(prompt_ids, num_generations)
            seen.append((prompt_ids, num_generations, sampled))
            return sampled

    values = {**settings, "step_separator": ["tokens:4"], "max_steps": 2}
    trainer = train(Watched, values, prompts, tokenizer, None, step_reward_funcs=[scorer])
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    for prompt_ids, num_generations, sampled in seen:
        assert num_generations == 4
        assert len(prompt_ids) == len(sampled) == 4  # one prefix at a time: 6 // 4
        assert all(ids == prompt_ids[0] for ids in prompt_ids)  # as the vLLM server mode wants it
    assert sum(logged(trainer, "process_rewards/monte_carlo/rollouts")) == sum(len(ids) for ids, *_ in seen)
    assert rollouts([], 4) == []


class Accelerator:
    """Two processes, seen from one that has less to do."""

    device, num_processes = torch.device("cpu"), 2

    def gather(self, calls):
        return torch.stack([calls, torch.tensor(3)])


def test_processes_make_the_same_calls(tokenizer):
    calls = []

    class Trainer:
        accelerator, processing_class = Accelerator(), tokenizer

        def sample_completions(self, prompt_ids, num_generations):
            calls.append(prompt_ids)
            return [[ids[-1]] for ids in prompt_ids]

    prefixes = [tokenizer(text)["input_ids"] for text in ("xxa", "b", "xc")]
    assert TrainerRollouts(Trainer(), batch_size=4)(prefixes, 2) == [["a", "a"], ["b", "b"], ["c", "c"]]
    assert [len(rows) for rows in calls] == [4, 4, 4]
    calls.clear()
    scorer = MonteCarloScorer(TrainerRollouts(Trainer(), batch_size=4), odd_length, k=2, tokenizer=tokenizer)
    one_step = {"steps": [("a",)], "completion_ids": [[64]], "step_ends": [[0]]}
    assert scorer(["p"], ["a"], **one_step) == [[1.0]]  # nothing to roll out here, but the other process has
    assert [len(rows) for rows in calls] == [4, 4, 4]


class Watched(PolicyLogRatio):
    """Keeps what it gave, and what summing log-probabilities by hand gives under the policy and the first weights."""

    def __init__(self, first):
        super().__init__(beta=0.5)
        self.first, self.pairs = first.eval(), []

    @torch.no_grad()
    def __call__(self, steps, step_ends, **kwargs):
        rollouts, model = self._rollouts, self._trainer.model
        rewards = super().__call__(steps, step_ends, **kwargs)
        assert model.training  # as it was
        for row, ends in enumerate(step_ends):
            prompt = rollouts["prompt_ids"][row][rollouts["prompt_mask"][row].bool()]
            completion = rollouts["completion_ids"][row][rollouts["completion_mask"][row].bool()]
            ids = torch.cat([prompt, completion])[None]
            ratio = 0
            for sign, each in ((1, model.eval()), (-1, self.first)):
                logits = each(input_ids=ids).logits[0, len(prompt) - 1 : -1] / self._trainer.temperature
                ratio = ratio + sign * logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
            model.train()
            starts = [0, *(end + 1 for end in ends)]
            by_hand = [ratio[start : end + 1].sum().item() for start, end in zip(starts, ends, strict=False)]
            self.pairs += list(zip(rewards[row], [self.beta * total for total in by_hand], strict=True))
        return rewards


@pytest.mark.parametrize("reference", ["a copy", "TRL's", "without the adapter"])
def test_the_policys_log_ratio_to_what_it_began_as(reference, settings, prompts, tokenizer, saved_model):
    """One run per way in which the trainer has a reference; the first batch is all zeros, the later ones are not."""
    scorer = Watched(AutoModelForCausalLM.from_pretrained(saved_model))
    values = {**settings, "step_separator": ["tokens:4"], "beta": 0.1 if reference == "TRL's" else 0.0}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    adapter = lora if reference == "without the adapter" else None
    trainer = train(
        DrGRPOTrainer,
        values,
        prompts,
        tokenizer,
        length_reward,
        model=saved_model,
        step_reward_funcs=[scorer],
        peft_config=adapter,
    )
    given, by_hand = (torch.tensor(each) for each in zip(*scorer.pairs, strict=True))
    assert given == pytest.approx(by_hand, abs=2e-4)
    assert given[: len(given) // 4].abs().max() < 1e-5
    assert given.abs().max() > 1e-2
    assert len(logged(trainer, "process_rewards/policy_log_ratio/mean")) == 3


def test_rollouts_without_a_trainer():
    with pytest.raises(InputError, match="TrainerRollouts.trainer: got none"):
        TrainerRollouts()([[1]], 2)
    with pytest.raises(InputError, match="batch_size: got 0"):
        TrainerRollouts(batch_size=0)
