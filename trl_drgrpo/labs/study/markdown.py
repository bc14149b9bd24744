"""Tables of the studies, as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    Args:
        head (`Sequence[str]`): Headings.
        rows (`Iterable[Sequence[str]]`): Cells of each row, as many as headings.

    Example:

    ```python
    >>> print(markdown_table(["arm", "steps"], [["plain", "8"]]))
    | arm | steps |
    |---|---|
    | plain | 8 |

    ```
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
