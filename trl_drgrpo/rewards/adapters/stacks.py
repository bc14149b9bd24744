"""Adapters that make reward functions of other stacks into TRL's, and how each stack calls them.

TRL and open-r1 share one call, but a function is written for one of the two forms that completions come in: strings
with plain data, lists of messages with conversational data. One written for `completion[0]["content"]` fails on the
first, one written for strings on the second.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, single or batch, sync or async. verl
passes all four by keyword, the ground truth from the nested column `reward_model["ground_truth"]`, and adds
`num_turns` and `rollout_reward_scores` to `extra_info`. Result: a number, a tuple whose first entry counts, or a dict
whose `score` counts. Delta: a function may take fewer than four arguments, as verl's own scorers do.

OpenRLHF: `reward_func(queries, prompts, labels, **kwargs)`, where a query is prompt + response. Result: a dict with
`rewards` (`scores` only steer its filtering; `extra_logs` go to the log), or a tensor or list of rewards. OpenRLHF
0.11 calls such a function with lists of one sample, here with those of a batch. Its prompt is the
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

understand-r1-zero and oat: `grader(response, gt, fast=...) -> (info, reward)`. `boxed_reward_fn` goes with the
Qwen-Math template, `answer_tag_reward_fn` with the R1 template; both are in `oat.utils.math_grader`. They bound their
own work with SIGALRM, on a main thread only: give a `timeout`, which runs them in killable workers. Delta: the
official oracle scores a grading that takes too long 0, here it is unscorable.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import Choice, refuse_outside
from trl_drgrpo.rewards.adapters.foreign_calls import (
    NOT_COLUMNS,
    Call,
    Convention,
    Place,
    Sample,
    adapted,
    decoded,
    loaded,
    taking,
)
from trl_drgrpo.rewards.columns import Keywords, is_async, parameters, required, select
from trl_drgrpo.rewards.combine import Composed, composed
from trl_drgrpo.rewards.contract import OnError, check_flag, listed, reward_name
from trl_drgrpo.rewards.recipe_names import register_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_object, resolve_reward
from trl_drgrpo.rewards.texts import as_messages, completion_text, in_form, prompt_text


def from_trl(
    function: Callable | str, *, completions_as: Literal["messages", "text"] | None = None, name: str | None = None
) -> Callable:
    """
    Return a reward function of TRL's form that gets completions in the form for which it was written.

    Args:
        function (`Callable` or `str`):
            The reward function, or its name or path; sync or async.
        completions_as (`str`, *optional*):
            `"messages"`: text becomes a message of the assistant (a prompt: of the user); `"text"`: messages become
            text, of a completion the last one of the assistant. Defaults to passing them as they come.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.

    Returns:
        `Callable`: Same call, same required columns.

    Raises:
        [`InputError`]: For another form, or a function that cannot be found.

    Example:

    ```python
    >>> def open_r1_style(completions, **kwargs):
    ...     return [float(len(completion[0]["content"])) for completion in completions]
    >>> from_trl(open_r1_style, completions_as="messages")(completions=["four"])
    [4.0]

    ```
    """
    forms = Choice(("messages", "text", None), "Leave it out to pass them as they come.")
    refuse_outside("completions_as", completions_as, forms)
    if isinstance(function, str):
        function = resolve_reward(function, "function")
    reward_func = loaded(function, "function")
    reward: Any = composed(name or reward_name(reward_func), [reward_func], _converted, form=completions_as)
    # The function's own signature, for it is called with the same columns.
    reward.__doc__ = inspect.getdoc(reward_func)
    reward.__signature__ = inspect.signature(reward_func)
    reward.lowest_reward = getattr(reward_func, "lowest_reward", None)
    return reward


async def _converted(reward: Composed, kwargs: Keywords, form: str | None) -> Any:
    if form is not None:
        kwargs |= in_form(kwargs, form)
    return await reward.called(reward.reward_funcs[0], **kwargs)


# Names that verl's own scorers give the completion's text, other than solution_str.
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
    Return a verl `compute_score` as a reward function of TRL's form.

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
            batch functions: put `isolate` around the reward.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            Result of a failing call for its completion: `None` and a count, or with `"raise"` an error. For a failing
            batch the trainer's `on_reward_error` counts.

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
    score_func: Any = loaded(function, "function")
    is_batch = "solution_strs" in {parameter.name for parameter in parameters(score_func) or ()}
    constants = reward_kwargs or {}
    names = _BATCH if is_batch else _SINGLE
    offered = [*names, *constants]
    if not is_batch:
        offered += _TEXT_NAMES
    # A function of another form is refused here, before a run, and not on every completion of it.
    required_names = required(score_func)
    unknown = [name for name in required_names if name not in offered]
    if unknown:
        got = f"{reward_name(score_func)}, which needs {', '.join(unknown)}"
        remedy = "Give the other arguments as constants with reward_kwargs."
        raise InputError("function", got, f"a function of {', '.join(names)}", remedy)
    if is_batch and timeout is not None:
        remedy = "Leave it out, and put `isolate` around the reward."
        raise InputError("timeout", f"{timeout} for a batch function", "none", remedy)
    source, text, truth, extra = names
    usual = ("reward_model.ground_truth", "ground_truth")
    places = {truth: Place("the ground truth", "answer_column", answer_column, usual)}
    if source in required_names and data_source is None:  # a function that leaves it out does not need the column
        advice = "Add it, or give a constant with data_source=...."
        places[source] = Place("the data source", "data_source", "data_source", advice=advice)

    def row(sample: Sample) -> Keywords:
        columns = sample.columns
        # A copy: verl's functions may write into it, and rows of a group share the dict.
        extra_info = decoded(columns.get("extra_info")) or {}
        info = {"num_turns": None, "rollout_reward_scores": {}, **extra_info}
        row_source = columns.get("data_source") if data_source is None else data_source
        return {source: row_source, text: sample.text, extra: info}

    def call(function: Callable, values: Keywords) -> Call:
        # The text under its usual name, and under a scorer's own name for it where that is a parameter.
        return (), select(function, {**values, **constants}, dict.fromkeys(_TEXT_NAMES, values[text]))

    read_batch = None
    if is_batch:  # a lambda, since checkpoints record its name
        read_batch = lambda results, log: [_verl_score(result) for result in results]  # noqa: E731
    return adapted(
        [score_func],
        Convention(row, call, _verl_score, places),
        name or reward_name(score_func),
        read_batch=read_batch,
        timeout=timeout,
        on_error=on_error,
    )


def _verl_score(result: object) -> Any:
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "no keys"
            raise RewardError("a verl function", f"a dict with {keys}", "a dict with 'score'", "Return a score.")
        return result["score"]
    if isinstance(result, tuple | list) and result:  # verl takes the first of several values
        return result[0]
    return result


def from_openrlhf(
    function: Callable | str,
    *,
    answer_column: str | None = None,
    render_prompt: Callable[[list[dict[str, Any]]], str] | str | None = None,
    name: str | None = None,
) -> Callable:
    """
    Return an OpenRLHF `reward_func` as a reward function of TRL's form: one call per batch, with `extra_logs` logged
    as `rewards/<name>/<key>`.

    Args:
        function (`Callable` or `str`):
            The function, or its path.
        answer_column (`str`, *optional*):
            Column of the label, or a path into one. Defaults to `label`, else `answer`, else `solution`.
        render_prompt (`Callable` or `str`, *optional*):
            From messages to text, or its path, for example
            `lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)`.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's.

    Returns:
        `Callable`: `f(completions, prompts=, <columns>) -> list[float | None]`.

    Raises:
        [`InputError`]: For options that do not fit, or a function that takes other arguments.
    """
    reward_func: Any = taking(function, "function", "f(queries, prompts, labels, **kwargs)", 3)
    if is_async(reward_func):
        remedy = "Use from_trl, from_verl or from_verifiers for async functions."
        raise InputError("function", f"{reward_name(reward_func)}, which is async", "a sync function", remedy)
    render = prompt_text if render_prompt is None else loaded(render_prompt, "render_prompt")

    def row(sample: Sample) -> Keywords:
        prompt = sample.prompt if isinstance(sample.prompt, str) else render(sample.prompt)
        return {"queries": prompt + sample.text, "prompts": prompt}

    labels = Place("the label", "answer_column", answer_column, ("label", "answer", "solution"))
    # By position: queries, prompts, labels, the order of `row` and of the place behind it.
    convention = Convention(row, lambda _, values: (tuple(values.values()), {}), places={"labels": labels})
    return adapted([reward_func], convention, name or reward_name(reward_func), read_batch=_openrlhf_rewards)


def _openrlhf_rewards(result: object, log: Callable[[str, Sequence[Any]], None]) -> Any:
    """Return the rewards in a result: under `rewards`, else `scores`, or the result itself. Logs its `extra_logs`."""
    if not isinstance(result, Mapping):
        return result
    for key, values in (result.get("extra_logs") or {}).items():
        values = listed(values)  # tensors, as a rule
        log(key, values if isinstance(values, list | tuple) else [values])
    rewards = result.get("rewards")
    return result.get("scores") if rewards is None else rewards


_PASSED = ("messages", "response_token_ids", "trainer_state")


def from_swift(
    orm: Callable | type | str, *, args: Mapping[str, Any] | Any = None, name: str | None = None
) -> Callable:
    """
    Return an ms-swift reward as a reward function of TRL's form.

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
    reward_func: Any = loaded(orm, "orm", "an ORM class, an instance, or the path of one")
    name = name or reward_name(reward_func)
    if inspect.isclass(reward_func):
        reward_func = _instance(reward_func, args)
    elif args is not None:
        raise InputError("args", repr(args)[:100], "none for an instance or a function", "Name the class instead.")
    names = required(reward_func)[1:]  # the first is the completions, by whatever name
    columns = [column for column in names if column not in _PASSED]
    return composed(name, [reward_func], _as_swift, columns)


def _instance(orm: type, args: object) -> Any:
    # A class that names `args`, or takes any keyword, gets them; any other is made without.
    takes_args = any(p.name == "args" or p.kind is p.VAR_KEYWORD for p in parameters(orm) or ())
    if not takes_args and args is not None:
        raise InputError("args", repr(args)[:100], f"none: {orm.__name__} takes no args", "Leave them out.")
    namespace = SimpleNamespace(**args) if isinstance(args, Mapping) else args
    try:
        return orm(args=namespace) if takes_args else orm()
    except AttributeError as error:  # how the classes notice a missing argument
        got = f"{repr(args)[:100]}, with which {orm.__name__} fails: {error}"
        remedy = "Add the attribute that is missing."
        raise InputError("args", got, "the arguments that the class reads", remedy) from error


async def _as_swift(reward: Composed, kwargs: Keywords) -> Any:
    """Call the ORM with texts by position, and by name with the other arguments that it takes."""
    texts = list(map(completion_text, kwargs["completions"]))
    # Under ms-swift's names; `select` passes those that the class takes.
    offered = {key: values for key, values in kwargs.items() if key not in NOT_COLUMNS}
    offered["response_token_ids"] = offered.pop("completion_ids", None)
    offered["messages"] = []
    prompts = kwargs.get("prompts") or [[]] * len(texts)
    for prompt, text in zip(prompts, texts, strict=True):
        offered["messages"].append([*as_messages(prompt, "user"), *as_messages(text, "assistant")])
    offered["trainer_state"] = kwargs.get("trainer_state")
    [orm] = reward.reward_funcs
    return await reward.called(orm, texts, **select(orm, offered))


_OFFERED = ("prompt", "completion", "answer", "state", "info", "task", "parser")
# By these a rubric tells a function that scores a whole group of rollouts.
_GROUP = {"states", "prompts", "completions", "answers", "tasks", "infos"}


def from_verifiers(
    rubric: object,
    *,
    weights: Sequence[float] | None = None,
    parser: object = None,
    answer_column: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    on_error: OnError = "unscorable",
) -> Callable:
    """
    Return a verifiers rubric as a reward function of TRL's form.

    Args:
        rubric (`Rubric`, `RubricGroup`, `Callable`, `str`, or a list of the last two):
            A rubric, its functions, or paths of either. Functions may be `async`.
        weights (`Sequence[float]`, *optional*):
            One per function; 0 only logs it. Defaults to the rubric's, else 1.
        parser (`Any`, *optional*):
            Object that functions get as `parser`, or its path. Defaults to the rubric's.
        answer_column (`str`, *optional*):
            Column that is passed as `answer`. Defaults to `answer`; without it the empty string is passed.
        name (`str`, *optional*):
            Name in logs. Defaults to the function's for a single one, else `rubric`.
        timeout (`float`, *optional*):
            Seconds per function and completion. Defaults to no limit, in this process.
        on_error (`str`, *optional*, defaults to `"unscorable"`):
            Result of a failing function for its completion: `None` and a count, or with `"raise"` an error.

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
    if isinstance(parser, str):
        parser = resolve_object(parser, "parser")
    parts = _parts(rubric, parser)
    functions = [function for function, _ in parts]
    if weights is None:  # those of the rubric
        weights = [weight for _, weight in parts]
    if not functions or len(weights) != len(functions):
        expected = f"{len(functions)}, one per function" if functions else "at least one function"
        raise InputError("weights", f"{len(weights)} weights", expected, "Give one number per function.")
    required_names = {name for function in functions for name in required(function)}
    columns = sorted(required_names - {*_OFFERED})
    if answer_column:
        columns.append(answer_column)
    if not name:
        name = reward_name(functions[0]) if len(functions) == 1 else "rubric"
    return adapted(
        functions,
        Convention(functools.partial(_rollout, answer_column or "answer"), _verifiers_call),
        name,
        weights=weights,
        columns=columns,
        timeout=timeout,
        on_error=on_error,
    )


def _parts(rubric: object, parser: object) -> list[tuple[functools.partial, float]]:
    """Return the functions of a rubric, or of several, with their weights and bound to the objects of their rubric."""
    if isinstance(rubric, str):
        rubric = resolve_object(rubric, "rubric")
    if isinstance(rubric, list | tuple):
        return [part for entry in rubric for part in _parts(entry, parser)]
    # By attributes, as verifiers need not be installed: a `RubricGroup` has `rubrics`, a `Rubric` has `funcs`.
    inner_rubrics = getattr(rubric, "rubrics", None)
    functions = getattr(rubric, "funcs", None)
    weights = getattr(rubric, "weights", ())
    if inner_rubrics is None and functions is None:
        functions = [loaded(rubric, "rubric", "a Rubric, or functions")]
        weights = [1.0]
    objects = {"parser": getattr(rubric, "parser", None), **getattr(rubric, "class_objects", {})}
    if parser is not None:
        objects["parser"] = parser
    parts = []
    for function, weight in zip(functions or (), weights, strict=True):
        group_names = sorted(_GROUP & {parameter.name for parameter in parameters(function) or ()})
        if group_names:
            got = f"the function {reward_name(function)}, which takes {', '.join(group_names)}"
            remedy = "A batch may split groups: write it as a reward function in TRL's form."
            raise InputError("rubric", got, "functions that score one completion", remedy)
        # Bound now, since the functions of a group may come from rubrics with parsers of their own.
        parts.append((functools.partial(function, **select(function, objects)), weight))
    return parts + _parts(list(inner_rubrics or ()), parser)


def _rollout(answer_column: str, sample: Sample) -> Keywords:
    """Return the values of a row and its rollout that functions of a rubric may name."""
    row = sample.columns
    info = decoded(row.get("info"))  # a dataset may store it as JSON text
    fields = {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "answer": row.get(answer_column, ""),
        "info": {} if info is None else info,
        "task": row.get("task", "default"),
    }
    return {**row, **fields, "state": {**row, **fields, "trajectory": []}}


def _verifiers_call(function: functools.partial, row: Keywords) -> Call:
    arguments = select(function, row)
    for name in function.keywords:  # a row's own column `parser` must not take the place of the object that is bound
        arguments.pop(name, None)
    return (), arguments


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
    Return a grader of understand-r1-zero as a reward function of TRL's form.

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
            Result of a failing call for its completion: `None` and a count, or with `"raise"` an error.

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
    check_flag("fast", fast)
    grader_func: Any = taking(grader, "grader", "f(response, gt, fast=...) -> (info, reward)", 2, "fast")
    answer = Place("the correct answer", "answer_column", answer_column, ("answer", "solution", "gt_answer"))
    convention = Convention(
        lambda sample: {"response": sample.text},
        lambda function, values: (tuple(values.values()), select(function, {}, {"fast": fast})),
        _r1_zero_reward,
        {"gt": answer},
    )
    return adapted([grader_func], convention, name or reward_name(grader_func), timeout=timeout, on_error=on_error)


def _r1_zero_reward(result: object) -> Any:
    if not isinstance(result, tuple | list) or len(result) != 2:
        got = f"{type(result).__name__} {result!r}"[:80]
        raise RewardError("an understand-r1-zero grader", got, "a pair (info, reward)", "Use another adapter.")
    return result[1]


register_reward("trl", help="A function written for TRL.", factory=from_trl, role="adapter")
register_reward("verl", help="A `compute_score` of verl.", factory=from_verl, role="adapter")
register_reward("openrlhf", help="A `reward_func` of OpenRLHF.", factory=from_openrlhf, role="adapter")
register_reward("swift", help="An ORM of ms-swift.", factory=from_swift, role="adapter")
register_reward("verifiers", help="Functions of a rubric of verifiers.", factory=from_verifiers, role="adapter")
register_reward("r1_zero", help="A grader of understand-r1-zero.", factory=from_r1_zero, role="adapter")
