"""Stand in for a target: every sequence has logits of its own, computed from a hash, and nothing else is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import torch

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import KVUsage, SessionRows
from cloud_verifier.engine.recording import RecordedTokens, Recording
from cloud_verifier.engine.session import Capabilities, EngineSession
from outrider.core.errors import OutriderError, Overloaded
from outrider.core.step_cost import StepCost
from outrider.core.verification import TreeBatch, Verified

VOCABULARY = 64


class FakeExecutor:
    """Implements TargetExecutor with trees, in slots that are only counted."""

    def __init__(self, config: EngineConfig) -> None:
        self.label = "fake"
        self.eos_token_ids = (7,)
        self.cost = StepCost({1: 1e-3})
        self.capabilities = Capabilities(
            trees=True, nodes_per_step=config.token_budget - 1, max_sequence=2048, vocabulary=VOCABULARY
        )
        self._slots = config.kv_slots
        self._reserved: dict[EngineSession, int] = {}
        self._prompts: set[tuple[str, tuple[int, ...]]] = set()
        """(salt, prompt) of every session that has ended: its prefix cache."""
        self._recording = Recording(config.record_top)

    @property
    def unrecorded(self) -> int:
        return self._recording.lost

    @property
    def usage(self) -> KVUsage:
        used = sum(session.computed for session in self._reserved)
        return KVUsage(self._slots, used, sum(self._reserved.values()), 0)

    def admit(self, session: EngineSession, replaced: EngineSession | None) -> None:
        prompt = tuple(session.tokens)
        known = [_common(prompt, other) for salt, other in self._prompts if salt == session.salt]
        computed = min(max(known, default=0), session.reusable)
        taken = sum(slots for other, slots in self._reserved.items() if other is not replaced)
        if self._needed(session) - computed > self._slots - taken:
            raise Overloaded("no slots are free")
        session.computed = computed

    def begin(self, session: EngineSession) -> None:
        self._reserved[session] = self._needed(session) - session.computed

    def _needed(self, session: EngineSession) -> int:
        return len(session.protocol.attach.prompt) + session.protocol.attach.max_tokens

    def ready_for(self, grammar: str) -> bool:
        return True

    def begin_step(self) -> None:
        self._recording.clear()

    def prepare(self, rows: SessionRows) -> None:
        pass

    def run(self, rows: Sequence[SessionRows], lap: Callable[[], None]) -> list[Verified | OutriderError | None]:
        lap()
        lap()
        results: list[Verified | OutriderError | None] = []
        for one in rows:
            session = one.session
            if scored := session.scored_rows(one.chain):
                ends = [session.computed + row + 1 for row in scored]
                session.score(rows_of([session.tokens[:end] for end in ends]), one.chain)
            if one.batch is None:
                results.append(None)
                continue
            logits = _logits(one.session.tokens, one.batch)
            try:
                verified = one.session.verify(one.batch, logits)
            except OutriderError as error:
                results.append(error)
                continue
            if one.session.record:
                self._recording.note(one.session, verified, logits, 0)
            results.append(verified)
        lap()
        return results

    def rows_run(self, rows: Sequence[SessionRows]) -> list[int]:
        return [one.count for one in rows]

    def hidden_states(self, session: EngineSession) -> None:
        """Return None: the states are not kept."""

    def keep(self, rows: SessionRows, accepted: Sequence[int]) -> None:
        rows.session.computed += rows.chain + len(accepted)

    def end(self, session: EngineSession, *, cache: bool) -> None:
        if self._reserved.pop(session, None) is not None and cache:
            self._prompts.add((session.salt, session.protocol.attach.prompt))

    def take_recorded(self) -> list[RecordedTokens]:
        return self._recording.take()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _logits(tokens: Sequence[int], batch: TreeBatch) -> torch.Tensor:
    """Return `[1 + nodes, V]`: the logits after the last token and after every node."""
    paths: list[list[int]] = [list(tokens)]
    for parent, token in zip(batch.parents, batch.tokens, strict=True):
        paths.append([*paths[parent], token])
    return rows_of(paths)


def rows_of(paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `[n, V]`: the logits after each of these sequences."""
    rows = [np.random.default_rng(crc32(np.asarray(path, "<u4").tobytes())).normal(0, 3, VOCABULARY) for path in paths]
    return torch.tensor(np.stack(rows), dtype=torch.float32)
