"""Process reward models that are read at a marker: Math-Shepherd, Qwen2.5-Math-PRM, and chat-turn models.

| format | input | read |
|---|---|---|
| Math-Shepherd (arXiv 2312.08935) | `question Step 1: ... ки\\nStep 2: ... ки` | `+` against `-` at each `ки` |
| Qwen2.5-Math-PRM (arXiv 2501.07301) | chat, the answer's steps each followed by `<extra_0>` | class 1 of 2 there |
| chat turns (RLHFlow, arXiv 2405.07863) | each step a user turn, answered `+` | `+` against `-` as the answer |

Places are known by construction, not found by searching the input for the marker; a policy that writes the marker
itself gains nothing. All steps of a completion are scored in one forward pass: the models are causal.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.encoding import ScoringInput, encode_whole, single_token_id
from trl_drgrpo.process_rewards.loading import load_model, load_tokenizer
from trl_drgrpo.process_rewards.scorer import PRMScorer
from trl_drgrpo.process_rewards.texts import PROMPT_END, PROMPT_START, STEP


class MarkerScorer(PRMScorer):
    """Loading, and the checks that every format with a marker or a chat needs before anything is scored."""

    auto_class = "AutoModelForCausalLM"
    loading_options = frozenset({"dtype", "device", "quantization_config", "trust_remote_code"})

    def __init__(self, model: Any, tokenizer: Any, marker: str | None, name: str, options: dict[str, Any]):
        tokenizer = load_tokenizer(model, tokenizer, options.get("trust_remote_code", False))
        if marker is not None:
            self.marker_id = required_token(tokenizer, marker, "marker", name)
        loading = {key: options.pop(key) for key in self.loading_options & options.keys()}
        super().__init__(self._load(model, **loading), tokenizer, name=name, marker=marker, **options)

    def _load(self, model: Any, **loading: Any) -> Any:
        return load_model(model, self.auto_class, **loading)

    def _check_format(self) -> None:
        """Write a short row and see that every step can be read where it should be."""
        encoded = self._sample_row()
        if len(encoded.positions) != 2 or None in encoded.positions:
            got = "a tokenizer or chat template that merges the marker with its surroundings"
            remedy = "Use the tokenizer and the chat template that the model was trained with."
            raise InputError(f"tokenizer of '{self.__name__}'", got, "one token of its own per marker", remedy)

    def _chat(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            remedy = "Use the tokenizer that the model was trained with, or set `tokenizer.chat_template`."
            raise InputError(f"tokenizer of '{self.__name__}'", "no chat template", "a chat template", remedy)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)


class MathShepherdScorer(MarkerScorer):
    """Math-Shepherd: a causal model that predicts `+` or `-` at a marker behind every step.

    Score = softmax over the logits of the two candidate tokens at the marker, the share of `good`.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`peiyi9979/math-shepherd-mistral-7b-prm`) or model.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        marker (`str`, *optional*, defaults to `"ки"`): One token of the vocabulary.
        good (`str` or `int`, *optional*, defaults to `"+"`): The candidate, one token; or its id.
        bad (`str` or `int`, *optional*, defaults to `"-"`): The other candidate.
        number_steps (`bool`, *optional*, defaults to `True`): Write `Step k: ` before steps that do not begin so, as
            every step of the training data does.
        name (`str`, *optional*, defaults to `"math_shepherd_prm"`): Name in logs and metrics.
        **options: `batch_size`, `max_length`, `prompt_text`, `dtype`, `device`, `quantization_config`,
            `trust_remote_code`: as in [`TokenClassificationScorer`].

    Raises:
        `InputError`: Marker or candidate that is not one token, a vocabulary that does not hold them, a model that
            does not load.

    Source: arXiv 2312.08935, and the code on its model card.
    """

    # Between prompt and first step, between a step and its marker, between a marker and the next step.
    layout: tuple[str, str, str] = (" ", " ", "\n")

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = "ки",
        good: str | int = "+",
        bad: str | int = "-",
        number_steps: bool = True,
        name: str = "math_shepherd_prm",
        **options: Any,
    ):
        super().__init__(model, tokenizer, marker, name, options)
        self.marker, self.number_steps = marker, number_steps
        self.candidates = _candidates(self, good, bad)
        self._check_format()

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        before_steps, before_marker, between = self.layout
        numbered = [self._numbered(step, k) for k, step in enumerate(steps, start=1)]
        answer = between.join(f"{step}{before_marker}{STEP}{self.marker}" for step in numbered)
        text = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}{before_steps}{answer}"
        return encode_whole(self.tokenizer, text, len(steps), self.marker_id, shift=0, special_tokens=True)

    def _numbered(self, step: str, k: int) -> str:
        return step if not self.number_steps or re.match(r"Step \d+:", step) else f"Step {k}: {step.lstrip()}"

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, self.candidates].softmax(dim=-1)[:, 0]


class QwenMathScorer(MarkerScorer):
    """Qwen2.5-Math-PRM: a head of two classes, read at a marker token behind every step of a chat answer.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`Qwen/Qwen2.5-Math-PRM-7B`) or any model whose logits have
            two classes per token. Checkpoints of that architecture load without code from the Hub.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model, with a chat template; required if
            the model is loaded already.
        marker (`str`, *optional*, defaults to `"<extra_0>"`): One token of the vocabulary.
        auto_class (`str`, *optional*, defaults to `"AutoModelForTokenClassification"`): Loads a checkpoint of another
            architecture; `"AutoModel"` with `trust_remote_code=True` runs the repository's own class.
        name (`str`, *optional*, defaults to `"qwen_math_prm"`): Name in logs and metrics.
        **options: `batch_size`, `max_length`, `prompt_text`, `dtype`, `device`, `quantization_config`,
            `trust_remote_code`: as in [`TokenClassificationScorer`]. Messages keep their roles, the
            system's too, unless `prompt_text` is given.

    Raises:
        `InputError`: A marker that is not one token, a tokenizer without chat template, a head that has not two
            classes, a model that does not load.

    Source: arXiv 2501.07301, and the code on its model card.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = "<extra_0>",
        auto_class: str = "AutoModelForTokenClassification",
        name: str = "qwen_math_prm",
        **options: Any,
    ):
        self.auto_class = auto_class
        super().__init__(model, tokenizer, marker, name, options)
        self.marker = marker
        self._check_format()
        self._check_outputs(2)

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        messages = marked_prompt(self._messages(prompt))
        answer = "".join(f"{step}{STEP}{self.marker}" for step in steps)
        text = self._chat([*messages, {"role": "assistant", "content": answer}])
        return encode_whole(self.tokenizer, text, len(steps), self.marker_id, shift=0, special_tokens=False)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1)[:, 1]


class ChatTurnScorer(MarkerScorer):
    """Chat-turn models: every step is a user turn, the assistant answers `+` or `-`.

    Score of step k = softmax over the logits of the two answers where the k-th answer is predicted, the share of
    `good`, all earlier answers being `good`, as the published evaluation does. The prompt opens the first turn.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`RLHFlow/Llama3.1-8B-PRM-Deepseek-Data`) or model.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model, with a chat template; required if
            the model is loaded already.
        good (`str`, *optional*, defaults to `"+"`): The answer to a good step, one token.
        bad (`str` or `int`, *optional*, defaults to `"-"`): The other answer, one token or its id.
        name (`str`, *optional*, defaults to `"chat_turn_prm"`): Name in logs and metrics.
        **options: `batch_size`, `max_length`, `prompt_text`, `dtype`, `device`, `quantization_config`,
            `trust_remote_code`: as in [`TokenClassificationScorer`].

    Raises:
        `InputError`: Answers that are not one token, a vocabulary that does not hold them, a tokenizer without chat
            template, a model that does not load.

    Source: RLHFlow's process reward models (arXiv 2405.07863 and their evaluation code).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        good: str = "+",
        bad: str | int = "-",
        name: str = "chat_turn_prm",
        **options: Any,
    ):
        super().__init__(model, tokenizer, None, name, options)
        self.good = good
        self.candidates = _candidates(self, good, bad)
        self._check_format()

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        question = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}"
        turns: list[dict[str, str]] = []
        for k, step in enumerate(steps):
            turns.append({"role": "user", "content": step if k else f"{question} {step}"})
            turns.append({"role": "assistant", "content": f"{STEP}{self.good}"})
        text = self._chat(turns)
        return encode_whole(self.tokenizer, text, len(steps), self.candidates[0], shift=-1, special_tokens=False)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, self.candidates].softmax(dim=-1)[:, 0]


def marked_prompt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Marks around the prompt: from the first message that is not the system's to the end of the last one."""
    marked = [dict(message) for message in messages]
    first = next((i for i, message in enumerate(marked) if message["role"] != "system"), 0)
    marked[first]["content"] = PROMPT_START + marked[first]["content"]
    marked[-1]["content"] += PROMPT_END
    return marked


def _candidates(scorer: MarkerScorer, good: str | int, bad: str | int) -> list[int]:
    """The ids of the two candidate tokens, checked against the model's vocabulary."""
    name, vocabulary = scorer.__name__, scorer.model.config.get_text_config().vocab_size
    ids = [
        token if isinstance(token, int) else required_token(scorer.tokenizer, token, field, name)
        for field, token in (("good", good), ("bad", bad))
    ]
    head = scorer.model.get_output_embeddings()
    if head is None or max(ids) >= vocabulary:
        got = "a model without a language modeling head" if head is None else f"{vocabulary} outputs per token"
        remedy = (
            "This format reads the logits of two tokens: load the process reward model as a causal language model."
        )
        raise InputError(f"model of '{name}'", got, f"an output for the tokens {ids}", remedy)
    return ids


def required_token(tokenizer: Any, text: str, field: str, name: str) -> int:
    """The id of a text that must be one token of the vocabulary, or the error that says so."""
    token_id = single_token_id(tokenizer, text)
    if token_id is None:
        got = f"{text!r}, which is not one token of the tokenizer"
        remedy = "Load the tokenizer of a process reward model of this format; the policy's has no such marker."
        raise InputError(f"{field} of '{name}'", got, "one token of the vocabulary", remedy)
    return token_id
