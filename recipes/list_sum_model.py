"""Builds the model that the demo ships: `python recipes/list_sum_model.py [--output DIR] [--seed 0]`.

A Qwen2 model of about 145 thousand parameters is warm-started on the demonstrator's completions (supervised next-token
training, completion tokens only, training split only) and saved as safetensors with its tokenizer. It ends up as
fluent and as faulty as the demonstrator: correct on about 3 of 10 held-out problems when sampled.

One thread, fixed seed and fixed order make the weights reproducible on the same machine and library versions. Takes
several minutes on one core.
"""

import argparse
import logging
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils import logging as transformers_logging

from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.build import imitate, warm_start_batches
from trl_drgrpo.demo.task import build_tokenizer


def build(output: Path = MODEL_DIR, seed: int = 0, steps: int = 2500, batch_size: int = 64, lr: float = 3e-3) -> Path:
    """Build tokenizer and model, warm-start the model for `steps` batches, and save both; returns the folder."""
    torch.set_num_threads(1)  # the order of additions, and with it the weights, depends on the number of threads
    set_seed(seed)
    tokenizer = build_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    imitate(model, warm_start_batches(tokenizer, steps, batch_size, seed), steps, lr)
    model.config.provenance = f"recipes/list_sum_model.py, seed {seed}, {steps} steps of {batch_size} rows"
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner only
    tokenizer.save_pretrained(output)
    return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder to write (default: the package's own)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations (default: 0)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    logging.info("saved in %s", build(options.output, options.seed))
