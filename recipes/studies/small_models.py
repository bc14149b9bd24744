"""What the studies of a language model share: trainers, warm starts, turns, evaluations and gradients.

Every model is a Qwen2 of 145 thousand parameters with the demo's tokenizer, a token per character, unless a study says
otherwise. It is warm-started on demonstrations until it plays the game of the study.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frame  # noqa: F401 (first: it sets the environment)
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PrinterCallback,
    Qwen2ForCausalLM,
    set_seed,
)

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.build import imitate, pad_rows
from trl_drgrpo.demo.pace import Pace, height
from trl_drgrpo.demo.result import evaluate
from trl_drgrpo.demo.task import build_tokenizer
from trl_drgrpo.upstream.batches import token_batch

SMALL_RUN: dict[str, Any] = {  # small, on the CPU, seen by the study alone
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
Parts = list[tuple[str, bool]]  # text, and whether it is to be learned


def small_trainer(
    model_dir: Path,
    output_dir: Path,
    rewards: Any,
    data: Any,
    prompts: int,
    num_generations: int,
    classes: tuple[type, type] = (DrGRPOTrainer, DrGRPOConfig),
    **fields: Any,
) -> Any:
    """A trainer of a small model.

    Args:
        model_dir, output_dir (`Path`): The model to start from; the trainer's folder, in which nothing is saved.
        rewards, data: Reward functions and training dataset.
        prompts, num_generations (`int`): P and G of a step.
        classes (`tuple[type, type]`, *optional*): Trainer and configuration.
        **fields: Of the configuration; `rollout_func`, `step_reward_funcs` and `peft_config` go to the trainer,
            `quantization_config` to the model.
    """
    trainer_class, config_class = classes
    own = {key: fields.pop(key) for key in ("rollout_func", "step_reward_funcs", "peft_config") if key in fields}
    quantization = fields.pop("quantization_config", None)
    silent = {"run_log": False, "run_warnings": False} if config_class is DrGRPOConfig else {}
    args = config_class(
        output_dir=str(output_dir),
        per_device_train_batch_size=prompts * num_generations,
        num_generations=num_generations,
        **{**SMALL_RUN, **silent, **fields},
    )
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, quantization_config=quantization),
        reward_funcs=rewards,
        args=args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        **own,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@dataclass(frozen=True)
class Task:
    """A task and the model that starts on it.

    Args:
        start (`Callable`): `f(folder, steps)` makes the model unless it is there, and returns the folder.
        make_prompts (`Callable`): `f(size, seed)` -> dataset.
        reward (`Callable`): Reward function, 1 for a correct answer, else 0.
        longest (`int`): Tokens of a completion at most.
        rollout (`Callable`, *optional*): `f(seed)` -> `rollout_func`; by default the trainers generate by themselves.
        title (`str`): In tables.
    """

    start: Callable[..., Path]
    make_prompts: Callable[[int, int], Any]
    reward: Callable[..., list[float]]
    longest: int
    rollout: Callable[[int], Callable[..., dict[str, Any]]] | None = None
    title: str = ""

    def trainer(
        self,
        folders: tuple[Path, Path],
        sizes: Mapping[str, Any],
        size: int,
        seed: int,
        rewards: Any = None,
        trainer_seed: int | None = None,
        **fields: Any,
    ) -> Any:
        """A trainer on `size` prompts.

        Args:
            folders (`tuple[Path, Path]`): Of the model and of the trainer.
            sizes (`Mapping`): `prompts` and `num_generations` of a step, and where it trains the `learning_rate`.
            size, seed (`int`): Of the prompts; the seed is the trainer's, too.
            rewards (`Any`, *optional*): In the place of the task's reward.
            trainer_seed (`int`, *optional*): If the trainer's seed is another one.
            **fields: Further ones of the configuration, or others than the task's.
        """
        own: dict[str, Any] = {"max_completion_length": self.longest}
        own |= {"seed": seed if trainer_seed is None else trainer_seed}
        own |= {key: sizes[key] for key in ("learning_rate",) if key in sizes}
        own |= {"rollout_func": self.rollout(seed)} if self.rollout else {}
        data, groups = self.make_prompts(size, seed), (sizes["prompts"], sizes["num_generations"])
        return small_trainer(*folders, rewards or self.reward, data, *groups, **{**own, **fields})


def warm_start(
    folder: Path,
    demonstrate: Callable[[random.Random], Parts],
    steps: int,
    demos_model: bool = False,
    finish: Callable[[Any], None] = lambda model: None,
    seed: int = 0,
    tokenizer: Any = None,
    rows: int = 128,
) -> Path:
    """Train a model on demonstrations and save it, unless it is there; returns the folder.

    Args:
        folder (`Path`): For model and tokenizer.
        demonstrate (`Callable`): Draws a demonstration; texts that are not to be learned are prompts and environments.
        steps (`int`): Optimizer steps.
        demos_model (`bool`, *optional*): Start from the demo's model and not from scratch.
        finish (`Callable`, *optional*): Changes the trained model.
        seed (`int`, *optional*, defaults to `0`): Of the demonstrations.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): In the place of the demo's, for a model from scratch.
        rows (`int`, *optional*, defaults to `128`): Demonstrations of an optimizer step.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    set_seed(0)
    tokenizer = tokenizer or build_tokenizer()
    if demos_model:
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    else:
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
        model = Qwen2ForCausalLM(AutoConfig.from_pretrained(MODEL_DIR, **sizes))
    rng = random.Random(seed)
    batches = (
        pad_rows([token_row(tokenizer, demonstrate(rng)) for _ in range(rows)], tokenizer.pad_token_id)
        for _ in range(steps)
    )
    imitate(model, batches, steps, lr=2e-3 if demos_model else 3e-3)
    finish(model)
    save(model, tokenizer, folder)
    return folder


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save model and tokenizer; it is sampled until the tokenizer's end token."""
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def token_row(tokenizer: Any, parts: Parts) -> tuple[list[int], list[int]]:
    """Ids of a demonstration, and for each 1 where it is to be learned."""
    ids = [(tokenizer(text)["input_ids"], int(learned)) for text, learned in parts]
    return [i for part, _ in ids for i in part], [learned for part, learned in ids for _ in part]


def sample_turn(trainer: Any, rows: Sequence[list[int]], tokens: int, stops: str = "") -> list[list[int]]:
    """At most `tokens` new ids behind each row, sampled at temperature 1 from the whole distribution.

    Args:
        trainer: Owns `model` and `processing_class`.
        rows (`Sequence[list[int]]`): Token ids so far.
        tokens (`int`): Of a turn at most.
        stops (`str`, *optional*): Characters that end a turn, each the last one of it, beside the end of the text.
    """
    model, tokenizer = trainer.model, trainer.processing_class
    ends = [*tokenizer(stops)["input_ids"], tokenizer.eos_token_id]
    pad, width = tokenizer.pad_token_id, max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=ends, pad_token_id=pad
    )
    with torch.no_grad():
        generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    new = generated[:, width:].tolist()
    return [next((row[: i + 1] for i, token in enumerate(row) if token in ends), row) for row in new]


def play(trainer: Any, prompts: Sequence[str], *turns: int | Sequence[str], stops: str = "") -> dict[str, Any]:
    """A game, for `rollout_func`.

    Args:
        trainer: Owns `model` and `processing_class`.
        prompts (`Sequence[str]`): B prompts.
        *turns: In their order, those of the policy as tokens at most, those of the environment as B texts.
        stops (`str`, *optional*): As in [`sample_turn`].

    Returns:
        `dict`: `prompt_ids`, `completion_ids`, `logprobs` (None); with an environment `env_mask`, 0 on its tokens.
    """
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    rows: list[list[int]] = [[] for _ in prompts]
    masks: list[list[int]] = [[] for _ in prompts]
    for turn in turns:
        if isinstance(turn, int):
            begun = [prompt + row for prompt, row in zip(prompt_ids, rows, strict=True)]
            new = sample_turn(trainer, begun, turn, stops)
        else:
            new = [trainer.processing_class(text)["input_ids"] for text in turn]
        for row, mask, ids in zip(rows, masks, new, strict=True):
            row += ids
            mask += [int(isinstance(turn, int))] * len(ids)
    environment = {} if all(isinstance(turn, int) for turn in turns) else {"env_mask": masks}
    return {"prompt_ids": prompt_ids, "completion_ids": rows, "logprobs": None, **environment}


# Runs that end at the same tokens -----------------------------------------------------------------------------------


def pass_rate(model: Any, problems: Sequence[Any], longest: int) -> float:
    """Share of sums that the model solves, sampled at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    found, _ = evaluate(model, tokenizer, problems, sample=True, batch_size=len(problems), max_new_tokens=longest)
    return round(found["accuracy"], 4)


class Evaluations(Pace):
    """Evaluates at equal distances in tokens, and ends the run at the last one.

    Args:
        run (`dict`): As in [`Pace`], with `tokens` sampled so far.
        tokens, evaluations (`int`): Of the run.
        measure (`Callable`): From the model to its pass rate.
        sampled (`Callable`, *optional*): From the logs of a step to its tokens; without it, who sees them counts them
            in `written`.
    """

    def __init__(
        self,
        run: dict[str, Any],
        tokens: int,
        evaluations: int,
        measure: Callable[[Any], float],
        sampled: Callable[[dict[str, float], int], float] = lambda logs, rows: 0.0,
    ):
        super().__init__(run, measure)
        self.distance, self.tokens, self.sampled, self.written = tokens / evaluations, tokens, sampled, 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "completions/mean_length" not in logs:
            return
        self.written += self.sampled(logs, args.per_device_train_batch_size)
        if self.written >= self.distance * len(self.run["tokens"]) or self.written >= self.tokens:
            self.run["tokens"].append(round(self.written))
            self.evaluate(kwargs["model"])
        control.should_training_stop = self.written >= self.tokens


def mean_height(run: dict[str, Any], end: float, x: str = "tokens") -> float:
    """Mean pass rate over the first tokens (or `seconds`): the area below the curve, as a height.

    >>> mean_height({"tokens": [0, 10, 30], "pass_rate": [0.0, 1.0, 0.0]}, 20)
    0.625
    """
    points = [*(place for place in run[x] if place < end), end]
    heights = [height(run, place, x) for place in points]
    area = sum((points[i + 1] - points[i]) * (heights[i] + heights[i + 1]) / 2 for i in range(len(points) - 1))
    return area / end


# Gradients ----------------------------------------------------------------------------------------------------------


def log_probs_of(trainer: DrGRPOTrainer, rollouts: dict[str, Any], rows: slice) -> torch.Tensor:
    """Log-probabilities `(b, T)` of the completions of some rows of `sampled_batches`, with gradient."""
    some = {key: rollouts[key][rows] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    return trainer.score_tokens(trainer.model, token_batch(some))[0]


def gradient_of(trainer: DrGRPOTrainer, objective: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar over the trainable parameters as one vector; its graph is kept."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, parameters, retain_graph=True)])


def group_gradients(
    trainer: DrGRPOTrainer, rollouts: dict[str, Any], num_generations: int, advantages: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Gradients of each group of a batch of `sampled_batches`, one for each kind of advantages `(B, T)`."""
    nothing = torch.zeros(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    for first in range(0, len(rollouts["completion_ids"]), num_generations):
        rows = slice(first, first + num_generations)
        log_probs = log_probs_of(trainer, rollouts, rows)  # (G, T)
        yield {
            kind: gradient_of(trainer, (given[rows] * log_probs).sum()) if given[rows].any() else nothing
            for kind, given in advantages.items()
        }


class Moments:
    """Squared lengths of independent vectors, and their mean."""

    def __init__(self) -> None:
        self.squares: list[float] = []
        self.sum: Any = 0.0

    def add(self, vector: torch.Tensor) -> None:
        self.squares.append(float(vector @ vector))
        self.sum = self.sum + vector

    @property
    def mean(self) -> torch.Tensor:
        """Mean of the vectors."""
        return self.sum / len(self.squares)

    @property
    def variance(self) -> float:
        """Trace of the covariance."""
        count = len(self.squares)
        return (sum(self.squares) - float(self.sum @ self.sum) / count) / (count - 1)

    def over(self, other: "Moments") -> dict[str, float]:
        """Ratio of the variances, with the jackknife's standard error (of the mean squares: the means are small)."""
        own, reference, count = np.array(self.squares), np.array(other.squares), len(self.squares)
        without = (own.sum() - own) / (reference.sum() - reference)
        squared = (count - 1) / count * ((without - without.mean()) ** 2).sum()
        return {"ratio": float(np.divide(self.variance, other.variance)), "standard_error": float(squared**0.5)}
