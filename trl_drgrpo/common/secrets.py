"""Tokens and keys stay out of what a run leaves behind.

transformers pickles the training arguments beside the weights (`training_args.bin`, which `push_to_hub` uploads), and
`hub_token` is one of them. So while a model is being saved, `DrGRPOConfig` pickles without its secrets
(`without_secrets`); everywhere else, for example on the way to another process, it pickles as it is.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_saving: ContextVar[bool] = ContextVar("trl_drgrpo_saving", default=False)

# Not every name that ends in "token" is one of these: `eos_token` is a word.
_NAMES = ("token", "api_key", "apikey", "password", "secret", "authorization", "access_key")
_SUFFIXES = ("hub_token", "auth_token", "hf_token", "access_token", "api_token", "_api_key", "_password", "_secret")
_SUFFIXES += ("_access_key", "_secret_key", "_private_key")
_ENVIRONMENT = (*_SUFFIXES, "_token", "_key")  # nobody keeps a word of a template in an environment variable
_SHORTEST = 8  # characters: a shorter value would blot out words that only look like it


def is_secret(name: str) -> bool:
    """
    Whether a field, key or environment variable of this name holds a secret; in any case, with `_` or `-`.

    Example:

    ```python
    >>> [is_secret(name) for name in ("hub_token", "HF_TOKEN", "api-key", "eos_token", "max_tokens")]
    [True, True, True, False, False]

    ```
    """
    name = name.lower().replace("-", "_")
    return name in _NAMES or name.endswith(_SUFFIXES)


def scrubbed(values: Any) -> Any:
    """A copy of nested mappings, lists and tuples with `None` for every text under the name of a secret. Anything else
    stays the same object."""
    if isinstance(values, Mapping):
        hidden = {name for name, value in values.items() if isinstance(value, str) and is_secret(str(name))}
        return {name: None if name in hidden else scrubbed(value) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(scrubbed, values))
    return values


def redacted(content: Any, values: Mapping[str, Any]) -> Any:
    """A text, or nested texts, with `<secret>` for every known secret: those among `values` (nested fields of a
    configuration), and those in environment variables."""
    known = {value for name, value in os.environ.items() if name.lower().endswith(_ENVIRONMENT)}
    known = {*(value for value in known if len(value) >= _SHORTEST), *_texts(values), *_texts(os.environ)}
    return _replaced(content, sorted(known, key=len, reverse=True))


def _replaced(content: Any, secrets: list[str]) -> Any:
    if isinstance(content, Mapping):
        return {_replaced(name, secrets): _replaced(value, secrets) for name, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_replaced(each, secrets) for each in content)
    if isinstance(content, str):
        for secret in secrets:
            content = content.replace(secret, "<secret>")
    return content


@contextmanager
def without_secrets() -> Iterator[None]:
    """Inside the block a pickled `DrGRPOConfig` holds no secrets."""
    token = _saving.set(True)
    try:
        yield
    finally:
        _saving.reset(token)


def is_saving() -> bool:
    """Whether a model is being saved, see `without_secrets`."""
    return _saving.get()


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            if isinstance(value, str) and is_secret(str(name)) and len(value) >= _SHORTEST:
                yield value
            else:
                yield from _texts(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _texts(value)
