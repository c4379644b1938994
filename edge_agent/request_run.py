"""One request's parts: the session that it asks for, its driver's options, and its text out of what is delivered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from edge_agent.completion import Chunk, FinishReason, Request, check_ids, check_prompt
from edge_agent.completion_stream import Chunks
from edge_agent.config import EdgeSettings
from edge_agent.driver import DriverOptions
from edge_agent.kit import TargetKit
from edge_agent.text import TextAssembler
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Finish

_REASONS: dict[Finish, FinishReason] = {
    Finish.EOS: "eos",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}


def session_of(kit: TargetKit, ids: Sequence[int], request: Request) -> DeviceSession:
    """Raises BadRequest for what the target cannot take."""
    description = kit.description
    prompt = check_prompt(ids, request.max_tokens, description.vocabulary_size, description.max_sequence)
    check_ids("stop_token_ids", request.stop_token_ids, description.vocabulary_size)
    return DeviceSession(
        prompt,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        eos_token_ids=description.eos_token_ids,
        ignore_eos=request.ignore_eos,
    )


def driver_options(
    kit: TargetKit, request: Request, settings: EdgeSettings, session_id: str, *, announced: str, release: str
) -> DriverOptions:
    """announced: the release that the session was opened with. release: the one that it begins with."""
    ends = frozenset(request.stop_token_ids)
    if not request.ignore_eos:
        ends |= frozenset(kit.description.eos_token_ids)
    return DriverOptions(
        session_id=session_id,
        vocabulary_hash=kit.tokenizer.vocabulary_hash,
        vocabulary_size=kit.description.vocabulary_size,
        ends=ends,
        silence_s=settings.silence_s,
        siblings=settings.siblings,
        release=release,
        announced=announced,
    )


async def chunks_of(deliveries: AsyncGenerator[Delivery, None], kit: TargetKit, request: Request) -> Chunks:
    """Text as it comes, up to a stop string, and why it ended with the last one."""
    assembler = TextAssembler(kit.tokenizer.table, kit.tokenizer.special, request.stop)
    async for delivery in deliveries:
        piece = assembler.feed(delivery.tokens, last=bool(delivery.finish))
        chunk = Chunk(piece.text, delivery.tokens[: piece.tokens], delivery.drafted[: piece.tokens])
        reason: FinishReason | None = "stop" if piece.stopped else _REASONS.get(delivery.finish)
        yield chunk, reason
        if piece.stopped:
            return
