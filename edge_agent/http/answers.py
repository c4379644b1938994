"""Answers in OpenAI's shapes, with what speculation did in a field of its own, `outrider`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_agent.http.logprobs import Table, Teller
from edge_agent.sdk.types import Chunk, Completion, FinishReason
from edge_agent.session.statistics import Statistics

REASONS: Mapping[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}
"""In OpenAI's words, which have none for an answer that was cancelled: it is cut short."""


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer have in common. chat: messages rather than text."""

    model: str
    fingerprint: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    def whole(
        self, completions: Sequence[Completion], prefixes: Sequence[str], tellers: Sequence[Teller]
    ) -> dict[str, Any]:
        """prefixes: what comes before each text. tellers: of each one's log-probabilities."""
        choices = [
            self._choice(i, completion, prefix, teller.tell(completion.token_ids, completion.logprobs))
            for i, (completion, prefix, teller) in enumerate(zip(completions, prefixes, tellers, strict=True))
        ]
        return {**self._head(chunk=False), "choices": choices}

    def begins(self, choice: int, prefix: str = "") -> dict[str, Any]:
        """Before a choice's first chunk."""
        return self._piece(choice, {"role": "assistant", "content": ""} if self.chat else prefix)

    def goes_on(self, choice: int, chunk: Chunk, teller: Teller, told: Mapping[str, Any] | None) -> dict[str, Any]:
        """told: more of the chunk, for `outrider`; what is not the target's word says so in any case."""
        more = {**(told or {}), **({} if chunk.verified else {"verified": False})}
        said = {"content": chunk.text} if self.chat else chunk.text
        return self._piece(choice, said, logprobs=teller.tell(chunk.token_ids, chunk.logprobs), more=more)

    def ends(self, choice: int, completion: Completion) -> dict[str, Any]:
        """After a choice's last chunk."""
        reason = REASONS[completion.finish_reason]
        return self._piece(choice, {} if self.chat else "", reason, more=outrider_of(completion))

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """After everything, where it was asked for."""
        return {**self._head(chunk=True), "choices": [], "usage": usage}

    def _choice(
        self, index: int, completion: Completion, prefix: str, logprobs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        text = prefix + completion.text
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        )
        return {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": REASONS[completion.finish_reason],
            "outrider": outrider_of(completion),
        }

    def _piece(
        self,
        index: int,
        said: object,
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.chat else "text": said,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if more:
            choice["outrider"] = more
        return {**self._head(chunk=True), "choices": [choice]}

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def outrider_of(completion: Completion) -> dict[str, Any]:
    """What a choice's session was and what its speculation did."""
    return {
        "seed": completion.seed,
        "verified": completion.verified,
        "finish_reason": completion.finish_reason,
        "session_id": completion.session_id,
        "statistics": figures(completion.statistics),
    }


def figures(statistics: Statistics) -> dict[str, Any]:
    """Counts of tokens and nodes so far; times in milliseconds, None where there is no measurement yet."""
    first = statistics.first_token_s
    return {
        "draft": statistics.draft,
        "tokens": statistics.tokens,
        "steps": statistics.steps,
        "tokens_per_step": round(statistics.tokens_per_step, 3),
        "tokens_per_s": round(statistics.tokens_per_s, 2),
        "drafted": statistics.drafted,
        "evaluated": statistics.evaluated,
        "accepted": statistics.accepted,
        "acceptance": round(statistics.acceptance, 4),
        "unverified": statistics.unverified,
        "rtt_ms": round(statistics.rtt_ms, 3) or None,
        "first_token_ms": None if first is None else round(1000 * first, 2),
        "attaches": statistics.attaches,
    }


def tokens_told(chunk: Chunk, statistics: Statistics, table: Table, silent: Collection[int]) -> dict[str, Any]:
    """Who wrote each of a chunk's tokens, with its bytes (a character may be spread over several), and how it goes.

    silent: ids that are no text, and have no bytes.
    """
    return {
        "tokens": [
            {
                "id": token,
                "bytes": [] if token in silent or token >= len(table) else list(table[token]),
                "provenance": provenance,
            }
            for token, provenance in zip(chunk.token_ids, chunk.provenance, strict=True)
        ],
        "statistics": figures(statistics),
    }


def usage_of(completions: Iterable[Completion], prompts: Iterable[int]) -> dict[str, int]:
    """prompts: the tokens of each; one counts once, however many choices it has."""
    written, read = sum(one.usage.completion_tokens for one in completions), sum(prompts)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
