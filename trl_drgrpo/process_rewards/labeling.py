"""Monte-Carlo labels: from which steps a model can still reach a correct answer.

For each prompt completions are sampled (or given), split into steps, and every prefix is rolled out; a step is good if
at least one rollout from behind it is accepted (the hard estimate of Math-Shepherd, arXiv 2312.08935). The value
itself is kept beside the label. No human labels anything, but a label is only as good as the model is able and the
verifier correct: a step from which the model merely guesses the answer counts as good.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.monte_carlo import MonteCarloScorer
from trl_drgrpo.process_rewards.texts import prompt_ids, split_into_steps

_OURS = ("steps", "labels", "values", "completions")


def label_steps(
    rows: Sequence[Mapping[str, Any]],
    generate: Callable[..., list[list[str]]],
    verifier: Callable[..., Any],
    tokenizer: Any,
    *,
    rollouts: int = 8,
    completions: int = 1,
    separator: str = "\n",
    chunk_size: int = 32,
) -> Iterator[dict[str, Any]]:
    """Label the steps of completions by rollouts.

    Args:
        rows (`Sequence[Mapping]`): Dataset rows with `prompt` (text or messages); further columns go to the verifier.
            A row that has `steps` is labeled as it is, the others are completed by the model.
        generate (`Callable`): As for [`MonteCarloScorer`]; it is given token ids.
        verifier (`Callable`): Outcome reward function with TRL's signature.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        rollouts (`int`, *optional*, defaults to `8`): Per prefix.
        completions (`int`, *optional*, defaults to `1`): Sampled per prompt.
        separator (`str`, *optional*, defaults to a line break): A step ends behind it.
        chunk_size (`int`, *optional*, defaults to `32`): Completions that are rolled out together.

    Yields:
        `dict`: The row's columns with `steps` (texts without separator), `labels` (`bool`: value > 0; `None` where
        the verifier could score nothing) and `values` (`float`, 0 to 1). The last value is the verdict on the
        completion. Completions without text are left out.

    Raises:
        `InputError`: A row without `prompt`, an empty separator.
        `RewardError`: A verifier that fails.
    """
    if not separator:
        raise InputError("separator", "an empty string", "at least one character", "Set the text that ends a step.")
    for index, row in enumerate(rows):
        if "prompt" not in row:
            remedy = "Rename the column that holds it."
            raise InputError(f"row {index}", f"the columns {sorted(row)}", "a column 'prompt'", remedy)
    scorer = MonteCarloScorer(generate, verifier, k=rollouts, tokenizer=tokenizer)
    for start in range(0, len(rows), chunk_size):
        chunk = _completed(rows[start : start + chunk_size], generate, tokenizer, completions, separator)
        for (row, steps), values in zip(chunk, _values(chunk, scorer, tokenizer), strict=True):
            texts = [step.removesuffix(separator) for step in steps]
            labels = [None if value is None else value > 0 for value in values]
            yield {**_columns(row), "prompt": row["prompt"], "steps": texts, "labels": labels, "values": values}


_Completed = list[tuple[Mapping[str, Any], list[str]]]


def _completed(
    rows: Sequence[Mapping[str, Any]],
    generate: Callable[..., list[list[str]]],
    tokenizer: Any,
    completions: int,
    separator: str,
) -> _Completed:
    """Rows with the steps of a completion: those they came with, or sampled ones."""
    pairs: _Completed = []
    bare = [row for row in rows if "steps" not in row]
    sampled = iter(generate([prompt_ids(row["prompt"], tokenizer) for row in bare], completions) if bare else [])
    for row in rows:
        if "steps" in row:
            steps = [str(step).removesuffix(separator) for step in row["steps"]]
            pairs.append((row, [step + separator for step in steps[:-1]] + steps[-1:]))
        else:
            pairs += [(row, split_into_steps(text, separator)) for text in next(sampled)]
    return [(row, steps) for row, steps in pairs if steps]


def _values(chunk: _Completed, scorer: MonteCarloScorer, tokenizer: Any) -> list[list[float | None]]:
    """The value behind every step; ids and ends are those of the steps tokenized one by one."""
    ids = [[tokenizer(step, add_special_tokens=False)["input_ids"] for step in steps] for _, steps in chunk]
    ends = [[sum(len(step) for step in row[: k + 1]) - 1 for k in range(len(row))] for row in ids]
    texts = ["".join(steps) for _, steps in chunk]
    names = sorted({name for row, _ in chunk for name in _columns(row)})
    columns: dict[str, Any] = {name: [row.get(name) for row, _ in chunk] for name in names}
    return scorer(
        prompts=[row["prompt"] for row, _ in chunk],
        completions=[
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for (row, _), text in zip(chunk, texts, strict=True)
        ],
        steps=[steps for _, steps in chunk],
        completion_ids=[[token for step in row for token in step] for row in ids],
        step_ends=ends,
        **columns,
    )


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are handed to the verifier and kept."""
    return {name: value for name, value in row.items() if name not in _OURS and name != "prompt"}
