"""Test the events that reach the front for its requests, and their epochs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from rig import LIMITS, attach_of, engine_over
from session_messages import directive

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.loop import COMPILING_POLL_S, EngineLoop
from outrider.core.errors import BadRequest
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2


class ScriptedEnd:
    """Stand in for EngineEnd: return one batch of requests per turn, and then lose the front."""

    def __init__(self, *batches: list[pb.EngineRequest]) -> None:
        self._batches = list(batches)
        self.sent: list[pb.EngineEvent] = []
        self.keeps_up = True

    @property
    def closed(self) -> bool:
        return not self._batches

    def receive(self, timeout_s: float | None) -> Iterator[pb.EngineRequest]:
        yield from self._batches.pop(0)

    def send(self, events: list[pb.EngineEvent]) -> None:
        self.sent += events

    def offer(self, event: pb.EngineEvent) -> bool:
        self.sent += [event] if self.keeps_up else []
        return self.keeps_up


def start(epoch: int) -> pb.EngineRequest:
    return pb.EngineRequest(
        session_id="s",
        epoch=epoch,
        start=pb.Start(
            attach=attach_of([1, 2, 3], epoch=epoch),
            limits=LIMITS.message,
            directive=directive(draft_wait_ms=1000),
        ),
    )


def test_a_failure_and_its_successors_start_in_one_batch_keep_their_own_epochs(
    target: Callable[[str], TargetModel],
) -> None:
    with_a_gap = session_pb2.Append(epoch=1, first_id=50, base=0, up=[0], token=[1])
    end = ScriptedEnd([start(1)], [pb.EngineRequest(session_id="s", epoch=1, append=with_a_gap), start(2)])
    EngineLoop(engine_over(target("llama"), EngineConfig(kv_slots=512)), end).run()  # type: ignore[arg-type]
    sent = [(event.epoch, event.WhichOneof("kind")) for event in end.sent if event.session_id]
    assert sent[0] == (1, "commit")
    assert (1, "failure") in sent
    assert (2, "failure") not in sent
    assert sent[-1] == (2, "commit")


def test_requests_of_an_old_epoch_leave_its_successor_alone(target: Callable[[str], TargetModel]) -> None:
    old = [{"stop": pb.Stop()}, {"cancel": session_pb2.Cancel(epoch=2)}, {"append": session_pb2.Append(first_id=50)}]
    requests = [pb.EngineRequest(session_id="s", epoch=1, **kind) for kind in old]
    end = ScriptedEnd([start(1)], [start(2), *requests], [])
    engine = engine_over(target("llama"), EngineConfig(kv_slots=512))
    EngineLoop(engine, end).run()  # type: ignore[arg-type]
    first, *sent = [event for event in end.sent if event.session_id]
    assert first.epoch == 1
    goes_on = (2, "commit", session_pb2.FINISH_NONE)
    assert {(event.epoch, event.WhichOneof("kind"), event.commit.finish) for event in sent} == {goes_on}
    assert engine.stats().verifier.live_sessions == 1


class SlowGrammars:
    """Stand in for Grammars: compiling ends when it is told to."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.may_end = threading.Event()

    def knows(self, grammar: str) -> bool:
        return grammar in self.compiled

    def compile(self, grammar: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_end.wait(120.0)
        if grammar == "bad":
            raise BadRequest("the grammar is refused: bad", field="grammar")
        self.compiled.add(grammar)


def constrained(session_id: str, epoch: int, grammar: str) -> pb.EngineRequest:
    request = start(epoch)
    request.session_id, request.start.attach.sampling.grammar = session_id, grammar
    return request


def test_a_start_waits_for_its_grammar_with_all_that_follows_it_and_nobody_else_does(
    target: Callable[[str], TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, grammars = engine_over(target("llama"), EngineConfig(kv_slots=512)), SlowGrammars()
    engine.grammars = grammars  # type: ignore[assignment]
    monkeypatch.setattr(engine, "_grammar", lambda grammar: None)
    batches: list[list[pb.EngineRequest]] = [
        [constrained("good", 1, "good"), constrained("bad", 1, "bad"), constrained("stopped", 1, "good")],
        [start(1), pb.EngineRequest(session_id="stopped", epoch=1, stop=pb.Stop())],
        *([] for _ in range(5)),
    ]
    end = ScriptedEnd(*batches)
    loop = EngineLoop(engine, end)  # type: ignore[arg-type]
    receive, waits = end.receive, list[float]()

    def received(timeout_s: Callable[[], float]) -> Iterator[pb.EngineRequest]:
        waits.append(timeout_s())
        if len(end._batches) == 3:
            assert {event.session_id for event in end.sent if event.session_id} == {"s"}
            grammars.may_end.set()
            while any(not compiled.done() for compiled, _ in loop._compiling.values()):
                time.sleep(1e-3)
        return receive(0.0)

    monkeypatch.setattr(end, "receive", received)
    loop.run()
    assert max(waits[1:]) <= COMPILING_POLL_S
    kinds: dict[str, set[str | None]] = {}
    for event in end.sent:
        if event.session_id:
            kinds.setdefault(event.session_id, set()).add(event.WhichOneof("kind"))
    assert kinds == {"s": {"commit"}, "good": {"commit"}, "bad": {"failure"}}
    (failure,) = [event for event in end.sent if event.WhichOneof("kind") == "failure"]
    assert (failure.epoch, failure.failure.message) == (1, "the grammar is refused: bad")
    assert engine.stats().verifier.live_sessions == 2
