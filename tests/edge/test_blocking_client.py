"""Test the blocking client against a scripted target behind a real socket."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from reciter import Threaded, in_thread, recital

from edge_agent import Client
from outrider.core.errors import BadRequest

LONG = 4000


@pytest.fixture
def verifier(tiny_gguf: Path) -> Iterator[Threaded]:
    with in_thread(recital(tiny_gguf)) as running:
        yield running


@pytest.fixture
def client(verifier: Threaded, tmp_path: Path) -> Iterator[Client]:
    with Client(verifier=verifier.address, cache_dir=tmp_path) as made:
        yield made


def test_errors_are_the_same_and_a_closed_client_says_so(client: Client, verifier: Threaded) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        client.generate("x", max_tokens=0)
    stream = client.stream("x", max_tokens=LONG)
    assert stream.next() is not None
    client.close()
    client.close()
    verifier.until_free()
    stream.close()
    with pytest.raises(BadRequest, match="closed"):
        client.generate("x")


def test_a_clients_own_loop_refuses_to_wait_for_itself(client: Client) -> None:
    async def nested() -> None:
        client.generate("x")

    with pytest.raises(BadRequest, match="AsyncClient"):
        client._loop.run(nested())


def test_ctrl_c_cancels_the_request_and_the_client_lives_on(client: Client, verifier: Threaded) -> None:
    stream = client.stream("x", max_tokens=LONG)
    assert stream.next() is not None
    verifier.verifier.script.step_s = 0.02
    main = threading.main_thread().ident
    assert main is not None
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        stream.drain()
    verifier.until_free()
    assert client.generate("x", max_tokens=3).finish_reason == "length"
