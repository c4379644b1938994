"""Test that measurements of one session are the prior of the next one with its workload key."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"


async def prior_of(system, **kind: str) -> pb.Prior | None:
    """Return the prior that a session with this key would get; its place is released at once."""
    async with channel(system.cluster.address) as link:
        coordinator = coordinator_pb2_grpc.CoordinatorStub(link)
        opened = await coordinator.OpenSession(pb.OpenSessionRequest(**kind), timeout=3.0)
        ended = pb.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        await coordinator.CloseSession(ended, timeout=3.0)
    return opened.prior if opened.HasField("prior") else None


async def test_a_class_has_a_prior_once_one_of_its_sessions_was_served(settled, device, pair):
    draft = await asyncio.to_thread(pair[1].read_bytes)
    kind = {"draft_release": hashlib.sha256(draft).hexdigest(), "traffic_class": "queues"}
    assert await prior_of(settled, **kind) is None
    done = await device.run(settled.here, PROMPT, max_tokens=1200, ignore_eos=True, traffic_class="queues")
    prior = await prior_of(settled, **kind)
    assert prior is not None
    assert 24 <= prior.observations <= 256
    assert 0.0 < prior.first_acceptance <= 1.0
    assert done["steps"] < 1200  # and so some draft tokens were accepted
    assert await prior_of(settled, **kind | {"traffic_class": "stacks"}) is None
