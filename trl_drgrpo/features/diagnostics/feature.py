"""The diagnostics inside the trainer: statistics of every generation batch, phase times, run log, warnings. Glue only.

Everything is seen through hooks: `on_credit` after the advantages are made, `rolling_out` and `scoring` around the
phases, a callback's events for steps and logs. Ranks exchange a few numbers per row and the recorded rows,
once per generation batch; the main process writes. Nothing here touches a random generator or a tensor that is trained
on.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from trl_drgrpo.features.diagnostics.facts import run_facts, start_facts
from trl_drgrpo.features.diagnostics.phases import GENERATE, SCORE, PhaseClock
from trl_drgrpo.features.diagnostics.records import group_records, recorded_groups, row_record
from trl_drgrpo.features.diagnostics.right import RightRule
from trl_drgrpo.features.diagnostics.run_log import RunLog
from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.snapshot import BatchSnapshot
from trl_drgrpo.features.diagnostics.statistics import BatchRows, batch_statistics
from trl_drgrpo.features.diagnostics.steps import step_statistics
from trl_drgrpo.process_rewards.calling import process_only
from trl_drgrpo.process_rewards.steps.alignment import Aligner
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.upstream.hooks import CreditedBatch, Feature

logger = logging.getLogger(__name__)

STATE_FILE = "drgrpo_diagnostics.json"  # in every checkpoint


class Diagnostics(Feature):
    """Says what a run does.

    Attributes:
        right_rule ([`RightRule`], *optional*): Which completions are right; `None` where there is no outcome reward.
        run_log ([`RunLog`], *optional*): On the main process, unless switched off.
        run_warnings ([`RunWarnings`]): Watches the logs of the main process.
    """

    run_warnings: RunWarnings

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.right_rule: RightRule | None = None
        self.run_log: RunLog | None = None
        self.phases = PhaseClock()
        self._new_tokens = 0  # generated since the last optimizer step ended
        self._counted = ("", 0, 0)  # mode, step, and the groups seen in it

    def on_trainer_built(self) -> None:
        """Set everything up; the reward functions are known by now.

        Raises:
            `InputError`: `right_reward` is no reward of the run.
        """
        trainer, args = self.trainer, self.trainer.args
        if trainer.reward_func_names != [reward_name(process_only)]:  # whose 0 says nothing
            self.right_rule = RightRule(trainer.reward_func_names, args.right_reward, args.right_threshold)
        if args.run_log and trainer.accelerator.is_main_process:
            self.run_log = RunLog(Path(str(args.output_dir)))
        thresholds = warning_thresholds(args.run_warnings)
        self.run_warnings = RunWarnings(thresholds, args.num_generations or 1, self._record_warning)
        self._aligner = Aligner(trainer.text_tokenizer)

    @contextmanager
    def around_train(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.run_log is not None:
                self.run_log.end(self.trainer.state.global_step, f"failed: {type(error).__name__}")
            raise

    # Phases

    def rolling_out(self) -> AbstractContextManager[Any]:
        """Timed as generation."""
        return self.phases.phase(GENERATE)

    def scoring(self) -> AbstractContextManager[Any]:
        """Timed as scoring."""
        return self.phases.phase(SCORE)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phases.step_ends(self._new_tokens)
        self._new_tokens = 0

    def add_to_log(self, logs: dict[str, Any]) -> None:
        if self.trainer.model.training:
            logs |= self.phases.read()

    # Batches

    def on_credit(self, batch: CreditedBatch) -> None:
        """Statistics of the batch go to the log, some of its groups to the run log."""
        trains = self.trainer.model.training
        wanted = self.trainer.args.record_groups if self.trainer.args.run_log and self.trainer.state.max_steps else 0
        groups = len(batch.rewards) // batch.num_generations
        recorded = recorded_groups(groups, wanted)
        seen = BatchSnapshot(batch, self.trainer.own_rows.start, self.trainer.stop_token_ids, set(recorded))
        right = self.right_rule.judge(seen.per_func[self.right_rule.index]) if self.right_rule else None
        records = [row_record(row, self._aligner) for row in seen.recorded_rows(self.trainer.reward_func_names, right)]
        everyone = self.trainer.gathered([(seen.own, records)])
        own = [row for rows, _ in everyone for row in rows]  # of all ranks, in their order
        rows = BatchRows(
            num_generations=batch.num_generations,
            rewards=seen.rewards,
            lengths=[row.length for row in own],
            trained=[row.trained for row in own],
            masses=[row.mass for row in own],
            truncated=[row.truncated for row in own],
            texts=[row.text for row in own],
            right=right,
        )
        metrics = batch_statistics(rows, trains)
        if batch.step_rewards is not None:
            metrics |= step_statistics(batch.step_rewards, seen.rewards)
        self.trainer.log_batch({name: [value] for name, value in metrics.items()}, {})
        if trains:
            self._new_tokens += sum(rows.lengths)
        mode, step = (
            ("train", self.trainer.state.global_step + 1) if trains else ("eval", self.trainer.state.global_step)
        )
        first_group = self._groups_before(mode, step, groups)
        if self.run_log is not None and recorded:
            gathered = [record for _, each in everyone for record in each]
            self.run_log.completions(group_records(gathered, batch.num_generations, step, mode, first_group))

    def _groups_before(self, mode: str, step: int, groups: int) -> int:
        """Groups in earlier batches of the step: one that accumulates, and an evaluation, may generate several."""
        before = self._counted[2] if self._counted[:2] == (mode, step) else 0
        self._counted = (mode, step, before + groups)
        return before

    # Run log and warnings, on the main process

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self.run_log is not None:
            self.run_log.metrics(state.global_step, state.epoch, logs)
        self.run_warnings.observe(state.global_step, logs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.run_log is not None:
            facts = run_facts(self.trainer, self.right_rule)
            self.run_log.start(state.global_step, start_facts(self.trainer), facts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.run_warnings.finish(state.global_step)
        if self.run_log is not None:
            self.run_log.end(state.global_step, "finished")

    def _record_warning(self, step: int, cause: str, message: str) -> None:
        if self.run_log is not None:
            self.run_log.warning(step, cause, message)

    # Checkpoints

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        if self.trainer.args.should_save:
            state = {
                "right_is_binary": self.right_rule.is_binary if self.right_rule else None,
                "warnings": self.run_warnings.state_dict(),
            }
            (checkpoint / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        file = checkpoint / STATE_FILE
        if not file.exists():
            return
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            if self.right_rule is not None:
                self.right_rule.is_binary = state["right_is_binary"] is not False
            self.run_warnings.load_state_dict(state["warnings"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = "%s cannot be read (%s): warnings may be repeated."
            logger.warning(message, file, type(error).__name__)
