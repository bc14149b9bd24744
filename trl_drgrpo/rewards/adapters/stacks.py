"""The stacks with a calling convention of their own: verl, OpenRLHF, ms-swift, verifiers.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, single or batch, sync or async. verl
passes all four by keyword, the ground truth from the nested column `reward_model["ground_truth"]`, and adds
`num_turns` and `rollout_reward_scores` to `extra_info`. Result: a number, a tuple whose first entry counts, or a dict
whose `score` counts. Delta: a function may take fewer than four arguments, as verl's own scorers do.

OpenRLHF: `reward_func(queries, prompts, labels, **kwargs)`, where a query is prompt + response. Result: a dict with
`rewards` (`scores` only steer its filtering; `extra_logs` go to the log), or a tensor or list of rewards. OpenRLHF
0.11 calls such a function with lists of one sample; here one that takes a batch may be given one. Its prompt is the
text of the chat template, so give `render_prompt` where a function reads it; without it messages are joined by empty
lines.

ms-swift: classes `ORM` and `AsyncORM`, called as `orm(completions, <columns>, **kwargs) -> list[float]`. Completions
are texts, passed by position (their parameter has more than one name there). Next to the dataset's columns ms-swift
passes `messages` (prompt and completion), `response_token_ids` and `trainer_state`. A class gets the training
arguments as `args`; here a mapping of the few it reads.

verifiers: a `Rubric(funcs, weights, parser)` whose functions name what they take of `prompt`, `completion`, `answer`,
`state`, `info`, `task`, `parser`, the rubric's own objects and the columns of the row, and return a number. The reward
is the weighted sum; the mean of each function is logged, as there, under `rewards/<name>/<function>`. Deltas: a
function that raises makes its completion unscorable (there it scores 0), and `state` holds the row but no trajectory.
For verifiers up to 0.1; its 0.4 has no rubrics any more.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards import signatures
from trl_drgrpo.rewards.adapters import foreign_calls
from trl_drgrpo.rewards.adapters.foreign_calls import (
    NOT_COLUMNS,
    Call,
    Convention,
    Place,
    Sample,
    as_messages,
    decoded,
    read_samples,
)
from trl_drgrpo.rewards.contract import OnError, check_flag, innermost, log_mean, reward_name, validate_rewards
from trl_drgrpo.rewards.recipe_rewards import resolve_object
from trl_drgrpo.rewards.sample import completion_text, prompt_text

# What verl's own scorers call the completion's text, where it is not solution_str.
_TEXT_NAMES = ("model_output", "predict_str")
_SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def from_verl(
    function: Callable | str,
    *,
    data_source: str | None = None,
    answer_column: str | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A verl `compute_score` as a reward function of TRL's form.

    Args:
        function (`Callable` or `str`):
            The function, or its path. With parameters in the plural (`solution_strs`) it is called once per batch,
            otherwise once per completion; it may be `async`.
        data_source (`str`, *optional*):
            Constant to pass as `data_source`. Defaults to the column of that name.
        answer_column (`str`, *optional*):
            Column of the ground truth, or a path into one. Defaults to `reward_model.ground_truth`, else
            `ground_truth`.
        reward_kwargs (`Mapping[str, Any]`, *optional*):
            Further constant arguments, as in verl's `custom_reward_function.reward_kwargs`.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.
        timeout (`float`, *optional*):
            Seconds per completion, after which its worker is killed. Defaults to no limit, in this process. Not for
            batch functions: put `isolate` around those.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing call makes of its completion: `None` and a count, or with `"raise"` an error. A failing
            batch is the trainer's `on_reward_error`.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`; `async` if the function is.

    Raises:
        [`InputError`]: For options that do not fit, or a function that needs other arguments.

    Example:

    ```python
    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "acc": True}
    >>> reward = from_verl(compute_score, data_source="sums")
    >>> reward(completions=["2", "3"], reward_model=[{"ground_truth": "2"}] * 2)
    [1.0, 0.0]

    ```
    """
    found = foreign_calls.loaded(function, "function")
    foreign_calls.check_options(timeout, on_error)
    is_batch = "solution_strs" in {parameter.name for parameter in signatures.parameters(found) or ()}
    convention = _Verl(found, is_batch, answer_column, data_source, reward_kwargs or {})
    title = name or reward_name(found)
    if not is_batch:
        return foreign_calls.per_completion([found], convention, name=title, timeout=timeout, on_error=on_error)
    if timeout is not None:
        remedy = "Leave timeout out and put `isolate(..., batched=True)` around the reward."
        raise InputError("timeout", f"{timeout} for a batch function", "none", remedy)
    return foreign_calls.batched(found, convention, title)


class _Verl(Convention):
    """Arguments and result of one call, in the singular or the plural."""

    def __init__(
        self,
        function: Callable,
        is_batch: bool,
        answer_column: str | None,
        data_source: str | None,
        constants: Mapping[str, Any],
    ):
        self.names = _BATCH if is_batch else _SINGLE
        offered = (*self.names, *(() if is_batch else _TEXT_NAMES), *constants)
        if unknown := [name for name in signatures.required(function) if name not in offered]:
            raise InputError(
                "function",
                f"{reward_name(function)}, which needs {', '.join(unknown)}",
                f"a function of {', '.join(self.names)}",
                "Give the other arguments as constants with reward_kwargs.",
            )
        usual = ("reward_model.ground_truth", "ground_truth")
        self.answer = Place("the ground truth", "answer_column", answer_column, usual)
        self.data_source, self.constants = data_source, dict(constants)
        self.needs_source = self.names[0] in signatures.required(function)

    def check_columns(self, columns: Sequence[str], reward: str) -> None:
        self.answer.column(columns, reward)
        if self.needs_source and self.data_source is None and "data_source" not in columns:
            raise InputError(
                f"reward {reward}",
                f"a dataset with the columns {', '.join(columns) or '(none)'}",
                "a column 'data_source', which the function requires",
                "Add it, or give a constant with data_source=....",
            )

    def values(self, sample: Sample, reward: str) -> tuple[Any, str, Any, dict[str, Any]]:
        """Arguments of verl for one sample, in the order of its signature."""
        row = sample.columns
        source = row.get("data_source") if self.data_source is None else self.data_source
        # A copy: verl's functions may write into it, and rows of a group share the dict.
        extra = {"num_turns": None, "rollout_reward_scores": {}, **(decoded(row.get("extra_info")) or {})}
        return source, sample.text, self.answer.value(row, reward), extra

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        self.check_columns(list(sample.columns), reward)
        values = self.values(sample, reward)
        by_request: dict[str, Any] = dict.fromkeys(_TEXT_NAMES, values[1])
        offered = {**dict(zip(self.names, values, strict=True)), **self.constants}
        return (), signatures.select(function, offered, by_request)

    def batch_arguments(
        self, function: Callable, completions: Sequence[Any], kwargs: dict[str, Any], reward: str
    ) -> Call:
        samples = read_samples(completions, kwargs, reward)
        for sample in samples[:1]:
            self.check_columns(list(sample.columns), reward)
        rows = [self.values(sample, reward) for sample in samples]
        columns = [[row[part] for row in rows] for part in range(len(_BATCH))]
        return (), signatures.select(function, {**dict(zip(_BATCH, columns, strict=True)), **self.constants})

    def read_batch(self, result: Any, reward: str, log_metric: Callable[[str, float], None] | None) -> list[Any]:
        return [self.read(each) for each in result]

    def read(self, result: Any) -> Any:
        if isinstance(result, Mapping):
            if "score" not in result:
                keys = ", ".join(map(str, result)) or "no keys"
                raise RewardError("a verl function", f"a dict with {keys}", "a dict with 'score'", "Return a score.")
            return result["score"]
        return result[0] if isinstance(result, tuple | list) and result else result


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
        return foreign_calls.batched(found, convention, title)
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

    def batch_arguments(
        self, function: Callable, completions: Sequence[Any], kwargs: dict[str, Any], reward: str
    ) -> Call:
        rows = [self.values(sample, reward) for sample in read_samples(completions, kwargs, reward)]
        return tuple([row[part] for row in rows] for part in range(3)), {}

    def read(self, result: Any) -> Any:
        rewards = rewards_in(result)
        if hasattr(rewards, "tolist"):
            rewards = rewards.tolist()
        return validate_rewards(rewards if isinstance(rewards, list | tuple) else [rewards], 1, "reward_func")[0]

    def read_batch(self, result: Any, reward: str, log_metric: Callable[[str, float], None] | None) -> Any:
        if isinstance(result, Mapping):
            for key, values in (result.get("extra_logs") or {}).items():
                listed = values.tolist() if hasattr(values, "tolist") else values
                log_mean(
                    log_metric, f"rewards/{reward}/{key}", listed if isinstance(listed, list | tuple) else [listed]
                )
        return rewards_in(result)


def rewards_in(result: Any) -> Any:
    """The rewards in what a `reward_func` returned: under `rewards`, else `scores`, or the result itself."""
    if not isinstance(result, Mapping):
        return result
    rewards = result.get("rewards")
    return result.get("scores") if rewards is None else rewards


_PASSED = ("messages", "response_token_ids", "trainer_state")


def from_swift(
    orm: Callable | type | str, *, args: Mapping[str, Any] | Any = None, name: str | None = None
) -> Callable:
    """
    An ms-swift reward as a reward function of TRL's form.

    Args:
        orm (`type`, `Callable` or `str`):
            A class derived from `ORM` or `AsyncORM`, an instance of one, a function of that form, or the path of any.
        args (`Mapping[str, Any]`, *optional*):
            The training arguments that the class reads, for example `{"cosine_max_len": 1024, ...}`; any object with
            such attributes will do.
        name (`str`, *optional*):
            Name in logs. Defaults to the class's or function's.

    Returns:
        `Callable`: `f(completions, completion_ids=, prompts=, <columns>) -> list[float | None]`; `async` for an
        `AsyncORM`.

    Raises:
        [`InputError`]: If `orm` cannot be called, or cannot be made from `args`.
    """
    found: Any = foreign_calls.loaded(orm, "orm", "an ORM class, an instance, or the path of one")
    title = name or reward_name(found)
    if inspect.isclass(found):
        found = _instance(found, args)
    elif args is not None:
        raise InputError("args", repr(args)[:100], "none for an instance or a function", "Name the class instead.")
    _, *others = signatures.required(found) or ["completions"]  # the first is the completions, by whatever name
    return foreign_calls.batched(found, _Swift(), title, [column for column in others if column not in _PASSED])


def _instance(orm: type, args: Any) -> Any:
    given = SimpleNamespace(**args) if isinstance(args, Mapping) else args
    known = signatures.parameters(orm) or ()
    takes_args = any(p.name == "args" or p.kind is p.VAR_KEYWORD for p in known)
    if not takes_args and args is not None:
        raise InputError("args", repr(args)[:100], f"none: {orm.__name__} takes no args", "Leave them out.")
    try:
        return orm(args=given) if takes_args else orm()
    except AttributeError as error:  # how the classes notice a missing argument
        got = f"{repr(args)[:100]}, with which {orm.__name__} fails: {error}"
        remedy = "Add the attribute that is missing."
        raise InputError("args", got, "the arguments that the class reads", remedy) from error


class _Swift(Convention):
    """Texts by position, and by name what the ORM asks for."""

    def batch_arguments(
        self, function: Callable, completions: Sequence[Any], kwargs: dict[str, Any], reward: str
    ) -> Call:
        texts = [completion_text(completion) for completion in completions]
        columns = {key: values for key, values in kwargs.items() if key not in (*NOT_COLUMNS, "prompts")}
        columns["response_token_ids"] = columns.pop("completion_ids", None)
        prompts = kwargs.get("prompts") or [[]] * len(texts)
        messages = [
            [*as_messages(prompt, "user"), {"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        given = {**columns, "messages": messages, "trainer_state": kwargs.get("trainer_state")}
        return (texts,), signatures.select(function, given)


_OFFERED = ("prompt", "completion", "answer", "state", "info", "task", "parser")
# By these a rubric tells a function that scores a whole group of rollouts.
_GROUP = {"states", "prompts", "completions", "answers", "tasks", "infos"}


def from_verifiers(
    rubric: Any,
    *,
    weights: Sequence[float] | None = None,
    parser: Any = None,
    answer_column: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    A verifiers rubric as a reward function of TRL's form.

    Args:
        rubric (`Rubric`, `RubricGroup`, `Callable`, `str`, or a list of the last two):
            A rubric, its functions, or paths of either. Functions may be `async`.
        weights (`Sequence[float]`, *optional*):
            One per function; 0 only logs it. Defaults to the rubric's, else 1.
        parser (`Any`, *optional*):
            What functions get as `parser`, or its path. Defaults to the rubric's.
        answer_column (`str`, *optional*):
            Column that is passed as `answer`. Defaults to `answer`; the empty string is passed where it is missing.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's where it is one, else `rubric`.
        timeout (`float`, *optional*):
            Seconds per function and completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            What a failing function makes of its completion: `None` and a count, or with `"raise"` an error.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`; `async` if a function is.

    Raises:
        [`InputError`]: For no function, weights of another number, or a function that scores a
            group of completions at once.

    Example:

    ```python
    >>> def exact(completion, answer):
    ...     return float(completion[-1]["content"] == answer)
    >>> def short(completion):
    ...     return 1 - len(completion[-1]["content"]) / 10
    >>> reward = from_verifiers([exact, short], weights=[1.0, 0.5])
    >>> reward(completions=[[{"role": "assistant", "content": "42"}]], answer=["42"])
    [1.4]

    ```
    """
    parts = _parts(rubric, parser)
    # Partials, so that one function in two rubrics is two, each with its own rubric's objects.
    functions = [functools.partial(function) for function, _, _ in parts]
    for function in functions:
        _refuse_group(function)
    chosen = [weight for _, weight, _ in parts] if weights is None else list(weights)
    if not functions or len(chosen) != len(functions):
        expected = f"{len(functions)}, one per function" if functions else "at least one function"
        raise InputError("weights", f"{len(chosen)} weights", expected, "Give one number per function.")
    objects = [dict(found) for _, _, found in parts]
    known = {key for found in objects for key in found}
    columns = {column for function in functions for column in signatures.required(function)} - {*_OFFERED, *known}
    return foreign_calls.per_completion(
        functions,
        _Verifiers(functions, objects, answer_column),
        name=name or (reward_name(functions[0]) if len(functions) == 1 else "rubric"),
        weights=chosen,
        columns=[*sorted(columns), *filter(None, [answer_column])],
        timeout=timeout,
        on_error=on_error,
    )


def _parts(rubric: Any, parser: Any) -> list[tuple[Callable, float, Mapping[str, Any]]]:
    """Functions with their weights and with the objects that their rubric hands them, groups of rubrics flattened."""
    if isinstance(rubric, str):
        rubric = resolve_object(rubric, "rubric")
    if isinstance(rubric, list | tuple):
        return [part for entry in rubric for part in _parts(entry, parser)]
    given = (
        {} if parser is None else {"parser": resolve_object(parser, "parser") if isinstance(parser, str) else parser}
    )
    inner = getattr(rubric, "rubrics", None)
    functions = getattr(rubric, "funcs", None)
    if inner is None and functions is None:
        return [(foreign_calls.loaded(rubric, "rubric", "a Rubric, or functions"), 1.0, {"parser": None, **given})]
    own = list(zip(functions or (), getattr(rubric, "weights", ()), strict=True))
    objects = {"parser": getattr(rubric, "parser", None), **getattr(rubric, "class_objects", {}), **given}
    return [(function, weight, objects) for function, weight in own] + _parts(list(inner or ()), parser)


def _refuse_group(function: Callable) -> None:
    if named := sorted(_GROUP & {parameter.name for parameter in signatures.parameters(function) or ()}):
        raise InputError(
            "rubric",
            f"the function {reward_name(function)}, which takes {', '.join(named)}",
            "functions that score one completion",
            "A batch may split groups: write it as a reward function in TRL's form.",
        )


class _Verifiers(Convention):
    """Arguments for a function of a rubric."""

    def __init__(self, functions: list[Callable], objects: list[dict[str, Any]], answer_column: str | None):
        # By identity: functions compare equal or not for reasons of their own.
        self.functions, self.objects, self.answer_column = functions, objects, answer_column or "answer"

    def arguments(self, function: Callable, sample: Sample, reward: str) -> Call:
        row = sample.columns
        info = decoded(row.get("info"))
        fields = {
            "prompt": sample.prompt,
            "completion": sample.completion,
            "answer": row.get(self.answer_column, ""),
            "info": {} if info is None else info,
            "task": row.get("task", "default"),
        }
        state = {**row, **fields, "trajectory": []}
        position = next(i for i, known in enumerate(self.functions) if known is function)
        return (), signatures.select(function, {**row, **fields, "state": state, **self.objects[position]})
