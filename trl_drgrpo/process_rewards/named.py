"""Process reward models as a recipe names them: checked when the recipe is read, loaded when the first step is scored.

    step_reward_funcs:
      - qwen_math_prm: {model: Qwen/Qwen2.5-Math-PRM-7B, dtype: bfloat16}

Loading waits, so that `--dry_run` and a run with a wrong key do not read billions of weights first.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_drgrpo.common.errors import InputError

# Options that every scorer takes and that the marker scorers pass on.
_COMMON = ("batch_size", "max_length", "dtype", "device", "quantization_config", "trust_remote_code")
_NOT_IN_A_RECIPE = ("self", "model", "options", "prompt_text")


class NamedScorer:
    """A step reward function that loads its process reward model at the first call.

    Args:
        scorer (`type`): Class of the scorer, [`QwenMathScorer`] for example.
        model (`str`): Path or Hub id of the process reward model.
        name (`str`): Name in logs and metrics.
        options (`dict[str, Any]`): Further arguments of the scorer.

    Raises:
        [`InputError`]: `model` is no text, is a local folder without `config.json`, or an option
            that the scorer does not take. What only loading shows is raised by the first call.
    """

    def __init__(self, scorer: type, model: str, name: str, options: dict[str, Any]):
        _check_model(model)
        known = [option for option in inspect.signature(scorer).parameters if option not in _NOT_IN_A_RECIPE]
        known += [option for option in _COMMON if option not in known]
        for option in options:
            if option not in known:
                near = get_close_matches(option, known, n=1, cutoff=0.5)
                remedy = f"Did you mean {near[0]}?" if near else "Remove it."
                raise InputError(option, "an unknown option", f"one of {', '.join(known)}", remedy)
        self.__name__ = options.get("name", name)
        self.model = model
        self._load: Callable[[], Any] = lambda: scorer(model, **{"name": name, **options})
        self._scorer: Any = None

    def __call__(self, prompts: Any, steps: Any, **kwargs: Any) -> list[list[float | None]]:
        """As the scorer itself, see [`PRMScorer`]."""
        if self._scorer is None:
            self._scorer = self._load()
        return self._scorer(prompts=prompts, steps=steps, **kwargs)


def _named(scorer: str, name: str) -> Callable[..., NamedScorer]:
    """The function behind a recipe's name; `scorer` is a class of this package."""

    def build(model: str, **options: Any) -> NamedScorer:
        return NamedScorer(
            getattr(importlib.import_module("trl_drgrpo.process_rewards"), scorer), model, name, options
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"[`~trl_drgrpo.process_rewards.{scorer}`] of a path or Hub id, loaded at the first call."
    return build


token_classification_prm = _named("TokenClassificationScorer", "token_classification_prm")
math_shepherd_prm = _named("MathShepherdScorer", "math_shepherd_prm")
qwen_math_prm = _named("QwenMathScorer", "qwen_math_prm")
chat_turn_prm = _named("ChatTurnScorer", "chat_turn_prm")


def _check_model(model: Any) -> None:
    if not isinstance(model, str) or not model:
        raise InputError("model", repr(model), "a path or Hub id", "Name a process reward model.")
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError("model", f"{model}, a folder without config.json", "a saved model", "Name its folder.")
    if looks_local and not path.is_dir():
        remedy = f"Relative paths start at the current directory, {os.getcwd()}."
        raise InputError("model", f"{model}, which does not exist", "a model's folder or Hub id", remedy)
