"""understand-r1-zero and oat: graders `grader(response, gt, fast=...) -> (info, reward)`.

`boxed_reward_fn` goes with the Qwen-Math template, `answer_tag_reward_fn` with the R1 template; both are in
`oat.utils.math_grader`. They bound their own work with SIGALRM, on a main thread only: give a `timeout`, which runs
them in killable workers. Delta: the official oracle scores a grading that takes too long 0, here it is unscorable.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import Call, Convention
from trl_drgrpo.rewards.adapters.samples import Place, Sample
from trl_drgrpo.rewards.contract import OnError, check_flag, reward_name


def from_r1_zero(
    grader: Callable | str,
    *,
    fast: bool = True,
    answer_column: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A grader of understand-r1-zero as a reward function of TRL's form.

    Args:
        grader (`Callable` or `str`):
            The grader, or its path, for example `oat.utils.math_grader.boxed_reward_fn`.
        fast (`bool`, *optional*, defaults to `True`):
            The official recipe's `verifier_version=fast`; `False` also asks math-verify.
        answer_column (`str`, *optional*):
            Column of the correct answer (text, number, or a list of which any counts). Defaults to `answer`, else
            `solution`, else `gt_answer`.
        name (`str`, *optional*):
            Name in logs. Defaults to the grader's.
        timeout (`float`, *optional*):
            Seconds per completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion: `None` and a count, or with `"raise"` an error.

    Returns:
        `Callable`: `f(completions, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: If the grader cannot be found, or takes other arguments.

    Example:

    ```python
    >>> def grader(response, gt, fast=False):
    ...     return {"formatted": True}, float(response == gt)
    >>> from_r1_zero(grader)(completions=["4", "5"], answer=["4", "4"])
    [1.0, 0.0]

    ```
    """
    found = foreign_calls.loaded(grader, "grader")
    check_flag("fast", fast)
    foreign_calls.check_takes(found, "grader", "f(response, gt, fast=...) -> (info, reward)", 2, ("fast",))
    options: dict[str, Any] = {"name": name or reward_name(found), "timeout": timeout, "on_error": on_error}
    return foreign_calls.per_completion([found], _R1Zero(answer_column, fast), **options)


class _R1Zero(Convention):
    """Arguments and result of a grader."""

    def __init__(self, answer_column: str | None, fast: bool):
        usual = ("answer", "solution", "gt_answer")
        self.answer, self.fast = Place("the correct answer", "answer_column", answer_column, usual), fast

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        self.answer.column(columns, reward)

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        gold = self.answer.value(sample.columns, reward)
        return (sample.text, gold), signatures.select(function, {}, {"fast": self.fast})

    def read(self, result: Any) -> Any:
        if not isinstance(result, tuple | list) or len(result) != 2:
            got = f"{type(result).__name__} {result!r}"[:80]
            raise RewardError("an understand-r1-zero grader", got, "a pair (info, reward)", "Use another adapter.")
        return result[1]
