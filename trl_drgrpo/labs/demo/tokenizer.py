"""The demo's own tokenizer: one token per character, 35 tokens, Qwen-style chat template.

An existing one would not do: a vocabulary of thousands would make up most of a model this small, and multi-digit
tokens would hide the carries. It is a `Qwen2Tokenizer` with a small vocabulary and no merges, because `AutoTokenizer`
loads that class for every Qwen2 model, whatever the tokenizer files say. Deltas from Qwen: no default system message,
and characters outside the task have no token, so they vanish.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The task's own characters, then the letters of the three role names, `ok` and `boxed`. In a byte-level vocabulary a
# line break is written "Ċ" and a space "Ġ".
_CHARACTERS = "0123456789+=ĊĠ\\{}" + "abdeikmnorstuxy"


def build_tokenizer() -> "Qwen2Tokenizer":
    """
    Build the character-level tokenizer: 35 tokens and a chat template.

    A completion ends with `<|im_end|>`, which is the end-of-sequence token that stops generation. Padding is on the
    left, as generation in batches needs it.
    """
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD, IM_START, IM_END, *_CHARACTERS])},
        merges=[],
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        padding_side="left",
        model_max_length=256,
        chat_template=CHAT_TEMPLATE,
    )
