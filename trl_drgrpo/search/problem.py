"""A problem under way: its settings, its tree, its budget, and the requests of a strategy.

The tree has a node per step, plain objects that know their parent. Equal texts under one node are one node: their
samples and visits add up, and the tokens of the first stay. A reader sees no difference between two tokenizations of a
step, so they are not two ideas.

The budget, in three sentences. Every token that the model samples is counted once, kept or not. The sum never exceeds
the limit: a continuation to the end is begun only if its longest possible outcome can be paid, and the steps of one
round share what is left in equal parts. As long as no completion is finished, the tokens of the longest one are kept
back, so that every problem ends with at least one. A step that its part cuts short is counted and thrown away.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import RANGES, Range, positive, refuse_outside, whole
from trl_drgrpo.process_rewards.continuations import Continuation, Request
from trl_drgrpo.process_rewards.prm_inputs import Cleaner, completion_like, prompt_ids
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR, StepSegmenter
from trl_drgrpo.process_rewards.steps.segmenter import segmenter_without_turns
from trl_drgrpo.rewards.contract import OnError, check_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False, slots=True)
class Node:
    """A step, or the root, which is the prompt.

    Args:
        token_ids (`tuple[int, ...]`): The step's tokens, an end token included.
        raw (`str`): Its text with special tokens, as process rewards get it.
        text (`str`): Its text without them.
        finish (`str`): Reason of the end: `"stop"` (end token) or `"length"`; empty where a step may follow.
        parent ([`Node`], *optional*): None for the root.
        num_tokens (`int`): Tokens of the completion up to and including this step.
        samples (`int`): Times that this step was sampled from its parent.
        visits (`int`): Values that were backed up through the node.
        total (`float`): Their sum.
        score (`float`, *optional*): The process reward model's score; None where it gave none.
        outcome (`float`, *optional*): The verifier's reward of the finished completion.
        is_scored (`bool`): Whether the process reward model has seen it.
        is_verified (`bool`): Whether the verifier has.
        is_expanded (`bool`): Whether it was continued in full; for PUCT.
        is_closed (`bool`): Whether nothing below it is left to expand; for PUCT.
        children (`list[Node]`): In the order in which they were sampled first.
    """

    token_ids: tuple[int, ...] = ()
    raw: str = ""
    text: str = ""
    finish: str = ""
    parent: "Node | None" = None
    num_tokens: int = 0
    samples: int = 0
    visits: int = 0
    total: float = 0.0
    score: float | None = None
    outcome: float | None = None
    is_scored: bool = False
    is_verified: bool = False
    is_expanded: bool = False
    is_closed: bool = False
    children: list["Node"] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Mean of the values backed up; None before the first."""
        if not self.visits:
            return None
        return self.total / self.visits

    def add(self, token_ids: tuple[int, ...], raw: str, text: str, finish: str) -> "tuple[Node, bool]":
        """Return the child with this step, and whether it is new. A step sampled again counts, and adds no node."""
        for child in self.children:
            # By text, not by tokens: a reader sees no difference between two tokenizations of a step.
            if (child.text, child.finish) == (text, finish):
                child.samples += 1
                return child, False
        child = Node(token_ids, raw, text, finish, self, self.num_tokens + len(token_ids), samples=1)
        self.children.append(child)
        return child, True

    def path(self) -> list["Node"]:
        """Return the steps from the first one to this one; empty for the root."""
        nodes: list[Node] = []  # from here up
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def readable_path(self) -> list["Node"]:
        """Return the path up to the last step with text: blank lines or an end token after it are no step."""
        nodes = self.path()
        while nodes and not nodes[-1].text.strip():  # from the end: a blank step between others stays
            nodes.pop()
        return nodes

    def back_up(self, value: float) -> None:
        """Count a value here and in every node above."""
        node: Node | None = self
        while node is not None:
            node.visits += 1
            node.total += value
            node = node.parent

    def leaves(self) -> Iterator["Node"]:
        """Yield the finished completions below, in the order in which their branches were sampled first."""
        stack: list[Node] = [self]  # not recursive: a path may have more steps than Python's stack has frames
        while stack:
            node = stack.pop()
            if node.finish:
                yield node
            stack.extend(reversed(node.children))


Strategy = Literal["best_of_n", "beam", "puct"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_SIZES = ("max_completion_length", "width", "children", "batch_size", "problems_at_once")
_ALLOWED = {
    **dict.fromkeys(_SIZES, whole(1, remedy="Give a positive number.")),
    "temperature": positive(remedy="Greedy decoding gives a single answer: raise it."),
    "exploration": Range(0, remedy="0 follows the values alone."),
    "accept_above": Range(),
    "top_p": RANGES["top_p"],
    "seed": RANGES["seed"],
}
PATH_VALUES = {"min": min, "product": math.prod, "last": lambda scores: scores[-1]}  # of the scores of its steps


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Args:
        strategy (`str`): `"best_of_n"`, `"beam"` or `"puct"`.
        budget_tokens (`int`): Tokens that may be sampled for a problem, at least `max_completion_length`. Every
            sampled token counts, in rollouts and in steps that are thrown away too; prompts do not.
        max_completion_length (`int`, *optional*, defaults to `512`): A completion is cut here.
        width (`int`, *optional*, defaults to `4`): Steps that beam search keeps.
        children (`int`, *optional*, defaults to `4`): Continuations that are sampled from a step: one step each with a
            process reward model, to the end without one. From the prompt beam search samples `width` times as many.
        step_separator (`str`, `list[str]`, ...): As in `DrGRPOConfig`; an empty line by default. `"turn"` is refused.
        path_value (`str`, *optional*, defaults to `"min"`): Value of a path by its step scores: the smallest, their
            `"product"`, or the `"last"`.
        exploration (`float`, *optional*, defaults to `1.0`): `c` in PUCT's formula.
        accept_above (`float`, *optional*, defaults to `0.5`): A completion is correct if its reward is larger.
        temperature (`float`, *optional*, defaults to `1.0`): Sampling temperature, more than 0.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus of the sampling.
        seed (`int`, *optional*, defaults to `0`): Seed of the sampling.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per forward pass, or requests under way at a
            server.
        problems_at_once (`int`, *optional*, defaults to `8`): Problems whose continuations share forward passes.
        on_reward_error (`str`, *optional*, defaults to `"raise"`): As in `DrGRPOConfig`.

    Raises:
        `InputError`: A setting out of its range.
    """

    strategy: Strategy
    budget_tokens: int
    max_completion_length: int = 512
    width: int = 4
    children: int = 4
    step_separator: Any = DEFAULT_SEPARATOR
    path_value: str = "min"
    exploration: float = 1.0
    accept_above: float = 0.5
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32
    problems_at_once: int = 8
    on_reward_error: OnError = "raise"

    def __post_init__(self):
        for name, choices in (("strategy", STRATEGIES), ("path_value", PATH_VALUES)):
            choice = getattr(self, name)
            if choice not in choices:
                remedy = did_you_mean(choice, choices, "Choose one of them.")
                raise InputError(name, repr(choice), f"one of {', '.join(choices)}", remedy)
        check_on_error(self.on_reward_error)
        for name, allowed in _ALLOWED.items():
            refuse_outside(name, getattr(self, name), allowed)
        remedy = "It must cover at least one completion: raise it, or lower max_completion_length."
        refuse_outside("budget_tokens", self.budget_tokens, whole(self.max_completion_length, remedy=remedy))
        self.segmenter()  # refuses a separator that is none

    def segmenter(self) -> StepSegmenter:
        """Build the segmenter that cuts completions into steps."""
        return segmenter_without_turns(self.step_separator)


def check_values(verifier: object, prm: object) -> None:
    """Refuse a search with neither a verifier nor a process reward model."""
    if verifier is None and prm is None:
        expected = "a verifier (reward_funcs), a process reward model (prm), or both"
        raise InputError("reward_funcs", "none, and no prm", expected, "Add one: its values guide the search.")


@dataclass
class Budget:
    """Tokens of one problem.

    Args:
        limit (`int`): Tokens that may be sampled.
        longest (`int`): Tokens of the longest completion, at most `limit`.
        sampled_tokens (`int`): Tokens sampled so far.
        kept_tokens (`int`): Sampled tokens in the tree. The others were sampled twice (equal steps are merged), behind
            the end of a step, or cut short.
        prompt_tokens (`int`): Tokens of the prefixes that were continued, once per continuation.
        has_finished (`bool`): Whether a completion is finished, so that no tokens are reserved for one.
    """

    limit: int
    longest: int
    sampled_tokens: int = 0
    kept_tokens: int = 0
    prompt_tokens: int = 0
    has_finished: bool = False

    @property
    def left(self) -> int:
        """Tokens that are not sampled yet."""
        return self.limit - self.sampled_tokens

    def whole(self, counts: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, int]]:
        """Plan continuations to the end: their number in each place, and the limit of their length.

        Args:
            counts (`Sequence[int]`): Continuations that are asked for, by place.
            rooms (`Sequence[int]`): Tokens that a completion has room for there.

        Returns:
            `list[tuple[int, int]]`: Number and limit, by place.

        Example:

        ```python
        >>> Budget(limit=25, longest=10).whole([2, 2], [10, 4])
        [(2, 10), (1, 4)]

        ```
        """
        tokens_left = self.left
        paid = []
        for count, room in zip(counts, rooms, strict=True):
            # Paid in full, as if every continuation were as long as it can be: the limit holds whatever is sampled.
            count = min(count, tokens_left // room)
            tokens_left -= count * room
            paid.append((count, room))
        return paid

    def steps(self, counts: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, int]]:
        """Grant continuations of one step, which share the remaining tokens equally; see [`whole`][Budget.whole].

        Example:

        ```python
        >>> Budget(limit=25, longest=10).steps([2, 2], [10, 2])
        [(2, 3), (2, 2)]

        ```
        """
        free = self.left
        if not self.has_finished:  # reserve the tokens of one completion
            free -= self.longest
        part = max(free, 0) // max(sum(counts), 1)
        if part == 0:  # not a token for each: the budget is spent
            counts = [0] * len(counts)
        return [(count, min(part, room)) for count, room in zip(counts, rooms, strict=True)]


@dataclass(frozen=True)
class Branch:
    """A strategy's request: continuations of a node.

    Args:
        node ([`Node`]): A node that is not finished.
        count (`int`): Number of continuations.
        to_end (`bool`): Whether they go to the end, in place of one step.
    """

    node: Node
    count: int
    to_end: bool = False


class Problem:
    """One row of the dataset while it is searched.

    Args:
        index (`int`): Index of the row.
        row (`Mapping[str, Any]`): Has `prompt` and the columns that rewards need.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        settings ([`SearchSettings`]): Settings of the search; its segmenter cuts whole continuations into steps.
        by_steps (`bool`): Whether values come from a process reward model, so that single steps can be compared.
    """

    def __init__(
        self,
        index: int,
        row: Mapping[str, Any],
        tokenizer: "PreTrainedTokenizerBase",
        settings: SearchSettings,
        by_steps: bool,
    ):
        self.index = index
        self.prompt = row["prompt"]
        # A completion in the data is not the one that a reward is to judge.
        self.columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        self.tokenizer = tokenizer
        self.settings = settings
        self.by_steps = by_steps
        self.segmenter = settings.segmenter()
        self.prompt_ids = tuple(prompt_ids(self.prompt, tokenizer))
        self.budget = Budget(settings.budget_tokens, settings.max_completion_length)
        self.root = Node()
        self._cleaner = Cleaner(tokenizer.all_special_tokens)
        self._rounds = 0

    def requests(self, branches: Sequence[Branch]) -> list[tuple[Branch, Request]]:
        """Return the branches that the budget pays for, with the sampler's requests."""
        self._rounds += 1
        # All branches of a round are of one kind, which decides how the budget is shared.
        pay = self.budget.steps
        if branches and branches[0].to_end:
            pay = self.budget.whole
        rooms = [self.room(branch.node) for branch in branches]
        paid = pay([branch.count for branch in branches], rooms)
        branch_requests = []
        for number, branch in enumerate(branches):
            count, limit = paid[number]
            if count:
                prefix = self.prompt_ids + self.completion_ids(branch.node)
                # Each problem, round and branch has a seed of its own, whatever is searched beside it.
                seed = random.Random(f"{self.settings.seed}/{self.index}/{self._rounds}/{number}").getrandbits(31)
                branch_requests.append((branch, Request(prefix, count, limit, branch.to_end, seed)))
        return branch_requests

    def room(self, node: Node) -> int:
        """Return the number of tokens that a completion may still get behind a node."""
        return self.settings.max_completion_length - node.num_tokens

    def completion_ids(self, node: Node) -> tuple[int, ...]:
        """Return the completion's tokens up to and including a node."""
        return tuple(chain(*(step.token_ids for step in node.path())))

    def completion(self, node: Node) -> Any:
        """Return the completion up to a node, decoded as in TRL, in the form of the prompt: text, or one message."""
        token_ids = list(self.completion_ids(node))
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        return completion_like(self.prompt, text)

    def grow(self, branch: Branch, request: Request, continuation: Continuation) -> Node | None:
        """Count a continuation and make it part of the tree. None where the budget has cut it short."""
        self.budget.sampled_tokens += continuation.sampled  # first, as thrown away tokens count, too
        self.budget.prompt_tokens += len(request.prefix)
        ids = continuation.token_ids
        node = branch.node
        # `length` is the end of the request's limit. It is a completion's end only if there is no more room for one.
        is_full = len(ids) >= self.room(node)
        if continuation.end == "length" and not is_full:
            return None
        finish = ""
        if continuation.end == "stop":
            finish = "stop"
        elif is_full:
            finish = "length"
        ends = [len(ids) - 1]
        if branch.to_end:  # a node for each of its steps, so that later rounds can branch off between them
            steps = self.segmenter(list(ids), self.tokenizer)
            ends = list(steps.ends)
            if steps.closing is not None:
                ends.append(steps.closing)
        # Down the tree: each step becomes a child of the one before it, or meets an equal child.
        before = self.completion_ids(node)
        begin = 0
        for end in ends:
            step_ids = ids[begin : end + 1]
            # Decoded behind all tokens before it: decoders may drop a space at the beginning of a text.
            text_before = self._decode(before)
            raw = self._decode(before + step_ids)[len(text_before) :]
            step_finish = ""  # only the last step of a completion ends it
            if end == ends[-1]:
                step_finish = finish
            node, is_new = node.add(step_ids, raw, self._cleaner.bare(raw), step_finish)
            if is_new:
                self.budget.kept_tokens += len(step_ids)
            before += step_ids
            begin = end + 1
        # From now on no tokens are reserved for a first completion.
        self.budget.has_finished |= bool(node.finish)
        return node

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def best_unfinished(self) -> Node:
        """Return the end of the best path, which always goes to the child with the highest mean value."""
        # No completion is finished when this is asked, so every path ends where it may go on.
        node = self.root
        while node.children:
            node = max(node.children, key=rank)
        return node


def rank(node: Node) -> tuple[float, int]:
    """Return the sort key of siblings and paths: mean value, then visits. Among equals the first sampled is first."""
    mean = node.mean
    if mean is None:
        mean = -math.inf
    return mean, node.visits
