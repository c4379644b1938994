"""One request's parts: its prompt's ids, its session, its driver's options, and its text out of what is delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from edge_agent.config import EdgeSettings
from edge_agent.drafting.offline_generation import Deliveries
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.sdk.completion_stream import Chunks
from edge_agent.sdk.types import Chunk, FinishReason, Request, check_ids, check_prompt, check_text
from edge_agent.session.driver import DriverOptions
from edge_agent.session.statistics import Statistics
from edge_agent.target.bundle import TargetKit
from edge_agent.target.chat_template import Message
from edge_agent.target.detokenizer import TextAssembler
from outrider.core.errors import ModelRefused, Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Finish

_REASONS: dict[Finish, FinishReason] = {
    Finish.EOS: "eos",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}


def ids_of_text(kit: TargetKit, text: str) -> list[int]:
    """Of a prompt. Not for the event loop: a long text takes seconds. Raises BadRequest."""
    return _bounded(kit, kit.tokenizer.encode_prompt)(text)


def ids_of_chat(kit: TargetKit, messages: Sequence[Message]) -> list[int]:
    """Of messages in the target's template. Not for the event loop: a template is somebody else's program.

    Raises ModelRefused for a target without one, BadRequest.
    """
    if kit.template is None:
        raise ModelRefused(f"the target {kit.description.target.name} has no chat template; use generate")
    tokenizer = kit.tokenizer
    encode, encode_plain = _bounded(kit, tokenizer.encode), _bounded(kit, tokenizer.encode_plain)
    return kit.template.tokenise(messages, encode, encode_plain, tokenizer.controls)


def _bounded(kit: TargetKit, encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """The same, but a text that the target cannot hold is refused before the work."""

    def encoded(text: str) -> list[int]:
        check_text(text, kit.tokenizer.longest, kit.description.max_sequence)
        return encode(text)

    return encoded


def session_of(kit: TargetKit, ids: Sequence[int], request: Request) -> DeviceSession:
    """Raises BadRequest for what the target cannot take."""
    description = kit.description
    prompt = check_prompt(ids, request.max_tokens, description.vocabulary_size, description.max_sequence)
    check_ids("stop_token_ids", request.stop_token_ids, description.vocabulary_size)
    check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias], description.vocabulary_size)
    return DeviceSession(
        prompt,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        eos_token_ids=description.eos_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
    )


def ends_of(kit: TargetKit, request: Request) -> frozenset[int]:
    """Token ids that end the sequence."""
    ends = frozenset(request.stop_token_ids)
    return ends if request.ignore_eos else ends | frozenset(kit.description.eos_token_ids)


def written_alone(
    kit: TargetKit,
    ids: Sequence[int],
    request: Request,
    statistics: Statistics,
    pool: DraftPool | None,
    received: Sequence[int],
    cause: Unavailable,
) -> Deliveries:
    """What the draft makes of the tokens received, where no verifier can be reached. Raises Unavailable where it may or
    can not. cause: why none can."""
    if pool is None or not pool.has_model:
        raise Unavailable(f"{cause}; and no draft model is here that could go on alone") from cause
    if request.logprobs is not None:
        raise Unavailable(f"{cause}; and only the target has log-probabilities") from cause
    statistics.uses(pool.name, pool.release)
    task = DraftTask(tuple(ids), tuple(received), request.sampling, request.max_tokens, ends_of(kit, request))
    return pool.alone(task, statistics.written_alone)


def search_budget_s(settings: EdgeSettings, request: Request) -> float:
    """How long a session without progress looks for a verifier."""
    budget_s = settings.resume_budget_s
    return budget_s if request.offline == "raise" else min(budget_s, settings.offline_after_s)


def driver_options(
    kit: TargetKit,
    request: Request,
    settings: EdgeSettings,
    session_id: str,
    *,
    announced: str,
    release: str,
    notice: Callable[[int], None] | None,
) -> DriverOptions:
    """announced: the release that the session was opened with. release: the one that it begins with. notice: hears of
    other releases."""
    return DriverOptions(
        session_id=session_id,
        vocabulary_hash=kit.tokenizer.vocabulary_hash,
        vocabulary_size=kit.description.vocabulary_size,
        ends=ends_of(kit, request),
        silence_s=settings.silence_s,
        siblings=settings.siblings,
        release=release,
        announced=announced,
        notice=notice or (lambda _: None),
    )


async def chunks_of(deliveries: Deliveries, kit: TargetKit, request: Request) -> Chunks:
    """Text as it comes, up to a stop string, and why it ended with the last one."""
    assembler = TextAssembler(kit.tokenizer.table, kit.tokenizer.special, request.stop)
    async with contextlib.aclosing(deliveries):
        async for delivery in deliveries:
            piece = assembler.feed(delivery.tokens, last=bool(delivery.finish))
            # What the draft wrote alone was not accepted by anybody; it is this device's all the same.
            own = delivery.accepted if delivery.verified else delivery.drafted
            known = delivery.logprobs[: piece.tokens] if request.logprobs is not None else None
            tokens = delivery.tokens[: piece.tokens]
            chunk = Chunk(piece.text, tokens, own[: piece.tokens], delivery.verified, known)
            reason: FinishReason | None = "stop" if piece.stopped else _REASONS.get(delivery.finish)
            yield chunk, reason
            if piece.stopped:
                return
