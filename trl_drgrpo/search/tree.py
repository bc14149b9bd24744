"""The tree of a problem: a node per step, plain objects that know their parent.

Equal texts under one node are one node: their samples and visits add up, and the tokens of the first stay. A reader
sees no difference between two tokenizations of a step, so they are not two ideas.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A step, or the root, which is the prompt.

    Args:
        token_ids (`tuple[int, ...]`): The step's tokens, an end token included.
        raw (`str`): Its text with special tokens, as process rewards get it.
        text (`str`): Its text without them.
        finish (`str`): Why nothing follows: `"stop"` (end token) or `"length"`; empty where something may.
        parent ([`Node`], *optional*): None for the root.
        num_tokens (`int`): Tokens of the completion up to and including this step.
        samples (`int`): Times that this step was sampled from its parent.
        visits (`int`): Values that were backed up through the node.
        total (`float`): Their sum.
        score (`float`, *optional*): Of the process reward model; None where it gave none.
        outcome (`float`, *optional*): The verifier's reward of the finished completion.
        is_scored (`bool`): Whether the process reward model has seen it.
        is_verified (`bool`): Whether the verifier has.
        is_expanded (`bool`): Whether it was continued in full; PUCT's.
        is_closed (`bool`): Whether nothing below it is left to expand; PUCT's.
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
        return self.total / self.visits if self.visits else None

    def add(self, token_ids: tuple[int, ...], raw: str, text: str, finish: str) -> "tuple[Node, bool]":
        """The child with this step, and whether it is new."""
        for child in self.children:
            if (child.text, child.finish) == (text, finish):
                child.samples += 1
                return child, False
        child = Node(token_ids, raw, text, finish, self, self.num_tokens + len(token_ids), samples=1)
        self.children.append(child)
        return child, True

    def path(self) -> list["Node"]:
        """The steps from the first one to this one; empty for the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def readable_path(self) -> list["Node"]:
        """The same, up to the last step with text: blank lines or an end token after it are no step."""
        nodes = self.path()
        while nodes and not nodes[-1].text.strip():
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
        """Finished completions below, in the order in which their branches were sampled first."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if node.finish:
                yield node
            stack.extend(reversed(node.children))
