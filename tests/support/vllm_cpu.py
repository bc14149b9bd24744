"""vLLM's real engine on the CPU, for tests in an environment of its own (`make test-vllm`).

A third party's build. It differs from what a GPU runs in kernels and in NCCL, not in how adapters, weights, requests
and cached prefixes are handled.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

# Read when vLLM is imported. Threads that are bound to cores, or spin, stand still where others use the cores.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
CACHE = 2**26  # bytes
# Beside TRL's options: in float32, and without a compiler.
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CACHE}


def prepare():
    """Before TRL is imported: the engine takes the options above, and new weights."""
    os.environ.update(ENVIRONMENT)
    import torch
    import vllm
    from vllm.model_executor.layers import utils

    class PlainLLM(vllm.LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**ENGINE, **options})

    vllm.LLM = PlainLLM

    def plain_linear(layer, remove_weight):
        """This build packs weights when it loads them, and would go on with the packed ones."""
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear


def model_for_the_engine(tokenizer, seed=0):
    """The tiny model with heads that the engine's attention has kernels for."""
    import torch
    from tiny import tiny_model
    from transformers import Qwen2ForCausalLM

    config = tiny_model(tokenizer).config
    config.update({"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1})
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
_IMAGES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES |= {"image_size": 28, "patch_size": 14}
_WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
# By model type: what a small configuration needs besides. Qwen3.5's layers are computed in bfloat16 alone on a CPU.
MULTIMODAL = {
    "gemma3": {"text_config": {**_TEXT, **_WINDOW}, "vision_config": _IMAGES, "mm_tokens_per_image": 4},
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_IMAGES, "model_type": "pixtral", "head_dim": 32},
        "image_token_index": 5,
    },
}


def multimodal_for_the_engine(model_type, tokenizer):
    """A random model with a vision tower, and with heads that the engine's attention has kernels for."""
    from tiny import random_weights
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    fields = MULTIMODAL[model_type]
    text = {**fields["text_config"], "vocab_size": len(tokenizer)}
    config = CONFIG_MAPPING[model_type](**{**fields, "text_config": text})
    return random_weights(AutoModelForImageTextToText.from_config, config)


@contextmanager
def served(model, *options, **environment):
    """The address of a server of this model, which runs in the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", *options]
    command += ["--kv-cache-memory-bytes", str(CACHE), "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"]
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **environment})
    try:
        for _ in range(600):
            assert process.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
