"""Problems in, rows out: several problems are searched side by side, so that they share forward passes.

A strategy knows no model, no tokenizer and no reward. Problems go through in groups of a fixed size, each group with
seeds of its own: a search that is resumed at a group's beginning ends with the same rows.

A row per finished completion, and from those the rows for supervised fine-tuning:

| key | content |
|---|---|
| `prompt`, the dataset's columns | as they were, `completion` left out |
| `completion` | text, or one message of the assistant: what `trl-drgrpo score` reads |
| `steps`, `labels` | texts, and whether any correct completion goes through the step: what `train-prm` reads |
| `values`, `visits` | mean of the values backed up through each step, and their number |
| `prm_scores` | scores of the process reward model, where there is one |
| `outcome`, `correct` | the verifier's reward, and whether it is above `accept_above` |
| `selected` | whether the search would answer with this completion |
| `finish_reason` | `stop` or `length` |
| `search` | the problem, this row and the number of its rows, and the tokens that the problem took |

`labels` are the estimate of Math-Shepherd (arXiv 2312.08935) over all finished completions of the tree: true, if at
least one correct one goes through the step; false, if there are only incorrect ones; null without a verdict.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.rows import check_prompt_rows
from trl_drgrpo.process_rewards.continuations import Sampler
from trl_drgrpo.search.problem import Branch, Node, Problem, SearchSettings, check_values
from trl_drgrpo.search.strategies import Appraiser, beam, best_of_n, puct

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = dict[str, Any]
OWN_COLUMNS = (
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
)
_COUNTS = ("sampled_tokens", "kept_tokens", "prompt_tokens")  # of a problem's budget


def rows_of(problem: Problem, appraiser: Appraiser) -> list[Row]:
    """Return the rows of a problem whose search has ended, at least one.

    Args:
        problem ([`Problem`]): The problem after its search.
        appraiser ([`Appraiser`]): Verifier and process reward model of the search.

    Returns:
        `list[dict]`: One per finished completion, in the order of the tree; none twice, unless a rule that looks ahead
        has cut it in two ways. The completion whose path has the highest value is selected; among equals the one that
        was sampled more often, then the first.
    """
    leaves = list(problem.root.leaves())
    # Labels and the selection first: both depend on all completions, and the rows need them.
    labels: dict[Node, bool] = {}  # whether any correct completion goes through a step
    keys = {}
    for leaf in leaves:
        verdict = appraiser.accepted(leaf)
        if verdict is not None:
            for step in leaf.path():
                labels[step] = labels.get(step, False) or verdict
        value = appraiser.value(leaf)
        if value is None:
            value = -math.inf
        keys[leaf] = (value, leaf.samples)
    selected = max(leaves, key=keys.__getitem__)  # the first one among equals
    counts = {name: getattr(problem.budget, name) for name in _COUNTS}
    # One row per completion. Values and visits are those of the tree, so completions share them as far as they agree.
    rows = []
    for number, leaf in enumerate(leaves):
        steps = leaf.readable_path()  # without a closing step, which has no text to label
        row: Row = {
            "prompt": problem.prompt,
            **problem.columns,
            "completion": problem.completion(leaf),
            "steps": [step.text for step in steps],
            "labels": list(map(labels.get, steps)),
            "values": [step.mean for step in steps],
            "visits": [step.visits for step in steps],
        }
        if appraiser.prm is not None:
            row["prm_scores"] = [step.score for step in steps]
        row |= {
            "outcome": leaf.outcome,
            "correct": appraiser.accepted(leaf),
            "selected": leaf is selected,
            "finish_reason": leaf.finish,
            "search": {"problem": problem.index, "row": number, "rows": len(leaves), **counts},
        }
        rows.append(row)
    return rows


def sft_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the correct completions for TRL's SFT trainer, which would take `labels` for labels of tokens.

    Args:
        rows (iterable of rows): Result of [`rows_of`].

    Returns:
        `list[dict]`: `prompt` and `completion` of the correct rows that ended by themselves.
    """
    # Not the completions that were cut: they have no end to learn.
    solved = []
    for row in rows:
        if row["correct"] and row["finish_reason"] == "stop":
            solved.append({"prompt": row["prompt"], "completion": row["completion"]})
    return solved


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of a whole search.

    Args:
        rows (iterable of rows): Rows of all problems.

    Returns:
        `dict[str, float]`: Counts of problems, completions and tokens; `tokens_per_problem`; and, where a verifier
        gave verdicts, `pass_rate_selected` (share of problems whose selected completion is correct) and
        `pass_rate_any` (with a correct one).
    """
    problems = {}  # by number: the counts of its budget, which all its rows repeat
    solved = set()  # problems with a correct completion
    completions = 0
    selected_correct = 0
    has_verdicts = False
    for row in rows:
        problem = row["search"]["problem"]
        problems[problem] = row["search"]
        completions += 1
        has_verdicts = has_verdicts or row["correct"] is not None
        if row["correct"]:
            solved.add(problem)
            selected_correct += row["selected"]
    # Tokens once per problem, although each of its rows has them.
    numbers: dict[str, float] = {"problems": len(problems), "completions": completions}
    for name in _COUNTS:
        numbers[name] = sum(counts[name] for counts in problems.values())
    numbers["tokens_per_problem"] = numbers["sampled_tokens"] / max(len(problems), 1)
    if has_verdicts:
        numbers["pass_rate_selected"] = selected_correct / len(problems)
        numbers["pass_rate_any"] = len(solved) / len(problems)
    return numbers


Searching = Generator[list[Branch], "list[Node | None]", None]
Strategy = Callable[[Problem], Searching]
_STRATEGIES: dict[str, Strategy] = {"best_of_n": best_of_n, "beam": beam, "puct": puct}


def collect(
    rows: Sequence[Mapping[str, Any]],
    model: "str | PreTrainedModel",
    tokenizer: "str | PreTrainedTokenizerBase | None" = None,
    *,
    verifier: Callable | None = None,
    prm: Callable | None = None,
    vllm_server_base_url: str | None = None,
    first: int = 0,
    **settings: Any,
) -> Iterator[list[Row]]:
    """Search the problems of a dataset for trajectories, for supervised training.

    Not for groups of a policy gradient: a search picks by values which steps it continues, and its completions are a
    biased sample of the policy.

    Args:
        rows (`Sequence[Mapping]`): Have `prompt` (text or messages) and the columns that the rewards need.
        model (`str` or `PreTrainedModel`): Path, Hub id or model; with a server the name that it has there.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Its tokenizer; by default that of the path.
        verifier (`Callable`, *optional*): Outcome reward function with TRL's signature. Without `prm` its verdicts are
            the values.
        prm (`Callable`, *optional*): Step reward function. Its scores are the values, from 0 to 1 as a rule.
        vllm_server_base_url (`str`, *optional*): Address of a vLLM server that samples.
        first (`int`, *optional*, defaults to `0`): Row to begin with, a multiple of `problems_at_once`.
        **settings: Fields of [`SearchSettings`][trl_drgrpo.search.problem.SearchSettings]; `strategy` and
            `budget_tokens` have no default.

    Yields:
        `list[dict]`: The rows of one problem after another, as `trl_drgrpo.search.collecting` describes them.

    Raises:
        `InputError`: A setting out of range, no source of values, rows that do not fit.
        `RewardError`: A verifier or process reward model that fails; the rows of earlier groups were given.
    """
    # All checks come before the imports of torch and the loading of a model.
    search_settings = SearchSettings(**settings)
    check_values(verifier, prm)
    check_prompt_rows(rows, "dataset_name", OWN_COLUMNS)
    from trl_drgrpo.process_rewards.loading import load_model, load_tokenizer
    from trl_drgrpo.search.sampling import ServerSampler, StepEnd, StepSampler

    loaded_tokenizer = load_tokenizer(model, tokenizer)
    step_end = StepEnd(search_settings.segmenter(), loaded_tokenizer)
    batch_size = search_settings.batch_size
    sampling: dict[str, Any] = {
        "temperature": search_settings.temperature,
        "top_p": search_settings.top_p,
        "top_k": 0,
    }
    if vllm_server_base_url is None:
        sampling["do_sample"] = True
        sampler: Sampler = StepSampler(load_model(model, "AutoModelForCausalLM"), step_end, sampling, batch_size)
    else:
        # All fields are stated, since a server takes a missing one from the model's own configuration.
        sampling |= {"min_p": 0.0, "repetition_penalty": 1.0}
        sampler = ServerSampler(vllm_server_base_url, str(model), step_end, sampling, batch_size)
    return search_rows(rows, sampler, loaded_tokenizer, Appraiser(search_settings, verifier, prm), first)


def search_rows(
    rows: Sequence[Mapping[str, Any]],
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    appraiser: Appraiser,
    first: int = 0,
) -> Iterator[list[Row]]:
    """Collect rows from parts that are built already, see [`collect`]."""
    settings = appraiser.settings
    by_steps = appraiser.prm is not None
    # Groups begin at multiples of their size, so that a search which goes on has the same groups.
    for begin in range(first, len(rows), settings.problems_at_once):
        numbers = range(begin, min(begin + settings.problems_at_once, len(rows)))
        group = [Problem(i, rows[i], tokenizer, settings, by_steps) for i in numbers]
        _search(group, sampler, appraiser, _STRATEGIES[settings.strategy])
        for problem in group:
            yield rows_of(problem, appraiser)


def _search(group: Sequence[Problem], sampler: Sampler, appraiser: Appraiser, strategy: Strategy) -> None:
    """Search problems side by side: each round samples and judges for all of them at once."""
    searches = {problem: _to_a_completion(problem, strategy) for problem in group}
    answers: dict[Problem, Any] = dict.fromkeys(group)  # `None` begins a generator
    while answers:
        paid_requests = []  # problem, branch and request of every continuation that the budgets pay for
        next_answers: dict[Problem, list[Node | None]] = {}
        for problem, answer in answers.items():
            with suppress(StopIteration):  # its search has ended
                branches = searches[problem].send(answer)
                next_answers[problem] = []
                for branch, request in problem.requests(branches):
                    paid_requests.append((problem, branch, request))
        answers = next_answers
        if not paid_requests:  # empty answers tell the strategies that the budget is spent
            continue
        nodes: list[tuple[Problem, Node]] = []
        # One call for all problems, whose continuations share forward passes.
        sampled = sampler([request for _, _, request in paid_requests])
        for (problem, branch, request), continuations in zip(paid_requests, sampled, strict=True):
            for continuation in continuations:
                node = problem.grow(branch, request, continuation)
                answers[problem].append(node)
                if node is not None:
                    nodes.append((problem, node))
        appraiser.appraise(nodes)  # before the answers are sent: a strategy decides by values


def _to_a_completion(problem: Problem, strategy: Strategy) -> Searching:
    """Run a strategy. Where it has finished no completion, ask for the one for which tokens were reserved."""
    yield from strategy(problem)
    # Beams and trees may spend all on steps. The tokens for one completion were kept back, see `Budget.steps`.
    if not problem.budget.has_finished:
        yield [Branch(problem.best_unfinished(), 1, to_end=True)]
