"""Problems in, rows out: several problems are searched side by side, so that they share forward passes.

A strategy is a generator: it yields the branches that it wants sampled and gets back the node where each continuation
ends, valued. It knows no model, no tokenizer and no reward. Problems go through in groups of a fixed size, each group
with seeds of its own: a search that is taken up at a group's beginning ends with the same rows.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.rows import check_prompt_rows
from trl_drgrpo.search.appraisal import Appraiser
from trl_drgrpo.search.beam import beam
from trl_drgrpo.search.best_of_n import best_of_n
from trl_drgrpo.search.dataset import OWN_COLUMNS, Row, rows_of
from trl_drgrpo.search.problem import Branch, Problem
from trl_drgrpo.search.puct import puct
from trl_drgrpo.search.settings import SearchSettings, check_values
from trl_drgrpo.search.tree import Node

Searching = Generator[list[Branch], "list[Node | None]", None]
_STRATEGIES: dict[str, Callable[[Problem], Searching]] = {"best_of_n": best_of_n, "beam": beam, "puct": puct}


def collect(
    rows: Sequence[Mapping[str, Any]],
    model: Any,
    tokenizer: Any = None,
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
        rows (`Sequence[Mapping]`): With `prompt` (text or messages) and the columns that the rewards need.
        model (`str` or `PreTrainedModel`): Path, Hub id or model; with a server the name that it has there.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Its tokenizer; by default that of the path.
        verifier (`Callable`, *optional*): Outcome reward function with TRL's signature. Without `prm` its verdicts are
            the values.
        prm (`Callable`, *optional*): Step reward function. Its scores are the values, from 0 to 1 as a rule.
        vllm_server_base_url (`str`, *optional*): Address of a vLLM server that samples.
        first (`int`, *optional*, defaults to `0`): Row to begin with, a multiple of `problems_at_once`.
        **settings: Fields of [`SearchSettings`][trl_drgrpo.search.settings.SearchSettings]; `strategy` and
            `budget_tokens` have no default.

    Yields:
        `list[dict]`: The rows of one problem after another, as `trl_drgrpo.search.dataset` describes them.

    Raises:
        `InputError`: A setting out of range, no source of values, rows that do not fit.
        `RewardError`: A verifier or process reward model that fails; the rows of earlier groups were given.
    """
    chosen = SearchSettings(**settings)
    check_values(verifier, prm)
    check_prompt_rows(rows, "dataset_name", OWN_COLUMNS)
    from trl_drgrpo.process_rewards.loading import load_tokenizer

    tokenizer = load_tokenizer(model, tokenizer)
    segmenter = chosen.segmenter()
    sampling: dict[str, Any] = {"temperature": chosen.temperature, "top_p": chosen.top_p}
    if vllm_server_base_url is None:
        from trl_drgrpo.process_rewards.loading import load_model
        from trl_drgrpo.search.sampling import TransformersSampler

        loaded = load_model(model, "AutoModelForCausalLM")
        sampler: Any = TransformersSampler(loaded, tokenizer, segmenter, batch_size=chosen.batch_size, **sampling)
    else:
        from trl_drgrpo.search.server import ServerSampler

        sampler = ServerSampler(
            vllm_server_base_url, str(model), tokenizer, segmenter, concurrency=chosen.batch_size, **sampling
        )
    appraiser = Appraiser(chosen, verifier, prm)
    return search_rows(rows, sampler, tokenizer, appraiser, chosen, first)


def search_rows(
    rows: Sequence[Mapping[str, Any]],
    sampler: Callable,
    tokenizer: Any,
    appraiser: Appraiser,
    settings: SearchSettings,
    first: int = 0,
) -> Iterator[list[Row]]:
    """As [`collect`], with the parts put together."""
    segmenter = settings.segmenter()
    by_steps = appraiser.prm is not None
    for begin in range(first, len(rows), settings.problems_at_once):
        numbers = range(begin, min(begin + settings.problems_at_once, len(rows)))
        group = [Problem(i, rows[i], tokenizer, segmenter, settings, by_steps) for i in numbers]
        _search(group, sampler, appraiser, _STRATEGIES[settings.strategy])
        yield from (rows_of(problem, appraiser) for problem in group)


def _search(group: Sequence[Problem], sampler: Callable, appraiser: Appraiser, strategy: Callable) -> None:
    """Search problems side by side: each round samples and judges for all of them at once."""
    searches: dict[Problem, Searching] = {problem: _to_a_completion(problem, strategy) for problem in group}
    answers: dict[Problem, Any] = dict.fromkeys(group)
    while answers:
        asked = {problem: branches for problem in answers if (branches := _next(searches[problem], answers[problem]))}
        answers = {problem: [] for problem in asked}
        paid = [(p, *pair) for p, branches in asked.items() for pair in p.requests(branches)]
        if not paid:
            continue
        found: list[tuple[Problem, Node]] = []
        for (problem, branch, request), continuations in zip(paid, sampler([r for *_, r in paid]), strict=True):
            for continuation in continuations:
                node = problem.grow(branch, request, continuation)
                answers[problem].append(node)
                found += [] if node is None else [(problem, node)]
        appraiser.appraise(found)


def _next(search: Searching, answer: Any) -> list[Branch] | None:
    try:
        return search.send(answer)
    except StopIteration:
        return None


def _to_a_completion(problem: Problem, strategy: Callable[[Problem], Searching]) -> Searching:
    """A strategy, and where it has finished nothing the completion for which tokens were kept back."""
    yield from strategy(problem)
    if not problem.budget.has_finished:
        yield [Branch(problem.best_unfinished(), 1, to_end=True)]
