"""Write completions in OpenAI's shapes; what speculation did stands in a field of its own, `outrider`."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edge_agent.http.requests import ChatCompletionRequest, RequestBody
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk, Completion, FinishReason
from edge_agent.session.statistics import Statistics
from edge_agent.target.bundle import TargetBundle
from outrider.core.protocol.messages import TokenLogprobs

REASONS: Mapping[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}
"""OpenAI's finish reasons, which have none for a cancelled answer: it is cut short."""

_FIGURES = (
    *(("tokens", 0), ("steps", 0), ("tokens_per_step", 3), ("tokens_per_s", 2), ("drafted", 0), ("evaluated", 0)),
    *(("accepted", 0), ("acceptance", 4), ("unverified", 0), ("attaches", 0)),
)
"""Statistics that answers contain, each with its decimal places."""


class CompletionWriter:
    """Writes the answer to one request: whole, or chunk by chunk.

    `streams` are the choices of all prompts, in order, and `prefixes` the texts before them. A chat is answered with
    messages, another request with text.
    """

    def __init__(
        self, body: RequestBody, bundle: TargetBundle, streams: Sequence[CompletionStream], prefixes: Sequence[str]
    ) -> None:
        self.chat = chat = isinstance(body, ChatCompletionRequest)
        self.streams = streams
        self._body = body
        self._prefixes = prefixes
        self._tokenizer = bundle.tokenizer
        self._begun: set[int] = set()
        """Choices of which something was written."""
        table, silent = bundle.tokenizer.table, bundle.tokenizer.special
        self._logprobs = [LogprobsWriter(table, silent, chat=chat, offset=len(prefix)) for prefix in prefixes]
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": bundle.description.target.name,
            "system_fingerprint": f"fp_{bundle.description.target.weights_hash.removeprefix('sha256:')[:16]}",
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer with all choices."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(completions)}

    def chunks(self, index: int, chunk: Chunk | None) -> Iterator[dict[str, Any]]:
        """Write one chunk of a choice, or its end (None)."""
        prefix = self._prefixes[index]
        if index not in self._begun:
            self._begun.add(index)
            if self.chat or prefix:
                yield self._piece(index, {"role": "assistant", "content": ""} if self.chat else prefix)
        if chunk is None:
            completion = self.streams[index].completion
            reason = REASONS[completion.finish_reason]
            yield self._piece(index, {} if self.chat else "", reason, outrider=_about(completion))
        # Half a character is no event.
        elif chunk.text or chunk.logprobs or not chunk.verified or self._body.provenance:
            outrider = self._provenance_of(index, chunk) if self._body.provenance else {}
            if not chunk.verified:
                outrider["verified"] = False
            logprobs = self._logprobs[index].write(chunk.token_ids, chunk.logprobs)
            text = {"content": chunk.text} if self.chat else chunk.text
            yield self._piece(index, text, logprobs=logprobs, outrider=outrider)

    def usage(self) -> dict[str, Any]:
        """Return the chunk that ends a stream whose client asks for its usage."""
        usage = self._usage([stream.completion for stream in self.streams])
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = self._prefixes[index] + completion.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            **({"message": message} if self.chat else {"text": text}),
            "logprobs": self._logprobs[index].write(completion.token_ids, completion.logprobs),
            "finish_reason": REASONS[completion.finish_reason],
            "outrider": _about(completion),
        }

    def _piece(
        self,
        index: int,
        text: object,
        reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
        outrider: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta" if self.chat else "text": text, "logprobs": logprobs, "finish_reason": reason}
        if outrider:
            choice["outrider"] = outrider
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    def _provenance_of(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Return the origin of each token of a chunk, with its bytes, and the statistics so far.

        A character may be spread over several tokens; a token that stands for no text has no bytes.
        """
        table, silent = self._tokenizer.table, self._tokenizer.special
        tokens = [
            {
                "id": token,
                "bytes": [] if token in silent or token >= len(table) else list(table[token]),
                "provenance": provenance,
            }
            for token, provenance in zip(chunk.token_ids, chunk.provenance, strict=True)
        ]
        return {"tokens": tokens, "statistics": _figures(self.streams[index].statistics)}

    def _usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        """Count the tokens written, and those of each prompt once, however many choices it has."""
        written = sum(one.usage.completion_tokens for one in completions)
        read = sum(one.usage.prompt_tokens for one in completions[:: self._body.choices])
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _about(completion: Completion) -> dict[str, Any]:
    """Return what a choice's session was, and what its speculation did."""
    return {
        "seed": completion.seed,
        "verified": completion.verified,
        "finish_reason": completion.finish_reason,
        "session_id": completion.session_id,
        "statistics": _figures(completion.statistics),
    }


def _figures(statistics: Statistics) -> dict[str, Any]:
    """Return counts of tokens and nodes so far; times in milliseconds, None where there is no measurement yet."""
    first = statistics.first_token_s
    return {
        "draft": statistics.draft,
        **{name: round(getattr(statistics, name), digits or None) for name, digits in _FIGURES},
        "rtt_ms": round(statistics.rtt_ms, 3) or None,
        "first_token_ms": None if first is None else round(1000 * first, 2),
    }


class LogprobsWriter:
    """Writes the log-probabilities of one choice in the order of its tokens, for chat or completions.

    table: the raw bytes of every token id. silent: ids that stand for no text. offset: number of characters before the
    first token's.
    """

    def __init__(self, table: Sequence[bytes], silent: Collection[int] = (), *, chat: bool, offset: int = 0) -> None:
        self._table = table
        self._silent = silent
        self._chat = chat
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, ids: Sequence[int], known: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        """Return the next tokens' log-probabilities; None unless they were asked for."""
        if known is None:
            return None
        known = tuple(known)
        if self._chat:
            content = [
                {**self._token(token, one.logprob), "top_logprobs": [self._token(*other) for other in one.top]}
                for token, one in zip(ids, known, strict=True)
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [one.logprob for one in known],
            "top_logprobs": [{self._text(token): value for token, value in one.top} for one in known],
            "text_offset": [self._text_offset(token) for token in ids],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._bytes(token))}

    def _bytes(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _text(self, token: int) -> str:
        """Return a token's text; a part of a character is written as OpenAI does."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _text_offset(self, token: int) -> int:
        """Return where the token's text begins, and count its characters."""
        if token in self._silent:
            return self._offset
        cut, _ = self._decoder.getstate()
        text = self._decoder.decode(self._bytes(token))
        replaced = bool(cut) and text.startswith("\ufffd")  # an earlier character that this token does not finish
        begins = self._offset + replaced
        self._offset += len(text)
        return begins
