"""The objective of a run in the words of its card: the formula with the run's numbers, and every switch that is on.

Read off the configuration and the trainer, never off defaults: a card that says "Dr. GRPO" and no more cannot be
compared with another. Symbols: `P G B T L`, `r_i`, `A_i`, `rho_it`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
    notes = [
        "Token losses are summed and divided by the constant B * L, never by a completion's length or a count of "
        "tokens; advantages are not divided by a group's standard deviation.",
        *_policy_notes(trainer, args),
        *_kl_notes(trainer, args),
        *(_step_notes(args, trainer.step_scorer.segmenter.name, trainer.turns.state_keys_of) if has_steps else []),
        *_further_notes(trainer, args),
    ]
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
        "min_to_go": "min over steps k that end at or after t of s_ik, minus the group's mean of each row's minimum",
    }[args.step_credit]
    return f"({credit}) / group std" if args.deepseekmath_step_std else credit


def _policy_notes(trainer: Any, args: Any) -> list[str]:
    on_policy = args.gradient_accumulation_steps % trainer.generate_every == 0
    notes = [
        f"Passes over each generation batch: {args.num_iterations}; micro-batches in it: {args.steps_per_generation}; "
        f"micro-batches per optimizer step: {args.gradient_accumulation_steps}. "
        + ("So the ratio is 1 and clipping has no effect." if on_policy else "So the ratio moves away from 1.")
    ]
    if args.mask_truncated_completions:
        notes.append(
            "Completions cut off at the length limit stay in the group's mean and get no gradient: the objective is "
            "E[(1-t) r + t J], with t = 1 for such a row and J the mean reward as it stands."
        )
    else:
        notes.append("Completions cut off at the length limit are trained on like the others.")
    if args.scale_by_running_std:
        notes.append(
            "sigma_run is the standard deviation of all rewards seen so far, over all prompts; at the moment of this "
            f"card {trainer.reward_scale.std:.4g}."
        )
    if args.forks > 1:
        notes.append(_fork_note(args))
    return [*notes, *_sampling_notes(args)]


def _fork_note(args: Any) -> str:
    where = {
        "drawn": "a place drawn beforehand is reached",
        "entropy": f"the mean entropy exceeds {args.fork_threshold} nats per token",
        "doubt": f"1 - score exceeds {args.fork_threshold}",
    }[args.fork_at]
    rows, branches = args.num_generations or 1, args.forks
    parents = rows // branches**args.fork_depth
    again = "" if args.fork_depth == 1 else f", and the branches are cut again, {args.fork_depth} levels in all"
    return (
        f"Groups fork: {parents} completions are sampled per prompt; each is cut behind the first step in which "
        f"{where} and goes on in {branches} branches{again}: {rows} rows. Siblings are the branches of one cut, or "
        f"the {parents} parents of one prompt. A token before a cut is in every row that shares it, with one "
        "advantage; a completion that could not be cut stands for all of its rows."
    )


def _sampling_notes(args: Any) -> list[str]:
    notes = []
    if args.dynamic_sampling == "dapo":
        notes.append(
            "Batches are filled with groups that carry a signal, and their mean is followed, as in DAPO: that is the "
            "objective above times a factor that changes as the model learns."
        )
    elif args.dynamic_sampling:
        notes.append(
            "Batches are filled with groups that carry a signal; (K - 1) / (M - 1) on their advantages, for K groups "
            "among M prompts drawn, keeps the objective."
        )
    if args.curriculum:
        notes.append(
            f"Prompts are kept with a probability q >= {args.curriculum_q_min:g} that grows with the standard "
            "deviation of their reward; 1 / q on their advantages keeps the objective."
        )
    return notes


def _kl_notes(trainer: Any, args: Any) -> list[str]:
    if not args.beta:
        return ["No KL term (beta = 0): nothing holds the policy to a reference."]
    reference = "the starting weights, frozen"
    if trainer.ref_model is None:
        adapters = trainer.accelerator.unwrap_model(trainer.model).peft_config
        reference = "the starting adapter, frozen" if "ref" in adapters else "the base model without the adapter"
    note = f"KL weight beta = {args.beta:g}; the reference is {reference}; k3 = exp(ref - logp) - (ref - logp) - 1"
    if args.use_bias_correction_kl:
        note += ", multiplied by the importance ratio"
    if args.beta_warmup_steps:
        note += f"; beta rises linearly over the first {args.beta_warmup_steps} optimizer steps"
    return [note + "."]


def _step_notes(args: Any, segmenter: str, state_keys_of: Sequence[str] | None) -> list[str]:
    if args.process_role == "baseline":
        return [
            f"Step scores are a baseline and are not paid: V_ik is the newest score before step k; steps are cut by "
            f"{segmenter}; c is fitted by least squares on earlier batches and other groups."
        ]
    notes = [f"Process rewards s_ik per step; step credit {args.step_credit}; steps are cut by {segmenter}."]
    if args.step_credit == "min_increments":
        notes.append("m_ik is the smallest of s_i1 to s_ik, and m_i0 = 0.")
    if args.step_credit != "min_to_go" and args.step_baseline != "to_go":
        notes.append(f"Step baseline b: {args.step_baseline}.")
    if state_keys_of:
        notes.append(
            "A turn that begins in a state which other rows of the group passed is compared with what those earned "
            f"from there on (state_key of {', '.join(state_keys_of)})."
        )
    if args.deepseekmath_step_std:
        notes.append("Step advantages are divided by the group's standard deviation, as in arXiv 2402.03300.")
    return notes


def _further_notes(trainer: Any, args: Any) -> list[str]:
    """Other settings of TRL that change the objective."""
    notes = []
    if args.entropy_coef or args.use_adaptive_entropy:
        adaptive = f", adapted towards {args.entropy_target} nats" if args.use_adaptive_entropy else ""
        notes.append(
            f"Entropy bonus with coefficient {args.entropy_coef:g}{adaptive}: minus that times the mean entropy of a "
            "micro-batch's tokens, the one term that is divided by a count of tokens."
        )
    if args.top_entropy_quantile < 1:
        share = f"{args.top_entropy_quantile:.0%}"
        notes.append(f"Only the {share} of tokens with the highest entropy are in the policy term.")
    if args.off_policy_mask_threshold is not None:
        threshold = f"{args.off_policy_mask_threshold:g}"
        notes.append(f"Completions with a negative advantage that are off-policy beyond {threshold} are masked.")
    if trainer.aux_loss_enabled:
        notes.append(f"Plus the router's load-balancing loss, weight {trainer.router_aux_loss_coef:g}.")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        bounds = f"{'-inf' if low is None else f'{low:g}'} to {'inf' if high is None else f'{high:g}'}"
        mode = args.vllm_importance_sampling_mode
        notes.append(f"vLLM importance ratios ({mode}, {bounds}) weigh the policy term.")
    if trainer.own_advantages:
        notes.append(
            f"Advantages are computed by the run's own {trainer.own_advantages}: the formulas of A_i and A_it above "
            "may not hold."
        )
    if trainer.own_losses:
        notes.append(
            f"The trainer's class puts its own {' and '.join(trainer.own_losses)} in the place of TRL's: "
            "the formula above may not hold."
        )
    return notes
