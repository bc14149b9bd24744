"""Process reward models as a recipe names them: checked when the recipe is read, loaded when the first step is scored.

    step_reward_funcs:
      - qwen_math_prm: {model: Qwen/Qwen2.5-Math-PRM-7B, dtype: bfloat16}
      - prm: Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B    # the format is that of the model

Loading waits, so that `--dry_run` and a run with an invalid key do not read billions of weights first.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.rewards.recipe_rewards import REWARDS, resolve_reward

# Name in a recipe: the scorer, a class of this package.
SCORERS = {
    "token_classification_prm": "TokenClassificationScorer",
    "math_shepherd_prm": "MathShepherdScorer",
    "versa_prm": "VersaScorer",
    "math_psa_prm": "MathPSAScorer",
    "qwen_math_prm": "QwenMathScorer",
    "chat_turn_prm": "ChatTurnScorer",
    "skywork_prm": "SkyworkScorer",
    "implicit_prm": "ImplicitRewardScorer",
}
# Formats that no configuration states, by what the published ids have in common.
_BY_ID = {
    "math-shepherd": "math_shepherd_prm",
    "versaprm": "versa_prm",
    "llama-prm800k": "versa_prm",
    "math-psa": "math_psa_prm",
    "llama3.1-8b-prm": "chat_turn_prm",
    "eurusprm": "implicit_prm",
}
_BY_ARCHITECTURE = {"Qwen2ForProcessRewardModel": "qwen_math_prm", "Qwen2ForPrmModel": "skywork_prm"}


class NamedScorer:
    """A step reward function that loads its process reward model at the first call.

    Args:
        scorer (`str`): Name of the scorer, `qwen_math_prm` for example.
        model (`str`): Path or Hub id of the process reward model.
        **options: Further arguments of the scorer.

    Attributes:
        is_causal (`bool`, *optional*): What the scorer's class says, or the model's configuration.

    Raises:
        [`InputError`]: `model` is no text, is a local folder without `config.json`, or an option
            that the scorer does not take. What only loading shows is raised by the first call.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores

    def __init__(self, scorer: str, model: str, **options: Any):
        _check_model(model)
        if options.get("reference") is not None:
            _check_model(options["reference"], "reference")
        self._class: Any = getattr(importlib.import_module("trl_drgrpo.process_rewards"), SCORERS[scorer])
        self._class.check_options(options)
        self._options = {"name": scorer, **options}
        self.__name__, self.model, self._scorer = self._options["name"], model, None
        self.causal_remedy = self._class.causal_remedy

    @cached_property
    def is_causal(self) -> bool | None:
        """What the scorer's class says, or, of a token classifier, the model's configuration; `None` where there is
        none to read."""
        if self._class.is_causal is not None:
            return self._class.is_causal
        import torch
        from transformers import AutoConfig, AutoModelForTokenClassification

        from trl_drgrpo.process_rewards.loading import is_causal

        with suppress(OSError, ValueError), torch.device("meta"):
            return is_causal(AutoModelForTokenClassification.from_config(AutoConfig.from_pretrained(self.model)))

    @property
    def source(self) -> str:
        """The model, with its revision once it is loaded."""
        return getattr(self._scorer, "source", self.model)

    def __call__(self, prompts: Any, steps: Any, **kwargs: Any) -> list[list[float | None]]:
        """As the scorer itself, see [`PRMScorer`]."""
        if self._scorer is None:
            self._scorer = self._class(self.model, **self._options)
        return self._scorer(prompts=prompts, steps=steps, **kwargs)


token_classification_prm = partial(NamedScorer, "token_classification_prm")
math_shepherd_prm = partial(NamedScorer, "math_shepherd_prm")
versa_prm = partial(NamedScorer, "versa_prm")
math_psa_prm = partial(NamedScorer, "math_psa_prm")
qwen_math_prm = partial(NamedScorer, "qwen_math_prm")
chat_turn_prm = partial(NamedScorer, "chat_turn_prm")
skywork_prm = partial(NamedScorer, "skywork_prm")
implicit_prm = partial(NamedScorer, "implicit_prm")


def step_reward(spec: Any, field: str = "step_reward_funcs") -> Callable[..., Any]:
    """A step reward as Python or a recipe gives it: a function, what [`resolve_reward`] takes, or the folder or Hub
    id of a process reward model, which is short for `{"prm": ...}`. `field` is for the message.

    Raises:
        [`InputError`]: As [`resolve_reward`] and [`prm`].
    """
    if callable(spec) or not isinstance(spec, (str, Mapping)):
        return spec  # what is no function is refused where the others are
    if isinstance(spec, str) and spec not in REWARDS and ".py" not in spec and ("/" in spec or os.path.isdir(spec)):
        spec = {"prm": os.path.expanduser(spec)}
    return resolve_reward(spec, field)


def prm(model: str, **options: Any) -> NamedScorer:
    """A process reward model whose id, or else its `config.json`, says which format it has; loaded at the first call.

    Args:
        model (`str`): Path or Hub id.
        **options: Of the scorer that belongs to it.

    Raises:
        [`InputError`]: A model of which this cannot be told, and what [`NamedScorer`] raises.
    """
    _check_model(model)
    return NamedScorer(_format_of(model), model, **{"name": "prm", **options})


def _format_of(model: str) -> str:
    """Name of the scorer."""
    path = Path(model).expanduser()
    for part, scorer in _BY_ID.items():
        if part in (path.name if path.is_dir() else model).lower():
            return scorer
    from trl_drgrpo.process_rewards.loading import architecture

    with hub_errors("model", model, "a folder or the id of a process reward model on the Hub"):
        stated = architecture(model)
    if stated.endswith("ForTokenClassification"):
        return "token_classification_prm"
    if stated not in _BY_ARCHITECTURE:
        got = f"{model}, whose architecture, {stated or 'none'}, does not say which format it has"
        remedy = "Name the format, for example `math_shepherd_prm` (`trl_drgrpo.process_rewards.named` has them all)."
        raise InputError("model", got, "a process reward model", remedy)
    return _BY_ARCHITECTURE[stated]


def _check_model(model: Any, field: str = "model") -> None:
    if not isinstance(model, str) or not model:
        raise InputError(field, repr(model), "a path or Hub id", "Name a process reward model.")
    if not (Path(model).expanduser() / "adapter_config.json").is_file():
        check_local(field, model)
