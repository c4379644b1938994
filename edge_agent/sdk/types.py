"""What a client asks for and what it gets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

from edge_agent.sdk.timeout import DEFAULT_TIMEOUT, Timeout
from edge_agent.session.statistics import Statistics, Usage
from edge_agent.target.detokenizer import check_stops
from edge_agent.validation import label, real, refuse, token_ids, truth, whole
from outrider.core.errors import BadRequest
from outrider.core.processors import SamplingParams
from outrider.core.protocol.messages import (
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKENS,
    TokenLogprobs,
)

TOO_LONG = frozenset({"length of prompt", "prompt plus max_tokens"})
"""Fields of the BadRequest for a prompt that the target cannot hold."""

OPEN_END = 1024
"""Tokens of a request that names no number."""
MAX_RETRIES = 100
DEFAULT_RETRIES = 2

FinishReason = Literal["eos", "length", "stop", "cancelled"]
Provenance = Literal["draft", "target"]
"""Of a token: a guess of this device, or the target's own work. Either way it is what the target alone would say, but
where `verified` is False."""
Offline = Literal["raise", "draft_only"]
"""What happens where no verifier can be reached: an error, or the draft model writes alone, marked `verified=False`."""


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `stream_chat`; SamplingParams explains those of sampling.

    max_tokens: 256 unless told; None: 1,024, or what the target can still hold.
    seed: 64 bits; random unless told.
    stop: texts that end the output, and are not in it.
    stop_token_ids: ids that end it as the target's own end does; at most 64.
    ignore_eos: go on past the target's own end.
    logprobs: the target's log-probability of each token, with so many of its likeliest alternatives (0 to 20); None:
    tell nothing, which is faster.
    logit_bias: token id -> what is added to its logit.
    traffic_class, timeout, retries, offline: as of the client, for this request.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    traffic_class: str
    timeout: Timeout | float | None
    retries: int
    offline: Offline
    logprobs: int | None
    logit_bias: Mapping[int, float] | None


@dataclass(frozen=True)
class Request:
    """A request whose values are within their bounds."""

    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    traffic_class: str = ""
    """The application's label for what it asks: how guesses did is measured apart for each."""
    timeout: Timeout = DEFAULT_TIMEOUT
    retries: int = DEFAULT_RETRIES
    """How often it may begin again before its first token."""
    offline: Offline = "raise"
    logprobs: int | None = None
    fits: bool = False
    """Whether `max_tokens` becomes less where the target can hold no more after the prompt."""

    @classmethod
    def of(cls, **options: Unpack[Options]) -> Request:
        """Defaults: 256 tokens, greedy, a random 64-bit seed. Raises BadRequest naming the option.

        max_tokens None: OPEN_END of them, or as many as the target can hold where that is less.
        """
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            raise BadRequest(
                f"unknown option {sorted(unknown)[0]!r}; known are {', '.join(sorted(Options.__annotations__))}"
            )
        most = options.get("max_tokens", 256)
        max_tokens = OPEN_END if most is None else whole("max_tokens", most)
        if not 1 <= max_tokens <= MAX_GENERATED_TOKENS:
            raise BadRequest.bound("max_tokens", max_tokens, f"between 1 and {MAX_GENERATED_TOKENS}")
        stop_token_ids = token_ids("stop_token_ids", options.get("stop_token_ids", ()))
        if len(stop_token_ids) > MAX_STOP_TOKENS:
            raise BadRequest.bound("number of stop_token_ids", len(stop_token_ids), f"at most {MAX_STOP_TOKENS}")
        seed = options.get("seed")
        return cls(
            max_tokens,
            SamplingParams(
                temperature=real("temperature", options.get("temperature", 0.0)),
                top_k=whole("top_k", options.get("top_k", 0)),
                top_p=real("top_p", options.get("top_p", 1.0)),
                min_p=real("min_p", options.get("min_p", 0.0)),
                repetition_penalty=real("repetition_penalty", options.get("repetition_penalty", 1.0)),
                presence_penalty=real("presence_penalty", options.get("presence_penalty", 0.0)),
                frequency_penalty=real("frequency_penalty", options.get("frequency_penalty", 0.0)),
                seed=secrets.randbits(64) if seed is None else whole("seed", seed),
                logit_bias=_bias(options.get("logit_bias")),
            ),
            check_stops(options.get("stop")),
            stop_token_ids,
            truth("ignore_eos", options.get("ignore_eos", False)),
            label("traffic_class", options.get("traffic_class", "")),
            Timeout.of(options.get("timeout", DEFAULT_TIMEOUT)),
            _retries(options.get("retries", DEFAULT_RETRIES)),
            _offline(options.get("offline", "raise")),
            _logprobs(options.get("logprobs")),
            most is None,
        )

    def after(self, prompt_tokens: int, max_sequence: int) -> Request:
        """For a target that holds so many tokens, of which the prompt takes some; 0: nobody knows how many."""
        left = max_sequence - prompt_tokens
        return replace(self, max_tokens=left, fits=False) if self.fits and 0 < left < self.max_tokens else self


def _logprobs(value: object) -> int | None:
    if value is None:
        return None
    count = whole("logprobs", value)
    if not 0 <= count <= MAX_LOGPROBS:
        raise BadRequest.bound("logprobs", count, f"between 0 and {MAX_LOGPROBS}, or None")
    return count


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        refuse("logit_bias", value, "a mapping of token ids to numbers")
    return tuple((whole("a token id in logit_bias", k), real("a value in logit_bias", v)) for k, v in value.items())


def _retries(value: object) -> int:
    retries = whole("retries", value)
    if not 0 <= retries <= MAX_RETRIES:
        raise BadRequest.bound("retries", retries, f"between 0 and {MAX_RETRIES}")
    return retries


def _offline(value: object) -> Offline:
    if value == "raise" or value == "draft_only":
        return value
    return refuse("offline", value, '"raise" or "draft_only"')


def prompt_of(prompt: object) -> str | tuple[int, ...]:
    """A text or token ids. Raises BadRequest for anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list | tuple):
        _check_length(len(prompt))  # before a look at each
    return token_ids("prompt", prompt)


def check_text(text: str, longest: int, max_sequence: int) -> None:
    """Raises BadRequest for a text that is too long whatever its tokens are, which are not known yet.

    longest: bytes of the target's longest token. max_sequence: 0 where nobody knows it.
    """
    tokens = min(max_sequence or MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
    if len(text) > tokens * longest:  # a character is at least a byte
        raise BadRequest.bound(
            "length of prompt",
            f"{len(text)} characters",
            f"at most {tokens * longest}, {tokens} of the target's longest tokens; shorten it",
        )


def check_prompt(ids: Sequence[int], max_tokens: int, vocabulary_size: int, max_sequence: int) -> tuple[int, ...]:
    """The prompt's ids, if the target can take them. Raises BadRequest."""
    _check_length(len(ids))
    check_ids("prompt", ids, vocabulary_size)
    if max_sequence and len(ids) + max_tokens > max_sequence:
        raise BadRequest.bound(
            "prompt plus max_tokens",
            f"{len(ids)} + {max_tokens}",
            f"at most {max_sequence}, which is all that the target can hold",
        )
    return tuple(ids)


def _check_length(tokens: int) -> None:
    """Of a prompt. Raises BadRequest."""
    if not tokens:
        raise BadRequest("the prompt is empty, must have at least one token", field="prompt")
    if tokens > MAX_PROMPT_TOKENS:
        raise BadRequest.bound("length of prompt", f"{tokens} tokens", f"at most {MAX_PROMPT_TOKENS}")


def check_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> None:
    """Raises BadRequest for an id that the target does not know."""
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary_size:
        wrong = next(i for i in ids if not 0 <= i < vocabulary_size)
        raise BadRequest.bound(f"a token id in {field}", wrong, f"between 0 and {vocabulary_size - 1}")


@dataclass(frozen=True)
class Chunk:
    """What one Commit brought, or the draft alone wrote."""

    text: str
    """May be empty: a character or a stop string may still be incomplete."""
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token, whether it is a guess of this device, which the target evaluated and took; see `provenance`."""
    verified: bool = True
    """False: the draft alone wrote it, since no verifier could be reached; the target may have said something else."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per token, where they were asked for."""

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Who wrote each token."""
        return provenance_of(self.drafted)


def provenance_of(drafted: Sequence[bool]) -> tuple[Provenance, ...]:
    return tuple("draft" if own else "target" for own in drafted)


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    text: str
    """Of the output, without the prompt and without a stop text."""
    token_ids: tuple[int, ...]
    """The same as ids."""
    drafted: tuple[bool, ...]
    """As in Chunk."""
    verified: bool
    """Whether all of it is the target's; False where the draft has written some of it alone."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """As in Chunk."""
    finish_reason: FinishReason
    """"eos" (the target's own end, or a stop id), "length", "stop" (a stop text) or "cancelled"."""
    usage: Usage
    seed: int
    """With the same target, prompt and parameters it gives the same tokens again."""
    session_id: str
    """Its name at coordinator and verifier, as in their logs."""
    statistics: Statistics

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Who wrote each token."""
        return provenance_of(self.drafted)
