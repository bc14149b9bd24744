"""A model and a tokenizer small enough to build in milliseconds and real enough to prove something.

Byte-level BPE without merges (256 bytes and three special tokens) and a randomly initialized Qwen2 of 27 thousand
parameters: no download, every string tokenizes, and the model runs through the same code as a large one.
"""

from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

Model = TypeVar("Model", bound=PreTrainedModel)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 259 tokens with a Qwen-style chat template.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: `eos_token` is `<|im_end|>`, `pad_token` is `<|pad|>`; pads left.
    """
    # Sorted, because a set has another order in each process, and a seed would give other tokens.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    """A randomly initialized two-layer Qwen2 for `tokenizer`; the same seed gives the same weights.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): Decides the vocabulary and the special tokens.
        seed (`int`, *optional*, defaults to `0`): Seed of the weights; the global generator is left as it was.

    Returns:
        [`~transformers.Qwen2ForCausalLM`].
    """
    # A random model almost never emits one particular token, so a byte in nine ends a completion too: lengths vary.
    stop_ids = [tokenizer.eos_token_id, *range(len(tokenizer) // 9)]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # wide enough that sampling is not uniform and advantages move something
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop_ids,  # type: ignore[arg-type]
        pad_token_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    )
    # No devices: the weights are drawn on the CPU, so the state of a GPU's generator need not be kept.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def in_double_precision(model: Model) -> Model:
    """The model in float64 all the way: transformers computes RMS norms and rotary angles in float32 by itself.

    Without this, two runs that differ in padding agree to 1e-7 at best, however exact everything else is.

    Args:
        model ([`~transformers.PreTrainedModel`]): Qwen2, Qwen3, Llama or a model without such norms. Changed in place.

    Returns:
        The same model.
    """
    model.double()
    child: Any  # a module of transformers, with attributes that torch does not know
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # By name: their classes are of three families, and only the name of their modules is the same.
            if type(child).__name__ in ("Qwen2RMSNorm", "Qwen3RMSNorm", "LlamaRMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
            elif name == "rotary_emb":
                setattr(parent, name, _RotaryInDouble(child))
    return model


class _RotaryInDouble(torch.nn.Module):
    """Rotary angles in float64, from the frequencies of transformers' own module."""

    def __init__(self, rotary: Qwen2RotaryEmbedding):
        super().__init__()
        self.frequencies = rotary.inv_freq.double()
        self.scaling = rotary.attention_scaling

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.unsqueeze(-1).double() * self.frequencies.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling
