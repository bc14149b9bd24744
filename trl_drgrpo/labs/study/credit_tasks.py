"""The two tasks of the study of step credit: long list sums, and two turns with an environment."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from trl_drgrpo.labs.demo import long_sums
from trl_drgrpo.labs.demo.process import line_reward
from trl_drgrpo.labs.demo.task import check_steps, list_sum_reward, numbers_of, prompt_of
from trl_drgrpo.labs.study import two_turns
from trl_drgrpo.labs.study.credit_arms import StepRewardFunc
from trl_drgrpo.process_rewards import TokenClassificationScorer, train_prm


@dataclass(frozen=True)
class CreditTask:
    """A task, the model that starts on it, and the sizes of a run.

    Args:
        name, title (`str`): In the results and in tables.
        warm_start (`Callable`): `f(folder)` makes the model.
        make_prompts (`Callable`): `f(size, seed)` -> dataset.
        outcome (`Callable`): Reward function, 1 for a correct answer, else 0.
        rule (`Callable`): Step reward function, 1 for a correct step, else 0.
        due (`Callable`): From a prompt to the number of steps of a correct answer.
        labeled_rows (`Callable`): `f(size, seed)` -> rows for `train_prm`.
        step_separator (`str` or list): End of a step.
        max_completion (`int`): Tokens of a completion at most.
        tokens (`int`): Tokens that a run generates.
        prompts, num_generations (`int`): P and G of a step.
        learning_rate (`float`): Of AdamW, constant.
        prm_rows (`int`): Labeled completions that the process reward model learns from.
        rollout (`Callable`, *optional*): `f(seed)` -> `rollout_func`.
        prm_prompt (`Callable`, *optional*): From a prompt to the text that the process reward model reads.
    """

    name: str
    title: str
    warm_start: Callable[[Path], Path]
    make_prompts: Callable[[int, int], Dataset]
    outcome: Callable[..., list[float]]
    rule: StepRewardFunc
    due: Callable[[Any], int]
    labeled_rows: Callable[[int, int], list[dict[str, Any]]]
    step_separator: str | list[str]
    max_completion: int
    tokens: int
    prompts: int
    num_generations: int
    learning_rate: float
    prm_rows: int
    rollout: Callable[[int], Callable[..., dict[str, Any]]] | None = None
    prm_prompt: Callable[[Any], str] | None = None

    def train_prm(self, model_dir: Path, folder: Path) -> dict[str, float]:
        """Train the process reward model, the policy's weights with a head of two classes, and measure it.

        Args:
            model_dir (`Path`): The warm-started model.
            folder (`Path`): Folder to save it in.
        """
        return train_prm(
            str(model_dir),
            self.labeled_rows(self.prm_rows, 0),
            folder,
            eval_rows=self.labeled_rows(_PRM_EVAL_ROWS, 1),
            arguments={
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 16,
                "per_device_eval_batch_size": 64,
                "disable_tqdm": True,
                "logging_strategy": "no",
            },
        )

    def load_prm(self, folder: Path) -> TokenClassificationScorer:
        """The saved process reward model as a step reward function.

        Args:
            folder (`Path`): Folder that it was saved in.
        """
        return TokenClassificationScorer(str(folder), batch_size=64, name="prm", prompt_text=self.prm_prompt)


_PRM_EVAL_ROWS = 300
_OTHER_SEEDS = 1_000


def _labeled_sums(size: int, seed: int) -> list[dict[str, Any]]:
    """Demonstrations of long sums, each line labeled by `check_steps`."""
    rng = random.Random(f"long sums, labeled/{seed}")
    rows = []
    for numbers in long_sums.make_long_problems(size, "train", _OTHER_SEEDS + seed):
        text = long_sums.demonstrate_with_gaps(numbers, rng)
        labels = check_steps(numbers, text)
        rows.append({"prompt": _line(prompt_of(numbers)), "steps": text.split("\n"), "labels": labels})
    return rows


def _line(prompt: Any) -> str:
    """The sum on a line of its own: without a chat template it would run into the first step."""
    return (prompt if isinstance(prompt, str) else prompt[-1]["content"]) + "\n"


LONG_SUMS = CreditTask(
    name="long_sums",
    title="Long list sums",
    warm_start=long_sums.warm_start,
    make_prompts=lambda size, seed: long_sums.make_long_dataset(size, "train", seed),
    outcome=list_sum_reward,
    rule=line_reward,
    due=lambda prompt: len(numbers_of(prompt)),  # an addition less, and the boxed line
    labeled_rows=_labeled_sums,
    step_separator=["\n"],
    max_completion=long_sums.MAX_COMPLETION,
    tokens=60_000,
    prompts=4,
    num_generations=8,
    learning_rate=1.5e-4,
    prm_rows=4_000,
    prm_prompt=_line,
)
TWO_TURNS = CreditTask(
    name="two_turns",
    title="Two turns",
    warm_start=two_turns.warm_start,
    make_prompts=two_turns.make_prompts,
    outcome=two_turns.last_number_reward,
    rule=two_turns.turn_reward,
    due=lambda prompt: 2,
    labeled_rows=two_turns.labeled_rows,
    step_separator="turn",
    max_completion=two_turns.MAX_COMPLETION,
    tokens=20_000,
    prompts=8,
    num_generations=8,
    learning_rate=1.5e-4,
    prm_rows=10_000,
    rollout=two_turns.rollout,
)
TASKS = {task.name: task for task in (LONG_SUMS, TWO_TURNS)}
