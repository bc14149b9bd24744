"""Architectures of published process reward models, loaded without code from the Hub.

transformers does not have them. Their weights have the published names.
"""

import torch
from transformers import Qwen2Config, Qwen2ForTokenClassification


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


# By the name that a checkpoint's configuration states.
OWN_CLASSES: dict[str, type] = {
    "Qwen2ForProcessRewardModel": Qwen2ForProcessRewardModel,
    "Qwen2ForPrmModel": Qwen2ForPrmModel,
}
