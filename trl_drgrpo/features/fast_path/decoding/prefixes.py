"""Keys and values that one generation leaves for the next: rows that begin like an earlier one do not run that again.

For rollouts that fork: a continuation begins with its parent's prompt and some of its tokens. What is held belongs to
one state of a model's weights; nothing here asks whether they have moved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from trl_drgrpo.features.fast_path.decoding.group_cache import GroupCache

KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, (H, columns, D)


@dataclass
class _Held:
    """Tokens, and their keys and values: the last columns of `prompt`, and `own` behind them. A layer whose window is
    shorter than the prompt has the last columns of it alone."""

    tokens: list[int]
    prompt: KeysAndValues
    prompt_length: int
    own: KeysAndValues | None = None

    def last(self, layer: int, end: int, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of up to `most` tokens before token `end`; `None` where some of them are not held."""
        first = max(0, end - most)
        held = min(self.prompt_length, self.prompt[layer][0].size(1))
        missing = self.prompt_length - held
        if first < missing:
            return None

        def columns(which: int) -> torch.Tensor:
            prompt = self.prompt[layer][which]
            parts = [prompt[:, prompt.size(1) - held :][:, first - missing : end - missing]]
            if self.own is not None:
                own = self.own[layer][which]
                parts.append(own[:, max(0, first - self.prompt_length) : max(0, end - self.prompt_length)])
            return torch.cat(parts, dim=1)

        return columns(0), columns(1)


class Prefixes:
    """Held prefixes. `add_prompts` and `add_rows` fill it from a [`GroupCache`], `begin` takes from it."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._newest: list[_Held] = []  # prompts of the generation that goes on

    def add_prompts(self, cache: GroupCache, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """The prompts of a cache that has just been made: `ids` and `mask` of shape `(P, L)`, padded left."""
        by_prompt = (len(ids), -1)
        states = [
            (layer.prompt_keys.transpose(1, 2).unflatten(0, by_prompt), layer.prompt_values.unflatten(0, by_prompt))
            for layer in cache.layers
        ]
        self._newest = []
        for number, tokens in enumerate(_unpadded(ids, mask)):
            prompt = [(keys[number], values[number]) for keys, values in states]
            self._newest.append(_Held(tokens, prompt, len(tokens)))
        self._held += self._newest

    def add_rows(self, cache: GroupCache, rows: list[int], written: torch.Tensor, copy: bool) -> None:
        """Rows of the batch that leave; `written`: `(n, t)`, all that the batch's rows have written. `copy`: their
        places will be taken."""
        for row in rows:
            slot = cache.grid.prompts[row], cache.grid.places[row]
            own: Any = [layer.written(*slot) for layer in cache.layers]
            if copy:
                own = [(keys.clone(), values.clone()) for keys, values in own]
            prompt = self._newest[cache.origin[slot[0]]]
            tokens = prompt.tokens + written[row, : own[0][0].size(1)].tolist()
            self._held.append(_Held(tokens, prompt.prompt, prompt.prompt_length, own))

    def begin(self, config: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[Any, int] | None:
        """A cache that the rows of `ids` may begin with, and how many of their last tokens are still to be run.

        Args:
            config: The model's.
            ids (`torch.Tensor` of shape `(U, L)`), mask: Prompts, padded left.

        Returns:
            `tuple[DynamicCache, int]`: Or `None` where some row begins with nothing that is held.
        """
        rows = _unpadded(ids, mask)
        missing = max(len(row) - min(self._in_common(row), len(row) - 1) for row in rows)
        if missing >= min(map(len, rows)):
            return None
        cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
        # A layer needs what the first token to be run sees.
        windows = [each.sliding_window - 1 if each.is_sliding else ids.size(1) for each in cache.layers]
        laid_out: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in windows]
        for row in rows:
            states = self._states(row[:-missing], windows)
            if states is None:
                return None
            for layer, of_row in zip(laid_out, states, strict=True):
                layer.append(of_row)
        for number, layer in enumerate(laid_out):
            keys, values = (
                torch.stack([_padded_left(each, ids.size(1) - missing) for each in which])
                for which in zip(*layer, strict=True)
            )
            cache.update(keys, values, number)
        return cache, missing

    def _in_common(self, row: list[int]) -> int:
        """The most tokens that anything held has in common with the beginning of a row."""
        best = 0
        for held in self._held:
            if held.tokens[: best + 1] == row[: best + 1]:
                pairs = zip(held.tokens[best:], row[best:], strict=False)
                best += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held.tokens), len(row)) - best)
        return best

    def _states(self, tokens: list[int], windows: list[int]) -> KeysAndValues | None:
        """Keys and values of the last of these tokens, of each layer as many as its window asks for."""
        for held in self._held:
            if held.tokens[: len(tokens)] == tokens:
                states = [held.last(layer, len(tokens), most) for layer, most in enumerate(windows)]
                if all(states):
                    return states  # type: ignore[return-value]
        return None


def _unpadded(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    if mask is None:
        return ids.tolist()
    return [row[len(row) - real :] for row, real in zip(ids.tolist(), mask.sum(dim=1).tolist(), strict=True)]


def _padded_left(states: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, columns - states.size(1), 0))
