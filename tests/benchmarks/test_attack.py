"""Test what benchmarks.attack concludes from what it measures, and that its attackers speak as they should."""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from tcp_server import serving

from benchmarks.attack import hostile_files, sizes, wire
from benchmarks.attack.neighbour import Neighbour
from benchmarks.attack.product import Product, checkout
from benchmarks.attack.wiretap import Seen, Wiretap, _Direction
from benchmarks.support import harness
from outrider.core.addresses import split_address
from outrider.wire.v1 import session_pb2 as pb


def delivered(neighbour: Neighbour, *tokens: list[int], at: float = 0.0, every_s: float = 0.02) -> None:
    """Have a session begin and deliver these chunks."""
    neighbour._take({"begin": True, "at": at})
    for i, chunk in enumerate(tokens):
        neighbour._take({"at": at + i * every_s, "tokens": chunk})


def test_a_neighbour_whose_tokens_are_those_of_the_undisturbed_session_has_no_faults() -> None:
    neighbour = Neighbour([1, 2, 3, 4])
    delivered(neighbour, [1], [2, 3])
    delivered(neighbour, [1, 2], [3], [4], at=1.0)
    assert neighbour.faults((0.0, 2.0)) == []
    assert neighbour.gaps_ms((0.0, 1.041)) == pytest.approx([20.0, 20.0, 20.0])


def test_a_token_that_differs_or_is_too_much_and_an_error_are_faults_of_their_time() -> None:
    neighbour = Neighbour([1, 2, 3])
    delivered(neighbour, [1], [7])
    delivered(neighbour, [1, 2, 3], [4], at=1.0)
    neighbour._take({"error": "Overloaded: full", "at": 1.5})
    assert neighbour.faults((0.0, 0.5)) == ["1 tokens differ"]
    assert neighbour.faults((0.9, 2.0)) == ["Overloaded: full", "1 tokens differ"]


def test_silence_that_goes_on_at_the_end_of_an_attack_is_a_gap() -> None:
    neighbour = Neighbour([1, 2, 3])
    delivered(neighbour, [1], [2])
    assert max(neighbour.gaps_ms((0.0, 3.0))) == pytest.approx(2_980.0)
    neighbour._take({"at": 5.0, "tokens": [3]})
    assert max(neighbour.gaps_ms((0.0, 3.0))) == pytest.approx(2_980.0)


def test_sizes_that_follow_the_tokens_hold_all_of_their_entropy_and_random_ones_nothing() -> None:
    draw = random.Random(1)
    tokens = [draw.choice([1, 2, 3, 4]) for _ in range(2_000)]
    assert sizes.entropy(tokens) == pytest.approx(2.0, abs=0.01)
    assert sizes.information(tokens, [10 + 3 * count for count in tokens]) == pytest.approx(2.0, abs=0.02)
    assert sizes.information(tokens, [draw.randrange(40) for _ in tokens]) < 0.03
    assert sizes.information(tokens, [64 for _ in tokens]) == 0.0


def test_the_append_after_a_commit_counts_for_it_unless_another_commit_comes_first() -> None:
    assert sizes._next_sizes([1.0, 2.0, 3.0], [(0.5, 7), (1.5, 8), (1.6, 9), (3.5, 10)]) == [8, None, 10]


def test_a_wiretap_finds_messages_however_the_bytes_are_cut() -> None:
    commits = [pb.ServerMessage(commit=pb.Commit(epoch=1, start=i, token=[7] * i)) for i in range(1, 6)]
    sent = b""
    for message in commits:
        body = message.SerializeToString()
        data = b"\0" + struct.pack(">I", len(body)) + body
        sent += wire._frame(0x0, 0, 1, data) + wire._frame(0x6, 0, 0, bytes(8))
    for step in (1, 7, len(sent)):
        seen: list[Seen] = []
        direction = _Direction(pb.ServerMessage, seen)
        for at in range(0, len(sent), step):
            direction.take(sent[at : at + step])
        assert [one.message for one in seen] == commits
        assert [one.size for one in seen] == [5 + len(message.SerializeToString()) for message in commits]


async def test_a_wiretap_carries_bytes_both_ways() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()

    async with serving(echo) as address, Wiretap(address) as tap:
        reader, writer = await asyncio.open_connection(*split_address(tap.address))
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 10.0) == b"hello"
        writer.close()


class Written:
    """Keep what a stream writes."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def write(self, message: bytes) -> None:
        self.messages.append(message)


@pytest.mark.parametrize(("new", "fields"), [(True, [1, 2]), (False, [1, 2, 3])])
async def test_a_stream_carries_its_ticket_as_the_checkout_has_it(tmp_path: Path, new: bool, fields: list[int]) -> None:
    if new:
        (tmp_path / "outrider" / "wire").mkdir(parents=True)
        (tmp_path / "outrider" / "wire" / "admission.py").touch()
    raw = Product(tmp_path).stream("127.0.0.1:1", "s", b"t" * 200)
    raw.call = written = Written()
    await raw.send(open=pb.Open(session_id="s", attach=pb.Attach(epoch=3, max_tokens=5)))
    await raw.send(cancel=pb.Cancel(epoch=3))
    opening, cancel = written.messages
    assert pb.ClientMessage.FromString(cancel).cancel.epoch == 3
    body = read_fields(read_fields(opening)[2])
    assert list(body) == fields
    assert pb.Attach.FromString(body[fields[-1]]).epoch == 3
    assert new or body[2] == b"t" * 200
    raw.call = None
    await raw.__aexit__(None, None, None)


def read_fields(message: bytes) -> dict[int, bytes]:
    """Return the fields of a message that has none but bytes."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        number, at = message[at] >> 3, at + 1
        size = shift = 0
        while True:
            size |= (message[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if message[at - 1] < 0x80:
                break
        found[number] = message[at : at + size]
        at += size
    return found


def test_hostile_drafts_differ_from_the_good_one_in_four_bytes() -> None:
    good = (harness.ROOT / "models" / "draft.gguf").read_bytes()
    drafts = hostile_files._drafts(good)
    for name in ("block_count", "epsilon", "rope"):
        bad = drafts[name]
        assert len(bad) == len(good)
        assert 1 <= sum(a != b for a, b in zip(bad, good, strict=True)) <= 4


async def test_a_program_that_takes_too_long_or_too_much_memory_is_killed() -> None:
    product = checkout()
    sleeping = await product.run(product.python("-c", "import time; time.sleep(60)"), timeout_s=0.5)
    assert sleeping.code is None
    greedy = "import time; a = bytes(400 << 20); b = bytearray(a); time.sleep(60)"
    grown = await product.run(product.python("-c", greedy), timeout_s=50.0, most_mb=300.0)
    assert grown.code is None and grown.peak_mb > 300.0
    ended = await product.run(product.python("-c", "print('hello'); raise SystemExit(3)"), timeout_s=50.0)
    assert (ended.code, ended.output) == (3, "hello\n")


async def test_programs_find_the_checkout_that_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "__init__.py").write_text("where = 'there'")
    ended = await Product(tmp_path).run(
        Product(tmp_path).python("-c", "import outrider; print(outrider.where)"), timeout_s=50.0
    )
    assert ended.output == "there\n"


async def test_unfinished_messages_send_as_much_as_the_server_lets_them() -> None:
    got: dict[str, Any] = {"bytes": 0}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire._frame(0x4, 0, 0, struct.pack(">HI", 0x4, 1_000)))  # 1,000 bytes for every stream
        while data := await reader.read(1 << 16):
            got["bytes"] += len(data)

    async with serving(serve) as address:
        messages = wire.UnfinishedMessages(address)
        await messages.send("/a/b", calls=3, message_bytes=1 << 20, seconds=0.5)
        assert messages.sent == 3_000
        messages.close()
