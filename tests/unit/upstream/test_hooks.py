"""A feature hears each event once, in the order of the features; contexts are left in reverse, after an error too."""

import json
from contextlib import contextmanager

import pytest
from transformers import TrainerCallback

from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.resume.checkpoints import FEATURES_FILE, STATE_FILE
from trl_drgrpo.upstream.hooks import Feature, Hooks
from trl_drgrpo.upstream.private_state import swapped

EVENTS = [
    "on_rows",
    "on_turns_begin",
    "on_credit",
    "add_to_log",
    "on_checkpoint_begun",
    "on_checkpoint_loaded",
]
CONTEXTS = ["making_batch", "rolling_out", "scoring"]


class Listener(Feature):
    """Writes down what it hears."""

    def __init__(self, name, heard):
        super().__init__()
        self.name, self.heard = name, heard

    @contextmanager
    def _entered(self, place):
        self.heard.append(f"{self.name} enters {place}")
        try:
            yield
        finally:
            self.heard.append(f"{self.name} leaves {place}")


def _event(name):
    return lambda self, what: self.heard.append((self.name, name, what))


for event in EVENTS:
    setattr(Listener, event, _event(event))
for context in CONTEXTS:
    setattr(Listener, context, lambda self, context=context: self._entered(context))


@pytest.fixture
def hooks():
    hooks, hooks.heard = Hooks(), []
    hooks.features = [Listener("first", hooks.heard), Listener("second", hooks.heard)]
    return hooks


@pytest.mark.parametrize("event", EVENTS)
def test_each_feature_hears_an_event_once_in_order(event, hooks):
    what = object()
    getattr(hooks, event)(what)
    assert hooks.heard == [("first", event, what), ("second", event, what)]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_contexts_are_left_in_reverse_order(context, error, hooks):
    def block():
        with getattr(hooks, context)():
            hooks.heard.append("block")
            if error:
                raise error

    if error:
        with pytest.raises(error):
            block()
    else:
        block()
    entered = [f"first enters {context}", f"second enters {context}"]
    assert hooks.heard == [*entered, "block", f"second leaves {context}", f"first leaves {context}"]


def test_a_context_that_cannot_be_entered_leaves_those_before_it(hooks):
    def fails():
        raise OSError

    hooks.features[1].scoring = fails
    with pytest.raises(OSError), hooks.scoring():
        hooks.heard.append("block")
    assert hooks.heard in ([], ["first enters scoring", "first leaves scoring"])


def test_no_hook_has_the_name_of_a_callbacks_event():
    """A feature would seem to define it."""
    assert [name for name in vars(Hooks) if name[0] != "_" and hasattr(TrainerCallback, name)] == []


def test_the_hooks_as_they_stand_change_nothing():
    hooks, feature, given = Hooks(), Feature(), {"a": 1}
    assert hooks.on_rollouts(None, given) is given
    assert hooks.on_micro_batch(given) is given
    assert hooks.loss_metrics(given, given) is given
    assert (hooks.loss_without_forward(given), hooks.loss_constants(given)) == (None, {})
    with hooks.writing_card(given) as arguments:
        assert arguments is given
    for event in EVENTS:
        assert getattr(hooks, event)(given) is None
    for context in (hooks.generating, hooks.pushing, hooks.opening_repository, feature.around_train, hooks.scoring):
        with context():
            pass
    assert given == {"a": 1}


class Owner(Feature):
    """Owns what a micro-batch becomes, and the loss of one that needs no forward."""

    def on_micro_batch(self, inputs):
        return {**inputs, "planned": True}

    def loss_without_forward(self, inputs):
        return "nothing to do"


def test_an_owned_hook_goes_to_its_one_owner_and_a_subclass_comes_first(hooks):
    class Mine(Hooks):
        def on_micro_batch(self, inputs):
            return {**super().on_micro_batch(inputs), "mine": True}

    mine = Mine()
    mine.features = [*hooks.features, Owner()]
    mine.check_owners()
    assert mine.on_micro_batch({"a": 1}) == {"a": 1, "planned": True, "mine": True}
    assert mine.loss_without_forward({}) == "nothing to do"
    assert mine.loss_metrics({}, {"kl": [1.0]}) == {"kl": [1.0]}


def test_two_owners_of_one_hook_are_refused_when_training_starts(build):
    trainer = build()
    trainer.features = [*trainer.features, Owner()]
    with pytest.raises(InputError, match="^features: got FastPath and Owner, which both define on_micro_batch; exp"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_in_a_run_the_state_file_is_written_last_and_contexts_nest(train, output):
    heard, files = [], []
    ours = Listener("ours", heard)
    ours.state_dict = lambda: {"seen": 1}

    class Plugged(DrGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.features = [*self.features, ours]

        def completing_checkpoint(self, checkpoint):
            files.append({each.name for each in checkpoint.iterdir()})
            super().completing_checkpoint(checkpoint)
            files.append({each.name for each in checkpoint.iterdir()})

    train(trainer_class=Plugged, max_steps=1, save_strategy="steps", save_steps=1)
    before, after = files
    assert after - before == {STATE_FILE, FEATURES_FILE}
    kept = json.loads((output / "checkpoint-1" / FEATURES_FILE).read_text())
    assert kept["Listener"] == {"seen": 1}
    names = [each if isinstance(each, str) else each[1] for each in heard]
    inner = [f"ours {verb} {place}" for place in CONTEXTS[1:] for verb in ("enters", "leaves")]
    around = ["ours enters making_batch", *inner, "ours leaves making_batch"]
    assert [name for name in names if name.startswith("ours ")] == around
    assert [names.count(event) for event in ("on_credit", "on_checkpoint_begun", "on_checkpoint_loaded")] == [1, 1, 0]


# Attributes that a block swaps


def test_swapped_restores_also_after_an_error():
    class Owner:
        beta = 0.0

    owner = Owner()
    with pytest.raises(RuntimeError), swapped(owner, beta=1.0):  # noqa: PT012
        assert owner.beta == 1.0
        raise RuntimeError
    assert owner.beta == 0.0
    assert vars(owner) == {}  # a bound method left here would keep its owner, a whole trainer, alive
    owner.beta = 2.0
    with swapped(owner, beta=1.0):
        pass
    assert owner.beta == 2.0
