"""Do dynamic sampling and a curriculum pay, at equal generated tokens?

Question: batches of live prompts learn more per step. Do they learn more per token? Arms: the demo's
model, trained on batches that are filled in seven ways. Starts: sums of which it solves few, and sums of which it
solves about half. Model, prompts, seeds and settings are the same in every arm of a start, and each arm ends at the
same number of generated tokens. Tokens of dropped groups count, so an arm that drops many takes fewer optimizer steps.
Two arms multiply the learning rate by the factor that is hidden in DAPO's mean, as the arm `dapo` of the same start
and seed had it on average. Measure: held-out pass rates. Rule: an arm differs from plain sampling if the interval of
the differences over the run, seed by seed, leaves out 0.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from frame import Results, Row, Run, Study, compared, interval, main, mean, paired, rows_of, table
from small_models import Evaluations, height, mean_height, pass_rate, small_trainer
from transformers import AutoModelForCausalLM

from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.task import list_sum_reward, make_dataset, make_problems

SETTINGS: dict[str, Any] = {
    "starts": {  # digits of a sum, and tokens that a run generates
        "low": {"title": "few correct", "terms": (5, 6), "max_completion": 72, "tokens": 80_000},
        "middle": {"title": "half correct", "terms": (3, 3), "max_completion": 40, "tokens": 40_000},
    },
    "prompts": 8,
    "num_generations": 8,
    "learning_rate": 3e-4,
    "different_prompts": 128,  # of a seed; they come again and again
    "held_out": 256,
    "evaluations": 3,  # the one before training not counted
}
_QUICK_START = {"terms": (3, 4), "max_completion": 24, "tokens": 350}
PLAIN, FACTOR_OF, RAISED = "plain", "dapo", "_raised"
ARMS: dict[str, dict[str, Any]] = {  # and the fields of the configuration
    PLAIN: {},
    "dynamic": {"dynamic_sampling": True},
    FACTOR_OF: {"dynamic_sampling": "dapo"},
    "curriculum": {"curriculum": True},
    "both": {"dynamic_sampling": True, "curriculum": True},
    "plain_raised": {},
    "dynamic_raised": {"dynamic_sampling": True},
}
COMPARED = [(arm, PLAIN) for arm in ARMS if arm != PLAIN]
COMPARED += [("dynamic", FACTOR_OF), ("dynamic_raised", "plain_raised")]


def label(arm: str) -> str:
    """The settings of an arm, as Markdown."""
    settings = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in ARMS[arm].items()) or "plain"
    return settings + (", learning rate x factor" if arm.endswith(RAISED) else "")


def train(
    factors: dict[tuple[int, str], float], settings: dict[str, Any], folder: Path, seed: int, start: str, arm: str
) -> list[Row]:
    """Train one arm with one seed until the start's tokens are generated.

    Returns:
        `list[dict]`: One row: `learning_rate` as it was used; per evaluation `tokens`, `pass_rate` and `seconds`;
            optimizer `steps`; `live_share` of the generated groups that have different rewards; `factor`, mean over
            steps of the one by which DAPO's mean scales the unbiased gradient; `capped_share` of the steps that
            reached the cap on draws, `clipped_share` of those whose gradient was longer than `max_grad_norm`.
    """
    task, rate = settings["starts"][start], settings["learning_rate"]
    rate *= factors[seed, start] if arm.endswith(RAISED) else 1
    problems = make_problems(settings["held_out"], "held_out", 0, task["terms"])
    measured = partial(pass_rate, problems=problems, longest=task["max_completion"])
    run: Row = {"start": start, "arm": arm, "seed": seed, "learning_rate": rate, "tokens": [0], "seconds": [0.0]}
    run["pass_rate"] = [measured(AutoModelForCausalLM.from_pretrained(MODEL_DIR))]
    evaluations = Evaluations(run, task["tokens"], settings["evaluations"], measured)

    def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        evaluations.written += sum(map(len, completion_ids))  # also those of groups that are dropped
        return list_sum_reward(completions, **columns)

    data = make_dataset(settings["different_prompts"], "train", seed, task["terms"])
    sizes = (settings["prompts"], settings["num_generations"])
    fields = {"max_completion_length": task["max_completion"], "learning_rate": rate, "max_steps": 10_000}
    output = folder / f"{start}-{arm}-{seed}"
    trainer = small_trainer(MODEL_DIR, output, reward, data, *sizes, seed=seed, **fields, **ARMS[arm])
    trainer.add_callback(evaluations)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    limit = trainer.args.max_grad_norm
    run |= {"steps": len(steps), "clipped_share": round(fmean(entry["grad_norm"] > limit for entry in steps), 3)}
    run |= {"factor": None, "capped_share": None}
    sampled = [entry for entry in steps if "sampling/draws" in entry]
    if sampled:
        live, made = (sum(entry[f"sampling/groups_{key}"] for entry in sampled) for key in ("live", "generated"))
        run |= {"live_share": round(live / made, 3)}
        run |= {"capped_share": round(fmean(entry["sampling/capped_frac"] for entry in sampled), 3)}
    else:
        run |= {"live_share": round(1 - fmean(entry["frac_reward_zero_std"] for entry in steps), 3)}
    if arm == FACTOR_OF:
        found = [entry["sampling/dapo_factor"] for entry in steps if "sampling/dapo_factor" in entry]
        run["factor"] = round(fmean(found), 3) if found else 1.0  # no group was live
    return [run]


def measure(run: Run) -> None:
    for raised in (False, True):  # arms with a raised learning rate need the factor that another arm measures
        known = run.results.get("runs", [])
        factors = {(row["seed"], row["start"]): row["factor"] for row in known if row["arm"] == FACTOR_OF}
        calls = product(run.seeds, run.settings["starts"], ARMS)
        due = lambda seed, start, arm, raised=raised: arm.endswith(RAISED) == raised  # noqa: E731
        run.each("runs", ("seed", "start", "arm"), calls, partial(train, factors), due)


def by_arm(results: Results, start: str) -> dict[str, list[Row]]:
    """The runs of each arm from a start, ordered by seed."""
    return {arm: rows_of(results, start=start, arm=arm) for arm in ARMS}


def scores(results: Results, start: str) -> dict[str, dict[str, list[float]]]:
    """For each measure and arm, percentages by seed."""
    arms, end = by_arm(results, start), results["settings"]["starts"][start]["tokens"]
    shortest = {run["seed"]: run["seconds"][-1] for run in arms[PLAIN]}
    for run in (run for runs in arms.values() for run in runs):
        shortest[run["seed"]] = min(shortest[run["seed"]], run["seconds"][-1])
    measures = {
        "half of the tokens": lambda run: height(run, end / 2),
        "all tokens": lambda run: height(run, end),
        "mean over the tokens": lambda run: mean_height(run, end),
        "same CPU time": lambda run: height(run, shortest[run["seed"]], "seconds"),
    }
    return {
        name: {arm: [100 * measured(run) for run in runs] for arm, runs in arms.items()}
        for name, measured in measures.items()
    }


def report(results: Results) -> list[str]:
    texts = []
    for start in results["settings"]["starts"]:
        found, arms = scores(results, start), by_arm(results, start)
        head = ["batches", "learning rate", "steps", "live groups, %", "CPU s"]
        head += [f"pass rate, {name}" for name in found]
        rows = []
        for arm, runs in arms.items():
            rate = f"{fmean(run['learning_rate'] for run in runs):.1e}"
            cells = [label(arm), rate, mean(run["steps"] for run in runs)]
            cells += [mean(100 * run["live_share"] for run in runs), mean(run["seconds"][-1] for run in runs)]
            rows.append([*cells, *(str(interval(each[arm])) for each in found.values())])
        differences = [
            [f"{label(a)} minus {label(b)}", *(paired(each[a], each[b]).text(signed=True) for each in found.values())]
            for a, b in COMPARED
        ]
        texts += [table(head, rows), table(["difference, same seed", *found], differences)]
        factors = [run["factor"] for run in arms[FACTOR_OF]]
        spread = f"({min(factors):.2f} to {max(factors):.2f})"
        texts.append(f"The factor of DAPO's mean was {mean(factors, 2)} on average {spread} over seeds.")
    return texts


def conclude(results: Results) -> str:
    texts = []
    for name, start in results["settings"]["starts"].items():
        rates = scores(results, name)["mean over the tokens"]
        found = {label(arm): paired(rates[arm], rates[PLAIN]) for arm in ARMS if arm != PLAIN}
        title = f"{start['title'].capitalize()}, pass rate over the tokens minus plain sampling's, in points"
        texts.append(compared(title, found))
    return " ".join(texts)


def draw(results: Results) -> Any:
    """Pass rates over tokens and over time, a row of panels per start: means over seeds."""
    starts = results["settings"]["starts"]
    figure, panels = new_figure(len(starts), 2, 11, 3.8 * len(starts), sharey="row")
    for row, (name, start) in enumerate(starts.items()):
        over_tokens, over_time = panels[2 * row : 2 * row + 2]
        for (arm, runs), color in zip(by_arm(results, name).items(), (*COLORS, "#000000"), strict=True):
            dash, shown = "--" if arm.endswith(RAISED) else "-", None if row else label(arm).replace("`", "")
            tokens, seconds = (
                [end * part / 12 for part in range(13)]
                for end in (start["tokens"], min(run["seconds"][-1] for run in runs))
            )
            rates = [fmean(height(run, x) for run in runs) for x in tokens]
            over_tokens.plot([x / 1000 for x in tokens], rates, dash, color=color, label=shown)
            over_time.plot(
                seconds, [fmean(height(run, x, "seconds") for run in runs) for x in seconds], dash, color=color
            )
        over_tokens.set(title=start["title"], xlabel="thousand generated tokens", ylabel="held-out pass rate")
        over_time.set(title=start["title"], xlabel="CPU time (s)")
    return figure


QUICK = {"prompts": 2, "num_generations": 4, "different_prompts": 40, "held_out": 8, "evaluations": 1}
QUICK |= {"starts": {name: {**start, **_QUICK_START} for name, start in SETTINGS["starts"].items()}}
STUDY = Study("signal", "dynamic_sampling", 5, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
