"""The scorer that all formats of process reward models share: it writes rows, runs the model and reads its outputs.

Places are known by construction, not found by searching the input for the marker; a policy that writes the marker
itself gains nothing. All steps of a completion that fits are scored in one forward pass. A score depends on its own
row only and, where the scorer is causal, on nothing behind its step; rows that are too long are read in parts so that
this holds for them, too (`implicit.py` reads the whole answer or nothing). Rows are sorted by length, padded on the
right and masked, so neither the batch a row lands in nor its padding changes it beyond rounding.

torch is imported when a model is loaded: help and checks of recipes read the table of formats without it.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trl_drgrpo.common.errors import InputError, did_you_mean
from trl_drgrpo.common.ranges import refuse_outside, whole
from trl_drgrpo.process_rewards.loading import Model, Tokenizer, is_causal, load_model, load_tokenizer, longest_input
from trl_drgrpo.process_rewards.prm_inputs import (
    PROMPT_END,
    PROMPT_START,
    STEP,
    Cleaner,
    Prompt,
    ScoringInput,
    encode_marked,
    prompt_without_system,
    single_token_id,
    texts_of,
    unread,
)
from trl_drgrpo.rewards.texts import content_text

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from trl_drgrpo.process_rewards.step_scorer import LogMetric, RaggedRewards

_HEADS = {  # by its outputs: what is expected, and what to do
    1: ("a head of 1 output per token", "Load a process reward model of this format."),
    2: (
        "a head of 2 classes per token",
        "Load a process reward model (class 1 = good), or train one with `trl-drgrpo train-prm`.",
    ),
}
_LOADING = {"dtype": None, "device": None, "quantization_config": None, "trust_remote_code": False}


class PRMScorer:
    """A process reward model as a step reward function: the base class of all formats.

    A format is a subclass with its constants. Where `layout` does not say how a row is written, it overrides
    `_encode`. `register_prm_format` gives it a name.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of that model; required if it is loaded already.
        name (`str`, *optional*): Name in logs and metrics; by default that of the format.
        batch_size (`int`, *optional*, defaults to `8`): Rows per forward pass.
        max_length (`int`, *optional*): Longest input in tokens. Defaults to what model and tokenizer state.
        prompt_text (`Callable`, *optional*): Turns a prompt into text. By default the contents of all messages but the
            system's, separated by an empty line.
        lazy (`bool`, *optional*, defaults to `False`): Whether to load a model that is named at the first call. What
            only loading shows is raised then.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; by default the checkpoint's.
        device (`torch.device` or `str`, *optional*): By default this process's GPU, else the CPU.
        quantization_config (*optional*): For `from_pretrained`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.
        **options: The format's own, see `settings`.

    Attributes:
        is_causal (`bool`, *optional*): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires; `None`: not known. Registered with the format.

    Raises:
        `InputError`: An unknown setting; a model that does not load; a tokenizer or head of another format.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores
    is_causal: bool | None = None  # set, with `format_name`, by `register_prm_format`
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
        model: Model,
        tokenizer: "Tokenizer | None" = None,
        *,
        name: str | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        prompt_text: Callable[[Prompt], str] | None = None,
        lazy: bool = False,
        **options: Any,
    ):
        refuse_outside("batch_size", batch_size, whole(1, remedy="Set the rows per forward pass."))
        self.check_options(options)
        # What loads a model is taken out, so the rest of the options are the format's own.
        self._loading = {key: options.pop(key, default) for key, default in _LOADING.items()}
        vars(self).update({**self.settings, **options})
        scorer_class = type(self)
        # Of the class itself: a subclass that is not registered must not go by its parent's name.
        self.__name__ = name or vars(scorer_class).get("format_name", scorer_class.__name__)
        self.model: Any = model  # a name, or two, before they are loaded
        self.tokenizer: Any = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length or 0
        self._prompt_text = prompt_text
        self._warned: set[str] = set()
        self._is_loaded = False
        if not lazy:
            self.load()
        # A recipe may want a baseline before anything is loaded, so the configuration has to tell.
        elif self.is_causal is None and self.auto_class == "AutoModelForTokenClassification":
            self.is_causal = is_causal(model)

    def load(self) -> None:
        """Load model and tokenizer, and check both against the format."""
        self.tokenizer = load_tokenizer(self.model, self.tokenizer, self._loading["trust_remote_code"])
        if self.marker is not None:
            self.marker_id = self._token("marker", self.marker)
        self.model = self._load(self.model).eval()
        self.candidates: list[int] = []
        if self.good is not None:
            self.candidates = self._candidates(good=self.good, bad=self.bad)
        self.max_length = self.max_length or longest_input(self.model, self.tokenizer)
        self._cleaner = Cleaner(self.tokenizer.all_special_tokens, self.marker)
        # A row of two steps, written and read once, shows a tokenizer or a head of another format.
        prompt_text = self._prompt_text
        self._prompt_text = None  # it may expect messages, and the row of the check has a text
        self._check_format(self._encode("1+1+1=?", ["1+1=2", "2+1=3"]))
        self._prompt_text = prompt_text
        self._is_loaded = True

    @classmethod
    def check_options(cls, options: Collection[str]) -> None:
        """Refuse an option that a recipe cannot give to this format."""
        allowed = (*cls.settings, "name", "tokenizer", "batch_size", "max_length", *_LOADING)
        for option in options:
            if option not in allowed:
                remedy = did_you_mean(option, allowed, "Remove it.")
                raise InputError(option, "an unknown option", f"one of {', '.join(allowed)}", remedy)

    def _load(self, model: Model) -> "PreTrainedModel":
        from trl_drgrpo.process_rewards.prm_architectures import OWN_CLASSES

        return load_model(model, self.auto_class, OWN_CLASSES, **self._loading)

    @property
    def source(self) -> str:
        """Path or Hub id of the model, with the revision that was loaded from the Hub."""
        if not self._is_loaded:
            return self.model
        config = self.model.config
        revision = getattr(config, "_commit_hash", None)
        if not revision:
            return config._name_or_path
        return f"{config._name_or_path} at revision {revision}"

    def _token(self, field: str, text: str) -> int:
        """Return the id of a text that must be one token of the vocabulary. Refuses any other text."""
        token_id = single_token_id(self.tokenizer, text)
        if token_id is None:
            got = f"{text!r}, which is not one token of the tokenizer"
            remedy = "Load the tokenizer of a process reward model of this format; the policy's has no such marker."
            raise InputError(f"{field} of '{self.__name__}'", got, "one token of the vocabulary", remedy)
        return token_id

    def _candidates(self, **tokens: str | int | None) -> list[int]:
        """Return the ids of the two candidate tokens, checked against the model's vocabulary."""
        ids = []
        for field, token in tokens.items():
            if not isinstance(token, int):
                token = self._token(field, str(token))
            ids.append(token)
        vocabulary = self.model.config.get_text_config().vocab_size
        got = ""
        if self.model.get_output_embeddings() is None:
            got = "a model without a language modeling head"
        elif max(ids) >= vocabulary:
            got = f"{vocabulary} outputs per token"
        if got:
            remedy = "Load it as a causal language model: this format reads the logits of two tokens."
            raise InputError(f"model of '{self.__name__}'", got, f"an output for the tokens {ids}", remedy)
        return ids

    def _check_format(self, row: ScoringInput) -> None:
        """Refuse a tokenizer that loses a place where a step is read, and a head with another number of outputs."""
        # A marker that merged with its neighbors has no position.
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
        log_metric: "LogMetric | None" = None,
        **kwargs: Any,
    ) -> "RaggedRewards":
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
        rewards = []
        # Each part of a row, with the rewards that it fills in, and their places among them.
        inputs = []
        truncated = 0
        for prompt, texts in zip(prompts, steps, strict=True):
            clean_texts, indices = texts_of(texts, self._cleaner)
            row_rewards = unread(len(texts), indices)
            rewards.append(row_rewards)
            if not clean_texts:
                continue
            encoded = self._encode(prompt, clean_texts)
            parts = self._parts(encoded)
            truncated += parts != [encoded]
            self._warn_of(encoded, parts)
            for index in indices:
                row_rewards[index] = 0.0  # until it is read
            for part in parts:
                if part.read:
                    inputs.append((part, row_rewards, indices))
        # Rows of like length share a forward pass; the longest come first, so that too little memory shows at once.
        inputs.sort(key=lambda item: len(item[0].input_ids), reverse=True)
        self.model.eval()
        for start in range(0, len(inputs), self.batch_size):
            batch = inputs[start : start + self.batch_size]
            scores_per_row = self._scores([part for part, *_ in batch])
            for (_, row_rewards, indices), scores in zip(batch, scores_per_row, strict=True):
                for index, score in zip(indices, scores, strict=True):
                    if score is not None:  # `None`: another part of the row reads this step
                        row_rewards[index] = score
        if log_metric is not None:
            share = truncated / max(len(prompts), 1)
            log_metric(f"process_rewards/{self.__name__}/truncated_frac", share)
        return rewards

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        """Write a row in the model's format; the steps are clean and not empty."""
        before_steps, before_marker, between = self.layout
        written_steps = []
        for number, step in enumerate(steps, start=1):
            if self.number_steps and not re.match(r"Step \d+:", step):
                step = f"Step {number}: {step.lstrip()}"
            # The mark stands right before the marker, so a step is read at the marker's token.
            written_steps.append(f"{step}{before_marker}{STEP}{self.marker}")
        answer = between.join(written_steps)
        if self.is_chat:
            text = self._chat(prompt, answer)
        else:
            text = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}{before_steps}{answer}"
        return encode_marked(self.tokenizer, text, len(steps), not self.is_chat, self.marker_id)

    def _read(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return scores `(K,)` from the logits `(K, classes or vocabulary)` at a row's positions, in float32."""
        # Of a vocabulary, the share of the good candidate between the two.
        if self.outputs is None:
            return logits[:, self.candidates].softmax(dim=-1)[:, 0]
        # Of two classes, the second; a single output is the logit of it.
        if self.outputs == 2:
            return logits.softmax(dim=-1)[:, 1]
        return logits[:, 0].sigmoid()

    def _chat(self, prompt: Prompt, answer: str) -> str:
        """Return a chat of the marked prompt and the assistant's answer."""
        messages = self._messages(prompt)
        # A system prompt is no part of what may be cut: the model was trained behind it.
        first = next((message for message in messages if message["role"] != "system"), messages[0])
        first["content"] = PROMPT_START + first["content"]
        messages[-1]["content"] += PROMPT_END
        messages.append({"role": "assistant", "content": answer})
        return self._rendered(messages)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            remedy = "Use the tokenizer that the model was trained with, or set `tokenizer.chat_template`."
            raise InputError(f"tokenizer of '{self.__name__}'", "no chat template", "a chat template", remedy)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)

    def _text(self, prompt: Prompt) -> str:
        """Return the prompt as one clean text."""
        to_text = self._prompt_text or prompt_without_system
        return self._cleaner.prompt(to_text(prompt))

    def _messages(self, prompt: Prompt) -> list[dict[str, str]]:
        """Return the prompt as clean messages; a text, or the text by `prompt_text`, becomes the user's message."""
        if isinstance(prompt, str) or self._prompt_text is not None:
            return [{"role": "user", "content": self._text(prompt).strip()}]
        messages = []
        for message in prompt:
            content = self._cleaner.prompt(content_text(message.get("content")))
            messages.append({"role": message["role"], "content": content.strip()})
        return messages

    def _parts(self, encoded: ScoringInput) -> list[ScoringInput]:
        """Return the parts of a row that are read, one forward pass each."""
        return encoded.parts(self.max_length)

    def _warn_of(self, encoded: ScoringInput, parts: Sequence[ScoringInput]) -> None:
        limit = f"'{self.__name__}' reads at most {self.max_length} tokens"
        if any(part.cut != encoded.cut for part in parts):
            self._warn("prompt", f"{limit}; prompts of longer rows are truncated from the left.")
        # Each step that is read is read in one part.
        if sum(len(part.read) for part in parts) < len(encoded.read):
            start, end = encoded.cut
            tokens = len(encoded.input_ids) - (end - start)
            self._warn("steps", f"{limit}; what does not fit gets 0 (first such row: {tokens} without its prompt).")
        if None in encoded.positions:
            reason = "a marker merged with its surroundings, or the chat template left a part of the answer out"
            self._warn("format", f"'{self.__name__}': {reason}; such steps get 0.")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            # The fourth frame, counting this one, is that of the caller of the scorer.
            warnings.warn(f"{message} Shown once.", UserWarning, stacklevel=4)

    def _scores(self, rows: Sequence[ScoringInput]) -> "RaggedRewards":
        """Return the scores of one batch, `K_i` per row."""
        logits_per_row = self._logits(rows, [row.read for row in rows], self.model)
        scores = []
        for row, logits in zip(rows, logits_per_row, strict=True):
            values = self._read(logits.float()).tolist()  # of the positions that are not `None`
            score_at: dict[int | None, float] = dict(zip(row.read, values, strict=True))
            scores.append([score_at.get(position) for position in row.positions])
        return scores

    def _logits(
        self,
        rows: Sequence[ScoringInput],
        positions_per_row: Sequence[Sequence[int]],
        model: "PreTrainedModel | PeftModel",
    ) -> "list[torch.Tensor]":
        """Run the model once. Return the logits at each row's positions, `(positions, classes or vocabulary)`."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        device = model.device
        tokens = [torch.tensor(row.input_ids) for row in rows]
        masks = list(map(torch.ones_like, tokens))
        # Padded on the host, so that two tensors travel and not two for each row.
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0)
        attention_mask = pad_sequence(masks, batch_first=True)
        options: dict[str, Any] = {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}
        base = getattr(model, "get_base_model", lambda: model)()  # behind adapters, whose forward takes anything
        parameters = inspect.signature(base.forward).parameters
        if "use_cache" in parameters:
            options["use_cache"] = False
        computed: Sequence[int] = range(max(map(len, tokens)))
        # Logits of a whole vocabulary at every token run out of memory, so only those that are read are computed.
        if "logits_to_keep" in parameters:
            computed = sorted(set().union(*positions_per_row))
            options["logits_to_keep"] = torch.tensor(computed, dtype=torch.long, device=device)
        with torch.no_grad():
            output = model(**options)
        # A class from the Hub may return a tuple.
        logits = output.logits if hasattr(output, "logits") else output[0]
        column_of = {position: column for column, position in enumerate(computed)}
        logits_per_row = []
        for row_logits, positions in zip(logits, positions_per_row, strict=True):
            columns = [column_of[position] for position in positions]
            logits_per_row.append(row_logits[columns])
        return logits_per_row
