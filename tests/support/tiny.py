"""The tiny model and its tokenizer: where tests import them from, wherever the package keeps them."""

from trl_drgrpo.check.tiny import CHAT_TEMPLATE, in_double_precision, tiny_model, tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "in_double_precision", "save_tiny", "tiny_model", "tiny_tokenizer"]


def save_tiny(folder, tokenizer, model=None):
    """Writes a model, the tiny one by default, and its tokenizer where `from_pretrained` finds both; the path."""
    (model or tiny_model(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
