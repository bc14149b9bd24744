r"""`math_reward`: 1 if the final answer is mathematically the gold answer, 0 if it is not.

Most samples are decided in this process, by spelling, exact numbers and structure, all of it bounded by construction.
The rest needs algebra, which is not bounded: it runs in worker processes that are killed at the time limit, so that a
hostile completion costs one sample. No signals are used; the reward works in any thread.

Deltas from TRL's `accuracy_reward`: several places of the answer and several gold answers; `\frac12`, units, sets and
percents compare as people read them; 0.0000672 is not 0.0000674; `9^{9^{9}}` is 0 at once and not after
seconds. Text is not understood: `is not \boxed{5}` is a box with 5 in it.

The same where TRL has a rule: a gold answer that cannot be read is `None`, a completion without one is 0. So is one
whose algebra exceeds the limits: with `None` it would cost nothing.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from trl_drgrpo.common.errors import InputError, did_you_mean, require_package
from trl_drgrpo.common.ranges import Choice
from trl_drgrpo.rewards.contract import Limits, OnError, check_column
from trl_drgrpo.rewards.functions.mathematics.answers import ANSWER_FORMATS, extract_answer, gold_answers, unreadable
from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.sample import SampleReward


@dataclass(eq=False, repr=False)
class MathReward(SampleReward):
    r"""Reward 1.0 if a completion's final answer equals the gold answer, else 0.0; `None` without a gold answer.

    Args:
        answer_format (`str`, *optional*, defaults to `"auto"`):
            Where the answer stands: `"boxed"`, `"tags"` (`<answer>...</answer>`), `"final_line"` ("The answer is 42.",
            "#### 42") or `"auto"`, the first of these three that is there. An answer anywhere else scores 0.
        answer_column (`str`, *optional*, defaults to `"solution"`):
            Column of the dataset with the gold answer: a bare answer, a solution that ends in one of the forms above,
            a number, or a list of which any counts.
        think_opened (`"auto"` or `True`, *optional*, defaults to `"auto"`):
            Whether the prompt ends in `<think>`. With `True` a completion without `</think>` has no answer, as it
            never left its reasoning; `"auto"` sees that only where the completion itself opens the tag.
        limits ([`Limits`], *optional*):
            Limits of the algebra per completion. `None`: it runs in this process, unbounded.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What becomes of a completion whose algebra exceeds the limits: it gets 0 and is counted in
            `rewards/<name>/failed_frac`, or with `"raise"` it is an error.
        name (`str`, *optional*, defaults to `"math_reward"`): Name in logs and metrics.

    Raises:
        [`InputError`]: An option is out of range, or Math-Verify is not installed.

    Example:

    ```python
    >>> math_reward(completions=[r"So \boxed{\frac12}.", "So 2."], solution=[r"\frac{1}{2}", "2"])
    [1.0, 0.0]

    ```
    """

    answer_format: str = "auto"
    answer_column: str = "solution"
    think_opened: bool | str = "auto"
    limits: Limits | None = Limits()  # noqa: RUF009 (frozen)
    on_error: OnError = "unscorable"
    name: str = "math_reward"

    truths = ("text", "number", "list")
    allowed: ClassVar = {
        "think_opened": Choice(
            ("auto", True), "True fits a chat template that opens <think> itself; 'auto' fits all others."
        )
    }

    def __post_init__(self):
        if self.answer_format not in ANSWER_FORMATS:
            got = repr(self.answer_format)
            expected = f"one of {', '.join(ANSWER_FORMATS)}"
            otherwise = "Set how completions state the answer."
            remedy = did_you_mean(self.answer_format, ANSWER_FORMATS, otherwise, form="{!r}")
            raise InputError("answer_format", got, expected, remedy)
        check_column(self.answer_column, "answer_column")
        super().__post_init__(self.answer_column)

    def check(self) -> None:
        """Refuse a machine without math-verify before a run: the first sample that needs algebra would end it.

        Not in the constructor: `math_reward` is made when this module is imported, which all names of rewards are.
        """
        require_package("math_verify", f"reward {self.name}", "a check by algebra", "math")

    def score(self, completion: str, **columns: Any) -> float | None:
        """Reward of one completion, with algebra where it is needed."""
        # Again, as `score` may be called by itself; `read`, `tidy` and the like are cached.
        is_decided, reward = self.at_sight(completion, **columns)
        if is_decided:
            return reward
        answer: Any = extract_answer(completion, self.answer_format)
        for gold in self._golds(columns):
            # No algebra for a gold answer that cheap means have told apart from this one.
            if equivalent(gold, answer, deep=False) is None and equivalent(gold, answer):
                return 1.0
        return 0.0

    def at_sight(self, completion: str, **columns: Any) -> tuple[bool, float | None]:
        """Tell whether the reward is decided without algebra, and the reward."""
        golds = self._golds(columns)
        if not golds:
            return True, None
        if self.think_opened is True and "</think>" not in completion:
            return True, 0.0
        answer = extract_answer(completion, self.answer_format)
        if answer is None:
            return True, 0.0
        verdicts = [equivalent(gold, answer, deep=False) for gold in golds]
        if True in verdicts:  # any gold answer counts, so no algebra for the others
            return True, 1.0
        if None not in verdicts:
            return True, 0.0
        self.check()  # where nobody has asked before the call
        return False, None

    def _golds(self, columns: dict[str, Any]) -> list[str]:
        return [answer for answer in gold_answers(columns[self.answer_column]) if not unreadable(answer)]

    def check_row(self, **columns: Any) -> str | None:
        """Reason why the row's gold answer cannot be read."""
        return unreadable_gold(columns[self.answer_column])

    def warm_up(self) -> None:
        """Load sympy and the parser in a new worker: seconds, which are not to count as the first completion's."""
        equivalent("x + 1", "1 + x")  # a pair that only algebra decides, so that it imports all that is needed


def unreadable_gold(gold: object) -> str | None:
    r"""Reason why [`MathReward`] scores no completion of a problem: its gold answer cannot be read.

    Args:
        gold: One value of the answer column, as [`MathReward`] takes it.

    Returns:
        `str` or `None`: The reason, for the last of several gold answers; `None` if one of them can be read.

    Example:

    ```python
    >>> unreadable_gold(r"\boxed{\frac{1}{2}}"), unreadable_gold(r"x +"), unreadable_gold(None)
    (None, 'a formula that breaks off', 'empty')

    ```
    """
    reason = "empty"  # where there is no answer at all
    for answer in gold_answers(gold):
        reason = unreadable(answer)
        if reason is None:
            return None
    return reason


math_reward = MathReward()


register_reward(
    "math_reward",
    math_reward,
    help="1 if the final answer equals a gold answer.",
    factory=MathReward,
    is_harmless=True,
)
