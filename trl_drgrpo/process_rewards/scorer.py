"""Common steps of all process reward model (PRM) scorers: clean, encode, fit, batch, run, read off.

A score depends on its own row only, and, where the scorer is causal, on nothing behind its step, for rows that fit:
how much of the prompt a longer one keeps depends on all of its steps. Rows are sorted by length, padded on the right
and masked, so neither the batch a row lands in nor its padding changes it beyond rounding. Too long rows lose tokens
from the left of the prompt, never of the steps; where the steps alone do not fit, all of them get 0. Both are said
once. A subclass decides how a row is written (`_encode`) and which number is read off the logits (`_read`).
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.process_rewards.encoding import ScoringInput
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, message_text, prompt_text, texts_of

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
