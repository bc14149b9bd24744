r"""The list-sum task: add a list of digits, writing the running total line by line.

A prompt is one chat message such as `3+8+5+2`. A completion writes one addition per line and boxes the last total:

    3+8=11
    11+5=16
    ok 11+5=16
    16+2=18
    \boxed{18}

Every line can be checked by a machine: an addition carries on from the total above it, an optional `ok` line repeats
the addition above it, the boxed line closes. That makes the task fit outcome rewards (`list_sum_reward`) and process
rewards (`line_reward`, a reward per line) alike. The *demonstrator* writes such completions with human mistakes, above
all dropped carries, and checks more often after one; a model that imitates it is correct about 3 times in 10 and has
something to learn. Only `make_dataset` imports `datasets`, when it is called.
"""

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.rows import ColumnValues
from trl_drgrpo.process_rewards.verifiers import step_verifier
from trl_drgrpo.rewards.columns import require_kind
from trl_drgrpo.rewards.recipe_names import register_reward

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Qwen2Tokenizer


PAD = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The task's own characters, then the letters of the three role names, `ok` and `boxed`. In a byte-level vocabulary a
# line break is written "Ċ" and a space "Ġ".
_CHARACTERS = "0123456789+=ĊĠ\\{}" + "abdeikmnorstuxy"


def build_tokenizer(characters: str = _CHARACTERS, longest: int = 256) -> "Qwen2Tokenizer":
    """
    Build the demo's own tokenizer: one token per character, 35 tokens, Qwen-style chat template.

    An existing one would not do: a vocabulary of thousands would make up most of a model this small, and multi-digit
    tokens would hide the carries. It is a `Qwen2Tokenizer` with a small vocabulary and no merges, because
    `AutoTokenizer` loads that class for every Qwen2 model, whatever the tokenizer files say. Deltas from Qwen: no
    default system message, and characters outside the task have no token, so they vanish. A completion ends with
    `<|im_end|>`, which stops generation. Padding is on the left, as generation in batches needs it.

    `characters`: have a token each, as a byte-level vocabulary writes them. `longest`: most tokens of a text.
    """
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, IM_START, IM_END, *characters])},
        merges=[],
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        padding_side="left",
        model_max_length=longest,
        chat_template=CHAT_TEMPLATE,
    )


Split = Literal["train", "held_out"]

MIN_TERMS = 3
MAX_TERMS = 5
_TERMS = (MIN_TERMS, MAX_TERMS)
# One multiset of digits in eight is held out.
_HELD_OUT_SHARE = 8

_ADDITION = re.compile(r"([0-9]{1,9})\+([0-9]{1,9})=([0-9]{1,9})")
_BOXED = re.compile(r"\\boxed\{([0-9]+)\}")


# Problems ------------------------------------------------------------------------------------------------------------


def split_of(numbers: Sequence[int]) -> Split:
    """Return the split of a problem.

    A fixed checksum of the *sorted* numbers decides, so a held-out problem is never a training problem in another
    order, whatever the seed and the size.

    Args:
        numbers (`Sequence[int]`): The terms of the sum, in any order.

    Returns:
        `"train"` or `"held_out"`.

    Example:

    ```python
    >>> split_of([3, 8, 5, 2]) == split_of([2, 3, 5, 8])
    True

    ```
    """
    checksum = zlib.crc32("+".join(map(str, sorted(numbers))).encode())
    if checksum % _HELD_OUT_SHARE == 0:
        return "held_out"
    return "train"


def draw_problem(rng: random.Random, split: Split = "train", terms: tuple[int, int] = _TERMS) -> tuple[int, ...]:
    """Draw one problem of a split: digits between 1 and 9.

    Args:
        rng (`random.Random`): Source of randomness; it is advanced.
        split (`"train"` or `"held_out"`): The split to draw from.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 5)`): Fewest and most digits.

    Returns:
        The terms, in the order in which they are to be added.
    """
    while True:
        numbers = tuple(rng.randint(1, 9) for _ in range(rng.randint(*terms)))
        if split_of(numbers) == split:
            return numbers


def make_problems(
    size: int, split: Split = "train", seed: int = 0, terms: tuple[int, int] = _TERMS
) -> list[tuple[int, ...]]:
    """Draw problems, with replacement.

    Args:
        size (`int`): Number of problems, at least 1.
        split (`"train"` or `"held_out"`): The two share no problem, in any order of its terms.
        seed (`int`): The same seed gives the same problems.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 5)`): Fewest and most digits.

    Returns:
        `list[tuple[int, ...]]` of length `size`.

    Raises:
        InputError: If `size` is below 1 or `split` is unknown.
    """
    check_draw(size, split)
    rng = random.Random(f"{split}/{seed}")
    return [draw_problem(rng, split, terms) for _ in range(size)]


def check_draw(size: int, split: str) -> None:
    """Refuse a size below 1, and a split that no problem is in: drawing would not end."""
    if size < 1:
        raise InputError("size", str(size), "at least 1", "Ask for at least one problem.")
    if split not in ("train", "held_out"):
        raise InputError("split", repr(split), "'train' or 'held_out'", "Name one of the two splits.")


def prompt_of(numbers: Sequence[int]) -> list[dict[str, str]]:
    """Return the chat prompt of a problem: a single user message, e.g. `3+8+5+2`."""
    return [{"role": "user", "content": "+".join(map(str, numbers))}]


def numbers_of(prompt: str | Sequence[dict[str, str]]) -> list[int]:
    """Return the terms of a prompt: the inverse of `prompt_of`.

    Args:
        prompt (`str` or list of messages): The text `3+8+5+2`, or a chat whose last message holds it.

    Returns:
        `list[int]`: the terms in order.

    Raises:
        InputError: If the text is not a sum of non-negative integers.
    """
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not re.fullmatch(r"\d+(\+\d+)+", text):
        raise InputError("prompt", repr(text), "a sum such as '3+8+5+2'", "Use the prompts of this task.")
    return [int(term) for term in text.split("+")]


def make_dataset(size: int, split: Split = "train", seed: int = 0, terms: tuple[int, int] = _TERMS) -> "Dataset":
    """Make the task a dataset for `DrGRPOTrainer`.

    Args:
        size (`int`): Number of rows.
        split (`"train"` or `"held_out"`): The two are disjoint by construction, see `split_of`.
        seed (`int`): The same seed gives the same rows.
        terms (`tuple[int, int]`, *optional*, defaults to `(3, 5)`): Fewest and most digits.

    Returns:
        `datasets.Dataset` with the columns `prompt` (list of messages) and `answer` (`str`, the sum).

    Raises:
        InputError: As `make_problems`.
    """
    from datasets import Dataset

    problems = make_problems(size, split, seed, terms)
    answers = [str(sum(numbers)) for numbers in problems]
    return Dataset.from_dict({"prompt": list(map(prompt_of, problems)), "answer": answers})


# Judging -------------------------------------------------------------------------------------------------------------


def list_sum_reward(completions: Sequence[Any], answer: Sequence[str | int], **kwargs: Any) -> list[float]:
    r"""Reward an outcome: 1 if the last boxed number is the sum, else 0.

    Args:
        completions (`Sequence[str]` or sequence of message lists): `B` completions, plain or conversational.
        answer (`Sequence[str | int]`): `B` sums.
        **kwargs: Other columns and what the trainer adds; not used.

    Returns:
        `list[float]` of length `B`, each 1.0 or 0.0. A completion without a boxed number gets 0.0.

    Example:

    ```python
    >>> list_sum_reward(["3+8=11\n\\boxed{11}", "\\boxed{1}", "3+8=11"], ["11", "11", "11"])
    [1.0, 0.0, 0.0]

    ```
    """
    rewards = []
    for completion, target in zip(completions, answer, strict=True):
        text = completion
        if not isinstance(completion, str):
            text = completion[-1]["content"]
        boxed = _BOXED.findall(text)[-1:]
        rewards.append(float(_same(boxed, _whole(target))))
    return rewards


def _whole(answer: str | int) -> int:
    try:
        return int(answer)
    except (ValueError, OverflowError, TypeError):
        expected = "a whole number in every row"
        raise InputError("column answer", shortened(answer), expected, "Correct the data.") from None


def _check_values(values: Mapping[str, ColumnValues]) -> None:
    require_kind("list_sum_reward", "answer", values, ("text", "number"), nulls=False)


list_sum_reward.check_values = _check_values  # pyright: ignore[reportFunctionMemberAccess]


def check_steps(numbers: Sequence[int], text: str) -> list[bool]:
    r"""Judge every line of a completion against the line before it, as written.

    A line is correct if it follows from the lines above it. An addition starts from the total written above it and
    adds the next term correctly; an `ok` line repeats the addition above it, which has to be correct; the boxed line
    repeats the last total once every term is used. A mistake is charged to the line that makes it, not to the lines
    that carry it on, so an incorrect answer can end in correct lines. A completion that ends with the boxed line and
    has only correct lines is correct.

    Args:
        numbers (`Sequence[int]`): The terms of the prompt.
        text (`str`): The completion. Blank lines are left out.

    Returns:
        `list[bool]`, one per line that is not blank. Unreadable lines and lines after the boxed one are `False`.

    Example:

    ```python
    >>> check_steps([3, 8, 5], "3+8=1\n1+5=6\nok 1+5=6\n\\boxed{6}")
    [False, True, True, True]

    ```
    """
    verdicts = []
    total = numbers[0]
    used = 1
    previous = None
    closed = False
    for line in filter(None, map(str.strip, text.split("\n"))):
        is_correct = False
        is_check = line.startswith("ok ")
        addition = _ADDITION.fullmatch(line.removeprefix("ok "))
        boxed = _BOXED.fullmatch(line)
        # Nothing may follow the boxed line.
        if closed:
            pass
        elif addition:
            augend, term, result = map(int, addition.groups())
            adds_up = augend + term == result
            if is_check:
                is_correct = adds_up and (augend, term, result) == previous
            else:
                goes_on = used < len(numbers) and (augend, term) == (total, numbers[used])
                is_correct = adds_up and goes_on
                # The total as it was written: a mistake is charged once.
                total = result
                used += 1
                previous = (augend, term, result)
        elif boxed:
            is_correct = used >= len(numbers) and _same(boxed.groups(), total)
            closed = True
        verdicts.append(is_correct)
    return verdicts


def _same(digits: Sequence[str], number: int) -> bool:
    """Tell whether the boxed number, if any, is `number`. As text: a model may write more digits than `int` takes."""
    return [text.lstrip("0") or "0" for text in digits] == [str(number)]


# The demonstrator ----------------------------------------------------------------------------------------------------


def _add_like_the_demonstrator(total: int, term: int, rng: random.Random) -> int:
    """Add two numbers: the first carry is dropped 1 time in 2, a later one 3 in 4; 3 in 100 others slip by one."""
    result = total + term
    # One draw decides both, whether or not there is a carry.
    draw = rng.random()
    dropped = 0.5 if total < 10 else 0.75
    has_carry = result // 10 > total // 10
    if has_carry and draw < dropped:
        return result - 10
    if draw > 0.97:
        return result + 1
    return result


def demonstrate(
    numbers: Sequence[int],
    rng: random.Random,
    add: Callable[[int, int, random.Random], int] = _add_like_the_demonstrator,
    checks: tuple[float, float] | None = (0.15, 0.45),
) -> str:
    r"""Write a completion the way a demonstrator does: fluent, and often incorrect.

    The task's own drops a carry more often the larger the total, slips by one now and then, carries its mistakes on,
    and writes an `ok` line three times as often after a mistake as before: incorrect completions are longer on
    average.

    Args:
        numbers (`Sequence[int]`): The terms to add.
        rng (`random.Random`): Source of randomness; it is advanced.
        add (`Callable`, *optional*): `f(total, term, rng)` -> the result as it is written.
        checks (`tuple[float, float]`, *optional*): Probability of an `ok` line before the first mistake, and after it;
            `None`: no such lines.

    Returns:
        `str`: the completion, without an end token.
    """
    lines = []
    total = numbers[0]
    mistaken = False
    for term in numbers[1:]:
        result = add(total, term, rng)
        mistaken = mistaken or result != total + term
        equation = f"{total}+{term}={result}"
        lines.append(equation)
        # `checks[False]` before the first mistake, `checks[True]` after it.
        if checks and rng.random() < checks[mistaken]:
            lines.append(f"ok {equation}")
        # The total as it was written: mistakes are carried on.
        total = result
    return "\n".join([*lines, f"\\boxed{{{total}}}"])


# Process rewards ----------------------------------------------------------------------------------------------------

PROCESS_SETTINGS: dict[str, Any] = {"step_separator": ["\n"], "step_credit": "return_to_go", "step_baseline": "to_go"}


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
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    if not lines:
        return None
    # A line is judged by those before it, so all are read again; the verdicts of this step are the last ones.
    verdicts = check_steps(numbers_of(prompt), _plain("".join(previous_steps)) + text)
    if not all(verdicts[-len(lines) :]):
        return 0.0
    if all(line.startswith("ok ") for line in lines):
        return None
    return 1.0


line_reward = step_verifier(line_is_right, name="line_reward")


def step_numbers(problems: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    r"""Return statistics of completions' lines under process rewards.

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
    correct = 0
    repeated = 0
    lines = 0
    for numbers, text in zip(problems, texts, strict=True):
        verdicts = check_steps(numbers, text)
        lines += len(verdicts)
        correct += sum(verdicts)
        repeated += sum(line.strip().startswith("ok ") for line in text.split("\n"))
    total = max(lines, 1)
    return {
        "steps_mean": lines / max(len(texts), 1),
        "process_reward": correct / total,
        "ok_steps_frac": repeated / total,
    }


def _plain(text: str) -> str:
    """Return a step's text without the special tokens, as in the completion that is judged as a whole."""
    for token in (IM_END, IM_START, PAD):
        text = text.replace(token, "")
    return text


register_reward("list_sum_reward", list_sum_reward, help="The demo's: 1 if the boxed total is right.")
register_reward("list_sum_line_reward", line_reward, help="The demo's: 1 for a line that is right.", role="step")
