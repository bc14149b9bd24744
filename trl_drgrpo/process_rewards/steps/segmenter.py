"""Completion tokens become steps: texts to be judged, and inclusive token ends for the credit.

The alignment says where a completion can be cut, the rule where it should be; a step ends at the first cut that is not
too early. So a step never ends inside a character or inside a token: when one token holds the end of a step and the
beginning of the next (`".\\n\\nB"`), that beginning belongs to the step the token ends.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.steps.alignment import Aligner, Alignment
from trl_drgrpo.process_rewards.steps.separators import Completion, Rule, RuleSpec, rule_of


@dataclass(frozen=True)
class Steps:
    """The steps of one completion.

    Args:
        texts (`tuple[str, ...]` of length `S`): One text per step. Both are empty for a completion without tokens.
        ends (`tuple[int, ...]` of length `S`):
            Inclusive index of each step's last token, in completion tokens; strictly increasing.
        closing (`int`, *optional*):
            Index of the completion's last token, where tokens without anything to read (EOS) follow the last step.
            They are the decision to stop: no reward is given for them, and credit treats them as a step of their own.
    """

    texts: tuple[str, ...]
    ends: tuple[int, ...]
    closing: int | None = None


class StepSegmenter:
    """Cuts completions into steps. Build one with [`step_segmenter`].

    Args:
        rule ([`Rule`]): Rule for step ends.
        name (`str`): Name in messages.
    """

    def __init__(self, rule: Rule, name: str):
        self.rule = rule
        self.name = name
        self._aligner: Aligner | None = None

    def __repr__(self) -> str:
        return f"StepSegmenter({self.name})"

    def __call__(self, completion_ids: list[int], tokenizer: Any, tool_mask: list[int] | None = None) -> Steps:
        """Cut one completion into steps.

        Args:
            completion_ids (`list[int]` of length `T`):
                Completion tokens without padding; EOS, if there is one, included.
            tokenizer (`PreTrainedTokenizerBase`): The tokenizer they belong to, slow or fast.
            tool_mask (`list[int]` of length `T`, *optional*): 1 on the model's tokens, 0 on tool results.

        Returns:
            [`Steps`]: A partition of the completion, its closing left out. Texts include special tokens and are
            those of `decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)` where the bytes are
            UTF-8. No tokens, no steps.

        Raises:
            `InputError`: `tool_mask` has another length than the completion or other values than 0 and 1, or a
                function given as rule breaks its contract.

        Example:

        ```python
        >>> from trl_drgrpo.check.tiny import tiny_tokenizer
        >>> from trl_drgrpo.process_rewards.steps import step_segmenter
        >>> tokenizer = tiny_tokenizer()  # a token is a byte
        >>> step_segmenter("\\n\\n")(tokenizer.encode("1+1=2\\n\\n2+2=4\\n\\n<|im_end|>"), tokenizer)
        Steps(texts=('1+1=2\\n\\n', '2+2=4\\n\\n'), ends=(6, 13), closing=14)

        ```
        """
        ids = [int(token_id) for token_id in completion_ids]
        mask = None if tool_mask is None else [int(entry) for entry in tool_mask]
        if mask is not None:
            _check_tool_mask(mask, len(ids))
        if not ids:
            return Steps((), ())
        if self._aligner is None or self._aligner.tokenizer is not tokenizer:
            self._aligner = Aligner(tokenizer)
        alignment = self._aligner.align(ids)
        hidden = [i for i, token_id in enumerate(ids) if token_id in self._aligner.special_ids]
        hidden += [i for i, entry in enumerate(mask or ()) if entry == 0]
        completion = Completion(alignment, _visible(alignment, hidden), mask)
        return _steps(alignment, *self.rule.ends(completion))

    def looks_ahead(self, completion_ids: list[int], tokenizer: Any, tool_mask: list[int] | None = None) -> bool:
        """Whether tokens behind a step's end decide that it ends there: a lookahead, or a greedy match, does that.

        Cuts the completion off around each end, with its first token in place of what follows.

        Args:
            completion_ids, tokenizer, tool_mask: As for a call.
        """
        if self.rule.by_prefix:
            return False
        ends = self(completion_ids, tokenizer, tool_mask).ends
        for last in {token for end in ends for token in range(end - 2, end + 3) if 0 <= token < ends[-1]}:
            mask = None if tool_mask is None else [*tool_mask[: last + 1], tool_mask[0]]
            shown = self([*completion_ids[: last + 1], completion_ids[0]], tokenizer, mask)
            if (last in shown.ends) != (last in ends):
                return True
        return False


def one_step_frac(list_of_steps: Iterable[Steps]) -> float:
    """Share of completions that came out as one step: near 1, the separator does not occur in what the model writes.

    Args:
        list_of_steps (iterable of [`Steps`]): One per completion.

    Returns:
        `float`: From 0 to 1, among completions with tokens; 0.0 when there is none.

    Example:

    ```python
    >>> one_step_frac([Steps(("a",), (0,)), Steps(("a", "b"), (0, 1)), Steps((), ())])
    0.5

    ```
    """
    counts = [len(steps.ends) for steps in list_of_steps if steps.ends]
    return counts.count(1) / len(counts) if counts else 0.0


def _check_tool_mask(mask: list[int], length: int) -> None:
    if len(mask) != length:
        got = f"{len(mask)} entries for {length} completion tokens"
        remedy = "Pass the mask of the same completion, without padding."
        raise InputError("tool_mask", got, "one entry per token", remedy)
    if other := set(mask) - {0, 1}:
        remedy = "1 marks the model's tokens, 0 those of tool results."
        raise InputError("tool_mask", f"{min(other)}", "0 or 1", remedy)


def _visible(alignment: Alignment, hidden: Iterable[int]) -> str:
    """The text with spaces in place of hidden tokens: same length, nothing to read there."""
    chars = list(alignment.text)
    for token in hidden:
        start, stop = alignment.lengths[token - 1] if token else 0, alignment.lengths[token]
        chars[start:stop] = " " * len(chars[start:stop])
    return "".join(chars)


def _steps(alignment: Alignment, ends: list[int], goes_on: bool) -> Steps:
    """Steps that end after the given tokens; what is left is a last step if `goes_on` says so, else the closing."""
    last = alignment.tokens[-1]
    closing = last if ends and not goes_on and ends[-1] < last else None
    ends = ends if closing is not None else sorted({*ends, last})
    offsets = [0, *(alignment.offsets[bisect_left(alignment.tokens, end)] for end in ends)]
    texts = [alignment.text[start:stop] for start, stop in pairwise(offsets)]
    return Steps(tuple(texts), tuple(ends), closing)


StepSpec: TypeAlias = RuleSpec | StepSegmenter


def step_segmenter(spec: StepSpec, field: str = "step_separator") -> StepSegmenter:
    """Build what cuts completions into steps.

    Args:
        spec (`str`, `int`, sequence of `str`, `re.Pattern`, callable or [`StepSegmenter`]):
            - a separator, or several of which the first to be complete ends the step. `"\\n"` also matches
              `"\\r\\n"`. A separator of escapes alone (a backslash and an n, as a shell passes them on) means the
              line breaks and tabs it spells;
            - `"re:<pattern>"` or a compiled pattern, used as it is;
            - `"tokens:<n>"` or `n`: a fixed number of the model's tokens;
            - `"turn"`: one environment turn, the model's tokens and the tool results that follow;
            - a function from the decoded completion (special tokens included) to the exclusive ends of its steps, in
              characters, strictly ascending;
            - a [`StepSegmenter`], which is returned.
        field (`str`, *optional*, defaults to `"step_separator"`): Name of the spec in error messages.

    Returns:
        [`StepSegmenter`].

    Raises:
        `InputError`: An empty separator, an invalid regex or one that matches the empty string, an interval below 1,
            or something that is none of the above.

    Example:

    ```python
    >>> step_segmenter(["\\n\\n", "###"])
    StepSegmenter(['\\n\\n', '###'])
    >>> step_segmenter("token:64")
    Traceback (most recent call last):
    trl_drgrpo.common.errors.InputError: step_separator: got 'token:64'; expected a separator, ... Did you mean ...

    ```
    """
    if isinstance(spec, StepSegmenter):
        return spec
    return StepSegmenter(rule_of(spec, field), getattr(spec, "__name__", repr(spec)))


def configured_segmenter(separators: Sequence[str]) -> StepSegmenter:
    """The segmenter of a configuration's list, where a list of one is that one: `["turn"]` is the rule.

    Args:
        separators (sequence of `str`): As in `DrGRPOConfig.step_separator`.
    """
    return step_segmenter(separators[0] if len(separators) == 1 else separators)
