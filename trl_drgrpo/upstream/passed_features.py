"""Features that a user passes to the trainer: built and checked, so that none would silently do nothing."""

import inspect
from typing import TYPE_CHECKING

from trl_drgrpo.common.errors import InputError, did_you_mean, shortened
from trl_drgrpo.upstream.hooks import Feature, Hooks, LossTerm
from trl_drgrpo.upstream.passed_terms import check_loss_term

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


def built_feature(source: Feature | type[Feature], trainer: "TrainerProtocol", args: "DrGRPOConfig") -> Feature:
    """Return a feature as an object; a class is built with the trainer as its argument.

    Raises:
        `InputError`: Something else than a feature, a class that takes other arguments, an object that the trainer
            has already, a misspelled hook, a loss term that does not fit the settings.
    """
    feature = source
    if isinstance(feature, type) and issubclass(feature, Feature):
        # Bound before it is called: a `TypeError` in the constructor's body is another problem.
        try:
            inspect.signature(feature).bind(trainer)
        except TypeError as error:
            expected = f"a class of the trainer alone ({error})"
            raise InputError("features", feature.__name__, expected, "Pass an object of it.") from None
        feature = feature(trainer)
    if not isinstance(feature, Feature):
        remedy = "Derive it from trl_drgrpo.Feature; a plain TrainerCallback goes into callbacks."
        raise InputError("features", shortened(feature), "features, or classes of them", remedy)
    if any(feature is listed for listed in trainer.features):
        raise InputError("features", f"{type(feature).__name__} twice", "each object once", "Remove one.")
    _check_hook_names(feature)
    if isinstance(feature, LossTerm):
        check_loss_term(feature, args)
    return feature


def _check_hook_names(feature: Feature) -> None:
    """Refuse a method that is a misspelled hook, or one of the trainer alone: it would never be called."""
    hooks = dir(Feature)  # with all events of transformers' callbacks
    for name in dir(Hooks):
        if hasattr(getattr(Hooks, name), "__wrapped__"):  # by a decorator: those are for features
            hooks.append(name)
    for name in dir(type(feature)):
        if not name.startswith("on_") or name in hooks:
            continue
        remedy = did_you_mean(name, hooks, "", cutoff=0.8)
        if hasattr(Hooks, name):
            remedy = "Override it in a subclass of the trainer."
        if remedy:
            raise InputError("features", f"{type(feature).__name__}.{name}", "a hook of features", remedy)
