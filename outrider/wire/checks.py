"""Check session messages where they come in: from then on they are used as they are.

What one message alone can show is checked here, what needs the session's state (ids without gaps, credit, siblings) by
the session protocol. Every refusal is a BadRequest that names field, value and bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    SessionLimits,
    sampling_of,
    to_score,
)
from outrider.wire import bounds
from outrider.wire.v1 import session_pb2 as pb

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


def check_open(message: pb.Open, *, vocabulary_size: int) -> None:
    """Raise BadRequest for an Open out of bounds. vocabulary_size: token ids at or above it are refused."""
    between("bytes of open.vocabulary_hash", len(message.vocabulary_hash), 0, MAX_HASH_BYTES)
    bounds.text("open.session_id", message.session_id, 1, MAX_SESSION_ID)
    check_attach(message.attach, vocabulary_size=vocabulary_size)


def check_attach(message: pb.Attach, *, vocabulary_size: int) -> None:
    """Raise BadRequest for an Attach out of bounds. vocabulary_size: token ids at or above it are refused."""
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
    between("attach.prompt_logprobs", message.prompt_logprobs, 0, MAX_LOGPROBS)
    last = to_score(message)
    values = last * (1 + message.prompt_logprobs)
    between("length of attach.prompt x (1 + attach.prompt_logprobs)", values, 0, MAX_PROMPT_LOGPROBS)
    # Tokens come after all of the prompt's log-probabilities.
    between("attach.scored", message.scored, last if message.tokens else 0, last)
    _check_ids("attach.sampling.bias_id", message.sampling.bias_id, vocabulary_size)
    for name in ("prompt", "tokens", "stop_token_ids"):
        _check_ids(f"attach.{name}", getattr(message, name), vocabulary_size)
    sampling_of(message.sampling)


def check_append(message: pb.Append, *, vocabulary_size: int) -> None:
    """Raise BadRequest for an Append out of bounds. vocabulary_size: token ids at or above it are refused."""
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


def check_commit(message: pb.Commit) -> None:
    """Raise BadRequest for a Commit out of bounds."""
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
    _check_ids("commit.token", message.token, MAX_VOCABULARY)
    _check_logprobs("commit", message)
    _check_logprobs("commit.prompt", message.prompt)


def _check_logprobs(field: str, message: pb.Commit | pb.PromptLogprobs) -> None:
    """Raise BadRequest unless each token has as many alternatives, and log-probabilities are some."""
    count, alternatives = len(message.logprob), len(message.top_id)
    if len(message.top_logprob) != alternatives or (alternatives % count if count else alternatives):
        raise BadRequest.bound(
            f"lengths of {field}.top_id and {field}.top_logprob",
            f"{alternatives} and {len(message.top_logprob)}",
            f"equal, and as many for each of {count} tokens",
        )
    between(f"alternatives in {field}.top_id", alternatives // count if count else 0, 0, MAX_LOGPROBS)
    for value in (*message.logprob, *message.top_logprob):
        if not -math.inf < value <= _MAX_LOGPROB:
            raise BadRequest.bound("a log-probability in the commit", value, "a number of at most 0")
    _check_ids(f"{field}.top_id", message.top_id, MAX_VOCABULARY)


def limits_of(message: pb.SessionLimits) -> SessionLimits:
    """Return a session's limits. Raises BadRequest for those out of bounds."""
    _check_bounds("limits", message, _LIMITS)
    return SessionLimits(**{name: getattr(message, name) for name in _LIMITS})


def check_directive(message: pb.Directive) -> None:
    """Raise BadRequest for a directive out of bounds."""
    _check_bounds("directive", message, _DIRECTIVE)
    if 0.0 < message.step_ms < _MIN_STEP_MS:
        raise BadRequest.bound("directive.step_ms", message.step_ms, f"0 (not known) or at least {_MIN_STEP_MS}")


def check_ping(message: pb.Ping) -> None:
    """Raise BadRequest for a round trip that none is."""
    between("ping.rtt_ms", message.rtt_ms, 0.0, 1e6)


def check_pong(message: pb.Pong) -> None:
    """Raise BadRequest for a drafting time that none is."""
    between("pong.draft_ms", message.draft_ms, 0.0, 1e6)


def check_draft_in_use(message: pb.DraftInUse) -> None:
    """Raise BadRequest for a draft release that none is; it is empty if the device no longer drafts."""
    bounds.label("draft.release", message.release)


def check_opened(message: pb.Opened) -> None:
    """Raise BadRequest for an Opened out of bounds."""
    between("opened.epoch", message.epoch, 1, _MAX_ID)
    between("opened.vocabulary_size", message.vocabulary_size, 0, MAX_VOCABULARY)
    bounds.text("opened.verifier_id", message.verifier_id, 0, MAX_VERIFIER_ID)
    limits_of(message.limits)
    check_directive(message.directive)


def _check_bounds(kind: str, message: Message, fields: _Bounds) -> None:
    for name, (low, high) in fields.items():
        between(f"{kind}.{name}", getattr(message, name), low, high)


def _check_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and (largest := max(ids)) >= vocabulary_size:
        raise BadRequest.bound(f"a token id in {field}", largest, f"less than {vocabulary_size}, the vocabulary size")
