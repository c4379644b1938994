"""Test who may do what: credentials of every RPC, tenants' keys and limits, and input that is wrong or hostile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from shared_cluster import ADMIN, JOIN, KEYS, NAME, TICKET, Cluster, bearer, until

from edge_agent import BadRequest, Client, NotFound, OutriderError, Overloaded, Unauthenticated
from outrider.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, session_pb2, session_pb2_grpc

PROMPT = "def area(width, height):\n"
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
WRONG: Mapping[str, Sequence[tuple[str, str | bytes]]] = {
    "none": (),
    "a wrong secret": bearer("wrong-secret-0123456789"),
    "a secret in another scheme": (("authorization", f"Basic {KEYS['acme']}"),),
    "an empty secret": bearer(""),
    "a long secret": bearer(4_000 * "x"),
    "bytes that are no ticket": ((TICKET, b"forged"),),
}
GOOD = {"Coordinator": KEYS["acme"], "Registry": JOIN, "Admin": ADMIN}
"""Service -> the one secret that its RPCs take."""


def rpcs(file: Any) -> list[Any]:
    """Return every RPC that a file of the protocol describes, as parameters with their names."""
    methods = [method for service in file.DESCRIPTOR.services_by_name.values() for method in service.methods]
    return [pytest.param(method, id=f"{method.containing_service.name}.{method.name}") for method in methods]


def answer(address: str, method: MethodDescriptor, metadata: Sequence[tuple[str, str | bytes]]) -> grpc.StatusCode:
    """Call an RPC with an empty message, and return its status."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    with grpc.insecure_channel(address) as channel:
        try:
            if method.client_streaming:
                list(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60))
            elif method.server_streaming:
                list(channel.unary_stream(path)(b"", metadata=metadata, timeout=60))
            else:
                channel.unary_unary(path)(b"", metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", rpcs(coordinator_pb2))
def test_every_rpc_of_the_coordinator_takes_the_secret_of_its_service_and_no_other(
    cluster: Cluster, method: MethodDescriptor
) -> None:
    own = GOOD[method.containing_service.name]
    for name, metadata in WRONG.items():
        assert answer(cluster.address, method, metadata) in REFUSED, name
    for secret in {*GOOD.values(), KEYS["open"]} - {own, *(KEYS.values() if own in KEYS.values() else ())}:
        assert answer(cluster.address, method, bearer(secret)) in REFUSED, secret
    assert answer(cluster.address, method, bearer(own)) not in REFUSED


@pytest.mark.parametrize("method", rpcs(session_pb2))
def test_every_rpc_of_a_verifier_takes_a_ticket_of_its_own_and_nothing_else(
    cluster: Cluster, method: MethodDescriptor
) -> None:
    opened = open_session(cluster)
    good, address = opened.primary.ticket, opened.primary.address
    at = len(good) * 2 // 3
    spoilt = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    wrong = {
        **WRONG,
        "a changed ticket": ((TICKET, spoilt),),
        "a ticket of another": ((TICKET, opened.standby.ticket),),
    }
    for name, metadata in wrong.items():
        assert answer(address, method, metadata) in REFUSED, name
    for secret in (*GOOD.values(),):
        assert answer(address, method, bearer(secret)) in REFUSED, secret
    assert answer(address, method, ((TICKET, good),)) not in REFUSED


def open_session(cluster: Cluster, key: str = KEYS["acme"], **asked: Any) -> Any:
    """Return the coordinator's answer to a device that opens a session."""
    with grpc.insecure_channel(cluster.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        request = coordinator_pb2.OpenSessionRequest(target=NAME, **asked)
        return stub.OpenSession(request, metadata=bearer(key), timeout=60)


def attach(
    grant: Any,
    session_id: str,
    *appends: session_pb2.Append,
    ticket: bytes | None = None,
    epoch: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
) -> tuple[grpc.StatusCode, str]:
    """Open a stream by hand, send these Appends, and return how it ends and with what words."""
    sampling = session_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)
    opening = session_pb2.Attach(epoch=epoch or grant.epoch_first, prompt=prompt, sampling=sampling, ignore_eos=True)
    opening.max_tokens = 2000 if appends else 64  # so that the text has not ended before these arrive

    def messages() -> Iterator[session_pb2.ClientMessage]:
        yield session_pb2.ClientMessage(open=session_pb2.Open(session_id=session_id, attach=opening))
        for append in appends:
            yield session_pb2.ClientMessage(append=append)

    with grpc.insecure_channel(grant.address) as channel:
        credential = ((TICKET, grant.ticket if ticket is None else ticket),)
        stream = session_pb2_grpc.VerifierStub(channel).Session(messages(), metadata=credential, timeout=120)
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_a_ticket_opens_its_own_session_and_its_own_epochs_alone(cluster: Cluster) -> None:
    opened = open_session(cluster)
    grant = opened.primary
    assert attach(grant, "another")[0] in REFUSED
    assert attach(grant, opened.session_id, epoch=grant.epoch_last + 1)[0] in REFUSED
    assert attach(grant, opened.session_id)[0] == grpc.StatusCode.OK


def test_a_revoked_key_opens_nothing_and_ends_its_sessions(cluster: Cluster) -> None:
    key = cluster.update_tenant("leaver", "CREATE")
    with cluster.client(api_key=key, retries=0) as client:
        stream = client.stream(PROMPT, max_tokens=4000, ignore_eos=True, temperature=1.2)
        assert stream.next()
        cluster.update_tenant("leaver", "REVOKE")
        with pytest.raises(Unauthenticated):
            client.generate(PROMPT, max_tokens=4)
        with pytest.raises(Unauthenticated):
            stream.drain()
        assert stream.completion.token_ids  # what it had is delivered
    until(cluster.at_rest)


def test_callers_without_a_key_or_with_a_wrong_one_get_nothing(cluster: Cluster) -> None:
    for key in (None, "wrong-secret-0123456789"):
        with cluster.client(api_key=key, cache="strangers") as client, pytest.raises(Unauthenticated, match="API key"):
            client.generate(PROMPT, max_tokens=4)


def test_a_tenant_gets_as_many_sessions_at_once_and_tokens_a_minute_as_it_may(cluster: Cluster) -> None:
    key = cluster.update_tenant("metered", "CREATE", max_places=1)
    opened = open_session(cluster, key)
    with pytest.raises(grpc.RpcError) as caught:
        open_session(cluster, key)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "metered" in caught.value.details()
    assert open_session(cluster).session_id  # the limit is that tenant's alone
    with grpc.insecure_channel(cluster.address) as channel:
        request = coordinator_pb2.CloseSessionRequest(session_id=opened.session_id, ticket=opened.primary.ticket)
        coordinator_pb2_grpc.CoordinatorStub(channel).CloseSession(request, metadata=bearer(key), timeout=60)
    cluster.update_tenant("metered", "SET_LIMITS", max_places=0, tokens_per_minute=20)
    with cluster.client(api_key=key, retries=0) as client:
        client.generate(PROMPT, max_tokens=64, ignore_eos=True)  # a session that lives finishes

        def tokens() -> float:
            listed = cluster.administer("ListTenants", coordinator_pb2.ListTenantsRequest()).tenants
            return {one.name: one.use.tokens for one in listed}["metered"]

        until(lambda: tokens() > 20)
        with pytest.raises(Overloaded, match="20 tokens per minute"):
            client.generate(PROMPT, max_tokens=4)
        cluster.update_tenant("metered", "SET_LIMITS", tokens_per_minute=0)
        assert client.generate(PROMPT, max_tokens=4).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 5000 * [5], "max_tokens": 8}, "length of prompt is 5000, must be at most 4095"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 50}, "logprobs"),
        ({"grammar": "start: /[/"}, "grammar"),
        ({"grammar": "begin: x"}, "grammar"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_request_is_refused_with_what_is_wrong(client: Client, options: dict[str, Any], message: str) -> None:
    with pytest.raises((BadRequest, TypeError), match=message):
        client.generate(**{"prompt": PROMPT, "max_tokens": 4} | options)
    assert client.generate(PROMPT, max_tokens=4).token_ids


def test_what_cannot_be_found_is_named(cluster: Cluster) -> None:
    with cluster.client(target="no-such-target") as client, pytest.raises(NotFound, match="no-such-target"):
        client.generate(PROMPT, max_tokens=4)
    with (
        cluster.client(draft="/no/such/draft.gguf") as client,
        pytest.raises(OutriderError, match=r"/no/such/draft\.gguf"),
    ):
        client.generate(PROMPT, max_tokens=4)
    with pytest.raises(BadRequest, match="insecure"):  # plain text to another machine
        Client(verifier="192.0.2.1:7000", cache_dir=cluster.folder / "cache").generate(PROMPT, max_tokens=4)


WRONG_APPENDS = {
    "a parent that no node can have": session_pb2.Append(first_id=1, up=[3], token=[5]),
    "an id outside the vocabulary": session_pb2.Append(first_id=1, up=[0], token=[2**31]),
    "a gap in the ids": session_pb2.Append(first_id=90, up=[0], token=[5]),
    "a base far beyond what was committed": session_pb2.Append(first_id=1, base=9_000, up=[0], token=[5]),
    "more parents than tokens": session_pb2.Append(first_id=1, up=[0, 0], token=[5]),
    "more nodes than a message may hold": session_pb2.Append(first_id=1, up=[0] * 1025, token=[5] * 1025),
}


def test_streams_that_break_the_protocol_end_alone_while_their_neighbour_stays_exact(
    cluster: Cluster, client: Client
) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.2, "seed": 3}
    whole = client.generate(PROMPT, **options).token_ids
    neighbour = client.stream(PROMPT, **options)
    assert neighbour.next()
    address = neighbour.statistics.address
    for name, append in WRONG_APPENDS.items():
        opened = open_session(cluster)
        [busy] = [one for one in (opened.primary, opened.standby) if one.address == address]
        code, words = attach(busy, opened.session_id, append)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and words, name
    opened = open_session(cluster)
    code, words = attach(opened.primary, opened.session_id, prompt=(5,) * 5000)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "5000" in words
    assert neighbour.drain().token_ids == whole
