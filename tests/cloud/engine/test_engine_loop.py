"""Requests in, events out: what reaches the front, under which epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rig import LIMITS, attach_of
from tiny_targets import VOCAB

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine_loop import EngineLoop
from outrider.core.protocol.messages import Directive
from outrider.wire import codecs
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2


class ScriptedEnd:
    """Stands in for EngineEnd: hands out batches of requests, one a turn, and then has lost its front."""

    def __init__(self, *batches: list[pb.EngineRequest]) -> None:
        self._batches = list(batches)
        self.sent: list[pb.EngineEvent] = []

    @property
    def closed(self) -> bool:
        return not self._batches

    def receive(self, timeout_s: float | None) -> Iterator[pb.EngineRequest]:
        yield from self._batches.pop(0)

    def send(self, events: list[pb.EngineEvent]) -> None:
        self.sent += events


def start(epoch: int) -> pb.EngineRequest:
    return pb.EngineRequest(
        session_id="s",
        epoch=epoch,
        start=pb.Start(
            attach=codecs.attach_to_proto(attach_of([1, 2, 3], epoch=epoch)),
            limits=codecs.limits_to_proto(LIMITS),
            directive=codecs.directive_to_proto(Directive(patience_ms=1000)),
        ),
    )


def test_a_failure_and_its_successors_start_in_one_batch_keep_their_own_epochs(
    target: Callable[[str], TargetModel],
) -> None:
    with_a_gap = session_pb2.Append(first_id=50, base=0, up=[0], token=[1])
    end = ScriptedEnd([start(1)], [pb.EngineRequest(session_id="s", epoch=1, append=with_a_gap), start(2)])
    EngineLoop(Engine(target("llama"), EngineConfig(kv_slots=512)), end, VOCAB).run()  # type: ignore[arg-type]
    told = [(event.epoch, event.WhichOneof("kind")) for event in end.sent if event.session_id]
    assert told[0] == (1, "commit")
    assert (1, "failure") in told
    assert (2, "failure") not in told
    assert told[-1] == (2, "commit")
