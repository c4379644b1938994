"""Test that this device understands a verifier of the previous version, by a session that was recorded of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import previous_version
from previous_version import Recording, nodes_of

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.session.driver import DriverOptions, SessionDriver
from edge_agent.session.failover import DirectRoute
from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import Channels
from outrider.core.backoff import Backoff
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.tree import ROOT
from outrider.wire.channels import bind, server
from outrider.wire.frames import SERVICE
from outrider.wire.v1 import session_pb2 as pb


class Playing:
    """Plays a recorded verifier's bytes: each message once the device has sent what it sent before in the recording.

    A Commit waits for all nodes that were sent without knowing of its tokens; in the recording some crossed with it.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._news = asyncio.Condition()
        self.got: list[pb.ClientMessage] = []

    @property
    def pongs(self) -> list[int]:
        return [message.pong.nonce for message in self.got if message.HasField("pong")]

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        reading = asyncio.create_task(self._read(requests))
        try:
            for data in (data for way, data in self._recording.messages if way == "down"):
                async with asyncio.timeout(5), self._news:
                    await self._news.wait_for(lambda data=data: self._is_due(pb.ServerMessage.FromString(data)))
                yield data
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            async with self._news:
                self.got.append(pb.ClientMessage.FromString(data))
                self._news.notify_all()

    def _is_due(self, message: pb.ServerMessage) -> bool:
        if not message.HasField("commit"):
            return bool(self.got)
        nodes = self._recording.nodes
        known = {node for node, (base, _, _) in nodes.items() if base <= message.commit.start}
        return known <= nodes_of(self.got).keys()


@asynccontextmanager
async def playing(recording: Recording) -> AsyncIterator[tuple[Playing, str]]:
    play, serving = Playing(recording), server()
    handlers = {"Session": grpc.stream_stream_rpc_method_handler(play.serve)}
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = bind(serving, "127.0.0.1:0")
    await serving.start()
    try:
        yield play, f"127.0.0.1:{port}"
    finally:
        await serving.stop(0)


class RecordedDraft(DraftSession):
    """Proposes the nodes of a recording, each when the device has received as many tokens as it had then."""

    def __init__(self, session: DeviceSession, recording: Recording) -> None:
        super().__init__(session, None, None)
        self._device = session
        self._left = dict(recording.nodes)
        self._ids: dict[int, int] = {0: ROOT}
        self._changed: Callable[[], None] = lambda: None

    def begin(self, plan: SpeculationPlan, on_change: Callable[[], None], on_handover: Callable[[float], None]) -> None:
        super().begin(plan, on_change, on_handover)
        self._changed = on_change

    def replan(self, plan: SpeculationPlan) -> None:
        super().replan(plan)
        if plan.nodes:  # not before the limits are known
            self._propose()

    def commit(self, delivery: Delivery) -> None:
        super().commit(delivery)
        self._propose()

    def _propose(self) -> None:
        for node, (base, parent, token) in list(self._left.items()):
            if base == len(self._device.received):
                added = self._device.add(self._ids[parent], token)
                assert added is not None
                self._ids[node] = added
                del self._left[node]
        self._changed()


async def test_a_recorded_verifier_of_the_previous_version_gives_its_tokens_to_this_device(channels: Channels) -> None:
    recording = previous_version.read()
    attach, statistics = recording.opening.attach, Statistics()
    session = DeviceSession(
        attach.prompt, sampling=attach.sampling, max_tokens=attach.max_tokens, ignore_eos=attach.ignore_eos
    )
    options = DriverOptions(recording.opening.session_id, recording.opening.vocabulary_hash, padding="buckets")
    async with playing(recording) as (verifier, address):
        driver = SessionDriver(
            session,
            RecordedDraft(session, recording),
            DirectRoute(address, Backoff(5.0)),
            lambda target: channels.get(target.address, tls=target.tls),
            options,
            statistics,
        )
        async with aclosing(driver.deliveries()) as deliveries:
            tokens = [token async for delivery in deliveries for token in delivery.tokens]
        assert driver.winding_down is not None
        await driver.winding_down
    assert tokens == recording.tokens
    assert (statistics.attaches, statistics.attach_failure) == (1, "")
    # What it sends is what the device of then sent, beside checksum and padding.
    assert verifier.got[0].open == recording.up[0].open
    assert nodes_of(verifier.got) == recording.nodes
    assert verifier.pongs == [message.ping.nonce for message in recording.down if message.HasField("ping")]
    assert not any(message.HasField("checksum") or message.padding for message in (*recording.up, *recording.down))
    assert all(message.HasField("checksum") and message.padding for message in verifier.got)
