"""Process reward models (PRM): one scorer, and per published format how a row is written and which number is read.

| format | input | read |
|---|---|---|
| Math-Shepherd (arXiv 2312.08935) | `question Step 1: ... ки\nStep 2: ... ки` | `+` against `-` at each `ки` |
| VersaPRM (arXiv 2502.06737) | `question \n\n`, each step and ` \n\n\n\n` | `+` against `-` at it |
| Math-PSA (arXiv 2410.09671) | `question `, `Step 1: ...`, ` \n\n\n\n\n`, a space, ... | ` +` against ` -` at it |
| chat turns (RLHFlow, arXiv 2405.07863) | each step a user turn, answered `+` | `+` against `-` as the answer |
| Qwen2.5-Math-PRM (arXiv 2501.07301) | chat, the answer's steps each followed by `<extra_0>` | class 1 of 2 there |
| `train-prm`'s | `[bos] prompt step separator step separator ...` | class 1 of 2 at its last token |
| Skywork-o1-Open-PRM | `problem\n`, each line of the answer and the step token `\n` | sigmoid at a step's last `\n` |

Places are known by construction, not found by searching the input for the marker; a policy that writes the marker
itself gains nothing. All steps of a completion that fits are scored in one forward pass. A score depends on its own
row only and, where the scorer is causal, on nothing behind its step; rows that are too long are read in parts so that
this holds for them, too (`implicit.py` reads the whole answer or nothing). Rows are sorted by length, padded on the
right and masked, so neither the batch a row lands in nor its padding changes it beyond rounding.

The space before the line breaks of a marker belongs to it: it keeps the tokenizers of Llama 3 and Qwen2.5 from joining
the first break with a full stop. Of VersaPRM, Math-PSA
and Skywork no published weights were run here: they are checked against their authors' code.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForTokenClassification

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import refuse_outside, whole
from trl_drgrpo.process_rewards.loading import is_causal, load_model, load_tokenizer, longest_input
from trl_drgrpo.process_rewards.named import FORMATS
from trl_drgrpo.process_rewards.texts import (
    PROMPT_END,
    PROMPT_START,
    STEP,
    Cleaner,
    ScoringInput,
    encode_marked,
    encode_piecewise,
    prompt_without_system,
    single_token_id,
    texts_of,
    unread,
)
from trl_drgrpo.rewards.texts import content_text

_HEADS = {  # by its outputs: what is expected, and what to do
    1: ("a head of 1 output per token", "Load a process reward model of this format."),
    2: (
        "a head of 2 classes per token",
        "Load a process reward model (class 1 = good), or train one with `trl-drgrpo train-prm`.",
    ),
}
TRL_SEPARATOR = "\n"  # of a model that does not say: that of TRL's former PRM trainer
_NAMES = {scorer: name for name, (scorer, *_) in FORMATS.items()}  # in logs as in recipes
_LOADING = {"dtype": None, "device": None, "quantization_config": None, "trust_remote_code": False}


class PRMScorer:
    """A process reward model as a step reward function; a format is its constants, and its rows where `layout` does
    not say how they are written (`_encode`).

    Args:
        model, tokenizer, name, batch_size, max_length, prompt_text, lazy: As in [`TokenClassificationScorer`].
        **options: `dtype`, `device`, `quantization_config` and `trust_remote_code`, as there; the format's own, see
            `settings`.

    Attributes:
        is_causal (`bool`, *optional*): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires; `None`: not known.

    Raises:
        `InputError`: An unknown setting; a model that does not load; a tokenizer or head of another format.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores
    is_causal: bool | None = True  # a decoder, read at a step's own marker: no later text changes the score
    causal_remedy = "Replace `{0}` by a decoder that is read at the end of a step, `math_shepherd_prm` for example."
    auto_class = "AutoModelForCausalLM"
    outputs: int | None = None  # of the head, per token: 2 classes, or 1, the logit of "good". None: a vocabulary
    settings: ClassVar[Mapping[str, Any]] = {}  # the format's own, with their defaults; attributes of each scorer
    marker: str | None = None  # taken out of whatever the policy wrote
    good: str | int | None = None
    bad: str | int | None = None
    step_separator: str  # of formats that have one
    # Between prompt and first step, between a step and its marker, between a marker and the next step.
    layout: tuple[str, str, str] = ("", "", "")
    is_chat = False  # the steps are an assistant's answer
    number_steps = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        prompt_text: Callable[[Any], str] | None = None,
        lazy: bool = False,
        **options: Any,
    ):
        refuse_outside("batch_size", batch_size, whole(1, remedy="Set the rows per forward pass."))
        self.check_options(options)
        self._loading = {key: options.pop(key, default) for key, default in _LOADING.items()}
        vars(self).update({**self.settings, **options})
        self.__name__ = name or _NAMES.get(type(self).__name__, type(self).__name__)
        self.model, self.tokenizer, self.batch_size, self.max_length = model, tokenizer, batch_size, max_length or 0
        self._prompt_text = prompt_text
        self._warned: set[str] = set()
        self._is_loaded = False
        if not lazy:
            self.load()
        elif self.is_causal is None:
            self.is_causal = is_causal(model)

    def load(self) -> None:
        """Load what is named, and check all of it against the format."""
        self.tokenizer = load_tokenizer(self.model, self.tokenizer, self._loading["trust_remote_code"])
        if self.marker is not None:
            self.marker_id = self._token("marker", self.marker)
        self.model = self._load(self.model).eval()
        self.candidates = [] if self.good is None else self._candidates(good=self.good, bad=self.bad)
        self.max_length = self.max_length or longest_input(self.model, self.tokenizer)
        self._cleaner = Cleaner(self.tokenizer.all_special_tokens, self.marker)
        prompt_text, self._prompt_text = self._prompt_text, None  # which may expect messages
        self._check_format(self._encode("1+1+1=?", ["1+1=2", "2+1=3"]))
        self._prompt_text, self._is_loaded = prompt_text, True

    @classmethod
    def check_options(cls, options: Collection[str]) -> None:
        """Refuse an option that a recipe cannot give to this format."""
        known = (*cls.settings, "name", "tokenizer", "batch_size", "max_length", *_LOADING)
        for option in options:
            if option not in known:
                remedy = did_you_mean(option, known, "Remove it.")
                raise InputError(option, "an unknown option", f"one of {', '.join(known)}", remedy)

    def _load(self, model: Any) -> Any:
        return load_model(model, self.auto_class, OWN_CLASSES, **self._loading)

    @property
    def source(self) -> str:
        """Path or Hub id of the model, with the revision that was loaded from the Hub."""
        if not self._is_loaded:
            return self.model
        config = self.model.config
        revision = getattr(config, "_commit_hash", None)
        return f"{config._name_or_path}{f' at revision {revision}' if revision else ''}"

    def _token(self, field: str, text: str) -> int:
        """The id of a text that must be one token of the vocabulary, or the error that says so."""
        token_id = single_token_id(self.tokenizer, text)
        if token_id is None:
            got = f"{text!r}, which is not one token of the tokenizer"
            remedy = "Load the tokenizer of a process reward model of this format; the policy's has no such marker."
            raise InputError(f"{field} of '{self.__name__}'", got, "one token of the vocabulary", remedy)
        return token_id

    def _candidates(self, **tokens: Any) -> list[int]:
        """The ids of the two candidate tokens, checked against the model's vocabulary."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = [token if isinstance(token, int) else self._token(field, token) for field, token in tokens.items()]
        head = self.model.get_output_embeddings()
        if head is None or max(ids) >= vocabulary:
            got = "a model without a language modeling head" if head is None else f"{vocabulary} outputs per token"
            remedy = "Load it as a causal language model: this format reads the logits of two tokens."
            raise InputError(f"model of '{self.__name__}'", got, f"an output for the tokens {ids}", remedy)
        return ids

    def _check_format(self, row: ScoringInput) -> None:
        """Every step of a row must be read where it should be, from a head of as many outputs as are due."""
        if len(row.read) != len(row.positions):
            got = "a tokenizer or chat template that merges the marker with its surroundings, or changes the answer"
            remedy = "Use the tokenizer and the chat template that the model was trained with."
            raise InputError(f"tokenizer of '{self.__name__}'", got, "one that leaves both unchanged", remedy)
        if self.outputs is None:
            return
        outputs = self._logits([row], [row.read], self.model)[0].size(-1)
        if outputs != self.outputs:
            expected, remedy = _HEADS[self.outputs]
            raise InputError(f"model of '{self.__name__}'", f"{outputs} outputs per token", expected, remedy)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any] | None = None,
        steps: Sequence[Sequence[str]] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[list[float | None]]:
        """Score every step, as a step reward function.

        Args:
            prompts (`B` texts or message lists): The prompts.
            completions (`B` texts or message lists, *optional*): Not read: the steps are what is scored.
            steps (`B` sequences of `K_i` texts): The steps of each completion.
            log_metric (`Callable`, *optional*): Gets `process_rewards/<name>/truncated_frac`, the share of rows that
                were too long.
            **kwargs: Other arguments of the trainer.

        Returns:
            `list[list[float | None]]`: For each row `K_i` scores, by default probabilities from 0 to 1 that the step
            is good. 0 for a step that does not fit or whose marker got lost, and for what comes before the first text:
            what was written is the reason. `None` for a later step without text (special tokens and white space only).

        Raises:
            `InputError`: If there are not as many prompts as rows of steps; what [`load`][PRMScorer.load] raises.
        """
        if len(prompts) != len(steps):
            got = f"{len(steps)} rows of steps for {len(prompts)} prompts"
            raise InputError("steps", got, "one row of steps per prompt", "Pass the steps of every completion.")
        if not self._is_loaded:
            self.load()
        rewards: list[list[float | None]] = []
        inputs: list[tuple[int, list[int], ScoringInput]] = []
        truncated = 0
        for row, (prompt, texts) in enumerate(zip(prompts, steps, strict=True)):
            kept, indices = texts_of(texts, self._cleaner)
            rewards.append(unread(len(texts), indices))
            if not kept:
                continue
            encoded = self._encode(prompt, kept)
            parts = self._parts(encoded)
            truncated += parts != [encoded]
            self._warn_of(encoded, parts)
            for index in indices:
                rewards[row][index] = 0.0  # until it is read
            inputs += [(row, indices, part) for part in parts if part.read]
        inputs.sort(key=lambda each: len(each[2].input_ids), reverse=True)  # rows of like length share a forward pass
        self.model.eval()
        for start in range(0, len(inputs), self.batch_size):
            batch = inputs[start : start + self.batch_size]
            for (row, indices, _), scores in zip(batch, self._scores([item for *_, item in batch]), strict=True):
                for index, score in zip(indices, scores, strict=True):
                    rewards[row][index] = rewards[row][index] if score is None else score
        if log_metric is not None:
            log_metric(f"process_rewards/{self.__name__}/truncated_frac", truncated / max(len(prompts), 1))
        return rewards

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        """Write a row in the model's format; the steps are clean and not empty."""
        before_steps, before_marker, between = self.layout
        if self.number_steps:
            numbered = enumerate(steps, start=1)
            steps = [each if re.match(r"Step \d+:", each) else f"Step {k}: {each.lstrip()}" for k, each in numbered]
        answer = between.join(f"{step}{before_marker}{STEP}{self.marker}" for step in steps)
        if self.is_chat:
            text = self._chat(prompt, answer)
        else:
            text = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}{before_steps}{answer}"
        return encode_marked(self.tokenizer, text, len(steps), not self.is_chat, self.marker_id)

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(K,)` from the logits `(K, classes or vocabulary)` at a row's positions, in float32."""
        if self.outputs is None:
            return logits[:, self.candidates].softmax(dim=-1)[:, 0]
        return logits.softmax(dim=-1)[:, 1] if self.outputs == 2 else logits[:, 0].sigmoid()

    def _chat(self, prompt: Any, answer: str) -> str:
        """A chat of the marked prompt and the assistant's answer."""
        marked = self._messages(prompt)
        first = next((i for i, message in enumerate(marked) if message["role"] != "system"), 0)
        marked[first]["content"] = PROMPT_START + marked[first]["content"]
        marked[-1]["content"] += PROMPT_END
        return self._rendered([*marked, {"role": "assistant", "content": answer}])

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            remedy = "Use the tokenizer that the model was trained with, or set `tokenizer.chat_template`."
            raise InputError(f"tokenizer of '{self.__name__}'", "no chat template", "a chat template", remedy)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)

    def _text(self, prompt: Any) -> str:
        """The prompt as one clean text."""
        return self._cleaner.prompt((self._prompt_text or prompt_without_system)(prompt))

    def _messages(self, prompt: Any) -> list[dict[str, str]]:
        """The prompt as clean messages; a text, or what `prompt_text` makes, becomes the user's message."""
        if isinstance(prompt, str) or self._prompt_text is not None:
            return [{"role": "user", "content": self._text(prompt).strip()}]
        return [
            {"role": message["role"], "content": self._cleaner.prompt(content_text(message.get("content"))).strip()}
            for message in prompt
        ]

    def _parts(self, encoded: ScoringInput) -> list[ScoringInput]:
        """What is read of a row."""
        return encoded.parts(self.max_length)

    def _warn_of(self, encoded: ScoringInput, parts: Sequence[ScoringInput]) -> None:
        limit = f"'{self.__name__}' reads at most {self.max_length} tokens"
        if any(part.cut != encoded.cut for part in parts):
            self._warn("prompt", f"{limit}; prompts of longer rows are truncated from the left.")
        if sum(len(part.read) for part in parts) < len(encoded.read):
            tokens = len(encoded.input_ids) - (encoded.cut[1] - encoded.cut[0])
            self._warn("steps", f"{limit}; what does not fit gets 0 (first such row: {tokens} without its prompt).")
        if None in encoded.positions:
            reason = "a marker merged with its surroundings, or the chat template left a part of the answer out"
            self._warn("format", f"'{self.__name__}': {reason}; such steps get 0.")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{message} Shown once.", UserWarning, stacklevel=4)

    def _scores(self, rows: Sequence[ScoringInput]) -> list[list[float | None]]:
        """Scores of one batch, `K_i` per row."""
        scores: list[list[float | None]] = []
        for row, logits in zip(rows, self._logits(rows, [row.read for row in rows], self.model), strict=True):
            values = iter(self._read(logits.float()).tolist())
            scores.append([None if position is None else next(values) for position in row.positions])
        return scores

    @torch.no_grad()
    def _logits(self, rows: Sequence[ScoringInput], wanted: Sequence[Sequence[int]], model: Any) -> list[torch.Tensor]:
        """One forward pass: for each row the logits at the wanted positions, `(positions, classes or vocabulary)`."""
        tokens, device = [torch.tensor(row.input_ids) for row in rows], model.device
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)  # (B, S)
        attention_mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        column = {position: position for position in range(input_ids.size(1))}
        options: dict[str, Any] = {}
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # behind adapters
        parameters = inspect.signature(inner.forward).parameters
        if "use_cache" in parameters:
            options["use_cache"] = False
        if "logits_to_keep" in parameters:  # a vocabulary of logits at every token is what runs out of memory
            kept = sorted({position for positions in wanted for position in positions})
            column = {position: i for i, position in enumerate(kept)}
            options["logits_to_keep"] = torch.tensor(kept, dtype=torch.long, device=device)
        output = model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **options)
        logits = output.logits if hasattr(output, "logits") else output[0]
        return [logits[i, [column[position] for position in row]] for i, row in enumerate(wanted)]


class MathShepherdScorer(PRMScorer):
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
        batch_size, max_length, prompt_text, lazy, dtype, device, quantization_config, trust_remote_code: As in
            [`TokenClassificationScorer`].

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: Marker or candidate that is not one token, a vocabulary that does not hold them, a model that
            does not load.

    Source: arXiv 2312.08935, and the code on its model card.
    """

    settings: ClassVar = {"marker": "ки", "good": "+", "bad": "-", "number_steps": True}
    layout = (" ", " ", "\n")


class VersaScorer(PRMScorer):
    r"""VersaPRM and Llama-PRM800K: Llama 3 that predicts `+` or `-` at ` \n\n\n\n`; steps are not numbered.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`UW-Madison-Lee-Lab/VersaPRM`) or model.
        tokenizer, marker, good, bad, number_steps, name, batch_size, max_length, prompt_text, lazy, dtype, device,
            quantization_config, trust_remote_code: As in [`MathShepherdScorer`]; other defaults.

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    settings: ClassVar = {"marker": " \n\n\n\n", "good": "+", "bad": "-", "number_steps": False}
    layout = (" \n\n", "", "")

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        return super()._encode(prompt, [step.strip() for step in steps])


class MathPSAScorer(VersaScorer):
    r"""OpenR's Math-PSA: Qwen2.5-Math-7B-Instruct that predicts ` +` or ` -` at ` \n\n\n\n\n` behind numbered steps.

    The published checkpoint is an adapter, which loads on the base that it names; name the base's tokenizer too.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model; an adapter's too.
        tokenizer, marker, good, bad, number_steps, name, batch_size, max_length, prompt_text, lazy, dtype, device,
            quantization_config, trust_remote_code: As in [`MathShepherdScorer`]; other defaults.

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    settings: ClassVar = {"marker": " \n\n\n\n\n", "good": " +", "bad": " -", "number_steps": True}
    layout = (" ", "", " ")


class ChatTurnScorer(PRMScorer):
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
        batch_size, max_length, prompt_text, lazy, dtype, device, quantization_config, trust_remote_code: As in
            [`TokenClassificationScorer`].

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: Answers that are not one token, a vocabulary that does not hold them, a tokenizer without chat
            template, a model that does not load.

    Source: RLHFlow's process reward models (arXiv 2405.07863 and their evaluation code).
    """

    settings: ClassVar = {"good": "+", "bad": "-"}

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        question = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}"
        turns: list[dict[str, str]] = []
        for k, step in enumerate(steps):
            turns.append({"role": "user", "content": step if k else f"{question} {step}"})
            turns.append({"role": "assistant", "content": f"{STEP}{self.good}"})
        return encode_marked(self.tokenizer, self._rendered(turns), len(steps), False, self.candidates[0], shift=-1)


class QwenMathScorer(PRMScorer):
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
        batch_size, max_length, prompt_text, lazy, dtype, device, quantization_config, trust_remote_code: As in
            [`TokenClassificationScorer`]. Messages keep their roles, the system's too, unless `prompt_text` is given.

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: A marker that is not one token, a tokenizer without chat template, a head that has not two
            classes, a model that does not load.

    Source: arXiv 2501.07301, and the code on its model card.
    """

    outputs = 2
    settings: ClassVar = {"marker": "<extra_0>", "auto_class": "AutoModelForTokenClassification"}
    is_chat = True


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
        lazy (`bool`, *optional*, defaults to `False`): Whether to load a model that is named at the first call. What
            only loading shows is raised then.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; by default the checkpoint's.
        device (`torch.device` or `str`, *optional*): By default this process's GPU, else the CPU.
        quantization_config (*optional*): For `from_pretrained`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.
        prompt_text (`Callable`, *optional*): Turns a prompt into text. By default the contents of all messages but the
            system's, separated by an empty line.

    Attributes:
        is_causal (`bool`, *optional*): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires: `True` of a decoder, `False` of an encoder, `None` before it is known.

    Raises:
        `InputError`: A model that does not load, lacks its head, or whose head has not two classes.
    """

    is_causal = None  # a decoder or an encoder: known once it is loaded
    auto_class = "AutoModelForTokenClassification"
    outputs = 2
    settings: ClassVar = {"step_separator": None}  # until the model says

    def _load(self, model: Any) -> Any:
        loaded = super()._load(model)
        if self.step_separator is None:
            self.step_separator = getattr(loaded.config, "step_separator", TRL_SEPARATOR)
        self.is_causal = is_causal(loaded)
        return loaded

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        return encode_piecewise(self.tokenizer, self._text(prompt), steps, self.step_separator)


class SkyworkScorer(PRMScorer):
    r"""Skywork-o1-Open-PRM: Qwen2 with a value head, read at the step token behind every step.

    The model was trained on lines: each line of a step is followed by the step token, as in the published code, and
    the step's score is the one at its last line.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B`) or a model with
            one output per token. Loads without code from the Hub.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        step_token (`str`, *optional*, defaults to a line break): One token of the vocabulary.
        name (`str`, *optional*, defaults to `"skywork_prm"`): Name in logs and metrics.
        batch_size, max_length, prompt_text, lazy, dtype, device, quantization_config, trust_remote_code: As in
            [`TokenClassificationScorer`].

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: A step token that is not one token, a checkpoint without its head, a head of other outputs.
    """

    auto_class = "Qwen2ForPrmModel"
    outputs = 1
    settings: ClassVar = {"step_token": "\n"}
    step_token: str

    def _load(self, model: Any) -> Any:
        self._token("step_token", self.step_token)
        return super()._load(model)

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        lines = [step.split(self.step_token) for step in steps]
        every_line = [line for each in lines for line in each]
        row = encode_piecewise(self.tokenizer, self._text(prompt) + "\n", every_line, self.step_token)
        last = [sum(map(len, lines[: k + 1])) - 1 for k in range(len(lines))]
        return ScoringInput(row.input_ids, [row.positions[line] for line in last], row.cut)


class Qwen2ForProcessRewardModel(Qwen2ForTokenClassification):
    """Qwen2 with a two-layer head of two classes per token; class 1 = the step is good.

    Args:
        config ([`~transformers.Qwen2Config`]): The decoder's.
    """

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        size = config.hidden_size
        self.score = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2))
        self.post_init()


class Qwen2ForPrmModel(Qwen2ForTokenClassification):
    """Qwen2 with a value head: one output per token, the logit of "the step is good".

    Args:
        config ([`~transformers.Qwen2Config`]): The decoder's.
    """

    _keys_to_ignore_on_load_unexpected = [r"lm_head"]  # noqa: RUF012  # declared so by transformers

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        del self.score
        self.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(config.hidden_size, 1)})
        self.post_init()

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs `(B, S, 1)` of hidden states `(B, S, hidden size)`."""
        return self.v_head["summary"](hidden)


# Architectures of published checkpoints, loaded without code from the Hub: their weights have the published names.
OWN_CLASSES: dict[str, type] = {each.__name__: each for each in (Qwen2ForProcessRewardModel, Qwen2ForPrmModel)}
