"""Additional loss terms: their gradient is that of a float64 oracle, and stays it however rows are cut."""

import math

import pytest
import torch
from runs import logged

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer, Feature, InputError, LossTerm
from trl_drgrpo.check.term_proof import check_loss_terms
from trl_drgrpo.cli.main import main
from trl_drgrpo.host_proof.recording import DEFAULTS, build_policy, completion_reward, record
from trl_drgrpo.upstream.private_state import swapped

ROWS, LENGTH = 8, DEFAULTS["max_completion_length"]
GROUP = DEFAULTS["num_generations"]


class LikelyWhenRight(LossTerm):
    """SFT on the rows that did better than their group."""

    def per_token_loss(self, tokens):
        return -0.1 * tokens.logps * (tokens.advantages > 0)


class EntropyBonus(LossTerm):
    """An entropy bonus per token, under the constant divisor."""

    reads_all_rows = True

    def per_token_loss(self, tokens):
        return -0.05 * tokens.entropies


class ForgetfulEntropyBonus(EntropyBonus):
    """Rows without advantage are skipped, although they have a loss."""

    reads_all_rows = False


class CappedWeights(LossTerm):
    """CISPO: the ratio is capped and weighs the log-probability, instead of being clipped."""

    replaces_policy_loss = True

    def per_token_loss(self, tokens):
        return -tokens.ratio.clamp(max=1.2).detach() * tokens.advantages * tokens.logps


class OverTheMicroBatch(LossTerm):
    """Compares a token with the mean of its micro-batch."""

    def per_token_loss(self, tokens):
        return (tokens.logps - tokens.logps.mean()) ** 2 * (tokens.advantages != 0)


# The oracle: row by row, token by token, in Python loops. It uses no code of the terms or of the trainer's loss.


def oracle_gradient(step, token_loss):
    """Gradient of the sum over tokens of `token_loss(logp, old_logp, entropy, advantage) / (B * L)`, at a step's
    weights."""
    [rollouts] = {id(batch): batch for _, batch in step.rows}.values()
    policy, tokenizer = build_policy(lora=False)
    old_policy, _ = build_policy(lora=False)
    for model, weights in ((policy, step.weights), (old_policy, rollouts.weights)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    total = torch.zeros((), dtype=torch.float64)
    for row, (prompt, completion) in enumerate(zip(rollouts.prompts, rollouts.completions, strict=True)):
        group = rollouts.rewards[row // GROUP * GROUP : (row // GROUP + 1) * GROUP]
        scorable = [reward for reward in group if reward is not None]
        reward = rollouts.rewards[row]
        has_baseline = reward is not None and len(scorable) > 1
        advantage = reward - sum(scorable) / len(scorable) if has_baseline else 0.0
        ids = torch.tensor([[*tokenizer(prompt)["input_ids"], *completion]])
        start = ids.size(1) - len(completion) - 1
        log_probs = policy(ids).logits[0].log_softmax(-1)
        old_log_probs = old_policy(ids).logits[0].log_softmax(-1).detach()
        for place, token in enumerate(completion):
            distribution = log_probs[start + place]
            entropy = -(distribution.exp() * distribution).sum()
            total = total + token_loss(
                distribution[token], old_log_probs[start + place, token], entropy, torch.tensor(advantage)
            )
    named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(total / (ROWS * LENGTH), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(named.items(), gradients, strict=True)
    }


def recorded(features, **settings):
    settings = {**DEFAULTS, "per_device_train_batch_size": ROWS, "max_steps": 2, **settings}
    arguments = {"features": features}
    return record(
        DrGRPOTrainer, DrGRPOConfig, lora=False, plain_head=True, trainer_arguments=arguments, **settings
    ).steps


def difference(gradient, expected):
    scale = math.sqrt(sum(value.square().sum().item() for value in expected.values()))
    assert scale > 0
    return math.sqrt(sum((gradient[name] - expected[name]).square().sum().item() for name in expected)) / scale


@pytest.mark.parametrize(
    ("term", "token_loss"),
    [
        (LikelyWhenRight, lambda logp, old, entropy, advantage: -0.1 * logp * (advantage > 0)),
        (EntropyBonus, lambda logp, old, entropy, advantage: -0.05 * entropy),
    ],
)
def test_an_added_term_adds_the_gradient_of_the_oracle(term, token_loss):
    with_term, without = recorded([term])[0], recorded([])[0]
    added = {name: with_term.gradients[name] - without.gradients[name] for name in without.gradients}
    assert difference(added, oracle_gradient(with_term, token_loss)) < 1e-6  # advantages of the trainer are float32


def test_a_term_in_the_place_of_the_policy_loss_has_the_gradient_of_the_oracle():
    def token_loss(logp, old, entropy, advantage):
        return -(logp - old).exp().clamp(max=1.2).detach() * advantage * logp

    steps = recorded([CappedWeights], steps_per_generation=1, num_iterations=2)
    clipped = recorded([], steps_per_generation=1, num_iterations=2)
    expected = oracle_gradient(steps[1], token_loss)  # the second pass: ratios have left 1
    assert difference(steps[1].gradients, expected) < 1e-6
    assert difference(clipped[1].gradients, expected) > 1e-2


@pytest.mark.parametrize(
    ("term", "fails"),
    [
        (LikelyWhenRight, set()),
        (EntropyBonus, set()),
        (CappedWeights, set()),
        (ForgetfulEntropyBonus, {"planned", "planned, off-policy"}),
        (OverTheMicroBatch, {"planned", "a quarter of the rows at a time", "planned, off-policy"}),
    ],
)
def test_check_sees_whether_a_term_is_exact(term, fails):
    results = list(check_loss_terms([term]))
    assert {result.case.name for result in results if not result.passed} == fails


def test_check_reads_a_term_from_a_file(tmp_path, capsys):
    file = tmp_path / "terms.py"
    file.write_text(
        "from trl_drgrpo import LossTerm\n\n\nclass Nothing(LossTerm):\n"
        "    def per_token_loss(self, tokens):\n        return 0 * tokens.logps\n"
    )
    assert main(["check", "--loss_term", f"{file}:Nothing"]) == 1
    assert "0.0e+00  without the terms" in capsys.readouterr().out  # a term that changes nothing proves nothing
    assert main(["check", "--loss_term", f"{file}:LossTerm.name"]) == 2
    assert main(["check", "--loss_term", f"{file}:Nothin"]) == 2
    assert "a name of" in (error := capsys.readouterr().err)
    assert "Did you mean Nothing?" in error


def test_terms_are_logged_and_rows_without_advantage_run_only_where_a_term_reads_them(train):
    def first_group_is_dead(completion_ids, **kwargs):
        return [0.5] * GROUP + completion_reward(completion_ids)[GROUP:]

    trainer = train(first_group_is_dead, features=[LikelyWhenRight])
    assert logged(trainer, "drgrpo/rows_skipped_frac")[0] > 0
    assert logged(trainer, "loss_term/LikelyWhenRight")[0] > 0
    trainer = train(first_group_is_dead, features=[EntropyBonus(), LikelyWhenRight()])
    assert logged(trainer, "drgrpo/rows_skipped_frac")[0] == 0


def test_a_generation_engines_correction_weighs_only_a_term_in_the_place_of_the_policy_loss(build):
    def loss(term, correction):
        trainer = build(features=[term], micro_batching="upstream")
        trainer.model.eval()
        torch.manual_seed(0)
        inputs = trainer.sample_rollouts([{"prompt": "1+1="}] * 4 + [{"prompt": "2+2="}] * 4)
        inputs["importance_sampling_ratio"] = torch.full((8, 1), correction)
        with swapped(trainer, use_vllm=True):
            return trainer.compute_loss(trainer.model, inputs).item()

    assert loss(CappedWeights, 1.0) != 0.0
    assert loss(CappedWeights, 0.5) == pytest.approx(0.5 * loss(CappedWeights, 1.0), rel=1e-5)
    assert loss(EntropyBonus, 0.0) < -0.01  # nothing is left of the policy's loss, and all of the bonus


@pytest.mark.parametrize(
    ("term", "settings"),
    [
        (EntropyBonus, {"dynamic_sampling": True}),
        (EntropyBonus, {"curriculum": True}),
        (CappedWeights, {"delta": 2.0}),
        (CappedWeights, {"off_policy_mask_threshold": 0.5}),
        (CappedWeights, {"top_entropy_quantile": 0.5}),
    ],
)
def test_settings_that_a_term_contradicts_are_refused(build, term, settings):
    several_prompts = {"num_generations": 2, "max_sampling_rounds": 2}
    [field] = settings
    with pytest.raises(InputError, match=f"{field}: got .* with {term.__name__}"):
        build(features=[term], **several_prompts, **settings)
    build(features=[LikelyWhenRight], **several_prompts, **settings)


class Mean(LossTerm):
    def per_token_loss(self, tokens):
        return tokens.logps.mean()


class Infinite(LossTerm):
    def per_token_loss(self, tokens):
        return tokens.logps / 0


@pytest.mark.parametrize(("term", "words"), [(Mean, "the shape \\(\\)"), (Infinite, "a loss of (nan|-inf)")])
def test_a_term_that_returns_something_else_is_one_error(train, term, words):
    with pytest.raises(InputError, match=rf"{term.__name__}: got {words}"):
        train(features=[term])


def test_features_of_the_user_hear_events_and_keep_their_state(train):
    class Counter(Feature):
        count = 0

        def on_credit(self, batch):
            self.count += len(batch.rewards)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    counter = Counter()
    train(features=[counter], max_steps=2, save_strategy="steps", save_steps=1)
    assert counter.count > 0
    resumed = Counter()
    train(features=[resumed], max_steps=2, save_strategy="steps", save_steps=1, resume=True)
    assert resumed.count == counter.count


def test_features_of_one_class_keep_their_own_states(train):
    class Counter(Feature):
        def __init__(self, start):
            self.count = start

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    train(features=[Counter(1), Counter(2)], max_steps=1, save_strategy="steps", save_steps=1)
    resumed = [Counter(0), Counter(0)]
    train(features=resumed, max_steps=1, save_strategy="steps", save_steps=1, resume=True)
    assert [counter.count for counter in resumed] == [1, 2]


def test_a_single_feature_needs_no_list(build):
    assert isinstance(build(features=Feature).features[-2], Feature)


class WithoutTrainer(Feature):
    def __init__(self):
        super().__init__()


class Misspelled(Feature):
    def on_credits(self, batch):
        pass


class OfTheTrainer(Feature):
    def on_rewards(self, batch):
        pass


class OfTheUser(Feature):
    def on_my_own_terms(self):
        pass


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (WithoutTrainer, "got WithoutTrainer; expected a class of the trainer alone .* Pass an object of it"),
        (Misspelled, "got Misspelled.on_credits; .* Did you mean on_credit?"),
        (OfTheTrainer, "got OfTheTrainer.on_rewards; .* subclass of the trainer"),
        (LossTerm, "got LossTerm without per_token_loss"),
    ],
)
def test_a_feature_that_would_do_nothing_is_refused(build, feature, words):
    with pytest.raises(InputError, match=f"^features: {words}"):
        build(features=feature)


def test_a_feature_has_one_trainer_and_one_place(build):
    feature = OfTheUser()
    with pytest.raises(InputError, match="^features: got OfTheUser twice"):
        build(features=[feature, feature])
    first = build(features=feature)
    build(features=feature)
    with pytest.raises(InputError, match="^features: got OfTheUser, which was passed to another trainer since"):
        first.train()


def test_a_state_that_json_cannot_hold_names_its_feature(train):
    class Unsaved(Feature):
        def state_dict(self):
            return {"count": {1, 2}}

    with pytest.raises(InputError, match="^features: got the state_dict of Unsaved, .* set is not JSON"):
        train(features=Unsaved, max_steps=1, save_strategy="steps", save_steps=1)


@pytest.mark.parametrize("feature", [object(), int, "LikelyWhenRight"])
def test_another_object_is_no_feature(build, feature):
    with pytest.raises(InputError, match="features: got"):
        build(features=[feature])


def test_two_owners_of_a_hook_are_refused_before_training(build):
    class OtherPlan(Feature):
        def on_micro_batch(self, inputs):
            return inputs

    with pytest.raises(InputError, match="FastPath and OtherPlan, which both define on_micro_batch"):
        build(features=[OtherPlan])
