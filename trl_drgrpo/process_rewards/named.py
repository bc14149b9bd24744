"""Process reward models as a recipe names them: checked when the recipe is read, loaded when the first step is scored.

    step_reward_funcs:
      - qwen_math_prm: {model: Qwen/Qwen2.5-Math-PRM-7B, dtype: bfloat16}
      - prm: Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B    # the format is that of the model

Loading waits, so that `--dry_run` and a run with an invalid key do not read billions of weights first.
`register_prm_format` adds a format; those of this package are in `published_prms.py` and `implicit.py`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local, hub_errors
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.common.registry import Entry, Registry
from trl_drgrpo.process_rewards.loading import architecture
from trl_drgrpo.process_rewards.prm_scorer import PRMScorer
from trl_drgrpo.rewards.recipe_names import REWARDS, register_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_reward


@dataclass(frozen=True)
class PRMFormat(Entry):
    """A format of process reward models. The arguments are those of [`register_prm_format`]."""

    scorer: type | str
    is_causal: bool | None
    published_ids: str | None
    architecture: str | None


FORMATS: Registry[PRMFormat] = Registry("PRM format")


def register_prm_format(
    name: str,
    scorer: type | str,
    *,
    help: str,
    is_causal: bool | None,
    published_ids: str | None = None,
    architecture: str | None = None,
) -> None:
    """
    Give a format of process reward models a name for recipes: `step_reward_funcs: [{name: {model: ...}}]`.

    Args:
        name (`str`): The name in recipes, logs and metrics.
        scorer (`type` or `str`): A class of [`PRMScorer`], or where it is, as `"package.module:Class"`, which is
            imported on first use.
        help (`str`): One sentence: how it scores a step.
        is_causal (`bool`, *optional*): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires. `None` if that depends on the model.
        published_ids (`str`, *optional*): Regular expression that is found in the ids of published models (in lower
            case). `prm` recognizes the format by it.
        architecture (`str`, *optional*): End of the architecture that the configuration of such a model states. `prm`
            recognizes the format by it, too.

    Raises:
        [`InputError`]: A name that is taken, no help, a scorer that is no class of [`PRMScorer`], or a pattern that is
            no regular expression.
    """
    FORMATS.check_home(name, scorer)
    # A class that is named by its place is imported, and checked, on first use.
    if not isinstance(scorer, str):
        _check_class(name, scorer)
    try:
        re.compile(published_ids or "")
    except (re.error, TypeError) as error:
        got = f"published_ids={published_ids!r} ({error})"
        raise FORMATS.error(name, got, "a regular expression", "Correct the pattern.") from None
    prm_format = PRMFormat(name, help, scorer, is_causal, published_ids, architecture)
    FORMATS.check_options(prm_format)  # before the reward of this name is there
    # A format is a reward as well, in the table that recipes are read by.
    register_reward(name, factory=partial(scorer_of, name), help=help, role="step")
    FORMATS.add(prm_format)
    if not isinstance(scorer, str):
        _tell_class(prm_format, scorer)


def _tell_class(prm_format: PRMFormat, scorer: type) -> None:
    """Set the attributes of a scorer's class that its registration states."""
    scorer.format_name = prm_format.name
    scorer.is_causal = prm_format.is_causal


def _check_class(name: str, scorer: object) -> None:
    if not (isinstance(scorer, type) and issubclass(scorer, PRMScorer)):
        remedy = "Derive it from trl_drgrpo.process_rewards.PRMScorer, or register a function with `register_reward`."
        raise FORMATS.error(name, repr(scorer), "a class of PRMScorer", remedy)


def scorer_of(form: str, model: str, **options: Any) -> PRMScorer:
    """Build the scorer of a format, which loads at the first call.

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
    # An implicit reward has two models, which are named alike.
    if options.get("reference") is not None:
        _check_model(options["reference"], "reference")
    format_name = form
    if form == "prm":
        format_name = _format_of(model)
    prm_format = FORMATS[format_name]
    scorer: Any = FORMATS.load(prm_format.name, prm_format.scorer)
    # A class that was registered by its name is imported by now, and checked as others are at once.
    if isinstance(prm_format.scorer, str):
        _check_class(prm_format.name, scorer)
        _tell_class(prm_format, scorer)
    scorer.check_options(options)
    return scorer(model, **{"name": form, **options}, lazy=True)


register_reward(
    "prm", factory=partial(scorer_of, "prm"), help="A PRM, in the format that the model states.", role="step"
)


def step_reward(spec: Any, field: str = "step_reward_funcs") -> Callable[..., Any]:
    """Return a step reward as Python or a recipe writes it. `field` is for the message.

    That is a function, whatever [`resolve_reward`] takes, or the folder or Hub id of a process reward model, which is
    short for `{"prm": ...}`.

    Raises:
        [`InputError`]: The errors of [`resolve_reward`] and [`scorer_of`].
    """
    if callable(spec) or not isinstance(spec, (str, Mapping)):
        return spec  # anything that is no function is refused where the others are
    if isinstance(spec, str):
        is_path = "/" in spec or os.path.isdir(spec)  # a Hub id has a slash, and a folder may have none
        if is_path and spec not in REWARDS and ".py" not in spec:
            spec = {"prm": os.path.expanduser(spec)}
    return resolve_reward(spec, field)


def _format_of(model: str) -> str:
    """Return the name of the format that a model's id or its configuration tells."""
    path = user_path(model)
    model_name = model.lower()
    if path.is_dir():
        model_name = path.name.lower()  # the folders above it say nothing of the model
    # A published id first: it says more than an architecture, and needs no look at the Hub.
    for name, prm_format in FORMATS.items():
        if prm_format.published_ids and re.search(prm_format.published_ids, model_name):
            return name
    with hub_errors("model", model, "a folder or the id of a process reward model on the Hub"):
        class_name = architecture(model)
    for name, prm_format in FORMATS.items():
        if prm_format.architecture and class_name.endswith(prm_format.architecture):
            return name
    got = f"{model}, whose architecture, {class_name or 'none'}, does not say which format it has"
    remedy = f"Name the format: {', '.join(FORMATS)}."
    raise InputError("model", got, "a process reward model", remedy)


def _check_model(model: object, field: str = "model") -> None:
    if not isinstance(model, str) or not model:
        raise InputError(field, repr(model), "a path or Hub id", "Name a process reward model.")
    # `check_local` refuses an adapter's folder, and Math-PSA is published as an adapter.
    if not (user_path(model) / "adapter_config.json").is_file():
        check_local(field, model)
