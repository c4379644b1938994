"""Test what is measured of sessions: windows follow it, later sessions start from it, and no text depends on it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from shared_cluster import ADMIN, KEYS, NAME, Cluster, bearer, until

from edge_agent import AsyncClient, Client
from edge_agent.bench.delay import DelayedAddresses
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
OPTIONS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 1.0}


def test_a_session_is_steered_by_what_was_measured_and_says_why(cluster: Cluster, client: Client) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        admin = coordinator_pb2_grpc.AdminStub(channel)

        def decided() -> pb.WindowDecision | None:
            """Return what is decided of a session while it runs; it may end before enough is known of it."""
            with client.stream(PROMPT, **OPTIONS) as stream:
                while stream.next() is not None:
                    request = pb.ListSessionsRequest(session_id=stream.statistics.session_id)
                    for one in admin.ListSessions(request, metadata=bearer(ADMIN)).sessions:
                        if one.window.observations >= 24:
                            return one.window
            return None

        found = until(decided)
    assert found.rtt_ms > 0 and found.reason


def test_a_long_way_changes_nothing_but_the_time(cluster: Cluster, client: Client) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 7}
    near = client.generate(PROMPT, **asked).token_ids

    async def far() -> list[tuple[int, ...]]:
        where: dict[str, Any] = {"coordinator": cluster.address, "target": NAME, "api_key": KEYS["acme"]}
        async with DelayedAddresses(60.0) as reroute:
            found = []
            for draft in ("auto", None):
                given = {"cache_dir": cluster.folder / "cache", "reroute": reroute, "draft": draft}
                async with AsyncClient(**where, **given) as distant:
                    done = await distant.generate(PROMPT, **asked)
                    assert done.statistics.attaches == 1
                    found.append(done.token_ids)
        return found

    assert asyncio.run(far()) == [near, near]
