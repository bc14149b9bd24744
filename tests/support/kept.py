"""What a process that trains many times need not do each time."""

import functools
import gc
import importlib.metadata


def imports_are_not_collected():
    """Every run of transformers' trainer collects garbage twice: 0.15 s each over what is imported for good."""
    gc.collect()
    gc.freeze()


def metadata_is_read_once():
    """Each step of accelerate and each model card asks for versions of packages, which Python reads anew each time."""
    found = importlib.metadata.Distribution
    found.from_name = functools.cache(found.from_name)
    found.metadata = property(functools.cache(found.metadata.fget))
