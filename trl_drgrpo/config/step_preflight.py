"""Step reward functions against the configuration: what does not fit, and what should be known."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.rules import Rules
from trl_drgrpo.rewards.columns import parameters
from trl_drgrpo.rewards.contract import declared, reward_name

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction

logger = logging.getLogger(__name__)

StepRewards = Sequence[Callable[..., Any]]


def step_contradictions(args: "DrGRPOConfig", steps: list["StepRewardFunction"]) -> Rules:
    """Settings that do not fit step reward functions."""
    cuts_by_doubt = args.forks > 1 and args.fork_at == "doubt"
    for func in steps:
        # The commonest mix-up.
        if _is_rule_of_a_step(func):
            name = reward_name(func)
            got = f"{name!r}, which scores one step"
            remedy = f"Wrap it: trl_drgrpo.process_rewards.step_verifier({name})."
            yield InputError("step_reward_funcs", got, "a function that scores a batch", remedy)
    # Both settings need scores that are functions of the text before the next step.
    not_causal = _declaring(steps, "is_causal", False)
    needs_causal = {"process_role": args.process_role == "baseline", "fork_at": cuts_by_doubt}
    for field, applies in needs_causal.items():
        if not_causal and applies:
            got = f"{getattr(args, field)!r} with {_quoted(not_causal)}, whose score of a step depends on later text"
            remedy = f"It would bias the gradient. {_causal_remedies(not_causal)}"
            yield InputError(field, got, "scores that read no further than the end of their step", remedy)
    if args.importance_sampling_level == "sequence":
        remedy = "One ratio per row averages the step rewards over the row: set 'token'."
        yield InputError("importance_sampling_level", "'sequence' with step_reward_funcs", "'token'", remedy)
    if args.process_weight != 0 and args.mask_truncated_completions:
        got = f"True with the step rewards of {_quoted(steps)}"
        remedy = (
            "Tokens behind a step decide whether its row is masked, which biases the credit of the step: remove it, "
            "or return the sum of the scores as one outcome reward (reward_funcs)."
        )
        yield InputError("mask_truncated_completions", got, "False", remedy)


def warn_of_steps(args: "DrGRPOConfig", steps: list["StepRewardFunction"]) -> None:
    """Warn about step reward functions that are allowed but may surprise."""
    not_causal = _declaring(steps, "is_causal", False)
    if not_causal:
        logger.warning(
            "step_reward_funcs: the score that %s gives a step depends on later text. The tokens of later steps are "
            "not credited with it, so the gradient is not that of the expected sum of the scores. Return it as one "
            "outcome reward (reward_funcs) instead. %s",
            _quoted(not_causal),
            _causal_remedies(not_causal),
        )
    # A function that declares nothing may be causal all the same.
    unknown = _declaring(steps, "is_causal", None)
    setting = None
    if args.process_role == "baseline":
        setting = "process_role='baseline'"
    elif args.forks > 1 and args.fork_at == "doubt":
        setting = "fork_at='doubt'"
    if unknown and setting:
        logger.warning(
            "%s: the gradient is unbiased only if the score of a step reads no further than the end of that step. "
            "%s does not say. %s",
            setting,
            _quoted(unknown),
            _causal_remedies(unknown),
        )
    learned = _declaring(steps, "is_learned", True)
    if learned and args.process_role == "reward":
        logger.warning(
            "process_role: %s is a model whose scores are rewarded: the policy learns to exploit its mistakes "
            "(recipes/guides/process_rewards.md). Set process_role='baseline' to subtract the scores instead.",
            _quoted(learned),
        )


def _declaring(funcs: list["StepRewardFunction"], attribute: str, value: bool | None) -> list["StepRewardFunction"]:
    """Return the functions that declare this of themselves; for `None` those that declare nothing."""
    declaring = []
    for func in funcs:
        declaration = declared(func, attribute)
        if declaration is not None:
            declaration = bool(declaration)
        if declaration is value:
            declaring.append(func)
    return declaring


def _quoted(funcs: list["StepRewardFunction"]) -> str:
    return ", ".join(repr(reward_name(func)) for func in funcs)


def _causal_remedies(funcs: list["StepRewardFunction"]) -> str:
    """Say how scores come to read no later text: in the words of a scorer of ours, else by a declaration."""
    by_hand = "If it reads no further than the step, set `{0}.is_causal = True`."
    remedies = []
    for func in funcs:
        remedy = declared(func, "causal_remedy") or by_hand
        remedies.append(remedy.format(reward_name(func)))
    # Several scorers of one class give the same advice, which is said once.
    return " ".join(dict.fromkeys(remedies))


def _is_rule_of_a_step(func: "StepRewardFunction") -> bool:
    """Tell whether it is a rule for one step where a function of whole batches is due."""
    names = {parameter.name for parameter in parameters(func) or ()}
    return "step" in names and "steps" not in names
