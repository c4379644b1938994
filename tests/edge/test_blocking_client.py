"""Test the blocking client against a scripted target behind a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reciter import TEXT, Threaded, in_thread, recital

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


def test_text_and_chat_come_whole(client: Client) -> None:
    completion = client.generate("x", max_tokens=40)
    assert completion.text == TEXT[: len(completion.text)] and completion.usage.completion_tokens == 40
    assert len(completion.provenance) == 40 and completion.verified
    assert client.chat([{"role": "user", "content": "hello"}], max_tokens=8).text


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


def test_many_threads_share_a_client(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda n: client.generate("x", max_tokens=20 + n).token_ids, range(16)))
    assert [len(ids) for ids in outputs] == list(range(20, 36))
    assert all(ids == outputs[-1][: len(ids)] for ids in outputs)


def test_closing_ends_what_another_thread_waits_for(client: Client, verifier: Threaded) -> None:
    stream = client.stream("x", max_tokens=LONG)
    assert stream.next() is not None
    verifier.call(verifier.verifier.freeze)
    reasons: list[str] = []
    reader = threading.Thread(target=lambda: reasons.append(stream.drain().finish_reason))
    reader.start()
    time.sleep(0.1)
    client.close()
    reader.join(5)
    assert reasons == ["cancelled"]


def test_a_clients_own_loop_refuses_to_wait_for_itself(client: Client) -> None:
    async def nested() -> None:
        client.generate("x")

    with pytest.raises(BadRequest, match="AsyncClient"):
        client._thread.run(nested())


INTERRUPTED = """
import sys
from edge_agent import Client
client = Client(verifier=sys.argv[1], cache_dir=sys.argv[2])
try:
    for chunk in client.stream("x", max_tokens=4000):
        print("chunk", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
    print(client.generate("x", max_tokens=3).finish_reason, flush=True)
"""


def test_ctrl_c_cancels_the_request_and_the_client_lives_on(verifier: Threaded, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, verifier.address, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "chunk\n"
        assert verifier.verifier.live
        process.send_signal(signal.SIGINT)
        while (line := process.stdout.readline()) == "chunk\n":
            pass
        assert line == "interrupted\n"
        verifier.until_free()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "length\n"
    assert process.returncode == 0  # the client was never closed: the process ends all the same
