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
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.features.sampling.pass_rates import PassRates, read_pass_rates
from trl_drgrpo.features.sampling.prompt_stream import Draw, PromptStream, cap_warning, sampling_metrics
from trl_drgrpo.objective.advantages import Selection, keep_probability, select_groups
from trl_drgrpo.upstream.batches import OF_THE_BATCH, CreditedBatch, joined_rows, row_of, unknown_keys
from trl_drgrpo.upstream.hooks import Feature

logger = logging.getLogger(__name__)


class PromptSampling(Feature):
    """Fills generation batches with live groups, and prefers prompts whose groups are likely to be live.

    Attributes:
        stream ([`PromptStream`]): The rows that batches draw.
        pass_rates ([`PassRates`]): Estimates by prompt.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.pass_rates = PassRates()
        self.live_share: float | None = None  # of the generated groups, the newest the heaviest
        self.batches = 0  # complete ones; together with the draw's number they seed its random choice
        self._credited: CreditedBatch | None = None
        self._rule: CorrectnessRule | None = None
        self._has_warned = False
        # Of the batch at hand: prompts with their correct and judged completions, and this process's tokens.
        self._judged: list[tuple[str, int, int]] = []
        self._tokens = 0

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
        args = self.trainer.args
        if not self.is_on:
            return
        has_environments = trainer.environment_factories is not None  # they read other columns than the prompt
        self.stream = PromptStream(
            trainer.training_examples, args.seed, bool(trainer.shuffle_dataset), whole_rows=has_environments
        )
        if args.curriculum:
            self._rule = CorrectnessRule(trainer.reward_func_names, args.correct_reward, args.correct_threshold)
        prompts_per_batch = args.generation_batch_size // trainer.num_generations
        dataset = self.stream.dataset
        cap = prompts_per_batch * args.max_sampling_rounds
        if isinstance(dataset, Dataset) and len(dataset) < cap:
            got = f"{args.max_sampling_rounds} with {len(dataset)} rows of training data"
            remedy = f"set at most {len(dataset) // prompts_per_batch}, or add rows."
            remedy = f"A batch takes {prompts_per_batch} rows, none of them twice: {remedy}"
            raise InputError("max_sampling_rounds", got, f"at least {cap} rows", remedy)
        if args.prior_pass_rates:
            self._take_prior(user_path(args.prior_pass_rates))

    def _take_prior(self, path: Path) -> None:
        """Take in pass rates from before the run. Rates of other prompts only are refused."""
        rates = read_pass_rates(path)
        self.pass_rates.take_prior(rates)
        num_known = self.stream.count_known(rates)
        if num_known == 0:
            remedy = (
                "Prompts are matched by a hash of what the model sees: score completions of this dataset, with the "
                "same prompt_template and system_prompt."
            )
            got = f"{path}, which has none of the prompts"
            raise InputError("prior_pass_rates", got, "pass rates of the same prompts", remedy)
        if num_known:
            logger.info(
                "prior_pass_rates: %s has %d prompts, and knows %d training prompts.", path, len(rates), num_known
            )

    # A generation batch

    def on_credit(self, batch: CreditedBatch) -> None:
        self._credited = batch

    def collecting(
        self, inputs: list[dict[str, Any]], generate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Generate a batch of K groups, see [`Hooks`].

        For a stored dataset only the number of `inputs` counts. Advantages carry the weights; those of missing groups
        are 0.
        """
        if not (self.trainer.model.training and self.is_on):
            return generate(inputs)
        args = self.trainer.args
        size = self.trainer.num_generations
        examples = self.trainer.gathered(list(inputs))[::size]
        num_groups = len(examples)
        cap = num_groups * args.max_sampling_rounds
        prompts = self.stream.batch(self.batches, examples)
        drawn: list[Draw] = []
        rounds: list[dict[str, Any]] = []
        missing = num_groups
        while missing > 0 and len(drawn) < cap:
            # Groups to generate, such that about `missing` of them are live and every process gets as many rows.
            share = 1.0
            if args.dynamic_sampling and self.live_share is not None:
                share = max(self.live_share, 0.1)
            num_fresh = math.ceil(missing / share)
            num_fresh += -num_fresh % self._unit
            fresh = self._draw(prompts, drawn, num_fresh, cap)
            if fresh:
                rounds.append(self._run_round(fresh, len(rounds), generate))
            missing = num_groups - sum(map(self._is_selected, drawn))
        if not rounds:  # nothing was kept up to the cap: rows that do not train
            rounds.append(self._run_round([Draw(examples[0], "")], 0, generate))
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

    @property
    def _unit(self) -> int:
        """Smallest number of groups whose rows are shared equally among the processes."""
        return self._ranks // math.gcd(self._ranks, self.trainer.num_generations)

    def _draw(self, prompts: Iterator[Any], drawn: list[Draw], groups: int, cap: int) -> list[Draw]:
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
            # Seeded by the draw alone: all processes choose alike, and a resumed run as the first one did.
            if random.Random(f"{args.seed} {self.batches} {len(drawn)}").random() < draw.probability:
                fresh.append(draw)
            drawn.append(draw)
        return fresh

    def _run_round(self, fresh: list[Draw], number: int, generate: Callable) -> dict[str, Any]:
        """Run a round: completions, rewards and advantages of the kept prompts."""
        size = self.trainer.num_generations
        rows = []
        for draw in fresh:
            rows += [draw.example] * size
        # Where the cap cuts a round short, every process still needs as many rows; nobody takes these.
        rows += rows[-size:] * (-len(fresh) % self._unit)
        share = len(rows) // self._ranks
        rank = self.trainer.accelerator.process_index

        rollouts = generate(copy.deepcopy(rows[rank * share : (rank + 1) * share]))
        unknown = unknown_keys(rollouts)
        if unknown:
            remedy = "Switch dynamic_sampling and curriculum off for images."
            raise InputError("dynamic_sampling", f"a batch with {', '.join(unknown)}", "text only", remedy)
        # Advantages may be one per row or one per token.
        has_signal = self.trainer.gathered((rollouts["advantages"] != 0).view(share, -1).any(dim=1).tolist())
        correct: list[bool | None] = [None] * len(has_signal)
        rewards = [math.nan] * len(fresh)
        batch = self._credited  # of this round, over all ranks
        if batch is not None:
            rewards = batch.rewards.view(-1, size).nanmean(dim=1).tolist()
        if batch is not None and self._rule is not None:
            verdicts = self._rule.judge(batch.scored.rewards_per_func[:, self._rule.index].tolist())
            if verdicts is None:
                got = f"rewards of {self._rule.name!r} other than 0 and 1"
                remedy = "Set correct_threshold (and correct_reward, for another reward), or switch curriculum off."
                raise InputError("curriculum", got, "pass or fail", remedy)
            correct = verdicts
        for i, draw in enumerate(fresh):
            group = slice(i * size, (i + 1) * size)
            draw.place = (number, i)
            draw.live = any(has_signal[group])
            draw.reward = rewards[i]
            judged = [verdict for verdict in correct[group] if verdict is not None]
            if judged:
                self._judged.append((draw.key, sum(judged), len(judged)))
        written = rollouts["completion_mask"]
        if "tool_mask" in rollouts:  # tool results are in the completion, but were not generated
            written = written * rollouts["tool_mask"]
        self._tokens += int(written.sum())
        live = sum(draw.live for draw in fresh) / len(fresh)
        if self.live_share is None:
            self.live_share = live
        else:
            self.live_share = 0.8 * self.live_share + 0.2 * live
        return rollouts

    # From rounds to a batch

    def _batch(
        self, rounds: list[dict[str, Any]], drawn: list[Draw], selection: Selection, rows: int
    ) -> dict[str, Any]:
        """Return this process's rows of a batch: the selected groups, then others with advantages of 0 for missing
        groups."""
        size = self.trainer.num_generations
        rank = self.trainer.accelerator.process_index
        num_groups = rows * self._ranks // size
        chosen = [drawn[i].place for i in selection.draws]
        weights = [*selection.weights, *[0.0] * (num_groups - len(chosen))]
        # Groups in place of missing ones: those that were generated and not selected, then any.
        chosen += [draw.place for draw in drawn if draw.place is not None and draw.place not in chosen]
        if not chosen:
            chosen.append((0, 0))
        chosen += chosen[-1:] * (num_groups - len(chosen))
        # Each process weighs the rows that it generated; all get all of them, in the order of the batch.
        local_rows: list[tuple[int, dict[str, torch.Tensor]]] = []
        for place, (group, weight) in enumerate(zip(chosen, weights, strict=False)):
            number, index = group or (0, 0)
            share = len(rounds[number]["completion_ids"])  # rows of each process
            for member in range(size):
                holder, at = divmod(index * size + member, share)
                if holder == rank:
                    row = row_of(rounds[number], at)
                    row["advantages"] = row["advantages"] * weight
                    local_rows.append((place * size + member, row))
        batch_rows = [row for _, row in sorted(self.trainer.gathered(local_rows), key=lambda entry: entry[0])]
        first = rounds[0]
        batch: dict[str, Any] = joined_rows(
            batch_rows[rank * rows : (rank + 1) * rows],
            self.trainer.pad_token_id,
            first["completion_ids"].device,
        )
        return batch | {key: first[key] for key in OF_THE_BATCH if key in first}

    # Logs and state

    def _log(self, drawn: list[Draw], selection: Selection, rounds: int, num_groups: int) -> None:
        """Log the metrics of a batch, and update the pass rates for the next one."""
        for key, correct, scored in self._judged:
            self.pass_rates.update(key, correct, scored)
        self._judged.clear()
        tokens = self._tokens * self._ranks  # the mean over ranks is logged, which makes it the sum
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
