r"""The length bias in a policy of two numbers, where nothing else can be the cause.

Question: does the division by the length alone make incorrect answers long? A completion falls into one of two states
that the policy sees: correct (probability 0.4) or incorrect (0.6). The state cannot be learned. In each state one
number is learned, the rate at which it stops, so the length is geometric, cut at 64 tokens. The reward is 1 in the
correct state, whatever the length: an unbiased objective has no reason to move either rate.

The expected change of a state's rate is proportional to `E[c_i * score_i | state]`. With a constant divisor
`E[A | state]` factors out and the score has mean 0: nothing but noise. With `1 / |o_i|` long completions weigh less
than short ones, the weighted score has a mean other than 0, and its sign is that of the advantage: correct answers
shrink, incorrect ones grow. GRPO without std does it too: the cause is the length, not the std.

Arms: the five objectives. Measure: expected lengths after 400 steps, exact from the policy. Rule: an objective shows
the bias if incorrect minus correct answers is above the same under Dr. GRPO.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from frame import Results, Row, Run, Study, interval, main, paired, rows_of, table
from length_bias import sentence

from trl_drgrpo.check.bias import OBJECTIVES, gradient_weight
from trl_drgrpo.common.drawing import COLORS, ROLES, new_figure

SETTINGS: dict[str, Any] = {
    "prompts": 16,
    "num_generations": 8,
    "max_length": 64,  # also L
    "right_probability": 0.4,
    "start_length": 8.5,  # mean of both states before the cut
    "learning_rate": 0.01,  # of Adam, on the logits of the stopping rates
    "steps": 400,
}
_STRIDE = 10  # steps between two points of the stored curves


def expected_length(stop_logits: np.ndarray, max_length: int) -> np.ndarray:
    """Mean of a geometric length cut at T: `(1 - (1 - p)^T) / p` tokens, p the rate of each logit."""
    stop = 1 / (1 + np.exp(-np.asarray(stop_logits, dtype=np.float64)))
    return (1 - (1 - stop) ** max_length) / stop


def length_scores(lengths: np.ndarray, stopped: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """`d log pi(o) / d logit` of completions `(B,)`: `1 - p` for the token that stops, `-p` for each that goes on.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): Tokens, the stopping one included.
        stopped (`np.ndarray` of shape `(B,)`, bool): False where the cut ended the completion.
        stop (`np.ndarray` of shape `(B,)`): The stopping rate p of each row's state.
    """
    return stopped * (1 - stop) - (lengths - stopped) * stop


def train(settings: dict[str, Any], folder: Path | None, arm: str, seed: int) -> list[Row]:
    """Train the two stopping rates with one objective; equal seeds see equal states.

    Returns:
        `list[dict]`: One row: `right` and `wrong`, thinned curves of the expected length, and their ends.
    """
    rng, rows = np.random.default_rng(seed), settings["prompts"] * settings["num_generations"]
    logits = np.full(2, np.log(1 / (settings["start_length"] - 1)))  # of the rates: correct, incorrect
    mean, square = np.zeros(2), np.zeros(2)  # Adam's, arXiv 1412.6980, ascending
    curve = [expected_length(logits, settings["max_length"])]
    for step in range(1, settings["steps"] + 1):
        wrong = (rng.random(rows) >= settings["right_probability"]).astype(int)
        stop = (1 / (1 + np.exp(-logits)))[wrong]
        drawn = rng.geometric(stop)
        lengths = np.minimum(drawn, settings["max_length"])
        sizes = (settings["num_generations"], settings["max_length"])
        weights = OBJECTIVES[arm].token_weights(1.0 - wrong, lengths, *sizes)
        scores = length_scores(lengths, drawn <= settings["max_length"], stop)
        gradient = np.bincount(wrong, weights=weights * scores, minlength=2)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        unbiased = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        logits = logits + settings["learning_rate"] * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        curve.append(expected_length(logits, settings["max_length"]))
    row: Row = {"arm": arm, "seed": seed}
    for side, values in zip(("right", "wrong"), np.transpose(curve).tolist(), strict=True):
        row |= {side: [round(x, 2) for x in values[::_STRIDE]], f"{side}_end": round(values[-1], 3)}
    return [row]


def measure(run: Run) -> None:
    run.each("runs", ("arm", "seed"), product(OBJECTIVES, run.seeds), train)


def report(results: Results) -> list[str]:
    start = f"from {results['runs'][0]['right'][0]:.1f} tokens to"
    rows = [
        [OBJECTIVES[arm].label, *(str(interval(_ends(results, arm, side))) for side in ("wrong", "right"))]
        for arm in OBJECTIVES
    ]
    lengths = table(["objective", f"incorrect answers, {start}", f"correct answers, {start}"], rows)
    gaps = {arm: np.subtract(*(_ends(results, arm, side) for side in ("wrong", "right"))) for arm in OBJECTIVES}
    differences = {arm: paired(gaps[arm], gaps["dr_grpo"]) for arm in OBJECTIVES if arm != "dr_grpo"}
    return [lengths, difficulty_table(results["settings"]["num_generations"]), sentence(differences)]


def difficulty_table(group: int) -> str:
    """The difficulty bias: pull on a prompt (sum of |A|) by its correct answers, the even prompt being 1."""
    weights = _pulls(group)
    head = [f"correct answers of {group}", "without std (Dr. GRPO)", "with std", "ratio"]
    cells = [(weights[False][k], weights[True][k], weights[True][k] / weights[False][k]) for k in range(1, group)]
    return table(head, [[str(k), *(f"{x:.2f}" for x in row)] for k, row in enumerate(cells, start=1)])


def draw(results: Results) -> Any:
    """Lengths over the steps for two objectives, all seeds, and the pull on a prompt by its difficulty."""
    figure, axes = new_figure(1, 3, 12, 3.8)
    for panel, arm in zip(axes, ("grpo", "dr_grpo"), strict=False):
        for side, role in (("wrong", "incorrect"), ("right", "correct")):
            for number, run in enumerate(rows_of(results, arm=arm)):
                steps = [_STRIDE * i for i in range(len(run[side]))]
                label = None if number or panel is not axes[0] else f"{role} answers"
                panel.plot(steps, run[side], color=ROLES[role], alpha=0.6, linewidth=1.2, label=label)
        limits = (0, results["settings"]["max_length"] * 0.8)
        panel.set(title=OBJECTIVES[arm].label, xlabel="optimizer step", ylim=limits)
    axes[0].set_ylabel("expected length (tokens)")
    group = results["settings"]["num_generations"]
    for std, color, label in ((True, COLORS[1], "with std"), (False, COLORS[0], "without (Dr. GRPO)")):
        axes[2].plot([k / group for k in range(group + 1)], _pulls(group)[std], "o-", color=color, label=label)
    title = "Pull on a prompt by its difficulty"
    axes[2].set(title=title, xlabel="pass rate of the group", ylabel="sum of |A|, even = 1")
    return figure


def _ends(results: Results, arm: str, side: str) -> list[float]:
    return [run[f"{side}_end"] for run in rows_of(results, arm=arm)]


def _pulls(group: int) -> dict[bool, list[float]]:
    """Relative to the even group, with the std and without it."""
    weights = {std: gradient_weight(group, std) for std in (True, False)}
    return {std: [value / values[group // 2] for value in values] for std, values in weights.items()}


STUDY = Study("length_bias_tabular", "length_bias", 5, SETTINGS, {"steps": 40}, measure, report, draw)


if __name__ == "__main__":
    main(STUDY)
