"""Assertions about the numbers that the notebooks teach, on the variables that a run has left in the kernel.

Loose where chance and machines matter, exact where arithmetic is.
"""

import json
import re
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np


def swap_in(variables: dict[str, Any]) -> None:
    """Two settings, the advantages of both objectives, less work, a run that learns, a faithful merge."""
    import pandas as pd

    n = SimpleNamespace(**variables)
    assert (n.theirs["loss_type"], n.theirs["scale_rewards"]) == ("dapo", "group")
    assert (n.ours["loss_type"], n.ours["scale_rewards"]) == ("dr_grpo", "none")
    objective = {"loss_type", "scale_rewards", "use_bias_correction_kl", "vllm_importance_sampling_mode"}
    assert set(n.differing) == {"output_dir", *objective}

    assert n.texts["grpo"] == n.texts["drgrpo"]  # both begin with the same completions
    rewards = n.first["drgrpo"]["correct_sum"].to_numpy().reshape(-1, 8)  # (P, G)
    advantages = {name: batch["advantage"].to_numpy().reshape(-1, 8) for name, batch in n.first.items()}
    centered, std = rewards - rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    assert abs(advantages["drgrpo"] - centered).max() < 1e-6
    assert abs(advantages["grpo"] - centered / (std + 1e-4)).max() < 1e-5
    assert abs(n.ratios[1] - 2.828) < 0.001  # of 8 answers 1 correct: 1 / std
    assert abs(n.ratios[1] / n.ratios[4] - 1.51) < 0.005

    for log in n.logs.values():
        reward = log["reward"].dropna()
        assert reward.tail(8).mean() > reward.head(3).mean() + 0.15
    own = n.logs["DrGRPOTrainer"]
    assert own["drgrpo/rows_skipped_frac"].mean() > 0.1
    assert own["drgrpo/upstream_token_frac"].mean() < 0.9
    assert n.work.loc["grad_norm", "DrGRPOTrainer"] < 0.5 * n.work.loc["grad_norm", "GRPOTrainer"]
    assert pd.isna(n.work.loc["drgrpo/upstream_token_frac", "GRPOTrainer"])

    assert n.merge.max_logit_difference < 1e-4 * n.merge.max_logit < n.merge.adapter_effect
    html = n.page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == ["grpo", "drgrpo"]
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", html)  # nothing is loaded from elsewhere


def why_dr_grpo(variables: dict[str, Any]) -> None:
    """Weights, trainers and specification agree; drift, trained lengths and the real run are as described."""
    from trl import GRPOConfig, GRPOTrainer

    from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
    from trl_drgrpo.check.bias import OBJECTIVES

    n = SimpleNamespace(**variables)
    assert n.specified == -0.015625
    assert abs(n.losses["grpo_without_std"]) < 1e-12
    logged = {
        "grpo": logged_loss(GRPOTrainer, GRPOConfig, loss_type="grpo"),
        "grpo_without_std": logged_loss(GRPOTrainer, GRPOConfig, loss_type="grpo", scale_rewards="none"),
        "dapo": logged_loss(GRPOTrainer, GRPOConfig),
        "dr_grpo_with_std": logged_loss(GRPOTrainer, GRPOConfig, loss_type="dr_grpo"),
        "dr_grpo": logged_loss(DrGRPOTrainer, DrGRPOConfig),
    }
    for name in OBJECTIVES:
        assert abs(n.losses[name] - logged[name]) < 1e-6, name

    assert np.isclose(n.even.token_weights("grpo")[0] / -n.even.token_weights("grpo")[-1], 200 / 50)
    assert np.allclose(np.abs(n.even.token_weights("dr_grpo")), 1)
    assert np.allclose(n.rare.token_weights("grpo") / n.rare.token_weights("dr_grpo"), 1.51, atol=0.005)

    answers = n.answers
    assert len(answers.steps) == 15 * 64
    assert np.allclose(answers.advantages, OBJECTIVES["dr_grpo"].advantages(answers.rewards, 8), atol=1e-5)
    longest = n.shares["incorrect, longest quarter"]
    assert longest["grpo_without_std"] < longest["dr_grpo"]

    noise = 1 / np.sqrt(5000)
    for name, objective in OBJECTIVES.items():
        (correct, incorrect, shared), (correct_single, incorrect_single, _) = n.many[name], n.single[name]
        assert abs(shared) < 4 * noise
        if objective.divisor == "row":
            assert correct > 1
            assert incorrect < -1
        elif objective.divisor == "constant":
            assert max(map(abs, (correct, incorrect, correct_single, incorrect_single))) < 4 * noise
        else:  # DAPO's remainder
            assert correct_single > 8 * noise
            assert incorrect_single < -8 * noise
            assert abs(correct) < n.many["grpo"][0] / 45
            assert abs(incorrect) < -n.many["grpo"][1] / 45
    for run in n.runs:
        if OBJECTIVES[run["arm"]].divisor == "row":
            assert run["wrong_end"] > 40
            assert run["right_end"] < 2
        else:  # the walk, from 8.5 tokens
            assert 3 < min(run["wrong_end"], run["right_end"]) <= max(run["wrong_end"], run["right_end"]) < 20


def logged_loss(trainer_class: Any, config_class: Any, **objective: Any) -> float:
    """The loss that a trainer logs for the worked example: a rollout function hands it answers of these lengths."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_drgrpo.demo import MODEL_DIR

    rewards, lengths = [1.0, 0.0, 0.0, 1.0], [2, 4, 3, 6]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    letter, end = tokenizer("7")["input_ids"][0], tokenizer.eos_token_id

    def fixed_answers(prompts: Any, trainer: Any) -> dict[str, Any]:
        completions = [[letter] * (length - 1) + [end] for length in lengths]
        return {"prompt_ids": [[letter]] * 4, "completion_ids": completions, "logprobs": None}

    def fixed_rewards(completions: Any, **columns: Any) -> list[float]:
        return rewards

    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            output_dir=folder,
            max_steps=1,
            logging_steps=1,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **objective,
        )
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(MODEL_DIR),
            reward_funcs=fixed_rewards,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["7"] * 4}),
            processing_class=tokenizer,
            rollout_func=fixed_answers,
        )
        trainer.train()
        return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def process_rewards(variables: dict[str, Any]) -> None:
    """Counting every case: `to_go` is exact, the others give the decision to go on nothing. Steps as described."""
    n = SimpleNamespace(**variables)
    for (q, baseline), found in n.gradients.items():
        assert abs(found - (q / 2 if baseline == "to_go" else 0.0)) < 1e-12, (q, baseline, found)
    assert n.step_rewards == [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1]]
    assert [each.closing is not None for each in n.steps] == [False, False, False, True]
    assert n.outcomes.tolist() == [1, 0, 0, 0]
    # The line with the mistake gets the blame, in the second completion its second line, in the third its first.
    process, ends = n.credit["process, to_go"], n.ends
    assert process[0, 0] > 0
    assert process[1, 0] == 0
    assert process[1, ends[1][1]] < 0 < process[1, ends[1][2]]


CHECKS = {"01_swap_in": swap_in, "02_why_dr_grpo": why_dr_grpo, "03_process_rewards": process_rewards}
