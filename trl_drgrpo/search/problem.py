"""A problem under way: its tree, its budget, and what a strategy asks for."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.process_rewards.steps import StepSegmenter
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, prompt_ids
from trl_drgrpo.search.budget import Budget
from trl_drgrpo.search.continuations import Continuation, Request
from trl_drgrpo.search.settings import SearchSettings
from trl_drgrpo.search.tree import Node


@dataclass(frozen=True)
class Branch:
    """A strategy's request: continuations of a node.

    Args:
        node ([`Node`]): Not a finished one.
        count (`int`): How many.
        to_end (`bool`): Whole continuations, in place of one step.
    """

    node: Node
    count: int
    to_end: bool = False


class Problem:
    """One row of the dataset while it is searched.

    Args:
        index (`int`): Of the row.
        row (`Mapping[str, Any]`): With `prompt` and the columns that rewards need.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        segmenter ([`StepSegmenter`]): Cuts whole continuations into steps.
        settings ([`SearchSettings`]): Of the search.
        by_steps (`bool`): Whether values come from a process reward model, so that single steps can be compared.
    """

    def __init__(
        self,
        index: int,
        row: Mapping[str, Any],
        tokenizer: Any,
        segmenter: StepSegmenter,
        settings: SearchSettings,
        by_steps: bool,
    ):
        self.index, self.prompt = index, row["prompt"]
        self.columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        self.tokenizer, self.segmenter, self.settings, self.by_steps = tokenizer, segmenter, settings, by_steps
        self.prompt_ids = tuple(prompt_ids(self.prompt, tokenizer))
        self.budget = Budget(settings.budget_tokens, settings.max_completion_length)
        self.root = Node()
        self._cleaner = Cleaner([*tokenizer.all_special_tokens, *END_TOKENS])
        self._rounds = 0

    def requests(self, branches: Sequence[Branch]) -> list[tuple[Branch, Request]]:
        """The branches that the budget pays for, as the sampler wants them; each round has seeds of its own."""
        self._rounds += 1
        pay = self.budget.whole if branches and branches[0].to_end else self.budget.steps
        rooms = [self.room(branch.node) for branch in branches]
        paid = pay([branch.count for branch in branches], rooms)
        found = []
        for number, (branch, (count, limit)) in enumerate(zip(branches, paid, strict=True)):
            if count:
                prefix = self.prompt_ids + self.completion_ids(branch.node)
                seed = random.Random(f"{self.settings.seed}/{self.index}/{self._rounds}/{number}").getrandbits(31)
                found.append((branch, Request(prefix, count, limit, branch.to_end, seed)))
        return found

    def room(self, node: Node) -> int:
        """Tokens that a completion may still get behind a node."""
        return self.settings.max_completion_length - node.num_tokens

    def completion_ids(self, node: Node) -> tuple[int, ...]:
        """The completion's tokens up to and including a node."""
        return tuple(token for step in node.path() for token in step.token_ids)

    def completion(self, node: Node) -> Any:
        """The completion up to a node, decoded as TRL does, in the form of the prompt: text, or one message."""
        text = self.tokenizer.decode(list(self.completion_ids(node)), skip_special_tokens=True)
        return text if isinstance(self.prompt, str) else [{"role": "assistant", "content": text}]

    def grow(self, branch: Branch, request: Request, continuation: Continuation) -> Node | None:
        """Count a continuation and make it part of the tree. None where the budget has cut it short."""
        self.budget.sampled_tokens += continuation.sampled
        self.budget.prompt_tokens += len(request.prefix)
        ids, node = continuation.token_ids, branch.node
        is_full = len(ids) >= self.room(node)
        if continuation.end == "length" and not is_full:
            return None
        finish = "stop" if continuation.end == "stop" else "length" if is_full else ""
        ends = [len(ids) - 1]
        if branch.to_end:
            steps = self.segmenter(list(ids), self.tokenizer)
            ends = [*steps.ends, *(() if steps.closing is None else (steps.closing,))]
        before, begin = self.completion_ids(node), 0
        for end in ends:
            node = self._add(node, before + ids[:begin], ids[begin : end + 1], finish if end == ends[-1] else "")
            begin = end + 1
        self.budget.has_finished = self.budget.has_finished or bool(node.finish)
        return node

    def _add(self, node: Node, before: tuple[int, ...], token_ids: tuple[int, ...], finish: str) -> Node:
        raw = self._decode(before + token_ids)[len(self._decode(before)) :]
        child, is_new = node.add(token_ids, raw, self._cleaner.bare(raw), finish)
        self.budget.kept_tokens += len(token_ids) if is_new else 0
        return child

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def best_unfinished(self) -> Node:
        """The node at the end of the best path: from the root always to the child with the highest mean value."""
        node = self.root
        while node.children:
            node = max(node.children, key=rank)
        return node


def rank(node: Node) -> tuple[float, int]:
    """Sort key of siblings and paths: mean value, then visits. Of equals the first sampled comes first."""
    return (float("-inf") if node.mean is None else node.mean, node.visits)
