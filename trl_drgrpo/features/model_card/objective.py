"""The objective of a run in words: for its card, its log and a resumed run."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from trl_drgrpo.common import markdown


def template(name: str) -> Any:
    """Load a template of this room."""
    return markdown.template("trl_drgrpo.features.model_card", name, {}, keep_trailing_newline=True)


def lines_of(name: str, **values: Any) -> list[str]:
    """Return the lines of a rendered template, without empty ones."""
    return list(filter(str.strip, template(name).render(values).splitlines()))


def objective_of(trainer: Any) -> tuple[list[str], list[str]]:
    """Describe the objective that a trainer minimizes, also before its first step.

    Read off the configuration and the trainer, never off defaults: a card that says "Dr. GRPO" and no more cannot be
    compared with another.

    Returns:
        `tuple[list[str], list[str]]`: The formula with the run's numbers in lines of plain text, with the symbols
        `P G B T L`, `r_i`, `A_i` and `rho_it`; and one sentence per choice behind it.
    """
    args = trainer.args
    scorer = trainer.step_scorer
    values = {
        "args": args,
        "trainer": trainer,
        "scorer": scorer,
        "reward_weights": trainer.reward_weights.tolist(),
        "on_policy": args.gradient_accumulation_steps % trainer.generate_every == 0,
        "rows": args.num_generations or 1,
        "adapters": getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {}),
        "segmenter": scorer.segmenter.name if scorer else None,
    }
    return lines_of("formula.jinja", **values), lines_of("objective.jinja", **values)


def plain_data(value: Any) -> Any:
    """Convert a value for YAML: options for a model may be dtypes, paths, or configurations of their own."""
    if isinstance(value, Enum):
        return plain_data(value.value)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            plain[key if type(key) in (str, int) else str(key)] = plain_data(item)
        return plain
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(map(plain_data, value))
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "to_dict"):
        return plain_data(value.to_dict())
    return str(value)
