"""Small models and tasks on which one update is measured (`probe.py`, `variance.py`): made for an effect, or not.

`guess`: the game of `guessing.py`, with verdicts shown truly, truly three times in four, or by a coin, and with
comments in one letter whatever the verdict. `even`: the same game, rewarded for an even digit, with comments of four
lengths that change nothing but the noise. The others are list sums of the demo, long list sums with two demonstrators,
and chains of sums, warm-started a little shorter than in `arithmetic.py`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import arithmetic
import guessing
from frame import Row, Run, in_processes
from long_sums import MAX_COMPLETION
from small_models import Task

from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.build import TERMS, warm_start
from trl_drgrpo.demo.task import list_sum_reward, make_dataset

COMMENTS = (4, 8, 16, 32)  # mean tokens; at most four times as many


@dataclass(frozen=True)
class Measured(Task):
    """A model on a task; `start` is a key of `STARTS`."""

    start: Any

    @property
    def constructed(self) -> bool:
        """Whether it was made for an effect."""
        return self.rollout is not None


def even_digit_reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the guess is an even digit; the comment counts nothing."""
    return [float(text[:1] in tuple("02468")) for text in completions]


STARTS: dict[str, Callable[..., Path]] = {
    "demo": lambda folder, **changes: MODEL_DIR,
    "guess": partial(guessing.start, steps=guessing.TASK.warm_start_steps),
    "guess_one_letter": partial(guessing.start, steps=guessing.TASK.warm_start_steps, letters={True: "x", False: "x"}),
    "long_sums": warm_start,
    "long_sums_high": partial(warm_start, gap_probability=0.08),
    "chains": partial(arithmetic.start, steps=500),
    **{f"even_{n}": partial(guessing.start, steps=150, mean_length=n, longest=4 * n) for n in COMMENTS},
}


def _guess(title: str, start: str = "guess", honesty: float = 1.0) -> Measured:
    play = partial(guessing.rollout, honesty=honesty)
    return Measured(start, guessing.make_prompts, guessing.verdict_reward, guessing.MAX_COMPLETION, play, title)


def _even(length: int) -> Measured:
    title, play = f"even digit, comments of {length}", partial(guessing.rollout, longest=4 * length)
    longest = 1 + guessing.FEEDBACK_TOKENS + 4 * length
    return Measured(f"even_{length}", guessing.make_prompts, even_digit_reward, longest, play, title)


def _sums(title: str, terms: tuple[int, int], longest: int, start: str = "demo") -> Measured:
    def make_prompts(size: int, seed: int) -> Any:
        return make_dataset(size, "train", seed, terms)

    return Measured(start, make_prompts, list_sum_reward, longest, title=title)


_LONG = (TERMS, MAX_COMPLETION)
_CHAINS = arithmetic.TASK
MODELS = {
    "guess_coin": _guess("guess, verdict shown by a coin", honesty=0.5),
    "guess_three_in_four": _guess("guess, verdict shown truly 3 times in 4", honesty=0.75),
    "guess": _guess("guess, verdict shown"),
    "guess_one_letter": _guess("guess, verdict shown, one letter", start="guess_one_letter"),
    "sums_3": _sums("list sums, 3 terms", (3, 3), 40),
    "sums_demo": _sums("list sums, 3 to 5 terms", (3, 5), 96),
    "sums_6": _sums("list sums, 5 or 6 terms", (5, 6), 96),
    "long_sums": _sums("long list sums", *_LONG, "long_sums"),
    "long_sums_high": _sums("long list sums, fewer mistakes", *_LONG, "long_sums_high"),
    "chains": Measured("chains", _CHAINS.make_prompts, _CHAINS.reward, _CHAINS.longest, title="chains of sums"),
    **{f"even_{length}": _even(length) for length in COMMENTS},
}


def start_of(name: str, folder: Path, settings: dict[str, Any]) -> Path:
    """The folder of a start; the start is made if it is not there, in miniature with `warm_start` steps."""
    place, changes = folder / name, {"steps": settings["warm_start"]} if "warm_start" in settings else {}
    return place if (place / "model.safetensors").is_file() else STARTS[name](place, **changes)


def trainer_of(name: str, seed: int, folder: Path, settings: dict[str, Any]) -> Any:
    """A trainer of a model that is asked for batches of fresh prompts and takes no step."""
    model, size = MODELS[name], settings["prompts"] * settings["batches"]
    return model.trainer((start_of(model.start, folder, settings), folder / f"{name}-{seed}"), settings, size, seed)


def measure_all(measure: Callable[..., list[Row]], run: Run) -> None:
    """Makes the starts, then measures each model with every seed; a model's weights are the same for all seeds."""
    models = run.settings["models"]
    starts = dict.fromkeys(MODELS[name].start for name in models)
    list(in_processes(start_of, [(start, run.folder, run.settings) for start in starts], run.jobs))
    run.each("runs", ("seed", "model"), [(seed, name) for seed in run.seeds for name in models], measure)


def mean_of(runs: Sequence[Row], key: str) -> float:
    """Mean of a number over measurements."""
    return statistics.fmean(run[key] for run in runs)
