"""Count what one request cost and how many of its draft tokens were accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_DIGEST = 64
"""Hex digits of a SHA-256: shorter ones are no release that was published."""


@dataclass(frozen=True)
class Usage:
    """The tokens that would be billed; those that a stop string cut off do not count."""

    prompt_tokens: int
    """Tokens of the prompt by the target's tokenizer, with its chat template."""
    completion_tokens: int
    """Tokens of the output."""


@dataclass
class Statistics:
    """Counts what one request does through all its attaches. Times are in seconds since its begin."""

    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    begun: float = field(init=False, repr=False)
    rule: str = "coupled"
    """The acceptance rule; with any other the output is lossy, not the target's own."""
    session_id: str = ""
    """Id of the session at coordinator and verifier, once it has been placed."""
    tokens: int = 0
    """Tokens delivered, with those that a stop string cut off."""
    steps: int = 0
    """Commits that brought tokens."""
    evaluated: int = 0
    """Draft tokens that the target evaluated."""
    drafted: int = 0
    """Draft tokens sent to the verifier."""
    accepted: int = 0
    """Tokens delivered that the target accepted from the draft."""
    proposed: int = 0
    """Tokens delivered that the draft had proposed, evaluated by the target or not."""
    unverified: int = 0
    """Tokens delivered that the draft generated alone."""
    attaches: int = 0
    """Streams opened; more than one means that the session was resumed, or that the output went on in a further one."""
    failovers: int = 0
    """Streams opened to another verifier than the one before."""
    address: str = ""
    """Address of the verifier that was attached last."""
    attach_failure: str = ""
    """Why the last stream ended, or the session has not been placed yet, until a stream brings tokens."""
    rtt_ms: float = 0.0
    """Round trip that the verifier measured last; 0 where it has not."""
    appends: int = 0
    """Messages sent with draft tokens, or to say that none will come."""
    bytes_up: int = 0
    """Payload bytes of the messages sent, without gRPC's framing."""
    bytes_down: int = 0
    """Payload bytes of the messages received, without gRPC's framing."""
    first_token_s: float | None = None
    """Time of the first delivery; None before it."""
    last_token_s: float | None = None
    """Time of the last delivery; None before the first."""
    draft: str = ""
    """The draft in use last: a file's name, "ngram" or "" for none."""
    release: str = ""
    """SHA-256 of the draft's file, where it has one."""
    draft_failure: str = ""
    """Why drafting ended early, or did not begin with the draft that it should have begun with."""
    draft_busy: bool = False
    """Whether all draft workers were in use when the request began: it drafts by n-grams alone, or not at all."""
    swaps_s: list[float] = field(default_factory=list, repr=False)
    """Seconds from the last update of each replaced draft to the first one of its successor."""
    _first_tokens: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def delivered(self, count: int, accepted: int, proposed: int = 0) -> None:
        """Count the tokens of one commit: all, those accepted from the draft, and those that the draft had proposed."""
        now = self.clock() - self.begun
        if self.first_token_s is None:
            self.first_token_s, self._first_tokens = now, count
        self.last_token_s = now
        self.attach_failure = ""
        self.tokens += count
        self.accepted += accepted
        self.proposed += proposed
        self.steps += 1

    def attached(self, address: str) -> None:
        """Count a stream opened to the verifier at this address."""
        self.attaches += 1
        self.failovers += bool(self.address) and address != self.address
        self.address = address

    def generated_offline(self, count: int) -> None:
        """Count tokens that the draft generated alone."""
        self.tokens += count
        self.unverified += count

    def uses(self, draft: str, release: str, failure: str = "") -> None:
        """Note the draft in use. failure: why it has ended drafting, if it has."""
        self.draft, self.release, self.draft_failure = draft, release, failure

    @property
    def acceptance(self) -> float:
        """Return the fraction of the evaluated draft tokens that the target accepted; 0 where there was none."""
        return min(1.0, self.accepted / self.evaluated) if self.evaluated else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the target's tokens per commit; 1 without speculation."""
        return (self.tokens - self.unverified) / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the rate after the first delivery, whose tokens do not count."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return 0.0
        return (self.tokens - self._first_tokens) / (self.last_token_s - self.first_token_s)

    def summary(self) -> str:
        """Return a line that sums up the request for people."""
        ttft = f"{1000 * self.first_token_s:.0f} ms" if self.first_token_s is not None else "never"
        draft = self.draft or "none"
        if len(self.release) == _DIGEST:
            draft += f" (release {self.release[:12]})"
        return (
            f"{self.tokens} tokens{f', {self.unverified} of them unverified,' if self.unverified else ''} in "
            f"{self.steps} steps ({self.tokens_per_step:.2f} per step), "
            f"{self.tokens_per_s:.1f} tokens/s, first after {ttft}; draft {draft}: {self.accepted} accepted of "
            f"{self.drafted} sent; {self.bytes_up} bytes up, {self.bytes_down} down; {self.attaches} attach"
            f"{'' if self.attaches == 1 else 'es'}"
            + (f"; lossy, by the acceptance rule {self.rule}" if self.rule != "coupled" else "")
            + (f"; draft replaced {len(self.swaps_s)} times" if self.swaps_s else "")
            + ("; all draft workers were in use" if self.draft_busy else "")
            + (f"; draft failed: {self.draft_failure}" if self.draft_failure else "")
        )
