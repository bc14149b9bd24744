"""Do completions that fork pay, at equal sampled tokens?

Question: branches share a prefix, so a group costs fewer tokens; do they estimate the gradient better for the same
number? Arms: flat groups and four ways to fork, on long list sums, with the outcome alone and with a rule that pays
for each correct line beside it. Tokens are those that were sampled: tokens that branches share count once. Every arm
goes through the trainer. Measures: the variance of the gradient at two models of fixed weights, and held-out pass
rates of runs that stop at the same tokens. A batch's gradient is a sum over groups that are drawn independently, so
its variance times its tokens is that of one group: `tr Cov(g) * E[tokens]`. At equal tokens, arms compare as these
numbers do. Rule: forks differ from flat groups if the interval of the ratio leaves out 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from frame import Interval, Results, Row, Run, Study, compared, interval, main, mean, rows_of, table
from credit import OUTCOME, TASKS, trainer_of
from long_sums import MAX_COMPLETION, make_problems
from small_models import Evaluations, Moments, group_gradients, height, mean_height, pass_rate

from trl_drgrpo.check.bias import sampled_batches
from trl_drgrpo.common.drawing import COLORS, new_figure
from trl_drgrpo.demo.build import GAP_PROBABILITY, warm_start
from trl_drgrpo.features.forks import step_means
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.steps.segmenter import configured_segmenter
from trl_drgrpo.upstream.private_state import swapped

FLAT, STEPS = "flat", "rule/to_go"  # STEPS: rewards of `credit.py`, the outcome is paid beside them
FORKS: dict[str, dict[str, Any]] = {  # and the fields of the configuration
    FLAT: {"advantage_baseline": "leave_one_out"},
    "2": {"forks": 2},
    "2_twice": {"forks": 2, "fork_depth": 2},
    "4": {"forks": 4},
    "2_entropy": {"forks": 2, "fork_at": "entropy"},  # and the threshold that belongs to the model
}
FORKED = [forks for forks in FORKS if forks != FLAT]
LEARNING = ((FLAT, OUTCOME), ("2", OUTCOME), ("2_entropy", OUTCOME), (FLAT, STEPS), ("2", STEPS))
REWARDS = {OUTCOME: "outcome", STEPS: "outcome and steps"}
SETTINGS: dict[str, Any] = {
    "stages": {"low": GAP_PROBABILITY, "high": 0.08},  # mistakes of a stage's demonstrator; runs begin at the first
    "entropy_quantile": 0.75,  # of the entropies of a stage's steps; the threshold of `fork_at: entropy`
    "prompts": 32,  # groups of a batch whose gradients are measured
    "batches": 4,  # of each arm and seed
    "tokens": 40_000,  # sampled in a run
    "held_out": 256,
    "evaluations": 2,  # of a run, behind the first
}
_SIZES = {"prompts": 4, "num_generations": 8, "learning_rate": 1.5e-4}
_STAGE_SEED = 10_000  # of no run
Stages = dict[str, Row]


def forks_trainer(forks: str, rewards: str, seed: int, folder: Path, stage: Row, output: str, **sizes: int) -> Any:
    """The trainer of an arm, at the model of a stage. `sizes`: other ones than those of a run."""
    fields = dict(FORKS[forks]) if forks == FLAT else {**FORKS[forks], "step_separator": TASKS["long_sums"].separator}
    if fields.get("fork_at") == "entropy":
        fields["fork_threshold"] = stage["threshold"]
    folders, rule = (folder / stage["stage"], folder / "runs" / output), TASKS["long_sums"].rule
    trainer = trainer_of("long_sums", rewards, seed, {**_SIZES, **sizes}, folders, rule, **fields)
    trainer.forks.mean_length = stage.get("mean_length")  # known from the first batch on
    return trainer


def _sizes(settings: dict[str, Any], *names: str) -> dict[str, int]:
    """Those of the settings that are a trainer's; in miniature completions are shorter, too."""
    return {name: settings[name] for name in ("longest", *names) if name in settings}


def make_stage(settings: dict[str, Any], folder: Path, name: str) -> list[Row]:
    """Warm-start the model of a stage, and look at it before anything is compared: held-out `pass_rate`, `mean_length`
    of completions and `threshold`."""
    if not (folder / name / "model.safetensors").is_file():
        warm_start(folder / name, steps=settings.get("warm_start", 200), gap_probability=settings["stages"][name])
    sizes = _sizes(settings, "prompts")
    trainer = forks_trainer(FLAT, STEPS, _STAGE_SEED, folder, {"stage": name}, name, **sizes)
    batch, rollouts = next(sampled_batches(trainer))
    completions = batch.scored.completion_ids
    prompts = zip(rollouts["prompt_ids"], rollouts["prompt_mask"].bool(), strict=True)
    entropies = trainer.completion_entropies([ids[mask].tolist() for ids, mask in prompts], completions)
    cut = configured_segmenter(trainer.args.step_separator)
    ends = [cut(ids, trainer.text_tokenizer).ends for ids in completions]
    steps = [step for row, end in zip(entropies, ends, strict=True) for step in step_means(row, end)]
    found = {
        "stage": name,
        "pass_rate": _held_out(settings, trainer.model),
        "mean_length": round(sum(map(len, completions)) / len(completions), 1),
        "threshold": round(float(torch.tensor(steps).quantile(settings["entropy_quantile"])), 4),
    }
    return [found]


def _held_out(settings: dict[str, Any], model: Any) -> float:
    problems = make_problems(settings["held_out"], "held_out")
    return pass_rate(model, problems, settings.get("longest", MAX_COMPLETION))


def gradients(stages: Stages, settings: dict[str, Any], folder: Path, stage: str, forks: str, seed: int) -> list[Row]:
    """Gradients of an arm's groups at a stage, with either rewards, on the same completions; the mean gradients are
    kept in a file.

    Returns:
        `list[dict]`: For each kind of `rewards` the `variance` of a group's gradient, and its mean `tokens`
            (`all_tokens`: those that rows share counted in each).
    """
    output, sizes = f"{stage}-{forks}-{seed}", _sizes(settings, "prompts")
    trainer = forks_trainer(forks, STEPS, seed, folder, stages[stage], output, **sizes)
    trainer.model.train()  # groups fork in training alone
    moments, counts = {kind: Moments() for kind in REWARDS}, {"tokens": 0, "all_tokens": 0}
    for batch, rollouts in islice(sampled_batches(trainer), settings["batches"]):
        lengths = [len(ids) for ids in batch.scored.completion_ids]
        counts["all_tokens"] += sum(lengths)
        counts["tokens"] += sampled_tokens(batch.forks, lengths)
        advantages = {}
        for kind, weight in ((STEPS, trainer.args.process_weight), (OUTCOME, 0.0)):
            with swapped(trainer.args, process_weight=weight):
                advantages[kind] = replace(batch, advantages=trainer.compute_advantages(batch)).token_advantages
        for gradients in group_gradients(trainer, rollouts, batch.num_generations, advantages):
            for kind, gradient in gradients.items():
                moments[kind].add(gradient)
    torch.save({kind: each.mean for kind, each in moments.items()}, folder / f"{output}.pt")
    groups = settings["batches"] * settings["prompts"]
    arm = {"stage": stage, "forks": forks, "seed": seed, **{key: count / groups for key, count in counts.items()}}
    return [{**arm, "rewards": kind, "variance": each.variance} for kind, each in moments.items()]


def sampled_tokens(forks: Forks | None, lengths: Sequence[int]) -> int:
    """Tokens of rows, those that several share counted once: a parent of 10 tokens that forks behind 4, and one of 6
    that does not.

    >>> sampled_tokens(Forks(2, [[4], [4], [6], [6]]), [10, 9, 6, 6])
    21
    """
    if forks is None:
        return sum(lengths)
    b, depth, shared = forks.branches, forks.depth, 0
    for i, cuts in enumerate(forks.cuts):
        if i % b**depth:  # not the first leaf of its parent: it left an earlier one at a cut
            shared += next(cut for level, cut in enumerate(cuts, start=1) if i % b ** (depth - level) == 0)
    return sum(lengths) - shared


def train(stages: Stages, settings: dict[str, Any], folder: Path, forks: str, rewards: str, seed: int) -> list[Row]:
    """Train one arm with one seed until its tokens are sampled: per evaluation `tokens`, `pass_rate` and `seconds`,
    per step the share of rows that fork (`cut`)."""
    stage = stages[next(iter(settings["stages"]))]
    run: Row = {"forks": forks, "rewards": rewards, "seed": seed, "tokens": [0], "seconds": [0.0]}
    run["pass_rate"] = [stage["pass_rate"]]
    output = f"{forks}-{rewards.replace('/', '-')}-{seed}"
    trainer = forks_trainer(forks, rewards, seed, folder, stage, output, **_sizes(settings))

    def sampled(logs: dict[str, float], rows: int) -> float:
        return logs["completions/mean_length"] * rows * logs.get("forks/sampled_token_frac", 1.0)

    sizes = (settings["tokens"], settings["evaluations"])
    trainer.add_callback(Evaluations(run, *sizes, partial(_held_out, settings), sampled))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    cut = [round(entry.get("forks/cut_frac", 0.0), 3) for entry in steps]
    return [{**run, "steps": len(steps), "cut": cut}]


def agreement(results: Results, seeds: Sequence[int], folder: Path) -> list[Row]:
    """Agreement of each arm with the flat arm, both over all seeds: the cosine of the mean gradients, and by seed the
    `scale`, the length along the flat gradient over that gradient's own (1 if both estimate the same)."""
    found, settings = [], results["settings"]
    groups = len(seeds) * settings["prompts"] * settings["batches"]
    for stage, rewards in product(settings["stages"], REWARDS):
        means = {
            forks: torch.stack([torch.load(folder / f"{stage}-{forks}-{seed}.pt")[rewards] for seed in seeds])
            for forks in FORKS
        }
        flat = means[FLAT].mean(dim=0)
        variance = fmean(
            row["variance"] for row in rows_of(results, "gradients", stage=stage, forks=FLAT, rewards=rewards)
        )
        square = float(flat @ flat) - variance / groups  # the mean's own noise taken out
        for forks in FORKS:
            own = means[forks].mean(dim=0)
            arm = {"stage": stage, "forks": forks, "rewards": rewards, "square": square}
            cosine = float(own @ flat / (own.norm() * flat.norm()))
            found.append({**arm, "cosine": cosine, "scale": (means[forks] @ flat / square).tolist()})
    return found


def measure(run: Run) -> None:
    names = run.settings["stages"]
    stages = {row["stage"]: row for row in run.each("stages", ("stage",), product(names), make_stage)}
    learning = [(*arm, seed) for seed in run.seeds for arm in LEARNING]
    run.each("runs", ("forks", "rewards", "seed"), learning, partial(train, stages))
    arms = [(*arm, seed) for seed in run.seeds for arm in product(names, FORKS)]
    run.each("gradients", ("stage", "forks", "seed"), arms, partial(gradients, stages))
    run.results["agreement"] = agreement(run.results, run.seeds, run.folder)


# What the numbers say -----------------------------------------------------------------------------------------------


def label(forks: str) -> str:
    """The settings of an arm, as Markdown."""
    return "flat" if forks == FLAT else ", ".join(f"`{name}: {value}`" for name, value in FORKS[forks].items())


def over_flat(results: Results, stage: str, forks: str, rewards: str, tokens: str = "tokens") -> Interval:
    """Variance times tokens (those sampled, or `all_tokens`) over that of flat groups: the ratio of the means over
    seeds, with a jackknife's interval."""
    rows = (rows_of(results, "gradients", stage=stage, forks=each, rewards=rewards) for each in (forks, FLAT))
    own, flat = (np.array([row["variance"] * row[tokens] for row in each]) for each in rows)
    left_out = (own.sum() - own) / (flat.sum() - flat)
    return interval((len(own) * own.sum() / flat.sum() - (len(own) - 1) * left_out).tolist())


def report(results: Results) -> list[str]:
    settings, texts = results["settings"], []
    seeds, groups = len({run["seed"] for run in results["runs"]}), settings["prompts"] * settings["batches"]
    texts += [f"{settings['tokens'] // 1000} thousand tokens a run, {seeds} seeds, mean and 95% interval:"]
    texts += [learning_table(results)]
    for stage in results["stages"]:
        about = f"{stage['pass_rate']:.1%} correct, threshold of the entropy {stage['threshold']:.3f}"
        texts += [f"{about}, {seeds} seeds of {groups} groups, mean and 95% interval:"]
        texts += [variance_table(results, stage["stage"])]
    return texts


def variance_table(results: Results, stage: str) -> str:
    """Variance of the gradient times tokens. Over the squared length of the gradient, the first column with an
    interval is the number of tokens at which a gradient and its noise are equally long. In the second ratio to flat
    groups each row's tokens count, shared or not. `along` and `cosine` compare the mean gradient with that of flat
    groups."""
    head = ["rewards", "groups", "tokens of a group", "thousand tokens to signal = noise", "over flat"]
    head += ["over flat, all rows' tokens", "along", "cosine"]
    rows = []
    for rewards, forks in product(REWARDS, FORKS):
        key = {"stage": stage, "forks": forks, "rewards": rewards}
        seeds, (agreed,) = (rows_of(results, part, **key) for part in ("gradients", "agreement"))
        square = 1000 * (agreed["square"] or float("nan"))
        needed = interval(row["variance"] * row["tokens"] / square for row in seeds)
        ratios = [over_flat(results, stage, forks, rewards, tokens).text(2) for tokens in ("tokens", "all_tokens")]
        ratios += [interval(agreed["scale"]).text(2), f"{agreed['cosine']:.2f}"]
        cells = [REWARDS[rewards], label(forks), mean(row["tokens"] for row in seeds), str(needed)]
        rows.append([*cells, *(["1"] * 4 if forks == FLAT else ratios)])
    return table(head, rows)


def learning_table(results: Results) -> str:
    """Held-out pass rates in percent, and in points over flat groups with the same rewards and seed."""
    tokens = results["settings"]["tokens"]
    measures: dict[str, Callable[[Row, float], float]] = {"mean over the tokens": mean_height, "all tokens": height}
    head = ["rewards", "groups", "steps", "rows that fork, %"]
    head += [name for over in measures for name in (f"pass rate, {over}", "minus flat")]
    rows = []
    for forks, rewards in LEARNING:
        runs, flat = (rows_of(results, forks=each, rewards=rewards) for each in (forks, FLAT))
        cells = [REWARDS[rewards], label(forks), mean(run["steps"] for run in runs)]
        cells.append(mean(100 * sum(run["cut"]) / len(run["cut"]) for run in runs))
        for rate in measures.values():
            own, its = ([100 * rate(run, tokens) for run in each] for each in (runs, flat))
            differences = interval(a - b for a, b in zip(own, its, strict=True))
            cells += [str(interval(own)), "" if forks == FLAT else differences.text(signed=True)]
        rows.append(cells)
    return table(head, rows)


def conclude(results: Results) -> str:
    texts = []
    for stage, rewards in product(results["stages"], REWARDS):
        found = {label(forks): over_flat(results, stage["stage"], forks, rewards) for forks in FORKED}
        title = f"{stage['pass_rate']:.0%} correct, {REWARDS[rewards]}: gradient variance at equal tokens, over flat"
        texts.append(compared(title, found, even=1.0, decimals=2))
    return " ".join(texts)


def draw(results: Results) -> Any:
    """Variance times tokens over that of flat groups, and pass rates over tokens: means over seeds."""
    figure, (left, right) = new_figure(1, 2, 12, 4.2)
    series = list(product(results["stages"], REWARDS))
    for place, ((stage, rewards), color) in enumerate(zip(series, COLORS, strict=False)):
        found = [over_flat(results, stage["stage"], forks, rewards) for forks in FORKED]
        y = [row + 0.15 * (place - (len(series) - 1) / 2) for row in range(len(FORKED))]
        means, spread = [each.mean for each in found], [each.half_width for each in found]
        name = f"{stage['pass_rate']:.0%} correct, {REWARDS[rewards]}"
        left.errorbar(means, y, xerr=spread, fmt="o", capsize=3, color=color, label=name)
    left.axvline(1, color="gray", linewidth=1)
    left.set_yticks(range(len(FORKED)), [label(forks).replace("`", "") for forks in FORKED])
    left.invert_yaxis()
    left.set(xlabel="gradient variance x sampled tokens, over flat groups")
    grid = [results["settings"]["tokens"] * part / 12 for part in range(13)]
    for (forks, rewards), color in zip(LEARNING, COLORS, strict=False):
        rates = [fmean(height(run, x) for run in rows_of(results, forks=forks, rewards=rewards)) for x in grid]
        name, dash = f"{label(forks).replace('`', '')}, {REWARDS[rewards]}", "-" if rewards == OUTCOME else "--"
        right.plot([x / 1000 for x in grid], rates, dash, color=color, label=name)
    right.set(xlabel="thousand sampled tokens", ylabel="held-out pass rate")
    return figure


QUICK = {"prompts": 2, "batches": 1, "tokens": 1_000, "held_out": 8, "warm_start": 2, "longest": 40}
STUDY = Study("forks", "forks", 5, SETTINGS, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
