"""Test that this verifier understands a device of the previous version, by a session that was recorded of one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import previous_version
import pytest
from system import QUICK, ROOT

from coordinator.cluster import Child
from outrider.wire.channels import channel
from outrider.wire.frames import METHOD
from outrider.wire.v1 import session_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_a_recorded_device_of_the_previous_version_gets_its_tokens_from_this_verifier(
    pair: tuple[Path, Path],
) -> None:
    recording = previous_version.read()
    options = ("--model", str(pair[0]), "--listen", "127.0.0.1:0", *QUICK)
    command = ("env", "--chdir", str(ROOT), sys.executable, "-m", "cloud_verifier.app", *options)
    verifier = await Child.start("verifier", command)
    try:
        async with asyncio.timeout(60), channel(verifier.address) as link:
            got = await played(recording, link)
    finally:
        await verifier.stop()
    commits = [message.commit for message in got if message.HasField("commit")]
    assert [token for commit in commits for token in commit.token] == recording.tokens
    assert commits[-1].finish == pb.FINISH_LENGTH
    assert commits[-1].seen > 0 and sum(commit.evaluated for commit in commits) > 0
    # It sends nothing that the device of then did not know.
    assert not any(message.HasField("checksum") or message.padding for message in got)


async def played(recording: previous_version.Recording, link: grpc.aio.Channel) -> list[pb.ServerMessage]:
    """Play the recorded device's bytes, each as soon as the verifier has sent the tokens that it knew; return the
    answers."""
    got: list[pb.ServerMessage] = []
    committed = asyncio.Condition()
    call = link.stream_stream(METHOD)()

    async def send() -> None:
        for message, data in zip(recording.up, (data for way, data in recording.messages if way == "up"), strict=True):
            async with committed:
                await committed.wait_for(lambda base=message.append.base: tokens_of(got) >= base)
            await call.write(data)

    sending = asyncio.create_task(send())
    call.add_done_callback(lambda _: sending.cancel())  # a write after the end would hide the verifier's status
    while (answer := await call.read()) is not grpc.aio.EOF:
        async with committed:
            got.append(pb.ServerMessage.FromString(answer))
            committed.notify_all()
    return got


def tokens_of(messages: list[pb.ServerMessage]) -> int:
    return sum(len(message.commit.token) for message in messages)
