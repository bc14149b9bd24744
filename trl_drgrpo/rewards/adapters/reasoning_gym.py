"""reasoning-gym: `score_answer(answer, entry)` for datasets that other programs wrote.

Rows that `make_splits` of `rewards/functions/reasoning_gym.py` wrote are scored by the reward `reasoning_gym`, which
knows the task of every row. Here the task is named once, and the entry is put together from the columns `question`,
`answer` and `metadata` that reasoning-gym's own exports have. The final answer is extracted in the same way.
"""

from collections.abc import Callable
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import Call, Convention
from trl_drgrpo.rewards.adapters.samples import Sample, decoded
from trl_drgrpo.rewards.contract import OnError
from trl_drgrpo.rewards.functions.reasoning_gym import factory_of, reasoning_gym_reward, score_text

# The two are one name in recipes: `reasoning_gym`, and `reasoning_gym: <task>`.
__all__ = ["from_reasoning_gym", "reasoning_gym_reward"]


def from_reasoning_gym(
    task: Any,
    *,
    entry_column: str | None = None,
    name: str = "reasoning_gym",
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    The scorer of a reasoning-gym task as a reward function of TRL's form.

    Args:
        task (`str`, dataset or `Callable`):
            Name of a task (`chain_sum`), a reasoning-gym dataset, or a `score_answer(answer, entry)`.
        entry_column (`str`, *optional*):
            Column that holds the whole entry, a mapping or its JSON. Defaults to putting it together from the columns
            `question`, `answer` and `metadata`.
        name (`str`, *optional*, defaults to `"reasoning_gym"`):
            Name in logs.
        timeout (`float`, *optional*):
            Seconds per completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion. An answer that the scorer cannot read is no failure but 0.

    Returns:
        `Callable`: `f(completions, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: For an unknown task.
    """
    score_answer = _score_answer(task)
    needed = (entry_column,) if entry_column else ("answer", "metadata")
    options: dict[str, Any] = {"name": name, "columns": needed, "timeout": timeout, "on_error": on_error}
    return foreign_calls.per_completion([_Scorer(score_answer)], _ReasoningGym(entry_column), **options)


def _score_answer(task: Any) -> Callable[..., Any]:
    if isinstance(task, str):
        return factory_of(task, "task", repr(task))[1].get_score_answer_fn(task)
    if hasattr(task, "score_answer"):
        return task.score_answer
    if not callable(task):
        remedy = "Name one of `reasoning_gym.factory.DATASETS`."
        raise InputError("task", repr(task)[:100], "a task's name, a dataset, or a score_answer function", remedy)
    return task


class _Scorer:
    """`score_answer` with the answer taken from the completion's text; what it cannot read scores 0."""

    lowest_reward = 0.0

    def __init__(self, score_answer: Callable[..., Any]):
        self.score_answer = score_answer

    def __call__(self, text: str, entry: dict[str, Any]) -> float:
        return score_text(self.score_answer, text, entry) or 0.0


class _ReasoningGym(Convention):
    """Text and entry of one completion."""

    def __init__(self, entry_column: str | None):
        self.entry_column = entry_column

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        row = sample.columns
        if self.entry_column:
            return (sample.text, decoded(row[self.entry_column])), {}
        entry = {"question": row.get("question"), "answer": row["answer"], "metadata": decoded(row["metadata"])}
        return (sample.text, entry), {}
