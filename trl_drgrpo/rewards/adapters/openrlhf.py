"""OpenRLHF: `reward_func(queries, prompts, labels, **kwargs)`, where a query is prompt + response.

Result: a dict with `rewards` (`scores` only steer its filtering; `extra_logs` go to the log), or a tensor or list of
rewards. OpenRLHF 0.11 calls such a function with lists of one sample; here one that takes a batch may be given one.
Conversational prompts: OpenRLHF's prompt is the text of the chat template, so give `render_prompt` where a function
reads the prompt; without it the messages are joined by empty lines.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import Call, Convention
from trl_drgrpo.rewards.adapters.samples import Place, Sample, read_samples
from trl_drgrpo.rewards.contract import OnError, check_flag, innermost, log_mean, reward_name, validate_rewards
from trl_drgrpo.rewards.text import prompt_text


def from_openrlhf(
    function: Callable | str,
    *,
    answer_column: str | None = None,
    render_prompt: Callable[[list[dict[str, Any]]], str] | str | None = None,
    batched: bool = True,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    An OpenRLHF `reward_func` as a reward function of TRL's form.

    Args:
        function (`Callable` or `str`):
            The function, or its path.
        answer_column (`str`, *optional*):
            Column of the label, or a path into one. Defaults to `label`, else `answer`, else `solution`.
        render_prompt (`Callable` or `str`, *optional*):
            From messages to text, or its path, for example
            `lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)`.
        batched (`bool`, *optional*, defaults to `True`):
            One call per batch, with `extra_logs` logged as `rewards/<name>/<key>`; `False`: one call per completion,
            with one-element lists, where a failure costs that completion only and `extra_logs` are not read.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.
        timeout (`float`, *optional*):
            Seconds per completion, for `batched=False`.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion, for `batched=False`.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: For options that do not fit, or a function that takes other arguments.
    """
    found = foreign_calls.loaded(function, "function")
    foreign_calls.check_options(timeout, on_error)
    check_flag("batched", batched)
    foreign_calls.check_takes(found, "function", "f(queries, prompts, labels, **kwargs)", 3)
    if inspect.iscoroutinefunction(innermost(found)):
        remedy = "Use from_trl, from_verl or from_verifiers for async functions."
        raise InputError("function", f"{reward_name(found)}, which is async", "a sync function", remedy)
    if batched and timeout is not None:
        remedy = "Set batched to false, or put `isolate(..., batched=True)` around the reward."
        raise InputError("timeout", f"{timeout} for a batch function", "none", remedy)
    render = None if render_prompt is None else foreign_calls.loaded(render_prompt, "render_prompt")
    convention = _OpenRLHF(answer_column, render)
    title = name or reward_name(found)
    if batched:
        return _Batch(found, convention, title)
    return foreign_calls.per_completion([found], convention, name=title, timeout=timeout, on_error=on_error)


class _OpenRLHF(Convention):
    """Arguments and result of a call with one sample."""

    def __init__(self, answer_column: str | None, render: Callable | None):
        self.label = Place("the label", "answer_column", answer_column, ("label", "answer", "solution"))
        self.render = render

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        self.label.column(columns, reward)

    def values(self, sample: Sample, reward: str) -> tuple[str, str, Any]:
        """Query, prompt and label of one sample."""
        as_text = prompt_text if self.render is None or isinstance(sample.prompt, str) else self.render
        prompt = as_text(sample.prompt)
        return prompt + sample.text, prompt, self.label.value(sample.columns, reward)

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        query, prompt, label = self.values(sample, reward)
        return ([query], [prompt], [label]), {}

    def read(self, result: Any) -> Any:
        rewards = rewards_in(result)
        if hasattr(rewards, "tolist"):
            rewards = rewards.tolist()
        return validate_rewards(rewards if isinstance(rewards, list | tuple) else [rewards], 1, "reward_func")[0]


class _Batch(foreign_calls.BatchCall[_OpenRLHF]):
    """A `reward_func` that is called as OpenRLHF calls it."""

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        samples = read_samples(completions, prompts, kwargs, self.__name__)
        rows = [self.convention.values(sample, self.__name__) for sample in samples]
        result = self.function(*([row[part] for row in rows] for part in range(3)))
        if log_metric is not None and isinstance(result, Mapping):
            for key, values in (result.get("extra_logs") or {}).items():
                listed = values.tolist() if hasattr(values, "tolist") else values
                listed = listed if isinstance(listed, list | tuple) else [listed]
                log_mean(log_metric, f"rewards/{self.__name__}/{key}", listed)
        return rewards_in(result)


def rewards_in(result: Any) -> Any:
    """The rewards in what a `reward_func` returned: under `rewards`, else `scores`, or the result itself."""
    if not isinstance(result, Mapping):
        return result
    rewards = result.get("rewards")
    return result.get("scores") if rewards is None else rewards
