"""The loop: prompts in, scored samples out, written as they come.

A row of the samples' file is a completion: the dataset's columns, `completion`, and under `eval` the problem, the
number of the sample, its rewards, its tokens and how it ended. `trl-drgrpo score` reads the file. Each group of
problems has seeds of its own, so that an evaluation that goes on ends with the same samples.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.process_rewards.texts import prompt_ids
from trl_drgrpo.rewards.scoring.table import RewardScores, score_rows
from trl_drgrpo.search.continuations import Continuation, Request, Sampler
from trl_drgrpo.search.output import SearchFile

KIND = "eval"
Row = dict[str, Any]


def sample_and_score(
    rows: Sequence[Mapping[str, Any]],
    sampler: Sampler,
    tokenizer: Any,
    rewards: Mapping[str, Callable],
    file: SearchFile,
    *,
    samples: int,
    length: int,
    seed: int,
    template: Mapping[str, Any] | None = None,
    tell: Callable[[list[Row]], None] = lambda rows: None,
) -> None:
    """Evaluate the prompts that the file does not hold yet.

    Args:
        rows (`Sequence[Mapping]`): With `prompt` and the columns that the rewards need.
        sampler: Samples whole completions.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        rewards (`Mapping[str, Callable]`): By name, with TRL's signature.
        file ([`SearchFile`]): Opened; its `group` is the number of problems that are sampled at once.
        samples (`int`): Completions of each prompt.
        length (`int`): A completion is cut here.
        seed (`int`): Of the sampling.
        template (`Mapping`, *optional*): More that the chat template is given.
        tell (`Callable`, *optional*): Told the rows of each prompt.

    Raises:
        `RewardError`: A reward that fails on every completion of the first group.
    """
    for first in range(file.done, len(rows), file.group):
        numbers = range(first, min(first + file.group, len(rows)))
        draw = random.Random(f"{seed}/{first}")
        requests = [
            Request(
                tuple(prompt_ids(rows[i]["prompt"], tokenizer, template)), samples, length, True, draw.getrandbits(31)
            )
            for i in numbers
        ]
        found = sampler(requests)
        sampled = [_row(rows[i], each, tokenizer) for i, of in zip(numbers, found, strict=True) for each in of]
        scores = [score_completions(reward, sampled, name) for name, reward in rewards.items()]
        if first == 0:
            _refuse_broken(scores, len(sampled))
        for place, number in enumerate(numbers):
            own = range(place * samples, (place + 1) * samples)
            of_prompt = [
                {
                    **{name: value for name, value in sampled[i].items() if name != "completion_ids"},
                    KIND: {
                        "problem": number,
                        "row": j,
                        "rows": samples,
                        "tokens": len(found[place][j].token_ids),
                        "finish_reason": found[place][j].end,
                        "rewards": {each.name: each.rewards[i] for each in scores},
                        **_failures(scores, i),
                    },
                }
                for j, i in enumerate(own)
            ]
            file.append(of_prompt)
            tell(of_prompt)


def completion_of(prompt: Any, token_ids: Sequence[int], tokenizer: Any) -> Any:
    """A completion decoded as TRL does, in the form of the prompt: text, or one message."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def score_completions(reward: Callable, sampled: Sequence[Row], name: str) -> RewardScores:
    """Rewards of some completions in one call, as in training; one by one where that call fails, so that one row's
    failure is one row's."""
    scores = score_rows(reward, sampled, name, batch_size=len(sampled))
    return score_rows(reward, sampled, name) if scores.failures and len(sampled) > 1 else scores


def _row(row: Mapping[str, Any], continuation: Continuation, tokenizer: Any) -> Row:
    completion = completion_of(row["prompt"], continuation.token_ids, tokenizer)
    return {**row, "completion": completion, "completion_ids": list(continuation.token_ids)}


def _failures(scores: Sequence[RewardScores], row: int) -> Row:
    failures = {each.name: each.failures[row] for each in scores if row in each.failures}
    return {"failures": failures} if failures else {}


def _refuse_broken(scores: Sequence[RewardScores], rows: int) -> None:
    for each in scores:
        if len(each.failures) == rows:
            remedy = "Nothing could be scored: fix the reward. `trl-drgrpo score` tries it on saved completions."
            got = f"{each.failures[0]}, on every completion of the first prompts"
            raise RewardError(f"reward function {each.name!r}", got, "a reward", remedy)
