"""Load a process reward model from a path or Hub id, and refuse what would score with random weights.

`AutoModelForTokenClassification` loads any checkpoint: where the head is missing, it is made up at random with nothing
but a log line, and the scores are noise. Here that is an error, as is a head with an incorrect number of classes.
"""

import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, ScoringInput, message_text, prompt_text, texts_of

# Architectures of published checkpoints that `qwen2_prm` has without code from the Hub.
OWN_CLASSES = frozenset({"Qwen2ForProcessRewardModel", "Qwen2ForPrmModel"})


def load_tokenizer(model: Any, tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """The tokenizer as given, or that of the model's path.

    Args:
        model (`str` or `PreTrainedModel`): Model given to the scorer.
        tokenizer (`str`, `PreTrainedTokenizerBase` or `None`): Tokenizer given to the scorer.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.

    Returns:
        `PreTrainedTokenizerBase`: A fast tokenizer.

    Raises:
        `InputError`: A loaded model without a tokenizer, a path without one, or a slow tokenizer.
    """
    if tokenizer is None:
        if not isinstance(model, (str, os.PathLike)):
            remedy = "Pass the tokenizer of the process reward model; it need not be the policy's."
            raise InputError("tokenizer", "none for a model that is already loaded", "its tokenizer", remedy)
        tokenizer = model
    if isinstance(tokenizer, (str, os.PathLike)):
        from transformers import AutoTokenizer

        with hub_errors("tokenizer", str(tokenizer), "a folder or the id of a tokenizer on the Hub"):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        remedy = "Load it with `AutoTokenizer` and the `tokenizers` library installed."
        raise InputError("tokenizer", type(tokenizer).__name__, "a fast tokenizer, which knows offsets", remedy)
    return tokenizer


def load_model(
    model: Any,
    auto_class: str,
    *,
    dtype: Any = None,
    device: Any = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """The model as given, moved where asked, or loaded from a path or Hub id.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model.
        auto_class (`str`): Name of the class that loads it: one of `OWN_CLASSES`, or of `transformers`. A checkpoint
            that names one of `OWN_CLASSES` as its architecture is loaded by that.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights. By default that of the checkpoint or model.
        device (`torch.device` or `str`, *optional*): By default a loaded model stays where it is; from a path, this
            process's GPU if there is one, else the CPU.
        quantization_config (*optional*): For `from_pretrained`; only with a path.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code of the repository may run.

    Returns:
        `PreTrainedModel`.

    Raises:
        `InputError`: Load failure, a checkpoint without the head, quantization of a loaded model.
    """
    if not isinstance(model, (str, os.PathLike)):
        if quantization_config is not None:
            remedy = "Quantize it when it is loaded, or pass its path instead."
            raise InputError("quantization_config", "a model that is already loaded", "a path or Hub id", remedy)
        options = {
            key: value for key, value in {"device": device, "dtype": _dtype(dtype)}.items() if value is not None
        }
        return model.to(**options) if options else model
    import transformers

    device = device or _default_device()
    options: dict[str, Any] = {
        "dtype": dtype or "auto",
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    if quantization_config is not None:
        options |= {"quantization_config": quantization_config, "device_map": {"": device}}
    with hub_errors("model", str(model), f"a folder or Hub id that {auto_class} loads"):
        with_head = auto_class != "AutoModelForCausalLM"
        if with_head and transformers.utils.find_adapter_config_file(str(model)) is not None:
            remedy = "Its base alone has a random head: merge the two first."
            raise InputError("model", f"{str(model)!r}, an adapter", "a whole checkpoint with its head", remedy)
        own = auto_class if auto_class in OWN_CLASSES else architecture(model)
        if own in OWN_CLASSES and not (trust_remote_code and auto_class not in OWN_CLASSES):
            loader: Any = getattr(importlib.import_module("trl_drgrpo.process_rewards.formats"), own)
            del options["trust_remote_code"]
        else:
            loader = getattr(transformers, auto_class)
        loaded, info = loader.from_pretrained(model, **options)
    if missing := sorted(info["missing_keys"]):
        got = f"{str(model)!r}, a checkpoint without {', '.join(missing[:3])}"
        remedy = "The head would be random: pass a trained process reward model (`trl-drgrpo train-prm` makes one)."
        raise InputError("model", got, f"a checkpoint that holds every weight of {type(loaded).__name__}", remedy)
    return loaded if quantization_config is not None else loaded.to(device)


def architecture(model: Any) -> str:
    """Name of the first architecture that the configuration of a path or Hub id states; empty if it states none."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(model)
    return (config.get("architectures") or [""])[0]


def _dtype(dtype: Any) -> torch.dtype | None:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _default_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


logger = logging.getLogger(__name__)

_NO_LIMIT = 10**9  # tokenizers without a limit say 1e30


class PRMScorer:
    """Base of the scorers: an instance is a step reward function.

    Args:
        model (`PreTrainedModel`): The process reward model. It is put into evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        name (`str`): Name in logs and metrics.
        marker (`str`, *optional*): The format's step marker, taken out of whatever the policy wrote.
        batch_size (`int`, *optional*, defaults to `8`): Rows per forward pass.
        max_length (`int`, *optional*): Longest input in tokens. Defaults to what model and tokenizer state.
        prompt_text (`Callable`, *optional*): Turns a prompt (text or messages) into the text that the model reads.
            By default text stays as it is; of messages, see the subclass.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores
    is_causal: bool | None = True  # a decoder, read at a step's own marker: no later text changes the score

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        marker: str | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        prompt_text: Callable[[Any], str] | None = None,
    ):
        if batch_size < 1:
            raise InputError("batch_size", str(batch_size), "at least 1", "Set the rows per forward pass.")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length or longest_input(model, tokenizer)
        self.__name__ = name
        self._prompt_text = prompt_text
        self._cleaner = Cleaner([*tokenizer.all_special_tokens, *END_TOKENS], marker)
        self._warned: set[str] = set()

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
                were too long: cut, or left unscorable.
            **kwargs: Other arguments of the trainer.

        Returns:
            `list[list[float | None]]`: For each row `K_i` scores, by default probabilities from 0 to 1 that the step
            is good. `None` for a step without text (special tokens and white space only). A row of which nothing can
            be scored, because it has no text or does not fit, gets 0 for each step: what was written is the reason.

        Raises:
            `InputError`: If there are not as many prompts as rows of steps.
        """
        if len(prompts) != len(steps):
            got = f"{len(steps)} rows of steps for {len(prompts)} prompts"
            raise InputError("steps", got, "one row of steps per prompt", "Pass the steps of every completion.")
        rewards: list[list[float | None]] = [[None] * len(row) for row in steps]
        inputs: list[tuple[int, list[int], ScoringInput]] = []
        truncated = 0
        for row, (prompt, texts) in enumerate(zip(prompts, steps, strict=True)):
            kept, indices = texts_of(texts, self._cleaner)
            if not kept:
                continue
            encoded = self._encode(prompt, kept)
            fitted = encoded.fit(self.max_length)
            truncated += fitted is not encoded
            if self._fits(encoded, fitted) and encoded.positions.count(None) < len(encoded.positions):
                inputs.append((row, indices, fitted))  # type: ignore[arg-type]
        for (row, indices, _), scores in zip(inputs, self._run([item for *_, item in inputs]), strict=True):
            for index, score in zip(indices, scores, strict=True):
                rewards[row][index] = score
        if log_metric is not None:
            log_metric(f"process_rewards/{self.__name__}/truncated_frac", truncated / max(len(prompts), 1))
        return [[0.0] * len(row) if all(score is None for score in row) else row for row in rewards]

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        """Write a row in the model's format; the steps are clean and not empty."""
        raise NotImplementedError

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores `(K,)` from the logits `(K, classes or vocabulary)` at a row's positions, in float32."""
        raise NotImplementedError

    def _text(self, prompt: Any) -> str:
        """The prompt as one clean text."""
        return self._cleaner.prompt((self._prompt_text or prompt_text)(prompt))

    def _messages(self, prompt: Any) -> list[dict[str, str]]:
        """The prompt as clean messages; a text, or what `prompt_text` makes, becomes the user's message."""
        if isinstance(prompt, str) or self._prompt_text is not None:
            return [{"role": "user", "content": self._text(prompt).strip()}]
        return [
            {"role": message["role"], "content": self._cleaner.prompt(message_text(message)).strip()}
            for message in prompt
        ]

    def _fits(self, encoded: ScoringInput, fitted: ScoringInput | None) -> bool:
        limit = f"'{self.__name__}' reads at most {self.max_length} tokens"
        if fitted is None:
            tokens = len(encoded.input_ids) - (encoded.cut[1] - encoded.cut[0])
            self._warn("steps", f"{limit}; rows whose steps alone are longer (the first: {tokens}) get 0.")
        elif fitted is not encoded:
            self._warn("prompt", f"{limit}; prompts of longer rows are truncated from the left (the steps are kept).")
        if None in encoded.positions:
            reason = "a marker merged with its surroundings, or the chat template left a part of the answer out"
            self._warn("format", f"'{self.__name__}': {reason}; such steps have no score, rows of them get 0.")
        return fitted is not None

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{message} Shown once.", UserWarning, stacklevel=4)

    @torch.no_grad()
    def _run(self, inputs: Sequence[ScoringInput]) -> list[list[float | None]]:
        """Scores in the order of the inputs; forward passes over rows of like length."""
        self.model.eval()
        scores: list[list[float | None]] = [[] for _ in inputs]
        by_length = sorted(range(len(inputs)), key=lambda i: len(inputs[i].input_ids), reverse=True)
        for start in range(0, len(by_length), self.batch_size):
            indices = by_length[start : start + self.batch_size]
            for i, row_scores in zip(indices, self._scores([inputs[i] for i in indices]), strict=True):
                scores[i] = row_scores
        return scores

    def _scores(self, rows: Sequence[ScoringInput]) -> list[list[float | None]]:
        """Scores of one batch, `K_i` per row."""
        wanted = [[position for position in row.positions if position is not None] for row in rows]
        scores: list[list[float | None]] = []
        for row, logits in zip(rows, self._logits(rows, wanted, self.model), strict=True):
            values = iter(self._read(logits.float()).tolist())
            scores.append([None if position is None else next(values) for position in row.positions])
        return scores

    def _logits(self, rows: Sequence[ScoringInput], wanted: Sequence[Sequence[int]], model: Any) -> list[torch.Tensor]:
        """One forward pass: for each row the logits at the wanted positions, `(positions, classes or vocabulary)`."""
        width = max(len(row.input_ids) for row in rows)
        device = model.device
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id or 0)  # (B, S)
        attention_mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
            attention_mask[i, : len(row.input_ids)] = 1
        column = {position: position for position in range(width)}
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

    def _sample_row(self) -> ScoringInput:
        """A short row for checks, past the user's `prompt_text`: it may expect messages."""
        theirs, self._prompt_text = self._prompt_text, None
        row = self._encode("1+1+1=?", ["1+1=2", "2+1=3"])
        self._prompt_text = theirs
        return row

    @torch.no_grad()
    def _check_outputs(self, due: int) -> None:
        """Run one short row and see that the head has as many outputs per token as the format reads."""
        row = self._sample_row()
        wanted = [position for position in row.positions if position is not None]
        outputs = self._logits([row], [wanted], self.model)[0].size(-1)
        if outputs != due:
            raise wrong_head(self.__name__, f"{outputs} outputs per token", due)


def wrong_head(name: str, got: str, due: int = 2) -> InputError:
    """The error for a head that has not two classes, or not the one output that is due."""
    if due == 1:
        remedy = "Load a process reward model of this format."
        return InputError(f"model of '{name}'", got, "a head of 1 output per token", remedy)
    remedy = "Load a process reward model (class 1 = good), or train one with `trl-drgrpo train-prm`."
    return InputError(f"model of '{name}'", got, "a head of 2 classes per token", remedy)


def longest_input(model: Any, tokenizer: Any) -> int:
    """Tokens that model and tokenizer say they can read."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    positions = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
    return int(min(positions, tokenizer.model_max_length, _NO_LIMIT))
