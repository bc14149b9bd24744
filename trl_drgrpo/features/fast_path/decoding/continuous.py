"""Continuous batching of transformers: a prompt's completions fork from one prefill.

TRL hands over the prompt of each completion by itself. Here equal prompts that follow each other become one request
with `num_return_sequences`: transformers prefills all but its last token once, and each fork draws from
there by itself.
"""

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from trl_drgrpo.upstream.swapping import swapped

ON_A_CPU = (
    "transformers_continuous_batching_config: got no num_blocks on a CPU; expected the size of the cache. "
    "transformers would fill half of the machine's memory with it before the first token. Set "
    "num_blocks=512, page_size=32 (block_size below transformers 5.18) and max_batch_tokens=512 (16,384 tokens in the "
    "cache), or "
    "use_transformers_continuous_batching=False, which is faster on a CPU."
)


def takes_the_machine(device: str, config: Any) -> bool:
    """Whether transformers would size its cache by the memory of the whole machine, and not of a GPU."""
    return device == "cpu" and config.num_blocks is None


def returns_forks(model: Any) -> bool:
    """Whether `generate_batch` returns the completions of forks: transformers 5.17 drops all but the first."""
    try:
        return "__child#" in inspect.getsource(type(model).generate_batch)
    except (OSError, TypeError):
        return False


@contextmanager
def forked_prefill(model: Any) -> Iterator[None]:
    """Inside the block, `model.generate_batch` prefills each prompt once, where transformers can. Results are in the
    order of the inputs."""
    if not returns_forks(model):
        yield
        return
    generate_batch = model.generate_batch

    def forking(inputs: list[list[int]], *args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        size = math.gcd(*(len(list(equal)) for _, equal in groupby(inputs)))
        asked = getattr(generation_config, "num_return_sequences", None) or 1
        if args or generation_config is None or asked > 1 or size < 2 or min(map(len, inputs)) < 2:
            return generate_batch(inputs, *args, generation_config=generation_config, **kwargs)
        forked = copy.deepcopy(generation_config)
        forked.num_return_sequences = size
        return generate_batch(inputs[::size], generation_config=forked, **kwargs)

    with swapped(model, generate_batch=forking):
        yield
