"""Planned micro-batches against stock TRL: the same gradients, and controls that must not be."""

from itertools import product

import pytest
import torch
from datasets import Dataset
from gradient_runs import EXACT, Watching, difference, gradients, half_dead
from runs import assert_same_weights, logged, step_reward, weights
from tiny import tiny_model
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, modeling_utils
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOTrainer, InputError
from trl_drgrpo.features.fast_path import tree_mask
from trl_drgrpo.features.fast_path.fast_path import FastPath
from trl_drgrpo.host_proof.recording import LONG_PROMPTS, completion_reward
from trl_drgrpo.upstream import checkpointing


@pytest.fixture(autouse=True)
def watching():
    Watching.plans_seen = []


@pytest.fixture
def blocks_cut(monkeypatch):
    """How many blocks each pack was cut into, where they cost nothing but their pairs."""
    found, cut_into_blocks = [], tree_mask.cut_into_blocks
    for cost in ("KEY_COST", "BLOCK_COST"):
        monkeypatch.setattr(tree_mask, cost, 0)

    def cut(ends):
        found.append(cut_into_blocks(ends))
        return found[-1]

    monkeypatch.setattr(tree_mask, "cut_into_blocks", cut)
    return found


SETTINGS = {
    "one batch": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1},
    "accumulation": {},
    "rows cut from groups": {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
    },
    "steps per generation": {"steps_per_generation": 4},
    "iterations": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8},
    "two generations per step": {"gradient_accumulation_steps": 4},
    "misaligned": {"steps_per_generation": 3, "num_generations": 4, "max_steps": 6},
    "sequence ratios": {"steps_per_generation": 4, "num_iterations": 2, "importance_sampling_level": "sequence"},
    "KL": {"beta": 0.1, "steps_per_generation": 4, "use_bias_correction_kl": False},
    "truncated rows masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "two-sided clipping": {"delta": 1.5, "steps_per_generation": 4, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "steps_per_generation": 4, "num_iterations": 2},
    "padded to a multiple": {"pad_to_multiple_of": 8},
}


# Left to the slow tests: settings that another one has too, together with more.
CONTAINED = ("one batch", "accumulation", "steps per generation", "two generations per step", "gradient checkpointing")


@pytest.mark.parametrize(
    "lora", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "settings", [pytest.param(SETTINGS[n], id=n, marks=[pytest.mark.slow] * (n in CONTAINED)) for n in SETTINGS]
)
def test_gradients_are_those_of_stock_trl(settings, lora):
    ours = gradients(Watching, settings, lora=lora)
    assert difference(ours, gradients(GRPOTrainer, settings, lora=lora)) <= EXACT
    assert all(Watching.plans_seen)


@pytest.mark.parametrize(
    ("settings", "lora", "checkpointing"),
    [
        pytest.param(
            {"beta": 0.1, "use_bias_correction_kl": False} if kl else {},
            lora,
            checkpointing,
            id=f"{'KL' if kl else 'policy'}-{'lora' if lora else 'full'}-{checkpointing}",
            marks=[] if kl == lora == checkpointing else pytest.mark.slow,
        )
        for kl, lora, checkpointing in product([False, True], repeat=3)
    ],
)
def test_gradients_are_those_of_stock_trl_when_prompts_are_shared(settings, lora, checkpointing, blocks_cut):
    settings = {
        **settings,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "gradient_checkpointing": checkpointing,
    }
    ours = gradients(Watching, settings, lora=lora, prompts=LONG_PROMPTS)
    assert difference(ours, gradients(GRPOTrainer, settings, lora=lora, prompts=LONG_PROMPTS)) <= EXACT
    assert any(len(pack) > 1 for plan in Watching.plans_seen for pack in plan["packs"])
    assert any(len(each) > 2 for each in blocks_cut)


@pytest.mark.parametrize("lora", [False, True])
def test_checkpoints_that_wait_on_the_host_change_no_gradient(lora, monkeypatch):
    """transformers' option, which TRL 1.16 loses when it switches checkpointing off and on to generate."""
    packed = []

    class Counted(save_on_cpu):
        def __init__(self, pin_memory, device_type):
            super().__init__(pin_memory=False)  # no CPU can pin memory
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counted)
    monkeypatch.setattr(checkpointing, "can_pin", lambda: True)
    settings = {"gradient_checkpointing": True, "steps_per_generation": 4}
    expected = gradients(DrGRPOTrainer, settings, lora=lora)
    assert not packed
    settings["gradient_checkpointing_kwargs"] = {"offload": True}
    offloaded = gradients(DrGRPOTrainer, settings, lora=lora)
    every_layer = len(packed)
    assert every_layer
    settings["gradient_checkpointing_kwargs"] = {"offload": True, "every_n_layers": 2}
    every_other = gradients(DrGRPOTrainer, settings, lora=lora)
    assert len(packed) - every_layer < every_layer
    monkeypatch.undo()
    without_device = gradients(DrGRPOTrainer, settings, lora=lora)
    for steps in (offloaded, every_other, without_device):
        assert difference(steps, expected) <= EXACT


def test_float32_with_trls_own_head():
    settings = {"steps_per_generation": 4}
    stock = gradients(GRPOTrainer, settings, plain_head=False)
    assert difference(gradients(DrGRPOTrainer, settings, plain_head=False), stock) <= 1e-5


def tool_rollouts(prompts, trainer):
    """Completions of unequal length in which every third token comes from a tool."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[60 + (5 * row + t) % 90 for t in range(2 + (7 * row) % 11)] for row in range(len(prompts))]
    masks = [[int(t % 3 != 1) for t in range(len(c))] for c in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def forked_rollouts(prompts, trainer):
    """Groups in which three rows continue prefixes of a first one, one of them twice removed, and one repeats it."""
    rollouts = tool_rollouts(prompts, trainer)
    for start in range(0, len(prompts), 4):
        parent = [60 + (start + 7 * t) % 90 for t in range(12)]
        child = parent[:5] + [70 + start + t for t in range(5)]
        group = [parent, child, [*child[:8], 59, 58, 57], parent[:9]] if start % 8 else [child, parent, child, parent]
        rollouts["completion_ids"][start : start + 4] = group
    rollouts["env_mask"] = [
        [int((t + row) % 3 != 1) for t in range(len(c))] for row, c in enumerate(rollouts["completion_ids"])
    ]
    return rollouts


@pytest.mark.parametrize(
    ("rollouts", "plain_head", "settings"),
    [
        (tool_rollouts, True, {}),
        (forked_rollouts, True, {"num_iterations": 2}),
        (forked_rollouts, False, {"num_iterations": 2}),
    ],
)
def test_tools_and_forks_have_the_gradients_of_stock_trl(rollouts, plain_head, settings, blocks_cut):
    arguments = {"trainer_arguments": {"rollout_func": rollouts}, "plain_head": plain_head}
    settings = {"steps_per_generation": 4, **settings}
    ours = gradients(Watching, settings, **arguments)
    assert difference(ours, gradients(GRPOTrainer, settings, **arguments)) <= (EXACT if plain_head else 1e-5)
    if rollouts is forked_rollouts:
        assert any(len(pack) > 1 for plan in Watching.plans_seen for pack in plan["packs"])
        assert any(len(each) > 2 for each in blocks_cut)
    assert all(Watching.plans_seen)


STEPS = {"step_separator": ["tokens:2"], "steps_per_generation": 4}


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({**STEPS, "step_credit": "return_to_go"}, {"trainer_arguments": {"step_reward_funcs": step_reward}}),
        ({**STEPS, "step_credit": "min_increments"}, {"trainer_arguments": {"step_reward_funcs": step_reward}}),
        # unscorable rows, rewards of thirds: TRL's own advantages have rounding residues
        ({}, {"reward": completion_reward}),
    ],
)
def test_gradients_are_those_of_upstream_micro_batches(settings, arguments):
    ours = gradients(Watching, settings, **arguments)
    upstream = gradients(DrGRPOTrainer, {**settings, "micro_batching": "upstream"}, **arguments)
    assert difference(ours, upstream) <= EXACT
    assert all(Watching.plans_seen)


# Controls: the same assertion must see each of these


class NoWeight(DrGRPOTrainer):
    def loss_constants(self, inputs):
        return {**super().loss_constants(inputs), "max_completion_length": self.loss_normalizer}


class TokenNormalizer(DrGRPOTrainer):
    def loss_constants(self, inputs):
        tokens = inputs["completion_mask"].sum().item() / len(inputs["completion_mask"])
        return {**super().loss_constants(inputs), "max_completion_length": max(tokens, 1)}


class PlansWhatItMustNot(DrGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fast_path._why_not_planned = lambda: None


class SkipsInSpiteOfKL(DrGRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fast_path.__class__ = type("Skipping", (FastPath,), {"skips": True})


@pytest.mark.parametrize(
    ("trainer_class", "settings"),
    [
        (NoWeight, {}),
        (TokenNormalizer, {}),
        (PlansWhatItMustNot, {"entropy_coef": 0.1}),
        (PlansWhatItMustNot, {"top_entropy_quantile": 0.5}),
        (SkipsInSpiteOfKL, {"beta": 0.1, "use_bias_correction_kl": False, "steps_per_generation": 4}),
    ],
    ids=["no weight", "token normalizer", "entropy bonus", "top-entropy mask", "skipping with KL"],
)
def test_controls_differ(trainer_class, settings):
    assert difference(gradients(trainer_class, settings), gradients(GRPOTrainer, settings)) > 1e-6


# Continuous batching of transformers

PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # below transformers 5.18
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {PAGE: 16, "num_blocks": 64, "max_batch_tokens": 256},
}


def one_dead_group(prompts, completion_ids, **kwargs):
    return [float("1+2" not in text and sum(ids) % 2) for text, ids in zip(prompts, completion_ids, strict=True)]


def test_with_continuous_batching_a_step_is_taken_on_the_fast_path(train):
    torch.manual_seed(0)
    data = Dataset.from_dict({"prompt": ["1+2=", "7*8=", "12345+67890="]})
    fields = {"max_steps": 1, "gradient_accumulation_steps": 3, "use_cpu": True, "bf16": False, **CONTINUOUS}
    run = train(one_dead_group, data=data, **fields)
    [step] = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert step["grad_norm"] > 0
    assert step["drgrpo/rows_skipped_frac"] >= 1 / 3  # the dead group
    assert step["drgrpo/upstream_token_frac"] < 2 / 3  # and prompts run once


# A step without any signal


def never(completion_ids, **kwargs):
    return [0.7] * len(completion_ids)


def test_a_step_without_signal_still_is_a_step(train, tokenizer):
    # weight decay and momentum go on, as with gradients of zero: not as with gradients of None
    seen = []

    class Recording(DrGRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch):
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen.append([p.grad for p in model.parameters() if p.requires_grad])
            return loss

    fields = {"weight_decay": 0.1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 1}
    trainer = train(never, trainer_class=Recording, **fields)
    assert all(gradient is not None and not gradient.any() for gradient in seen[-1])
    for name, start in tiny_model(tokenizer).named_parameters():
        decays = name.endswith("weight") and "norm" not in name
        expected = start * (1 - 0.1 * 0.1) if decays else start
        torch.testing.assert_close(weights(trainer)[name], expected, rtol=1e-6, atol=0)


# What is logged


@pytest.fixture
def metrics(train, saved_model):
    """What is logged of each step, ours and with all rows in one of TRL's micro-batches."""

    def metrics(reward, **fields):
        def logs(**extra):
            model = AutoModelForCausalLM.from_pretrained(saved_model)  # a reference is loaded from the same place
            trainer = train(reward, model=model, **{**fields, **extra})
            return [entry for entry in trainer.state.log_history if "entropy" in entry]

        steps = fields.get("steps_per_generation", 2) // 2
        whole = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": steps}
        return zip(logs(), logs(micro_batching="upstream", **whole), strict=True)

    return metrics


def test_metrics_over_all_rows_keep_their_meaning(metrics):
    # Ratios leave 1 in later steps on the same rollouts, so some tokens are clipped.
    def reward(completion_ids, **kwargs):
        return half_dead(completion_ids)

    clipped = []
    for a, b in metrics(reward, steps_per_generation=4, num_iterations=2, epsilon=0.01):
        assert 0 < a["entropy"] != b["entropy"]  # of the rows that are run
        for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
            assert a[f"clip_ratio/{name}"] == pytest.approx(b[f"clip_ratio/{name}"], abs=1e-5), name
        clipped.append(b["clip_ratio/region_mean"] > 0)
    assert any(clipped)


def test_entropy_and_kl_over_all_rows_where_none_is_left_out(metrics, reward):
    for a, b in metrics(reward, beta=0.1):
        assert (a["entropy"], a["kl"]) == pytest.approx((b["entropy"], b["kl"]), rel=1e-3)
    assert a["kl"] > 0


def test_the_plan_is_logged(train):
    def reward(completion_ids, **kwargs):  # the second group of each two is dead
        return [float(sum(ids) % 2) if i < 4 else 1.0 for i, ids in enumerate(completion_ids)]

    trainer = train(reward, run_log=False)
    assert logged(trainer, "drgrpo/rows_skipped_frac")[-1] >= 0.5
    assert 0 < logged(trainer, "drgrpo/useful_token_frac")[-1] <= 1
    assert 0 < logged(trainer, "drgrpo/upstream_token_frac")[-1] < 0.7
    assert logged(trainer, "drgrpo/micro_batches")[-1] in (1, 2)


@pytest.mark.parametrize(("micro_batching", "allowed"), [("exact", False), ("upstream", True)])
def test_attention_that_plans_every_width_anew_is_off_while_packs_run(micro_batching, allowed, train):
    seen = set()

    def reward(completion_ids, **kwargs):
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())
        return [float(sum(ids) % 2) for ids in completion_ids]

    before = torch.backends.cuda.cudnn_sdp_enabled()
    train(reward, micro_batching=micro_batching, max_steps=1)
    assert seen == {allowed and before}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_inputs_that_cannot_be_regrouped_stay_with_trl(train, caplog):
    class Images(Watching):
        def on_rollouts(self, batch, rollouts):
            return {**super().on_rollouts(batch, rollouts), "anything_new": torch.zeros(len(rollouts["advantages"]))}

    with caplog.at_level("INFO"):
        ours = weights(train(trainer_class=Images))
    assert_same_weights(ours, weights(train(micro_batching="upstream")))
    assert not any(Watching.plans_seen)
    assert caplog.text.count("micro-batches with anything_new are not re-batched.") == 1


# Subclasses, other models, other precisions


class HalfLogps(DrGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps * 0.5, entropies, aux_loss


def with_half_log_probs(trainer_class):
    # as a function of the stock class: `super()` of the method above is bound to our class
    def stock_scoring(self, *args, **kwargs):
        logps, entropies, aux_loss = GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        return logps * 0.5, entropies, aux_loss

    if issubclass(trainer_class, DrGRPOTrainer):
        return HalfLogps
    return type("StockHalf", (trainer_class,), {"_get_per_token_logps_and_entropies": stock_scoring})


def with_auxiliary_loss(trainer_class):
    """A loss of one's own around TRL's, which expects rows in every micro-batch and logs what it adds."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = trainer_class.compute_loss(self, model, inputs, *args, **kwargs)
        auxiliary = sum(p.square().mean() for p in model.parameters()) / len(inputs["completion_ids"])
        return loss + auxiliary / self.current_gradient_accumulation_steps

    return type("WithAuxiliary", (trainer_class,), {"compute_loss": compute_loss})


ROWS_CUT = SETTINGS["rows cut from groups"]


@pytest.mark.parametrize(
    ("with_its_own", "settings", "name"),
    [
        (with_half_log_probs, {"steps_per_generation": 4}, "_get_per_token_logps_and_entropies"),
        (with_half_log_probs, {"steps_per_generation": 4, "micro_batching": "upstream"}, None),
        (with_auxiliary_loss, ROWS_CUT, "compute_loss"),
    ],
)
def test_an_override_of_the_loss_is_applied_once_and_gets_trls_micro_batches(with_its_own, settings, name, caplog):
    stock = {key: value for key, value in settings.items() if key != "micro_batching"}
    expected = gradients(with_its_own(GRPOTrainer), stock)
    assert difference(gradients(with_its_own(DrGRPOTrainer), settings), expected) <= EXACT
    assert (f"has its own {name}" in caplog.text) == (name is not None)


def test_a_reference_with_another_attention_gets_its_masks_in_its_own_form(train, saved_model):
    # the eager reference adds masks to its scores: with those of the policy it would be wrong without a word
    fields = {"beta": 0.1, "model_init_kwargs": {"attn_implementation": "eager"}, "optim": "sgd"}
    fields |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # one mean, over all tokens

    def run(micro_batching):
        model = AutoModelForCausalLM.from_pretrained(saved_model)
        data = Dataset.from_dict({"prompt": LONG_PROMPTS})
        trainer = train(data=data, model=model, micro_batching=micro_batching, **fields)
        return trainer, logged(trainer, "kl")

    (ours, kl), (_, upstream_kl) = run("exact"), run("upstream")
    shares = {
        ours.model is model: ours.fast_path._plan_costs(model).share_prompts for model in (ours.model, ours.ref_model)
    }
    assert shares == {True: True, False: True}
    assert kl == pytest.approx(upstream_kl, rel=1e-3, abs=1e-6)


def test_a_policy_that_has_diverged_stops_the_run(train, tokenizer):
    model = tiny_model(tokenizer)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match="lm_head.weight is NaN or infinite"):
        train(model=model)
