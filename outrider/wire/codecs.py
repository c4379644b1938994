"""Convert session messages to protobuf and back, in pairs of `x_to_proto` and `x_from_proto`.

Everything inbound is held against a bound: what one message alone can show is checked here, what needs the session's
state (ids without gaps, credit, siblings) by the session protocol. Every refusal is a BadRequest that names field,
value and bound. Fields that have the same names on both sides are not repeated.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from outrider.core.errors import BadRequest, between
from outrider.core.protocol.messages import (
    MAX_APPEND_NODES,
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_SCORED,
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
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.wire import bounds
from outrider.wire.v1 import session_pb2 as pb

T = TypeVar("T")
_Bounds = Mapping[str, tuple[float, float]]
"""Field -> its least and its greatest value."""

MAX_TICKET_BYTES = 4_096
MAX_HASH_BYTES = 64
_MAX_ID = 2**63 - 1
_MAX_CAP = 65_536
_MIN_STEP_MS = 1e-3
_MAX_LOGPROB = 1e-3
"""Rounding may leave a little more than 0."""
_LIMITS: _Bounds = {
    **dict.fromkeys(("nodes", "depth", "in_flight", "children"), (0, _MAX_CAP)),
    "run_ahead": (1, _MAX_CAP),
}
_DIRECTIVE: _Bounds = {
    "window_nodes": (0, _MAX_CAP),
    "window_depth": (0, _MAX_CAP),
    "nodes_per_step": (0, _MAX_CAP),
    "min_acceptance": (0.0, 1.0),
    "draft_wait_ms": (0, 60_000),
    "step_ms": (0.0, 1e6),
}


@dataclass(frozen=True)
class Open:
    """The message that a stream begins with."""

    session_id: str
    attach: Attach
    vocabulary_hash: bytes = b""


@dataclass(frozen=True)
class Opened:
    """The message with which a verifier answers an Open."""

    epoch: int
    verifier_id: str
    limits: SessionLimits
    directive: Directive
    vocabulary_size: int
    """0 if the verifier does not say."""


def built(cls: type[T], message: Message, **converted: Any) -> T:
    """Return a dataclass whose fields are those of the same names in a message, but for the converted ones."""
    names, values_of = _other_fields(cls, tuple(converted))  # type: ignore[arg-type]
    return cls(**dict(zip(names, values_of(message), strict=True)), **converted)


@functools.cache
def _other_fields(cls: Any, converted: tuple[str, ...]) -> tuple[tuple[str, ...], Callable[[Message], tuple[Any, ...]]]:
    """Return the names of a dataclass's fields but for the converted ones, and a function that reads them."""
    names = tuple(field.name for field in fields(cls) if field.name not in converted)
    if len(names) < 2:
        return names, lambda message: tuple(getattr(message, name) for name in names)
    return names, operator.attrgetter(*names)


def sampling_to_proto(params: SamplingParams) -> pb.Sampling:
    same = {name: value for name, value in vars(params).items() if name not in ("logit_bias", "typical")}
    bias, rule = params.logit_bias, params.typical
    typical = None if rule is None else pb.TypicalAcceptance(**vars(rule))
    return pb.Sampling(**same, bias_id=[token for token, _ in bias], bias=[value for _, value in bias], typical=typical)


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    """Decode sampling parameters. Raises BadRequest, for bounds that SamplingParams checks, too."""
    if len(message.bias) != len(message.bias_id):
        raise BadRequest.bound("length of sampling.bias", len(message.bias), f"{len(message.bias_id)}, that of bias_id")
    bias = tuple(zip(message.bias_id, message.bias, strict=True))
    typical = built(TypicalAcceptance, message.typical) if message.HasField("typical") else None
    return built(SamplingParams, message, logit_bias=bias, typical=typical)


def attach_to_proto(attach: Attach) -> pb.Attach:
    return pb.Attach(**(vars(attach) | {"sampling": sampling_to_proto(attach.sampling)}))


def attach_from_proto(message: pb.Attach, *, vocabulary_size: int) -> Attach:
    """Decode the message. Raises BadRequest. vocabulary_size: token ids at or above it are refused."""
    between("attach.epoch", message.epoch, 1, _MAX_ID)
    between("length of attach.prompt", len(message.prompt), 1, MAX_PROMPT_TOKENS)
    scores = message.HasField("prompt_logprobs")
    between("attach.max_tokens", message.max_tokens, 0 if scores else 1, MAX_GENERATED_TOKENS)
    between("length of attach.tokens", len(message.tokens), 0, message.max_tokens)
    between("length of attach.stop_token_ids", len(message.stop_token_ids), 0, MAX_STOP_TOKENS)
    between("attach.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    between("attach.min_tokens", message.min_tokens, 0, message.max_tokens)
    if message.sampling.grammar and message.ignore_eos:
        raise BadRequest.bound("attach.ignore_eos", "true", "false with a grammar, which says where the output may end")
    _check_scoring(message)
    _check_ids("attach.sampling.bias_id", message.sampling.bias_id, vocabulary_size)
    for name in ("prompt", "tokens", "stop_token_ids"):
        _check_ids(f"attach.{name}", getattr(message, name), vocabulary_size)
    return attach_from_checked(message)


def _check_scoring(message: pb.Attach) -> None:
    between("attach.prompt_logprobs", message.prompt_logprobs, 0, MAX_LOGPROBS)
    last = len(message.prompt) - 1 if message.HasField("prompt_logprobs") else 0
    values = last * (1 + message.prompt_logprobs)
    between("length of attach.prompt x (1 + attach.prompt_logprobs)", values, 0, MAX_PROMPT_LOGPROBS)
    # Tokens come after all of the prompt's log-probabilities.
    between("attach.scored", message.scored, last if message.tokens else 0, last)


def attach_from_checked(message: pb.Attach) -> Attach:
    """Build the Attach from a message that `attach_from_proto` let pass; only its sampling is checked again."""
    return built(
        Attach,
        message,
        prompt=tuple(message.prompt),
        tokens=tuple(message.tokens),
        sampling=sampling_from_proto(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
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
    first_id, ups, tokens = message.first_id, message.up, message.token
    count = len(tokens)
    between("append.first_id", first_id, 1, _MAX_ID - MAX_APPEND_NODES)
    between("append.base", message.base, 0, MAX_GENERATED_TOKENS)
    between("nodes in append.token", count, 0, MAX_APPEND_NODES)
    if len(ups) != count:
        raise BadRequest.bound("length of append.up", len(ups), f"{count}, the length of append.token")
    if count and max(ups) >= first_id:  # possible only for the first nodes of an epoch: check one by one
        for node_id, up in enumerate(ups, first_id):
            if up >= node_id:
                raise BadRequest.bound(f"append.up[{node_id - first_id}]", up, f"less than {node_id}, the node's id")
    _check_ids("append.token", tokens, vocabulary_size)


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
        **_logprobs_to_proto(commit.logprobs),
        prompt=pb.PromptLogprobs(start=commit.scored, **_logprobs_to_proto(commit.prompt_logprobs))
        if commit.scored or commit.prompt_logprobs
        else None,
    )


def _logprobs_to_proto(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {
        "logprob": [one.logprob for one in logprobs],
        "top_id": [token for one in logprobs for token, _ in one.top],
        "top_logprob": [value for one in logprobs for _, value in one.top],
    }


def commit_from_proto(message: pb.Commit, *, vocabulary_size: int = MAX_VOCABULARY) -> Commit:
    """Decode the message. Raises BadRequest. vocabulary_size: token ids at or above it are refused."""
    between("commit.epoch", message.epoch, 1, _MAX_ID)
    between("commit.start", message.start, 0, MAX_GENERATED_TOKENS)
    between("tokens in commit.token", len(message.token), 0, MAX_GENERATED_TOKENS - message.start)
    between("commit.seen", message.seen, 0, _MAX_ID)
    between("commit.evaluated", message.evaluated, 0, _MAX_CAP)
    if message.finish not in pb.Finish.values():
        raise BadRequest.bound("commit.finish", message.finish, f"one of {pb.Finish.values()}")
    if len(message.logprob) not in (0, len(message.token)):
        expected = f"0 or {len(message.token)}, that of commit.token"
        raise BadRequest.bound("length of commit.logprob", len(message.logprob), expected)
    between("commit.prompt.start", message.prompt.start, 0, MAX_PROMPT_TOKENS)
    between("length of commit.prompt.logprob", len(message.prompt.logprob), 0, MAX_SCORED)
    return Commit(
        epoch=message.epoch,
        start=message.start,
        tokens=_ids("commit.token", message.token, vocabulary_size),
        seen=message.seen,
        finish=Finish(message.finish),
        evaluated=message.evaluated,
        logprobs=_logprobs("commit", message, vocabulary_size),
        scored=message.prompt.start,
        prompt_logprobs=_logprobs("commit.prompt", message.prompt, vocabulary_size),
    )


def _logprobs(field: str, message: pb.Commit | pb.PromptLogprobs, vocabulary_size: int) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of tokens, each with as many alternatives. Raises BadRequest."""
    count, alternatives = len(message.logprob), len(message.top_id)
    if len(message.top_logprob) != alternatives or (alternatives % count if count else alternatives):
        raise BadRequest.bound(
            f"lengths of {field}.top_id and {field}.top_logprob",
            f"{alternatives} and {len(message.top_logprob)}",
            f"equal, and as many for each of {count} tokens",
        )
    each = alternatives // count if count else 0
    between(f"alternatives in {field}.top_id", each, 0, MAX_LOGPROBS)
    for value in (*message.logprob, *message.top_logprob):
        if not -math.inf < value <= _MAX_LOGPROB:
            raise BadRequest.bound("a log-probability in the commit", value, "a number of at most 0")
    tops = tuple(zip(_ids(f"{field}.top_id", message.top_id, vocabulary_size), message.top_logprob, strict=True))
    return tuple(TokenLogprobs(value, tops[i * each : (i + 1) * each]) for i, value in enumerate(message.logprob))


def cancel_to_proto(cancel: Cancel) -> pb.Cancel:
    return pb.Cancel(epoch=cancel.epoch)


def cancel_from_proto(message: pb.Cancel) -> Cancel:
    between("cancel.epoch", message.epoch, 1, _MAX_ID)
    return Cancel(message.epoch)


def limits_to_proto(limits: SessionLimits) -> pb.SessionLimits:
    return pb.SessionLimits(**vars(limits))


def limits_from_proto(message: pb.SessionLimits) -> SessionLimits:
    return SessionLimits(**_bounded("limits", message, _LIMITS))


def directive_to_proto(directive: Directive) -> pb.Directive:
    return pb.Directive(**vars(directive))


def directive_from_proto(message: pb.Directive) -> Directive:
    values = _bounded("directive", message, _DIRECTIVE)
    if 0.0 < message.step_ms < _MIN_STEP_MS:
        raise BadRequest.bound("directive.step_ms", message.step_ms, f"0 (not known) or at least {_MIN_STEP_MS}")
    return Directive(**values)


def check_ping(message: pb.Ping) -> None:
    """Raise BadRequest for a round trip that none is."""
    between("ping.rtt_ms", message.rtt_ms, 0.0, 1e6)


def draft_in_use_from_proto(message: pb.DraftInUse) -> str:
    """Return the draft release; empty if the device no longer drafts."""
    return bounds.label("draft.release", message.release)


def open_to_proto(message: Open) -> pb.Open:
    return pb.Open(**(vars(message) | {"attach": attach_to_proto(message.attach)}))


def open_from_proto(message: pb.Open, *, vocabulary_size: int) -> Open:
    between("bytes of open.vocabulary_hash", len(message.vocabulary_hash), 0, MAX_HASH_BYTES)
    bounds.text("open.session_id", message.session_id, 1, MAX_SESSION_ID)
    return built(Open, message, attach=attach_from_proto(message.attach, vocabulary_size=vocabulary_size))


def opened_to_proto(message: Opened) -> pb.Opened:
    converted = {"limits": limits_to_proto(message.limits), "directive": directive_to_proto(message.directive)}
    return pb.Opened(**(vars(message) | converted))


def opened_from_proto(message: pb.Opened) -> Opened:
    between("opened.epoch", message.epoch, 1, _MAX_ID)
    between("opened.vocabulary_size", message.vocabulary_size, 0, MAX_VOCABULARY)
    bounds.text("opened.verifier_id", message.verifier_id, 0, MAX_VERIFIER_ID)
    limits, directive = limits_from_proto(message.limits), directive_from_proto(message.directive)
    return built(Opened, message, limits=limits, directive=directive)


def _bounded(kind: str, message: Message, bounds: _Bounds) -> dict[str, Any]:
    """Return the values of these fields. Raises BadRequest for one out of its bounds."""
    values = {name: getattr(message, name) for name in bounds}
    for name, (low, high) in bounds.items():
        between(f"{kind}.{name}", values[name], low, high)
    return values


def _ids(field: str, values: Iterable[int], vocabulary_size: int) -> tuple[int, ...]:
    ids = tuple(values)
    _check_ids(field, ids, vocabulary_size)
    return ids


def _check_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and (largest := max(ids)) >= vocabulary_size:
        raise BadRequest.bound(f"a token id in {field}", largest, f"less than {vocabulary_size}, the vocabulary size")
