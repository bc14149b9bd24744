"""Process reward models that classify tokens: the format of TRL's former PRM trainer, and of `trl-drgrpo train-prm`.

Input: `[bos] prompt step separator step separator ...`, tokenized piece by piece. The score of a step is the
probability of class 1 at its last token, which is the separator's last one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_drgrpo.process_rewards.encoding import ScoringInput, encode_piecewise
from trl_drgrpo.process_rewards.loading import load_model, load_tokenizer
from trl_drgrpo.process_rewards.scorer import PRMScorer, wrong_head

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
