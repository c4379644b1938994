"""Run one request from its placement to its text, with its deadline and the stream that a caller reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Generic, Self, TypeVar

from edge_agent.drafting.sources.base import DraftTask
from edge_agent.sdk.request import Request
from edge_agent.sdk.sessions import DeliverySource, Sessions
from edge_agent.sdk.types import Chunk, Completion, FinishReason, Timeout
from edge_agent.session.statistics import Statistics, Usage
from edge_agent.target.bundle import TargetBundle
from edge_agent.target.detokenizer import Detokenizer, StopScanner, text_of
from outrider.core.backoff import backoff_s
from outrider.core.errors import InternalError, OutriderError, Overloaded, TimedOut, Unavailable
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Finish

log = logging.getLogger(__name__)

_A = TypeVar("_A")

_REASONS: dict[Finish, FinishReason] = {Finish.EOS: "eos", Finish.LENGTH: "length", Finish.CANCELLED: "cancelled"}
_RETRIED = (InternalError, Overloaded, Unavailable)
"""Errors that another try at verifiers may not meet again."""
SPARE_TIME = 1.5
"""Factor by which a further part of an answer may take longer than the parts before it and still end in time."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0


class Deadline:
    """The end of one request's time, which begins when this is made."""

    def __init__(self, timeout: Timeout, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._begun = clock()

    def after_first_token(self) -> Deadline:
        """Return what is left of it for a further request of the same work: no limit until a first token."""
        left = Deadline(Timeout(self._timeout.total, None), self._clock)
        left._begun = self._begun
        return left

    def allows(self, times: float) -> bool:
        """Return whether work that takes `times` as long as all so far ends before the time is over."""
        total = self._timeout.total
        return total is None or times * (self._clock() - self._begun) <= total

    @contextlib.asynccontextmanager
    async def enforced(self, *, first_token: bool, why: Callable[[], str] = str) -> AsyncIterator[None]:
        """Cancel the body when the time is over, and raise TimedOut.

        first_token: no token has come yet. why: returns what went wrong last, if anything did.
        """
        seconds, field, what = self._timeout.total, "total", "the request took longer than"
        first = self._timeout.first_token
        if first_token and first is not None and (seconds is None or first < seconds):
            seconds, field, what = first, "first_token", "no token came within"
        left = None if seconds is None else max(0.0, self._begun + seconds - self._clock())
        try:
            async with asyncio.timeout(left) as scope:
                yield
        except TimeoutError:
            if not scope.expired() or seconds is None:
                raise
            message = f"{what} {seconds:g} s; allow more with timeout=Timeout({field}=SECONDS)"
            if cause := why():
                message += f". Last of all: {cause}"
            raise TimedOut(message, seconds=seconds, first_token=field == "first_token") from None


class ItemStream(Generic[_A]):
    """Work that runs as its items are taken: iterate over it, or call `next` until it returns None.

    Leaving the iteration early, or the context, cancels the work.
    """

    def __init__(self, items: AsyncGenerator[_A, None]) -> None:
        self._items = items
        self._pulling = asyncio.Lock()
        """Held while an item is awaited: a generator that runs cannot be closed."""
        self._taken: list[_A] = []

    async def __aiter__(self) -> AsyncIterator[_A]:
        async with self:
            while (item := await self.next()) is not None:
                yield item

    async def next(self) -> _A | None:
        """Wait for the next item; None at the end. Call `aclose` to leave before it."""
        async with self._pulling, self._limited():
            item = await anext(self._items, None)
        if item is not None:
            self._taken.append(item)
        return item

    async def aclose(self) -> None:
        """Cancel the work, once an item that another task awaits has come."""
        async with self._pulling:
            await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _limited(self) -> AbstractAsyncContextManager[None]:
        """Limit the time of waiting for one item."""
        return contextlib.nullcontext()


class CompletionStream(ItemStream[Chunk]):
    """A request that runs, as `AsyncClient.stream` returns it: iterate over it for chunks.

    `await stream.next()` returns the next chunk, None at the end; `await stream.aclose()` leaves before it. Leaving the
    iteration early, or the context, cancels the request, too. `async with stream:` around the loop waits until
    the cancellation has been sent; without it a `break` cancels in the background. `statistics` and `completion`
    cover the output so far while the request runs.
    """

    def __init__(
        self, sessions: Sessions, bundle: TargetBundle, request: Request, prompt: Sequence[int], deadline: Deadline
    ) -> None:
        """Nothing is sent before the first chunk is taken. Raises BadRequest for what the target cannot take."""
        super().__init__(self._chunks())
        self._sessions = sessions
        self._bundle = bundle
        self._request = request
        self._deadline = deadline
        self.statistics = Statistics(rule=request.sampling.rule)
        self._stops = StopScanner(request.stop, request.min_tokens)
        self._message = request.message(prompt, bundle.description)
        self._session = self._new_session()
        self._silent = bundle.tokenizer.special | self._session.end_token_ids
        """Ids that are no text, among them the one that ends the output, as in vLLM."""
        self._detokenizer = Detokenizer(bundle.tokenizer.table, self._silent)
        self._finish_reason: FinishReason | None = None
        self._is_offline = False
        """Whether the draft model writes without a verifier."""

    def read_as(self, texts: Collection[str], stops: StopScanner | None = None) -> None:
        """Make special tokens with these texts part of the text. Call it before the first chunk is taken.

        stops: finds where the output ends, in place of the request's stop texts.
        """
        tokenizer = self._bundle.tokenizer
        shown = {token for token in tokenizer.special if tokenizer.table[token].decode(errors="replace") in texts}
        self._detokenizer, self._stops = Detokenizer(tokenizer.table, self._silent - shown), stops or self._stops

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Return the prompt's token ids. They may be given as a prompt again, which saves tokenising it."""
        return self._session.prompt

    @property
    def completion(self) -> Completion:
        """Return the output so far; its `finish_reason` is "cancelled" if the output had not ended."""
        chunks = self._taken
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        logprobs = [chunk.logprobs for chunk in chunks]
        prompt, scored = self.prompt_token_ids, self._session.scored
        is_scored = self._request.prompt_logprobs is not None and len(scored) == len(prompt) - 1
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=token_ids,
            drafted=tuple(own for chunk in chunks for own in chunk.drafted),
            verified=all(chunk.verified for chunk in chunks),
            logprobs=None if not chunks or None in logprobs else tuple(one for part in logprobs for one in part or ()),
            finish_reason=self._finish_reason or "cancelled",
            usage=Usage(len(prompt), len(token_ids)),
            seed=self._request.sampling.seed,
            session_id=self.statistics.session_id,
            statistics=self.statistics,
            prompt_logprobs=(None, *scored) if is_scored else None,
            acceptance_rule=self._request.acceptance_rule,
        )

    async def drain(self) -> Completion:
        """Run to the end, and return the completion. Raises the error of a request that no verifier could finish."""
        async with self:
            while await self.next() is not None:
                pass
        return self.completion

    def _limited(self) -> AbstractAsyncContextManager[None]:
        return self._deadline.enforced(first_token=not self._taken, why=lambda: self.statistics.attach_failure)

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield the output as it comes, once one of the client's slots is free. Closing this cancels the session.

        Raises the error of the last try.
        """
        async with self._sessions.slot(self.statistics, lambda: self._finish_reason or "cancelled"):
            begun, failures, source = time.monotonic(), 0, self._at_verifiers()
            while True:
                try:
                    async with source as deliveries:
                        async for delivery in deliveries:
                            yield self._chunk(delivery)
                            if self._finish_reason is not None:
                                return
                    return
                except OutriderError as error:
                    failures += 1
                    source = await self._source_after(error, failures, time.monotonic() - begun)

    def _new_session(self) -> DeviceSession:
        return DeviceSession(self._message, self._bundle.description.eos_token_ids)

    def _at_verifiers(self) -> DeliverySource:
        """Return what the session delivers at verifiers, from its placement on."""
        return contextlib.aclosing(self._verified())

    async def _verified(self) -> AsyncGenerator[Delivery, None]:
        """Yield what verifiers deliver: a request without max_tokens goes on in another session until the target's end.

        Where none has room for that, the output ends as at its greatest length.
        """
        following: DeviceSession | None = self._session
        while following is not None:
            self._session, following = following, None
            before = len(self._session.received)
            try:
                async with self._sessions.open(
                    self._session, self._bundle, self._request, self.statistics
                ) as deliveries:
                    async for delivery in deliveries:
                        following = self._extended() if delivery.finish is Finish.LENGTH else None
                        yield delivery if following is None else replace(delivery, finish=Finish.NONE)
            except (Overloaded, Unavailable) as error:
                alone = isinstance(error, Unavailable) and self._request.offline == "draft_only"
                if alone or not before or len(self._session.received) > before:
                    raise
                log.warning("an answer ends after %d tokens: %s", before, error)
                yield Delivery((), (), (), (), Finish.LENGTH)

    def _extended(self) -> DeviceSession | None:
        """Return a session that goes on behind the tokens received; None if the request asks for no more of them, or
        has not the time for these."""
        session = self._session
        if self._request.max_tokens is not None:
            return None
        message = self._request.message(session.prompt, self._bundle.description, received=len(session.received))
        times = message.max_tokens / session.max_tokens
        if times <= 1.0 or not self._deadline.allows(SPARE_TIME * times):
            return None
        self.statistics.address = ""  # a further session at another verifier is no failover
        return session.extended(message)

    def _offline_source(self, cause: Unavailable) -> DeliverySource:
        """Return what the draft writes alone. Raises Unavailable if there is no model, or logprobs are asked for."""
        draft = self._sessions.drafts.draft
        if draft is None or not draft.has_model:
            raise Unavailable(f"{cause}; and there is no draft model for offline generation") from cause
        if self._request.logprobs is not None or self._request.prompt_logprobs is not None:
            raise Unavailable(f"{cause}; and only the target has log-probabilities") from cause
        log.warning("no verifier can be reached; the draft generates offline, unverified: %s", cause)
        self._is_offline = True
        self.statistics.uses(draft.name, draft.release)
        task = DraftTask.of(self._session, self._bundle.grammar(self._request.grammar))
        return contextlib.aclosing(self._sessions.drafts.generate_offline(task))

    async def _source_after(self, error: OutriderError, failures: int, elapsed_s: float) -> DeliverySource:
        """Return the next source of deliveries after `failures` failed tries. Raises `error` if there is none.

        A try that fails before the first token is repeated up to `retries` times after a pause, for at most 30 s; a
        session that fails later resumes elsewhere by itself, and needs no further try. Where the request allows it, the
        draft model goes on alone once no verifier can be reached.
        """
        if self._request.offline == "draft_only" and isinstance(error, Unavailable) and not self._is_offline:
            return self._offline_source(error)
        pause_s = max(error.retry_after_s, backoff_s(failures, _FIRST_PAUSE_S, _MAX_PAUSE_S, jitter=0.25))
        may_help = isinstance(error, _RETRIED) and not (isinstance(error, Unavailable) and error.waited)
        may_help = may_help and not self._session.received and not self._is_offline
        in_time = elapsed_s + pause_s <= self._sessions.open_budget_s
        if not may_help or not in_time or failures > self._request.retries:
            raise error
        log.info("try %d of %d in %.1f s: %s", failures + 1, self._request.retries + 1, pause_s, error)
        await asyncio.sleep(pause_s)
        self._session = self._new_session()
        return self._at_verifiers()

    def _chunk(self, delivery: Delivery) -> Chunk:
        """Return the delivery's text and tokens, up to a stop string; notes why the output ends with it."""
        last = bool(delivery.finish)
        text, count, stopped = text_of(delivery.tokens, self._detokenizer, self._stops, last=last)
        self._finish_reason = "stop" if stopped else _REASONS.get(delivery.finish)
        if not delivery.verified:
            self.statistics.generated_offline(len(delivery.tokens))
        # No target has accepted what the draft wrote alone; it is this device's all the same.
        own = delivery.accepted if delivery.verified else delivery.proposed
        logprobs = delivery.logprobs[:count] if self._request.logprobs is not None else None
        lossy = self._request.sampling.lossy
        return Chunk(text, delivery.tokens[:count], own[:count], delivery.verified, logprobs, lossy)
