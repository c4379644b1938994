"""Decide for all tests which of them run in one worker and in what order, and that no two files have the same name."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

HERE = Path(__file__).parent
CLUSTERS = {
    "a cluster left alone": (
        "contract/test_contract_commands.py",
        "contract/test_contract_http.py",
        "contract/test_contract_learning.py",
        "contract/test_contract_text.py",
        "docs/test_quickstart.py",
    ),
    "a cluster disturbed": ("contract/", "e2e/"),
}
"""Group -> beginnings of the paths of tests that share a cluster, so that one worker runs them all.

Two groups, since a single one took longer in its worker than all other tests in theirs. The first that fits has a file.
"""
pytest_plugins = ["cluster_fixtures"]

APART = {
    "cloud/distill/test_training.py",
    "core/test_protocol_schedules.py",
}
"""Long files whose tests share nothing expensive: each of these tests is a group by itself."""
LONG = (
    *CLUSTERS,
    "benchmarks/test_smoke.py",
    "cloud/engine/test_triton.py",
    "cloud/distill/test_training.py",
    "cloud/test_engine_host.py",
    "edge/test_http_page.py",
    "coordinator/test_release_evidence.py",
    "programs/test_interrupts.py",
    "programs/test_secrets.py",
    "edge/test_generation.py",
    "settings/test_config_check.py",
    "cloud/distill/test_distill_loop.py",
    "cloud/engine/test_engine_lossless.py",
    "cloud/engine/test_engine_starvation.py",
    "coordinator/test_coordinator_process.py",
    "core/test_protocol_mutants.py",
    "edge/test_driver.py",
    "edge/test_coordinator_client.py",
    "edge/test_command_line.py",
    "edge/test_http_fuzz.py",
    "edge/test_blocking_client.py",
    "edge/test_client_cluster.py",
    "edge/test_edge_client.py",
    "edge/test_failover.py",
    "settings/test_configuration_docs.py",
    "core/test_protocol_schedules.py",
)
"""Groups and files that take seconds of a core, the longest first; `make check` leaves them out.

Workers begin with them, so that none is left with a long one at the end; the last file, in small pieces, ends them.
"""
EARLY = ("edge/test_http_server.py", "wire/test_checks.py", "edge/test_release_state.py")
"""Quick files that wait longest, which come next for the same reason."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has jobs in the background ignore it, and the programs that tests end with Ctrl-C would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch: workers and children share the cores
if not Path("/dev/nvidiactl").exists() and "OUTRIDER_REQUIRE_VLLM" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # triton decides at its import whether it interprets

# Nothing depends on chance or on the machine's speed: the same examples at every run, except in those of the night.
hypothesis.settings.register_profile(
    "steady",
    derandomize="OUTRIDER_NIGHTLY" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")

gc.disable()  # until all is imported: that makes much and no garbage


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never traverse the objects that imports have made."""
    gc.freeze()
    gc.enable()
    os.environ.pop("TRITON_INTERPRET", None)  # for programs that tests start


def pytest_configure() -> None:
    """Refuse two files of the same name: folders of tests are no packages, so one would be imported for the other."""
    names = Counter(path.name for path in HERE.rglob("*.py") if path.name != "conftest.py")
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise pytest.UsageError(f"two files below tests/ are named {', '.join(twice)}: every file needs its own name")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, skip those of the night by day; with workers, put the long groups first."""
    for item in items:
        if (nightly := item.get_closest_marker("nightly")) and "OUTRIDER_NIGHTLY" not in os.environ:
            item.add_marker(pytest.mark.skip(reason=f"make nightly: {nightly.args[0]}"))
        if file_group(item.nodeid) in LONG:
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        first = [*LONG[:-1], *EARLY]
        places = {group: place for place, group in enumerate(first)} | {LONG[-1]: len(first) + 1}
        items.sort(key=lambda item: places.get(file_group(item.nodeid), len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker, as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = file_group(nodeid)
            return nodeid if group in APART else group

    return Groups(config, log) if config.getoption("dist") == "loadscope" else None


def file_group(nodeid: str) -> str:
    """Return the group of a test's file: its path, if it shares nothing with another file."""
    path = path_of(nodeid)
    return next((group for group, places in CLUSTERS.items() if path.startswith(places)), path)


def path_of(nodeid: str) -> str:
    """Return the path of a test's file, relative to tests/."""
    return nodeid.split("::")[0].removeprefix("tests/")
