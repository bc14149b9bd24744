r"""Small models and tasks on which one update is measured: made for an effect, or not.

`guess`: the game of `guessing.py`, with verdicts shown truly, truly three times in four, or by a coin, and with
comments in one letter whatever the verdict. `even`: the same game, rewarded for an even digit, with comments of four
lengths that change nothing but the noise. The others are tasks of the package: list sums of the demo, long list sums
with two demonstrators, and chains of sums, warm-started a little shorter than in the study `arithmetic`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.labs.demo import long_sums
from trl_drgrpo.labs.demo.build import MODEL_DIR
from trl_drgrpo.labs.demo.task import list_sum_reward, make_dataset
from trl_drgrpo.labs.provenance import provenance, study_command
from trl_drgrpo.labs.study import arithmetic, guessing
from trl_drgrpo.labs.study.credit_study import in_processes
from trl_drgrpo.labs.study.results_file import earlier_results, write_results
from trl_drgrpo.labs.study.trajectories import SMALL_RUN
from trl_drgrpo.trainer import DrGRPOTrainer

_LONGEST = 4  # a comment at most, in mean lengths
COMMENTS = (4, 8, 16, 32)  # mean tokens
_CHAIN_STEPS = 500
_EVEN_STEPS = 150  # enough to write fluently


@dataclass(frozen=True)
class MeasuredModel:
    """A model on a task.

    Args:
        title (`str`): In tables.
        start (`str`): A key of [`STARTS`]; several models may share one.
        make_prompts (`Callable`): `f(size, seed)` -> dataset.
        reward (`Callable`): Reward function, 1 for a correct answer, else 0.
        max_completion (`int`): Tokens of a completion at most.
        rollout (`Callable`, *optional*): `f(seed)` -> `rollout_func`.
        constructed (`bool`): Whether it was made for an effect.
    """

    title: str
    start: str
    make_prompts: Callable[[int, int], Dataset]
    reward: Callable[..., list[float]]
    max_completion: int
    rollout: Callable[[int], Callable[..., dict[str, Any]]] | None = None
    constructed: bool = False


def even_digit_reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the guess is an even digit; the comment counts nothing.

    Args:
        completions (`Sequence[str]`): B completions of the game.
    """
    return [float(text[:1] in tuple("02468")) for text in completions]


STARTS: dict[str, Callable[[Path], Path]] = {
    "demo": lambda folder: MODEL_DIR,
    "guess": guessing.warm_start,
    "guess_one_letter": partial(guessing.warm_start, letters={True: "x", False: "x"}),
    "long_sums": long_sums.warm_start,
    "long_sums_high": partial(long_sums.warm_start, gap_probability=0.08),
    "chains": partial(arithmetic.warm_start, steps=_CHAIN_STEPS),
    **{
        f"even_{n}": partial(guessing.warm_start, steps=_EVEN_STEPS, mean_length=n, longest=_LONGEST * n)
        for n in COMMENTS
    },
}


def _guess(title: str, start: str = "guess", honesty: float = 1.0) -> MeasuredModel:
    rollout = partial(guessing.guessing_rollout, honesty=honesty)
    reward = guessing.verdict_reward
    return MeasuredModel(title, start, guessing.make_prompts, reward, guessing.MAX_COMPLETION, rollout, True)


def _even(length: int) -> MeasuredModel:
    longest = _LONGEST * length
    rollout = partial(guessing.guessing_rollout, longest=longest)
    limit = 1 + guessing.FEEDBACK_TOKENS + longest
    title, start = f"even digit, comments of {length}", f"even_{length}"
    return MeasuredModel(title, start, guessing.make_prompts, even_digit_reward, limit, rollout, True)


def _sums(title: str, terms: tuple[int, int], max_completion: int, start: str = "demo") -> MeasuredModel:
    def make_prompts(size: int, seed: int) -> Dataset:
        return make_dataset(size, "train", seed, terms)

    return MeasuredModel(title, start, make_prompts, list_sum_reward, max_completion)


MODELS = {
    "guess_coin": _guess("guess, verdict shown by a coin", honesty=0.5),
    "guess_three_in_four": _guess("guess, verdict shown truly 3 times in 4", honesty=0.75),
    "guess": _guess("guess, verdict shown"),
    "guess_one_letter": _guess("guess, verdict shown, one letter", start="guess_one_letter"),
    "sums_3": _sums("list sums, 3 terms", (3, 3), 40),
    "sums_demo": _sums("list sums, 3 to 5 terms", (3, 5), 96),
    "sums_6": _sums("list sums, 5 or 6 terms", (5, 6), 96),
    "long_sums": _sums("long list sums", long_sums.TERMS, long_sums.MAX_COMPLETION, "long_sums"),
    "long_sums_high": _sums(
        "long list sums, fewer mistakes", long_sums.TERMS, long_sums.MAX_COMPLETION, "long_sums_high"
    ),
    "chains": MeasuredModel(
        "chains of sums", "chains", arithmetic.make_prompts, arithmetic.answer_reward, arithmetic.MAX_COMPLETION
    ),
    **{f"even_{length}": _even(length) for length in COMMENTS},
}


def start_of(name: str, work_dir: Path) -> Path:
    """The folder of a start; the start is made if it is not there.

    Args:
        name (`str`): A key of [`STARTS`].
        work_dir (`Path`): Has a folder for each start.
    """
    folder = work_dir / "starts" / name
    return folder if (folder / "model.safetensors").is_file() else STARTS[name](folder)


def build_trainer(
    name: str, seed: int, work_dir: Path, prompts: int, num_generations: int, batches: int
) -> DrGRPOTrainer:
    """A trainer that is asked for batches and takes no step.

    Args:
        name (`str`): A key of [`MODELS`].
        seed (`int`): Of prompts and sampling.
        work_dir (`Path`): Has the model's start, or gets it.
        prompts, num_generations, batches (`int`): P, G, and batches of fresh prompts.
    """
    chosen = MODELS[name]
    folder = start_of(chosen.start, work_dir)
    args = DrGRPOConfig(
        output_dir=str(work_dir / f"{name}-{seed}"),
        seed=seed,
        per_device_train_batch_size=prompts * num_generations,
        num_generations=num_generations,
        max_completion_length=chosen.max_completion,
        **{**SMALL_RUN, "run_log": False, "run_warnings": False, "disable_tqdm": True},
    )
    return DrGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=chosen.reward,
        args=args,
        train_dataset=chosen.make_prompts(prompts * batches, seed),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=chosen.rollout(seed) if chosen.rollout else None,
    )


def measure_all(
    study: str,
    measure: Callable[[str, int, Path, Any], dict[str, Any]],
    settings: Any,
    seeds: Sequence[int],
    output: Path,
    work_dir: Path,
    jobs: int,
    on_run: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Make the starts, then measure each model with every seed.

    Measurements that are in `output` already, with the same settings and versions, are kept.

    Args:
        study (`str`): Its name on the command line.
        measure (`Callable`): `f(name, seed, work_dir, settings)` -> results, with `model` and `seed` among them.
        settings (dataclass): Has `models`, keys of [`MODELS`].
        seeds (`Sequence[int]`): Of prompts and sampling; the weights of a model are the same for all.
        output (`Path`): JSON file, written after each measurement.
        work_dir (`Path`): For models and trainers.
        jobs (`int`): Measurements at a time, a process each if more than one.
        on_run (`Callable`): Called with the results of each measurement.

    Returns:
        `dict[str, Any]`: Provenance, `settings` and `runs`, as in the file.
    """
    results: dict[str, Any] = {**provenance(study_command(study, len(seeds), jobs)), "settings": asdict(settings)}
    wanted = [(name, seed) for seed in seeds for name in settings.models]
    earlier = earlier_results(output, results).get("runs", [])
    results["runs"] = [run for run in earlier if (run["model"], run["seed"]) in wanted]
    done = {(run["model"], run["seed"]) for run in results["runs"]}
    left = [(*call, work_dir, settings) for call in wanted if call not in done]
    starts = dict.fromkeys(MODELS[name].start for name, *_ in left)
    for _ in in_processes(start_of, [(start, work_dir) for start in starts], jobs):
        pass
    for run in in_processes(measure, left, jobs):
        results["runs"].append(run)
        results["runs"].sort(key=lambda each: wanted.index((each["model"], each["seed"])))
        write_results(results, output)
        on_run(run)
    write_results(results, output)
    return results


def runs_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The measurements of a model, one per seed."""
    return [run for run in results["runs"] if run["model"] == name]


def mean_of(runs: list[dict[str, Any]], key: str) -> float:
    """Mean of a number over measurements."""
    return statistics.fmean(run[key] for run in runs)
