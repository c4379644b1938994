"""Try new heads with a share of the sessions, and decide by what their proposals would have gained.

A session has one version of the heads from its first proposal to its end. What counts is how many of the tokens that
the target went on to choose stand in the proposed tree, step by step, whatever else was evaluated: a session is one
sample, its mean over steps. The canary becomes stable after enough sessions unless it is worse than the heads that are
stable, with confidence; where none are, it must gain something. A canary that raises or cannot be loaded is rolled back
at once. Sessions whose canary is rolled back, by this verifier or another, go on without heads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cloud_verifier.engine.server_draft.base import EvaluatedRows, ProposalRequest, ProposedTree
from cloud_verifier.engine.server_draft.heads import MAX_SESSIONS, HeadsSource
from cloud_verifier.engine.server_draft.heads_folder import HeadsFolder
from cloud_verifier.engine.session import EngineSession
from outrider.core.errors import BadRequest, ModelRefused, OutriderError
from outrider.core.tree import ROOT

log = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between two looks for new heads."""
CANARY_SHARE = 4
"""One session in so many has the canary."""
LEAST_STEPS = 8
"""Steps of a session that counts."""
LEAST_SESSIONS = 12
"""Sessions with the canary, and without it, before it can be rolled back."""
MOST_SESSIONS = 40
"""Sessions with the canary, and without it, after which it is decided upon."""
LEAST_GAIN = 0.05
"""Tokens a step, proposed right, that heads must reach: a step gives one token without them, and to find out again and
again that a source does not pay costs 1 to 6% (docs/benchmarks.md)."""
WORSE = 2.6
"""Standard errors by which a canary is worse that is rolled back: at every look, one equal one in 200."""


@dataclass
class Arm:
    """Gathers the sessions with one version of the heads: their number, the sum of their means, and of the squares."""

    sessions: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, mean: float) -> None:
        """Add a session, with the mean of its tokens that were proposed right in a step."""
        self.sessions += 1
        self.total += mean
        self.squares += mean * mean

    @property
    def mean(self) -> float:
        return self.total / self.sessions if self.sessions else 0.0

    @property
    def error(self) -> float:
        """Return the standard error of the mean; infinite for fewer than two sessions."""
        if self.sessions < 2:
            return math.inf
        variance = max(0.0, self.squares - self.sessions * self.mean**2) / (self.sessions - 1)
        return math.sqrt(variance / self.sessions)


def has_canary(session_id: str) -> bool:
    """Return whether a session is one of those with the canary: the same on every verifier."""
    return hashlib.sha256(session_id.encode()).digest()[0] % CANARY_SHARE == 0


def verdict(canary: Arm, stable: Arm) -> Literal["stable", "rolled_back"] | None:
    """Return what becomes of a canary; None while more sessions are needed.

    stable: of the sessions with the stable heads, or with none at all.
    """
    if min(canary.sessions, stable.sessions) < LEAST_SESSIONS:
        return None
    worse = canary.mean < stable.mean - WORSE * math.hypot(canary.error, stable.error)
    if worse or canary.mean < LEAST_GAIN - WORSE * canary.error:
        return "rolled_back"
    if min(canary.sessions, stable.sessions) < MOST_SESSIONS:
        return None
    return "stable" if canary.mean >= LEAST_GAIN else "rolled_back"


@dataclass
class _Session:
    """A session's version of the heads, and what its proposals were worth."""

    source: HeadsSource | None
    canary: str
    """Digest of the canary that it has, or had until it was rolled back; empty with the stable heads, or with none."""
    steps: int = 0
    right: int = 0
    proposed: tuple[int, ProposedTree] | None = None
    """(tokens known, tree) of the last proposal."""


@dataclass
class _Version:
    """Heads that are loaded."""

    digest: str
    source: HeadsSource


@dataclass
class _Trial:
    """A comparison of the sessions with a canary and those without."""

    canary: Arm = field(default_factory=Arm)
    stable: Arm = field(default_factory=Arm)


class ServedHeads:
    """Implements ServerSource over the heads in a folder, which it looks at again and again."""

    name = "heads"
    max_sessions = MAX_SESSIONS
    wants_top = 0
    wants_hidden = True
    read = (0, 0.0)

    def __init__(
        self,
        folder: HeadsFolder,
        load: Callable[[Path], HeadsSource],
        *,
        pauses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load: returns a source over a file of heads. Raises ModelRefused for a damaged folder, and for stable heads
        that cannot be loaded."""
        self.pauses = pauses
        self._folder = folder
        self._load = load
        self._clock = clock
        self._stable: _Version | None = None
        self._canary: _Version | None = None
        self._trial = _Trial()
        self._sessions: dict[str, _Session] = {}
        self._changed = -1.0
        self._looked = clock()
        self._look()

    def unread(self, session: EngineSession) -> int:
        return 0

    def observe(self, session: EngineSession, rows: EvaluatedRows) -> None:
        if self._clock() >= self._looked + POLL_S:
            self._looked = self._clock()
            self._look_safely()
        one = self._sessions.get(session.session_id)
        if one is None:
            one = self._sessions[session.session_id] = self._begun(session.session_id)
        elif one.proposed is not None or one.source is None:
            one.steps += 1
            if one.proposed is not None:
                one.right += _right(one.proposed[1], session.tokens[one.proposed[0] :])
        one.proposed = None
        if one.source is not None:
            with self._judging(one.canary):
                one.source.observe(session, rows)

    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        found: dict[str, ProposedTree] = {}
        versions = {id(one.source): one for one in self._sessions.values() if one.source is not None}
        for one in versions.values():
            asked = [r for r in requests if (s := self._sessions.get(r.session.session_id)) and s.source is one.source]
            if asked and one.source is not None:
                with self._judging(one.canary):
                    found |= one.source.propose(asked)
        for request in requests:
            session_id = request.session.session_id
            if session_id in found:
                self._sessions[session_id].proposed = len(request.session.tokens), found[session_id]
        return found

    def release(self, session_id: str) -> None:
        one = self._sessions.pop(session_id, None)
        if one is None:
            return
        if one.source is not None:
            one.source.release(session_id)
        canary = self._canary
        if canary is None or one.steps < LEAST_STEPS or one.canary not in ("", canary.digest):
            return
        (self._trial.canary if one.canary else self._trial.stable).add(one.right / one.steps)
        if (result := verdict(self._trial.canary, self._trial.stable)) is not None:
            with_it, without = self._trial.canary, self._trial.stable
            reason = (
                f"{with_it.mean:.2f} tokens a step proposed right in {with_it.sessions} sessions, {without.mean:.2f} in"
                f" {without.sessions} without it"
            )
            self._decide(result, reason)

    @contextlib.contextmanager
    def _judging(self, canary: str) -> Iterator[None]:
        """Roll the canary back if the body raises; errors of other heads pass, and those of a session's request."""
        try:
            yield
        except Exception as error:
            if not canary or isinstance(error, BadRequest):
                raise
            log.exception("new heads fail")
            self._decide("rolled_back", f"they raise {type(error).__name__}: {error}")

    def _decide(self, result: Literal["stable", "rolled_back"], reason: str) -> None:
        """Decide about the canary, unless another process has done so, and go on as the folder then says.

        As far as the folder cannot be written to, the decision is this verifier's alone.
        """
        if self._canary is None:
            return
        if self._write(self._canary.digest, result, reason):
            self._end_trial(self._canary, result, reason)
        else:
            self._changed = -1.0
            self._look_safely()

    def _write(self, digest: str, result: Literal["stable", "rolled_back"], reason: str) -> bool:
        """Enter a decision in the folder, if it can be written to; return False if another process has decided."""
        try:
            return self._folder.decide(digest, result, reason[:300]) is not None
        except (OSError, OutriderError) as error:
            log.warning("what became of heads %s.. cannot be written: %s", digest[:12], error)
            return True

    def _end_trial(self, canary: _Version, result: Literal["stable", "rolled_back"], reason: str) -> None:
        """End the canary's trial; sessions that have it keep it if it is stable, and else go on without heads."""
        log.info("heads %s.. are %s: %s", canary.digest[:12], result, reason)
        self._canary = None
        if result == "rolled_back":
            self._give_up(canary)
            return
        self._stable = canary
        for one in self._sessions.values():
            if one.source is canary.source:
                one.canary = ""

    def _give_up(self, version: _Version) -> None:
        """Let the sessions that have these heads go on without any; with their digest, they count in no other trial."""
        for one in self._sessions.values():
            if one.source is version.source:
                one.canary, one.source, one.proposed = version.digest, None, None

    def _begun(self, session_id: str) -> _Session:
        version = self._canary if self._canary is not None and has_canary(session_id) else self._stable
        if version is None:
            return _Session(None, "")
        return _Session(version.source, version.digest if version is self._canary else "")

    def _look_safely(self) -> None:
        try:
            self._look()
        except Exception as error:
            log.warning("the folder of heads cannot be read; what was loaded goes on: %s", error)

    def _look(self) -> None:
        """Load what is new in the folder, and give up what is gone from it; roll back a canary that cannot be loaded.

        Raises ModelRefused for stable heads that cannot be loaded and for a damaged list, and OSError.
        """
        changed = self._folder.changed()
        if changed == self._changed:
            return
        stable, canary = self._folder.newest("stable"), self._folder.newest("canary")
        rolled_back = {one.digest for one in self._folder.releases() if one.state == "rolled_back"}
        if self._stable is not None and self._stable.digest in rolled_back:  # stable here alone, with nowhere to write
            self._give_up(self._stable)
        if self._canary is not None and (canary is None or canary.digest != self._canary.digest):
            is_stable = stable is not None and stable.digest == self._canary.digest
            self._end_trial(self._canary, "stable" if is_stable else "rolled_back", "decided elsewhere")
        if stable is None:
            self._stable = None
        elif self._stable is None or stable.digest != self._stable.digest:
            self._stable = self._loaded(stable.digest)
        if canary is not None and self._canary is None:
            try:
                self._canary, self._trial = self._loaded(canary.digest), _Trial()
            except ModelRefused as error:  # whatever is wrong with them is no matter of the stable heads
                log.exception("new heads are rolled back")
                self._write(canary.digest, "rolled_back", str(error))
        self._changed = changed

    def _loaded(self, digest: str) -> _Version:
        """Load heads. Raises ModelRefused whatever went wrong, be it that the device's memory ran out."""
        path = self._folder.path(digest)
        try:
            version = _Version(digest, self._load(path))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelRefused(f"heads {path} cannot be loaded ({reason}); move the file away to do without") from error
        log.info("heads %s.. are loaded", digest[:12])
        return version


def _right(tree: ProposedTree, tokens: Sequence[int]) -> int:
    """Return how many of the tokens, in order, stand in the tree."""
    node, right = ROOT, 0
    for token in tokens:
        below = tree.child(node, token)
        if below is None:
            break
        node, right = below, right + 1
    return right
