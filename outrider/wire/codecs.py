"""Pairs of `x_to_proto` and `x_from_proto`: protobuf stops here, and everything inbound is held against a bound.

The stateful checks (ids without gaps, credit, siblings) are the session protocol's; here stands what one message alone
can show. Every refusal is a BadRequest that names field, value and bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import (
    MAX_APPEND_NODES,
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_SESSION_ID,
    MAX_STOP_TOKENS,
    MAX_VERIFIER_ID,
    MAX_VOCABULARY,
    Append,
    Attach,
    Cancel,
    Commit,
    Directive,
    Finish,
    SessionLimits,
    TokenLogprobs,
)
from outrider.core.sampling import SamplingParams
from outrider.wire.v1 import session_pb2 as pb

MAX_TICKET_BYTES = 4_096
MAX_HASH_BYTES = 64
_MAX_ID = 2**63 - 1
_MAX_CAP = 65_536
_MIN_STEP_MS = 1e-3
_MOST_LOGPROB = 1e-3
"""Rounding may leave a little more than 0."""
_LABEL = re.compile(r"[A-Za-z0-9._-]{0,64}")
"""A name of the application's or of a release: it may become part of a key."""


@dataclass(frozen=True)
class Open:
    """The first message of a stream."""

    session_id: str
    attach: Attach
    ticket: bytes = b""
    vocabulary_hash: bytes = b""


@dataclass(frozen=True)
class Opened:
    """The verifier's answer to it."""

    epoch: int
    verifier_id: str
    limits: SessionLimits
    directive: Directive
    vocabulary_size: int
    """0 by a verifier that does not tell."""


@dataclass(frozen=True)
class Ping:
    """The verifier's heartbeat; the device sends the nonce back."""

    nonce: int
    rtt_ms: float = 0.0
    """Round trip as the pings so far have shown it; 0 where it is not known."""


def sampling_to_proto(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        bias_id=[token for token, _ in params.logit_bias],
        bias=[value for _, value in params.logit_bias],
    )


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    if len(message.bias) != len(message.bias_id):
        raise BadRequest.bound("length of sampling.bias", len(message.bias), f"{len(message.bias_id)}, that of bias_id")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logit_bias=tuple(zip(message.bias_id, message.bias, strict=True)),
    )


def attach_to_proto(attach: Attach) -> pb.Attach:
    return pb.Attach(
        epoch=attach.epoch,
        prompt=attach.prompt,
        tokens=attach.tokens,
        sampling=sampling_to_proto(attach.sampling),
        max_tokens=attach.max_tokens,
        stop_token_ids=attach.stop_token_ids,
        ignore_eos=attach.ignore_eos,
        logprobs=attach.logprobs,
    )


def attach_from_proto(message: pb.Attach, *, vocabulary_size: int) -> Attach:
    """vocabulary_size: ids at or above it are refused."""
    _between("attach.epoch", message.epoch, 1, _MAX_ID)
    _between("length of attach.prompt", len(message.prompt), 1, MAX_PROMPT_TOKENS)
    _between("attach.max_tokens", message.max_tokens, 1, MAX_GENERATED_TOKENS)
    _between("length of attach.tokens", len(message.tokens), 0, message.max_tokens)
    _between("length of attach.stop_token_ids", len(message.stop_token_ids), 0, MAX_STOP_TOKENS)
    _between("attach.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    _ids("attach.sampling.bias_id", message.sampling.bias_id, vocabulary_size)
    return Attach(
        epoch=message.epoch,
        prompt=_ids("attach.prompt", message.prompt, vocabulary_size),
        tokens=_ids("attach.tokens", message.tokens, vocabulary_size),
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=_ids("attach.stop_token_ids", message.stop_token_ids, vocabulary_size),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def append_to_proto(append: Append) -> pb.Append:
    ids = range(append.first_id, append.first_id + len(append.parents))
    return pb.Append(
        first_id=append.first_id,
        base=append.base,
        up=[parent and own - parent for own, parent in zip(ids, append.parents, strict=True)],
        token=append.tokens,
        idle=append.idle,
    )


def check_append(message: pb.Append, *, vocabulary_size: int) -> None:
    """Check all bounds of an Append that a device sent. Raises BadRequest.

    The verifier's front calls this once for each message, and its engine process builds the Append from what passed
    (`append_from_checked`). vocabulary_size: token ids at or above it are refused.
    """
    first_id, count = message.first_id, len(message.token)
    _between("append.first_id", first_id, 1, _MAX_ID - MAX_APPEND_NODES)
    _between("append.base", message.base, 0, MAX_GENERATED_TOKENS)
    _between("nodes in append.token", count, 0, MAX_APPEND_NODES)
    if len(message.up) != count:
        raise BadRequest.bound("length of append.up", len(message.up), f"{count}, the length of append.token")
    if count and max(message.up) >= first_id:  # possible only for the first nodes of an epoch: check one by one
        for node_id, up in enumerate(message.up, first_id):
            if up >= node_id:
                raise BadRequest.bound(f"append.up[{node_id - first_id}]", up, f"less than {node_id}, the node's id")
    _check_ids("append.token", message.token, vocabulary_size)


def append_from_checked(message: pb.Append, *, epoch: int) -> Append:
    """Build the Append from a message that `check_append` let pass; nothing is checked here.

    epoch: the epoch of the stream, which the message does not repeat.
    """
    first_id = message.first_id
    parents = [up and node_id - up for node_id, up in enumerate(message.up, first_id)]
    return Append(epoch, first_id, message.base, tuple(parents), tuple(message.token), message.idle)


def commit_to_proto(commit: Commit) -> pb.Commit:
    return pb.Commit(
        epoch=commit.epoch,
        start=commit.start,
        token=commit.tokens,
        seen=commit.seen,
        finish=pb.Finish.Name(commit.finish),
        evaluated=commit.evaluated,
        logprob=[one.logprob for one in commit.logprobs],
        top_id=[token for one in commit.logprobs for token, _ in one.top],
        top_logprob=[value for one in commit.logprobs for _, value in one.top],
    )


def commit_from_proto(message: pb.Commit, *, vocabulary_size: int = MAX_VOCABULARY) -> Commit:
    """vocabulary_size: ids at or above it are refused."""
    _between("commit.epoch", message.epoch, 1, _MAX_ID)
    _between("commit.start", message.start, 0, MAX_GENERATED_TOKENS)
    _between("tokens in commit.token", len(message.token), 0, MAX_GENERATED_TOKENS - message.start)
    _between("commit.seen", message.seen, 0, _MAX_ID)
    _between("commit.evaluated", message.evaluated, 0, _MAX_CAP)
    if message.finish not in pb.Finish.values():
        raise BadRequest.bound("commit.finish", message.finish, f"one of {pb.Finish.values()}")
    return Commit(
        epoch=message.epoch,
        start=message.start,
        tokens=_ids("commit.token", message.token, vocabulary_size),
        seen=message.seen,
        finish=Finish(message.finish),
        evaluated=message.evaluated,
        logprobs=_logprobs(message, vocabulary_size),
    )


def _logprobs(message: pb.Commit, vocabulary_size: int) -> tuple[TokenLogprobs, ...]:
    """Of every token or of none, each with as many alternatives."""
    count, told = len(message.logprob), len(message.top_id)
    if count not in (0, len(message.token)):
        raise BadRequest.bound("length of commit.logprob", count, f"0 or {len(message.token)}, that of commit.token")
    if len(message.top_logprob) != told or (told % count if count else told):
        raise BadRequest.bound(
            "lengths of commit.top_id and commit.top_logprob",
            f"{told} and {len(message.top_logprob)}",
            f"equal, and as many for each of {count} tokens",
        )
    each = told // count if count else 0
    _between("alternatives in commit.top_id", each, 0, MAX_LOGPROBS)
    for value in (*message.logprob, *message.top_logprob):
        if not -math.inf < value <= _MOST_LOGPROB:
            raise BadRequest.bound("a log-probability in the commit", value, "a number of at most 0")
    tops = tuple(zip(_ids("commit.top_id", message.top_id, vocabulary_size), message.top_logprob, strict=True))
    return tuple(TokenLogprobs(value, tops[i * each : (i + 1) * each]) for i, value in enumerate(message.logprob))


def cancel_to_proto(cancel: Cancel) -> pb.Cancel:
    return pb.Cancel(epoch=cancel.epoch)


def cancel_from_proto(message: pb.Cancel) -> Cancel:
    _between("cancel.epoch", message.epoch, 1, _MAX_ID)
    return Cancel(message.epoch)


def limits_to_proto(limits: SessionLimits) -> pb.SessionLimits:
    return pb.SessionLimits(
        nodes=limits.nodes, depth=limits.depth, in_flight=limits.in_flight, run_ahead=limits.run_ahead
    )


def limits_from_proto(message: pb.SessionLimits) -> SessionLimits:
    _between("limits.nodes", message.nodes, 0, _MAX_CAP)
    _between("limits.depth", message.depth, 0, _MAX_CAP)
    _between("limits.in_flight", message.in_flight, 0, _MAX_CAP)
    _between("limits.run_ahead", message.run_ahead, 1, _MAX_CAP)
    return SessionLimits(message.nodes, message.depth, message.in_flight, message.run_ahead)


def directive_to_proto(directive: Directive) -> pb.Directive:
    return pb.Directive(
        window_nodes=directive.window_nodes,
        window_depth=directive.window_depth,
        nodes_per_step=directive.nodes_per_step,
        min_acceptance=directive.min_acceptance,
        draft_wait_ms=directive.draft_wait_ms,
        step_ms=directive.step_ms,
    )


def directive_from_proto(message: pb.Directive) -> Directive:
    _between("directive.window_nodes", message.window_nodes, 0, _MAX_CAP)
    _between("directive.window_depth", message.window_depth, 0, _MAX_CAP)
    _between("directive.nodes_per_step", message.nodes_per_step, 0, _MAX_CAP)
    _between("directive.min_acceptance", message.min_acceptance, 0.0, 1.0)
    _between("directive.draft_wait_ms", message.draft_wait_ms, 0, 60_000)
    _between("directive.step_ms", message.step_ms, 0.0, 1e6)
    if 0.0 < message.step_ms < _MIN_STEP_MS:
        raise BadRequest.bound("directive.step_ms", message.step_ms, f"0 (not known) or at least {_MIN_STEP_MS}")
    return Directive(
        window_nodes=message.window_nodes,
        window_depth=message.window_depth,
        nodes_per_step=message.nodes_per_step,
        min_acceptance=message.min_acceptance,
        draft_wait_ms=message.draft_wait_ms,
        step_ms=message.step_ms,
    )


def ping_to_proto(ping: Ping) -> pb.Ping:
    return pb.Ping(nonce=ping.nonce, rtt_ms=ping.rtt_ms)


def ping_from_proto(message: pb.Ping) -> Ping:
    _between("ping.rtt_ms", message.rtt_ms, 0.0, 1e6)
    return Ping(message.nonce, message.rtt_ms)


def draft_in_use_from_proto(message: pb.DraftInUse) -> str:
    """The release; empty where the device drafts no longer."""
    if not _LABEL.fullmatch(message.release):
        raise BadRequest.bound("draft.release", repr(message.release[:80]), "at most 64 letters, digits, '.', '_', '-'")
    return message.release


def open_to_proto(message: Open) -> pb.Open:
    return pb.Open(
        session_id=message.session_id,
        ticket=message.ticket,
        attach=attach_to_proto(message.attach),
        vocabulary_hash=message.vocabulary_hash,
    )


def open_from_proto(message: pb.Open, *, vocabulary_size: int) -> Open:
    _between("length of open.session_id", len(message.session_id), 1, MAX_SESSION_ID)
    _printable("open.session_id", message.session_id)
    _between("bytes of open.ticket", len(message.ticket), 0, MAX_TICKET_BYTES)
    _between("bytes of open.vocabulary_hash", len(message.vocabulary_hash), 0, MAX_HASH_BYTES)
    return Open(
        session_id=message.session_id,
        attach=attach_from_proto(message.attach, vocabulary_size=vocabulary_size),
        ticket=message.ticket,
        vocabulary_hash=message.vocabulary_hash,
    )


def opened_to_proto(message: Opened) -> pb.Opened:
    return pb.Opened(
        epoch=message.epoch,
        verifier_id=message.verifier_id,
        limits=limits_to_proto(message.limits),
        directive=directive_to_proto(message.directive),
        vocabulary_size=message.vocabulary_size,
    )


def opened_from_proto(message: pb.Opened) -> Opened:
    _between("opened.epoch", message.epoch, 1, _MAX_ID)
    _between("length of opened.verifier_id", len(message.verifier_id), 0, MAX_VERIFIER_ID)
    _printable("opened.verifier_id", message.verifier_id)
    _between("opened.vocabulary_size", message.vocabulary_size, 0, MAX_VOCABULARY)
    return Opened(
        epoch=message.epoch,
        verifier_id=message.verifier_id,
        limits=limits_from_proto(message.limits),
        directive=directive_from_proto(message.directive),
        vocabulary_size=message.vocabulary_size,
    )


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest.bound(field, value, f"between {low} and {high}")


def _printable(field: str, text: str) -> None:
    """It goes into logs and into what people see."""
    if not text.isprintable():
        raise BadRequest.bound(field, repr(text), "printable text")


def _ids(field: str, values: Iterable[int], vocabulary_size: int) -> tuple[int, ...]:
    ids = tuple(values)
    _check_ids(field, ids, vocabulary_size)
    return ids


def _check_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and (largest := max(ids)) >= vocabulary_size:
        raise BadRequest.bound(f"a token id in {field}", largest, f"less than {vocabulary_size}, the vocabulary size")
