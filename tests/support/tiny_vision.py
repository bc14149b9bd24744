"""A vision-language model and its processor, built in milliseconds and offline: Qwen2-VL's shape, random weights."""

from datasets import Dataset, Image
from PIL import Image as Picture
from tiny import random_weights, sizes, tiny_tokenizer
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = 56  # of a side: 4 x 4 patches, which are merged into 2 x 2 tokens


class ImagesOnly(Qwen2VLProcessor):
    """Without videos, whose processor needs torchvision."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012

    @classmethod
    def get_attributes(cls):
        return cls.attributes


def tiny_processor():
    """Qwen2-VL's, on a byte-level tokenizer."""
    tokenizer = tiny_tokenizer()
    special = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    edges = {"size": {"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2}}
    return ImagesOnly(Qwen2VLImageProcessorPil(**edges), tokenizer, chat_template=CHAT_TEMPLATE)


def tiny_vision_model(processor, seed=0):
    """A randomly initialized Qwen2-VL for `processor`; the same seed gives the same weights."""
    ids = processor.tokenizer.convert_tokens_to_ids
    text = sizes(
        processor.tokenizer,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return random_weights(Qwen2VLForConditionalGeneration, config, seed)


def pictures(rows):
    """Conversations about one image each, of one color."""
    colors = [(37 * i % 256, 91 * i % 256, 53 * i % 256) for i in range(rows)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"Color {i}?"}] for i in range(rows)],
            "image": [Picture.new("RGB", (PIXELS, PIXELS), color) for color in colors],
        }
    ).cast_column("image", Image())
