r"""Puts many questions to a chat model and reads its replies: what the judge of answers and that of steps share.

A reply that cannot be read, or a question that is refused, gets the lowest value there is: the completion can cause
that. Without a reply (a server that is down or too slow) it is `None`. Both cost one sample and are counted. Tokens
and retries go to the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import positive, refuse_outside
from trl_drgrpo.rewards.contract import OnError, check_on_error
from trl_drgrpo.rewards.functions.judge.chat_client import (
    Endpoint,
    EndpointRefused,
    QuestionFailed,
    Reply,
    RequestFailed,
    Session,
)
from trl_drgrpo.rewards.functions.judge.reply_score import number_pair

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]


class Judge:
    """Base of the judges: asks, counts what it costs, and decides what a failure is worth.

    Logs `judge/<name>/prompt_tokens`, `completion_tokens`, `retries`, `seconds` and, with `price`, `cost` per call,
    and `rewards/<name>/failed_frac`. An endpoint that refuses (401, 403, 404, a redirect) before it has answered once
    is an error under either `on_error`: nothing would ever be scored.

    Args:
        model, base_url, api_key_env, batch_timeout, max_tokens, extra_body, price, log_replies, on_error, name,
        **endpoint: As in [`JudgeReward`].

    Raises:
        [`InputError`]: A setting that does not fit, or a key that is not in the environment.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str | None = None,
        *,
        batch_timeout: float,
        max_tokens: int,
        extra_body: Mapping[str, Any] | None,
        price: tuple[float, float] | None,
        log_replies: bool,
        on_error: OnError,
        name: str,
        **endpoint: Any,
    ):
        self.__name__ = name
        self.endpoint = _endpoint(base_url=base_url, model=model, api_key_env=api_key_env, **endpoint)
        self.price = None if price is None else number_pair("price", price)
        refuse_outside("batch_timeout", batch_timeout, positive(remedy="600 seconds is the default."))
        check_on_error(on_error)
        self.batch_timeout, self.log_replies, self.on_error = batch_timeout, log_replies, on_error
        self.sampling = {"temperature": 0.0, "max_tokens": max_tokens, **(extra_body or {})}
        self.has_answered = False  # the endpoint, at least once
        self.has_logged = False

    def __repr__(self) -> str:
        settings = f"name={self.__name__!r}, model={self.endpoint.model!r}, base_url={self.endpoint.base_url!r}"
        return f"{type(self).__name__}({settings})"

    async def _ask(
        self,
        questions: Sequence[Messages],
        read: Sequence[Callable[[str], Any]],
        lowest: Sequence[Any],
        log_metric: Callable[[str, float], None] | None,
        log_extra: Callable[[str, list], None] | None,
    ) -> list[Any]:
        """Values read from the replies.

        Args:
            questions (`Sequence`): Messages of each question.
            read (`Sequence[Callable[[str], Any]]`): One per question; raises `ValueError` naming the problem.
            lowest (`Sequence`): Value of each question whose reply cannot be read, or that is refused.
            log_metric, log_extra (`Callable`, *optional*): As the trainer passes them.

        Returns:
            `list`: One entry per question; `None` where there was no reply.
        """
        begun = time.monotonic()
        async with Session(self.endpoint, self.batch_timeout) as session:
            verdicts = await self._verdicts(session, questions, read, lowest)
        failed = [verdict.failure for verdict in verdicts if verdict.failure]
        if failed and not self.has_logged:
            self.has_logged = True
            text = (
                "Judge '%s' failed on %d of %d questions. A reply that cannot be read counts as the lowest score, "
                "none at all as None. The first: %s. Further failures are only counted."
            )
            logger.error(text, self.__name__, len(failed), len(verdicts), failed[0])
        if log_metric is not None and verdicts:
            for metric, value in self._counts(verdicts, session.num_retries, time.monotonic() - begun).items():
                log_metric(metric, value)
        if log_extra is not None and self.log_replies:
            log_extra(f"{self.__name__}_reply", [verdict.said for verdict in verdicts])
        return [verdict.score for verdict in verdicts]

    async def _verdicts(
        self,
        session: Session,
        questions: Sequence[Messages],
        read: Sequence[Callable[[str], Any]],
        lowest: Sequence[Any],
    ) -> list["_Verdict"]:
        tasks = [
            asyncio.create_task(self._judge(session, *each)) for each in zip(questions, read, lowest, strict=True)
        ]
        if not tasks:
            return []
        try:
            done, _ = await asyncio.wait(tasks, timeout=self.batch_timeout, return_when=asyncio.FIRST_EXCEPTION)
            late = _Verdict(failure=f"not done within the batch's {self.batch_timeout:g} s")
            for task in done:  # an error first, wherever it stands
                task.result()
            verdicts = [task.result() if task in done else late for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.on_error == "raise" and late in verdicts:
            raise self._as_reward_error(late.failure)
        return verdicts

    async def _judge(
        self, session: Session, messages: Messages, read: Callable[[str], Any], lowest: Any
    ) -> "_Verdict":
        body = {"model": self.endpoint.model, "messages": messages, **self.sampling}
        reply = None
        try:
            reply = await session.ask({key: value for key, value in body.items() if value is not None})
            self.has_answered = True
            return _Verdict(score=read(reply.text), reply=reply)
        except (RequestFailed, ValueError) as error:
            failure = f"{error}{', cut at its token limit' if reply is not None and reply.is_cut else ''}"
            if self.on_error == "raise" or (isinstance(error, EndpointRefused) and not self.has_answered):
                raise self._as_reward_error(failure) from None
            has_no_reply = isinstance(error, RequestFailed) and not isinstance(error, QuestionFailed)
            return _Verdict(score=None if has_no_reply else lowest, failure=failure, reply=reply)

    def _as_reward_error(self, failure: str) -> RewardError:
        remedy = "Check base_url, model and api_key_env; try it on a few rows with `trl-drgrpo score`."
        where = f"{failure} from {self.endpoint.base_url}"
        return RewardError(f"reward function '{self.__name__}'", where, "a score from the judge", remedy)

    def _counts(self, verdicts: Sequence["_Verdict"], num_retries: int, seconds: float) -> dict[str, float]:
        replies = [verdict.reply for verdict in verdicts if verdict.reply is not None]
        prompt_tokens = sum(reply.prompt_tokens for reply in replies)
        completion_tokens = sum(reply.completion_tokens for reply in replies)
        own = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "retries": num_retries}
        metrics = {f"judge/{self.__name__}/{key}": float(value) for key, value in own.items()}
        metrics[f"judge/{self.__name__}/seconds"] = seconds
        if self.price is not None:
            cost = (prompt_tokens * self.price[0] + completion_tokens * self.price[1]) / 1e6
            metrics[f"judge/{self.__name__}/cost"] = cost
        metrics[f"rewards/{self.__name__}/failed_frac"] = sum(bool(v.failure) for v in verdicts) / len(verdicts)
        return metrics


@dataclass(frozen=True)
class _Verdict:
    score: Any = None
    failure: str = ""
    reply: Reply | None = None

    @property
    def said(self) -> str:
        return self.reply.text if self.reply is not None else f"[{self.failure}]"


def _endpoint(**settings: Any) -> Endpoint:
    try:
        return Endpoint(**settings)
    except TypeError as error:
        known = "concurrency, timeout, retries, backoff, max_backoff, max_reply_bytes"
        raise InputError("judge", f"an unknown setting ({error})", f"one of {known}", "Remove it.") from error
