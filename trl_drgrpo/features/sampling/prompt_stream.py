"""The rows that a generation batch may draw, in an order that makes its weights unbiased.

`objective/group_selection.py` needs draws that could as well have come in any other order. So the first ones are those
of a pass over the dataset, and all others of the batch are drawn anew, uniformly, from the rows that the batch has not
drawn yet. A row is known by its index: rows with one prompt, or with equal columns, are different rows.
"""

import itertools
import json
import random
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from trl_drgrpo.rewards.text import prompt_key

_LOOKED_UP = 1000  # examples
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

    def __init__(self, dataset: Dataset | IterableDataset, seed: int, shuffle: bool, whole_rows: bool = False):
        self.dataset, self.seed, self.shuffle, self.whole_rows = dataset, seed, shuffle, whole_rows
        self.position = 0
        self._read: tuple[int, Iterator[Any]] = (-1, iter(()))  # the position that the iterator of a stream stands at
        self._order: tuple[int, list[int]] = (-1, [])

    def key(self, example: dict[str, Any]) -> str:
        """Key of an example's pass rate, see [`prompt_key`]."""
        if self.whole_rows:
            return prompt_key(json.dumps(example, sort_keys=True, default=str))
        return prompt_key(example["prompt"])

    def batch(self, number: int, first: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The examples that a batch may draw, in order.

        Args:
            number (`int`): Batches before this one.
            first (`Sequence[dict]`): What the dataloader brings: an `IterableDataset`'s first examples. Of a `Dataset`
                their number alone counts: the first ones are those of a pass of its own, whose indices are known.

        Yields:
            `dict`. Each row of a `Dataset` once; an `IterableDataset` begins again where it ends.
        """
        if isinstance(self.dataset, Dataset):
            return (self.dataset[row] for row in self._rows(number, len(first), len(self.dataset)))
        return itertools.chain(first, self._streamed())

    def count_known(self, keys: Container[str]) -> tuple[int, int] | None:
        """Counts examples with one of the keys, among some that are evenly spread, or among all if those have none.

        Args:
            keys (`Container[str]`): See [`key`].

        Returns:
            `tuple[int, int]` or `None`: Known ones, and looked up ones; `None` of a stream, which is not read for it.
        """
        if not isinstance(self.dataset, Dataset):
            return None
        dataset: Any = self.dataset if self.whole_rows else self.dataset.select_columns(["prompt"])
        some = dataset.select(range(0, len(dataset), -(-len(dataset) // _LOOKED_UP)))
        known = sum(self.key(example) in keys for example in some)
        if known:
            return known, len(some)
        known = sum(self.key(example) in keys for example in dataset)
        return known, len(dataset)

    def _rows(self, number: int, first: int, size: int) -> Iterator[int]:
        """Indices of a batch's rows: `first` of a pass, then all others. As in TRL a pass leaves out what is less than
        a batch."""
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
        seen, chance = set(rows), random.Random(f"{self.seed} rows of batch {number}")
        while len(seen) < size:
            if (row := chance.randrange(size)) not in seen:
                seen.add(row)
                yield row

    def _streamed(self) -> Iterator[dict[str, Any]]:
        at, examples = self._read
        if at != self.position:  # the first one, or after a resume
            examples = itertools.islice(self._passes(), self.position, None)
        for example in examples:
            self.position += 1
            self._read = (self.position, examples)
            yield example

    def _passes(self) -> Iterator[Any]:
        for epoch in itertools.count():
            source: Any = self.dataset
            if self.shuffle:
                source = source.shuffle(seed=self.seed + _ANOTHER_ORDER + epoch)
            empty = True
            for example in source:
                empty = False
                yield example
            if empty:
                return
