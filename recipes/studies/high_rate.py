"""What saves a run whose learning rate is too high?

Question: at 1e-3, three times the best rate of `pace.py`, runs on the short list sums learn and then collapse, ours
and stock TRL's. Would another default have saved them? Arms: TRL's default and ours as they are; TRL with the constant
divisor but with the std; ours with warm-up, with gradients clipped at half their usual norm, with a decaying rate, and
with a second moment in AdamW that forgets sooner. (The clip range of the objective cannot matter here: with one
optimizer step per batch every importance ratio is 1.) Measure: held-out accuracy, its best and its last. Rule: an arm
differs from ours as it is if the interval of the differences of the last accuracy, seed by seed, leaves out 0.
"""

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from frame import Results, Row, Run, Study, compared, interval, main, paired, rows_of, table
from pace import OURS, SETTINGS, STOCK, Arm, train

from trl_drgrpo.common.drawing import draw_trend, new_figure

VARIANTS: dict[str, tuple[tuple[type, type], dict[str, Any], str]] = {
    "trl": (STOCK, {}, "TRL, its default (`dapo`)"),
    "std": (STOCK, {"loss_type": "dr_grpo"}, 'TRL, `loss_type="dr_grpo"`'),
    "ours": (OURS, {}, "ours"),
    "warm_up": (
        OURS,
        {"warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup"},
        "ours, `warmup_steps=10`",
    ),
    "clipped": (OURS, {"max_grad_norm": 0.015}, "ours, `max_grad_norm=0.015`"),
    "decaying": (OURS, {"lr_scheduler_type": "linear", "max_steps": 80}, "ours, linear decay to 0 over 80 steps"),
    "beta2": (OURS, {"adam_beta2": 0.95}, "ours, `adam_beta2=0.95`"),
}
ARMS = {name: Arm(classes, fields, label, name, name) for name, (classes, fields, label) in VARIANTS.items()}
HIGH: dict[str, Any] = {**SETTINGS, "tasks": {"short": SETTINGS["tasks"]["short"]}, "learning_rate": 1e-3}


def train_one(settings: dict[str, Any], folder: Path, seed: int, arm: str) -> list[Row]:
    """One run, as in [`pace.train`]."""
    return train(None, settings, folder, seed, "short", arm, settings["learning_rate"], ARMS)


def measure(run: Run) -> None:
    run.each("runs", ("seed", "arm"), list(product(run.seeds, ARMS)), train_one)


def _best(run: Row) -> float:
    return 100 * max(run["pass_rate"])


def _last(run: Row) -> float:
    return 100 * run["pass_rate"][-1]


def report(results: Results) -> list[str]:
    rows = []
    for arm, kind in ARMS.items():
        runs = rows_of(results, arm=arm)
        last = ", ".join(f"{_last(run):.0f}" for run in runs)
        rows.append([kind.label, str(interval(map(_best, runs))), str(interval(map(_last, runs))), last])
    return [table(["arm", "best accuracy, %", "last accuracy, %", "by seed"], rows)]


def conclude(results: Results) -> str:
    own = [_last(run) for run in rows_of(results, arm="ours")]
    others = {arm: [_last(run) for run in rows_of(results, arm=arm)] for arm in ARMS if arm != "ours"}
    found = {ARMS[arm].label: paired(each, own) for arm, each in others.items()}
    return compared("Last accuracy minus that of ours, in points", found)


def draw(results: Results) -> Any:
    """Accuracy over generated tokens, a panel per arm: every seed, and their mean."""
    figure, panels = new_figure(1, len(ARMS), 2.2 * len(ARMS), 3, sharey=True)
    for axes, (arm, kind) in zip(panels, ARMS.items(), strict=True):
        runs = rows_of(results, arm=arm)
        shortest = min(len(run["pass_rate"]) for run in runs)
        curves = [[100 * run["pass_rate"][i] for run in runs] for i in range(shortest)]
        at = [tokens / 1000 for tokens in runs[0]["tokens"][:shortest]]
        draw_trend(axes, at, curves, [*map(statistics.fmean, curves)], "#0072b2", None)
        axes.set_title(kind.label.replace("`", ""), fontsize=8)
        axes.set_xlabel("1000 tokens")
    panels[0].set_ylabel("held-out accuracy, %")
    return figure


QUICK = {
    "tasks": {"short": {**SETTINGS["tasks"]["short"], "longest": 16, "tokens": 500, "held_out": 8}},
    "prompts": 2,
    "num_generations": 4,
    "different_prompts": 16,
    "evaluations": 2,
}
STUDY = Study("high_rate", "pace", 3, HIGH, QUICK, measure, report, draw, conclude)


if __name__ == "__main__":
    main(STUDY)
