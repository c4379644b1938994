"""Run a Hugging Face target for the engine by our own forward passes: packed trees over a pool of KV slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.device_sampling import DeviceSampler, SessionWalk, walk_together
from cloud_verifier.engine.interface import Completion, KVUsage, Lap, SessionRows
from cloud_verifier.engine.recording import Recording
from cloud_verifier.engine.session import Capabilities, EngineSession
from cloud_verifier.engine.step_profiler import SESSIONS, measure_cost
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, Slots
from cloud_verifier.engine.torch_backend.model import TargetModel, Timer
from cloud_verifier.engine.torch_backend.session_slots import SessionSlots
from outrider.core.errors import BadRequest, InternalError, ModelRefused, OutriderError, Overloaded, Unavailable
from outrider.core.step_cost import KNOTS, StepCost
from outrider.core.verification import Verified
from outrider.wire.v1 import engine_pb2 as pb

PREFIX = 128
"""Number of tokens before the rows of each session, where steps are measured."""


class TorchExecutor:
    """Implements TargetExecutor. slots: those of each session that is admitted."""

    def __init__(self, model: TargetModel, config: EngineConfig, cost: StepCost | None = None) -> None:
        """Take `cost`, measured by `profile`; without it the engine learns from its own steps.

        Raises ModelRefused for a model that has not passed its numerics check.
        """
        if model.deviation is None:
            raise ModelRefused(f"{model.label} has not passed the numerics check; call check_numerics(model) first")
        model.bound_rows(config.token_budget)
        self.model = model
        self.label = model.label
        self.eos_token_ids = model.eos_token_ids
        self.cost = cost or StepCost({1: 1e-3})
        self.capabilities = Capabilities(
            trees=True,
            nodes_per_step=config.token_budget - 1,
            max_sequence=model.max_sequence,
            vocabulary=model.vocab_size,
        )
        self.pool = KVPool(model.layers, config.kv_slots, dtype=model.torch_dtype, device=model.device)
        self.slots: dict[EngineSession, SessionSlots] = {}
        self._prefix_cache = config.prefix_cache
        self._segments: dict[EngineSession, Segment] = {}
        """Rows that are prepared and not kept yet."""
        self._hidden: dict[EngineSession, torch.Tensor] = {}
        """Hidden states of the last known token and the nodes in each session's last completed step."""
        self._recording = Recording(config.record_top)
        self.device_sampler = DeviceSampler.on(model.device)
        self.forward_s = 0.0
        self._stream = torch.cuda.Stream(model.device, priority=-1) if model.device.type == "cuda" else None
        """Verifies a step, so that it need not wait for the next one's forward pass."""

    @property
    def overlaps(self) -> bool:
        return self.model.overlaps

    @property
    def usage(self) -> KVUsage:
        pool = self.pool
        return KVUsage(pool.slots, pool.used, pool.reserved, pool.prefixes.cached)

    @property
    def unrecorded(self) -> int:
        return self._recording.lost

    def admit(self, session: EngineSession, replaced: EngineSession | None) -> None:
        attach, limits = session.protocol.attach, session.protocol.limits
        longest = len(attach.prompt) + attach.max_tokens
        older = self.slots.get(replaced) if replaced else None
        slots = SessionSlots(
            self.pool,
            session.tokens,
            most=longest + limits.nodes,
            last_position=longest - 1,
            salt=session.salt,
        )
        if self._prefix_cache:
            if older is not None:
                older.share()  # that session goes on if there is no room for the new one
            slots.take_prefix(session.reusable)
        room = self.pool.unreserved + (older.held_alone if older else 0)
        if slots.needed > room:
            needed = slots.needed
            slots.release()
            raise Overloaded(f"{needed} KV slots are needed, {room} are free")
        self.slots[session] = slots
        session.computed = slots.computed

    def begin(self, session: EngineSession) -> None:
        self.slots[session].reserve()

    def ready_for(self, grammar: str) -> bool:
        return True  # this process alone chooses tokens

    def prepare(self, rows: SessionRows) -> None:
        session = rows.session
        segment, scored = self.slots[session].segment(rows.chain, rows.batch), session.scored_rows(rows.chain)
        self._segments[session] = replace(segment, scored=scored) if scored else segment
        self._hidden.pop(session, None)

    def launch(self, rows: Sequence[SessionRows], lap: Lap) -> Completion:
        """Raises Unavailable, as does the function returned, if the device has failed: until the process ends, it
        computes nothing more."""
        with self._unavailable_if_broken():
            packed = PackedBatch.pack([self._segments[one.session] for one in rows], self.model.device)
            plan = self.model.attention.plan(packed.segments, self.pool)
            lap("plan")
            timer = self.model.timer()
            logits, states = self.model.forward(packed, plan), self.model.states
            timer.stop()
        return partial(self._complete, rows, packed.logit_starts, logits, states, timer)

    def _complete(
        self,
        rows: Sequence[SessionRows],
        starts: Sequence[int],
        logits: torch.Tensor,
        states: torch.Tensor | None,
        timer: Timer,
        lap: Lap,
    ) -> list[Verified | OutriderError | None]:
        with self._unavailable_if_broken(), self._on_own_stream():
            self.forward_s = timer.seconds()
            lap("forward")
            results = self._verify(rows, starts, logits)
            for one, start in zip(rows, starts, strict=True):
                if one.batch is not None and states is not None:
                    self._hidden[one.session] = states[start : start + 1 + len(one.batch.ids)]
            lap("verify")
        return results

    def _on_own_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the device's work does not wait for a forward pass that was begun before."""
        return torch.cuda.stream(self._stream)  # None changes nothing

    @contextmanager
    def _unavailable_if_broken(self) -> Iterator[None]:
        """Raise Unavailable in place of any exception if the device has failed."""
        try:
            yield
        except Exception as error:
            if works(self.model.device):
                raise
            raise Unavailable(f"{self.model.hardware} has failed: {str(error).splitlines()[0]}") from error

    def hidden_states(self, session: EngineSession) -> torch.Tensor | None:
        """Return None also if the model does not keep them (`TargetModel.keep_states`)."""
        return self._hidden.get(session)

    def rows_run(self, rows: Sequence[SessionRows]) -> list[int]:
        return [one.count for one in rows]

    def keep(self, rows: SessionRows, accepted: Sequence[int]) -> None:
        session = rows.session
        slots = self.slots[session]
        slots.keep(self._segments.pop(session), accepted)
        if rows.batch is not None and self._prefix_cache and not slots.shared:
            slots.share()  # a prompt serves other sessions at once, not only after this one's end
        session.computed = slots.computed

    def end(self, session: EngineSession, *, cache: bool) -> None:
        self._segments.pop(session, None)
        self._hidden.pop(session, None)
        slots = self.slots.pop(session, None)
        if slots is None:
            return
        if cache and self._prefix_cache:
            slots.share()
        slots.release()

    def take_recorded(self) -> list[pb.EngineEvent]:
        with self._on_own_stream():
            return self._recording.take()

    def _verify(
        self, rows: Sequence[SessionRows], starts: Sequence[int], logits: torch.Tensor
    ) -> list[Verified | OutriderError | None]:
        """Return every session's path, or its error. logits: `[R, V]`; those of a session begin at its start."""
        walks: dict[EngineSession, SessionWalk] = {}
        results: dict[EngineSession, Verified | OutriderError | None] = {}
        for one, start in zip(rows, starts, strict=True):
            session, scored = one.session, len(self._segments[one.session].scored)
            try:
                if scored:
                    session.score(logits[start - scored : start], one.chain)
                if one.batch is not None:
                    walks[session] = session.walk(one.batch, start)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                results[session] = InternalError(str(error))
        walk_together(logits, [*walks.values()], self.device_sampler)
        for session, walk in walks.items():
            if (failure := walk.error) is not None:
                results[session] = failure if isinstance(failure, BadRequest) else InternalError(str(failure))
                continue
            verified = results[session] = walk.verified
            session.keep_logprobs(verified, logits, walk.first)
            if session.record:
                self._recording.note(session, verified, logits, walk.first)
        return [results.get(one.session) for one in rows]


def works(device: torch.device) -> bool:
    """Return whether the device computes. After some errors no call of CUDA succeeds until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


def profile(model: TargetModel, rows: int) -> StepCost:
    """Measure what the model's steps of up to `rows` rows cost, as `step_profiler.measure_cost` does.

    With CUDA graphs a step of each size is run before, beside the limit, since the first one captures its graph.
    """
    length, last = min(PREFIX, model.max_sequence - 1), model.max_sequence - 1
    slots = SESSIONS * length + max(rows, SESSIONS)
    # Keys and values are zero, which take as long as real ones.
    pool = KVPool(model.layers, slots, dtype=model.torch_dtype, device=model.device)
    prefixes = [pool.allocate(length) for _ in range(SESSIONS)]

    def seconds(counts: Sequence[int]) -> float:
        begun = perf_counter()
        segments = [_segment(prefix, pool.allocate(n), last) for prefix, n in zip(prefixes, counts, strict=False)]
        batch = PackedBatch.pack(segments, model.device)
        logits = model.forward(batch, model.attention.plan(segments, pool))
        logits.argmax(dim=-1).cpu()  # a GPU works on until its result is asked for
        taken = perf_counter() - begun
        for segment in segments:
            pool.release(segment.slots)
        return taken

    for size in (knot for knot in KNOTS if knot <= rows and model.graphs):
        seconds([size])
    return measure_cost(seconds, rows)


def _segment(prefix: Slots, slots: Slots, last_position: int) -> Segment:
    """Return a segment of one token and a chain of nodes below it."""
    rows = len(slots)
    return Segment(
        tokens=np.zeros(rows, dtype=np.int64),
        chain=1,
        parents=np.arange(rows - 1, dtype=np.int64),
        positions=np.minimum(len(prefix) + np.arange(rows, dtype=np.int64), last_position),
        prefix=prefix,
        slots=slots,
        wants_logits=True,
    )
