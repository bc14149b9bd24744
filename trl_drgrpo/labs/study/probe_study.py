"""The prediction that the length bias is as large as the policy's knowledge of being incorrect, over small models.

Declared before the first number was seen: a positive rank correlation across models. One variable is the AUC of the
probe on stopping states (`stop_states.py`, `correctness_probe.py`). The other is the effect of GRPO's update on the
gap between incorrect and correct lengths, minus that of Dr. GRPO's, to first order, in tokens per update of unit
length (`direction.py`). Beside it stands the same effect as a share of the largest change of the gap that an update of
this length can make, since parameters and lengths differ between models. Both are also taken over the models that were
not made for the effect.

Added after a pilot on two of the models with another seed, before the study: `open_stops`, the extent to which
stopping is left to chance (`correctness_probe.py`). Where a model always knows whether to stop, its length is decided
at other tokens.

Added after one seed, in which a verdict that was read off the states with an AUC of 0.98 had no effect: `apart`, the
distance between the states of correct and of incorrect completions, and not only whether they can be told apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_drgrpo.labs.study.direction import GAP, Estimate, Rollouts
from trl_drgrpo.labs.study.measured_models import build_trainer, measure_all
from trl_drgrpo.labs.study.probe import measure_model
from trl_drgrpo.labs.study.stop_states import StateCollector


@dataclass(frozen=True)
class ProbeSettings:
    """Sizes of a measurement.

    Args:
        models (`Sequence[str]`): Keys of [`MODELS`].
        prompts, num_generations, batches (`int`): P, G and K.
    """

    models: Sequence[str] = (
        "guess_coin",
        "guess_three_in_four",
        "guess",
        "guess_one_letter",
        "sums_3",
        "sums_demo",
        "sums_6",
        "long_sums",
        "chains",
    )
    prompts: int = 16
    num_generations: int = 8
    batches: int = 5


SETTINGS = ProbeSettings()


def run_study(
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    jobs: int = 1,
    settings: ProbeSettings = SETTINGS,
    on_part: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Warm-start the models, measure each with every seed.

    Measurements that are in `output` already, with the same settings and versions, are kept.

    Args:
        seeds (`Sequence[int]`): Of prompts and sampling; the weights of a model are the same for all.
        output (`Path`): JSON file, written after each measurement.
        work_dir (`Path`): For models and trainers.
        jobs (`int`, *optional*, defaults to `1`): Measurements at a time, a process each if more than one.
        settings ([`ProbeSettings`], *optional*): Sizes.
        on_part (`Callable`, *optional*): Called with a line of text after each part.

    Returns:
        `dict[str, Any]`: Provenance, `settings` and `runs`, as in the file.
    """

    def said(run: dict[str, Any]) -> None:
        on_part(f"{run['model']}, seed {run['seed']}: AUC {run['states'][0]:.3f}, gap {run['gap'][0]:+.1f} tokens")

    return measure_all("probe", measure_one, settings, seeds, output, work_dir, jobs, said)


def measure_one(name: str, seed: int, work_dir: Path, settings: ProbeSettings) -> dict[str, Any]:
    """Probe and one-step effect of a model, from the same batches.

    Args:
        name (`str`): A key of [`MODELS`].
        seed (`int`): Of prompts and sampling.
        work_dir (`Path`): Has the model's start, or gets it.
        settings ([`ProbeSettings`]): Sizes.

    Returns:
        `dict[str, Any]`: Estimates as pairs of value and standard error: `states`, `position` and `difference` of the
            probes; `gap`, GRPO minus Dr. GRPO in tokens, and `gap_without_std`, the same of GRPO without its
            std; `steepest`, the largest change of the gap.
    """
    trainer = build_trainer(name, seed, work_dir, settings.prompts, settings.num_generations, settings.batches)
    collector, seen = StateCollector(trainer), []

    def watch(number: int, rollouts: Rollouts) -> None:
        seen.append(rollouts)

    changes = measure_model(trainer, settings.batches, watch, collector)
    scores = collector.probe()
    right = np.concatenate([rollouts.right for rollouts in seen])
    lengths = np.concatenate([rollouts.lengths for rollouts in seen])
    return {
        "model": name,
        "seed": seed,
        "pass_rate": round(float(right.mean()), 4),
        "length_right": round(float(lengths[right].mean()), 2),
        "length_wrong": round(float(lengths[~right].mean()), 2),
        "prompts": scores.prompts,
        "states": _pair(scores.states),
        "position": _pair(scores.position),
        "difference": _pair(scores.difference),
        "open_stops": round(scores.open_stops, 4),
        "apart": round(scores.apart, 5),
        "gap": _pair(changes.differences["grpo"][GAP]),
        "gap_without_std": _pair(changes.differences["grpo_without_std"][GAP]),
        "steepest": None if np.isnan(changes.steepest_gap) else round(changes.steepest_gap, 3),
    }


def _pair(estimate: Estimate) -> list[float]:
    return [round(estimate.value, 4), round(estimate.standard_error, 4)]
