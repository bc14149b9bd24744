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
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors
from trl_drgrpo.process_rewards.scorer import PRMScorer, load_model, load_tokenizer, wrong_head
from trl_drgrpo.process_rewards.texts import (
    PROMPT_END,
    PROMPT_START,
    STEP,
    ScoringInput,
    encode_boundaries,
    encode_piecewise,
    encode_whole,
    single_token_id,
)


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


class VersaScorer(MathShepherdScorer):
    r"""VersaPRM and Llama-PRM800K: Llama 3 that predicts `+` or `-` at ` \n\n\n\n`; steps are not numbered.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`UW-Madison-Lee-Lab/VersaPRM`) or model.
        tokenizer, marker, good, bad, number_steps, name, **options: As in [`MathShepherdScorer`].

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    layout = (" \n\n", "", "")

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = " \n\n\n\n",
        good: str | int = "+",
        bad: str | int = "-",
        number_steps: bool = False,
        name: str = "versa_prm",
        **options: Any,
    ):
        super().__init__(
            model,
            tokenizer,
            marker=marker,
            good=good,
            bad=bad,
            number_steps=number_steps,
            name=name,
            **options,
        )

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        return super()._encode(prompt, [step.strip() for step in steps])


class MathPSAScorer(VersaScorer):
    r"""OpenR's Math-PSA: Qwen2.5-Math-7B-Instruct that predicts ` +` or ` -` at ` \n\n\n\n\n` behind numbered steps.

    The published checkpoint is an adapter, which loads on the base that it names; name the base's tokenizer too.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model; an adapter's too.
        tokenizer, marker, good, bad, number_steps, name, **options: As in [`MathShepherdScorer`].

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    layout = (" ", "", " ")

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = " \n\n\n\n\n",
        good: str | int = " +",
        bad: str | int = " -",
        number_steps: bool = True,
        name: str = "math_psa_prm",
        **options: Any,
    ):
        super().__init__(
            model,
            tokenizer,
            marker=marker,
            good=good,
            bad=bad,
            number_steps=number_steps,
            name=name,
            **options,
        )


class _Qwen2WithHead(Qwen2PreTrainedModel):
    """Qwen2 with a head on every token's last hidden state."""

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        self.model = Qwen2Model(config)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs `(B, S, n)` of hidden states `(B, S, hidden size)`."""
        raise NotImplementedError

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids (`torch.Tensor` of shape `(B, S)`): The tokens.
            attention_mask (`torch.Tensor` of shape `(B, S)`, *optional*): 1 on tokens, 0 on padding.

        Returns:
            [`~transformers.modeling_outputs.TokenClassifierOutput`] with `logits` of shape `(B, S, n)`.
        """
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
        return TokenClassifierOutput(logits=self.head(hidden.last_hidden_state))  # type: ignore[arg-type]


class Qwen2ForProcessRewardModel(_Qwen2WithHead):
    """Qwen2 with a two-layer head of two classes per token; class 1 = the step is good.

    Args:
        config ([`~transformers.Qwen2Config`]): The decoder's.
    """

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        self.num_labels = 2
        self.score = torch.nn.Sequential(
            torch.nn.Linear(config.hidden_size, config.hidden_size),
            torch.nn.ReLU(),
            torch.nn.Linear(config.hidden_size, self.num_labels),
        )
        self.post_init()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.score(hidden)


class Qwen2ForPrmModel(_Qwen2WithHead):
    """Qwen2 with a value head: one output per token, the logit of "the step is good".

    Args:
        config ([`~transformers.Qwen2Config`]): The decoder's.
    """

    _keys_to_ignore_on_load_unexpected = [r"lm_head"]  # noqa: RUF012  # declared so by transformers

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        self.num_labels = 1
        self.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(config.hidden_size, 1)})
        self.post_init()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.v_head["summary"](hidden)


HEAD_FILE = "reward_head.pt"


class SkyworkScorer(MarkerScorer):
    r"""Skywork-o1-Open-PRM: Qwen2 with a value head, read at the step token behind every step.

    The model was trained on lines: each line of a step is followed by the step token, as in the published code, and
    the step's score is the one at its last line.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B`) or a model with
            one output per token. Loads without code from the Hub.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        step_token (`str`, *optional*, defaults to a line break): One token of the vocabulary.
        name (`str`, *optional*, defaults to `"skywork_prm"`): Name in logs and metrics.
        **options: `batch_size`, `max_length`, `prompt_text`, `dtype`, `device`, `quantization_config`,
            `trust_remote_code`: as in [`TokenClassificationScorer`].

    Raises:
        `InputError`: A step token that is not one token, a checkpoint without its head, a head of other outputs.
    """

    auto_class = "Qwen2ForPrmModel"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        step_token: str = "\n",
        name: str = "skywork_prm",
        **options: Any,
    ):
        super().__init__(model, tokenizer, None, name, options)
        self.step_token = step_token
        required_token(self.tokenizer, step_token, "step_token", name)
        self._check_outputs(1)

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        lines = [step.split(self.step_token) for step in steps]
        every_line = [line for each in lines for line in each]
        row = encode_piecewise(self.tokenizer, self._text(prompt) + "\n", every_line, self.step_token)
        last = [sum(map(len, lines[: k + 1])) - 1 for k in range(len(lines))]
        return ScoringInput(row.input_ids, [row.positions[line] for line in last], row.cut)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, 0].sigmoid()


class ReasonFluxScorer(MarkerScorer):
    r"""ReasonFlux-PRM-1.5B: a causal language model's decoder and, in a file of its own, a linear head.

    ReasonFlux-PRM-7B has the format of Qwen2.5-Math-PRM: [`QwenMathScorer`] loads it.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`Gen-Verse/ReasonFlux-PRM-1.5B`; both with the head in
            `reward_head.pt`) or a model with one output per token.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        step_separator (`str`, *optional*, defaults to an empty line): Between two steps.
        name (`str`, *optional*, defaults to `"reasonflux_prm"`): Name in logs and metrics.
        **options: `batch_size`, `max_length`, `prompt_text`, `dtype`, `device`, `quantization_config`,
            `trust_remote_code`: as in [`TokenClassificationScorer`].

    Raises:
        `InputError`: A checkpoint without its head, a head of other outputs.
    """

    auto_class = "AutoModel"
    is_causal = False  # a step's last token may merge with the separator, which is there only if a step follows

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        step_separator: str = "\n\n",
        name: str = "reasonflux_prm",
        **options: Any,
    ):
        super().__init__(model, tokenizer, None, name, options)
        self.step_separator = step_separator
        self._check_outputs(1)

    def _load(self, model: Any, **loading: Any) -> Any:
        decoder = super()._load(model, **loading)
        return decoder if decoder is model else _DecoderWithHead(decoder, _head_weights(model, decoder))

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        answer = self.step_separator.join(f"{step}{STEP}" for step in steps)
        text = f"{PROMPT_START}{self._text(prompt)}{PROMPT_END}{answer}"
        return encode_boundaries(self.tokenizer, text, len(steps), special_tokens=True)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, 0].sigmoid()


class _DecoderWithHead(torch.nn.Module):
    """One output per token from a decoder's last hidden state."""

    def __init__(self, decoder: Any, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.decoder, self.config = decoder, decoder.config
        self.reward_head = torch.nn.Linear(weights["weight"].size(1), 1).to(decoder.device, decoder.dtype)
        self.reward_head.load_state_dict(weights)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self.reward_head(hidden))


def _head_weights(model: Any, decoder: Any) -> dict[str, torch.Tensor]:
    """The head beside a checkpoint, checked."""
    from transformers.utils import cached_file

    with hub_errors("model", str(model), f"a folder or Hub id with {HEAD_FILE}, the head"):
        file = cached_file(model, HEAD_FILE)
        weights = torch.load(str(file), map_location="cpu", weights_only=True)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    due = {"weight": (1, decoder.config.hidden_size), "bias": (1,)}
    if shapes != due:
        got = f"{HEAD_FILE} with {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
        raise InputError("model", got, f"weight {due['weight']} and bias (1,)", "Pass the published checkpoint.")
    return weights


DEFAULT_SEPARATOR = "\n"


class TokenClassificationScorer(PRMScorer):
    """Step rewards from an `AutoModelForTokenClassification` with two classes.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        step_separator (`str`, *optional*): What followed every step in training. Defaults to what `train-prm` noted
            in the model's config, else to a line break, TRL's default.
        name (`str`, *optional*, defaults to `"token_classification_prm"`): Name in logs and metrics.
        batch_size (`int`, *optional*, defaults to `8`): Rows per forward pass.
        max_length (`int`, *optional*): Longest input in tokens. Defaults to what model and tokenizer state.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; by default the checkpoint's.
        device (`torch.device` or `str`, *optional*): By default this process's GPU, else the CPU.
        quantization_config (*optional*): For `from_pretrained`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.
        prompt_text (`Callable`, *optional*): Turns a prompt into text. By default the contents of all messages but the
            system's, separated by an empty line.

    Raises:
        `InputError`: A model that does not load, lacks its head, or whose head has not two classes.
    """

    is_causal: bool | None = None  # a decoder or an encoder: known once it is loaded

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        step_separator: str | None = None,
        name: str = "token_classification_prm",
        batch_size: int = 8,
        max_length: int | None = None,
        dtype: Any = None,
        device: Any = None,
        quantization_config: Any = None,
        trust_remote_code: bool = False,
        prompt_text: Callable[[Any], str] | None = None,
    ):
        tokenizer = load_tokenizer(model, tokenizer, trust_remote_code)
        loaded = load_model(
            model,
            "AutoModelForTokenClassification",
            dtype=dtype,
            device=device,
            quantization_config=quantization_config,
            trust_remote_code=trust_remote_code,
        )
        if getattr(loaded.config, "num_labels", 2) != 2:
            raise wrong_head(name, f"{loaded.config.num_labels} classes")
        super().__init__(
            loaded, tokenizer, name=name, batch_size=batch_size, max_length=max_length, prompt_text=prompt_text
        )
        noted: str = getattr(loaded.config, "step_separator", DEFAULT_SEPARATOR)
        self.step_separator = noted if step_separator is None else step_separator
        self._check_outputs(2)
        attends = [module.is_causal for module in loaded.modules() if hasattr(module, "is_causal")]
        self.is_causal = all(attends) if attends else None  # not every architecture says

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        return encode_piecewise(self.tokenizer, self._text(prompt), steps, self.step_separator)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1)[:, 1]
