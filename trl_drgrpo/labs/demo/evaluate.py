"""Measure a model on the list-sum task: sampled and greedy accuracy, and lengths of correct and incorrect completions.

The demo reports numbers of this file, not the training logs: they are taken on held-out problems, the same ones before
and after, and do not depend on the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.labs.demo.task import list_sum_reward, prompt_of


@dataclass(frozen=True)
class Evaluation:
    """Result of one decoding mode on a set of problems.

    Args:
        accuracy (`float`): Share of correct completions, 0 to 1.
        length_correct_mean (`float` or `None`): Mean tokens of correct completions, end token included; `None`
            if there is none.
        length_incorrect_mean (`float` or `None`): The same for incorrect ones.
        length_mean (`float`): Mean length of all completions in tokens.
        texts (`tuple[str, ...]`): The completions, one per problem, in order.
        correct (`tuple[bool, ...]`): Whether each is correct.
    """

    accuracy: float
    length_correct_mean: float | None
    length_incorrect_mean: float | None
    length_mean: float
    texts: tuple[str, ...]
    correct: tuple[bool, ...]

    def numbers(self) -> dict[str, float | None]:
        """The four numbers without the completions, for a results file."""
        return {
            "accuracy": self.accuracy,
            "length_correct_mean": self.length_correct_mean,
            "length_incorrect_mean": self.length_incorrect_mean,
            "length_mean": self.length_mean,
        }


def mean_or_none(values: Sequence[float]) -> float | None:
    """The mean, or `None` of nothing."""
    return sum(values) / len(values) if values else None


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Sequence[int]],
    sample: bool,
    seed: int = 0,
    batch_size: int = 256,
    max_new_tokens: int = 128,
) -> Evaluation:
    """
    Generate one completion per problem (its terms) and judge it.

    `sample`: at temperature 1 from the whole distribution, else greedily. `seed`: of the sampling; the global random
    state is put back afterwards. `batch_size`: problems per call of `model.generate`. The tokenizer pads on the left.
    """
    import torch

    texts: list[str] = []
    lengths: list[int] = []
    was_training = model.training
    model.eval()
    decoding = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(problems), batch_size):
            chats = [prompt_of(numbers) for numbers in problems[start : start + batch_size]]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            ).to(model.device)
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, **decoding)  # (B, prompt + T)
            completions = output[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
            lengths += (completions != tokenizer.pad_token_id).sum(dim=1).tolist()
    model.train(was_training)
    correct = [reward == 1.0 for reward in list_sum_reward(texts, [sum(numbers) for numbers in problems])]
    return Evaluation(
        accuracy=sum(correct) / len(correct),
        length_correct_mean=mean_or_none([n for n, ok in zip(lengths, correct, strict=True) if ok]),
        length_incorrect_mean=mean_or_none([n for n, ok in zip(lengths, correct, strict=True) if not ok]),
        length_mean=sum(lengths) / len(lengths),
        texts=tuple(texts),
        correct=tuple(correct),
    )
