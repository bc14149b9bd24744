"""Calls step reward functions on a scored batch and keeps what the advantages need. Knows neither TRL nor the credit.

completions -> steps (`steps`) -> one list of rewards per completion and function -> weighted sum per step.

The trainer passes its own keywords and the dataset's columns side by side; whoever calls a user's function row by row
(a step verifier) or on other completions than the trainer's (rollouts) takes the columns from here.
"""

import asyncio
import inspect
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.step_fields import StepFields
from trl_drgrpo.process_rewards.steps import Steps, StepSegmenter, one_step_frac
from trl_drgrpo.process_rewards.steps.segmenter import Turns
from trl_drgrpo.rewards.columns import ALWAYS_PASSED
from trl_drgrpo.rewards.contract import (
    Guard,
    OnError,
    listed,
    log_column,
    log_number,
    reward_name,
    reward_number,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerState

    from trl_drgrpo.upstream.batches import Rollouts, ScoredBatch
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)

StepRewards = Sequence[Sequence[float | None]]
LogMetric = Callable[[str, float], None]
RaggedRewards = list[list[float | None]]

_SILENT = 5  # batches in a row without any score, before a warning
_FAILING = (  # kind, due and cost of a failure, for a `Guard`
    "step reward function",
    "one list of rewards per completion",
    "its steps get no score, rows without an outcome are left out.",
)
# What the trainer passes to a step reward function next to the dataset's columns.
TRAINER_KEYWORDS = frozenset({*ALWAYS_PASSED, "steps", "step_ends", "environments"})


def dataset_columns(keywords: Mapping[str, Any], num_rows: int) -> dict[str, Sequence[Any]]:
    """Return the keywords that are dataset columns.

    Args:
        keywords (`Mapping[str, Any]`): Arguments of a step reward function's call.
        num_rows (`int`): `B`, the number of completions.

    Returns:
        `dict[str, Sequence]`: Lists and tuples of length `B` under names that are not the trainer's own.
    """
    columns = {}
    for name, values in keywords.items():
        # A list of another length does not hold one value per row.
        if name not in TRAINER_KEYWORDS and isinstance(values, (list, tuple)) and len(values) == num_rows:
            columns[name] = values
    return columns


def log_nothing(*args: Any) -> None:
    """Stand in for the trainer's `log_metric` and `log_extra` on completions that are not trained on."""


class StepRewardFunction(Protocol):
    """A step reward function, called by name, synchronous or asynchronous.

    `f(prompts=, completions=, steps=, completion_ids=, step_ends=, <dataset columns>, ...)` returns one list per
    completion: a number per step, `None` for a step that cannot be scored. Its attribute `is_causal` says whether the
    score of a step reads no further than the end of that step; without the attribute, nobody knows. A function that
    says `False` is refused as a baseline.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> StepRewards | Awaitable[StepRewards]: ...


@dataclass(frozen=True)
class StepScores:
    """Steps of a batch and their rewards.

    Args:
        steps (`list[Steps]`): One per completion.
        rewards (`list[list[float | None]]`): Weighted sum over the functions, one entry per step; `None` = unscorable.
        rewards_per_func (`list[list[list[float | None]]]`): The same per function.
    """

    steps: list[Steps]
    rewards: RaggedRewards
    rewards_per_func: list[RaggedRewards]

    @property
    def ends(self) -> list[list[int]]:
        """Inclusive last token of each step, and of the closing where there is one."""
        ends = []
        for row in self.steps:
            ends.append(list(row.ends))
            # Credit treats the closing as a step of its own: it has an end, and no reward.
            if row.closing is not None:
                ends[-1].append(row.closing)
        return ends


class StepScorer:
    """The step reward functions of a run, with their weights and the segmenter.

    Args:
        funcs (`list[Callable]`): Called as `f(prompts=, completions=, steps=, completion_ids=, step_ends=,
            trainer_state=, log_metric=, log_extra=, <columns>)`, synchronous or asynchronous; each returns one list of
            floats or `None` per completion, one entry per step. With `environments=`, one per row, where there are
            some. One with a method `on_trainer_built(trainer)` is called there once.
        segmenter ([`StepSegmenter`]): Cuts completions into steps.
        weights (`list[float]`, *optional*): One per function; all 1 by default.
        on_error (`str`, *optional*, defaults to `"raise"`): `"raise"`: a failing function is a [`RewardError`].
            `"unscorable"`: all steps of that call are `None`, the first traceback is logged, and the share of failed
            calls goes to `process_rewards/<name>/failed_frac`.

    Raises:
        `InputError`: Weights that do not fit the functions, or a function that is none.
    """

    def __init__(
        self,
        funcs: Sequence[StepRewardFunction],
        segmenter: StepSegmenter,
        weights: Sequence[float] | None = None,
        on_error: OnError = "raise",
    ):
        for i, func in enumerate(funcs):
            if not callable(func):
                got = f"{type(func).__name__} at position {i}"
                raise InputError("step_reward_funcs", got, "a function", "Pass the function itself.")
        if weights is not None and len(weights) != len(funcs):
            got = f"{len(weights)} weights"
            expected = f"{len(funcs)}, one per step reward function"
            raise InputError("step_reward_weights", got, expected, "Give one number per function.")
        self.funcs = list(funcs)
        self.guards = [Guard(func, on_error == "raise", reward_name(func), *_FAILING) for func in funcs]
        self.names = [guard.name for guard in self.guards]
        self.segmenter = segmenter
        self.weights = list(weights or [1.0] * len(funcs))
        self._has_warned_of_one_step = False
        self._silent = dict.fromkeys(self.names, 0)  # batches in a row without any score

    def on_trainer_built(self, trainer: "TrainerProtocol") -> None:
        """Introduce the trainer to the functions that have a method of this name."""
        for func in self.funcs:
            hook = getattr(func, "on_trainer_built", None)
            if hook is not None:
                hook(trainer)

    def fields(self, trainer: "TrainerProtocol", batch: "ScoredBatch", rollouts: "Rollouts") -> StepFields:
        """The fields of [`RolloutBatch`] that step rewards fill.

        Args:
            trainer ([`DrGRPOTrainer`]): Gets the metrics and columns to log.
            batch ([`ScoredBatch`]): As in `score_batch`.
            rollouts ([`Rollouts`]): The same rows, as TRL trains on them.
        """
        args = trainer.args
        tokenizer = trainer.text_tokenizer
        tool_mask = None
        if "tool_mask" in rollouts:
            tool_mask = rollouts["tool_mask"].tolist()
        with trainer.scoring():
            scores, metrics, columns = self.score_batch(batch, tool_mask, tokenizer, trainer.state)
        # Both take for granted that the text before a step's end decides where it ends.
        biased = None
        if args.process_role == "baseline":
            biased = "process_role='baseline'"
        elif args.step_baseline == "to_go":
            biased = "step_baseline='to_go'"
        if biased is not None:
            self.segmenter.warn_of_looking_ahead(biased, batch.completion_ids, tokenizer, tool_mask)
        trainer.log_batch(metrics, columns)
        # A row whose environment failed has no scores; it is left out of its group.
        for row in trainer.turns.lost_rows:
            scores.rewards[row][:] = [None] * len(scores.rewards[row])
        # The rows of all ranks: a group may straddle two of them.
        rewards = []
        ends = []
        own_rows = list(zip(scores.rewards, scores.ends, strict=True))
        for row_rewards, row_ends in trainer.gathered(own_rows):
            rewards.append(list(row_rewards))
            ends.append(list(row_ends))
        return StepFields(
            steps=scores,
            step_rewards=rewards,
            step_ends=ends,
            state_keys=trainer.turns.state_keys(scores),
        )

    def score(
        self,
        completion_ids: list[list[int]],
        tool_masks: list[list[int] | None],
        tokenizer: Any,
        log_metric: LogMetric,
        **call: Any,
    ) -> StepScores:
        """Cut a batch into steps and reward each of them.

        Args:
            completion_ids (`list[list[int]]`): Completion tokens of each row, without padding.
            tool_masks (`list`): For each row 0 on tool results and 1 elsewhere, or `None`.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Decodes them.
            log_metric (`Callable[[str, float], None]`): Takes metrics, the functions' and ours.
            call: `prompts`, `completions`, dataset columns and the rest, for the functions.

        Returns:
            [`StepScores`].

        Raises:
            `RewardError`: A function failed, or returned something else than one entry per step, and `on_error` is
                `"raise"`.
        """
        steps = []
        for ids, mask in zip(completion_ids, tool_masks, strict=True):
            steps.append(self.segmenter(ids, tokenizer, mask))
        self._warn_of_one_step(steps, call.get("completions", ()))
        return self.score_steps(steps, completion_ids, log_metric, **call)

    def score_steps(
        self,
        steps: list[Steps],
        completion_ids: list[list[int]],
        log_metric: LogMetric,
        **call: Any,
    ) -> StepScores:
        """Score completions that are cut into steps already, see `score`.

        Args:
            steps (`list[Steps]`): One per completion.
            completion_ids, log_metric, call: As in `score`.
        """
        call.update(
            completion_ids=completion_ids,
            steps=[row.texts for row in steps],
            step_ends=[row.ends for row in steps],
            log_metric=log_metric,
        )
        # All functions run before any is checked: the asynchronous ones wait together.
        outputs = _call_all(self.funcs, call)
        per_func = []
        for guard, output in zip(self.guards, outputs, strict=True):
            per_func.append(self._settle(guard, output, steps, log_metric))
        return StepScores(steps, _weighted_sum(per_func, self.weights, steps), per_func)

    def score_batch(
        self,
        batch: "ScoredBatch",
        tool_mask: list[list[int]] | None,
        tokenizer: "PreTrainedTokenizerBase",
        trainer_state: "TrainerState",
    ) -> tuple[StepScores, dict[str, list[float]], dict[str, list[Any]]]:
        """Score a generation batch of the trainer, see `score`.

        Args:
            batch ([`ScoredBatch`]): This rank's rows, as the reward functions got them.
            tool_mask (`list[list[int]]`, *optional*): For each row 0 on tool results, 1 elsewhere; may be padded.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Decodes completions.
            trainer_state ([`~transformers.TrainerState`]): For the functions.

        Returns:
            `tuple`: The [`StepScores`]; values per metric; columns for the table of logged completions.

        Raises:
            `RewardError`: As in `score`.
        """
        # As TRL keeps metrics: lists, of which it logs the mean.
        metrics = defaultdict(list)
        columns = defaultdict(list)
        # The example's own prompt and completion are left out: the generated ones go by these names.
        dataset = {}
        for key in batch.inputs[0]:
            if key not in ("prompt", "completion", "completion_ids"):
                dataset[key] = [example[key] for example in batch.inputs]
        if batch.environments is not None:  # a column of that name gives way, as it does in TRL's calls of rewards
            dataset["environments"] = batch.environments
        completion_ids = list(map(list, batch.completion_ids))
        masks: list[Any] = [None] * len(completion_ids)
        if tool_mask is not None:  # padded to the longest row
            masks = [mask[: len(ids)] for mask, ids in zip(tool_mask, completion_ids, strict=True)]

        def add_metric(name: str, value: float) -> None:
            metrics[name].append(value)

        def add_column(column: str, values: list[Any]) -> None:
            columns[column].extend(values)

        scores = self.score(
            completion_ids,
            masks,
            tokenizer,
            # Both check what a function passes, before it is kept.
            partial(log_number, add_metric),
            log_extra=partial(log_column, add_column, len(batch.completions)),
            prompts=batch.prompts,
            completions=batch.completions,
            trainer_state=trainer_state,
            **dataset,
        )
        for name, rewards in zip(self.names, scores.rewards_per_func, strict=True):
            scored = [reward for reward in chain(*rewards) if reward is not None]
            if scored:
                metrics[f"process_rewards/{name}/mean"].append(sum(scored) / len(scored))
            self._warn_of_silence(name, bool(scored))
        # In the table of completions, beside what the functions log.
        columns["steps"] = [list(steps.texts) for steps in scores.steps]
        columns["step_rewards"] = scores.rewards
        return scores, metrics, columns

    def _settle(self, guard: Guard, output: Any, steps: list[Steps], log_metric: Callable) -> RaggedRewards:
        """Return the checked rewards of one function; all are `None` where it failed and `on_error` allows that."""
        error: Exception | None = None
        rewards: RaggedRewards = [[None] * len(row.ends) for row in steps]
        if isinstance(output, Exception):  # `_call_all` puts it in the place of an output
            error = output
        else:
            try:
                rewards = validate_step_rewards(output, steps, guard.name, repr(self.segmenter))
            except RewardError as broken_contract:
                error = broken_contract
        if not guard.raises:
            log_metric(f"process_rewards/{guard.name}/failed_frac", float(error is not None))
        if error is not None:
            guard.settle(error)
        return rewards

    def _warn_of_silence(self, name: str, has_scored: bool) -> None:
        """Warn once of a function that scores nothing. The count stays at the limit, so no second warning follows."""
        if self._silent[name] == _SILENT:
            return
        self._silent[name] += 1
        if has_scored:
            self._silent[name] = 0
        elif self._silent[name] == _SILENT:
            logger.warning(
                "Step reward function '%s' gave None for every step of %d batches in a row: it has no effect. "
                "Look at the steps that it is passed (`step_separator`), and return 0 for a step that is bad.",
                name,
                _SILENT,
            )

    def _warn_of_one_step(self, steps: list[Steps], completions: Sequence[Any]) -> None:
        if self._has_warned_of_one_step or one_step_frac(steps) < 1.0:
            return
        self._has_warned_of_one_step = True
        remedy = "If your completions have steps, pick the separator they use."
        if isinstance(self.segmenter.rule, Turns):
            remedy = "No tool was called; if steps are something else here, set step_separator."
            messages = [message for message in chain(*completions) if isinstance(message, dict)]
            # A call whose result does not fit into the completion begins no further turn.
            if any(message.get("tool_calls") for message in messages):
                remedy = "Tools were called, but no result fit: raise max_completion_length or shorten the results."
        logger.warning(
            "step_separator: %s found only one step in 100%% of the completions of a batch, so step rewards act as "
            "outcome rewards. %s",
            self.segmenter,
            remedy,
        )


def validate_step_rewards(output: Any, steps: list[Steps], name: str, segmenter: str) -> RaggedRewards:
    """Check that an output has one list per completion, and one finite number or `None` per step.

    Args:
        output: Result of a step reward function: lists, tuples, tensors or arrays, a row of shape `(S,)` or `(S, 1)`.
        steps (`list[Steps]`): The steps that were to be scored.
        name (`str`): Name of the function, for the message.
        segmenter (`str`): Name of the segmenter, for the message.

    Returns:
        `list[list[float | None]]`: `None` where the function gave `None` or NaN.

    Raises:
        `RewardError`: Names the row, both counts and the segmenter.
    """
    field = f"step reward function '{name}'"
    # Tensors and arrays become lists, without the last axis of size 1 that a value head has.
    output = listed(output, axes=2)
    remedy = "Return a list of lists."
    expected = f"{len(steps)} lists, one per completion"
    if not isinstance(output, (list, tuple)):
        raise RewardError(field, type(output).__name__, expected, remedy)
    if len(output) != len(steps):
        raise RewardError(field, f"{len(output)} rows", expected, remedy)
    rewards = []
    for i, row in enumerate(map(listed, output)):
        num_steps = len(steps[i].ends)
        expected = f"{num_steps} rewards, one per step of {segmenter}"
        if not isinstance(row, (list, tuple)):
            raise RewardError(field, f"{type(row).__name__} for completion {i}", expected, remedy)
        if len(row) != num_steps:
            remedy = "Score the steps as they are passed in `steps`; do not cut the text again."
            raise RewardError(field, f"{len(row)} rewards for completion {i}", expected, remedy)
        rewards.append([])
        for k, reward in enumerate(row):
            rewards[i].append(reward_number(reward, field, f"for step {k} of completion {i}"))
    return rewards


def _weighted_sum(per_func: list[RaggedRewards], weights: list[float], steps: list[Steps]) -> RaggedRewards:
    """Return `sum_f w_f * s_fk` over the functions that scored step `k`; `None` where none did."""
    combined = []
    for i, row in enumerate(steps):
        combined.append([])
        for k in range(len(row.ends)):
            terms = []
            for weight, rewards in zip(weights, per_func, strict=True):
                reward = rewards[i][k]
                # A function that cannot score a step has no part in its sum.
                if reward is not None:
                    terms.append(weight * reward)
            total = None
            if terms:
                total = sum(terms)
            combined[i].append(total)
    return combined


def _call_all(funcs: list[StepRewardFunction], call: dict[str, Any]) -> list[Any]:
    """Return the outputs in order; an exception stands in for the output of a function that raised."""
    outputs = []
    waiting = {}
    for i, func in enumerate(funcs):
        # An asynchronous function returns at once: its work waits for that of the others.
        try:
            outputs.append(func(**call))
        except Exception as error:  # settled by `_settle`: raised with its name, or counted if the user opted in
            outputs.append(error)
        if inspect.isawaitable(outputs[i]):
            waiting[i] = outputs[i]
    if waiting:
        # In a thread of its own, because a notebook's thread has an event loop running already.
        with ThreadPoolExecutor(max_workers=1) as thread:
            results = thread.submit(asyncio.run, gathered(waiting.values())).result()
        for i, result in zip(waiting, results, strict=True):
            outputs[i] = result
    return outputs


async def gathered(calls: Iterable[Any]) -> list[Any]:
    """Await calls together; return the result of each, or the exception that it raised."""
    return await asyncio.gather(*calls, return_exceptions=True)
