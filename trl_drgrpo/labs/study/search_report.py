"""The study of search from end to end: pass rate against sampled tokens, its table and its plot.

The warm-started model of the long list sums answers, a rule judges the lines, and every strategy is given the same
budgets. With uninformative scores (shuffled) a search still spends its tokens, and still selects.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from trl_drgrpo.common.drawing import new_figure, save_figure
from trl_drgrpo.labs.demo.long_sums import make_long_dataset, warm_start
from trl_drgrpo.labs.demo.task import list_sum_reward
from trl_drgrpo.labs.study.conclusions import compared, paired
from trl_drgrpo.labs.study.intervals import interval
from trl_drgrpo.labs.study.markdown import markdown_table
from trl_drgrpo.labs.study.resumable import Resumable
from trl_drgrpo.labs.study.search_arms import ARMS, VALUES, SearchSizes, process_rewards
from trl_drgrpo.search import collect
from trl_drgrpo.search.dataset import summary


@dataclass(frozen=True)
class SearchRun:
    """One arm with one seed and budget.

    Args:
        arm (`str`): A key of [`ARMS`].
        seed (`int`): Of problems and sampling.
        budget (`int`): Tokens per problem at most.
        tokens (`float`): Tokens per problem that were sampled.
        kept_share (`float`): Share of these that became part of the tree.
        selected (`float`): Share of problems whose selected completion is correct.
        any (`float`): Share of problems with a correct completion.
        completions (`float`): Finished ones per problem.
        seconds (`float`): CPU time of the process.
    """

    arm: str
    seed: int
    budget: int
    tokens: float
    kept_share: float
    selected: float
    any: float
    completions: float
    seconds: float


def run_arm(model: Path, sizes: SearchSizes, arm: str, seed: int, budget: int) -> SearchRun:
    """Search the seed's problems with one arm.

    Args:
        model (`Path`): Folder of the model that answers.
        sizes ([`SearchSizes`]): Settings.
        arm, seed, budget (`str`, `int`, `int`): The run.
    """
    begun = time.process_time()
    problems = collect(
        make_long_dataset(sizes.problems, "held_out", seed).to_list(),
        str(model),
        verifier=list_sum_reward,
        prm=process_rewards(ARMS[arm].values, seed, sizes.noise),
        strategy=ARMS[arm].strategy,
        budget_tokens=budget,
        max_completion_length=sizes.max_completion_length,
        width=sizes.width,
        children=sizes.children,
        exploration=sizes.exploration,
        seed=seed,
        problems_at_once=sizes.problems,
        batch_size=256,
    )
    found = summary([row for rows in problems for row in rows])
    return SearchRun(
        arm,
        seed,
        budget,
        round(found["tokens_per_problem"], 2),
        round(found["kept_tokens"] / found["sampled_tokens"], 4),
        found["pass_rate_selected"],
        found["pass_rate_any"],
        found["completions"] / found["problems"],
        round(time.process_time() - begun, 2),
    )


def run_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    sizes: SearchSizes | None = None,
    on_run: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Search with every arm, budget and seed, seed after seed.

    Runs that are in `output` already, with the same settings and versions, are kept: an interrupted study goes on.

    Args:
        seeds (`Sequence[int]`): Seeds, the same for each arm.
        output (`Path`): JSON file, written after each run.
        work_dir (`Path`): For the warm-started model.
        sizes ([`SearchSizes`], *optional*): Settings.
        on_run (`Callable`, *optional*): Called with a line of text after each run.

    Returns:
        `dict[str, Any]`: `command`, `date`, `versions`, `settings` and `runs`, as in the file.
    """
    sizes = sizes or SearchSizes()
    study = Resumable("search", seeds, asdict(sizes), output, on_part=on_run)
    model = work_dir / "model"
    if not (model / "config.json").is_file():
        warm_start(model)
    calls = list(product(seeds, sizes.budgets, ARMS))
    study.each("runs", ("seed", "budget", "arm"), calls, partial(_run, model, sizes), _told)
    return study.results


def _run(model: Path, sizes: SearchSizes, seed: int, budget: int, arm: str) -> list[dict[str, Any]]:
    return [asdict(run_arm(model, sizes, arm, seed, budget))]


def _told(row: dict[str, Any]) -> str:
    rates = f"selected {row['selected']:.2f}, any {row['any']:.2f}"
    return f"{row['arm']}, {row['budget']} tokens, seed {row['seed']}: {rates}"


def _runs(results: dict[str, Any], arm: str, budget: int) -> list[SearchRun]:
    return [SearchRun(**run) for run in results["runs"] if (run["arm"], run["budget"]) == (arm, budget)]


def _percent(values: Sequence[float]) -> str:
    return str(interval([100 * value for value in values]))


def table(results: dict[str, Any]) -> str:
    """Pass rates by budget as a Markdown table: mean and 95% interval over seeds, in percent.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    budgets = results["settings"]["budgets"]
    largest = budgets[-1]
    head = ["search", *(f"selected, {budget} tokens" for budget in budgets), f"any, {largest}"]
    head += [f"completions, {largest}", f"tokens kept, {largest}"]
    rows = []
    for name, arm in ARMS.items():
        at_largest = _runs(results, name, largest)
        cells = [
            arm.label,
            *(_percent([run.selected for run in _runs(results, name, budget)]) for budget in budgets),
            _percent([run.any for run in at_largest]),
            f"{interval([run.completions for run in at_largest]).mean:.1f}",
            f"{100 * interval([run.kept_share for run in at_largest]).mean:.0f}%",
        ]
        rows.append(cells)
    return markdown_table(head, rows)


def conclusion(results: dict[str, Any]) -> str:
    """Sentence on the searches that do better or worse than best-of-N with the same values, at the largest budget.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
    """
    budget = results["settings"]["budgets"][-1]
    selected = {arm: [100 * run.selected for run in _runs(results, arm, budget)] for arm in ARMS}
    found = {
        each.label: paired(selected[arm], selected[f"best_of_n/{each.values}"])
        for arm, each in ARMS.items()
        if each.strategy != "best_of_n"
    }
    title = f"Correct selected completions with {budget} tokens, minus `best_of_n` with the same values, in points"
    return compared(title, found)


def draw(results: dict[str, Any], path: Path) -> Path:
    """Pass rate of the selected completion against sampled tokens, a panel per strategy: means over seeds.

    Args:
        results (`dict[str, Any]`): Of [`run_study`].
        path (`Path`): PNG file to write.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    strategies = list(dict.fromkeys(arm.strategy for arm in ARMS.values()))
    figure, panels = new_figure(1, len(strategies), 11, 3.6, sharey=True)
    for panel, strategy in zip(panels, strategies, strict=True):
        for values, label in VALUES.items():
            points = [_runs(results, f"{strategy}/{values}", budget) for budget in results["settings"]["budgets"]]
            tokens = [interval([run.tokens for run in runs]).mean for runs in points]
            rates = [interval([100 * run.selected for run in runs]).mean for runs in points]
            panel.plot(tokens, rates, "o-", label=label)
        panel.set(title=strategy, xlabel="sampled tokens per problem")
    panels[0].set(ylabel="correct, selected completion (%)")
    return save_figure(figure, path)
