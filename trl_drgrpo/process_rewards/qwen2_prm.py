"""The architectures of Qwen2.5-Math-PRM (arXiv 2501.07301) and Skywork-o1-Open-PRM, to load without code from the Hub.

A Qwen2 decoder and, on every token, a head: two classes (linear, ReLU, linear), or one value (linear). The names of
the weights are those of the published checkpoints (`model.*`; `score.0.*`, `score.2.*`; `v_head.summary.*`). Delta
from the published code: no cache, no loss, no logits of the vocabulary.
"""

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


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
