"""Rollouts that fork: some completions of a group go on from a common prefix.

Of each group G / b^D parents are written to their end. Each is cut behind a step, and b - 1 further completions are
sampled from there; with D > 1 all of these are cut again, later. The first branch is what the parent wrote behind its
cut. A parent that has no place to be cut at stands in the group once for each of its leaves.

Whether a cut lies behind a step may depend on what was written up to there, never on what follows: a branch that was
chosen for how it ended would bias the gradient. So a step that makes the rule speak is in front of the cut, not behind
it, and the parent's own continuation is a sample like the others.

All G rows are ordinary rows. Their advantages compare siblings (`objective/fork_advantages.py`); in training the fast
path runs what they share once.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.rewards.texts import Text
from trl_drgrpo.upstream.batches import CreditedBatch, DatasetRow, ScoredBatch
from trl_drgrpo.upstream.hooks import Completions, Feature, Generate

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.step_scorer import StepScorer
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

logger = logging.getLogger(__name__)


def boundaries(step_ends: Sequence[int], length: int) -> list[int]:
    """Return the tokens of a row before each place where it can be cut: behind a step, and not at the row's end.

    Args:
        step_ends (`Sequence[int]`): Inclusive last token of each step.
        length (`int`): Tokens of the row.

    Example:

    ```python
    >>> boundaries([3, 7, 9], 10)
    [4, 8]

    ```
    """
    return [end + 1 for end in step_ends if end + 1 < length]


def drawn_places(seed: str, depth: int, expected_length: float) -> list[float]:
    """Draw places to cut at, before anything is written: `D` numbers of tokens, uniform up to a length, ascending.

    Args:
        seed (`str`): Of this draw.
        depth (`int`): D.
        expected_length (`float`): Mean length of earlier completions, in tokens.
    """
    # Seeded by text: the same places on every process and after a resume.
    generator = random.Random(seed)
    return sorted(generator.uniform(0, expected_length) for _ in range(depth))


def first_above(
    places: Sequence[int],
    measures: Sequence[float | None],
    threshold: float,
    after: int,
) -> int | None:
    """Return the first boundary behind an earlier cut that measures more than the threshold; `None` without one.

    Example:

    ```python
    >>> first_above([4, 8, 15], [0.9, 0.2, 0.7], threshold=0.5, after=4)
    15

    ```
    """
    for place, measure in zip(places, measures, strict=False):  # a step that ends the row has no place
        if place > after and measure is not None and measure > threshold:
            return place
    return None


def step_means(values: Sequence[float], step_ends: Sequence[int]) -> list[float]:
    """Return the mean of a row's token values over each of its steps, which `step_ends` (inclusive) cut."""
    means = []
    start = 0
    for end in step_ends:
        means.append(sum(values[start : end + 1]) / (end + 1 - start))
        start = end + 1
    return means


_Row = tuple[list[int], list[float]]  # token ids, and log-probabilities of some backends, else none


def _rows(completions: Completions) -> list[_Row]:
    ids, log_probs = completions
    return list(zip(ids, log_probs or [[]] * len(ids), strict=True))


class ForkedRollouts(Feature):
    """Samples groups that fork.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.
        segmenter ([`StepSegmenter`]): Cuts completions into steps.

    Attributes:
        newest ([`Forks`], *optional*): Of this rank's rows of the newest batch; `None` where it did not fork.
    """

    def __init__(self, trainer: "TrainerProtocol", segmenter: StepSegmenter):
        super().__init__(trainer)
        self.segmenter = segmenter
        self.newest: Forks | None = None
        self._dataset_rows: Sequence[DatasetRow] = ()  # this rank's, of the batch at hand
        self.batches = 0  # forked so far, rounds of dynamic sampling counted: the position of the random choices
        self.mean_length: float | None = None  # of completions of earlier batches, in tokens; newer ones weigh more
        self.batch_lengths: list[int] = []  # of the parents of all ranks, over the rounds of the batch at hand
        self._noted: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        """Tell whether groups fork in training."""
        return self.trainer.args.forks > 1

    @property
    def leaves(self) -> int:
        """Rows of one parent."""
        return self.trainer.args.forks**self.trainer.args.fork_depth

    @property
    def of_all_ranks(self) -> Forks | None:
        """Forks of all ranks' rows in the newest batch; all ranks ask.

        Raises:
            `InputError`: It has images.
        """
        if not (self.trainer.model.training and self.is_on):
            return None
        if self.newest is None:
            raise InputError("forks", "prompts with images", "prompts of text", "Remove forks to train on images.")
        return Forks(self.newest.branches, self.trainer.gathered(list(self.newest.cuts)))

    # A generation batch

    @contextmanager
    def making_batch(self) -> Iterator[None]:
        """Takes in the completion lengths behind the batch: a mean that moved between its rounds would bias it."""
        self.batch_lengths = []
        yield
        if self.batch_lengths:
            mean = sum(self.batch_lengths) / len(self.batch_lengths)
            if self.mean_length is not None:
                mean = 0.8 * self.mean_length + 0.2 * mean
            self.mean_length = mean

    def on_rows(self, rows: Sequence[DatasetRow]) -> None:
        self._dataset_rows = rows

    def rolling_out(self) -> AbstractContextManager[None]:
        self.newest = None
        return nullcontext()

    def completing(self, prompt_ids: list[list[int]], num_generations: int, generate: Generate) -> Completions:
        """Sample completions of this rank's rows; leaves of a node are consecutive."""
        if not (self.trainer.model.training and self.is_on):
            return generate(prompt_ids, num_generations)
        args = self.trainer.args
        prompts = prompt_ids[:: self.leaves]
        parents = generate(prompts, num_generations // self.leaves)
        rows = _rows(parents)
        cuts: list[list[int]] = [[] for _ in rows]
        parent_lengths = [len(ids) for ids, _ in rows]
        sampled_tokens = sum(parent_lengths)
        # At each level every row becomes b rows: 2 parents with b = 2 and D = 2 become 4 rows, then 8.
        for level in range(args.fork_depth):
            new_cuts = self._cuts(prompts, [ids for ids, _ in rows], cuts, level)
            branches = self._continued(prompts, rows, new_cuts, generate)
            next_prompts: list[list[int]] = []
            next_cuts: list[list[int]] = []
            next_rows: list[_Row] = []
            for i, cut in enumerate(new_cuts):
                if cut is None:
                    end = len(rows[i][0])
                else:
                    end = cut
                    sampled_tokens += sum(len(ids) - cut for ids, _ in branches[i][1:])
                next_prompts += [prompts[i]] * args.forks
                next_cuts += [[*cuts[i], end]] * args.forks
                next_rows += branches[i]
            prompts = next_prompts
            cuts = next_cuts
            rows = next_rows
        completions = [ids for ids, _ in rows]
        log_probs = None
        if parents[1] is not None:  # this backend returns them
            log_probs = [values for _, values in rows]
        self.newest = Forks(args.forks, cuts)
        self._note(self.newest, parent_lengths, sampled_tokens, completions)
        return completions, log_probs

    def _cuts(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        earlier_cuts: list[list[int]],
        level: int,
    ) -> list[int | None]:
        """Return the tokens before the next cut of each row; `None` without one."""
        args = self.trainer.args
        tokenizer = self.trainer.text_tokenizer
        ends = [self.segmenter(ids, tokenizer).ends for ids in completions]
        self.segmenter.warn_of_looking_ahead("forks", completions, tokenizer)
        places = [boundaries(row, len(ids)) for row, ids in zip(ends, completions, strict=True)]
        measures: Sequence[Sequence[float | None]] = places  # drawn: the first place behind the number that was drawn
        if args.fork_at == "entropy":
            entropies = self.trainer.completion_entropies(prompts, completions)
            measures = [step_means(row, row_ends) for row, row_ends in zip(entropies, ends, strict=True)]
        elif args.fork_at != "drawn":
            measures = self._doubts(completions)
        rows_of_parent = args.forks**level  # so far
        first_parent = self.trainer.accelerator.process_index * len(prompts) // rows_of_parent
        expected_length = self.mean_length or 0.0  # 0 in the first batch, which is cut behind its first step
        cuts = []
        for i, row_cuts in enumerate(earlier_cuts):
            threshold = args.fork_threshold or 0.0
            if args.fork_at == "drawn":
                # By parent: its rows share a prefix, so they are cut at places of one draw.
                seed = f"{args.seed} fork {self.batches} {first_parent + i // rows_of_parent}"
                threshold = drawn_places(seed, args.fork_depth, expected_length)[level]
            last_cut = row_cuts[-1] if row_cuts else 0
            cuts.append(first_above(places[i], measures[i], threshold, last_cut))
        return cuts

    def _doubts(self, completions: list[list[int]]) -> list[list[float | None]]:
        """Return `1 - score` of each step."""
        tokenizer = self.trainer.text_tokenizer
        # The step scorer gets completions as in a batch, with the row of the data that each belongs to.
        rows: list[DatasetRow] = []
        prompts: list[Text] = []
        texts: list[Text] = []
        leaves = len(self._dataset_rows) // len(completions)  # that a completion has, at this level
        for i, text in enumerate(tokenizer.batch_decode(completions, skip_special_tokens=True)):
            row = self._dataset_rows[i * leaves]
            rows.append(row)
            prompts.append(row["prompt"])
            if isinstance(row["prompt"], str):
                texts.append(text)
            else:  # a conversation, of which the completion is the last message
                texts.append([{"role": "assistant", "content": text}])
        batch = ScoredBatch(torch.empty(len(rows), 0), rows, prompts, texts, completions)
        scorer = cast("StepScorer", self.trainer.step_scorer)  # the checks before the run refuse doubt without one
        with self.trainer.scoring():
            scores, _, _ = scorer.score_batch(batch, None, tokenizer, self.trainer.state)
        doubts: list[list[float | None]] = []
        for row_scores in scores.rewards:
            doubts.append([None if score is None else 1.0 - score for score in row_scores])
        return doubts

    def _continued(
        self,
        prompts: list[list[int]],
        rows: list[_Row],
        cuts: list[int | None],
        generate: Generate,
    ) -> list[list[_Row]]:
        """Return the branches of each row, its own continuation first; a row without a cut is its own branches."""
        new_branches = self.trainer.args.forks - 1
        limit = self.trainer.args.max_completion_length
        # Until others are sampled, every branch is the row itself.
        branches = [[row] * (new_branches + 1) for row in rows]
        cut_rows = [(i, cut) for i, cut in enumerate(cuts) if cut is not None]
        # Every process has to ask for the same number of rows. A spare one has a token to go.
        spare = cut_rows[-1] if cut_rows else (0, max(0, len(rows[0][0]) - 1))
        most = max(self.trainer.gathered([len(cut_rows)]))
        starts: list[list[int]] = []
        limits: list[int] = []
        for i, cut in cut_rows + [spare] * (most - len(cut_rows)):
            prefix = prompts[i] + rows[i][0][:cut]
            starts += [prefix] * new_branches
            if limit is not None:
                limits += [limit - cut] * new_branches
        if not starts:
            return branches
        sampled = iter(_rows(generate(starts, new_branches, limits or None)))
        for i, cut in cut_rows:
            ids, log_probs = rows[i]
            for branch in range(1, new_branches + 1):
                new_ids, new_log_probs = next(sampled)
                whole_ids = ids[:cut] + new_ids
                whole_log_probs = log_probs[:cut] + new_log_probs
                # A backend may exceed its limits, see `Generate`.
                branches[i][branch] = (whole_ids[:limit], whole_log_probs[:limit])
        return branches

    # Log and checkpoints

    def _note(
        self,
        forks: Forks,
        parents: list[int],
        sampled: int,
        completions: list[list[int]],
    ) -> None:
        """Keep the numbers that metrics are made of, and how long completions are."""
        positions = []  # of the first cut, as a share of the completion
        for cuts, ids in zip(forks.cuts, completions, strict=True):
            if cuts[0] < len(ids):
                positions.append(cuts[0] / len(ids))
        self._noted = {
            "forks/cut_frac": len(positions) / len(completions),
            "forks/sampled_token_frac": sampled / max(1, sum(map(len, completions))),
        }
        if positions:
            self._noted["forks/cut_position"] = sum(positions) / len(positions)
        self.batch_lengths += self.trainer.gathered(list(parents))
        self.batches += 1

    def on_credit(self, batch: CreditedBatch) -> None:
        """Log the forks of a batch."""
        if not self._noted or batch.forks is None:
            return
        metrics = self._noted
        self._noted = {}
        advantages = batch.token_advantages.cpu()
        # Of the branches behind a last fork, the share that differs from its siblings.
        is_live = []
        for i, cuts in enumerate(batch.forks.cuts[batch.own_rows]):
            last_cut = cuts[-1]
            if last_cut < len(batch.scored.completion_ids[i]):
                is_live.append(bool(advantages[i, last_cut:].any()))
        if is_live:
            metrics["forks/live_frac"] = sum(is_live) / len(is_live)
        self.trainer.log_batch({name: [value] for name, value in metrics.items()}, {})

    def state_dict(self) -> dict[str, Any] | None:
        if not self.is_on:
            return None
        return {"batches": self.batches, "mean_length": self.mean_length}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.batches = state["batches"]
            self.mean_length = state["mean_length"]
        elif self.is_on:
            logger.warning("The checkpoint holds no forks: completion lengths are learned from scratch.")
