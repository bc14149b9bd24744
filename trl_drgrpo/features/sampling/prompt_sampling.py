"""Selection of training prompts: dynamic sampling and curriculum, both unbiased (`objective/advantages.py`).

A generation batch draws rows of the training set (`prompt_stream.py`) until K groups are selected. They are generated
in rounds: a round is as large as the running share of selected groups says that the missing ones need. All processes
take the same decisions; completions of the selected groups are exchanged, so that each process ends up with its share
of the batch.
"""

import copy
import logging
import math
import random
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.features.sampling.pass_rates import PassRates, read_pass_rates
from trl_drgrpo.features.sampling.prompt_stream import Draw, PromptStream, cap_warning, sampling_metrics
from trl_drgrpo.objective.advantages import Selection, keep_probability, select_groups
from trl_drgrpo.upstream.batches import (
    CreditedBatch,
    DatasetRow,
    Rollouts,
    joined_rows,
    row_of,
    trained_mask,
    unknown_keys,
)
from trl_drgrpo.upstream.hooks import Feature

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)

Generate = Callable[[list[DatasetRow]], Rollouts]  # this rank's rows of one round


class PromptSampling(Feature):
    """Fills generation batches with live groups, and prefers prompts that are likely to.

    Attributes:
        stream ([`PromptStream`]): The rows that batches draw.
        pass_rates ([`PassRates`]): Estimates by prompt.
    """

    def __init__(self, trainer: "TrainerProtocol"):
        super().__init__(trainer)
        self.pass_rates = PassRates()
        self.live_share: float | None = None  # of the generated groups, the newest the heaviest
        self.batches = 0  # that are complete: the position of the random choices
        self._credited: CreditedBatch | None = None
        self._rule: CorrectnessRule | None = None
        self._has_warned = False
        self._judged: list[tuple[str, int, int]] = []  # prompts, correct and judged completions of the batch at hand
        self._tokens = 0  # that this process has generated for the batch at hand

    @property
    def is_on(self) -> bool:
        """Tell whether batches are filled by this feature."""
        return bool(self.trainer.args.dynamic_sampling) or self.trainer.args.curriculum

    def on_trainer_built(self) -> None:
        """Set up the stream of prompts.

        Raises:
            `InputError`: Too few prompts, or a file of pass rates that does not fit them.
        """
        trainer = self.trainer
        args = trainer.args
        if not self.is_on:
            return
        # Environments read other columns than the prompt.
        has_environments = trainer.turns.factory is not None
        self.stream = PromptStream(
            trainer.training_examples, args.seed, bool(args.shuffle_dataset), whole_rows=has_environments
        )
        if args.curriculum:
            self._rule = CorrectnessRule(trainer.reward_func_names, args.correct_reward, args.correct_threshold)
        prompts_per_batch = args.generation_batch_size // args.num_generations
        dataset = self.stream.dataset
        cap = prompts_per_batch * args.max_sampling_rounds
        if isinstance(dataset, Dataset) and len(dataset) < cap:
            got = f"{args.max_sampling_rounds} with {len(dataset)} rows of training data"
            remedy = (
                f"A batch takes {prompts_per_batch} rows, none of them twice: set at most "
                f"{len(dataset) // prompts_per_batch}, or add rows."
            )
            raise InputError("max_sampling_rounds", got, f"at least {cap} rows", remedy)
        if args.prior_pass_rates:
            self._take_prior(user_path(args.prior_pass_rates))

    def _take_prior(self, path: Path) -> None:
        """Take in pass rates from before the run, if they are of these prompts."""
        rates = read_pass_rates(path)
        self.pass_rates.take_prior(rates)
        # Rates of other prompts do nothing but move the mean. `None`: a stream, whose prompts are not known yet.
        matching_prompts = self.stream.count_known(rates)
        if matching_prompts == 0:
            remedy = (
                "Prompts are matched by a hash of what the model sees: score completions of this dataset, with the "
                "same prompt_template and system_prompt."
            )
            got = f"{path}, which has none of the prompts"
            raise InputError("prior_pass_rates", got, "pass rates of the same prompts", remedy)
        if matching_prompts:
            message = "prior_pass_rates: %s has %d prompts, and knows %d training prompts."
            logger.info(message, path, len(rates), matching_prompts)

    # A generation batch

    def on_credit(self, batch: CreditedBatch) -> None:
        self._credited = batch

    def collecting(self, inputs: list[DatasetRow], generate: Generate) -> Rollouts:
        """Make a generation batch of K groups. Of a stored dataset only the number of `inputs` counts.

        Advantages carry the weights; those of groups that are missing are 0.
        """
        if not (self.trainer.model.training and self.is_on):
            return generate(inputs)
        args = self.trainer.args
        # One row per group, in the order of the processes: the same prompts on all of them.
        examples = self.trainer.gathered(list(inputs))[:: args.num_generations]
        num_groups = len(examples)
        cap = num_groups * args.max_sampling_rounds
        prompts = self.stream.batch(self.batches, examples)
        drawn: list[Draw] = []
        rounds: list[Rollouts] = []
        missing = num_groups
        while missing > 0 and len(drawn) < cap:
            fresh = self._draw(prompts, drawn, self._round_size(missing), cap)
            if fresh:
                rounds.append(self._run_round(fresh, len(rounds), generate))
            missing = num_groups - sum(map(self._is_selected, drawn))
        # Nothing was kept up to the cap. TRL needs rows all the same: these get advantages of 0.
        if not rounds:
            rounds.append(self._run_round([Draw(examples[0], "")], 0, generate))
        # The draws behind the K-th selected one do not count: their completions are dropped.
        selection = select_groups(
            [self._is_selected(draw) for draw in drawn],
            num_groups,
            cap,
            [draw.probability for draw in drawn],
            mean_over_live=args.dynamic_sampling == "dapo",
        )
        self.batches += 1
        self._log(drawn, selection, len(rounds), num_groups)
        return self._batch(rounds, drawn, selection, len(inputs))

    @property
    def _ranks(self) -> int:
        return self.trainer.accelerator.num_processes

    def _is_selected(self, draw: Draw) -> bool:
        return draw.place is not None and (draw.live or not self.trainer.args.dynamic_sampling)

    def _round_size(self, missing: int) -> int:
        """Return the number of groups to generate for the missing ones, such that every process gets as many rows."""
        groups = missing
        if self.trainer.args.dynamic_sampling and self.live_share is not None:
            groups = math.ceil(missing / max(self.live_share, 0.1))  # at most ten times the missing groups
        return math.ceil(groups / self._unit) * self._unit

    @property
    def _unit(self) -> int:
        """Groups of which a multiple gives every process as many rows."""
        return self._ranks // math.gcd(self._ranks, self.trainer.args.num_generations)

    def _draw(
        self,
        prompts: Iterator[DatasetRow],
        drawn: list[Draw],
        groups: int,
        cap: int,
    ) -> list[Draw]:
        """Draw until enough prompts are kept for a round, or the cap is reached."""
        args = self.trainer.args
        fresh = []
        while len(fresh) < groups and len(drawn) < cap:
            example = next(prompts, None)
            if example is None:
                raise InputError("train_dataset", "a stream that has ended", "one that can be read again", "Check it.")
            draw = Draw(example, self.stream.key(example))
            if args.curriculum:
                draw.estimate = self.pass_rates.estimate(draw.key)
                draw.probability = keep_probability(draw.estimate, args.curriculum_q_min)
            # A generator per draw: all ranks decide alike, and a resumed run as the first one did.
            chance = random.Random(f"{args.seed} {self.batches} {len(drawn)}")
            if chance.random() < draw.probability:
                fresh.append(draw)
            drawn.append(draw)
        return fresh

    def _run_round(self, fresh: list[Draw], number: int, generate: Generate) -> Rollouts:
        """Run one round: completions, rewards and advantages of the kept prompts."""
        size = self.trainer.args.num_generations
        # At the cap a round may be smaller. Copies of its last prompt, which nobody takes, fill it up.
        filled = fresh + [fresh[-1]] * (-len(fresh) % self._unit)
        rows = []
        for draw in filled:
            rows += [draw.example] * size
        share = len(rows) // self._ranks
        rank = self.trainer.accelerator.process_index
        # Copies: TRL and the reward functions may write into the rows of a group, which are one object here.
        rollouts = generate(copy.deepcopy(rows[rank * share : (rank + 1) * share]))
        # Rows are exchanged between processes, which has to know how to cut each tensor.
        unknown = unknown_keys(rollouts)
        if unknown:
            remedy = "Switch dynamic_sampling and curriculum off for images."
            raise InputError("dynamic_sampling", f"a batch with {', '.join(unknown)}", "text only", remedy)
        # Advantages of exactly 0, in every token, are those of a group of equal rewards.
        has_advantage = (rollouts["advantages"] != 0).view(share, -1).any(dim=1)
        has_signal = self.trainer.gathered(has_advantage.tolist())
        correct = self._correct() or [None] * len(has_signal)
        rewards = []
        if self._credited:
            rewards = self._credited.rewards.view(-1, size).nanmean(dim=1).tolist()
        for i, draw in enumerate(fresh):
            group = slice(i * size, (i + 1) * size)
            draw.place = (number, i)
            draw.live = any(has_signal[group])
            if rewards:
                draw.reward = rewards[i]
            judged = [verdict for verdict in correct[group] if verdict is not None]
            if judged:
                self._judged.append((draw.key, sum(judged), len(judged)))
        self._tokens += int(trained_mask(rollouts).sum())
        live = sum(draw.live for draw in fresh) / len(fresh)
        if self.live_share is not None:
            live = 0.8 * self.live_share + 0.2 * live
        self.live_share = live
        return rollouts

    def _correct(self) -> list[bool | None] | None:
        """Judge the newest round's completions, over all ranks; `None` without a curriculum."""
        batch = self._credited
        if self._rule is None or batch is None:
            return None
        correct = self._rule.judge(batch.scored.rewards_per_func[:, self._rule.index].tolist())
        if correct is None:
            got = f"rewards of {self._rule.name!r} other than 0 and 1"
            remedy = "Set correct_threshold (and correct_reward, for another reward), or switch curriculum off."
            raise InputError("curriculum", got, "pass or fail", remedy)
        return correct

    # From rounds to a batch

    def _batch(
        self,
        rounds: list[Rollouts],
        drawn: list[Draw],
        selection: Selection,
        rows: int,
    ) -> Rollouts:
        """Return the rows of the selected groups, then of others with advantages of 0 for groups that are missing."""
        size = self.trainer.args.num_generations
        rank = self.trainer.accelerator.process_index
        # Round and group of each selected draw, then of others that fill the batch with weights of 0.
        chosen = [drawn[i].place for i in selection.draws]
        weights = list(selection.weights)
        spare = iter([draw.place for draw in drawn if draw.place is not None and draw.place not in chosen])
        while len(chosen) < rows * self._ranks // size:
            last = chosen[-1] if chosen else (0, 0)
            chosen.append(next(spare, last))
            weights.append(0.0)
        # Each process contributes the rows that it has generated; sorted, they are the same batch on all of them.
        rows_of_rank: list[tuple[int, dict[str, torch.Tensor]]] = []
        for place, (group, weight) in enumerate(zip(chosen, weights, strict=True)):
            number, index = group or (0, 0)
            share = len(rounds[number]["completion_ids"])  # rows of each process
            for member in range(size):
                # Rows of a round stand in the order of the processes.
                holder, position = divmod(index * size + member, share)
                if holder == rank:
                    row = row_of(rounds[number], position)
                    row["advantages"] = row["advantages"] * weight
                    rows_of_rank.append((place * size + member, row))
        ordered = sorted(self.trainer.gathered(rows_of_rank), key=itemgetter(0))
        of_this_rank = [row for _, row in ordered[rank * rows : (rank + 1) * rows]]
        first = rounds[0]
        batch = joined_rows(of_this_rank, self.trainer.pad_token_id, first["completion_ids"].device)
        if "num_items_in_batch" in first:
            batch["num_items_in_batch"] = first["num_items_in_batch"]
        return batch

    # Log and checkpoints

    def _log(
        self,
        drawn: list[Draw],
        selection: Selection,
        rounds: int,
        num_groups: int,
    ) -> None:
        """Log metrics of a batch, and update pass rates for the next one."""
        # Only now: estimates that change while prompts are drawn would make a draw depend on the ones before it.
        for key, correct, scored in self._judged:
            self.pass_rates.update(key, correct, scored)
        self._judged.clear()
        tokens = self._tokens * self._ranks  # what is logged is the mean over ranks: here, the sum
        dapo = self.trainer.args.dynamic_sampling == "dapo"
        metrics = sampling_metrics(drawn, selection, rounds=rounds, tokens=tokens, dapo=dapo)
        self._tokens = 0
        if self.trainer.args.curriculum:
            metrics["sampling/pass_rate_estimate"] = self.pass_rates.mean
        self.trainer.log_batch({name: [float(value)] for name, value in metrics.items()}, {})
        if selection.capped and not self._has_warned:
            self._has_warned = True
            logger.warning(cap_warning(drawn, num_groups, self.trainer.args.max_sampling_rounds))

    def state_dict(self) -> dict[str, Any] | None:
        if not self.is_on:
            return None
        return {
            "position": self.stream.position,
            "batches": self.batches,
            "live_share": self.live_share,
            "pass_rates": self.pass_rates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if not self.is_on:
            return
        if state is None:
            logger.warning(
                "The checkpoint holds no sampling state: pass rates and the stream of prompts start from scratch."
            )
            return
        self.stream.position = state["position"]
        self.batches = state["batches"]
        self.live_share = state["live_share"]
        self.pass_rates.load_state_dict(state["pass_rates"])
