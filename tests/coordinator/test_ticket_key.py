"""Test where the key that signs tickets comes from, and how one replaces another."""

from __future__ import annotations

import pytest

from coordinator.api import ticket_key
from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest, Unauthenticated
from outrider.wire.ticket import Signer


def load(folder, *keys: Signer) -> ticket_key.TicketKeys:
    """Load a file of these keys; without any, that of the state directory."""
    if not keys:
        return ticket_key.load(CoordinatorConfig(state_dir=folder))
    path = folder / "keys.pem"
    path.write_bytes(b"".join(one.pem() for one in keys))
    path.chmod(0o440)
    try:
        return ticket_key.load(CoordinatorConfig(ticket_key=path))
    finally:
        path.unlink()


def test_a_coordinator_makes_a_key_that_only_its_owner_reads_and_keeps_it(tmp_path) -> None:
    made = load(tmp_path)
    path = tmp_path / ticket_key.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(tmp_path).public_keys == made.public_keys == {made.signer.key_id: made.signer.public_key}
    assert [one.name for one in tmp_path.iterdir()] == [ticket_key.FILE]


async def test_tickets_of_every_coordinator_are_taken_while_one_key_replaces_another(start, refused, tmp_path) -> None:
    old, new = Signer.generate(), Signer.generate()

    async def coordinator(name: str, *keys: Signer):
        path = tmp_path / name
        path.write_bytes(b"".join(one.pem() for one in keys))
        path.chmod(0o600)
        return await start(ticket_key=path)

    one, two, after = await coordinator("1", old, new), await coordinator("2", new, old), await coordinator("3", new)
    assert dict((await one.join("v1")).public_keys) == dict((await two.report("v1")).public_keys)
    by_old, by_new = await one.open(), await two.open()
    for opened in (by_old, by_new):
        await one.resume(opened)
        await two.resume(opened)
    await after.resume(by_new)
    assert isinstance(await refused(after.resume(by_old)), Unauthenticated)


def test_a_file_that_others_may_read_or_that_holds_no_key_or_many_is_refused(tmp_path) -> None:
    for count in (1, 2):
        keys = [Signer.generate() for _ in range(count)]
        found = load(tmp_path, *keys)
        assert found.signer.key_id == keys[0].key_id
        assert set(found.public_keys) == {one.key_id for one in keys}
    with pytest.raises(BadRequest, match="3 keys"):
        load(tmp_path, *(Signer.generate() for _ in range(3)))
    path = tmp_path / "key"
    with pytest.raises(BadRequest, match=r"cannot be read.*openssl genpkey"):
        ticket_key.load(CoordinatorConfig(ticket_key=path))
    path.touch(mode=0o600)
    with pytest.raises(BadRequest, match="0 keys"):
        ticket_key.load(CoordinatorConfig(ticket_key=path))
    path.write_bytes(Signer.generate().pem())
    path.chmod(0o644)
    with pytest.raises(BadRequest, match="accessible to other users"):
        ticket_key.load(CoordinatorConfig(ticket_key=path))
