"""Define the messages between device and verifier as plain data, with their bounds; the wire codecs translate.

Positions count generated tokens: the first generated token has position 0, so `tokens[p]` is the token at position p.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.core.sampling import SamplingParams

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


class Finish(enum.IntEnum):
    """Says why a sequence ended; the values are those on the wire."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True)
class SessionLimits:
    """Caps what a session may use in one epoch, as the verifier sets it; directives stay below."""

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


@dataclass(frozen=True)
class Directive:
    """The speculation window of a session, sent on the stream when it changes, always below the session's limits."""

    window_nodes: int = 48
    window_depth: int = 16
    nodes_per_step: int = 12
    """Nodes to verify in one step."""
    min_acceptance: float = 0.05
    """Least probability of acceptance, 0 to 1, at which a node is worth sending."""
    draft_wait_ms: int = 8
    """Time that the verifier waits for nodes before a plain step."""
    step_ms: float = 0.0
    """The target's recent step time; 0 if it is not yet known."""


@dataclass(frozen=True)
class Attach:
    """A message that opens or resumes a session: all that the verifier needs, since the device holds durable state."""

    epoch: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    """Generated tokens received so far."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    """Length of the whole generated sequence, `tokens` included; 0 only with `prompt_logprobs`."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence as EOS does, besides the target's own."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Most likely alternatives to send with each token's log-probability, 0 to MAX_LOGPROBS; None: send neither."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    scored: int = 0
    """Tokens of the prompt whose log-probabilities the device has received."""
    min_tokens: int = 0
    """Position before which no id that ends the sequence may come, unless its grammar leaves nothing else."""
    undrafted: bool = False
    """Whether the verifier adds no draft tokens of its own."""

    @property
    def to_score(self) -> int:
        """Return how many tokens of the prompt are scored in all: none, or all but the first."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's own log-probabilities at a position, before penalties, bias, temperature and filters."""

    logprob: float
    """Natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, the first most likely."""


@dataclass(frozen=True)
class Append:
    """New nodes, of which node i has id `first_id + i`; parent 0 is the committed sequence at position `base`."""

    epoch: int
    first_id: int
    base: int
    """Tokens received by the device when it sent this."""
    parents: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    idle: bool = False
    """Whether nothing more will come before the next Commit."""


@dataclass(frozen=True)
class Commit:
    """The tokens that the target produced, from position `start` on."""

    epoch: int
    start: int
    tokens: tuple[int, ...]
    seen: int
    """The highest node id ingested, dead ones included."""
    finish: Finish = Finish.NONE
    evaluated: int = 0
    """Nodes that this step's forward pass covered; 0 is a plain step."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token if Attach asked for them."""
    scored: int = 0
    """Tokens of the prompt that were scored before `prompt_logprobs`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt's next tokens, at most MAX_SCORED, if Attach asked for them."""


@dataclass(frozen=True)
class Cancel:
    """The device ends the session."""

    epoch: int
