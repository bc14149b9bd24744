"""The prompts that generation batches draw: their order (`PromptStream`), and metrics and messages about a batch."""

import itertools
import json
import math
import random
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from trl_drgrpo.features.diagnostics.statistics import BUCKETS, bucket_index
from trl_drgrpo.objective.advantages import Selection
from trl_drgrpo.rewards.texts import prompt_key


@dataclass
class Draw:
    """A prompt that was drawn.

    Args:
        example (`dict`): Its row of the dataset.
        key (`str`): Its identity by content.
        estimate (`float`): Estimate of its pass rate before it was drawn; NaN without a curriculum.
        probability (`float`): Probability of being kept.
        place (`tuple[int, int]`, *optional*): Round and group in it; `None`: it was not kept.
        live (`bool`): Whether its group is live: its rewards differ.
        reward (`float`): Mean reward of its group; NaN = unscorable, or not generated.
    """

    example: dict[str, Any]
    key: str
    estimate: float = math.nan
    probability: float = 1.0
    place: tuple[int, int] | None = None
    live: bool = False
    reward: float = math.nan


def sampling_metrics(
    drawn: Sequence[Draw],
    selection: Selection,
    *,
    rounds: int,
    tokens: int,
    dapo: bool = False,
) -> dict[str, float]:
    """Return the metrics of a batch.

    Args:
        drawn (`Sequence[Draw]`): All draws.
        selection ([`Selection`]): The draws that are trained on.
        rounds (`int`): Rounds of generation.
        tokens (`int`): Generated tokens.
        dapo (`bool`, *optional*, defaults to `False`): Whether the weights are DAPO's.

    Returns:
        `dict[str, float]`: By name; without those that have nothing to be computed from.
    """
    generated = [draw for draw in drawn if draw.place is not None]
    live = sum(draw.live for draw in generated)
    trained = len(selection.draws)
    weights = selection.weights
    metrics: dict[str, float] = {
        "sampling/draws": len(drawn),
        "sampling/groups_generated": len(generated),
        "sampling/groups_live": live,
        "sampling/groups_trained": trained,
        "sampling/groups_dropped": live - sum(drawn[i].live for i in selection.draws),
        "sampling/rounds": rounds,
        "sampling/capped_frac": float(selection.capped),
    }
    if live:
        metrics["sampling/tokens_per_live_group"] = tokens / live
    if weights:
        metrics["sampling/weight_mean"] = sum(weights) / len(weights)
        metrics["sampling/weight_max"] = max(weights)
        metrics["sampling/effective_groups"] = sum(weights) ** 2 / sum(weight * weight for weight in weights)
    if dapo:
        # DAPO's mean over live groups multiplies the gradient by this, relative to the unbiased weight
        # (`select_groups`). The draw that filled the batch decided where to stop, so it does not count.
        last = int(not selection.capped)
        if trained > last:
            metrics["sampling/dapo_factor"] = 1 / ((trained - last) / (selection.drawn - last))
    # "" is over all draws, the others over those of one difficulty.
    probabilities: dict[str, list[float]] = {}
    for draw in drawn:
        if not math.isnan(draw.estimate):
            bucket = f"/{BUCKETS[bucket_index(draw.estimate)]}"
            probabilities.setdefault("", []).append(draw.probability)
            probabilities.setdefault(bucket, []).append(draw.probability)
    for bucket, of_bucket in probabilities.items():
        metrics[f"sampling/keep_probability{bucket}"] = sum(of_bucket) / len(of_bucket)
    return metrics


def cap_warning(drawn: Sequence[Draw], num_groups: int, rounds: int) -> str:
    """Return the message for a cap reached before a batch is full.

    Args:
        drawn (`Sequence[Draw]`): All draws.
        num_groups (`int`): Groups of a batch.
        rounds (`int`): `max_sampling_rounds`.
    """
    generated = [draw for draw in drawn if draw.place is not None]
    live = sum(draw.live for draw in generated)
    # The rewards of dead groups tell too hard prompts from too easy ones.
    rewards = [draw.reward for draw in generated if not draw.live and not math.isnan(draw.reward)]
    dead_groups = ""
    if rewards:
        highest = max(rewards)
        share = rewards.count(highest) / len(rewards)
        from_to = f"rewards from {min(rewards):g} to {highest:g}"
        dead_groups = f" Dead groups: {from_to}, {share:.0%} of them at the highest."
    return (
        f"Sampling: {live} of {num_groups} groups were live after the "
        f"{num_groups * rounds} prompts that max_sampling_rounds={rounds} allows; the step trains on those."
        f"{dead_groups} Use prompts of another difficulty, or raise num_generations. "
        "Shown once; sampling/capped_frac counts."
    )


_ANOTHER_ORDER = 7919  # added to the seed, so that this order is not the dataloader's


class PromptStream:
    """The examples of a dataset, batch by batch; every process gets the same ones.

    Args:
        dataset (`Dataset` or `IterableDataset`): The training set.
        seed (`int`): Of the run.
        shuffle (`bool`): Whether each pass has a new order. Without it rows come in the dataset's order.
        whole_rows (`bool`, *optional*, defaults to `False`): Whether examples with the same prompt have different keys
            if another column differs.

    Attributes:
        position (`int`): Examples taken so far from an `IterableDataset`. Set it to go on from there.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        seed: int,
        shuffle: bool,
        whole_rows: bool = False,
    ):
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.whole_rows = whole_rows
        self.position = 0
        self._read: tuple[int, Iterator[Any]] = (-1, iter(()))  # a stream's position, and its iterator there
        self._order: tuple[int, list[int]] = (-1, [])  # the number of a pass, and its order

    def key(self, example: dict[str, Any]) -> str:
        """Return the key of an example's pass rate, see [`prompt_key`]."""
        if self.whole_rows:
            return prompt_key(json.dumps(example, sort_keys=True, default=str))
        return prompt_key(example["prompt"])

    def batch(self, number: int, first: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Return the examples that a batch may draw, in order.

        Args:
            number (`int`): Batches before this one.
            first (`Sequence[dict]`): Examples from the dataloader: an `IterableDataset`'s come first. For a `Dataset`
                only their number counts: its first examples come from a pass of its own, whose indices are known.

        Yields:
            `dict`. Each row of a `Dataset` once; an `IterableDataset` begins again where it ends.
        """
        if isinstance(self.dataset, Dataset):
            rows = self._rows(number, len(first), len(self.dataset))
            return (self.dataset[row] for row in rows)
        return itertools.chain(first, self._streamed())

    def count_known(self, keys: Container[str]) -> int | None:
        """Count the examples with one of the keys; `None` for a stream, which is not read for this."""
        if not isinstance(self.dataset, Dataset):
            return None
        dataset: Any = self.dataset
        if not self.whole_rows:
            dataset = dataset.select_columns(["prompt"])  # others may hold images, which would be decoded for nothing
        return sum(self.key(example) in keys for example in dataset)

    def _rows(self, number: int, first: int, size: int) -> Iterator[int]:
        """Yield the indices of a batch's rows: `first` rows of a pass, then all others.

        As in TRL, a pass leaves out its last rows where they are fewer than a batch.
        """
        # Which pass over the data the batch falls into, and where in it.
        number_of_pass, place = divmod(number, max(1, size // first))
        start = place * first
        if not self.shuffle:
            yield from ((start + i) % size for i in range(size))
            return
        if self._order[0] != number_of_pass:
            generator = torch.Generator().manual_seed(self.seed + _ANOTHER_ORDER + number_of_pass)
            self._order = (number_of_pass, torch.randperm(size, generator=generator).tolist())
        rows = self._order[1][start : start + first]
        yield from rows
        # Further rows are drawn at random, seeded by the batch, so that a resumed run draws the same ones.
        drawn_rows = set(rows)
        chance = random.Random(f"{self.seed} rows of batch {number}")
        while len(drawn_rows) < size:
            row = chance.randrange(size)
            if row not in drawn_rows:
                drawn_rows.add(row)
                yield row

    def _streamed(self) -> Iterator[dict[str, Any]]:
        """Yield a stream's examples from the position on."""
        position, examples = self._read
        if position != self.position:  # the first time, or after a resume: examples up to there are read again
            examples = itertools.islice(self._passes(), self.position, None)
        for example in examples:
            self.position += 1
            self._read = (self.position, examples)
            yield example

    def _passes(self) -> Iterator[Any]:
        """Yield a stream's examples, pass after pass; ends at an empty pass."""
        # A new order for each pass, by a seed that a resumed run computes, too.
        for epoch in itertools.count():
            source = self.dataset
            if self.shuffle:
                source = source.shuffle(seed=self.seed + _ANOTHER_ORDER + epoch)
            is_empty = True
            for example in source:
                is_empty = False
                yield example
            if is_empty:
                return
