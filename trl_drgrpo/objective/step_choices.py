"""The choices that turn step rewards into advantages, by name; `step_advantages.py` says what they do."""

from typing import Literal, get_args

from trl_drgrpo.common.errors import InputError

StepCredit = Literal["return_to_go", "immediate", "min_increments"]
StepBaseline = Literal["to_go", "deepseekmath", "per_completion", "pooled_others", "same_index", "none"]
STEP_CREDITS: tuple[str, ...] = get_args(StepCredit)
STEP_BASELINES: tuple[str, ...] = get_args(StepBaseline)


def check_choices(
    credit: str,
    baseline: str,
    deepseekmath_std: bool,
    prefix: str = "",
) -> None:
    """Refuse an unknown or contradictory choice.

    Args:
        credit, baseline (`str`), deepseekmath_std (`bool`): As in [`step_advantages`].
        prefix (`str`, *optional*): Prefix of field names in messages: `"step_"` for fields of the configuration.

    Raises:
        `InputError`: Names the field.
    """
    if credit not in STEP_CREDITS:
        expected = f"one of {', '.join(STEP_CREDITS)}"
        raise InputError(f"{prefix}credit", repr(credit), expected, "Pick one of them.")
    if baseline not in STEP_BASELINES:
        expected = f"one of {', '.join(STEP_BASELINES)}"
        raise InputError(f"{prefix}baseline", repr(baseline), expected, "Pick one of them.")
    if credit == "min_increments" and baseline not in ("to_go", "none"):
        remedy = "Increments are compared with the later rewards of the other rows: use 'to_go'."
        raise InputError(f"{prefix}baseline", f"{baseline!r} with credit {credit!r}", "'to_go' or 'none'", remedy)
    if deepseekmath_std and baseline != "deepseekmath":
        remedy = "The paper divides over the pooled mean: use that, or leave the division out."
        raise InputError(f"deepseekmath_{prefix}std", f"True with baseline {baseline!r}", "'deepseekmath'", remedy)
