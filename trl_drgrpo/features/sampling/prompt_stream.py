"""Prompts beyond those that the dataloader brings: the training set in an order of its own, without an end."""

import itertools
import json
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from trl_drgrpo.rewards.text import prompt_key

_LOOKED_UP = 1000  # examples
_MOST_REPEATS = 100_000  # examples of a stream in a row that bring nothing new
_ANOTHER_ORDER = 7919  # added to the seed, so that this order is not the dataloader's


class PromptStream:
    """The examples of a dataset, over and over; every process gets the same ones.

    Args:
        dataset (`Dataset` or `IterableDataset`): The training set.
        seed (`int`): Of the run.
        shuffle (`bool`): Whether each pass has a new order.
        whole_rows (`bool`, *optional*, defaults to `False`): Whether examples with the same prompt are different ones
            if another column differs.

    Attributes:
        position (`int`): Examples taken so far. Set it to go on from there.
    """

    def __init__(self, dataset: Dataset | IterableDataset, seed: int, shuffle: bool, whole_rows: bool = False):
        self.dataset, self.seed, self.shuffle, self.whole_rows = dataset, seed, shuffle, whole_rows
        self.position = 0
        self._read: tuple[int, Iterator[Any]] = (-1, iter(()))  # the position that the iterator of a stream stands at
        self._order: tuple[int, list[int]] = (-1, [])

    def __next__(self) -> dict[str, Any]:
        example = self._stored() if isinstance(self.dataset, Dataset) else self._streamed()
        self.position += 1
        return example

    def __iter__(self) -> "PromptStream":
        return self

    def key(self, example: dict[str, Any]) -> str:
        """Key that tells examples apart, see [`prompt_key`]."""
        if self.whole_rows:
            return prompt_key(json.dumps(example, sort_keys=True, default=str))
        return prompt_key(example["prompt"])

    def different(self, first: Iterable[dict[str, Any]], seen: set[str]) -> Iterator[tuple[dict[str, Any], str]]:
        """Examples with their keys, each once: trying one again until it is mixed would make hard ones weigh more.

        Args:
            first (`Iterable[dict]`): These come before the stream's.
            seen (`set[str]`): Keys, filled as they come.

        Yields:
            `tuple[dict, str]`. Ends where a stream brings nothing new any more; the rows of a `Dataset` are not
            counted: ask [`count_different`] before.
        """
        repeats = 0
        for example in itertools.chain(first, self):
            if (key := self.key(example)) not in seen:
                seen.add(key)
                repeats = 0
                yield example, key
            elif (repeats := repeats + 1) == _MOST_REPEATS and not isinstance(self.dataset, Dataset):
                return

    def count_different(self, most: int) -> int | None:
        """Different examples, counted up to `most`; `None` of a stream, which is not read for it."""
        if not isinstance(self.dataset, Dataset):
            return None
        keys: set[str] = set()
        for example in self._columns_of_keys(self.dataset):
            keys.add(self.key(example))
            if len(keys) == most:
                break
        return len(keys)

    def count_known(self, keys: Container[str]) -> tuple[int, int] | None:
        """Counts examples with one of the keys, among some that are evenly spread, or among all if those have none.

        Args:
            keys (`Container[str]`): See [`key`].

        Returns:
            `tuple[int, int]` or `None`: Known ones, and looked up ones; `None` of a stream, which is not read for it.
        """
        if not isinstance(self.dataset, Dataset):
            return None
        dataset = self._columns_of_keys(self.dataset)
        some = dataset.select(range(0, len(dataset), -(-len(dataset) // _LOOKED_UP)))
        known = sum(self.key(example) in keys for example in some)
        if known:
            return known, len(some)
        known = sum(self.key(example) in keys for example in dataset)
        return known, len(dataset)

    def _columns_of_keys(self, dataset: Dataset) -> Any:
        return dataset if self.whole_rows else dataset.select_columns(["prompt"])

    def _stored(self) -> dict[str, Any]:
        epoch, index = divmod(self.position, len(self.dataset))  # type: ignore[arg-type]
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + _ANOTHER_ORDER + epoch)
            size = len(self.dataset)  # type: ignore[arg-type]
            order = torch.randperm(size, generator=generator).tolist() if self.shuffle else list(range(size))
            self._order = (epoch, order)
        return self.dataset[self._order[1][index]]  # type: ignore[index]

    def _streamed(self) -> dict[str, Any]:
        at, examples = self._read
        if at != self.position:  # the first one, or after a resume
            examples = itertools.islice(self._passes(), self.position, None)
        example = next(examples, None)
        if example is None:
            raise StopIteration
        self._read = (self.position + 1, examples)
        return example

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
