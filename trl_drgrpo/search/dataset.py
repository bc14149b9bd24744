"""From trees to rows: one per finished completion, and from those the rows for supervised fine-tuning.

| key | what |
|---|---|
| `prompt`, the dataset's columns | as they were, `completion` left out |
| `completion` | text, or one message of the assistant: what `trl-drgrpo score` reads |
| `steps`, `labels` | texts, and whether any correct completion goes through the step: what `train-prm` reads |
| `values`, `visits` | mean of the values backed up through each step, and their number |
| `prm_scores` | of the process reward model, where there is one |
| `outcome`, `correct` | the verifier's reward, and whether it is above `accept_above` |
| `selected` | whether the search would answer with this completion |
| `finish_reason` | `stop` or `length` |
| `search` | the problem, this row and the number of its rows, and the tokens that the problem took |

`labels` are the estimate of Math-Shepherd (arXiv 2312.08935) over all finished completions of the tree: true, if at
least one correct one goes through the step; false, if there are only incorrect ones; null without a verdict.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trl_drgrpo.search.appraisal import Appraiser
from trl_drgrpo.search.problem import Problem
from trl_drgrpo.search.tree import Node

Row = dict[str, Any]
OWN_COLUMNS = (
    *(
        "steps",
        "labels",
        "values",
        "visits",
        "prm_scores",
        "outcome",
        "correct",
        "selected",
        "finish_reason",
        "search",
    ),
)


def rows_of(problem: Problem, appraiser: Appraiser) -> list[Row]:
    """The rows of a problem whose search has ended, at least one.

    Args:
        problem ([`Problem`]): After its search.
        appraiser ([`Appraiser`]): Of the search.

    Returns:
        `list[dict]`: One per finished completion, none twice, in the order of the tree. The one whose path has the
        highest value is selected; of equals the one that was sampled more often, then the first.
    """
    leaves = list(problem.root.leaves())
    through: Counter[int] = Counter()
    correct: Counter[int] = Counter()
    for leaf in leaves:
        if (accepted := appraiser.accepted(leaf)) is not None:
            for step in leaf.path():
                through[id(step)] += 1
                correct[id(step)] += int(accepted)
    selected = max(leaves, key=lambda leaf: _rank(appraiser.value(leaf), leaf))
    budget = problem.budget
    rows = []
    for number, leaf in enumerate(leaves):
        steps = leaf.readable_path()
        scores = {} if appraiser.prm is None else {"prm_scores": [step.score for step in steps]}
        accepted = appraiser.accepted(leaf)
        rows.append(
            {
                "prompt": problem.prompt,
                **problem.columns,
                "completion": problem.completion(leaf),
                "steps": [step.text for step in steps],
                "labels": [correct[id(step)] > 0 if through[id(step)] else None for step in steps],
                "values": [step.mean for step in steps],
                "visits": [step.visits for step in steps],
                **scores,
                "outcome": leaf.outcome,
                "correct": None if accepted is None else bool(accepted),
                "selected": leaf is selected,
                "finish_reason": leaf.finish,
                "search": {
                    "problem": problem.index,
                    "row": number,
                    "rows": len(leaves),
                    "sampled_tokens": budget.sampled_tokens,
                    "kept_tokens": budget.kept_tokens,
                    "prompt_tokens": budget.prompt_tokens,
                },
            }
        )
    return rows


def _rank(value: float | None, leaf: Node) -> tuple[float, int]:
    return (float("-inf") if value is None else value, leaf.samples)


def sft_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Correct completions for TRL's SFT trainer, which would take `labels` for labels of tokens.

    Args:
        rows (iterable of rows): Of [`rows_of`].

    Returns:
        `list[dict]`: `prompt` and `completion` of those that are correct and ended by themselves.
    """
    kept = (row for row in rows if row["correct"] and row["finish_reason"] == "stop")
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in kept]


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of a whole search.

    Args:
        rows (iterable of rows): Of all problems.

    Returns:
        `dict[str, float]`: Counts of problems, completions and tokens; `tokens_per_problem`; and, where a verifier
        gave verdicts, `pass_rate_selected` (share of problems whose selected completion is correct) and
        `pass_rate_any` (with a correct one).
    """
    rows = list(rows)
    problems = {row["search"]["problem"]: row["search"] for row in rows}
    any_correct = {row["search"]["problem"] for row in rows if row["correct"]}
    numbers: dict[str, float] = {"problems": len(problems), "completions": len(rows)}
    for name in ("sampled_tokens", "kept_tokens", "prompt_tokens"):
        numbers[name] = sum(counts[name] for counts in problems.values())
    numbers["tokens_per_problem"] = numbers["sampled_tokens"] / max(len(problems), 1)
    if any(row["correct"] is not None for row in rows):
        numbers["pass_rate_selected"] = sum(bool(r["correct"]) for r in rows if r["selected"]) / len(problems)
        numbers["pass_rate_any"] = len(any_correct) / len(problems)
    return numbers
