"""Rules as process rewards: a function that judges one step becomes a step reward function.

A rule sees the prompt, the steps written so far, the step itself and the dataset row; it cannot be exploited beyond
what it leaves unchecked, costs microseconds, and needs no model. Whatever it does wrong (an exception, a string, an
infinite number) is one error that names row and step, or, for those who opted in, an unscorable step and a counter.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.step_columns import dataset_columns, row_of
from trl_drgrpo.rewards.contract import OnError, check_on_error, declared, reward_name, reward_number

logger = logging.getLogger(__name__)

StepRewards = list[list[float | None]]


def step_verifier(func: Callable[..., Any], name: str | None = None, on_error: OnError = "raise") -> Callable:
    """Turn a function that judges one step into a step reward function.

    Args:
        func (`Callable`):
            Called as `func(prompt, previous_steps, step, **columns) -> float | None`: the row's prompt (text or
            messages), the texts of the steps before (`tuple[str, ...]`), the step's text (separator and special tokens
            included), and this row's value of each dataset column. Columns that the function neither names nor takes
            by `**kwargs` are not passed. `None` or NaN = this step cannot be scored.
        name (`str`, *optional*):
            Name in logs and metrics. Defaults to the function's own.
        on_error (`str`, *optional*, defaults to `"raise"`):
            `"raise"`: an exception of the function, or a result that is no number, is a [`RewardError`] naming row and
            step. `"unscorable"`: that step gets the `lowest_reward` that `func` declares, else `None`, which counts as
            0; the first traceback is logged, and the share of failed steps goes to the metric
            `process_rewards/<name>/failed_steps_frac`.

    Returns:
        `Callable`: A step reward function.

    Raises:
        `InputError`: An `on_error` that does not exist, or an asynchronous `func`.

    Example:

    ```python
    >>> def short(prompt, previous_steps, step, limit):
    ...     return float(len(step) <= limit)
    >>> reward = step_verifier(short)
    >>> reward(prompts=["?", "?"], completions=["ab", ""], steps=[("a", "bcd"), ()], limit=[2, 2])
    [[1.0, 0.0], []]

    ```
    """
    check_on_error(on_error)
    if inspect.iscoroutinefunction(func):
        remedy = (
            "A step verifier is called step by step: write a step reward function instead, it may be asynchronous."
        )
        raise InputError("step_verifier", "an asynchronous function", "a plain function", remedy)
    rule = _Rule(func, name or reward_name(func), on_error == "raise")

    def verified(
        prompts: Sequence[Any],
        completions: Sequence[Any] | None = None,
        steps: Sequence[Sequence[str]] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> StepRewards:
        return rule.score(prompts, steps, dataset_columns(kwargs, len(prompts)), log_metric)

    verified.is_causal = True  # type: ignore[attr-defined]  # it sees nothing behind the step
    verified.__name__ = verified.__qualname__ = rule.name
    verified.__doc__ = inspect.getdoc(func)
    verified.__signature__ = _with_columns(verified, func)  # type: ignore[attr-defined]
    return verified


def _with_columns(verified: Callable[..., Any], func: Callable[..., Any]) -> inspect.Signature:
    """The signature of the step reward function, with the columns that the rule requires: they are checked early."""
    own = inspect.signature(verified)
    try:
        asked = list(inspect.signature(func).parameters.values())[3:]
    except (TypeError, ValueError):  # a built-in without a signature
        return own
    *named, rest = own.parameters.values()
    columns = [
        inspect.Parameter(p.name, inspect.Parameter.KEYWORD_ONLY)
        for p in asked
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in own.parameters
    ]
    return own.replace(parameters=[*named, *columns, rest])


class _Rule:
    """A verifier with its name, which columns it takes, and how its failures are treated."""

    def __init__(self, func: Callable[..., Any], name: str, raises: bool):
        self.func = func
        self.name = name
        self.raises = raises
        self.has_logged = False
        self.lowest: float | None = declared(func, "lowest_reward")
        self.accepted = _named_parameters(func)

    def score(
        self,
        prompts: Sequence[Any],
        steps: Sequence[Sequence[str]],
        columns: dict[str, Sequence[Any]],
        log_metric: Callable[[str, float], None] | None,
    ) -> StepRewards:
        """One list of rewards per row; the failed steps are counted."""
        if self.accepted is not None:
            columns = {column: values for column, values in columns.items() if column in self.accepted}
        rewards: StepRewards = []
        failures: list[bool] = []
        for row, (prompt, texts) in enumerate(zip(prompts, steps, strict=True)):
            values = row_of(columns, row)
            texts = tuple(texts)
            judged = [self._judge(prompt, texts, step, values, row) for step in range(len(texts))]
            rewards.append([reward for reward, _ in judged])
            failures += [failed for _, failed in judged]
        if not self.raises and log_metric is not None:
            log_metric(f"process_rewards/{self.name}/failed_steps_frac", sum(failures) / max(len(failures), 1))
        return rewards

    def _judge(
        self, prompt: Any, texts: tuple[str, ...], step: int, values: dict[str, Any], row: int
    ) -> tuple[float | None, bool]:
        """Reward of one step, and whether the function failed on it."""
        field, where = f"step verifier '{self.name}'", f"at step {step} of row {row}"
        if self.raises:
            try:
                reward = self.func(prompt, texts[:step], texts[step], **values)
            except Exception as error:
                failed = RewardError(
                    field,
                    f"{type(error).__name__}: {error} {where}",
                    "a number, or None for a step it cannot score",
                    'Fix the function (its traceback is above), or pass on_error="unscorable" to go on without it.',
                )
                raise failed.caught_as(error) from error
            return reward_number(reward, field, where), False
        try:
            return reward_number(self.func(prompt, texts[:step], texts[step], **values), field, where), False
        except Exception as error:
            if not self.has_logged:
                self.has_logged = True
                message = "Step verifier '%s' failed %s; such steps get %s. Further failures are counted."
                due = "None, which counts as 0" if self.lowest is None else f"{self.lowest:g}, its lowest reward"
                logger.error(message, self.name, where, due, exc_info=error)
            return self.lowest, True


def _named_parameters(func: Callable[..., Any]) -> frozenset[str] | None:
    """The columns that a function can take by name; `None` if it takes any."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters[3:] if p.kind is not inspect.Parameter.POSITIONAL_ONLY)
