"""Define the seam between the engine and its target, and the events of the engine.

`Engine` is the only engine: sessions, scheduling, acceptance and protocol are the same for every target. What differs
is how a target computes rows and holds keys and values, which is an executor's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cloud_verifier.engine.session import Capabilities, EngineSession
from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import Commit
from outrider.core.step_cost import StepCost
from outrider.core.verification import TreeBatch, Verified
from outrider.wire.v1 import engine_pb2 as pb


@dataclass(slots=True)
class Committed:
    """A commit that is to be sent to a session's device."""

    session_id: str
    commit: Commit


@dataclass(frozen=True)
class Failed:
    """A session that ended without a last commit; its slots are free."""

    session_id: str
    epoch: int
    error: OutriderError


Event = Committed | Failed
Lap = Callable[[str], None]
"""To be called with the part of a step that has ended: "plan" when its rows are laid out, "forward" when the caller has
its forward pass, and "verify" when it is verified."""


@dataclass(slots=True)
class SessionRows:
    """Lists the rows of one session in a step."""

    session: EngineSession
    chain: int
    """Known tokens to compute, at most those that are pending."""
    batch: TreeBatch | None
    """The nodes, below the last known token; None if some known tokens are left for a later step, or if the session
    is to generate none."""

    @property
    def count(self) -> int:
        return self.chain + (len(self.batch.ids) if self.batch else 0)


@dataclass(frozen=True)
class KVUsage:
    """Counts KV slots: tokens whose keys and values a target holds or can hold."""

    capacity: int
    used: int
    """Slots that hold a token of a live session."""
    reserved: int
    """Slots that live sessions hold or may still take."""
    cached: int
    """Slots with tokens that no live session needs, available to any."""


Completion = Callable[[Lap], list[Verified | OutriderError | None]]
"""Verifies a launched step, as soon as its forward pass has ended."""


class TargetExecutor(Protocol):
    """Computes a target's rows, and holds the keys and values of sessions. Not thread-safe.

    A session is admitted, begun, and ended; between begin and end it takes part in steps, in one at a time. In every
    step the engine prepares the rows of each session, has them computed together, and has the accepted ones kept.
    """

    label: str
    """The target's name for messages."""
    capabilities: Capabilities
    eos_token_ids: tuple[int, ...]
    cost: StepCost
    """What steps cost as measured when the target was loaded; the engine goes on measuring."""
    forward_s: float
    """Seconds that the last completed step's forward pass took the target, whether the caller waited for it or not."""

    @property
    def overlaps(self) -> bool:
        """Return whether `launch` returns before the forward pass has ended, so that a step may be launched while the
        one before is verified; its sessions are others."""

    @property
    def unrecorded(self) -> int:
        """Return the number of tokens of recorded sessions that a failure has kept from being recorded."""

    @property
    def usage(self) -> KVUsage:
        """Return how many KV slots there are and how they are used."""

    def admit(self, session: EngineSession, replaced: EngineSession | None) -> None:
        """Find room for a session and set `session.computed` to the length of its cached prefix, of which no more than
        `session.reusable` tokens count.

        replaced: a live session whose place it takes, which goes on until `begin` unless it is ended.
        Raises Overloaded, without a time to retry after, and then nothing has changed.
        """

    def ready_for(self, grammar: str) -> bool:
        """Return whether all processes that choose tokens have compiled a grammar; those that have not begin to."""

    def begin(self, session: EngineSession) -> None:
        """Reserve what an admitted session can take; the session that it replaces has ended by now."""

    def prepare(self, rows: SessionRows) -> None:
        """Lay out a session's rows of the next step. If this raises, that session fails and no other."""

    def launch(self, rows: Sequence[SessionRows], lap: Lap) -> Completion:
        """Begin a step over prepared rows; the function that is returned ends it, and gives per session its path, its
        error, or None if its prompt goes on. Steps are completed in the order in which they were launched; only what is
        tried again after a failure may overtake one.

        Rows of known tokens that score the prompt (`EngineSession.scored_rows`) give log-probabilities, which the
        session gets by `score` or `scores`; a target may also give them all together with the first token.
        Launching and completing raise Unavailable if the target has gone. After any other exception nothing has
        changed: the caller may try the same rows again, session by session.
        """

    def rows_run(self, rows: Sequence[SessionRows]) -> Sequence[int]:
        """Return how many rows of each session the last completed step has computed: fewer than it was given if the
        target found no room for the session, or more of its prompt in the prefix cache than was known."""

    def hidden_states(self, session: EngineSession) -> torch.Tensor | None:
        """Return the states `[1 + nodes, H]`, which the output layer read, of the last known token and the nodes of a
        session in the last completed step; None where the target does not give them."""

    def keep(self, rows: SessionRows, accepted: Sequence[int]) -> None:
        """Keep the keys and values of a session's chain and accepted nodes, and set `session.computed`.

        The session's tokens have been committed. accepted: rows of the nodes in `rows.batch`.
        """

    def end(self, session: EngineSession, *, cache: bool) -> None:
        """Free what a session holds; harmless if it holds nothing.

        cache: whether its keys and values are sound, so that other sessions may begin with them.
        """

    def take_recorded(self) -> list[pb.EngineEvent]:
        """Return, once, the events of tokens verified since in sessions with `record` set; never raises. Until then the
        logits of these steps are kept."""
