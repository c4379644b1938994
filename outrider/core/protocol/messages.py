"""Name the messages between device and verifier, which are those of the wire, bound them, and pack what they hold.

A message is checked once where it comes in (outrider.wire.checks), and used as it is. Positions count generated tokens:
the first generated token has position 0, so `tokens[p]` is the token at position p.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import BadRequest
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.wire.v1.session_pb2 import (
    Append,
    Attach,
    Cancel,
    Commit,
    Directive,
    Open,
    Opened,
    PromptLogprobs,
    Sampling,
)
from outrider.wire.v1.session_pb2 import SessionLimits as LimitsMessage
from outrider.wire.v1.session_pb2 import TypicalAcceptance as TypicalMessage

__all__ = ["Append", "Attach", "Cancel", "Commit", "Directive", "Open", "Opened", "PromptLogprobs", "Sampling"]

MAX_PROMPT_TOKENS = 131_072
MAX_GENERATED_TOKENS = 131_072
MAX_STOP_TOKENS = 64
MAX_APPEND_NODES = 1_024
MAX_SESSION_ID = 128
MAX_VERIFIER_ID = 64
MAX_VOCABULARY = 1 << 24
MAX_LOGPROBS = 20
"""Alternatives for each token, as in OpenAI's API."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""Log-probabilities of a prompt: of its tokens and their alternatives together."""
MAX_SCORED = 256
"""Tokens of a prompt whose log-probabilities one Commit brings: on a slow link a Ping may wait behind it."""
LEAST_ACCEPTANCE = 0.02
"""Lower bound that a device sets to `min_acceptance`: where a verifier's rows cost next to nothing, a node still costs
a part of a decode and three to four bytes up. With steps of 200 ms SmolLM2 and its draft committed 1.57 tokens a step
at temperature 0.8, and 1.40 with 0.1, greedily 2.28 and 2.13. With steps of 25 ms, and with four users of one core,
whose rows are dear, the speed was the same."""
FIRST_DIRECTIVE = Directive(window_nodes=48, window_depth=16, nodes_per_step=12, draft_wait_ms=8)
"""What a device drafts by until its verifier has said more."""


class Finish(enum.IntEnum):
    """Says why a sequence ended; the values are those on the wire."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True)
class SessionLimits:
    """Caps what a session may use in one epoch, as its session token says; directives stay below."""

    nodes: int = 64
    """W: nodes that the device may hold."""
    depth: int = 32
    """D: depth below the root; a child of the root has depth 1."""
    in_flight: int = 96
    """F: ids sent and not yet reported as seen."""
    run_ahead: int = 64
    """C: positions that the verifier may commit beyond the last base received."""
    children: int = 0
    """Children of one node that the target evaluates: 1 if it evaluates chains only; 0 for any number."""

    @property
    def message(self) -> LimitsMessage:
        return LimitsMessage(**vars(self))


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's own log-probabilities at a position, before penalties, bias, temperature and filters."""

    logprob: float
    """Natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, the first most likely."""


def append_message(
    epoch: int, first_id: int, base: int, parents: Sequence[int] = (), tokens: Sequence[int] = (), *, idle: bool = False
) -> Append:
    """Return new nodes: node i has id `first_id + i`, and parent 0 is the committed sequence at position `base`."""
    up = [parent and own - parent for own, parent in enumerate(parents, first_id)]
    return Append(epoch=epoch, first_id=first_id, base=base, up=up, token=tokens, idle=idle)


def parents_of(message: Append) -> list[int]:
    """Return the id of each node's parent, 0 for the committed sequence."""
    return [up and own - up for own, up in enumerate(message.up, message.first_id)]


def pack_logprobs(message: Commit | PromptLogprobs, logprobs: Sequence[TokenLogprobs]) -> None:
    """Put log-probabilities, each with as many alternatives, into a message that has none."""
    message.logprob.extend(one.logprob for one in logprobs)
    message.top_id.extend(token for one in logprobs for token, _ in one.top)
    message.top_logprob.extend(value for one in logprobs for _, value in one.top)


def logprobs_of(message: Commit | PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a message that was checked."""
    count = len(message.logprob)
    each = len(message.top_id) // count if count else 0
    tops = tuple(zip(message.top_id, message.top_logprob, strict=True))
    return tuple(TokenLogprobs(value, tops[i * each : (i + 1) * each]) for i, value in enumerate(message.logprob))


def sampling_message(params: SamplingParams) -> Sampling:
    same = {name: value for name, value in vars(params).items() if name not in ("logit_bias", "typical")}
    bias, rule = params.logit_bias, params.typical
    typical = None if rule is None else TypicalMessage(**vars(rule))
    return Sampling(**same, bias_id=[token for token, _ in bias], bias=[value for _, value in bias], typical=typical)


def sampling_of(message: Sampling) -> SamplingParams:
    """Return sampling parameters. Raises BadRequest for those out of bounds."""
    if len(message.bias) != len(message.bias_id):
        raise BadRequest.bound("length of sampling.bias", len(message.bias), f"{len(message.bias_id)}, that of bias_id")
    rule = message.typical
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
        grammar=message.grammar,
        typical=TypicalAcceptance(rule.epsilon, rule.delta) if message.HasField("typical") else None,
    )


def to_score(attach: Attach) -> int:
    """Return how many tokens of the prompt an Attach has scored in all: none, or all but the first."""
    return len(attach.prompt) - 1 if attach.HasField("prompt_logprobs") else 0
