"""Test that frames show every change of a stream's messages, and hide their sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import BadRequest, Damaged
from outrider.wire.frames import (
    LARGEST_BUCKET,
    LEAST_BUCKET,
    Frames,
    Framing,
    Padding,
    field_of,
    framing_of,
    padded_size,
)
from outrider.wire.v1 import session_pb2 as pb

PADDINGS: list[Padding] = ["off", "buckets", "constant"]
tokens = st.lists(st.integers(0, 200_000), max_size=200)


def commit(token: list[int], start: int = 0) -> pb.ServerMessage:
    return pb.ServerMessage(commit=pb.Commit(epoch=1, start=start, token=token, seen=7))


def append(token: list[int]) -> pb.ClientMessage:
    return pb.ClientMessage(append=pb.Append(first_id=1, up=[0] * len(token), token=token))


def ends(framing: Framing) -> tuple[Frames[pb.ClientMessage], Frames[pb.ServerMessage]]:
    """Return the verifier's end of a stream and the device's."""
    return Frames(pb.ClientMessage, framing), Frames(pb.ServerMessage, framing, optional=True)


@given(st.lists(tokens, min_size=1, max_size=5), st.sampled_from(PADDINGS), st.booleans())
def test_what_is_sent_is_received_in_both_directions(
    messages: list[list[int]], padding: Padding, checksum: bool
) -> None:
    verifier, device = ends(Framing(checksum, padding))
    for token in messages:
        assert device.decode(verifier.encode(commit(token))).commit == commit(token).commit
        assert verifier.decode(device.encode(append(token))).append == append(token).append


@given(st.lists(st.integers(0, 200_000), max_size=10_000))
def test_a_message_serialised_as_a_field_is_what_protobuf_makes_of_it(token: list[int]) -> None:
    whole = commit(token)
    field = field_of(pb.ServerMessage.COMMIT_FIELD_NUMBER, whole.commit)
    assert field == whole.SerializeToString()
    verifier, device = ends(Framing(padding="buckets"))
    assert device.decode(verifier.encode(field)).commit == whole.commit


@given(st.lists(tokens, min_size=2, max_size=4), st.sampled_from(PADDINGS), st.data())
def test_a_changed_byte_is_found(messages: list[list[int]], padding: Padding, data: st.DataObject) -> None:
    verifier, device = ends(Framing(padding=padding))
    *before, last = [verifier.encode(commit(token)) for token in messages]
    for frame in before:
        device.decode(frame)
    place = data.draw(st.integers(0, len(last) - 1))
    changed = bytearray(last)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged, match="attach again"):
        device.decode(bytes(changed))


@given(st.binary(min_size=1, max_size=1), st.data())
def test_a_changed_byte_on_the_way_up_is_found_in_the_first_message_too(bits: bytes, data: st.DataObject) -> None:
    verifier, device = ends(Framing())
    opening = pb.ClientMessage(open=pb.Open(session_id="s", attach=pb.Attach(epoch=1, prompt=[1, 2, 3])))
    changed = bytearray(device.encode(opening))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= bits[0] or 1
    with pytest.raises(Damaged):
        verifier.decode(bytes(changed))


def test_a_message_that_is_lost_or_repeated_or_late_is_found() -> None:
    for order in ([0, 2], [0, 0], [1], [0, 2, 1]):
        verifier, device = ends(Framing())
        frames = [verifier.encode(commit([1, 2], start)) for start in range(3)]
        with pytest.raises(Damaged):
            for index in order:
                device.decode(frames[index])


def test_an_older_verifier_that_sends_no_checksum_is_understood() -> None:
    _, device = ends(Framing())
    for start in range(3):
        assert device.decode(commit([5], start).SerializeToString()).commit.start == start


def test_a_checksum_that_is_damaged_into_another_field_is_found_by_the_next_message() -> None:
    verifier, device = ends(Framing())
    first = bytearray(verifier.encode(commit([5])))
    first[-5] = 13 << 3 | 5  # a field that is not known, so that the message looks like one of an older verifier
    device.decode(bytes(first))
    with pytest.raises(Damaged, match="has a checksum"):
        device.decode(verifier.encode(commit([6], 1)))


def test_garbage_is_the_fault_of_a_device_without_checksums_and_of_the_way_from_a_verifier() -> None:
    verifier, _ = ends(Framing(checksum=False))
    with pytest.raises(BadRequest, match="ClientMessage"):
        verifier.decode(b"\xff\xff")
    with pytest.raises(Damaged):
        Frames(pb.ServerMessage, Framing(), optional=True).decode(b"\xff\xff")


@pytest.mark.parametrize("checksum", [True, False])
@given(count=st.integers(0, 25))
def test_in_buckets_all_usual_commits_have_one_size(checksum: bool, count: int) -> None:
    verifier, _ = ends(Framing(checksum, "buckets"))
    assert len(verifier.encode(commit([150_000] * count, start=100_000))) == LEAST_BUCKET


@given(st.integers(1, 200_000), st.sampled_from([1, 3, 43]), st.sampled_from(["buckets", "constant"]))
def test_a_padded_size_is_never_smaller_and_never_twice_as_large_beyond_the_least(
    size: int, scale: int, padding: Padding
) -> None:
    padded = padded_size(size, padding, scale)
    assert size <= padded <= max(2 * size, padded_size(1, padding, scale))
    assert padded == padded_size(padded, padding, scale)


def test_with_log_probabilities_the_number_of_tokens_does_not_show_either() -> None:
    verifier, _ = ends(Framing(padding="buckets"))
    verifier.widen(pb.Attach(logprobs=20))
    sizes = set()
    for count in range(1, 25):
        message = commit([150_000] * count)
        message.commit.logprob.extend([-0.5] * count)
        message.commit.top_id.extend([150_000] * 20 * count)
        message.commit.top_logprob.extend([-0.5] * 20 * count)
        sizes.add(len(verifier.encode(message)))
    assert len(sizes) == 1 and max(sizes) > LARGEST_BUCKET


def test_an_attach_that_asks_for_more_than_there_is_makes_no_endless_messages() -> None:
    verifier, _ = ends(Framing(padding="buckets"))
    verifier.widen(pb.Attach(logprobs=2**32 - 1))
    assert len(verifier.encode(commit([1]))) < 1 << 16


def test_the_metadata_of_a_call_says_what_is_asked_for() -> None:
    for framing in (Framing(), Framing(False, "constant"), Framing(True, "buckets")):
        assert framing_of(framing.metadata()) == framing
    assert framing_of(()) == Framing(checksum=False)


@pytest.mark.parametrize("metadata", [(("outrider-checksum", "md5"),), (("outrider-padding", "much"),)])
def test_a_framing_that_is_not_known_is_refused(metadata: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(Damaged, match="must be"):
        framing_of(metadata)
