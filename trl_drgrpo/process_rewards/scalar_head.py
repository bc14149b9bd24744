r"""Process reward models with one output per token: Skywork-o1-Open-PRM and ReasonFlux-PRM-1.5B.

| format | input | read |
|---|---|---|
| Skywork-o1-Open-PRM | `problem\n`, then each line of the answer and the step token `\n` | at a step's last `\n` |
| ReasonFlux-PRM-1.5B (arXiv 2506.18896) | problem and answer | at a step's last token |

The score is the output's sigmoid. Source: the code that the two model cards point to. ReasonFlux-PRM-1.5B is published
as the score of a whole text, read at its last token. Its score of a step is that of the text up to there, from one
forward pass: the last step's is the published number. No weights of either were run here.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import hub_errors
from trl_drgrpo.process_rewards.encoding import ScoringInput, encode_boundaries, encode_piecewise
from trl_drgrpo.process_rewards.marker import MarkerScorer, required_token
from trl_drgrpo.process_rewards.texts import PROMPT_END, PROMPT_START, STEP

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
