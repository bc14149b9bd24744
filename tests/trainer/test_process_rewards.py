"""Process reward models and Monte-Carlo values inside the trainer, and rollouts by the trainer's own backend."""

import pytest
import torch
from runs import logged
from tiny import save_tiny
from tiny_prms import SCORERS

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.model_card.card import reward_rows
from trl_drgrpo.process_rewards import MonteCarloScorer, TrainerRollouts, TransformersRollouts, step_verifier


def odd_length(completion_ids, **kwargs):
    return [float(len(ids) % 2) for ids in completion_ids]


@pytest.fixture
def run(train):
    fields = {"step_separator": ["tokens:4"], "max_steps": 2}
    return lambda step_reward_funcs, **changes: train(
        None, step_reward_funcs=step_reward_funcs, **{**fields, **changes}
    )


def test_a_process_reward_model_and_a_rule_drive_training(run):
    scorer = SCORERS["token_classification"](name="prm")
    rule = step_verifier(lambda prompt, previous_steps, step: float(len(previous_steps)), name="rule")
    trainer = run([scorer, rule])
    assert logged(trainer, "process_rewards/prm/truncated_frac") == [0.0, 0.0]
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    assert not scorer.model.training


@pytest.mark.parametrize("form", ["path", "mapping"])
def test_a_folder_stands_for_the_model_in_it(form, run, tmp_path):
    scorer = SCORERS["token_classification"]()
    folder = save_tiny(tmp_path / "runs" / "my_prm", scorer.tokenizer, scorer.model)
    given = folder if form == "path" else {"prm": {"model": folder, "batch_size": 2}}
    trainer = run(given, max_steps=1)
    assert logged(trainer, "process_rewards/prm/mean")[0] > 0
    assert ("prm", "step reward: my_prm, a local model", "1") in reward_rows(trainer)
    config = trainer.step_scorer.funcs[0].model.config
    config._name_or_path, config._commit_hash = "org/prm", "0123abc"
    assert ("prm", "step reward: org/prm at revision 0123abc", "1") in reward_rows(trainer)
    with pytest.raises(InputError, match=r"^step_reward_funcs: prm.model: got runs/other, which is not in the local"):
        run("runs/other")


def test_monte_carlo_values_drive_training(run, tokenizer, model):
    rollouts = TransformersRollouts(model, tokenizer, max_new_tokens=6)
    trainer = run([MonteCarloScorer(rollouts, odd_length, k=2, tokenizer=tokenizer)])
    assert all(number > 0 for number in logged(trainer, "process_rewards/monte_carlo/rollouts"))
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))


def test_the_trainers_own_policy_rolls_out(run, tokenizer):
    rollouts = TrainerRollouts(batch_size=6)  # the trainer introduces itself
    scorer = MonteCarloScorer(rollouts, odd_length, k=4, tokenizer=tokenizer)
    seen = []

    class Watched(DrGRPOTrainer):
        def sample_completions(self, prompt_ids, num_generations):
            sampled = super().sample_completions(prompt_ids, num_generations)
            seen.append((prompt_ids, num_generations, sampled))
            return sampled

    trainer = run([scorer], trainer_class=Watched)
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


def test_rollouts_without_a_trainer():
    with pytest.raises(InputError, match="TrainerRollouts.trainer: got none"):
        TrainerRollouts()([[1]], 2)
    with pytest.raises(InputError, match="batch_size: got 0"):
        TrainerRollouts(batch_size=0)
