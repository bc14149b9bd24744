"""The objective of a run in words: for its card, its log and a resumed run."""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from jinja2 import Template

from trl_drgrpo.common import markdown

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


def template(name: str) -> Template:
    """Return a template of this room."""
    return markdown.template("trl_drgrpo.features.model_card", name, {}, keep_trailing_newline=True)


def lines_of(name: str, **values: Any) -> list[str]:
    """Return the lines of a rendered template, without empty ones."""
    return [line for line in template(name).render(values).splitlines() if line.strip()]


def objective_of(trainer: "TrainerProtocol") -> tuple[list[str], list[str]]:
    """Return the objective that a trainer minimizes, also before its first step.

    It is read off the configuration and the trainer, never off defaults: a card that says "Dr. GRPO" and no more
    cannot be compared with another.

    Returns:
        `tuple[list[str], list[str]]`: The formula with the run's numbers, in lines of plain text, and one sentence per
        choice behind it. Symbols: `P G B T L`, `r_i`, `A_i`, `rho_it`.
    """
    args = trainer.args
    scorer = trainer.step_scorer
    # The templates choose the terms: a setting that has no effect in this run is not named.
    values = {
        "args": args,
        "trainer": trainer,
        "scorer": scorer,
        "reward_weights": trainer.reward_weights.tolist(),
        "on_policy": args.gradient_accumulation_steps % trainer.generate_every == 0,
        "rows": args.num_generations or 1,
        "adapters": getattr(trainer.unwrapped_model, "peft_config", {}),
        "segmenter": scorer.segmenter.name if scorer else None,
    }
    return lines_of("formula.jinja", **values), lines_of("objective.jinja", **values)


def plain_data(value: object) -> Any:
    """Return a value as YAML can hold it: options for a model may be dtypes, paths, or configurations of their own."""
    if isinstance(value, Enum):
        return plain_data(value.value)
    if isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_data(item) for item in value]
    # The types themselves: a subclass (a text of a library's own, for example) is no plain YAML.
    if value is None or type(value) in (str, int, float, bool):
        return value
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        return plain_data(to_dict())
    return str(value)
