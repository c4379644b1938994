"""Test a verifier as a supervisor and its sessions see it: loading, ready, hanging, draining, gone."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from demanded import demand
from ports import unused_port
from shared_cluster import QUICK, Cluster, running, until
from small_pair import TARGET

from edge_agent import Client, OutriderError

PROMPT = "class Stack:\n    def __init__(self):\n"
OPTIONS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.2, "seed": 4}
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def health(address: str) -> bytes:
    """Return the answer to a health check; b"" if there is none."""
    with grpc.insecure_channel(address) as channel:
        try:
            return bytes(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10))
        except grpc.RpcError:
            return b""


def test_health_follows_loading_serving_and_draining_and_a_second_sigterm_ends_it(tmp_path: Path) -> None:
    address = f"127.0.0.1:{unused_port()}"
    command = ("outrider-verifier", "--model", TARGET, "--listen", address, *QUICK, "--drain-s", 60)
    where: dict[str, Any] = {"verifier": address, "draft": None, "cache_dir": tmp_path, "retries": 0}
    with running(tmp_path, "", *command) as verifier, Client(**where) as client:
        until(lambda: health(address) == NOT_SERVING)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match="still loading"):
            channel.unary_unary("/outrider.wire.v1.Verifier/Describe")(b"", timeout=60)
        verifier.await_output("listening on")
        assert health(address) == SERVING
        stream = client.stream(PROMPT, max_tokens=4000, ignore_eos=True, temperature=1.2)
        assert stream.next()
        verifier.process.send_signal(signal.SIGTERM)
        until(lambda: health(address) == NOT_SERVING)

        def refused() -> bool:
            with pytest.raises(OutriderError) as caught:
                client.generate(PROMPT, max_tokens=4, timeout=0.5)
            return "drain" in str(caught.value)  # unless a busy machine has not answered by then

        until(refused)
        verifier.process.send_signal(signal.SIGTERM)
        assert verifier.process.wait(120) == 0


def test_a_verifier_whose_clock_is_wrong_by_more_than_a_ticket_lasts_serves_and_is_named(
    cluster: Cluster, client: Client
) -> None:
    demand("libfaketime", "a wrong clock")
    spec = find_spec("libfaketime")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    wrong = {"LD_PRELOAD": str(library), "FAKETIME": "+2h", "DONT_FAKE_MONOTONIC": "1"}
    whole = client.generate(PROMPT, **OPTIONS).token_ids
    with cluster.verifier("--verifier-id", "ahead", **wrong) as verifier:
        with cluster.cordoned("verifier-1", "verifier-2"):
            served = client.generate(PROMPT, **OPTIONS)
        assert served.token_ids == whole and served.statistics.address == verifier.ready
        verifier.await_output("7200 s ahead of the coordinator's")
        assert cluster.asked("verifiers", "show", "ahead")["clock_ahead_s"] == pytest.approx(7200, abs=30)


def test_a_session_leaves_a_verifier_whose_engine_hangs_or_dies(cluster: Cluster, client: Client) -> None:
    whole = client.generate(PROMPT, **OPTIONS).token_ids
    with cluster.verifier("--verifier-id", "engine") as verifier:
        [engine] = psutil.Process(verifier.process.pid).children()
        for end in (signal.SIGSTOP, signal.SIGKILL):
            with cluster.cordoned("verifier-1", "verifier-2"):
                stream = client.stream(PROMPT, **OPTIONS)
                assert stream.next() and stream.statistics.address == verifier.ready
                engine.send_signal(end)
            assert stream.drain().token_ids == whole and stream.statistics.failovers
            if end is signal.SIGSTOP:
                engine.resume()
                until(lambda: cluster.at_rest("engine"))
        assert verifier.process.wait(120) == 3
