"""Step rewards work in training with everything else; `test_credit.py` has what they become."""

import inspect
from functools import partial
from pathlib import Path

import pandas
import pytest
import torch
from peft import LoraConfig
from runs import assert_same_weights, length_reward, weights
from transformers import AutoModelForCausalLM

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.config.preflight import prepare
from trl_drgrpo.process_rewards import StepJudge
from trl_drgrpo.process_rewards.named import scorer_of


def parity(steps, step_ends, completion_ids, **kwargs):
    """A step reward that varies, ties and is sometimes missing; by the token that ends the step."""
    return [
        [None if ids[end] % 7 == 0 else float(ids[end] % 3) for end in ends]
        for ids, ends in zip(completion_ids, step_ends, strict=True)
    ]


@pytest.fixture
def process(train):
    """Trains on `parity` alone, unless others are given."""
    given = {"step_separator": ["tokens:3"], "step_reward_funcs": [parity]}
    return lambda reward=None, **changes: train(reward, **{**given, **changes})


def test_one_step_per_completion_trains_like_the_outcome(train):
    def as_one_step(completion_ids, **kwargs):
        return [[r] for r in length_reward(completion_ids)]

    fields = {"step_separator": ["tokens:1000"], "advantage_baseline": "leave_one_out"}
    outcome = weights(train(**fields))
    assert_same_weights(weights(train(None, step_reward_funcs=as_one_step, **fields)), outcome)


@pytest.mark.parametrize(
    "extra",
    [
        {"beta": 0.1},
        {"num_iterations": 2, "steps_per_generation": 4},
        pytest.param({"step_credit": "min_increments", "scale_by_running_std": True}, marks=pytest.mark.slow),
        {"process_role": "baseline"},
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")},
    ],
)
def test_works_together_with(extra, process, reward, saved_model):
    trainer = process(reward, model=saved_model, **extra)
    start = dict(AutoModelForCausalLM.from_pretrained(saved_model).named_parameters())
    trained = {name: p for name, p in weights(trainer).items() if "peft_config" not in extra or "lora_B" in name}
    assert any(not torch.equal(start.get(name, torch.zeros_like(p)), p) for name, p in trained.items())
    assert all(p.isfinite().all() for p in weights(trainer).values())


@pytest.mark.parametrize("role", ["reward", "baseline"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(role, process, reward, output):
    fields = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "process_role": role}
    reward = reward if role == "baseline" else None
    whole = process(reward, **fields)
    resumed = process(reward, **fields, resume=output / "checkpoint-1")
    assert_same_weights(weights(resumed), weights(whole))
    assert resumed.earlier.value_baseline.state_dict() == whole.earlier.value_baseline.state_dict()
    assert (whole.earlier.value_baseline.squares > 0) == (role == "baseline")


def test_metrics_and_the_table_of_completions(process, reward, output):
    def chatty(steps, log_metric, log_extra, **kwargs):
        log_metric("my_metric", 2.0)
        log_extra("first_step", [each[0] if each else "" for each in steps])
        return parity(steps, **kwargs)

    fields = {"max_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    trainer = process(reward, **fields, step_reward_funcs=chatty)
    logged = trainer.state.log_history[0]
    assert logged["my_metric"] == 2.0
    assert logged["process_rewards/chatty/mean"] == pytest.approx(logged["process/reward_mean"])
    assert {"process/steps_mean", "process/reward_mean", "process/unscorable_frac"} <= set(logged)
    table = pandas.read_parquet(next(output.glob("completions/*.parquet")))
    assert len(table) == 8
    assert "".join(table["steps"][0]).startswith(table["first_step"][0])
    assert len(table["steps"][0]) == len(table["step_rewards"][0])


def test_metrics_of_a_step_reward_function_end_no_run(process, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def careless(completions, log_metric, log_extra, **kwargs):
        monkeypatch.chdir("/")
        for junk in (None, "text", [1.0], 10**400):
            log_metric("junk", junk)
        log_extra("short", [1])
        log_extra("none", None)
        return [float(len(completion) % 2) for completion in completions]

    def careless_steps(steps, completions, **kwargs):
        careless(completions, **{name: kwargs[name] for name in ("log_metric", "log_extra")})
        return parity(steps, **kwargs)

    fields = {"max_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    trainer = process(careless, **fields, step_reward_funcs=careless_steps)
    assert Path.cwd() == tmp_path
    assert "junk" not in trainer.state.log_history[0]
    table = pandas.read_parquet(next(output.glob("completions/*.parquet")))
    assert not {"short", "none"} & set(table)


def test_a_failing_step_function_saves_what_was_computed(process, output):
    calls = []

    def fails_late(steps, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            return [[1.0]]
        return parity(steps, **kwargs)

    with pytest.raises(RewardError, match="'fails_late': got 1 rows; expected 8 lists"):
        process(step_reward_funcs=fails_late)
    assert (output / "checkpoint-2").exists()


# Before a model loads


def test_step_settings_without_step_rewards_are_said_to_do_nothing(settings, prompts, caplog):
    prepare(DrGRPOConfig(**settings), None, [length_reward], prompts)
    assert "no effect" not in caplog.text
    prepare(DrGRPOConfig(**settings, step_separator=["tokens:3"], forks=2), None, [length_reward], prompts)
    assert "no effect" not in caplog.text  # forks lie behind steps
    prepare(DrGRPOConfig(**settings, step_separator=["tokens:3"]), None, [length_reward], prompts)
    assert "step_separator: no effect without step_reward_funcs" in caplog.text


def test_a_model_that_is_paid_is_warned_of(settings, prompts, caplog):
    functions = {"step_reward_funcs": [parity, StepJudge("m", "http://localhost:1/v1")]}
    prepare(DrGRPOConfig(**settings, process_role="baseline"), None, [length_reward], prompts, **functions)
    prepare(DrGRPOConfig(**settings), None, [length_reward], prompts, step_reward_funcs=[parity])
    assert "is a model" not in caplog.text
    prepare(DrGRPOConfig(**settings), None, [length_reward], prompts, **functions)
    assert "process_role: 'step_judge' is a model whose scores are rewarded" in caplog.text


def test_scores_that_read_later_text(settings, prompts, caplog):
    def later(steps, **kwargs):
        return []

    def check(is_causal, **fields):
        caplog.clear()
        later.is_causal = is_causal
        functions = {"step_reward_funcs": [partial(later)]}
        prepare(DrGRPOConfig(**{**settings, **fields}), None, [length_reward], prompts, **functions)
        return "".join(record.message for record in caplog.records if "preflight" in record.name)

    for fields in ({}, {"process_role": "baseline"}):
        assert check(True, **fields) == ""
    assert check(None) == ""  # not known, and paid
    declare = "If it reads no further than the step, set `later.is_causal = True`."
    assert f"end of that step. 'later' does not say. {declare}" in check(None, process_role="baseline")
    said = check(False)
    assert "the score that 'later' gives a step" in said
    assert "The tokens of later steps are not credited with it" in said
    forked = {"forks": 2, "fork_at": "doubt", "fork_threshold": 0.5}
    for fields, refused in (
        ({"process_role": "baseline"}, "process_role: got 'baseline'"),
        (forked, "fork_at: got 'doubt'"),
    ):
        with pytest.raises(InputError, match=f"^{refused} with 'later', whose score .* bias the gradient. {declare}$"):
            check(False, **fields)


def test_scorers_say_how_their_scores_come_to_read_no_later_text(settings, prompts):
    judge = StepJudge("m", "http://localhost:1/v1", reads="solution", name="judge")
    functions = {"step_reward_funcs": [judge, scorer_of("implicit_prm", "a/b", reference="a/c")]}
    remedies = "Give `judge` reads='prefix'.* Replace `implicit_prm`"
    with pytest.raises(InputError, match=f"'baseline' with 'judge', 'implicit_prm', .*{remedies}"):
        prepare(DrGRPOConfig(**settings, process_role="baseline"), None, [length_reward], prompts, **functions)
    assert all("is_causal" in inspect.getdoc(type(func)) for func in functions["step_reward_funcs"])
