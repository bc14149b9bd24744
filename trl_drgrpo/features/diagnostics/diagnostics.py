"""The diagnostics inside the trainer: statistics of every generation batch, phase times, run log, warnings.

Everything is seen through hooks: `on_credit` after the advantages are made, `rolling_out` and `scoring` around the
phases, a callback's events for steps and logs. Ranks exchange a few numbers per row and the recorded rows, once per
generation batch; the main process writes. Nothing here touches a random generator or a tensor that is trained on, and
nothing here ends a run (`upstream/description.py`).
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState

from trl_drgrpo.common.errors import DiskFullError
from trl_drgrpo.features.diagnostics.movement import first_loss_remarks, is_first_loss
from trl_drgrpo.features.diagnostics.run_facts import run_facts, start_facts
from trl_drgrpo.features.diagnostics.run_log import (
    DETAILS,
    RunLog,
    group_records,
    logged_prompt,
    readable,
    recorded_groups,
    short_text,
    spans_of,
)
from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.statistics import BatchRows, CorrectnessRule, batch_statistics, step_statistics
from trl_drgrpo.features.fast_path.speed import Speed
from trl_drgrpo.process_rewards.steps.alignment import Aligner
from trl_drgrpo.process_rewards.without_outcome import process_only
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.upstream.batches import CreditedBatch
from trl_drgrpo.upstream.description import METRIC, DescribingCallback, DescribingFeature

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)

GENERATE = "generate"
SCORE = "score"
# Places, as the guard names them.
_STATISTICS = "The statistics of a batch"
_WARNINGS = "The watch for warnings"
_PHASES = "The clock of the phases"
_END = "The end of the run log"
_METRICS = "The run log's metrics"


class PhaseClock:
    """Adds up the seconds of each phase of the training steps between two readings, on the clock of the host.

    - generate: TRL's generation, tools and custom rollouts included;
    - score: the reward functions and the step reward functions, what they sample themselves included;
    - train: the rest of the step: old and reference log-probabilities, planning, forward, backward, the optimizer.

    No device is waited for: a phase ends when its calls return. Generation and scoring return values that the host
    needs, so what an accelerator still computes then is counted as training.

    Args:
        clock (`Callable[[], float]`, *optional*): Seconds since some moment.

    Example:

    ```python
    >>> ticks = iter([0.0, 1.0, 4.0, 10.0])
    >>> clock = PhaseClock(lambda: next(ticks))
    >>> clock.step_begins()
    >>> with clock.phase("generate"):
    ...     pass
    >>> clock.step_ends(tokens=50)
    {'time/generate_s': 3.0, 'time/score_s': 0.0, 'time/train_s': 7.0, 'time/tokens_per_s': 5.0}
    >>> clock.read() == {'time/generate_s': 3.0, 'time/score_s': 0.0, 'time/train_s': 7.0, 'time/tokens_per_s': 5.0}
    True

    ```
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._is_running = False
        self._began: float | None = None
        self._of_step: dict[str, float] = defaultdict(float)  # seconds of its phases
        self._sums: dict[str, float] = defaultdict(float)  # seconds of the phases and of whole steps; steps; tokens

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase, `"generate"` or `"score"`. Inside of another phase it counts as that one,
        outside of a step (in an evaluation) not at all."""
        # A reward function may generate, and a custom rollout may score: their seconds must not count twice.
        if self._is_running or self._began is None:
            yield
            return
        self._is_running = True
        start = self._clock()
        try:
            yield
        finally:
            self._is_running = False
            self._of_step[name] += self._clock() - start

    def step_begins(self) -> None:
        """An optimizer step begins."""
        self._began = self._clock()
        self._of_step = defaultdict(float)

    def step_ends(self, tokens: int) -> dict[str, float]:
        """End an optimizer step and return its own metrics, named as in `read`.

        `tokens`: completion tokens generated in it over all ranks, 0 where it reused some.
        """
        if self._began is None:
            return {}
        # The numbers of this step, and their sums up to the next reading.
        step = self._of_step
        step["whole"] = self._clock() - self._began
        step["steps"] = 1
        step["tokens"] = tokens
        for name, amount in step.items():
            self._sums[name] += amount
        self._began = None
        return self._as_metrics(step)

    def read(self) -> dict[str, float]:
        """Return the metrics since the last reading, and start afresh.

        Returns:
            `dict[str, float]`: `time/generate_s`, `time/score_s`, `time/train_s`: seconds per optimizer step;
            `time/tokens_per_s`: completion tokens per second of these steps. Empty when no step has ended.
        """
        if not self._sums["steps"]:
            return {}
        sums = self._sums
        self._sums = defaultdict(float)
        return self._as_metrics(sums)

    @staticmethod
    def _as_metrics(sums: dict[str, float]) -> dict[str, float]:
        # Training is the rest of the step: it is the one phase without a clock of its own.
        steps = sums["steps"]
        training = sums["whole"] - sums[GENERATE] - sums[SCORE]
        result = {
            "time/generate_s": sums[GENERATE] / steps,
            "time/score_s": sums[SCORE] / steps,
            "time/train_s": max(training, 0.0) / steps,  # rounding may leave less than nothing
        }
        if sums["whole"] > 0:
            result["time/tokens_per_s"] = sums["tokens"] / sums["whole"]
        return result


# A record shows these in fields of their own.
_NO_COLUMNS = ("prompt", "completion", "completions", "completion_ids")


class BatchSnapshot:
    """A credited generation batch in plain Python numbers.

    Args:
        batch ([`CreditedBatch`]): The batch.
        first_row (`int`): Index of this rank's first row among all ranks' rows.
        stop_token_ids (`Collection[int]`): Tokens that end a completion.
        recorded (`Collection[int]`): Groups, over all ranks, that are to be recorded.

    Attributes:
        rewards (`list[float]` of length `B`): Over all ranks; NaN = unscorable.
        per_func (`list[list[float]]` of shape `(F, B)`): Each function's rewards, over all ranks.
        rank_rows (`dict[str, list]`, each of length `b`): This rank's rows, as columns of [`BatchRows`].
    """

    def __init__(
        self,
        batch: CreditedBatch,
        first_row: int,
        stop_token_ids: Collection[int],
        recorded: Collection[int],
    ):
        self.batch = batch
        self.first_row = first_row
        self._recorded = []
        for i in range(len(batch.scored.prompts)):
            group = (first_row + i) // batch.num_generations
            if group in recorded:
                self._recorded.append(i)
        advantages = batch.token_advantages
        # One transfer for all of it: each one waits until the device has finished what it has to do.
        numbers = to_host(
            {
                "rewards": batch.rewards,
                "row advantages": batch.row_advantages,
                "per func": batch.scored.rewards_per_func.T,
                "tokens": batch.completion_mask.sum(dim=1),
                "trained": batch.trained_mask.sum(dim=1),
                "gradient weights": advantages.abs().sum(dim=1),
                "weights": batch.row_weights,
                "token advantages": advantages[self._recorded],
                "token masks": batch.trained_mask[self._recorded],
            }
        )
        self.rewards = numbers["rewards"]
        self._advantages = numbers["row advantages"]
        self._token_advantages = numbers["token advantages"]
        self._token_masks = numbers["token masks"]
        per_func = numbers["per func"]  # (F, B) as one list
        self.per_func = [per_func[i : i + len(self.rewards)] for i in range(0, len(per_func), len(self.rewards))]
        self.rank_rows: dict[str, list[Any]] = {
            "lengths": [],
            "trained": list(map(int, numbers["trained"])),
            "gradient_weights": numbers["gradient weights"],
            "truncated": [],
            "texts": [],
        }
        if "weights" in numbers:
            self.rank_rows["weights"] = numbers["weights"]
        for ids, tokens, trained in zip(
            batch.scored.completion_ids, numbers["tokens"], numbers["trained"], strict=True
        ):
            # A tool's tokens are in the completion but not trained on; where all of a row is masked, none can be told.
            self.rank_rows["lengths"].append(len(ids) - int(tokens - trained))
            self.rank_rows["truncated"].append(len(ids) > 0 and ids[-1] not in stop_token_ids)
            # Ranks exchange these columns. Of integers, unlike texts, the hash is the same in every process.
            self.rank_rows["texts"].append(hash(tuple(ids)))

    def records(
        self,
        names: Sequence[str],
        correct: Sequence[bool | None] | None,
        aligner: Aligner,
    ) -> Iterator[dict[str, Any]]:
        """Yield this rank's rows of the groups that are recorded, as they stand in `completions.jsonl`.

        What belongs to their group is under `index`, `prompt` and `columns`. `names`: the `F` reward functions;
        `correct`: `B` values, over all ranks.
        """
        scored = self.batch.scored
        steps = self.batch.steps
        forks = self.batch.forks
        width = self.batch.trained_mask.size(1)
        for number, i in enumerate(self._recorded):
            row = self.first_row + i
            ids = list(scored.completion_ids[i])
            # Of the recorded rows, `(rows, T)` as one list: the tokens of this one, without padding.
            tokens = slice(number * width, number * width + len(ids))
            spans = spans_of(
                ids,
                self._token_advantages[tokens],
                self._token_masks[tokens],
                aligner,
                steps.steps[i].ends if steps else (),
                steps.rewards[i] if steps else (),
                forks.cuts[row] if forks else None,
            )
            columns = {}
            for name, value in scored.inputs[i].items():
                if name not in _NO_COLUMNS:
                    columns[name] = short_text(value)
            yield {
                "index": row,
                "prompt": logged_prompt(scored.prompts[i]),
                "columns": columns,
                "spans": list(spans),
                "rewards": {name: readable(values[row]) for name, values in zip(names, self.per_func, strict=True)},
                "reward": readable(self.rewards[row]),
                "advantage": readable(self._advantages[i]),
                "length": self.rank_rows["lengths"][i],
                "truncated": self.rank_rows["truncated"][i],
                "right": correct and correct[row],
            }


def to_host(tensors: dict[str, torch.Tensor | None]) -> dict[str, list[float]]:
    """Return flat lists of numbers from tensors of one device, in one transfer (as float32); `None` is left out."""
    flat = {name: tensor.detach().float().flatten() for name, tensor in tensors.items() if tensor is not None}
    numbers = iter(torch.cat(list(flat.values())).tolist())
    # Each name takes as many of them as its tensor has, in the same order.
    return {name: list(islice(numbers, len(tensor))) for name, tensor in flat.items()}


@dataclass
class _RankView:
    """This rank's look at a batch."""

    snapshot: BatchSnapshot
    correct: list[bool | None] | None  # of each row of all ranks
    records: list[dict[str, Any]]  # of this rank


class Diagnostics(DescribingFeature):
    """Says what a run does.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        speed ([`Speed`]): Parts of the fast path that are used.

    Attributes:
        correctness_rule ([`CorrectnessRule`], *optional*): Which completions are correct; `None` where there is no
            outcome reward.
        run_log ([`RunLog`]): Started on the main process, unless switched off.
        run_warnings ([`RunWarnings`]): Watches the logs of the main process.
    """

    takes = ("run_log", "run_warnings", "correct_reward", "correct_threshold")
    run_log: RunLog
    run_warnings: RunWarnings

    def __init__(self, trainer: "TrainerProtocol", speed: Speed):
        super().__init__(trainer)
        self._speed = speed
        self.correctness_rule: CorrectnessRule | None = None
        self.phases = PhaseClock()
        self._new_tokens = 0  # generated since the last optimizer step ended
        self._counted_in = ("", 0)  # mode and step
        self._counted_groups = 0  # seen in it
        self._details: dict[str, float | None] = {}  # metrics of the newest log that trackers do not get
        self._of_step: dict[str, float] = {}  # metrics of the newest step alone
        self._epoch_began_at = 0
        self._stream_has_ended = False

    def on_trainer_built(self) -> None:
        """Set everything up: the reward functions are known by now.

        Raises:
            `InputError`: A `correct_reward` that the run does not have.
        """
        trainer = self.trainer
        args = trainer.args
        names = trainer.reward_func_names
        if names != [reward_name(process_only)]:  # its constant 0 says nothing about a completion
            self.correctness_rule = CorrectnessRule(names, args.correct_reward, args.correct_threshold)
        self.run_log = RunLog(Path(args.output_dir))
        thresholds = warning_thresholds(args.run_warnings)
        if args.process_role == "baseline":
            thresholds.pop("process_hacked", None)  # a score that is not paid cannot be exploited
        self.run_warnings = RunWarnings(thresholds, args.num_generations or 1, self._record_warning)
        self._aligner = Aligner(trainer.text_tokenizer)
        self.describing.tell = self._record_failure

    @contextmanager
    def around_train(self) -> Iterator[None]:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, DescribingCallback):
                callback.describing = self.describing  # one count, whoever added it
        try:
            yield
        except BaseException as error:
            refusal = nullcontext()
            if isinstance(error, DiskFullError):  # which says it all: the same disk refuses this file, too
                refusal = suppress(OSError)
            with self.describing(_END), refusal:
                self.run_log.end(self.trainer.state.global_step, f"failed: {type(error).__name__}")
            raise

    # Phases

    def rolling_out(self) -> AbstractContextManager[None]:
        """Timed as generation."""
        return self._timed(GENERATE)

    def scoring(self) -> AbstractContextManager[None]:
        """Timed as scoring."""
        return self._timed(SCORE)

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self.describing.around(_PHASES, lambda: self.phases.phase(phase))

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        # Both read differences: what was logged, or took time, before this step is not its own.
        self.trainer.logged_metrics.begin_step()
        self.phases.step_begins()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        numbers = self.describing.value("The numbers of a step", self.trainer.logged_metrics.of_step, otherwise={})
        # Every step is judged, logged or not: a window of means over logs would outlast most runs.
        if state.is_world_process_zero:
            with self.describing(_WARNINGS):
                self.run_warnings.observe(state.global_step, numbers)
        # Warnings do not judge seconds. Every rank's clock ends its step, or the next one would add to it.
        numbers = numbers | self.phases.step_ends(self._new_tokens)
        self._new_tokens = 0
        if not state.is_world_process_zero:
            return
        self._of_step = numbers
        if not control.should_log:  # else the log of this step follows, and adds the loss and the like
            self._write_metrics(state, numbers)
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, DescribingCallback):
                callback.on_step_numbers(args, state, control, numbers)

    def _write_metrics(self, state: TrainerState, numbers: Mapping[str, float | None]) -> None:
        """Write one line of the run log's metrics."""
        with self.describing(_METRICS):
            self.run_log.metrics(state.global_step, state.epoch, numbers)

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self._epoch_began_at = state.global_step

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        # That a stored data set is read again is by design. That a stream has run out may surprise.
        is_stream = not hasattr(self.trainer.train_dataset, "__len__")
        is_short = state.global_step < state.max_steps
        if not (is_stream and is_short and state.is_world_process_zero):
            return
        where = f"train_dataset: the stream ended at optimizer step {state.global_step} of {state.max_steps}"
        if state.global_step == self._epoch_began_at:  # transformers ends a run at an epoch without a step
            prompts = self.trainer.args.generation_batch_size // self.trainer.args.num_generations
            logger.warning(
                "%s: it gave no further %d prompts, which a generation batch takes, so training ends. "
                "Pass a stream that is longer, or can be read again from its beginning.",
                where,
                prompts,
            )
        elif not (self._stream_has_ended or control.should_training_stop):
            self._stream_has_ended = True
            logger.warning("%s: it is read again from its beginning, as often as needed. Shown once.", where)

    def add_to_log(self, logs: dict[str, float]) -> None:
        if self.trainer.args.run_log:
            self._details = self.trainer.logged_metrics.take(DETAILS.match)
        if self.trainer.model.training:
            logs |= self.describing.value(_PHASES, self.phases.read, otherwise={})
            if self.describing.failures:
                logs[METRIC] = self.describing.failures.total()

    # Batches

    def on_credit(self, batch: CreditedBatch) -> None:
        """Statistics of the batch go to the log, some of its groups to the run log."""
        view = self.describing.value(_STATISTICS, lambda: self._look_at(batch), otherwise=None)
        # A rank that failed takes part with `None`: the others would wait forever for one that stayed away.
        rows_and_records = view and (view.snapshot.rank_rows, view.records)
        of_ranks = self.trainer.gathered([rows_and_records])
        metrics: dict[str, float] = {}
        if view is not None:  # else the log says why already
            metrics = self.describing.value(_STATISTICS, lambda: self._described(view, of_ranks), otherwise={})
        step_rewards = batch.step_rewards
        if step_rewards is not None:
            metrics |= self.describing.value(
                "The statistics of the steps",
                lambda: step_statistics(step_rewards, batch.rewards.tolist()),
                otherwise={},
            )
        self.trainer.log_batch({name: [value] for name, value in metrics.items()}, {})

    def _look_at(self, batch: CreditedBatch) -> _RankView:
        trainer = self.trainer
        # `max_steps` is 0 in an evaluation without training, which has no run log.
        recorded: set[int] = set()  # asked for every row
        if trainer.args.run_log and trainer.state.max_steps > 0:
            groups = len(batch.rewards) // batch.num_generations
            recorded.update(recorded_groups(groups, trainer.args.record_groups))
        snapshot = BatchSnapshot(batch, batch.own_rows.start, trainer.stop_token_ids, recorded)
        rule = self.correctness_rule
        correct = rule.judge(snapshot.per_func[rule.index]) if rule else None
        records = snapshot.records(trainer.reward_func_names, correct, self._aligner)
        return _RankView(snapshot, correct, list(records))

    def _described(
        self, view: _RankView, of_ranks: Sequence[tuple[dict[str, list[Any]], list[dict[str, Any]]] | None]
    ) -> dict[str, float]:
        """Return metrics of the batch, from rows and records of all ranks; the main process writes the records."""
        batch = view.snapshot.batch
        # Ranks in their order, so that rows stand as in the whole batch.
        columns: dict[str, list[Any]] = defaultdict(list)
        records: list[dict[str, Any]] = []
        for of_rank in of_ranks:
            if of_rank is None:
                raise RuntimeError("another process could not describe its rows; its log says why")
            rows_of_rank, records_of_rank = of_rank
            records += records_of_rank
            for name, values in rows_of_rank.items():
                columns[name] += values
        rows = BatchRows(  # of all ranks, in their order
            num_generations=batch.num_generations,
            rewards=view.snapshot.rewards,
            correct=view.correct,
            copies=batch.forks.copies(columns["lengths"]) if batch.forks else None,
            **columns,
        )
        # The step that is trained on the batch comes next; an evaluation belongs to the steps done.
        is_training = self.trainer.model.training
        mode = "train" if is_training else "eval"
        step = self.trainer.state.global_step + is_training
        if is_training:
            self._new_tokens += sum(rows.lengths)
        # A step that accumulates, and an evaluation, may generate several batches: their groups are counted through.
        if self._counted_in != (mode, step):
            self._counted_in = (mode, step)
            self._counted_groups = 0
        first_group = self._counted_groups
        self._counted_groups += len(rows.groups)
        if records and self.trainer.accelerator.is_main_process:
            with self.describing("The run log's completions"):
                groups = group_records(records, rows.num_generations, step, mode, first_group, batch.forks)
                self.run_log.completions(groups)
        return batch_statistics(rows, is_training)

    # Run log and warnings, on the main process

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not state.is_world_process_zero or not logs:
            return
        # A step's own numbers take the place of means since the last log.
        numbers = logs | self._details
        for name in numbers:
            numbers[name] = self._of_step.get(name, numbers[name])
        self._write_metrics(state, numbers)
        with self.describing(_METRICS):
            self.run_log.update(speed=self._speed.facts())
        with self.describing(_WARNINGS):
            self.run_warnings.observe_log(state.global_step, logs)
        with self.describing("The remarks on the first loss"):
            # Without thresholds the user wants silence.
            if self.run_warnings.thresholds and is_first_loss(logs, state.log_history):
                for remark in first_loss_remarks(self.trainer, logs["loss"]):
                    logger.warning(remark)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if not state.is_world_process_zero or not self.trainer.args.run_log:
            return
        # Apart, so that one that fails costs the run log no more than itself.
        start = self.describing.value("The facts of the start", lambda: start_facts(self.trainer), otherwise={})
        facts = self.describing.value(
            "The facts of the run", lambda: run_facts(self.trainer, self.correctness_rule), otherwise={}
        )
        with self.describing("The start of the run log"):
            self.run_log.start(state.global_step, start, {**facts, "speed": self._speed.facts()})

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            with self.describing(_WARNINGS):
                self.run_warnings.finish()
            with self.describing(_END):
                self.run_log.end(self.trainer.state.global_step, "finished")

    def _record_warning(self, step: int, cause: str, message: str) -> None:
        with self.describing("The run log's warnings"):
            self.run_log.warning(step, cause, message)

    def _record_failure(self, place: str, error: Exception) -> None:
        message = f"{place} failed ({type(error).__name__}): the run goes on without it. The log says why."
        self._record_warning(self.trainer.state.global_step, "description", message)

    # Checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        return self.describing.value("The diagnostics of a checkpoint", self._state, otherwise=None)

    def _state(self) -> dict[str, Any]:
        is_binary = None
        if self.correctness_rule:
            is_binary = self.correctness_rule.is_binary
        state = {"right_is_binary": is_binary, "warnings": self.run_warnings.state_dict()}
        # What JSON cannot hold fails here, where it ends no run.
        return json.loads(json.dumps(state))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        with self.describing("Reading the diagnostics of a checkpoint (warnings may be repeated)"):
            if self.correctness_rule is not None:
                self.correctness_rule.is_binary = state["right_is_binary"] is not False
            self.run_warnings.load_state_dict(state["warnings"])
