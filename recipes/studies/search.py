"""Does search with a verifier or a process reward model find more correct completions than sampling?

Question: what do beam search and PUCT give over best-of-N at equal sampled tokens, and what when the values are bad?
Arms: three strategies with four sources of values: the verifier's verdicts alone, a rule that judges each line (a
faithful PRM), that rule mistaken on a fixed fifth of the lines (mediocre), and its scores shuffled. With uninformative
scores a search still spends its tokens, and still selects. The warm-started model of the long list sums answers.
Measure: share of problems whose selected completion is correct, by budget. Rule: a search differs from best-of-N with
the same values at the largest budget if the interval of the differences, seed by seed, leaves out 0.
"""

import time
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from frame import Results, Row, Run, Study, compared, interval, main, mean, paired, rows_of, table
from credit import shuffled
from long_sums import make_dataset

from trl_drgrpo.common.drawing import new_figure
from trl_drgrpo.demo.build import warm_start
from trl_drgrpo.demo.task import line_is_right, line_reward, list_sum_reward
from trl_drgrpo.process_rewards.verifiers import step_verifier
from trl_drgrpo.search import collect
from trl_drgrpo.search.collecting import summary

VALUES = {"verifier": "verdicts", "good": "faithful PRM", "mediocre": "mediocre PRM", "shuffled": "shuffled PRM"}
STRATEGIES = ("best_of_n", "beam", "puct")
ARMS = {f"{strategy}/{values}": f"`{strategy}`, {VALUES[values]}" for strategy in STRATEGIES for values in VALUES}
SETTINGS: dict[str, Any] = {
    "budgets": (256, 512, 1024),  # sampled tokens per problem, ascending
    "problems": 16,  # of a seed
    "max_completion_length": 112,
    "width": 2,
    "children": 3,
    "exploration": 0.5,
    "noise": 0.2,  # share of the steps for which the mediocre model reverses the verdict
}


def process_rewards(values: str, seed: int, noise: float) -> Any:
    """The step reward function behind a source of values; None for the verifier's verdicts."""
    if values == "verifier":
        return None
    if values == "mediocre":
        return step_verifier(partial(_mistaken, seed=seed, noise=noise), name="mediocre")
    return line_reward if values == "good" else shuffled(line_reward, Random(seed))


def _mistaken(
    prompt: Any, previous_steps: Sequence[str], step: str, seed: int = 0, noise: float = 0.0
) -> float | None:
    """The rule's verdict, reversed for a fixed share of all lines: equal lines get equal verdicts."""
    verdict = line_is_right(prompt, previous_steps, step)
    draw = zlib.crc32(f"{seed}/{prompt}/{previous_steps}/{step}".encode()) / 2**32
    return verdict if verdict is None or draw >= noise else 1.0 - verdict


def search(settings: dict[str, Any], folder: Path, seed: int, budget: int, arm: str) -> list[Row]:
    """Search the seed's problems with one arm: `tokens` and `completions` per problem, `kept_share` of the tokens that
    became part of the tree, share of problems whose `selected` or `any` completion is correct, CPU `seconds`."""
    begun, (strategy, values) = time.process_time(), arm.split("/")
    problems = collect(
        make_dataset(settings["problems"], "held_out", seed).to_list(),
        str(folder / "model"),
        verifier=list_sum_reward,
        prm=process_rewards(values, seed, settings["noise"]),
        strategy=strategy,
        step_separator="\n",
        budget_tokens=budget,
        seed=seed,
        problems_at_once=settings["problems"],
        batch_size=256,
        **{key: settings[key] for key in ("max_completion_length", "width", "children", "exploration")},
    )
    found = summary([row for rows in problems for row in rows])
    row = {
        "arm": arm,
        "seed": seed,
        "budget": budget,
        "tokens": round(found["tokens_per_problem"], 2),
        "kept_share": round(found["kept_tokens"] / found["sampled_tokens"], 4),
        "selected": found["pass_rate_selected"],
        "any": found["pass_rate_any"],
        "completions": found["completions"] / found["problems"],
    }
    return [{**row, "seconds": round(time.process_time() - begun, 2)}]


def measure(run: Run) -> None:
    if not (run.folder / "model/config.json").is_file():
        warm_start(run.folder / "model", steps=run.settings.get("warm_start", 200))
    run.each("runs", ("seed", "budget", "arm"), product(run.seeds, run.settings["budgets"], ARMS), search)


def values_of(results: Results, arm: str, budget: int, key: str, scale: float = 100.0) -> list[float]:
    """A number of an arm with a budget, by seed."""
    return [scale * run[key] for run in rows_of(results, arm=arm, budget=budget)]


def report(results: Results) -> list[str]:
    *_, largest = budgets = results["settings"]["budgets"]
    head = ["search", *(f"selected, {budget} tokens" for budget in budgets), f"any, {largest}"]
    rows = []
    for arm, label in ARMS.items():
        cells = [label, *(str(interval(values_of(results, arm, budget, "selected"))) for budget in budgets)]
        cells.append(str(interval(values_of(results, arm, largest, "any"))))
        cells.append(mean(values_of(results, arm, largest, "completions", 1.0), 1))
        rows.append([*cells, f"{mean(values_of(results, arm, largest, 'kept_share'))}%"])
    return [table([*head, f"completions, {largest}", f"tokens kept, {largest}"], rows), sentence(results)]


def sentence(results: Results) -> str:
    """Sentence on the searches that differ from best-of-N with the same values, at the largest budget."""
    budget = results["settings"]["budgets"][-1]
    selected = {arm: values_of(results, arm, budget, "selected") for arm in ARMS}
    reference = {arm: selected[f"best_of_n/{arm.split('/')[1]}"] for arm in ARMS}
    found = {ARMS[arm]: paired(selected[arm], reference[arm]) for arm in ARMS if not arm.startswith("best")}
    title = f"Correct selected completions with {budget} tokens, minus `best_of_n` with the same values, in points"
    return compared(title, found)


def draw(results: Results) -> Any:
    """Pass rate of the selected completion against sampled tokens, a panel per strategy: means over seeds."""
    figure, panels = new_figure(1, len(STRATEGIES), 11, 3.6, sharey=True)
    for panel, strategy in zip(panels, STRATEGIES, strict=True):
        for values, label in VALUES.items():
            numbers = [(f"{strategy}/{values}", budget) for budget in results["settings"]["budgets"]]
            x = [fmean(values_of(results, *each, "tokens", 1.0)) for each in numbers]
            y = [fmean(values_of(results, *each, "selected")) for each in numbers]
            panel.plot(x, y, "o-", label=label)
        panel.set(title=strategy, xlabel="sampled tokens per problem")
    panels[0].set(ylabel="correct, selected completion (%)")
    return figure


QUICK = {"budgets": (60,), "problems": 2, "max_completion_length": 24, "warm_start": 2}
STUDY = Study("search", "search", 5, SETTINGS, QUICK, measure, report, draw)


if __name__ == "__main__":
    main(STUDY)
