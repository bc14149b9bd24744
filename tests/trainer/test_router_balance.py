"""Load-balancing loss with experts counted over the generation batch: one gradient for any split of the rows."""

import pytest
import torch
from gradient_runs import EXACT, GEOMETRY, Watching, difference, gradients
from oracles import balance_loss
from runs import assert_same_weights, logged, weights
from tiny import InDouble, tiny_tokenizer
from tiny_families import EXPERTS, tiny
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer, InputError
from trl_drgrpo.features.fast_path.router_balance import RouterBalance
from trl_drgrpo.host_proof.recording import LONG_PROMPTS, record

BATCH = {"router_aux_scope": "batch", "router_aux_loss_coef": 0.5, "max_steps": 2}
ALL_ROWS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 8}
TWO_STEPS_TWICE = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4}  # of each generation batch


@pytest.fixture(autouse=True)
def watching():
    Watching.plans_seen = []


def experts(family="Qwen3Moe"):
    model = tiny(family, tiny_tokenizer())
    model.set_experts_implementation("eager")  # the default knows no float64
    return model.double()


def in_double(trainer_class, settings, family="Qwen3Moe", **options):
    with InDouble():
        return gradients(trainer_class, {**BATCH, **settings}, model=experts(family), **options)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TWO_STEPS_TWICE, id="iterations"),
        pytest.param({"mask_truncated_completions": True, "max_completion_length": 6}, id="masked rows"),
        pytest.param({}, id="accumulation", marks=slow),
        pytest.param({"gradient_accumulation_steps": 4}, id="two generations per step", marks=slow),
        pytest.param({"beta": 0.1, "use_bias_correction_kl": False}, id="KL", marks=slow),
        pytest.param({"pad_to_multiple_of": 8}, id="padded", marks=slow),
        pytest.param({"dynamic_sampling": True, "max_sampling_rounds": 2}, id="dynamic sampling", marks=slow),
    ],
)
def test_planned_micro_batches_have_the_gradient_of_trls(settings):
    ours = in_double(Watching, settings)
    assert all(Watching.plans_seen)
    assert difference(ours, in_double(DrGRPOTrainer, {**settings, "micro_batching": "upstream"})) <= EXACT


def test_checkpointed_layers_keep_the_gradient_of_the_router():
    runs = [
        gradients(DrGRPOTrainer, {**BATCH, "gradient_checkpointing": checkpointing}, model=experts())
        for checkpointing in (True, False)
    ]
    assert difference(*runs) <= 1e-6


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "GptOss" else slow) for family in EXPERTS]
)
def test_any_number_of_rows_per_micro_batch_has_the_same_gradient(family):
    runs = [
        in_double(Watching, {**split, "micro_batching": micro_batching}, family, prompts=LONG_PROMPTS)
        for split, micro_batching in ((ALL_ROWS, "exact"), (ALL_ROWS, "upstream"), (ONE_ROW, "upstream"))
    ]
    for run in runs[1:]:
        assert difference(run, runs[0]) <= EXACT
    # A prompt that a pack holds once counts for each of its rows.
    assert any(len(pack) > 1 for plan in Watching.plans_seen if plan for pack in plan["packs"])


def test_in_one_micro_batch_it_is_trls_loss_and_in_several_another_one():
    def run(trainer_class, settings):
        settings = {**BATCH, **settings}
        if trainer_class is GRPOTrainer:
            del settings["router_aux_scope"]
        model = tiny("Qwen3Moe", tiny_tokenizer())
        return gradients(trainer_class, settings, model=model, plain_head=False)

    assert difference(run(DrGRPOTrainer, ALL_ROWS), run(GRPOTrainer, ALL_ROWS)) <= 1e-5
    assert difference(run(DrGRPOTrainer, ONE_ROW), run(GRPOTrainer, ONE_ROW)) > 1e-3


@pytest.mark.parametrize("micro_batching", ["exact", "upstream"])
def test_gradient_is_that_of_the_definition(micro_batching):
    settings = {**GEOMETRY, **BATCH, **TWO_STEPS_TWICE, "micro_batching": micro_batching}
    equal = {"reward": lambda completion_ids: [0.5] * len(completion_ids)}  # no advantage, so no other gradient
    model = experts()
    with InDouble():
        recording = record(DrGRPOTrainer, DrGRPOConfig, model=model, plain_head=True, **equal, **settings)
        # The first two steps take half of the generation batch each, the others do so again.
        rows = [[(*prompt, *completion) for (prompt, completion), _ in step.rows] for step in recording.steps]
        assert [len(of_step) for of_step in rows] == [8] * 4
        counted = logits_by_row(model, recording.steps[0].weights)
        choices = {row: [of_layer.detach() for of_layer in counted(row)] for row in rows[0] + rows[1]}
        for step, of_step in zip(recording.steps, rows, strict=True):
            values = {name: value.requires_grad_() for name, value in step.weights.items()}
            trained = logits_by_row(model, values)
            loss = balance_loss(choices.get, trained, rows[0] + rows[1], of_step, slots=4, slots_of_step=2, top=2)
            expected = torch.autograd.grad(0.5 * loss, values.values(), materialize_grads=True)
            assert difference([step.gradients] * 2, [dict(zip(values, expected, strict=True))] * 2) <= EXACT


def logits_by_row(model, values):
    """The router's logits of a row by itself, for these weights."""
    values = {name.removeprefix("model."): value for name, value in values.items() if name.startswith("model.")}

    def logits(row):
        inputs = {"input_ids": torch.tensor([row]), "output_router_logits": True}
        return torch.func.functional_call(model.base_model, values, (), inputs).router_logits

    return logits


def test_the_logged_loss_is_that_of_trls_micro_batches_and_evaluations_log_trls(train, tokenizer, output):
    settings = {**BATCH, "max_steps": 4, "logging_steps": 1}
    runs = [
        train(model=tiny("Qwen3Moe", tokenizer), **settings, micro_batching=micro_batching)
        for micro_batching in ("exact", "upstream")
    ]
    assert logged(runs[0], "aux_loss") == pytest.approx(logged(runs[1], "aux_loss"), rel=1e-5)
    assert runs[0].fast_path.speed.facts()["skipped rows"] == "every token counts in the load-balancing loss"
    assert runs[0].evaluate(runs[0].train_dataset.select(range(4)))["eval_aux_loss"] > 0
    runs[0].create_model_card()
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "weight 0.5, with the choices of experts counted over the generation batch." in card


def test_resumed_within_a_generation_batch(train, tokenizer, output):
    settings = {**BATCH, "steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = train(model=tiny("Qwen3Moe", tokenizer), **settings)
    resumed = train(model=tiny("Qwen3Moe", tokenizer), **settings, resume=str(output / "checkpoint-1"))
    assert_same_weights(weights(whole), weights(resumed))


def test_models_without_this_loss_and_images_are_refused(train, tokenizer, monkeypatch):
    with pytest.raises(InputError, match="router_aux_scope: got 'batch' with a model without load-balancing loss"):
        train(**BATCH | {"router_aux_loss_coef": None})
    score = DrGRPOTrainer.score_as_trl

    def doubled(trainer, model, tokens):
        log_probs, entropies, loss = score(trainer, model, tokens)
        return log_probs, entropies, None if loss is None else 2 * loss

    monkeypatch.setattr(DrGRPOTrainer, "score_as_trl", doubled)
    with pytest.raises(InputError, match="'batch' with Qwen3MoeForCausalLM, whose loss on a few tokens is"):
        train(model=tiny("Qwen3Moe", tokenizer), **BATCH)
    with (
        pytest.raises(InputError, match="'batch' with micro-batches of pixel_values"),
        RouterBalance().counting([{"pixel_values": torch.ones(1)}]),
    ):
        pass


def test_a_configuration_that_asks_for_router_logits_is_planned_without_a_loss(build, tokenizer):
    """Then a forward computes TRL's loss by itself, from a mask that packs do not have. (vLLM has to generate.)"""
    trainer = build(model=tiny("Qwen3Moe", tokenizer), router_aux_loss_coef=0.0)
    trainer.model.config.output_router_logits = True
    assert trainer.fast_path._can_share_prompts(trainer.model)
