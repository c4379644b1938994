"""Test that the verifier reads each tenant's n-gram store from its folder, for that tenant alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine.server_draft import tenant_stores
from cloud_verifier.engine.server_draft.tenant_stores import LOOK_S, TenantStores
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.ngram import NgramModel, NgramTable

TARGET = "sha256:weights"


def write(folder: Path, tenant: str, text: list[int], *, of: str = "", target: str = TARGET) -> Path:
    table = NgramTable.build([text, text], least_sequences=2)
    path = folder / f"{tenant}.safetensors"
    NgramStore(table, target, "sha256:tokens", of or tenant, 2, 2).save(path)
    return path


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def looked(stores: TenantStores, clock: Clock, tenant: str) -> NgramTable | None:
    """Return what a session gets once the present file is read."""
    clock.now += LOOK_S
    stores.of(tenant)
    stores.wait()
    return stores.of(tenant)


def after(table: NgramTable | None, token: int) -> list[int]:
    model = NgramModel([table] if table is not None else [])
    model.extend([token])
    return model.following()[0].tolist()


def test_each_tenant_gets_its_own_store_and_no_other(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a", [1, 2])
    write(tmp_path, "b", [1, 3])
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    stores.wait()
    assert after(stores.of("a"), 1) == [2]
    assert after(stores.of("b"), 1) == [3]
    assert stores.of("c") is None and stores.of("") is None


@pytest.mark.parametrize("tenant", ["../a", "sub/a", "a\x00", "*", "a" * 65])
def test_a_name_that_is_no_tenants_leads_to_no_file(tenant: str, tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a", [1, 2])
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "a", [1, 2])
    assert looked(TenantStores(tmp_path / "sub", TARGET, 10, clock), clock, tenant) is None


def test_a_file_that_is_anothers_by_its_content_is_not_used(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a", [1, 2], of="b")
    write(tmp_path, "c", [1, 2], target="sha256:another")
    write(tmp_path, "d", [1, 99])
    (tmp_path / "e.safetensors").write_bytes(b"x" * 100)
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    assert [looked(stores, clock, tenant) for tenant in "acde"] == [None] * 4
    assert sum("is not used" in record.message for record in caplog.records) == 4
    assert looked(stores, clock, "a") is None
    assert sum("is not used" in record.message for record in caplog.records) == 4  # once for each file


def test_a_replaced_file_is_read_again_and_a_removed_one_forgotten(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path, "a", [1, 2])
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    stores.wait()
    first = stores.of("a")
    assert after(first, 1) == [2]
    write(tmp_path, "a", [1, 3])
    assert stores.of("a") is first  # until the next look
    assert after(looked(stores, clock, "a"), 1) == [3]
    same = stores.of("a")
    assert looked(stores, clock, "a") is same
    path.write_bytes(b"no store")
    assert looked(stores, clock, "a") is None
    write(tmp_path, "a", [1, 4])
    assert after(looked(stores, clock, "a"), 1) == [4]
    path.unlink()
    assert looked(stores, clock, "a") is None
    assert after(first, 1) == [2]


def test_a_file_that_is_overwritten_in_place_leaves_a_table_in_use_alone(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path, "a", [1, 2])
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    stores.wait()
    table = stores.of("a")
    os.truncate(path, 0)
    assert after(table, 1) == [2]


def test_the_stores_in_memory_are_bounded(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        write(tmp_path, f"t{number}", list(range(9)))
    one = TenantStores(tmp_path, TARGET, 10, clock)
    one.wait()
    first = one.of("t0")
    assert first is not None
    size = sum(array.nbytes for array in first.arrays().values())
    monkeypatch.setattr(tenant_stores, "MAX_BYTES", 3 * size)
    for number in range(8):
        looked(one, clock, f"t{number}")
    looked(one, clock, "t7")
    kept = [entry for entry in one._entries.values() if entry.store is not None]
    assert len(kept) <= 3
    assert looked(one, clock, "t0") is not None  # it is read again when it is asked for


def test_at_the_start_the_newest_stores_that_fit_together_are_read(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        path = write(tmp_path, f"t{number}", list(range(9)))
        os.utime(path, (number, number))
    monkeypatch.setattr(tenant_stores, "MAX_BYTES", 3 * path.stat().st_size)
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    stores.wait()
    assert list(stores._entries) == ["t3", "t4", "t5"]
    assert all(entry.store is not None for entry in stores._entries.values())
    assert stores.of("t5") is not None


def test_room_is_made_when_a_read_ends_and_not_with_the_next_question(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("a", "b"):
        write(tmp_path, tenant, list(range(9)))
    stores = TenantStores(tmp_path, TARGET, 10, clock)
    stores.wait()
    size = sum(entry.store.size for entry in stores._entries.values() if entry.store is not None)
    monkeypatch.setattr(tenant_stores, "MAX_BYTES", size)
    write(tmp_path, "c", list(range(9)))
    stores.of("c")
    stores.wait()
    kept = [entry.store.size for entry in stores._entries.values() if entry.store is not None]
    assert sum(kept) <= size and "c" in stores._entries and len(kept) == 2


def test_an_open_verifier_takes_no_stores_since_anybody_may_call_himself_a_tenant(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="server_stores needs coordinator"):
        VerifierConfig(model=tmp_path, open_to_all=True, server_stores=tmp_path)
