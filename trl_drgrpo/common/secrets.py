"""Tokens, keys and passwords stay out of what a run leaves behind.

Everything that records settings passes one of three functions: nested values `scrubbed`, a text that holds known
secrets `redacted`, a command line `redacted_command`. All of them take credentials out of URLs, and tokens out of
texts by their form, wherever they stand. Prompts stay as they are, as they are part of the task. A run does not need
its records to go on: what was taken out comes again from the recipe, flags or environment of the next start.

transformers pickles the training arguments beside the weights (`training_args.bin`, which `push_to_hub` uploads), and
`hub_token` is one of them. So while a model is being saved, `DrGRPOConfig` pickles without its secrets
(`without_secrets`); everywhere else, for example on the way to another process, it pickles as it is.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_saving: ContextVar[bool] = ContextVar("trl_drgrpo_saving", default=False)

# Not every name that ends in "token" is one of these: `eos_token` is a word.
_NAMES = ("token", "api_key", "apikey", "password", "passwd", "secret", "authorization", "access_key", "private_key")
_NAMES += ("secret_key", "account_key", "passphrase", "credential", "cookie", "auth", "bearer", "jwt")
_SUFFIXES = ("hub_token", "auth_token", "hf_token", "access_token", "api_token", "session_token", "security_token")
_SUFFIXES += ("sas_token", "refresh_token", "bearer_token", *(f"_{name}" for name in _NAMES if name != "token"))
_SUFFIXES += ("password", "passwd", "apikey")  # PGPASSWORD
# Nobody keeps a word of a template in an environment variable.
_ENVIRONMENT = (*_SUFFIXES, "_token", "_key")
# In characters: a shorter value would blot out words that only look like it.
_SHORTEST = 8
# Part of the task, and shown everywhere.
_PROMPTS = ("system_prompt", "prompt_template")
_HIDDEN = "<secret>"

# `scheme://user:password@host`: up to the last `@`, as passwords are not always quoted as they should be. The lengths
# have ends because a text without an `@` would be searched again from every word.
_USER = re.compile(
    r"(\b[a-z][a-z0-9+.-]{0,20}://)"
    r"(?:[^\s/?#@'\"<>]{1,500}@|[^\s/?#@:'\"<>]{0,200}:[^\s@'\"<>]{0,200}@)+",
    re.IGNORECASE,
)
# `user:password@host:port`, without a scheme.
_USER_OF_PORT = re.compile(r"(?<![\w.-])[\w.+-]{1,200}:[^\s@/'\"<>]{1,200}@(?=[\w.-]{1,200}:[0-9]{1,5}\b)")
_ADDRESSES = ("url", "host", "uri", "endpoint", "address", "proxy")
_PARAMETER = re.compile(r"([?&;#])([\w.~-]+)=([^\s&;#'\"<>]+)")
_SECRET_PARAMETER = re.compile(
    r"(?:^|[-_.])(?:token|key|sig|signature|auth|password|passwd|pwd|pass|jwt|secret|credentials?|session_?id)$|accesskeyid$"
)
_FORMS = re.compile(
    r"\b(?:hf_|sk-(?=[A-Za-z_-]*\d)|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_-]{16,}"
    r"|(?<=\bBearer )[\w.~+/=-]*\d[\w.~+/=-]*|(?<=\bBasic )[\w+/]*\d[\w+/=]{7,}"
)
_PAIR = re.compile(r"""(["']?)([\w-]+)\1(\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s"',{}\[\]]+)""")


def is_secret(name: str) -> bool:
    """
    Tell whether a field, key or environment variable of this name holds a secret; in any case, with `_` or `-`.

    Example:

    ```python
    >>> [is_secret(name) for name in ("hub_token", "HF_TOKEN", "api-key", "eos_token", "max_tokens")]
    [True, True, True, False, False]

    ```
    """
    name = name.lower().replace("-", "_")
    if name != "tokens":  # which are counted
        name = name.removesuffix("s")
    return name in _NAMES or name.endswith(_SUFFIXES)


def without_credentials(text: str) -> str:
    """
    Return a text without the credentials in its URLs, and without tokens that are known by their form.

    Example:

    ```python
    >>> without_credentials("http://me:pass@host:8000/v1?size=3&api_key=abc")
    'http://<secret>@host:8000/v1?size=3&api_key=<secret>'

    ```
    """

    def parameter(match: re.Match[str]) -> str:
        name = match[2].lower()
        if is_secret(name) or _SECRET_PARAMETER.search(name):
            return f"{match[1]}{match[2]}={_HIDDEN}"
        return match[0]

    def pair(match: re.Match[str]) -> str:
        quote, name, between, _ = match.groups()
        return f"{quote}{name}{quote}{between}{_HIDDEN}" if is_secret(name) else match[0]

    # Each pattern is tried where its sign stands alone: most texts are long, and hold none of them.
    if "://" in text:
        text = _PARAMETER.sub(parameter, _USER.sub(rf"\1{_HIDDEN}@", text))
    if "@" in text:
        text = _USER_OF_PORT.sub(f"{_HIDDEN}@", text)
    if "{" in text:  # a mapping after a flag
        text = _PAIR.sub(pair, text)
    return _FORMS.sub(_HIDDEN, text)


def redacted_command(argv: Sequence[str]) -> str:
    """
    Return a command line, quoted for a shell, without the secrets in it.

    Example:

    ```python
    >>> redacted_command(["eval", "--hub_token", "abc", "--api-key=abc", "--seed", "1"])
    "eval --hub_token '<secret>' '--api-key=<secret>' --seed 1"

    ```
    """
    # A flag's value is the next word, or stands behind `=`.
    shown: list[str] = []
    name = ""  # of the flag whose value comes next
    for word in argv:
        if not word.startswith("--"):
            shown.append(_shown_value(name, word))
            name = ""
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-")
        shown.append(f"{flag}={_shown_value(name, value)}" if equals else word)
    return shlex.join(shown)


def _shown_value(name: str, text: str) -> str:
    if is_secret(name):
        return _HIDDEN
    if name.lower().endswith(_ADDRESSES) and "://" not in text:  # `user:password@host`
        user, at, host = text.rpartition("@")
        if at and user:
            text = f"{_HIDDEN}@{host}"
    return without_credentials(text)


def scrubbed(values: Any) -> Any:
    """Return a copy of nested mappings, lists and tuples without secrets; anything else stays the same object.

    Values under the name of a secret become `None`, and texts pass [`without_credentials`].
    """
    if isinstance(values, Mapping):
        return {scrubbed(name): _scrubbed_entry(str(name), value) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(scrubbed, values))
    return without_credentials(values) if type(values) is str else values


def _scrubbed_entry(name: str, value: object) -> object:
    if name in _PROMPTS:
        return value
    is_value = isinstance(value, (str, bytes, int, float, list, tuple, Mapping)) and not isinstance(value, bool)
    # A boolean, such as `use_auth_token=True`, tells nothing.
    if is_value and is_secret(name):
        return None
    return _shown_value(name, value) if type(value) is str else scrubbed(value)


def redacted(content: object, values: Mapping[str, Any]) -> Any:
    """Return a text, or nested texts, [`without_credentials`] and with `<secret>` for every known secret.

    Known are those among `values` (nested fields of a configuration), and those in environment variables.
    """
    secrets = {*_texts(values), *_texts(os.environ)}
    for name, value in os.environ.items():
        if name.lower().endswith(_ENVIRONMENT) and len(value) >= _SHORTEST:
            secrets.add(value)
    # The longest first: a short one may be a part of it, whose rest would stay.
    return _replaced(content, sorted(secrets, key=len, reverse=True))


def _replaced(content: Any, secrets: list[str]) -> Any:
    if isinstance(content, Mapping):
        return {_replaced(name, secrets): _replaced(value, secrets) for name, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_replaced(item, secrets) for item in content)
    if isinstance(content, str):
        for secret in secrets:
            content = content.replace(secret, _HIDDEN)
        content = without_credentials(content)
    return content


@contextmanager
def without_secrets() -> Iterator[None]:
    """Keep secrets out of a `DrGRPOConfig` that is pickled inside the block."""
    token = _saving.set(True)
    try:
        yield
    finally:
        _saving.reset(token)


def is_saving() -> bool:
    """Tell whether a model is being saved, see `without_secrets`."""
    return _saving.get()


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            if isinstance(value, str) and is_secret(str(name)) and len(value) >= _SHORTEST:
                yield value
            else:
                yield from _texts(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _texts(value)
