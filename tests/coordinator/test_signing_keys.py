"""Test that only the cluster's coordinators sign tickets, whatever Redis holds, and that operators revoke keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import pytest
import redis as redis_client
from peers import revoked, until
from pydantic import SecretStr

from coordinator import cli
from coordinator.api.server import running
from coordinator.config import CoordinatorConfig
from coordinator.store import keys
from coordinator.store.keyring import CLUSTER_FILE, FILE, cluster_keys, load_or_create, make_cluster_key
from outrider.core.errors import BadRequest, NotFound, Unauthenticated
from outrider.wire.ticket import Signer
from outrider.wire.v1 import coordinator_pb2 as pb

CLUSTER, NEXT = "cluster-key-0123456789", "next-cluster-key-0123456789"


def write_to_redis(redis, signer: Signer, key_id: str | None = None) -> str:
    """Publish a public key as somebody who can write to Redis, with a proof that is made up."""
    entry = f"{key_id or signer.key_id}:{signer.public_key.hex()}"
    with redis_client.Redis.from_url(redis.url) as client:
        client.zadd(keys.PUBLIC_KEYS, {entry: 9e15})
        client.hset(keys.PUBLIC_KEY_PROOFS, entry, hashlib.sha256(entry.encode()).hexdigest())
    return signer.key_id


async def known_to_verifiers(peer) -> set[str]:
    return set((await peer.report("v1")).public_keys)


async def test_a_key_that_somebody_writes_to_redis_is_told_to_no_verifier(start, redis, caplog):
    one = await start(cluster_key=CLUSTER)
    await one.join("v1")
    strange = write_to_redis(redis, Signer.generate())
    with caplog.at_level(logging.WARNING):
        await until(lambda: said(caplog, "or has no proof by the cluster key"))
    assert await known_to_verifiers(one) == set(one.public_keys)
    assert strange not in one.public_keys
    assert caplog.text.count(strange) == 1


async def test_without_a_cluster_key_redis_is_believed(start, redis):
    one = await start()
    await one.join("v1")
    strange = write_to_redis(redis, Signer.generate())
    await until(lambda: contains(known_to_verifiers(one), strange))


async def test_a_key_does_not_take_anothers_id_and_garbage_is_skipped(start, redis):
    one = await start()
    await one.join("v1")
    write_to_redis(redis, Signer.generate(), key_id="0123456789abcdef")
    with redis_client.Redis.from_url(redis.url) as client:
        client.zadd(keys.PUBLIC_KEYS, {"no key": 9e15, "fedcba9876543210:zz": 9e15})
    real = write_to_redis(redis, Signer.generate())
    await until(lambda: contains(known_to_verifiers(one), real))
    assert await known_to_verifiers(one) == {*one.public_keys, real}


async def test_coordinators_with_one_cluster_key_know_each_other_while_it_is_replaced(start, tmp_path):
    one = await start(cluster_key=CLUSTER, state_dir=tmp_path / "1")
    two = await start(cluster_key=f"{NEXT},{CLUSTER}", state_dir=tmp_path / "2")
    three = await start(cluster_key=f"{CLUSTER},{NEXT}", state_dir=tmp_path / "3")
    four = await start(cluster_key=NEXT, state_dir=tmp_path / "4")
    await one.join("v1")
    ids = [load_or_create(tmp_path / number).key_id for number in "1234"]
    await until(lambda: contains(known_to_verifiers(two), *ids))
    await until(lambda: contains(known_to_verifiers(three), *ids))
    assert set(ids) - await known_to_verifiers(one) == {ids[1], ids[3]}
    assert set(ids) - await known_to_verifiers(four) == {ids[0], ids[2]}


async def test_a_revoked_key_ends_its_tickets_and_its_coordinator_signs_with_another(start, redis, refused, tmp_path):
    one = await start(cluster_key=CLUSTER, state_dir=tmp_path / "1")
    two = await start(cluster_key=CLUSTER, state_dir=tmp_path / "2")
    await one.join("v1")
    stolen = load_or_create(tmp_path / "2").key_id
    opened = await two.open()
    await until(lambda: contains(known_to_verifiers(one), stolen))

    answer = await one.admin.RevokeKey(pb.RevokeKeyRequest(key_id=stolen))
    assert (answer.key.key_id, answer.key.trusted, answer.key.revoked_unix > 0) == (stolen, False, True)
    report = await one.report("v1")
    assert revoked(report) == [("key_id", stolen)]
    assert stolen not in report.public_keys
    assert isinstance(await refused(one.resume(opened)), Unauthenticated)

    await until(lambda: changed(tmp_path / "2" / FILE, stolen))
    after = load_or_create(tmp_path / "2").key_id
    await until(lambda: contains(known_to_verifiers(one), after))
    two.public_keys = {after: load_or_create(tmp_path / "2").public_key}
    assert two.read((await two.open()).primary).key_id == after
    listed = {key.key_id: key for key in (await two.admin.ListKeys(pb.ListKeysRequest())).keys}
    assert listed[after].own
    assert listed[after].trusted
    assert not listed[stolen].trusted


async def test_a_coordinator_that_was_away_does_not_bring_its_revoked_key_back(start, config, tmp_path):
    one = await start(state_dir=tmp_path / "1")
    await one.join("v1")
    away = load_or_create(tmp_path / "2")
    async with running(config(state_dir=tmp_path / "2")):
        await until(lambda: contains(known_to_verifiers(one), away.key_id))
    await one.admin.RevokeKey(pb.RevokeKeyRequest(key_id=away.key_id))
    await start(state_dir=tmp_path / "2")
    assert load_or_create(tmp_path / "2").key_id != away.key_id
    assert away.key_id not in await known_to_verifiers(one)


async def test_a_key_that_nobody_has_is_not_revoked(coordinator, refused):
    for key_id, kind in (("0123456789abcdef", NotFound), ("0123456789ABCDEF", BadRequest), ("x" * 1000, BadRequest)):
        assert isinstance(await refused(coordinator.admin.RevokeKey(pb.RevokeKeyRequest(key_id=key_id))), kind)


async def test_the_command_lists_and_revokes(start, capsys, tmp_path):
    one = await start()
    own = load_or_create(tmp_path / "state").key_id

    async def outrider(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(cli.main, [*arguments, "--coordinator", one.address])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    code, out, err = await outrider("keys", "list")
    assert (code, out.splitlines()[1].split()[:3]) == (0, [own, "trusted", "yes"])
    assert "there is no cluster key" in err
    code, out, _ = await outrider("keys", "revoke", own)
    assert code == 0
    assert out.startswith(f"{own}: revoked; the tickets that it signed")
    assert (await outrider("keys", "revoke", "0" * 16))[0] == 3
    _, out, _ = await outrider("keys")
    assert {line.split()[1] for line in out.splitlines() if own in line} == {"revoked"}
    assert "trusted" in out


def test_a_cluster_key_comes_from_the_settings_or_the_state_directory(tmp_path):
    def found(**settings) -> tuple[bytes, ...]:
        return cluster_keys(CoordinatorConfig(state_dir=tmp_path, **settings))

    assert found() == ()
    path = make_cluster_key(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    made = path.read_text().strip().encode()
    assert (make_cluster_key(tmp_path), found()) == (path, (made,))
    assert found(cluster_key=SecretStr(f"{NEXT}, {CLUSTER}")) == (NEXT.encode(), CLUSTER.encode())
    with pytest.raises(BadRequest, match="OUTRIDER_COORDINATOR_CLUSTER_KEY has a key of less than 16 characters"):
        found(cluster_key=SecretStr("short"))
    (tmp_path / CLUSTER_FILE).chmod(0o640)
    with pytest.raises(BadRequest, match=r"cluster-key is accessible to other users; run: chmod 600"):
        found()


async def contains(known, *wanted: str) -> bool:
    return set(wanted) <= await known


async def said(caplog, text: str) -> bool:
    return text in caplog.text


async def changed(path, key_id: str) -> bool:
    return Signer.load(path).key_id != key_id
