"""Write completions in OpenAI's shapes; what speculation did stands in a field of its own, `outrider`."""

from __future__ import annotations

import codecs
import functools
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from edge_agent.http.parsing.answer import AnswerParser
from edge_agent.http.parsing.formats import AnswerFormat
from edge_agent.http.requests import ChatCompletionRequest, CompletionRequest, RequestBody
from edge_agent.sdk.generation import CompletionStream
from edge_agent.sdk.types import Chunk, Completion, FinishReason
from edge_agent.session.statistics import Statistics
from edge_agent.target.bundle import TargetBundle
from outrider.core.protocol.messages import TokenLogprobs

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-outrider-ignored"
"""Names what of a request this server does not know or follow, in its answer."""
_MAX_IGNORED = 1000
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
    messages, another request with text. parsers: of a chat's choices, which their streams feed.
    """

    def __init__(
        self,
        body: RequestBody,
        bundle: TargetBundle,
        streams: Sequence[CompletionStream],
        prefixes: Sequence[str],
        parsers: Sequence[AnswerParser] = (),
    ) -> None:
        self.chat = chat = isinstance(body, ChatCompletionRequest)
        self.streams = streams
        self._body = body
        self._prefixes = prefixes
        self._echoes_logprobs = isinstance(body, CompletionRequest) and body.echoes_logprobs
        self._tokenizer = bundle.tokenizer
        self._written: dict[int, int] = {}
        """Tokens that were written of each choice that has begun."""
        self._messages = [MessageWriter(body, parser) for parser in parsers if isinstance(body, ChatCompletionRequest)]
        self._ends = frozenset(bundle.description.eos_token_ids) | set(body.stop_token_ids or ())
        table, silent = bundle.tokenizer.table, bundle.tokenizer.special
        self._text_logprobs = [TextLogprobs(table, silent, len(prefix)) for prefix in prefixes]
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": bundle.description.target.name,
            "system_fingerprint": f"fp_{bundle.description.target.weights_hash.removeprefix('sha256:')[:16]}",
        }

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {
            **self._head,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": self._usage(completions),
            **({"warnings": self._body.notes} if self._body.notes else {}),
        }

    def chunks(self, index: int, chunk: Chunk | None) -> Iterator[dict[str, Any]]:
        """Yield what a choice begins with before its first chunk, and then the chunk, or its end (None)."""
        stream, prefix = self.streams[index], self._prefixes[index]
        if index not in self._written:
            self._written[index] = 0
            echoed = self._echoed(index, stream.completion) if self._echoes_logprobs else None
            if self.chat or prefix or echoed:
                begin = {"role": "assistant", "content": ""} if self.chat else prefix
                yield self._piece(index, begin, logprobs=echoed)
        if chunk is None:
            end, completion = {} if self.chat else "", stream.completion
            yield self._piece(index, end, self._reason(index, completion), outrider=about(completion))
            return
        self._written[index] += len(chunk.token_ids)
        text: Any = self._messages[index].delta() if self.chat else chunk.text
        # Half a character is no event, and neither is half a marker.
        if text or chunk.logprobs or not chunk.verified or self._body.provenance:
            outrider = self._provenance_of(index, chunk) if self._body.provenance else {}
            if not chunk.verified:
                outrider["verified"] = False
            logprobs = self._logprobs(index, chunk)
            if self.chat and not text:
                text = {"content": ""}
            yield self._piece(index, text, logprobs=logprobs, outrider=outrider)

    def usage(self) -> dict[str, Any]:
        """Return the chunk that ends a stream whose client asks for its usage."""
        usage = self._usage([stream.completion for stream in self.streams])
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": usage}

    def usage_so_far(self, index: int) -> dict[str, int]:
        """Return the usage of one choice, up to the last chunk of it that was written."""
        return _usage(len(self.streams[index].prompt_token_ids), self._written[index])

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        said: object = self._messages[index].message() if self.chat else self._prefixes[index] + completion.text
        logprobs = self._logprobs(index, completion)
        if self._echoes_logprobs and logprobs is not None:
            echoed = self._echoed(index, completion)
            logprobs = {name: [*values, *logprobs[name]] for name, values in echoed.items()}
        return {
            "index": index,
            "message" if self.chat else "text": said,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, completion),
            "outrider": about(completion),
        }

    def _reason(self, index: int, completion: Completion) -> str:
        reason = completion.finish_reason
        return self._messages[index].reason(reason) if self.chat else REASONS[reason]

    def _logprobs(self, index: int, part: Chunk | Completion) -> dict[str, Any] | None:
        """Return the log-probabilities of the next part of a choice, or of all of it; None unless asked for."""
        if part.logprobs is None:
            return None
        if self.chat:
            return message_logprobs(self._tokenizer.table, self._ends, part.token_ids, part.logprobs)
        return self._text_logprobs[index].write(part.token_ids, part.logprobs)

    def _echoed(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the log-probabilities of the prompt that comes before a choice."""
        ids = self.streams[index].prompt_token_ids
        writer = TextLogprobs(self._tokenizer.table, self._tokenizer.special)
        echoed = writer.write(ids, completion.prompt_logprobs or [None] * len(ids))
        # A tokenizer that begins every text with a space has a longer text than the prompt.
        first, end = max(0, writer.end - len(self._prefixes[index])), len(self._prefixes[index])
        echoed["text_offset"] = [min(max(0, offset - first), end) for offset in echoed["text_offset"]]
        return echoed

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
                "bytes": [] if token in silent else list(_bytes(table, token)),
                "provenance": provenance,
            }
            for token, provenance in zip(chunk.token_ids, chunk.provenance, strict=True)
        ]
        return {"tokens": tokens, "statistics": _figures(self.streams[index].statistics)}

    def _usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        """Count the tokens written, and those of each prompt once, however many choices it has."""
        written = sum(one.usage.completion_tokens for one in completions)
        read = sum(one.usage.prompt_tokens for one in completions[:: self._body.choices])
        return _usage(read, written)


def _usage(read: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def about(completion: Completion) -> dict[str, Any]:
    """Return what a choice's session was, and what its speculation did."""
    return {
        "seed": completion.seed,
        "verified": completion.verified,
        "acceptance_rule": completion.acceptance_rule,
        "lossy": completion.lossy,
        "finish_reason": completion.finish_reason,
        "session_id": completion.session_id,
        "statistics": _figures(completion.statistics),
    }


def _figures(statistics: Statistics) -> dict[str, Any]:
    """Return counts of tokens and nodes so far; times in milliseconds, None where there is no measurement yet."""
    first = statistics.first_token_s
    return {
        "draft": statistics.draft,
        "draft_busy": statistics.draft_busy,
        "draft_failure": statistics.draft_failure or None,
        **{name: round(getattr(statistics, name), digits or None) for name, digits in _FIGURES},
        "rtt_ms": round(statistics.rtt_ms, 3) or None,
        "first_token_ms": None if first is None else round(1000 * first, 2),
    }


def naming_ignored(response: Response, ignored: str, notes: Sequence[str]) -> Response:
    """Return the response with a header that names what was ignored. ignored: names of fields; notes: the rest."""
    if ignored:
        _tell_ignored(ignored)
    if names := ", ".join(filter(None, (ignored, *notes))):
        response.headers[IGNORED_HEADER] = re.sub(r"[^ -~]", "?", names)[:_MAX_IGNORED]
    return response


@functools.lru_cache(maxsize=256)
def _tell_ignored(names: str) -> None:
    """Log unknown fields, the first time that they come."""
    log.warning("fields that this server does not know were ignored: %s", names)


class MessageWriter:
    """Writes the message of one choice, whole or in deltas, with its tool calls and its reasoning."""

    def __init__(self, chat: ChatCompletionRequest, parser: AnswerParser) -> None:
        self._parser = parser
        self._reasoning = "reasoning" if chat.reasoning_format == "parsed" else "reasoning_content"
        self._calls = 0

    def delta(self) -> dict[str, Any]:
        """Return what was parsed since the last time; empty for nothing."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for one in self._parser.taken():
            if one.kind == "content":
                delta["content"] = delta.get("content", "") + one.text
            elif one.kind == "reasoning":
                delta[self._reasoning] = delta.get(self._reasoning, "") + one.text
            else:
                call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += one.text
                if one.name:
                    self._calls += 1
                    call |= {"id": call_id(self._parser.form), "type": "function"}
                    call["function"] = {"name": one.name, **call["function"]}
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def message(self) -> dict[str, Any]:
        delta = self.delta()
        message = {"role": "assistant", "content": None if "tool_calls" in delta else "", "refusal": None, **delta}
        if "tool_calls" in delta:
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")} for call in delta["tool_calls"]
            ]
        return message

    def reason(self, finish: FinishReason) -> str:
        """Return why the message has ended: "tool_calls" where it ends by itself and its calls are whole."""
        whole = self._calls and not self._parser.unfinished and finish in ("eos", "stop")
        return "tool_calls" if whole else REASONS[finish]


def call_id(form: AnswerFormat) -> str:
    """Return an id for a call: nine letters and digits for Mistral, whose templates take no other."""
    return secrets.token_hex(5)[:9] if form.tools == "mistral" else f"call_{secrets.token_hex(12)}"


# --- log-probabilities. table: the raw bytes of every token id.


def message_logprobs(
    table: Sequence[bytes], ends: Collection[int], ids: Sequence[int], known: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """Return the log-probabilities of a message's tokens, but for those that end it."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        return {"token": _text(table, token), "logprob": logprob, "bytes": list(_bytes(table, token))}

    content = [
        {**written(token, one.logprob), "top_logprobs": [written(*other) for other in one.top]}
        for token, one in zip(ids, known, strict=True)
        if token not in ends
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """Writes the log-probabilities of a text's tokens in their order, each with the place of its own text.

    silent: ids that stand for no text. offset: number of characters before the first token's.
    """

    def __init__(self, table: Sequence[bytes], silent: Collection[int], offset: int = 0) -> None:
        self._table = table
        self._silent = silent
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def end(self) -> int:
        """Return the number of characters up to the end of the last token's text, without one that is not finished."""
        return self._offset

    def write(self, ids: Sequence[int], known: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Return the next tokens' log-probabilities; null for one that has none, as the first of a prompt."""
        return {
            "tokens": [_text(self._table, token) for token in ids],
            "token_logprobs": [None if one is None else one.logprob for one in known],
            "top_logprobs": [
                None if one is None else self._likeliest(token, one) for token, one in zip(ids, known, strict=True)
            ],
            "text_offset": [self._text_offset(token) for token in ids],
        }

    def _likeliest(self, token: int, known: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens, and of the token itself, by their texts."""
        found: dict[str, float] = {}
        for other, value in (*known.top, (token, known.logprob)):
            found.setdefault(_text(self._table, other), value)  # of tokens with one text, the likeliest
        return found

    def _text_offset(self, token: int) -> int:
        """Return where the token's text begins, and count its characters."""
        if token in self._silent:
            return self._offset
        cut, _ = self._decoder.getstate()
        text = self._decoder.decode(_bytes(self._table, token))
        replaced = bool(cut) and text.startswith("\ufffd")  # an earlier character that this token does not finish
        begins = self._offset + replaced
        self._offset += len(text)
        return begins


def _bytes(table: Sequence[bytes], token: int) -> bytes:
    return table[token] if token < len(table) else b""


def _text(table: Sequence[bytes], token: int) -> str:
    """Return a token's text; a part of a character is written as OpenAI does."""
    raw = _bytes(table, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
