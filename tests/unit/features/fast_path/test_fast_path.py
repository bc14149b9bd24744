"""When the fast path stands aside, and what several processes decide together; tests/trainer/test_fast_path.py and
tests/process run the rest."""

from types import SimpleNamespace

import pytest
import runs
import torch
from runs import short_run

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.features.fast_path import fast_path
from trl_drgrpo.features.fast_path.decoding import decoder
from trl_drgrpo.features.fast_path.fast_path import FastPath
from trl_drgrpo.features.fast_path.micro_batch_planner import Costs
from trl_drgrpo.upstream.batches import TokenBatch


@pytest.fixture(scope="module")
def built(prompts, tokenizer, reward, tmp_path_factory):
    return runs.build(DrGRPOTrainer, short_run(tmp_path_factory.mktemp("run")), prompts, tokenizer, reward)


@pytest.fixture
def trainer(built, monkeypatch):
    """Plans, unless a test says otherwise."""
    monkeypatch.setattr(built, "fast_path", FastPath(built))
    monkeypatch.setattr(fast_path, "why_not_rebatched", lambda *arguments: None)
    monkeypatch.setattr(built, "score_as_trl", lambda model, tokens: "as TRL")
    return built


@pytest.fixture
def together(trainer, monkeypatch):
    """The trainer among ranks that run the same forwards; what the others say may be set."""

    def among(*others):
        monkeypatch.setattr(DrGRPOTrainer, "in_lockstep", True)
        monkeypatch.setattr(trainer, "gathered", lambda values: [*values, *others])
        return trainer.fast_path

    return among


def change(monkeypatch, trainer, place, value):
    *parents, name = place.split(".")
    owner = getattr(trainer, parents[0]) if parents else trainer
    monkeypatch.setattr(owner, name, value, raising=False)


DYNAMIC = SimpleNamespace(get_text_config=lambda: SimpleNamespace(rope_parameters={"rope_type": "dynamic"}))


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("args.entropy_coef", 0.1, "the entropy bonus is a mean"),
        ("args.use_adaptive_entropy", True, "the entropy bonus is a mean"),
        ("args.top_entropy_quantile", 0.5, "top_entropy_quantile compares"),
        ("aux_loss_enabled", True, "the load-balancing loss is a mean"),
        ("model.active_peft_config", SimpleNamespace(is_prompt_learning=True), "virtual tokens"),
        ("args.torch_compile", True, "torch.compile would recompile for every shape"),
        ("model.config", DYNAMIC, "rotary angles depend on the width"),
        ("_compute_loss", lambda model, inputs: None, "has its own _compute_loss"),
        ("compute_loss", lambda model, inputs: None, "has its own compute_loss"),
        ("args.micro_batching", "upstream", None),
    ],
)
def test_it_stands_aside_where_planning_would_not_be_exact_and_says_why(
    place, value, reason, trainer, caplog, monkeypatch
):
    with trainer.fast_path.around_train():
        assert trainer.fast_path.skips
    change(monkeypatch, trainer, place, value)
    with trainer.fast_path.around_train():
        assert not trainer.fast_path.plans
    said = [record.message for record in caplog.records]
    assert len(said) == (reason is not None)
    start = "Fast path without planned micro-batches, skipped rows, shared prompts: "
    assert all(message.startswith(start) and reason in message for message in said)
    facts = trainer.fast_path.speed.facts()
    assert (reason or "micro_batching is 'upstream'") in facts["planned micro-batches"]


def test_rows_are_left_out_only_where_the_advantage_is_all_that_moves_them(trainer, monkeypatch, caplog):
    monkeypatch.setattr(trainer, "beta", 0.1)
    assert trainer.fast_path.plans
    assert not trainer.fast_path.skips
    with trainer.fast_path.around_train():
        reason = "with beta > 0 the KL term gives every row a gradient"
        assert trainer.fast_path.speed.facts()["skipped rows"] == reason
        assert caplog.messages == [f"Fast path without skipped rows: {reason}."]


def test_evaluation_images_and_rows_without_a_prompt_stay_with_trl(trainer):
    text, image = SimpleNamespace(is_text_only=True), SimpleNamespace(is_text_only=False)
    assert trainer.fast_path.score_tokens(trainer.model.train(), image) == "as TRL"
    assert trainer.fast_path.score_tokens(trainer.model.eval(), text) == "as TRL"
    batch = {"completion_ids": torch.ones(2, 3), "prompt_mask": torch.ones(2, 2)}
    assert trainer.fast_path._can_be_planned([batch])
    assert not trainer.fast_path._can_be_planned([{**batch, "prompt_mask": torch.tensor([[1, 1], [0, 0]])}])


# In lockstep


def rollouts(completions):
    """Rows with a prompt of two tokens and completions of these lengths, as many per forward as there are rows."""
    mask = torch.zeros(len(completions), 2 + max(completions), dtype=torch.long)
    for row, length in enumerate(completions):
        mask[row, : 2 + length] = 1
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    return TokenBatch(ids, mask, max(completions), batch_size=1)


@pytest.mark.parametrize("more", [0, 7])
def test_every_rank_scores_rollouts_in_as_many_forwards(more, together, trainer, monkeypatch):
    one = together()
    monkeypatch.setattr(trainer, "gathered", lambda values: [*values, type(values[0])(more or True)])
    one._costs[id(trainer.model), False] = Costs()
    run = []

    def score(model, tokens, packs):
        run.append(packs)
        return torch.ones(tokens.input_ids.size(0), tokens.completion_width), None, None

    monkeypatch.setattr(one, "_score_packs", score)
    one._score_rollouts(trainer.model, rollouts([9, 3, 3]))
    assert sorted(row for packs in run for pack in packs for row in pack) == [0, 1, 2]
    assert len(run) == max([len([packs for packs in run if packs]), more])


def test_one_rank_without_a_prompt_leaves_scoring_to_trl_everywhere(together, trainer, monkeypatch):
    assert together(False)._score_rollouts(trainer.model, rollouts([9, 3])) == "as TRL"
    monkeypatch.setattr(trainer, "gathered", None)  # a rank with images would not take part
    monkeypatch.setattr(DrGRPOTrainer, "takes_images", True)
    assert trainer.fast_path._score_rollouts(trainer.model, rollouts([9, 3])) == "as TRL"


@pytest.mark.parametrize("reason", [None, "it fails with a block mask"])
def test_all_ranks_share_prompts_or_none(reason, together, trainer, monkeypatch, caplog):
    monkeypatch.setattr(fast_path, "why_not_shared", lambda *arguments: None)
    assert together(reason)._can_share_prompts(trainer.model) is (reason is None)
    assert (str(reason) in caplog.text) is (reason is not None)


# Generation


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (None, None),
        ("in_lockstep", True),
        ("args.fast_generation", False),
        ("args.torch_compile", True),
        ("args.micro_batching", "upstream"),
    ],
)
def test_generation_is_transformers_where_prompts_do_not_run_once(place, value, trainer, monkeypatch, caplog):
    seen = []
    monkeypatch.setattr(decoder, "why_not_decoded", lambda *arguments: None)
    monkeypatch.setattr(trainer.model_wrapped, "generate", lambda **kwargs: seen.extend(kwargs))
    if place == "in_lockstep":
        monkeypatch.setattr(DrGRPOTrainer, place, value)
    elif place:
        change(monkeypatch, trainer, place, value)
    with trainer.fast_path.generating():
        trainer.model_wrapped.generate(input_ids=1)
    assert seen == (["input_ids"] if place else ["input_ids", "custom_generate"])
    facts = trainer.fast_path.speed.facts()
    assert len(facts) == (4 if place else 0)  # the loop itself tells what it uses
    unasked = place in ("in_lockstep", "args.torch_compile")
    assert ("Fast path without prompts run once" in caplog.text) == unasked
