"""What one request cost and how well its guesses went."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_DIGEST = 64
"""Hex digits of a SHA-256: shorter ones are no release that was published."""


@dataclass(frozen=True)
class Usage:
    """Tokens, as they would be billed; what a stop string cut off is not in it."""

    prompt_tokens: int
    """As the target's tokenizer counts, template and all."""
    completion_tokens: int
    """Of the output."""


@dataclass
class Statistics:
    """Counts of one request, through all its attaches. Times are in seconds from its begin."""

    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    begun: float = field(init=False, repr=False)
    session_id: str = ""
    """Its name at coordinator and verifier, once it has been placed."""
    tokens: int = 0
    """Delivered, a stop string's overrun included."""
    steps: int = 0
    """Commits that brought tokens."""
    evaluated: int = 0
    """Nodes of ours that the target evaluated."""
    drafted: int = 0
    """Nodes sent."""
    accepted: int = 0
    """Delivered tokens that were a guess of ours: the target had evaluated it, and took it."""
    guessed: int = 0
    """Delivered tokens that we had guessed, also those whose guess the target had not seen yet."""
    unverified: int = 0
    """Delivered tokens that the draft wrote alone."""
    attaches: int = 0
    """Streams opened; more than one means that the session was resumed."""
    failovers: int = 0
    """Of them, those at another verifier than the one before."""
    address: str = ""
    """Of the last one's verifier."""
    rtt_ms: float = 0.0
    """As the verifier measured it last; 0 where it has not."""
    appends: int = 0
    """Messages sent, with nodes or with word that none come."""
    bytes_up: int = 0
    """Payload bytes of messages sent, without gRPC's framing."""
    bytes_down: int = 0
    """The same of messages received."""
    first_token_s: float | None = None
    """When the first tokens came; None before they have."""
    last_token_s: float | None = None
    """When the last ones did."""
    draft: str = ""
    """What drafted last: a file's name, "lookup" or "" for none."""
    release: str = ""
    """SHA-256 of the draft's file, where it has one."""
    draft_failure: str = ""
    """Why drafting ended early, if it did."""
    swaps_s: list[float] = field(default_factory=list, repr=False)
    """For each change of the draft meanwhile: from the last that the old one grew to the first of the new one."""
    _first_tokens: int = field(default=0, init=False, repr=False)
    answers_s: list[float] = field(default_factory=list, repr=False)
    """From a Commit that left the verifier without nodes to the first nodes sent after it."""

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def delivered(self, count: int, accepted: int, guessed: int = 0) -> None:
        """One Commit's tokens: of them our guesses that the target took, and all that we had guessed."""
        now = self.clock() - self.begun
        if self.first_token_s is None:
            self.first_token_s, self._first_tokens = now, count
        self.last_token_s = now
        self.tokens += count
        self.accepted += accepted
        self.guessed += guessed
        self.steps += 1

    def attached(self, address: str) -> None:
        """A stream was opened to the verifier at this address."""
        self.attaches += 1
        self.failovers += bool(self.address) and address != self.address
        self.address = address

    def generated_offline(self) -> None:
        """Count a token that the draft generated alone."""
        self.tokens += 1
        self.unverified += 1

    def uses(self, draft: str, release: str, failure: str = "") -> None:
        """Note the draft in use. failure: why it has ended drafting, if it has."""
        self.draft, self.release, self.draft_failure = draft, release, failure

    @property
    def acceptance(self) -> float:
        """Of the guesses that the target has evaluated, the share that it took; 0 where there was none."""
        return min(1.0, self.accepted / self.evaluated) if self.evaluated else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Of the target's tokens; 1 is streaming."""
        return (self.tokens - self.unverified) / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """After the first delivery, whose tokens are not counted."""
        if self.first_token_s is None or self.last_token_s is None or self.last_token_s <= self.first_token_s:
            return 0.0
        return (self.tokens - self._first_tokens) / (self.last_token_s - self.first_token_s)

    @property
    def answer_ms(self) -> float:
        """Median time from a Commit that left the verifier without nodes to our next ones; 0 where it never did."""
        return 1000.0 * statistics.median(self.answers_s) if self.answers_s else 0.0

    def swap_ms(self, quantile: float) -> float:
        """Of the swaps, so many of which took no longer; 0 where there was none. quantile: 0 to 1."""
        ranked = sorted(self.swaps_s)
        return 1000.0 * ranked[min(len(ranked) - 1, int(quantile * len(ranked)))] if ranked else 0.0

    def summary(self) -> str:
        """One line for people."""
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
            + (f"; draft replaced {len(self.swaps_s)} times" if self.swaps_s else "")
            + (f"; drafting ended: {self.draft_failure}" if self.draft_failure else "")
        )
