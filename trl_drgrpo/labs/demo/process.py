r"""Process rewards on the list-sum task: every line is a step, and a rule checks it.

A step is a line, so completions are cut at `"\n"` and `line_reward` gives 1 for a correct line that gets the sum
further and 0 for an incorrect one (`check_steps`), next to the outcome reward. `trl-drgrpo demo --process` trains with
`PROCESS_SETTINGS` on the long list sums; `recipes/guides/process_rewards.md` compares other rewards and baselines.
"""

from collections.abc import Sequence
from typing import Any

from trl_drgrpo.labs.demo.task import check_steps, numbers_of
from trl_drgrpo.labs.demo.tokenizer import IM_END, IM_START, PAD
from trl_drgrpo.process_rewards.step_verifiers import step_verifier

PROCESS_SETTINGS: dict[str, Any] = {
    "step_separator": ["\n"],
    "step_credit": "return_to_go",
    "step_baseline": "to_go",
}


def line_is_right(prompt: Any, previous_steps: Sequence[str], step: str) -> float | None:
    r"""Judge one line, given the lines before it: a step verifier for [`step_verifier`].

    Args:
        prompt (`str` or list of messages): A prompt of this task.
        previous_steps (`Sequence[str]`): The steps before, as the segmenter cut them.
        step (`str`): The step; special tokens such as `<|im_end|>` are left out before it is judged.

    Returns:
        `float` or `None`: 1.0 if every line in the step is correct, else 0.0; `None`, unscorable, for a step without
        text, such as an end token alone, and for a correct `ok` line: it gets the sum no further, and paid lines would
        be written again and again.

    Example:

    ```python
    >>> line_is_right("3+8", ["3+8=11\n"], "\\boxed{11}<|im_end|>")
    1.0
    >>> line_is_right("3+8", ["3+8=11\n", "\\boxed{11}\n"], "<|im_end|>") is None
    True

    ```
    """
    text = _plain(step)
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if not lines:
        return None
    verdicts = check_steps(numbers_of(prompt), _plain("".join(previous_steps)) + text)
    if not all(verdicts[-len(lines) :]):
        return 0.0
    return None if all(line.startswith("ok ") for line in lines) else 1.0


line_reward = step_verifier(line_is_right, name="line_reward")


def step_numbers(problems: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    r"""Statistics of completions' lines under process rewards.

    Args:
        problems (`Sequence[Sequence[int]]`): The terms of each problem.
        texts (`Sequence[str]`): One completion per problem, without special tokens.

    Returns:
        `dict[str, float]`:
        - `steps_mean`: lines that are not blank per completion;
        - `process_reward`: share of correct lines among all lines, 0 to 1;
        - `ok_steps_frac`: share of `ok` lines among all lines, 0 to 1. They repeat an earlier line.

        All three are 0.0 if there is no line.

    Example:

    ```python
    >>> step_numbers([[3, 8]], ["3+8=11\nok 3+8=11\nok 3+8=12\n\\boxed{11}"])
    {'steps_mean': 4.0, 'process_reward': 0.75, 'ok_steps_frac': 0.5}

    ```
    """
    verdicts = [check_steps(numbers, text) for numbers, text in zip(problems, texts, strict=True)]
    lines = [line for text in texts for line in map(str.strip, text.split("\n")) if line]
    total = max(len(lines), 1)
    return {
        "steps_mean": len(lines) / max(len(verdicts), 1),
        "process_reward": sum(map(sum, verdicts)) / total,
        "ok_steps_frac": sum(line.startswith("ok ") for line in lines) / total,
    }


def _plain(text: str) -> str:
    """A step's text without the special tokens, as in the completion that is judged as a whole."""
    for token in (IM_END, IM_START, PAD):
        text = text.replace(token, "")
    return text
