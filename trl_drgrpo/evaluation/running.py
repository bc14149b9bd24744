"""The loop of an evaluation: prompts in, scored samples out, written as they come.

Samplers are those of rollouts and searches, asked for whole completions: a model in memory, which runs the prompt of
several completions once, or a server. A row of the samples' file is a completion: the dataset's columns, `completion`,
and under `eval` the problem, the number of the sample, its rewards, its tokens and its end. `trl-drgrpo score` reads
the file. Each group of problems has seeds of its own, so that an interrupted evaluation continues with the same
samples.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import RewardError
from trl_drgrpo.evaluation.models import Decoding, Loading, load_config, load_tokenizer
from trl_drgrpo.evaluation.results import KIND, Row
from trl_drgrpo.process_rewards.continuations import Continuation, Request, Sampler
from trl_drgrpo.process_rewards.prm_inputs import completion_like, prompt_ids
from trl_drgrpo.rewards.scoring import RewardScores, score_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def model_sampler(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", decoding: Decoding, batch_size: int
) -> Sampler:
    """Build a sampler of whole completions from a model in memory.

    Completions of one prompt share its forward pass where they can.
    """
    from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
    from trl_drgrpo.features.fast_path.speed import Speed
    from trl_drgrpo.process_rewards.continuations import ModelSampler

    return ModelSampler(
        model,
        tokenizer,
        decoding.for_transformers(),
        batch_size,
        by_length=False,  # completions of one prompt stay together, so that they share its forward pass
        around=partial(shared_prefill, speed=Speed()),
    )


def check_context(config: "PreTrainedConfig", lengths: Sequence[int], decoding: Decoding) -> None:
    """Refuse prompts behind which a completion has no room in the model's context.

    Args:
        config (`PretrainedConfig`): The model's. Without a context length in it, nothing is refused.
        lengths (`Sequence[int]`): Tokens of each prompt.
        decoding ([`Decoding`]): Length limits of completions.
    """
    from trl_drgrpo.single_gpu.model_checks import refuse_too_long
    from trl_drgrpo.single_gpu.vocabulary import context_length

    row = lengths.index(max(lengths))  # if the longest prompt fits, all do
    refuse_too_long(lengths[row], row, decoding.max_completion_length, context_length(config))


def check_rows_fit(
    rows: Sequence[Mapping[str, Any]],
    model: str,
    loading: Loading,
    decoding: Decoding,
    template: Mapping[str, Any] | None = None,
) -> None:
    """Refuse rows with prompts that are too long for a model that is not loaded yet, see [`check_context`]."""
    # The tokenizer and the configuration are small; the weights come after this check.
    tokenizer = load_tokenizer(model, loading)
    lengths = [len(prompt_ids(row["prompt"], tokenizer, template)) for row in rows]
    check_context(load_config(model, loading), lengths, decoding)


def server_sampler(
    url: str, model: str, tokenizer: "PreTrainedTokenizerBase", decoding: Decoding, concurrency: int
) -> Sampler:
    """Build a sampler from a vLLM server that serves `model` under this name."""
    from trl_drgrpo.process_rewards.steps import step_segmenter
    from trl_drgrpo.search.sampling import ServerSampler, StepEnd

    no_steps = StepEnd(step_segmenter("\n"), tokenizer)  # completions are sampled to their end
    return ServerSampler(url, model, no_steps, decoding.for_vllm(), concurrency)


def sample_and_score(
    rows: Sequence[Mapping[str, Any]],
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    rewards: Mapping[str, Callable],
    group: int,
    first: int = 0,
    *,
    samples: int,
    length: int,
    seed: int,
    template: Mapping[str, Any] | None = None,
) -> Iterator[list[Row]]:
    """Evaluate prompts.

    Args:
        rows (`Sequence[Mapping]`): Have `prompt` and the columns that the rewards need.
        sampler: Samples whole completions.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        rewards (`Mapping[str, Callable]`): By name, with TRL's signature.
        group (`int`): Prompts that are sampled at once.
        first (`int`, *optional*, defaults to `0`): Prompt to begin with, a multiple of `group`.
        samples (`int`): Completions of each prompt.
        length (`int`): A completion is cut here.
        seed (`int`): Seed of the sampling.
        template (`Mapping`, *optional*): More variables for the chat template.

    Yields:
        `list[dict]`: The rows of one prompt after another.

    Raises:
        `RewardError`: A reward that fails on every completion of the first group.
    """
    # One group at a time: its rows are written before the next one is sampled, so that a kill loses one group.
    for start in range(first, len(rows), group):
        prompts = rows[start : start + group]
        # Seeded by its first prompt: a group has the same samples in an evaluation that goes on from there.
        draw = random.Random(f"{seed}/{start}")
        requests = []
        for row in prompts:
            prefix = tuple(prompt_ids(row["prompt"], tokenizer, template))
            requests.append(Request(prefix, samples, length, True, draw.getrandbits(31)))
        ends = []
        sampled = []
        for row, continuations in zip(prompts, sampler(requests), strict=True):
            for continuation in continuations:
                ends.append(continuation.end)
                sampled.append(completed(row, continuation, tokenizer))
        scores = [score_completions(reward, sampled, name) for name, reward in rewards.items()]
        if start == 0:  # a reward that works there is not broken: later failures are counted
            _refuse_broken(scores, len(sampled))
        # All completions of the group in a row, `samples` of each prompt.
        for place, row in enumerate(sampled):
            row[KIND] = {
                "problem": start + place // samples,
                "row": place % samples,
                "rows": samples,
                "tokens": len(row.pop("completion_ids")),  # the ids were for the rewards
                "finish_reason": ends[place],
                "rewards": {score.name: score.rewards[place] for score in scores},
            }
            failures = {}
            for score in scores:
                if place in score.failures:
                    failures[score.name] = score.failures[place]
            if failures:
                row[KIND]["failures"] = failures
        for place in range(0, len(sampled), samples):  # prompt by prompt
            yield sampled[place : place + samples]


def completed(row: Mapping[str, Any], continuation: Continuation, tokenizer: "PreTrainedTokenizerBase") -> Row:
    """Return a row with its completion (decoded as in TRL, in the form of the prompt) and the completion's ids."""
    token_ids = list(continuation.token_ids)
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True))
    return {**row, "completion": completion_like(row["prompt"], text), "completion_ids": token_ids}


def score_completions(reward: Callable, sampled: Sequence[Row], name: str) -> RewardScores:
    """Score completions in one call, as in training."""
    # In one call a judge sends its requests at once, and a reward of a group sees the group.
    scores = score_rows(reward, sampled, name, batch_size=len(sampled))
    if scores.failures and len(sampled) > 1:  # once more, one by one: a failing row costs no other row its reward
        scores = score_rows(reward, sampled, name)
    return scores


def _refuse_broken(scores: Sequence[RewardScores], rows: int) -> None:
    """Refuse a reward that failed on every row, before more completions are sampled for it."""
    for score in scores:
        if len(score.failures) == rows:  # a completion or two may be hostile; all of them are not
            remedy = "Nothing could be scored: fix the reward. `trl-drgrpo score` tries it on saved completions."
            got = f"{score.failures[0]}, on every completion of the first prompts"
            raise RewardError(f"reward function {score.name!r}", got, "a reward", remedy)
