"""The objective of a run in the words of its card: the formula with the run's numbers (`formula.jinja`), and every
switch that is on (`objective.jinja`).

Read off the configuration and the trainer, never off defaults: a card that says "Dr. GRPO" and no more cannot be
compared with another. Symbols: `P G B T L`, `r_i`, `A_i`, `rho_it`.
"""

from typing import Any

from trl_drgrpo.features.model_card.card_facts import lines_of


def objective_of(trainer: Any) -> tuple[list[str], list[str]]:
    """The objective that a trainer minimizes, also before its first step: the formula, in lines of plain text, and
    one sentence per choice behind it."""
    args, scorer = trainer.args, trainer.step_scorer
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
