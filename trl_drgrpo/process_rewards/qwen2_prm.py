"""The architecture of Qwen2.5-Math-PRM (arXiv 2501.07301), so that its checkpoints load without code from the Hub.

A Qwen2 decoder and, on every token, a head of two classes: linear, ReLU, linear. The names of the weights are those of
the published checkpoints (`model.*`, `score.0.*`, `score.2.*`). Delta from the published code: no cache and no loss.
"""

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """Qwen2 with a two-layer head of two classes per token; class 1 = the step is good.

    Args:
        config ([`~transformers.Qwen2Config`]): The decoder's.
    """

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        self.num_labels = 2
        self.model = Qwen2Model(config)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(config.hidden_size, config.hidden_size),
            torch.nn.ReLU(),
            torch.nn.Linear(config.hidden_size, self.num_labels),
        )
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids (`torch.Tensor` of shape `(B, S)`): The tokens.
            attention_mask (`torch.Tensor` of shape `(B, S)`, *optional*): 1 on tokens, 0 on padding.

        Returns:
            [`~transformers.modeling_outputs.TokenClassifierOutput`] with `logits` of shape `(B, S, 2)`.
        """
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
        return TokenClassifierOutput(logits=self.score(hidden.last_hidden_state))  # type: ignore[arg-type]
