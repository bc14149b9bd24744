"""Prompts beyond those that the dataloader brings: the training set in an order of its own, without an end."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset, IterableDataset

_ANOTHER_ORDER = 7919  # added to the seed, so that this order is not the dataloader's


class PromptStream:
    """The examples of a dataset, over and over; every process gets the same ones.

    Args:
        dataset (`Dataset` or `IterableDataset`): The training set.
        seed (`int`): Of the run.
        shuffle (`bool`): Whether each pass has a new order.

    Attributes:
        position (`int`): Examples taken so far. Set it to go on from there.
    """

    def __init__(self, dataset: Dataset | IterableDataset, seed: int, shuffle: bool):
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.position = 0
        self._read: tuple[int, Iterator[Any]] = (-1, iter(()))  # the position that the iterator of a stream stands at
        self._order: tuple[int, list[int]] = (-1, [])

    def __next__(self) -> dict[str, Any]:
        example = self._stored() if isinstance(self.dataset, Dataset) else self._streamed()
        self.position += 1
        return example

    def __iter__(self) -> "PromptStream":
        return self

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
