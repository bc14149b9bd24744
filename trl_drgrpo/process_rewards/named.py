"""Process reward models as a recipe names them: checked when the recipe is read, loaded when the first step is scored.

    step_reward_funcs:
      - qwen_math_prm: {model: Qwen/Qwen2.5-Math-PRM-7B, dtype: bfloat16}
      - prm: Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B    # the format is that of the model

Loading waits, so that `--dry_run` and a run with an invalid key do not read billions of weights first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors

# Formats that no configuration states, by what the published ids have in common.
_BY_ID = {
    "math-shepherd": "MathShepherdScorer",
    "versaprm": "VersaScorer",
    "llama-prm800k": "VersaScorer",
    "math-psa": "MathPSAScorer",
    "llama3.1-8b-prm": "ChatTurnScorer",
    "eurusprm": "ImplicitRewardScorer",
    "reasonflux-prm-1.5b": "ReasonFluxScorer",
}
_BY_ARCHITECTURE = {
    "Qwen2ForProcessRewardModel": "QwenMathScorer",
    "Qwen2ForPrmModel": "SkyworkScorer",
}


class NamedScorer:
    """A step reward function that loads its process reward model at the first call.

    Args:
        scorer (`type[PRMScorer]`): Class of the scorer, [`QwenMathScorer`] for example.
        model (`str`): Path or Hub id of the process reward model.
        name (`str`): Name in logs and metrics.
        options (`dict[str, Any]`): Further arguments of the scorer.

    Raises:
        [`InputError`]: `model` is no text, is a local folder without `config.json`, or an option
            that the scorer does not take. What only loading shows is raised by the first call.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores

    def __init__(self, scorer: Any, model: str, name: str, options: dict[str, Any]):
        _check_model(model)
        if options.get("reference") is not None:
            _check_model(options["reference"], "reference")
        scorer.check_options(options)
        self.__name__ = options.get("name", name)
        self.model = model
        self._load: Callable[[], Any] = lambda: scorer(model, **{"name": name, **options})
        self._class, self._scorer = scorer, None

    @property
    def is_causal(self) -> bool | None:
        """What the scorer says, or its class before it is loaded."""
        return getattr(self._scorer or self._class, "is_causal", None)

    def __call__(self, prompts: Any, steps: Any, **kwargs: Any) -> list[list[float | None]]:
        """As the scorer itself, see [`PRMScorer`]."""
        if self._scorer is None:
            self._scorer = self._load()
        return self._scorer(prompts=prompts, steps=steps, **kwargs)


def _named(scorer: str, name: str) -> Callable[..., NamedScorer]:
    """The function behind a recipe's name; `scorer` is a class of this package."""

    def build(model: str, **options: Any) -> NamedScorer:
        import trl_drgrpo.process_rewards as scorers

        return NamedScorer(getattr(scorers, scorer), model, name, options)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"[`~trl_drgrpo.process_rewards.{scorer}`] of a path or Hub id, loaded at the first call."
    return build


token_classification_prm = _named("TokenClassificationScorer", "token_classification_prm")
math_shepherd_prm = _named("MathShepherdScorer", "math_shepherd_prm")
versa_prm = _named("VersaScorer", "versa_prm")
math_psa_prm = _named("MathPSAScorer", "math_psa_prm")
qwen_math_prm = _named("QwenMathScorer", "qwen_math_prm")
chat_turn_prm = _named("ChatTurnScorer", "chat_turn_prm")
skywork_prm = _named("SkyworkScorer", "skywork_prm")
reasonflux_prm = _named("ReasonFluxScorer", "reasonflux_prm")
implicit_prm = _named("ImplicitRewardScorer", "implicit_prm")


def prm(model: str, **options: Any) -> NamedScorer:
    """A process reward model whose id, or else its `config.json`, says which format it has; loaded at the first call.

    Args:
        model (`str`): Path or Hub id.
        **options: Of the scorer that belongs to it.

    Raises:
        [`InputError`]: A model of which this cannot be told, and what [`NamedScorer`] raises.
    """
    _check_model(model)
    return _named(_format_of(model), "prm")(model, **options)


def _format_of(model: str) -> str:
    """Name of the scorer's class."""
    path = Path(model).expanduser()
    for part, scorer in _BY_ID.items():
        if part in (path.name if path.is_dir() else model).lower():
            return scorer
    if (path / "reward_head.pt").is_file():
        return "ReasonFluxScorer"
    from trl_drgrpo.process_rewards.loading import architecture

    with hub_errors("model", model, "a folder or the id of a process reward model on the Hub"):
        stated = architecture(model)
    if stated.endswith("ForTokenClassification"):
        return "TokenClassificationScorer"
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
