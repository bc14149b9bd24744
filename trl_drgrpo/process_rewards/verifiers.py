r"""Step rewards without a process reward model: a rule as a function, or a chat model that gives verdicts.

**Rules** (`step_verifier`). A rule sees the prompt, the steps written so far, the step itself and the dataset row; it
cannot be exploited beyond what it leaves unchecked, costs microseconds, and needs no model. Whatever it does wrong (an
exception, a string, an infinite number) is one error that names row and step.

**Verdicts** (`StepJudge`). ThinkPRM, a generative process reward model, or any chat model, judges step by step:

    Step 1: <critique> The step is \boxed{correct}
    Step 2: <critique> The step is \boxed{incorrect}

Reward 1 for a correct step and 0 for an incorrect one. It is asked about every step, with the solution up to and
including that step, so that no score depends on later text; `reads="solution"` asks once per completion instead. Such
a judge stops at the first mistake: the steps behind it are not judged (`None`), as in the data that ThinkPRM was
trained on. A reply that leaves an earlier step without a verdict is a failure, worth 0 and counted; where the server
is down or busy it is `None`. Prompt and verdicts: arXiv 2504.16828 and its code, `launch/ThinkPRM-1.5B` behind vLLM
for example. Differs in two points: a chat API does not let us begin the model's reply ("Let's verify step by step:"),
and the last verdict on a step counts. No such model was run here. A policy can talk to a judge, see [`JudgeReward`]:
its text is kept from posing as a step of another number, and from nothing else.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError, told
from trl_drgrpo.process_rewards.prm_inputs import Cleaner, Prompt, prompt_without_system, texts_of, unread
from trl_drgrpo.process_rewards.step_scorer import LogMetric, RaggedRewards, dataset_columns
from trl_drgrpo.rewards.columns import is_required, parameters, select, signature_of
from trl_drgrpo.rewards.contract import reward_name, reward_number
from trl_drgrpo.rewards.functions.judge.judge import Judge, Messages
from trl_drgrpo.rewards.recipe_names import register_reward


def step_verifier(func: Callable[..., Any], name: str | None = None) -> Callable:
    """Turn a function that judges one step into a step reward function.

    Args:
        func (`Callable`):
            Called as `func(prompt, previous_steps, step, **columns) -> float | None`: the row's prompt (text or
            messages), the texts of the steps before (`tuple[str, ...]`), the step's text (separator and special tokens
            included), and this row's value of each dataset column. Columns that the function neither names nor takes
            by `**kwargs` are not passed. `None` or NaN = this step cannot be scored.
        name (`str`, *optional*):
            Name in logs and metrics. Defaults to the function's own.

    Returns:
        `Callable`: A step reward function, with `is_causal = True`: the score of a step reads no further than its end.

        An exception of `func`, or a result that is no number, is a [`RewardError`] naming row and step; what that
        costs the run is said by `on_reward_error`.

    Raises:
        `InputError`: An asynchronous `func`.

    Example:

    ```python
    >>> def short(prompt, previous_steps, step, limit):
    ...     return float(len(step) <= limit)
    >>> reward = step_verifier(short)
    >>> reward(prompts=["?", "?"], completions=["ab", ""], steps=[("a", "bcd"), ()], limit=[2, 2])
    [[1.0, 0.0], []]

    ```
    """
    if inspect.iscoroutinefunction(func):
        remedy = "It is called step by step: write a step reward function instead, which may be asynchronous."
        raise InputError("step_verifier", "an asynchronous function", "a plain function", remedy)
    func_parameters = parameters(func) or ()
    # Prompt, steps before and step, under the function's names for them: a column of such a name is not passed twice.
    leading_names = [parameter.name for parameter in func_parameters[:3]]
    name = name or reward_name(func)
    field = f"step verifier '{name}'"

    def rewards_of(
        prompts: Sequence[Any],
        completions: Sequence[Any] | None = None,
        steps: Sequence[Sequence[str]] = (),
        **kwargs: Any,
    ) -> RaggedRewards:
        columns = select(func, dataset_columns(kwargs, len(prompts)))
        for leading in leading_names:
            columns.pop(leading, None)
        rewards = []
        for row, (prompt, texts) in enumerate(zip(prompts, steps, strict=True)):
            rewards.append([])
            row_columns = {column: values[row] for column, values in columns.items()}
            for k, text in enumerate(texts):
                where = f"at step {k} of row {row}"
                previous_steps = tuple(texts[:k])
                try:
                    reward = func(prompt, previous_steps, text, **row_columns)
                except Exception as error:
                    got = f"{told(error)} {where}"
                    expected = "a number, or None for a step it cannot score"
                    remedy = "Fix the function; its traceback is with this message."
                    raise RewardError(field, got, expected, remedy) from error
                rewards[row].append(reward_number(reward, field, where))
        return rewards

    verify: Any = rewards_of
    verify.__name__ = name
    verify.__doc__ = inspect.getdoc(func)
    verify.is_causal = True  # it sees nothing behind the step
    # The trainer reads from the signature which columns are required, and checks them before training.
    required_columns = [parameter.name for parameter in func_parameters[3:] if is_required(parameter)]
    verify.__signature__ = signature_of(["steps", *required_columns])
    return verify


THINKPRM_TEMPLATE = """\
You are given a math problem and a proposed step-by-step solution:

[Math Problem]

{problem}

[Solution]

{solution}

Review and critique each step in the proposed solution to determine whether each step is correct. If the solution is \
incomplete, only verify the provided steps."""

# `Step 2:`, also as `**Step 2**` or `### Step 2`.
_HEADING = re.compile(r"(?im)^\W*step\s+(\d+)\b")
# `\boxed{correct}`, also as `\boxed{\text{correct}}` or `\boxed{\textbf{Incorrect}}`.
_VERDICT = re.compile(r"\\boxed\{\s*(?:\\text(?:bf)?\{\s*)?(correct|incorrect)\b", re.IGNORECASE)


class StepJudge(Judge):
    r"""Step rewards from a chat model that gives every step a verdict.

    Logs `judge/<name>/...` and `rewards/<name>/failed_frac` as [`JudgeReward`] does.

    Args:
        model (`str`): Name of the model at the server.
        base_url (`str`): Address up to but without `/chat/completions`.
        api_key_env (`str`, *optional*): Name of the environment variable with the API key; `None` sends none.
        template (`str`, *optional*): The user message, with `{problem}` and `{solution}` (`Step 1: ...`, one step per
            line); ThinkPRM's by default. For a model that was not trained on it, say that every step is to end with
            `The step is \boxed{correct}` or `\boxed{incorrect}`.
        reads (`str`, *optional*, defaults to `"prefix"`): `"prefix"`: one question per step, about the text up to its
            end. `"solution"`: one per completion, about all of it. That costs fewer requests, but a step's score may
            depend on later text: refused as `process_role="baseline"`, and biased credit where it is paid.
        max_tokens (`int`, *optional*, defaults to 4096): Length of a reply, ThinkPRM's own.
        name (`str`, *optional*, defaults to `"step_judge"`): Name in logs.
        **judge: `batch_timeout`, `extra_body`, `log_replies`, `on_error`, `concurrency`, `timeout` and so on,
            as in [`JudgeReward`].

    Attributes:
        is_causal (`bool`): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires: `True` with `reads="prefix"`.

    Raises:
        [`InputError`]: A template without `{problem}` or `{solution}`, an unknown `reads`, an unfit setting.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores
    causal_remedy = "Give `{0}` reads='prefix', which asks about every step."

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str | None = None,
        *,
        template: str = THINKPRM_TEMPLATE,
        reads: Literal["prefix", "solution"] = "prefix",
        name: str = "step_judge",
        max_tokens: int = 4096,
        **judge: Any,
    ):
        super().__init__(model, base_url, api_key_env, name=name, max_tokens=max_tokens, **judge)
        self.source = model
        for placeholder in ("{problem}", "{solution}"):
            if placeholder not in template:
                got = f"a template without {placeholder}"
                raise InputError("template", got, "one with it", f"Add {placeholder} to it.")
        if reads not in ("prefix", "solution"):
            raise InputError("reads", repr(reads), "'prefix' or 'solution'", "'prefix' asks about every step.")
        self.template = template
        self.is_causal = reads == "prefix"
        self._cleaner = Cleaner()

    async def __call__(
        self,
        prompts: Sequence[Any],
        steps: Sequence[Sequence[str]],
        log_metric: LogMetric | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: Any,
    ) -> RaggedRewards:
        """Return rewards of the steps of `B` completions.

        A step before the first text gets 0. Later steps without text, and steps that were not judged, get `None`.
        """
        rewards = []
        questions = []
        readers = []
        lowest = []  # what a failure is paid
        scored = []  # of each question: its row, and the places of the rewards that its last verdicts are
        for row, row_steps in enumerate(steps):
            texts, indices = texts_of(row_steps, self._cleaner)
            rewards.append(unread(len(row_steps), indices))
            # One question about all steps; or one about the text up to each step, which scores that step alone.
            counts = range(1, len(texts) + 1)
            if not self.is_causal:
                counts = counts[-1:]
            for count in counts:
                places = indices[:count]
                if self.is_causal:
                    places = places[-1:]
                scored.append((row, places))
                questions.append(self._messages(prompts[row], texts[:count]))
                readers.append(partial(read_verdicts, steps=count))
                lowest.append([0.0] * count)

        def log_rows(column: str, replies: list[str]) -> None:
            # The table of completions has one cell per row, which holds the replies to all its questions.
            replies_of_rows = [[] for _ in steps]
            for (row, _), reply in zip(scored, replies, strict=True):
                replies_of_rows[row].append(reply)
            if log_extra is not None:
                log_extra(column, list(map("\n\n".join, replies_of_rows)))

        replies = await self._ask(questions, readers, lowest, log_metric, log_rows)
        for (row, places), verdicts in zip(scored, replies, strict=True):
            if verdicts is not None:
                for place, verdict in zip(places, verdicts[-len(places) :], strict=True):
                    rewards[row][place] = verdict
        return rewards

    def _messages(self, prompt: Prompt, steps: Sequence[str]) -> Messages:
        lines = []
        for k, step in enumerate(steps, start=1):
            lines.append(f"Step {k}: {_without_headings(step)}")
        problem = self._cleaner.prompt(prompt_without_system(prompt))
        values = {"problem": problem.strip(), "solution": "\n".join(lines)}
        # In one pass, so that braces in the problem or in a step stay text.
        content = re.sub(r"\{(problem|solution)\}", lambda match: values[match[1]], self.template)
        return [{"role": "user", "content": content}]


def read_verdicts(reply: str, steps: int) -> list[float | None]:
    r"""Read the verdicts in a reply.

    Args:
        reply (`str`): `Step 1: ... \boxed{correct}` and so on. A verdict is on the step whose heading came last, the
            last one on a step counts; without any heading they are taken in order.
        steps (`int`): Number of steps.

    Returns:
        `list[float | None]`: 1.0 or 0.0 per step; `None` behind the first incorrect one, where the judge stopped.

    Raises:
        `ValueError`: Names the problem: no verdict, a step left out, more steps than there are.

    Example:

    ```python
    >>> read_verdicts("Step 1: Fine. \\boxed{correct}\nStep 2: 2+2=5? \\boxed{incorrect}", steps=1)
    Traceback (most recent call last):
    ...
    ValueError: 2 verdicts for 1 step
    >>> read_verdicts("Step 1: Fine. The step is \\boxed{correct}\nStep 2: No. \\boxed{incorrect}", steps=3)
    [1.0, 0.0, None]

    ```
    """
    headings = list(_HEADING.finditer(reply))
    # Headings and verdicts in the order of the text.
    marks = sorted([*headings, *_VERDICT.finditer(reply)], key=re.Match.start)
    verdict_of_step = {}
    current = 0
    for match in marks:
        if match.re is _HEADING:
            current = int(match[1])
            continue
        if not headings:
            current += 1
        verdict_of_step[current] = float(match[1].lower() == "correct")
    verdict_of_step.pop(0, None)  # a verdict before the first heading is about no step
    if not verdict_of_step:
        raise ValueError(f"no verdict in the reply {reply[:80]!r}")
    if max(verdict_of_step) > steps:
        raise ValueError(f"{max(verdict_of_step)} verdicts for {steps} step{'s' * (steps > 1)}")
    verdicts = [verdict_of_step.get(k) for k in range(1, steps + 1)]
    judged = steps
    if 0.0 in verdicts:
        judged = verdicts.index(0.0) + 1
    # Behind the first mistake a judge may stop; before it, it must not leave out a step.
    if None in verdicts[:judged]:
        raise ValueError(f"no verdict on step {verdicts.index(None) + 1} of {steps}")
    return verdicts


def _without_headings(step: str) -> str:
    """Remove the step's own number, and disguise lines that look like another step's heading."""
    unnumbered = re.sub(r"(?i)^\s*step\s+\d+\s*[:.)]\s*", "", step)
    return re.sub(r"(?im)^(\W*)step(\s+\d+)", r"\1(step)\2", unnumbered).strip()


register_reward("step_judge", help="The verdict of a chat model on each step.", factory=StepJudge, role="step")
