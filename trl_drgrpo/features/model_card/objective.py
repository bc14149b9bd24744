"""The objective of a run in the words of its card: the formula with the run's numbers, and every switch that is on
(`objective.jinja`).

Read off the configuration and the trainer, never off defaults: a card that says "Dr. GRPO" and no more cannot be
compared with another. Symbols: `P G B T L`, `r_i`, `A_i`, `rho_it`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.features.model_card.card_facts import lines_of


@dataclass(frozen=True)
class Objective:
    """The objective of a run.

    Args:
        formula (`list[str]`): Lines of plain text.
        notes (`list[str]`): One sentence per choice behind the formula.
    """

    formula: list[str]
    notes: list[str]


_EARNED = {  # by a row from step k on
    "return_to_go": "sum over steps l >= k of s_il",
    "immediate": "s_ik",
    "min_increments": "sum over steps l >= k of (m_il - m_i,l-1)",
}


def objective_of(trainer: Any) -> Objective:
    """The objective that a trainer minimizes; also before its first step."""
    args: Any = trainer.args
    has_steps = trainer.step_scorer is not None
    formula = [
        f"loss = 1 / (B * L) * sum over rows i and tokens t of l_it      L = {trainer.loss_normalizer} tokens",
        _token_loss(args, "A_it" if has_steps or args.forks > 1 else "A_i"),
        f"rho_{'it' if args.importance_sampling_level == 'token' else 'i'} = {_ratio(args)}",
        _weighted_sum("r_i", trainer.reward_func_names, trainer.reward_weights.tolist()),
        *_advantages(args, has_steps),
        _weighted_sum("s_ik", trainer.step_scorer.names, trainer.step_scorer.weights) if has_steps else "",
    ]
    notes = lines_of(
        "objective.jinja",
        args=args,
        trainer=trainer,
        on_policy=args.gradient_accumulation_steps % trainer.generate_every == 0,
        rows=args.num_generations or 1,
        reference=_reference(trainer),
        segmenter=trainer.step_scorer.segmenter.name if has_steps else None,
    )
    return Objective([line for line in formula if line], notes)


def _token_loss(args: Any, advantage: str) -> str:
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    ratio = "rho_it" if args.importance_sampling_level == "token" else "rho_i"
    capped = ratio if args.delta is None else f"min({ratio}, {args.delta:g})"
    clipped = f"clip({ratio}, {1 - low:g}, {1 + high:g})"
    loss = f"l_it = -min({capped} * {advantage}, {clipped} * {advantage})"
    if args.beta:
        loss += f" + {args.beta:g} * {ratio + ' * ' if args.use_bias_correction_kl else ''}k3_it"
    return loss


def _ratio(args: Any) -> str:
    if args.importance_sampling_level == "token":
        return "exp(logp_it - old_logp_it)"
    return "exp(mean over t of (logp_it - old_logp_it)), one ratio per completion"


def _advantages(args: Any, has_steps: bool) -> list[str]:
    baseline = {
        "group_mean": f"mean of its group's {args.num_generations} rewards",
        "leave_one_out": f"mean of the other {(args.num_generations or 1) - 1} rewards of its group",
    }[args.advantage_baseline]
    outcome = f"r_i - {baseline}"
    name, scale = "A_i ", " / sigma_run" if args.scale_by_running_std else ""
    if args.forks > 1:
        name, outcome = "A_c ", "R_c - mean of R over the siblings of node c"
    lines = [f"{name} = ({outcome}){scale}" if scale else f"{name} = {outcome}"]
    if args.forks > 1:
        return [*lines, *_forked_advantages(args, has_steps)]
    if has_steps and args.process_role == "baseline":
        lines.append(f"A_it = {args.outcome_weight:g} * (A_i - c * (V_ik - mean of V_jk over the group))")
    elif has_steps:
        lines.append(f"A_it = {args.outcome_weight:g} * A_i + {args.process_weight:g} * A_it(process)")
        lines.append(f"A_it(process) = {_credit(args)}")
    return lines


def _forked_advantages(args: Any, has_steps: bool) -> list[str]:
    lines = ["R_c  = mean of r_i over the rows i that pass node c, a stretch of tokens between two forks"]
    if not has_steps:
        return [*lines, "A_it = A_c of the node c that token t of row i is in"]
    return [
        *lines,
        f"A_it = {args.outcome_weight:g} * A_c + {args.process_weight:g} * A_ck of the node c and step k of token t",
        "A_ck = mean of Q_ik over the rows that pass node c - mean over those that pass its siblings",
        f"Q_ik = {_EARNED[args.step_credit]}, 0 once row i has ended",
    ]


def _weighted_sum(symbol: str, names: Sequence[str], weights: Sequence[float]) -> str:
    """A reward as a weighted sum; empty where it is one function with weight 1."""
    if list(weights) == [1.0]:
        return ""
    terms = [f"{weight:g} * {' '.join(name.split())}" for name, weight in zip(names, weights, strict=True)]
    return f"{symbol:<4} = {' + '.join(terms)}"


def _credit(args: Any) -> str:
    if args.step_baseline == "to_go":
        return f"Q_ik - mean of Q_jk over the other rows j; Q_ik = {_EARNED[args.step_credit]}, 0 once row i has ended"
    reference = "" if args.step_baseline == "none" else " - b"
    credit = {
        "return_to_go": f"sum over steps k that end at or after t of (s_ik{reference})",
        "immediate": f"s_ik{reference} of the step k that token t is in",
        "min_increments": "sum over steps k that end at or after t of (m_ik - m_i,k-1)",
    }[args.step_credit]
    return f"({credit}) / group std" if args.deepseekmath_step_std else credit


def _reference(trainer: Any) -> str:
    """What the KL term holds the policy to."""
    if not trainer.args.beta or trainer.ref_model is not None:
        return "the starting weights, frozen"
    adapters = trainer.accelerator.unwrap_model(trainer.model).peft_config
    return "the starting adapter, frozen" if "ref" in adapters else "the base model without the adapter"
