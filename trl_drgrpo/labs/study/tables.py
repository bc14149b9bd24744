"""Estimates of the one-step measurement, to read and to keep."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trl_drgrpo.features.diagnostics.stop_push import Push, decision_scores, stop_push
from trl_drgrpo.labs.study.correctness_probe import ProbeScores
from trl_drgrpo.labs.study.direction import GAP, REFERENCE, REPORTED, Changes, Estimate, Rollouts
from trl_drgrpo.labs.study.objectives import OBJECTIVES

_HEADINGS = {
    "length_right": "correct answers, tokens",
    "length_wrong": "incorrect answers, tokens",
    "length": "all answers, tokens",
    "pass_rate": "pass rate, points",
    GAP: "incorrect minus correct, tokens",
}
_SCALES = {"pass_rate": 100.0}  # shares become percentage points


def changes_table(changes: Changes) -> str:
    """A Markdown table of changes, one of their differences from Dr. GRPO, each with its standard error.

    Args:
        changes ([`Changes`]): Of the measurement.
    """
    title = f"Change per update of unit length, {changes.batches} batches, ± standard error"
    return "\n".join(
        [
            f"{title}:\n",
            *_rows(changes.changes, list(OBJECTIVES)),
            f"\nDifference from {OBJECTIVES[REFERENCE].label}, from the same batches:\n",
            *_rows(changes.differences, [name for name in OBJECTIVES if name != REFERENCE]),
        ]
    )


def pushes(
    batches: Sequence[Rollouts], decisions: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
) -> dict[str, dict[str, Push]]:
    """The push of an update on the decision to stop, see `features/diagnostics/stop_push.py`.

    Args:
        batches (`Sequence[Rollouts]`): Batches that say which completions stopped.
        decisions (`Callable`, *optional*): `f(lengths, stopped)` -> decisions to go on or to stop in each row; by
            default each token is one.

    Returns:
        `dict`: Per key of `OBJECTIVES` the push of the `correct` and of the `incorrect` completions.
    """
    size = batches[0].num_generations
    lengths, right = (np.concatenate([getattr(b, name) for b in batches]) for name in ("lengths", "right"))
    stopped = np.concatenate([np.zeros(len(b.lengths), bool) if b.stopped is None else b.stopped for b in batches])
    batch = np.repeat(np.arange(len(batches)), [len(b.lengths) for b in batches])
    group = np.arange(len(lengths)) // size
    decided = lengths if decisions is None else decisions(lengths, stopped)
    scores = decision_scores(decided, stopped, group, batch)
    found = {}
    for name, objective in OBJECTIVES.items():
        weights = [objective.token_weights(b.rewards, b.lengths, size, b.loss_normalizer) for b in batches]
        together = np.concatenate(weights)
        found[name] = {
            "correct": stop_push(together, scores, right, group),
            "incorrect": stop_push(together, scores, ~right, group),
        }
    return found


def push_table(found: dict[str, dict[str, Push]]) -> str:
    """The same as a Markdown table, with its intervals (95%)."""
    groups = max(push.groups for of_objective in found.values() for push in of_objective.values())
    lines = [
        f"Push to go on instead of stopping, in decisions per unit of weight, {groups} groups with a signal, ± 95%:\n",
        "| objective | correct answers | incorrect answers |",
        "|---|---|---|",
    ]
    for name, of_objective in found.items():
        cells = [_pushed(of_objective[kind]) for kind in ("correct", "incorrect")]
        lines.append(f"| {OBJECTIVES[name].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pushes_as_dict(found: dict[str, dict[str, Push]]) -> dict[str, Any]:
    """The same as plain types for JSON; unknown values are `None`."""
    return {
        name: {
            kind: {key: None if value != value else value for key, value in vars(push).items()}
            for kind, push in of_objective.items()
        }
        for name, of_objective in found.items()
    }


def probe_table(scores: ProbeScores) -> str:
    """AUC of the probes as a Markdown table, with intervals (95%), and a conclusion."""
    lines = [
        f"Linear probe for correctness where an answer may stop, pairs of answers to one of {scores.prompts} prompts, "
        "AUC ± 95%:\n",
        "| the probe sees | AUC |",
        "|---|---|",
        f"| the last hidden state | {_auc(scores.states)} |",
        f"| the position alone | {_auc(scores.position)} |",
        f"| difference | {_auc(scores.difference, '+')} |",
    ]
    return "\n".join([*lines, "", probe_sentence(scores)])


def probe_sentence(scores: ProbeScores) -> str:
    """Sentence on the length bias, from the numbers."""
    tells = "the state tells correct from incorrect answers to the same prompt"
    if scores.states.value <= 0.5 + 1.96 * scores.states.standard_error:
        found = (
            "the state does not tell correct from incorrect answers to the same prompt: the pushes of a mean per row "
        )
        found += "cancel there."
    elif scores.difference.value > 1.96 * scores.difference.standard_error:
        found = f"{tells}, and better than its position does: a mean per row can move their lengths apart."
    else:
        found = f"{tells} no better than its position does: it may know no more than that one kind is longer."
    return (
        f"Where an answer may stop, {found} How far depends on the distance of the states, whose square is "
        f"{scores.apart:.3f} of a state's squared length, and on what is left to decide there: the sum of h (1 - h) "
        f"over an answer's tokens, h the probability to stop, is {scores.open_stops:.2f} (near 1: a coin at every "
        "token; 0: when to stop is decided elsewhere)."
    )


def probe_as_dict(scores: ProbeScores) -> dict[str, Any]:
    """The same as plain types for JSON."""
    return dataclasses.asdict(scores)


def _auc(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.value:{sign}.3f} ± {1.96 * estimate.standard_error:.3f}"


def _pushed(push: Push) -> str:
    if math.isnan(push.standard_error):
        return "unknown"
    return f"{push.value:+.3f} ± {1.96 * push.standard_error:.3f}"


def _rows(estimates: dict[str, dict[str, Estimate]], objectives: list[str]) -> list[str]:
    lines = ["| objective | " + " | ".join(_HEADINGS[q] for q in REPORTED) + " |", "|---" * (len(REPORTED) + 1) + "|"]
    for name in objectives:
        cells = [_cell(estimates[name][quantity], _SCALES.get(quantity, 1.0)) for quantity in REPORTED]
        lines.append(f"| {OBJECTIVES[name].label} | " + " | ".join(cells) + " |")
    return lines


def _cell(estimate: Estimate, scale: float) -> str:
    if estimate.value != estimate.value:
        return "unknown"
    return f"{scale * estimate.value:+.3g} ± {scale * estimate.standard_error:.2g}"


def changes_as_dict(changes: Changes) -> dict[str, Any]:
    """The same as plain types for JSON; unknown values are `None`.

    Args:
        changes ([`Changes`]): Of the measurement.
    """

    def plain(estimates: dict[str, dict[str, Estimate]]) -> dict[str, Any]:
        return {
            name: {
                quantity: {key: None if value != value else value for key, value in dataclasses.asdict(each).items()}
                for quantity, each in found.items()
            }
            for name, found in estimates.items()
        }

    return {
        "batches": changes.batches,
        "changes": plain(changes.changes),
        "differences_from_dr_grpo": plain(changes.differences),
        "steepest_gap": None if math.isnan(changes.steepest_gap) else changes.steepest_gap,
    }
