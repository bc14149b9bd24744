"""Requests to an OpenAI-compatible `POST {base_url}/chat/completions`, many at a time, with retries.

The HTTP client is the one that huggingface_hub depends on (`httpx2`; `httpx` with huggingface_hub 1.x), so nothing is
added to the installation. Retried are connection errors, time-outs, bodies that break off or are no JSON, and the
statuses 408, 409, 425, 429 and 5xx; the pause doubles, is drawn at random below that (so that many processes do not
come back together), and is at least what `Retry-After` asks for, for all requests of the session.

The API key is read from the environment when a session opens and lives in its headers only: it is in no message, no
`repr` and no pickle, redirects are not followed, and what a server says is quoted with the key blacked out.
"""

import asyncio
import importlib
import itertools
import json
import math
import os
import random
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import positive, refuse_outside, whole
from trl_drgrpo.rewards.texts import completion_text, one_line

_LONGEST_REPLY = 1 << 20  # bytes
_LONGEST_BACKOFF = 30.0  # seconds
_RETRIED = {408, 409, 425, 429}
_BUSY = {*_RETRIED, 502, 503, 504}  # the server's state, whatever was asked
_REFUSED = {401, 403, 404}  # and redirects: every request will fail
_SECONDS = positive(remedy="It is in seconds; leave it out for the default.")
_LIMITS = {"concurrency": whole(1), "retries": whole(0), "timeout": _SECONDS, "backoff": _SECONDS}


class RequestFailed(Exception):
    """No usable reply to one request; the message says why, without the key. `wait`: seconds after which it may be
    tried again; `None`: never."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class QuestionFailed(RequestFailed):
    """This question, and no other, has no usable reply: it is too long, or its reply is."""


class Unanswered(RequestFailed):
    """No attempt got a reply, and the question may be why: a time limit, a connection that broke, HTTP 500."""


class EndpointRefused(RequestFailed):
    """The endpoint will refuse every request: invalid key, invalid address, unknown model."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a chat model, with time-outs and retries.

    Args:
        base_url (`str`): Up to but without `/chat/completions`, as a rule it ends in `/v1`.
        model (`str`): Name of the model there.
        api_key_env (`str`, *optional*): Environment variable with the API key; `None`: no key is sent.
        concurrency (`int`, *optional*, defaults to 16): Requests under way at the same time.
        timeout (`float`, *optional*, defaults to 60.0): Seconds per attempt, from connecting to the last byte.
        retries (`int`, *optional*, defaults to 4): Further attempts after the first.
        backoff (`float`, *optional*, defaults to 0.5): Upper end of the first pause in seconds; it doubles every time,
            up to 30.

    Raises:
        [`InputError`]: An address that is no plain http(s) URL, a number out of range, or a
            variable that is not set.
    """

    base_url: str
    model: str
    api_key_env: str | None = None
    concurrency: int = 16
    timeout: float = 60.0
    retries: int = 4
    backoff: float = 0.5

    def __post_init__(self):
        try:
            url = urlsplit(self.base_url)
            has_user = url.username is not None or url.password is not None
            is_plain = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
            is_plain = is_plain and not (has_user or url.query or url.fragment)
        except (AttributeError, TypeError, ValueError):
            is_plain = False
        if not is_plain:  # not quoted: there may be a password in it
            expected = "http(s)://host[:port]/path without user, query or fragment"
            remedy = "For example http://localhost:8000/v1; the key goes into an environment variable."
            raise InputError("base_url", "an address of another form", expected, remedy)
        if not isinstance(self.model, str) or not self.model:
            raise InputError("model", repr(self.model), "the name of a model", "`GET {base_url}/models` lists them.")
        for field, allowed in _LIMITS.items():
            refuse_outside(field, getattr(self, field), allowed)
        self.read_key()

    def read_key(self) -> str | None:
        """Return the API key, or `None` where none is sent; `InputError` where it is not set or cannot be sent."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not (key.isascii() and key.isprintable()):
            problem = "is not valid in an HTTP header" if key else "is not set"
            got = f"{self.api_key_env}, which {problem}"
            remedy = "Export the key under that name, or give api_key_env=None for a server that needs none."
            raise InputError("api_key_env", got, "the name of an environment variable with the API key", remedy)
        return key


@dataclass(frozen=True)
class Reply:
    """The model's answer and its cost."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    is_cut: bool  # it ran into its token limit


class Session:
    """Open connections to an endpoint for one batch of requests: `async with Session(endpoint, seconds) as session`.

    Args:
        endpoint ([`Endpoint`]): Where to.
        seconds (`float`): Time left for the batch: no pause is begun that would outlast it.
    """

    def __init__(self, endpoint: Endpoint, seconds: float):
        self.endpoint = endpoint
        self.deadline = time.monotonic() + seconds
        self.key = endpoint.read_key()
        self.slots = asyncio.Semaphore(endpoint.concurrency)
        self.resume_at = 0.0
        self.num_retries = 0
        self.http = import_http()
        # `identity`: a compressed body could unpack to any size. The key goes into the client's headers alone.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = self.http.Limits(max_connections=endpoint.concurrency)
        self.client = self.http.AsyncClient(headers=headers, limits=limits, timeout=endpoint.timeout)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.client.aclose()

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Return the reply to one request.

        Args:
            body (`dict`): The JSON body: `model`, `messages`, sampling settings.

        Raises:
            [`RequestFailed`]: Out of attempts or time at a server that is down or busy.
            [`Unanswered`]: Out of attempts or time otherwise, or a reply without a message.
            [`QuestionFailed`]: Another client error than those below, or a reply beyond `_LONGEST_REPLY`.
            [`EndpointRefused`]: 401, 403, 404 or a redirect.
        """
        data = await self.post("chat/completions", body)
        try:
            choice = data["choices"][0]
            text = completion_text([choice["message"]])
        except (AttributeError, IndexError, KeyError, TypeError):  # JSON, but not of this form
            raise Unanswered(f"a reply without a message: {self._quoted(json.dumps(data))}") from None
        usage = data.get("usage")
        prompt_tokens = _count(usage, "prompt_tokens")
        completion_tokens = _count(usage, "completion_tokens")
        return Reply(text, prompt_tokens, completion_tokens, choice.get("finish_reason") == "length")

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        """Return the JSON that the endpoint answers to a body sent to one of its routes; raises as `ask` does."""
        content = json.dumps(body).encode()
        # A request keeps its slot while it pauses: a busy server gets fewer requests, not others instead.
        async with self.slots:
            for attempt in itertools.count():
                await asyncio.sleep(max(0.0, self.resume_at - time.monotonic()))
                try:
                    return await self._attempt(route, content)
                except RequestFailed as failed:
                    if failed.wait is None:  # to ask again would not help
                        raise
                    if attempt == self.endpoint.retries:
                        raise type(failed)(f"{failed}, {attempt + 1} times") from None
                    # Random, or all requests of the batch would come back at the same moment.
                    longest = min(_LONGEST_BACKOFF, self.endpoint.backoff * 2**attempt)
                    pause = max(random.uniform(0.0, longest), failed.wait)
                    if time.monotonic() + pause > self.deadline:
                        late = f"{failed}, and {pause:.3g} s to wait, more than the batch has left"
                        raise type(failed)(late) from None
                    # `Retry-After` is for the whole session: other requests wait, too.
                    self.resume_at = max(self.resume_at, time.monotonic() + failed.wait)
                self.num_retries += 1
                await asyncio.sleep(pause)

    async def _attempt(self, route: str, content: bytes) -> Any:
        url = f"{self.endpoint.base_url.rstrip('/')}/{route}"
        body = bytearray()
        try:
            # Around all of it: the client's own time limit is for each read, so a byte a second would never end.
            async with asyncio.timeout(self.endpoint.timeout):
                async with self.client.stream("POST", url, content=content) as response:
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > _LONGEST_REPLY:
                            raise QuestionFailed(f"a reply of more than {_LONGEST_REPLY} bytes")
        except (TimeoutError, self.http.TransportError, self.http.DecodingError) as error:
            cause = self._quoted(f"{type(error).__name__}: {error}")
            if isinstance(error, (self.http.ConnectError, self.http.ConnectTimeout, self.http.PoolTimeout)):
                raise RequestFailed(cause, 0.0) from None  # nothing was sent: no question is to blame
            if isinstance(error, (TimeoutError, self.http.TimeoutException)):
                cause = f"no whole reply within {self.endpoint.timeout:g} s"
            raise Unanswered(cause, 0.0) from None
        status = response.status_code
        reason = f"HTTP {status} ({self._quoted(body)})"
        if status in _RETRIED or status >= 500:
            kind = RequestFailed if status in _BUSY else Unanswered
            raise kind(reason, _retry_after(response.headers.get("retry-after")))
        if status in _REFUSED or 300 <= status < 400:
            raise EndpointRefused(reason)
        if status != 200:
            raise QuestionFailed(reason)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Unanswered(f"a reply that is not JSON: {self._quoted(body)}", 0.0) from None

    def _quoted(self, answer: str | bytes | bytearray) -> str:
        text = answer if isinstance(answer, str) else answer.decode(errors="replace")
        if self.key:  # a server may quote the request's headers; before the cut, which could leave half a key
            text = text.replace(self.key, "***")
        return one_line(text, 200)


def _count(usage: object, key: str) -> int:
    # Servers leave `usage` out, or send null: a cost that is not told counts as 0.
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0


def _retry_after(value: str | None) -> float:
    """Seconds that `Retry-After` asks for; 0 where it says nothing that can be read, or a date."""
    try:
        seconds = float(value or 0)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def import_http() -> ModuleType:
    try:
        return importlib.import_module("httpx2")
    except ModuleNotFoundError:
        return importlib.import_module("httpx")  # the same interface, under huggingface_hub 1.x
