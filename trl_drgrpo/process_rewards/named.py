"""Process reward models as a recipe names them: checked when the recipe is read, loaded when the first step is scored.

    step_reward_funcs:
      - qwen_math_prm: {model: Qwen/Qwen2.5-Math-PRM-7B, dtype: bfloat16}
      - prm: Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B    # the format is that of the model

Loading waits, so that `--dry_run` and a run with an invalid key do not read billions of weights first.
"""

import importlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.process_rewards.prm_names import FORMATS
from trl_drgrpo.rewards.recipe_names import REWARDS
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


def scorer_of(form: str, model: str, **options: Any) -> Any:
    """The scorer of a format, which loads at the first call.

    Args:
        form (`str`): Name of the format, `qwen_math_prm` for example; `prm`: the one that the model's id, or else its
            `config.json`, says.
        model (`str`): Path or Hub id of the process reward model.
        **options: Further arguments of the scorer.

    Raises:
        [`InputError`]: `model` is no text, is a local folder without `config.json`, does not say which format it has,
            or an option that the scorer does not take. What only loading shows is raised by the first call.
    """
    _check_model(model)
    if options.get("reference") is not None:
        _check_model(options["reference"], "reference")
    known, *_ = FORMATS[_format_of(model) if form == "prm" else form]
    scorer: Any = getattr(importlib.import_module("trl_drgrpo.process_rewards"), known)
    scorer.check_options(options)
    return scorer(model, **{"name": form, **options}, lazy=True)


globals().update({name: partial(scorer_of, name) for name in (*FORMATS, "prm")})  # as recipes find them


def step_reward(spec: Any, field: str = "step_reward_funcs") -> Callable[..., Any]:
    """A step reward as Python or a recipe gives it: a function, what [`resolve_reward`] takes, or the folder or Hub
    id of a process reward model, which is short for `{"prm": ...}`. `field` is for the message.

    Raises:
        [`InputError`]: As [`resolve_reward`] and [`scorer_of`].
    """
    if callable(spec) or not isinstance(spec, (str, Mapping)):
        return spec  # what is no function is refused where the others are
    if isinstance(spec, str) and spec not in REWARDS and ".py" not in spec and ("/" in spec or os.path.isdir(spec)):
        spec = {"prm": os.path.expanduser(spec)}
    return resolve_reward(spec, field)


def _format_of(model: str) -> str:
    """Name of the format."""
    path = user_path(model)
    called = (path.name if path.is_dir() else model).lower()
    for name, (_, ids, _) in FORMATS.items():
        if ids and re.search(ids, called):
            return name
    from trl_drgrpo.process_rewards.loading import architecture

    with hub_errors("model", model, "a folder or the id of a process reward model on the Hub"):
        stated = architecture(model)
    for name, (*_, ending) in FORMATS.items():
        if ending and stated.endswith(ending):
            return name
    got = f"{model}, whose architecture, {stated or 'none'}, does not say which format it has"
    remedy = "Name the format, for example `math_shepherd_prm` (`trl_drgrpo.process_rewards.named` has them all)."
    raise InputError("model", got, "a process reward model", remedy)


def _check_model(model: Any, field: str = "model") -> None:
    if not isinstance(model, str) or not model:
        raise InputError(field, repr(model), "a path or Hub id", "Name a process reward model.")
    if not (user_path(model) / "adapter_config.json").is_file():
        check_local(field, model)
